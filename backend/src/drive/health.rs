//! The thread that reads how GPUs are: a call of the management library may take milliseconds, and hangs as long as the
//! driver does, so nobody waits for it. It reads what is open, once a second, and ends with whoever opens GPUs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use cuda::{GpuHealth, Management, driver::Device};
use proto::Span;
use transport::Clock;

use crate::health::{Board, News};

/// How often GPUs are read.
const EVERY: Span = Span::from_millis(1_000);

/// Reads a GPU by its place on the PCI bus.
type Read = dyn FnMut(&str) -> Result<GpuHealth, String> + Send;

/// What is known of the GPUs that are open. The lock is never held while a GPU is read or the log is told.
#[derive(Debug, Clone, Default)]
pub(super) struct Readings(Arc<Mutex<Board>>);

impl Readings {
    /// Starts the thread. It is told of each GPU that is opened, and is never waited for: it may hang.
    pub(super) fn start(clock: Clock) -> std::io::Result<(Self, Sender<Device>)> {
        let mut management = None;
        let read = move |pci: &str| {
            let opened = match management.take() {
                Some(opened) => opened,
                None => Management::open()?,
            };
            let found = opened.at(pci);
            // After an error it is opened anew: the driver may be another one by then.
            management = found.is_ok().then_some(opened);
            found
        };
        Self::start_with(clock, EVERY, Box::new(read))
    }

    fn start_with(clock: Clock, every: Span, read: Box<Read>) -> std::io::Result<(Self, Sender<Device>)> {
        let readings = Self::default();
        // As many as there are GPUs, each once.
        let (sender, receiver) = unbounded();
        let shared = readings.clone();
        let thread = std::thread::Builder::new().name("gpu health".to_owned());
        thread.spawn(move || shared.run(clock, every, &receiver, read))?;
        Ok((readings, sender))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Board> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what to tell the log, which may have to wait for whoever reads it: not under the lock.
    fn handle_read(&self, clock: Clock, uuid: &str, found: Result<GpuHealth, String>) -> Vec<News> {
        let mut board = self.lock();
        board.handle_read(clock.now(), uuid, found);
        std::iter::from_fn(|| board.poll_news()).collect()
    }

    fn run(&self, clock: Clock, every: Span, opened: &Receiver<Device>, mut read: Box<Read>) {
        loop {
            let wanted = self.lock().wanted();
            for (uuid, pci) in &wanted {
                let found = read(pci);
                self.handle_read(clock, uuid, found).into_iter().for_each(tell);
            }
            // Until there is one to read, nothing is to be done.
            let told = if wanted.is_empty() {
                opened.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                opened.recv_timeout(every.to_duration())
            };
            match told {
                Ok(Device { uuid, name, pci, .. }) => self.lock().handle_opened(clock.now(), &uuid, &name, &pci),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

fn tell(news: News) {
    let listed = |by: &[cuda::Brake]| by.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match news {
        News::HeldBack { gpu, by } => {
            tracing::warn!(gpu, by = listed(&by), "clocks are held back: batches take longer than predicted");
        }
        News::Free { gpu, by, lasted } => {
            tracing::info!(gpu, by = listed(&by), %lasted, "clocks are not held back any more");
        }
        News::Damaged { gpu, errors } => tracing::warn!(
            gpu,
            errors,
            "memory has errors that could not be corrected: answers may be wrong; drain the host, and have the GPU \
             reset or replaced"
        ),
        News::Whole { gpu } => tracing::info!(gpu, "memory has no errors any more that could not be corrected"),
        News::Unread { gpu, reason } => tracing::warn!(
            gpu,
            reason,
            "its temperature, clocks and errors are not known; in a container, NVIDIA_DRIVER_CAPABILITIES needs utility"
        ),
        News::Read { gpu } => tracing::info!(gpu, "its temperature, clocks and errors are known"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossbeam_channel::bounded;

    fn device(uuid: &str) -> Device {
        Device {
            name: "NVIDIA H200".to_owned(),
            uuid: uuid.to_owned(),
            pci: "0000:3b:00.0".to_owned(),
            memory_bytes: 0,
            free_bytes: 0,
            compute_capability: (9, 0),
        }
    }

    /// It comes at once; only a defect is waited for until this ends.
    fn wait_for(readings: &Readings, line: &str) {
        let clock = Clock::start();
        let ends_at = clock.now() + Span::from_millis(60_000);
        while !readings.lock().text(clock.now()).contains(line) {
            assert!(clock.now() < ends_at, "there is no {line}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_is_opened_is_read_until_nobody_opens_anything() {
        let (asked, answers) = (unbounded::<String>(), bounded::<u32>(0));
        let read = {
            let (asked, answers) = (asked.0, answers.1);
            move |pci: &str| {
                asked.send(pci.to_owned()).unwrap();
                let degrees = answers.recv().map_err(|_| "gone".to_owned())?;
                Ok(GpuHealth { temperature_c: Some(degrees), ..GpuHealth::default() })
            }
        };
        let (readings, opened) = Readings::start_with(Clock::start(), Span(1), Box::new(read)).unwrap();
        opened.send(device("GPU-5a")).unwrap();
        assert_eq!(asked.1.recv().unwrap(), "0000:3b:00.0");
        // The read hangs, and whoever looks meanwhile does not.
        assert!(!readings.lock().text(Clock::start().now()).contains("celsius"));
        answers.0.send(41).unwrap();
        wait_for(&readings, "celsius{gpu_uuid=\"GPU-5a\"} 41\n");
        assert_eq!(asked.1.recv().unwrap(), "0000:3b:00.0");
        answers.0.send(42).unwrap();
        wait_for(&readings, "celsius{gpu_uuid=\"GPU-5a\"} 42\n");
        drop((opened, answers.0));
        while asked.1.recv().is_ok() {}
    }
}

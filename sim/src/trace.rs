//! A run as a trace for Perfetto or chrome://tracing: one row per GPU, one slice per batch, one mark per drop.

use std::{
    fs::File,
    io::{self, BufWriter},
    path::Path,
};

use proto::Timestamp;
use scheduler::perfetto::{Row, Writer, micros};
use serde_json::json;

/// Events that a trace holds; later ones are counted, not kept. Viewers do not open much larger files.
pub const EVENTS_MAX: usize = 1_000_000;

/// What happened, in the order in which it ended.
#[derive(Debug, Default)]
pub struct Trace {
    events: Vec<Event>,
    omitted: u64,
}

/// One event of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A GPU ran a batch to its end.
    Batch {
        /// The GPU.
        gpu: u32,
        /// Index of the model in the workload.
        model: u32,
        /// Tasks in it.
        size: u32,
        /// When it started.
        started_at: Timestamp,
        /// When it ended.
        finished_at: Timestamp,
    },
    /// A request was answered.
    Answer {
        /// Index of its model in the workload, or of its graph.
        model: u32,
        /// When the request had arrived.
        arrived_at: Timestamp,
        /// When it was answered.
        answered_at: Timestamp,
    },
    /// A batch was lost while it ran: it was preempted, or its GPU died. Its tasks run again, or are dropped.
    Killed {
        /// The GPU.
        gpu: u32,
        /// Index of the model in the workload.
        model: u32,
        /// Tasks in it.
        size: u32,
        /// When it started.
        started_at: Timestamp,
        /// When it was lost.
        killed_at: Timestamp,
    },
    /// A task was dropped.
    Drop {
        /// Index of the model in the workload.
        model: u32,
        /// When the request had arrived.
        arrived_at: Timestamp,
        /// When it was dropped.
        dropped_at: Timestamp,
    },
}

impl Trace {
    /// Something happened.
    pub fn push(&mut self, event: Event) {
        // It ended with its batch.
        if matches!(event, Event::Answer { .. }) {
            return;
        }
        if self.events.len() < EVENTS_MAX {
            self.events.push(event);
        } else {
            self.omitted += 1;
        }
    }

    /// What happened.
    #[must_use]
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Events that did not fit.
    #[must_use]
    pub fn omitted(&self) -> u64 {
        self.omitted
    }

    /// Writes the trace in the Trace Event Format.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, path: &Path, models: &[&str]) -> io::Result<()> {
        let mut file = Writer::begin(BufWriter::new(File::create(path)?))?;
        let gpu_of = |event: &Event| match event {
            Event::Batch { gpu, .. } | Event::Killed { gpu, .. } => *gpu as usize + 1,
            Event::Drop { .. } | Event::Answer { .. } => 0,
        };
        let gpus = self.events.iter().map(gpu_of).max().unwrap_or(0);
        let row = |row| Row { group: 0, row };
        for gpu in 0..gpus {
            file.name_row(row(gpu), &format!("GPU {gpu}"))?;
        }
        file.name_row(row(gpus), "dropped")?;
        for event in &self.events {
            let mut slice = |gpu: u32, model: u32, size: u32, ran: (Timestamp, Timestamp), note: &str| {
                let model = models[model as usize];
                let args = json!({"model": model, "batch": size});
                file.slice(row(gpu as usize), &format!("{model} x{size}{note}"), ran, args)
            };
            match *event {
                Event::Batch { gpu, model, size, started_at, finished_at } => {
                    slice(gpu, model, size, (started_at, finished_at), "")?;
                }
                Event::Killed { gpu, model, size, started_at, killed_at } => {
                    slice(gpu, model, size, (started_at, killed_at), " killed")?;
                }
                Event::Answer { .. } => {}
                Event::Drop { model, arrived_at, dropped_at } => {
                    let args = json!({"arrived_us": micros(arrived_at)});
                    file.instant(row(gpus), models[model as usize], dropped_at, args)?;
                }
            }
        }
        file.end().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_json_with_a_row_per_gpu() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut trace = Trace::default();
        trace.write(file.path(), &[]).unwrap();
        let read = || -> serde_json::Value { serde_json::from_reader(File::open(file.path()).unwrap()).unwrap() };
        assert_eq!(read()["traceEvents"].as_array().unwrap().len(), 1);
        let (arrived_at, started_at, finished_at) = (Timestamp(0), Timestamp(1_500), Timestamp(4_000));
        trace.push(Event::Batch { gpu: 1, model: 0, size: 3, started_at, finished_at });
        trace.push(Event::Drop { model: 0, arrived_at, dropped_at: finished_at });
        trace.write(file.path(), &["m"]).unwrap();
        let events = read()["traceEvents"].as_array().unwrap().clone();
        assert_eq!(events.len(), 5);
        assert_eq!((events[3]["ts"].as_f64(), events[3]["dur"].as_f64()), (Some(1.5), Some(2.5)));
        assert_eq!((&events[3]["tid"], &events[3]["name"]), (&json!(1), &json!("m x3")));
        assert_eq!((&events[4]["tid"], events[4]["ts"].as_f64()), (&json!(2), Some(4.0)));
    }
}

//! Traces in a file: a line of JSON for each, with Triton's names of a request's stages. A thread of its own writes
//! them, so that no request waits for a disk; what does not fit into its queue is lost, and counted.
#![allow(clippy::disallowed_methods)] // Drivers own threads.

use std::{
    fs::{File, OpenOptions},
    io::{self, ErrorKind, Write},
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, SyncSender, sync_channel},
};

use frontend::tasks::Timing;
use repository::Model;
use serde_json::json;

use crate::metrics::{TraceOutcome, Traces};

/// Lines that wait to be written.
const QUEUE_MAX: usize = 4_096;

/// A file of traces. Its thread ends when this is dropped.
pub struct TraceFile {
    path: PathBuf,
    queue: SyncSender<String>,
    traces: Traces,
}

/// Whether the file could be opened: it can be, or is yet to be made in a folder that is there.
///
/// # Errors
/// If not: one line.
pub(crate) fn check(path: &Path) -> Result<(), String> {
    let opened = OpenOptions::new().append(true).open(path).map(drop);
    let is_yet_to_come = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    opened.or_else(|error| if is_yet_to_come(&error) && folder.is_dir() { Ok(()) } else { Err(failed(path, &error)) })
}

fn failed(path: &Path, cause: &io::Error) -> String {
    format!("trace.file: {}: {cause}", path.display())
}

impl TraceFile {
    /// Opens the file, which keeps what it has.
    ///
    /// # Errors
    /// If it cannot be written: one line.
    pub fn open(path: &Path, traces: Traces) -> Result<Self, String> {
        let failed = |cause| failed(path, &cause);
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(failed)?;
        let (queue, waiting) = sync_channel(QUEUE_MAX);
        let of_thread = (path.to_owned(), traces.clone());
        let run = move || write_all(file, &of_thread, &waiting);
        std::thread::Builder::new().name("traces".to_owned()).spawn(run).map_err(failed)?;
        Ok(Self { path: path.to_owned(), queue, traces })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves a trace of a request that has this number, and the id that its client gave it. Instants are nanoseconds
    /// on the scheduler's clock.
    pub(crate) fn write(&self, (number, id): (u64, &str), model: &Model, timing: &Timing) {
        let stamps = &timing.stamps;
        let instants = [
            ("REQUEST_START", timing.admitted_at.0),
            ("QUEUE_START", stamps.queued_at_ns),
            ("COMPUTE_START", stamps.planned_at_ns),
            ("COMPUTE_INPUT_END", stamps.started_at_ns),
            ("COMPUTE_OUTPUT_START", stamps.finished_at_ns),
            // The outputs were pushed here, and are there when the answer is.
            ("COMPUTE_END", timing.answered_at.0),
            ("REQUEST_END", timing.answered_at.0),
        ];
        let timestamps = instants.map(|(name, ns)| json!({ "name": name, "ns": ns }));
        let (name, version) = (&model.name, &model.version);
        let line = json!({
            "id": number, "request_id": id, "model_name": name, "model_version": version, "timestamps": timestamps,
        });
        if self.queue.try_send(format!("{line}\n")).is_err() {
            self.traces.count(TraceOutcome::QueueFull, 1);
        }
    }
}

fn write_all(file: File, (path, traces): &(PathBuf, Traces), waiting: &Receiver<String>) {
    let mut lines = Lines { file, is_torn: false };
    let mut is_written = true;
    for line in waiting {
        let written = lines.append(line.as_bytes());
        if let Err(cause) = &written
            && is_written
        {
            tracing::warn!("trace.file: traces are lost: {}: {cause}", path.display());
        }
        // Told once, not with every trace.
        is_written = written.is_ok();
        traces.count(if is_written { TraceOutcome::Exported } else { TraceOutcome::CollectorFailed }, 1);
    }
}

/// What is written at the end of, and can be cut there.
trait Sheet: Write {
    /// Takes the last bytes away.
    fn cut(&mut self, bytes: u64) -> io::Result<()>;
}

impl Sheet for File {
    fn cut(&mut self, bytes: u64) -> io::Result<()> {
        let length = self.metadata()?.len();
        self.set_len(length.saturating_sub(bytes))
    }
}

/// Whole lines: a disk that is full takes a part of one, which is taken away again.
struct Lines<S> {
    file: S,
    /// The file ends with a part of a line.
    is_torn: bool,
}

impl<S: Sheet> Lines<S> {
    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        if self.is_torn {
            // At least the next one stands alone.
            self.file.write_all(b"\n")?;
            self.is_torn = false;
        }
        let mut rest = line;
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return self.give_up(line.len() - rest.len(), ErrorKind::WriteZero.into()),
                Ok(written) => rest = &rest[written..],
                Err(cause) if cause.kind() == ErrorKind::Interrupted => {}
                Err(cause) => return self.give_up(line.len() - rest.len(), cause),
            }
        }
        Ok(())
    }

    fn give_up(&mut self, written: usize, cause: io::Error) -> io::Result<()> {
        self.is_torn = written > 0 && self.file.cut(written as u64).is_err();
        Err(cause)
    }
}

#[cfg(test)]
mod tests {
    use proto::{BackendId, Timestamp, stages::AnswerStamps};
    use serde_json::Value;

    use super::*;
    use crate::{config::MetricsConfig, metrics::Metrics, testing};

    /// A disk with so much room, which may not let a file be cut.
    struct Disk {
        bytes: Vec<u8>,
        room: usize,
        can_cut: bool,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.room);
            if taken == 0 {
                return Err(ErrorKind::StorageFull.into());
            }
            self.bytes.extend_from_slice(&bytes[..taken]);
            self.room -= taken;
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Sheet for Disk {
        fn cut(&mut self, bytes: u64) -> io::Result<()> {
            if !self.can_cut {
                return Err(ErrorKind::PermissionDenied.into());
            }
            self.bytes.truncate(self.bytes.len() - bytes as usize);
            self.room += bytes as usize;
            Ok(())
        }
    }

    /// The half of a line that a full disk took once stood before the next trace, and no reader took either.
    #[test]
    fn a_full_disk_tears_no_line() {
        for (can_cut, expected) in [(true, "first\nthird\n"), (false, "first\nsec\nthird\n")] {
            let mut lines = Lines { file: Disk { bytes: Vec::new(), room: 9, can_cut }, is_torn: false };
            lines.append(b"first\n").unwrap();
            assert_eq!(lines.append(b"second\n").unwrap_err().kind(), ErrorKind::StorageFull);
            lines.file.room += 100;
            lines.append(b"third\n").unwrap();
            assert_eq!(String::from_utf8_lossy(&lines.file.bytes), expected);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("traces");
        std::fs::write(&path, "whole\nhal").unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().cut(3).unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), "whole\n");
    }

    #[test]
    fn each_trace_is_a_line_and_a_file_that_cannot_be_opened_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let traces = || Metrics::new(MetricsConfig::default()).traces().clone();
        let error = TraceFile::open(folder.path(), traces()).err().unwrap();
        assert!(error.starts_with(&format!("trace.file: {}: ", folder.path().display())), "{error}");
        let path = folder.path().join("traces");
        let file = TraceFile::open(&path, traces()).unwrap();
        let timing = Timing {
            admitted_at: Timestamp(1),
            deadline: Timestamp::NEVER,
            stamps: AnswerStamps {
                queued_at_ns: 2,
                planned_at_ns: 3,
                started_at_ns: 4,
                finished_at_ns: 5,
                ..Default::default()
            },
            answered_at: Timestamp(6),
            batch_size: 1,
            backend: BackendId(0),
            gpu: 0,
        };
        let model = testing::model("m", vec![], vec![]);
        for number in [7, 8] {
            file.write((number, "a \"b\""), &model, &timing);
        }
        let lines = || std::fs::read_to_string(&path).unwrap();
        while lines().matches('\n').count() < 2 {
            std::thread::yield_now();
        }
        let told: Vec<Value> = lines().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((&told[0]["id"], &told[1]["id"], &told[1]["request_id"]), (&json!(7), &json!(8), &json!("a \"b\"")));
        let stages = told[0]["timestamps"].as_array().unwrap().iter();
        let stages: Vec<_> = stages.map(|at| (at["name"].as_str().unwrap(), at["ns"].as_i64().unwrap())).collect();
        let of_triton = [
            ("REQUEST_START", 1),
            ("QUEUE_START", 2),
            ("COMPUTE_START", 3),
            ("COMPUTE_INPUT_END", 4),
            ("COMPUTE_OUTPUT_START", 5),
            ("COMPUTE_END", 6),
            ("REQUEST_END", 6),
        ];
        assert_eq!((&stages[..], &told[0]["model_name"]), (&of_triton[..], &json!("m")));
    }
}

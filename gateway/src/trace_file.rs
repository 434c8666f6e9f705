//! Traces in a file: a line of JSON for each, with Triton's names of a request's stages. A thread of its own writes
//! them, so that no request waits for a disk; what does not fit into its queue is lost, and counted.
#![allow(clippy::disallowed_methods)] // Drivers own threads.

use std::{
    fs::{File, OpenOptions},
    io::Write as _,
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

impl TraceFile {
    /// Opens the file, which keeps what it has.
    ///
    /// # Errors
    /// If it cannot be written: one line.
    pub fn open(path: &Path, traces: Traces) -> Result<Self, String> {
        let failed = |cause| format!("trace.file: {}: {cause}", path.display());
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

fn write_all(mut file: File, (path, traces): &(PathBuf, Traces), waiting: &Receiver<String>) {
    let mut is_written = true;
    for line in waiting {
        let written = file.write_all(line.as_bytes());
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

#[cfg(test)]
mod tests {
    use proto::{BackendId, Timestamp, stages::AnswerStamps};
    use serde_json::Value;

    use super::*;
    use crate::{config::MetricsConfig, metrics::Metrics, testing};

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

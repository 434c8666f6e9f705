//! A model that is a program of its own.

use std::path::PathBuf;

use proto::Span;

/// A program that runs a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// How it is started.
    pub launch: Launch,
    /// The model's folder, in which it runs.
    pub folder: PathBuf,
    /// `instance_group`: processes of it that a backend had best have; at least 1.
    pub instances: usize,
    /// What it may use of the host.
    pub limits: ProgramLimits,
    /// Whether it may ask other models while it runs a batch, which it does off the turn of every GPU.
    pub calls: bool,
    /// `parameters: samples`: whether batches that no client has sent may run, by which its latencies are measured.
    pub samples: bool,
}

/// How a program is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Launch {
    /// A model in Python (`backend: "python"`): a `TritonPythonModel`, or a `downbeat.Model`.
    Python {
        /// `parameters: python`.
        interpreter: String,
        /// The model's file.
        file: PathBuf,
    },
    /// It speaks the protocol itself (`backend: "process"`, `parameters: program`): its words, at least one.
    Program(Vec<String>),
}

/// What a program may use of the host; each a parameter of its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgramLimits {
    /// `memory_mb`: addresses of each of its processes.
    pub memory_bytes: u64,
    /// `files_max`: open files of each of its processes.
    pub files: u64,
    /// `processes_max`: processes and threads, where the kernel counts them for the program alone.
    pub processes: u64,
    /// `network`: whether it may use the host's network.
    pub network: bool,
    /// `start_timeout_ms`: how long it may take until it is ready.
    pub start: Span,
}

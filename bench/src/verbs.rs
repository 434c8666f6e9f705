//! `downbeat bench verbs`: what one RDMA operation costs and how many bytes a second many of them move, beside a raw
//! UDP socket and a TCP socket that move the same objects.
//!
//! A pair of threads plays the two ends of every contestant in turn, in many small rounds: what else runs on the
//! machine then slows all of them alike, and their ratios hold. An arm is added by implementing `measure::Initiator`
//! and `measure::Target`.

mod device;
mod exchange;
mod measure;
mod soft;

use clap::Args as ClapArgs;
use cli::{CommandError, positive};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use soft_roce::udp::Faults;
use thiserror::Error;
use transport::{ArmName, LocalPath};

use measure::Schedule;
pub use measure::{Figures, Op};

/// The largest object: what RDMA cards take as one message.
const BYTES_MAX: f64 = 8.0 * 1024.0 * 1024.0;
const ITERS_MAX: f64 = 1e8;
/// Objects under way in the bandwidth pass, each with memory of its own, take at most so much of it, for it to stay in
/// caches,
const IN_FLIGHT_BYTES: usize = 1024 * 1024;
/// and are at most so many.
const IN_FLIGHT_MAX: usize = 64;

/// Measure RDMA operations within this host beside raw UDP and TCP sockets.
#[derive(Debug, ClapArgs)]
pub struct Args {
    /// The network: `soft` is soft-RoCE over UDP, on any machine; `verbs:DEVICE` an RDMA device of this host.
    #[arg(long, default_value = "soft")]
    pub arm: ArmName,
    /// How packets go with the arm `soft`: `ring`, through memory that both ends map, with UDP beside it; or `udp`.
    #[arg(long, default_value_t)]
    pub path: LocalPath,
    /// The operation.
    #[arg(long)]
    pub op: Op,
    /// Bytes of one object.
    #[arg(long)]
    pub bytes: u32,
    /// Operations of the latency pass, and again of the bandwidth pass.
    #[arg(long)]
    pub iters: u64,
    /// Inject faults into the soft arm's UDP, such as loss=0.01; it is then also measured without them.
    #[arg(long)]
    pub fault: Option<Faults>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// Why nothing was measured.
#[derive(Debug, Error)]
pub enum VerbsError {
    /// A flag's value.
    #[error(transparent)]
    Flag(#[from] CommandError),
    /// A socket or a device.
    #[error("{who}: {cause}")]
    Contestant {
        /// Of whom.
        who: &'static str,
        /// One line.
        cause: String,
    },
}

/// The result.
#[derive(Debug, Clone, Serialize)]
pub struct Verbs {
    /// As on the command line.
    pub arm: String,
    /// Of the arm `soft`: how packets went.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<LocalPath>,
    /// As on the command line.
    pub op: Op,
    /// Of one object.
    pub bytes: u32,
    /// Of each pass.
    pub iters: u64,
    /// The arm's.
    #[serde(flatten)]
    pub figures: Figures,
    /// One socket pair that asks and answers with the same objects, without any protocol.
    pub raw_udp: Figures,
    /// The same over TCP.
    pub raw_tcp: Figures,
    /// With `--fault`: the arm without faults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub without_fault: Option<Figures>,
    /// Beside rings: the same arm over UDP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub over_udp: Option<Figures>,
}

/// Runs the command and prints its result on stdout, its progress on stderr.
///
/// # Errors
/// On bad input, or if an address or device cannot be used (exit code 2).
pub fn run(args: &Args) -> Result<(), VerbsError> {
    positive("--bytes", args.bytes.into(), BYTES_MAX)?;
    positive("--iters", args.iters as f64, ITERS_MAX)?;
    let result = measure(args)?;
    if args.json {
        println!("{}", serde_json::to_string(&result).expect("plain data"));
    } else {
        println!("{}", result.table());
    }
    Ok(())
}

fn measure(args: &Args) -> Result<Verbs, VerbsError> {
    let faults = args.fault.unwrap_or_default();
    let window = (IN_FLIGHT_BYTES / args.bytes as usize).clamp(1, IN_FLIGHT_MAX);
    let of = |who| move |cause| VerbsError::Contestant { who, cause };
    let udp = |faults| soft::open(args.op, args.bytes, window, faults).map_err(of("--arm soft"));
    // Faults are UDP's.
    let path = (args.arm == ArmName::Soft).then_some(if faults.any() { LocalPath::Udp } else { args.path });
    let first = match path {
        Some(LocalPath::Udp) => udp(faults)?,
        Some(LocalPath::Ring) | None => {
            let name = if path.is_some() { "--arm soft" } else { "--arm verbs" };
            device::open(&args.arm, args.op, args.bytes, window, faults).map_err(of(name))?
        }
    };
    let mut contestants = vec![
        first,
        exchange::open_udp(args.op, args.bytes).map_err(of("raw UDP"))?,
        exchange::open_tcp(args.op, args.bytes, window).map_err(of("raw TCP"))?,
    ];
    let has_other = faults.any() || path == Some(LocalPath::Ring);
    if has_other {
        contestants.push(udp(Faults::default())?);
    }
    let schedule = Schedule { iters: args.iters, bytes: args.bytes, window, crossings: args.op.crossings() };
    let bar = ProgressBar::new(schedule.rounds());
    let style = ProgressStyle::with_template("measuring [{bar:40}] {percent} %");
    bar.set_style(style.expect("a constant template").progress_chars("=> "));
    let figures = measure::run(&schedule, contestants, |round| bar.set_position(round));
    bar.finish_and_clear();
    let figures = figures.map_err(|(who, cause)| VerbsError::Contestant { who, cause })?;
    Ok(Verbs {
        arm: args.arm.to_string(),
        path,
        op: args.op,
        bytes: args.bytes,
        iters: args.iters,
        figures: figures[0],
        raw_udp: figures[1],
        raw_tcp: figures[2],
        without_fault: figures.get(3).copied().filter(|_| faults.any()),
        over_udp: figures.get(3).copied().filter(|_| !faults.any()),
    })
}

impl Verbs {
    /// A table for people, with perftest's columns.
    #[must_use]
    pub fn table(&self) -> String {
        let row = |cells: [String; 9]| {
            let [name, numbers @ ..] = cells;
            numbers.iter().fold(format!("{name:<14}"), |line, number| format!("{line}{number:>14}"))
        };
        let mut lines = vec![row([
            "",
            "#bytes",
            "#iterations",
            "t_p50[usec]",
            "t_p99[usec]",
            "t_p99.9[usec]",
            "t_max[usec]",
            "BW[Gb/sec]",
            "MsgRate[Mpps]",
        ]
        .map(str::to_owned))];
        let path = self.path.map_or(String::new(), |path| format!(", {path}"));
        let faulty = if self.without_fault.is_some() { ", faults" } else { "" };
        let rows = [
            (format!("{}{path}{faulty}", self.arm), Some(self.figures)),
            (self.arm.clone(), self.without_fault),
            (format!("{}, udp", self.arm), self.over_udp),
            ("raw UDP".to_owned(), Some(self.raw_udp)),
            ("raw TCP".to_owned(), Some(self.raw_tcp)),
        ];
        for (name, figures) in rows {
            let Some(Figures { latency_us, gbps }) = figures else { continue };
            lines.push(row([
                name,
                self.bytes.to_string(),
                self.iters.to_string(),
                format!("{:.2}", latency_us.p50),
                format!("{:.2}", latency_us.p99),
                format!("{:.2}", latency_us.p999),
                format!("{:.2}", latency_us.max),
                format!("{gbps:.3}"),
                format!("{:.4}", gbps * 1e3 / 8.0 / f64::from(self.bytes)),
            ]));
        }
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests;

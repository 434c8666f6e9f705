//! `doctor`: what this host offers to downbeat, and what to change.
//!
//! One finding a line, each with its remedy. What stops downbeat from working on the arm asked for makes the exit code
//! 1; advice does not. The checks read files below a root and values that are handed to them, so that a test can hand
//! them any host; only [`run`] looks at this one. Nothing is ever changed: `--fix-script` prints commands.

mod compute;
mod direct;
mod finding;
mod gpu;
mod host;
mod network;
mod onnxruntime;
mod rdma;

use std::{io::Write, net::IpAddr};

use anyhow::Result;
use serde::Serialize;
use transport::{ArmName, Release};

use gpu::Gpus;
use host::{Host, Limits};

use crate::doctor::finding::{Finding, Level};

/// Arguments of `doctor`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The arm that shall work: soft, verbs:auto or verbs:DEV
    #[arg(long, default_value = "soft")]
    arm: ArmName,
    /// The address that peers will reach this host at, which decides the GID of an RDMA device
    #[arg(long)]
    address: Option<IpAddr>,
    /// One JSON object on stdout
    #[arg(long)]
    json: bool,
    /// Print the commands that mend what was found, and nothing else; they are never run
    #[arg(long, conflicts_with = "json")]
    fix_script: bool,
}

/// The whole report as `--json` prints it.
#[derive(Debug, Serialize)]
struct Report {
    arm: String,
    works: bool,
    findings: Vec<Finding>,
}

/// Looks at this host and prints what it found. True if downbeat can work here.
///
/// # Errors
/// A bad argument.
pub(crate) fn run(args: &Args) -> Result<bool> {
    let mut findings = examine(&Host::here(), &Limits::here(), &Gpus::here(), (&args.arm, args.address));
    findings.insert(0, release());
    findings.push(onnxruntime::here());
    let works = findings.iter().all(|finding| finding.level != Level::Stop);
    let text = if args.fix_script {
        script(&findings)
    } else if args.json {
        serde_json::to_string(&Report { arm: args.arm.to_string(), works, findings })? + "\n"
    } else {
        lines(&args.arm, works, &findings)
    };
    // A reader that has seen enough (`| head`) is no error.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(works)
}

fn lines(arm: &ArmName, works: bool, findings: &[Finding]) -> String {
    let mut text: String = findings.iter().map(|finding| format!("{finding}\n")).collect();
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let verdict = if works { "works".to_owned() } else { format!("cannot work ({} found)", count(Level::Stop)) };
    text += &format!("the {arm} arm {verdict} here; advice: {}\n", count(Level::Advice));
    text
}

/// Every check, in the order of the way of a packet: device, socket, memory, processor, GPU.
fn examine(host: &Host, limits: &Limits, gpus: &Gpus, (wanted, address): (&ArmName, Option<IpAddr>)) -> Vec<Finding> {
    let devices = rdma::devices(host);
    let mut findings = rdma::check(host, &devices, wanted, address);
    findings.push(rdma::memlock(host, &devices, limits, wanted));
    findings.extend(network::soft_arm(wanted, limits.soft_arm.as_ref()));
    findings.extend(network::socket_buffers(host));
    findings.extend(network::open_files(limits));
    findings.extend(compute::check(host, limits, &devices));
    findings.extend(gpu::check(host, gpus, &devices));
    findings
}

/// Which release this is. What the host offers is another's to tell, but members must have the same wire.
fn release() -> Finding {
    let Release { name, wire } = Release::this();
    Finding::ok("release", format!("{name}, wire {wire}: every member of a cluster must have this wire"))
}

/// The commands of all findings as a script for root.
fn script(findings: &[Finding]) -> String {
    let mut text = String::from(
        "#!/bin/sh\n# Printed by `downbeat doctor --fix-script`. Read it, then run it as root.\nset -eu\n",
    );
    for finding in findings.iter().filter(|finding| !finding.commands.is_empty()) {
        text += &format!("\n# {}: {}\n{}\n", finding.subject, finding.found, finding.commands.join("\n"));
    }
    text
}

#[cfg(test)]
mod tests;

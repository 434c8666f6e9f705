//! `bench fabric`: the whole way of a request without HTTP. Schedulers, frontends and backends run as processes of
//! their own; each frontend's process links it as a library and generates load beside it, on another thread. GPUs are
//! emulated, and so fast that the path is what limits; every answer is checked.
//!
//! Starts the processes, tells frontends when to send, and watches what processor time each role takes meanwhile.

mod generate;
mod processor_time;
mod report;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    num::NonZero,
    path::Path,
    process::{ChildStdin, ChildStdout},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use frontend::Client;
use scheduler::Policy;
use serde::{Deserialize, Serialize};

use super::{
    cluster::{self, BackendLayout, FRONTEND_HOSTS, Layout, READY_TIMEOUT, Wiring},
    demo::Failed,
    supervisor::{Casualty, DRAIN_TIMEOUT, Incident, Logs, Restarts, Supervisor, private_folder},
};
use crate::role;
use generate::generate;
use load::progress_bar;
use processor_time::ProcessorTime;
use report::{CpuNs, Fabric, INPUT, Load, Tally};

pub(super) use report::Args;

/// Emulated GPUs take so long for a batch, whatever its size: short enough that one takes millions of tasks a second,
/// long enough that its plans do not pile up at the backend.
const BATCH_MS: f64 = 0.05;
/// And for each task; above zero, as l(b) must grow.
const TASK_MS: f64 = 0.0001;
/// A frontend's slots take up less than so many times their inputs, and less than so many bytes more.
const ARENA_FACTOR: usize = 2;
const ARENA_BYTES_PER_TASK: usize = 1024;
/// How long idle threads are watched at most.
const IDLE_MAX: Duration = Duration::from_secs(5);
/// How often members are looked at.
const POLL: Duration = Duration::from_millis(20);

/// The file of the process of one frontend.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FrontendFile {
    frontend: gateway::Config,
    load: Load,
}

/// Runs the benchmark and prints its result on stdout.
pub(super) fn run(args: &Args) -> Result<()> {
    args.check()?;
    Policy::of_cluster(&args.policy).context("--policy")?;
    let mut members = Members::start(args)?;
    let (tally, cpu) = members.measure(args).map_err(|error| Failed::new(&error))?;
    // Nothing may run beside the idle threads.
    drop(members);
    let cores = thread::available_parallelism().map_or(1, NonZero::get) as u32;
    let idle = bench::stalls::measure(cores, Duration::from_secs_f64(args.seconds).min(IDLE_MAX));
    let fabric = Fabric::new(args, tally, cpu, idle);
    if args.json {
        println!("{}", serde_json::to_string(&fabric).expect("plain data"));
    } else {
        print!("{}", fabric.text());
    }
    if fabric.tasks_wrong > 0 {
        return Err(Failed::new(&anyhow!("{} answers were wrong", fabric.tasks_wrong)).into());
    }
    Ok(())
}

/// The process of one frontend: joins, says so on stdout, sends its load when it is told to on stdin, and writes what
/// came of it on stdout.
pub(super) fn run_frontend(args: &role::Args) -> Result<()> {
    let (_, _log) = role::init_logging(args);
    let FrontendFile { frontend, load } = args.start()?;
    let client = Client::start(frontend.frontend()?)?;
    wait_until_ready(&client, &load.models)?;
    println!("ready");
    let mut go = String::new();
    std::io::stdin().read_line(&mut go).context("cannot wait for the start")?;
    let tally = generate(&client, &load).context("cannot generate load")?;
    println!("{}", serde_json::to_string(&tally).expect("plain data"));
    Ok(())
}

#[allow(clippy::disallowed_methods, reason = "waits for other processes, in real time")]
fn wait_until_ready(client: &Client, models: &[String]) -> Result<()> {
    let started = Instant::now();
    for model in models {
        while !client.is_ready_blocking(model)? {
            anyhow::ensure!(
                started.elapsed() < READY_TIMEOUT,
                "{model} is not ready after {} s",
                READY_TIMEOUT.as_secs()
            );
            thread::sleep(POLL);
        }
    }
    Ok(())
}

/// One model of the cluster.
fn write_model(repository: &Path, name: &str, args: &Args) -> Result<()> {
    let folder = repository.join(name);
    let Args { bytes, slo_ms, .. } = args;
    let batch_max = proto::LatencyProfile::MAX_BATCH;
    let text = format!(
        r#"name: "{name}"
backend: "emulated"
max_batch_size: {batch_max}
input [ {{ name: "{INPUT}" data_type: TYPE_UINT8 dims: [ {bytes} ] }} ]
output [ {{ name: "digest" data_type: TYPE_UINT64 dims: [ 2 ] }} ]
parameters {{ key: "slo_ms" value: {{ string_value: "{slo_ms}" }} }}
parameters {{ key: "alpha_ms" value: {{ string_value: "{TASK_MS}" }} }}
parameters {{ key: "beta_ms" value: {{ string_value: "{BATCH_MS}" }} }}
"#
    );
    let write = || {
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("config.pbtxt"), text)
    };
    write().with_context(|| format!("cannot write {}", folder.display()))
}

/// All processes.
struct Members {
    supervisor: Supervisor,
    /// One for each frontend.
    pipes: Vec<(ChildStdin, BufReader<ChildStdout>)>,
}

impl Members {
    fn start(args: &Args) -> Result<Self> {
        let folder = private_folder()?;
        let repository = folder.path().join("models");
        args.model_names().iter().try_for_each(|name| write_model(&repository, name, args))?;
        let backend = BackendLayout::new(args.gpus, args.model_names());
        let layout = Layout {
            repository: Some(repository),
            schedulers: args.schedulers,
            policy: args.policy.clone(),
            // What loopback takes. A budget that is larger than l(b) by far would let plans pile up at the backends.
            network: scheduler::config::Network { data_us_per_request: 1.0, ..scheduler::config::Network::default() },
            arm: args.arm.clone(),
            local_path: args.path,
            backend: vec![backend; args.backends],
            ..Layout::default()
        };
        let wiring = Wiring::random();
        cluster::try_arm(&layout, &wiring)?;
        let supervisor = Supervisor::new(folder, (Logs::Files, Restarts::Killed), DRAIN_TIMEOUT)?;
        for index in 0..layout.schedulers {
            supervisor.start(&["scheduler"], &layout.scheduler_name(index), &wiring.scheduler(&layout, index))?;
        }
        for index in 0..args.backends {
            supervisor.start(&["backend"], &format!("backend-{index}"), &wiring.backend(&layout, index))?;
        }
        let pipes = (0..args.frontends).map(|index| {
            let mut frontend =
                wiring.silent_frontend(&layout, &format!("frontend-{index}"), FRONTEND_HOSTS + index as u8);
            let arena_bytes =
                ARENA_FACTOR * args.input_bytes() + ARENA_BYTES_PER_TASK * args.input_bytes() / args.bytes;
            frontend.arena_bytes = Some(arena_bytes.max(frontend::arena::ARENA_BYTES_MIN));
            let file = cluster::to_toml(&FrontendFile { frontend: frontend.into(), load: args.load(index) });
            supervisor.start_and_talk(&["bench", "fabric-frontend"], &format!("frontend-{index}"), &file)
        });
        let pipes = pipes.collect::<Result<Vec<_>>>()?;
        let pipes = pipes.into_iter().map(|(input, output)| (input, BufReader::new(output))).collect();
        Ok(Self { supervisor, pipes })
    }

    /// Sends the load; yields what came of it and the processor time of the measured span, in nanoseconds.
    #[allow(clippy::disallowed_methods, reason = "watches other processes, in real time")]
    fn measure(&mut self, args: &Args) -> Result<(Tally, CpuNs)> {
        for index in 0..self.pipes.len() {
            let said = self.hear(index)?;
            anyhow::ensure!(said == "ready", "frontend-{index} said `{said}`, expected `ready`");
        }
        for (input, _) in &mut self.pipes {
            input.write_all(b"go\n").context("a frontend cannot be told to start")?;
        }
        let started = Instant::now();
        let Load { warm_up, seconds, .. } = args.load(0);
        let (from, until) = (Duration::from_secs_f64(warm_up), Duration::from_secs_f64(warm_up + seconds));
        let bar = progress_bar("fabric");
        let wait_until = |at: Duration| -> Result<()> {
            while let Some(left) = at.checked_sub(started.elapsed()).filter(|left| !left.is_zero()) {
                self.check()?;
                bar.set_position((started.elapsed().as_secs_f64() / until.as_secs_f64() * 1000.0) as u64);
                thread::sleep(left.min(POLL));
            }
            Ok(())
        };
        wait_until(from)?;
        let before = self.processor_times();
        wait_until(until)?;
        let after = self.processor_times();
        bar.finish_and_clear();
        let mut tally = Tally::default();
        for index in 0..self.pipes.len() {
            let said = self.hear(index)?;
            tally.add(serde_json::from_str(&said).with_context(|| format!("frontend-{index} said `{said}`"))?);
        }
        self.check()?;
        Ok((tally, cpu(&before, &after)))
    }

    /// The next line that a frontend says.
    fn hear(&mut self, index: usize) -> Result<String> {
        let mut line = String::new();
        if self.pipes[index].1.read_line(&mut line).unwrap_or(0) == 0 {
            self.check()?;
            bail!("frontend-{index} closed its output");
        }
        Ok(line.trim_end().to_owned())
    }

    /// An error if a member ended by itself, save a frontend that did what it was told.
    fn check(&self) -> Result<()> {
        let fallen = self.supervisor.tend().into_iter().find_map(|incident| match incident {
            Incident::Fell(fallen) if !fallen.end.is_success() => Some(fallen),
            Incident::Fell(_) | Incident::Restarted { .. } => None,
        });
        match fallen {
            Some(Casualty { name, end, last_words, .. }) => bail!("{name} {end}; {last_words}"),
            None => Ok(()),
        }
    }

    fn processor_times(&self) -> Vec<(String, Option<ProcessorTime>)> {
        let processes = self.supervisor.process_ids().into_iter();
        processes.map(|(name, process)| (name, ProcessorTime::of(process))).collect()
    }
}

/// What each role used between two looks, in nanoseconds; not of one of which a process, or a thread, was there at the
/// first only.
fn cpu(before: &[(String, Option<ProcessorTime>)], after: &[(String, Option<ProcessorTime>)]) -> CpuNs {
    let sum = |role: &str, part: fn(&ProcessorTime) -> u64| {
        // A frontend that is done, on a machine that is busy, has ended before it was looked at again, or its threads
        // have: they took their time with them.
        let used = before.iter().filter(|(name, _)| name.starts_with(role)).map(|(name, before)| {
            let (_, after) = after.iter().find(|(other, _)| other == name)?;
            part(after.as_ref()?).checked_sub(part(before.as_ref()?)).map(|ns| ns as f64)
        });
        used.sum::<Option<f64>>()
    };
    let whole = |time: &ProcessorTime| time.first_thread_ns + time.other_threads_ns;
    CpuNs {
        scheduler: sum("scheduler", whole),
        // A frontend's process generates load on its first thread.
        frontend: sum("frontend", |time| time.other_threads_ns),
        backend: sum("backend", whole),
        load: sum("frontend", |time| time.first_thread_ns),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_took_its_time_with_it_leaves_its_role_unknown() {
        let look = |first_thread_ns, other_threads_ns| {
            let time = ProcessorTime { first_thread_ns, other_threads_ns };
            vec![("frontend-0".to_owned(), Some(time)), ("scheduler-0".to_owned(), Some(time))]
        };
        let found = cpu(&look(5, 7), &look(9, 0));
        assert_eq!((found.load, found.frontend, found.scheduler), (Some(4.0), None, None));
        let found = cpu(&look(5, 7), &look(9, 8));
        assert_eq!((found.load, found.frontend, found.scheduler), (Some(4.0), Some(1.0), Some(5.0)));
        assert_eq!(cpu(&look(5, 7), &[]).load, None);
    }
}

//! The driver: a thread that asks the schedulers, and steps that are taken by the supervisor.
#![allow(clippy::disallowed_methods)] // Has a thread and a clock, and waits in real time.

use std::{
    sync::mpsc::{Receiver, sync_channel},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use scheduler::status::{BackendRow, ClusterPage};
use transport::Clock;

use super::{Autoscaler, Look, Range, Step};
use crate::{
    notices, page, status,
    tools::supervisor::{Casualty, Supervisor},
};

/// Between two questions; the scheduler works its advice out once a second.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// What a scheduler has left for so long is of one that stands still.
const AGE_MS_MAX: f64 = 2_000.0;

/// Follows the advice. Whoever has it calls [`Self::tend`] from the thread that started the members.
pub(in crate::tools) struct Drive {
    core: Autoscaler,
    clock: Clock,
    looks: Receiver<Option<Look>>,
    /// Why there are as many as there are, as far as the last look told.
    reason: String,
}

/// What a backend is called.
pub(in crate::tools) fn name(place: usize) -> String {
    format!("{PREFIX}{place}")
}

const PREFIX: &str = "backend-";

/// Which backend that is, if it is one.
pub(in crate::tools) fn place_of(name: &str) -> Option<usize> {
    name.strip_prefix(PREFIX)?.parse().ok()
}

impl Drive {
    /// Asks these schedulers (their `admin.http`) from now on. As many backends as there are at least run already.
    pub(in crate::tools) fn start(range: Range, schedulers: Vec<String>) -> Result<Self> {
        let (sender, looks) = sync_channel(1);
        let body = move || {
            // Nobody waits for this thread, whatever becomes of whom it asks.
            while sender.send(status::ask_all(&schedulers, page::decoded).ok().and_then(look)).is_ok() {
                thread::sleep(LOOK_EVERY);
            }
        };
        let started = thread::Builder::new().name("advice".to_owned()).spawn(body);
        started.context("no thread can be started that asks for the advice")?;
        Ok(Self { core: Autoscaler::new(range), clock: Clock::start(), looks, reason: String::new() })
    }

    /// Takes note of members that have ended for good, and does what the last look asks for. `file` writes the file of
    /// a backend.
    pub(in crate::tools) fn tend(
        &mut self,
        supervisor: &Supervisor,
        ended: &[Casualty],
        file: impl Fn(usize) -> String,
    ) {
        for member in ended {
            if let Some(place) = place_of(&member.name) {
                self.note_end(place, member.end.is_success());
            }
        }
        while let Ok(look) = self.looks.try_recv() {
            let step = self.core.handle_look(self.clock.now(), look.as_ref());
            self.reason = look.map(|look| look.told()).unwrap_or_default();
            if let Some(step) = step {
                self.take(step, supervisor, &file);
            }
        }
    }

    fn note_end(&mut self, place: usize, is_in_order: bool) {
        let pause = self.core.handle_end(self.clock.now(), place, is_in_order);
        let (name, here) = (name(place), self.core.here());
        match pause {
            None => notices::tell_whoever_reads(&format!("autoscale: {name} has left; GPUs here: {here}")),
            Some(pause) => {
                notices::warn(&format!("autoscale: {name} could not be had; no other one is started for {pause}"));
            }
        }
    }

    fn take(&mut self, step: Step, supervisor: &Supervisor, file: impl Fn(usize) -> String) {
        let (here, reason) = (self.core.here(), &self.reason);
        match step {
            Step::Start(place) => {
                let name = name(place);
                let before = here - 1;
                notices::tell_whoever_reads(&format!("autoscale: {name} starts: GPUs here: {before}, {reason}"));
                match supervisor.start(&["backend"], &name, &file(place)) {
                    Ok(process) => notices::tell_whoever_reads(&format!("{name}: process {process}")),
                    Err(error) => {
                        notices::warn(&format!("{error:#}"));
                        self.note_end(place, false);
                    }
                }
            }
            Step::End(place) => {
                let (name, before) = (name(place), here + 1);
                notices::tell_whoever_reads(&format!("autoscale: {name} leaves: GPUs here: {before}, {reason}"));
                // One that waits to be started again has ended.
                if !supervisor.end(&name) {
                    self.note_end(place, true);
                }
            }
            Step::Kill(place) => {
                notices::warn(&format!("autoscale: {} was told to end and is still there; it is killed", name(place)));
                supervisor.kill(&name(place));
            }
            Step::TellLate(place) => {
                notices::warn(&format!("autoscale: {} does not serve yet; it is not waited for", name(place)));
            }
        }
    }
}

impl Look {
    fn told(&self) -> String {
        let needed = self.needed.map_or_else(|| "?".to_owned(), |needed| needed.to_string());
        format!("needed: {needed}, {}", self.reason)
    }
}

/// What the page of a primary that is alive tells.
fn look(cluster: ClusterPage) -> Option<Look> {
    if !cluster.is_primary || cluster.age_ms > AGE_MS_MAX {
        return None;
    }
    let serves = |row: &BackendRow| row.state == "serving" && row.gpus.iter().any(|gpu| gpu.state == "serving");
    let serving = cluster.backends.iter().filter(|row| serves(row)).filter_map(|row| place_of(&row.name)).collect();
    Some(Look { needed: cluster.advice.gpus_needed, reason: cluster.advice.reason, serving })
}

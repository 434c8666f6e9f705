//! The last seconds of all GPUs as a file for ui.perfetto.dev: `GET /debug/trace?seconds=5` at a scheduler's
//! `[admin] http`. It is made of what ModelThreads have left in the [`History`], on the listener's thread.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    io,
};

use admin::Query;
use proto::{BackendId, ModelId, Span, Timestamp};
use serde_json::{Value, json};

use crate::{
    history::{Dropped, Event, History, KEPT, Lane},
    perfetto::{Row, Writer, micros},
    snapshot::{Board, ModelName},
};

/// Where it is told.
pub const PATH: &str = "/debug/trace";
/// If the query does not say it.
const SECONDS: usize = 5;
const SECONDS_MAX: usize = (KEPT.as_nanos() / 1_000_000_000) as usize;
/// Batches, loads and dropped tasks of one file, some 250 bytes each; the newest are told.
const EVENTS_MAX: usize = 50_000;
/// Where dropped tasks are. A backend's group comes behind it.
const DROPPED: Row = Row { group: 0, row: 0 };

/// Tells of the last seconds.
pub struct Trace {
    history: History,
    board: Board,
    models: RefCell<Vec<ModelName>>,
}

/// Backends' and models' names as they are known.
struct Names<'a> {
    backends: BTreeMap<u32, String>,
    models: &'a [ModelName],
}

impl Names<'_> {
    fn model(&self, ModelId(model): ModelId) -> String {
        match self.models.get(model as usize) {
            Some((name, version)) if version == "1" => name.clone(),
            Some((name, version)) => format!("{name} version {version}"),
            None => format!("model {model}"),
        }
    }

    fn backend(&self, BackendId(backend): BackendId) -> String {
        self.backends.get(&backend).map_or_else(|| format!("backend {backend}"), |name| format!("backend {name}"))
    }
}

impl Trace {
    /// Of what is left there; the board has the names.
    #[must_use]
    pub fn new(history: History, board: Board) -> Self {
        Self { history, board, models: RefCell::default() }
    }

    /// The file of the last `seconds` of the query; `now` is on the scheduler's clock.
    ///
    /// # Errors
    /// One line that says what was found and expected.
    pub fn page(&self, now: Timestamp, query: &str) -> Result<String, String> {
        let seconds = Query::of(query).number("seconds", 1..=SECONDS_MAX, SECONDS)?;
        let (mut events, mut drops) = self.history.since(now - Span::from_millis(1_000) * seconds as i64);
        let models = &mut *self.models.borrow_mut();
        let snapshot = self.board.newest(models).map(|(_, snapshot)| snapshot);
        let backends = snapshot.iter().flat_map(|snapshot| &snapshot.backends);
        let backends = backends.map(|backend| (backend.id, backend.name.clone())).collect();
        cut(&mut events, &mut drops);
        let written = write(&Names { backends, models }, &events, &drops).expect("writing into memory cannot fail");
        Ok(String::from_utf8(written).expect("JSON is UTF-8"))
    }
}

/// Leaves out what was over first, until the rest is as much as may be.
fn cut(events: &mut Vec<(Lane, Event)>, drops: &mut Vec<Dropped>) {
    let ends = |(_, event): &(Lane, Event)| event.ended_at();
    let too_many = (events.len() + drops.len()).saturating_sub(EVENTS_MAX);
    if too_many > 0 {
        let mut all: Vec<Timestamp> = events.iter().map(ends).chain(drops.iter().map(|drop| drop.at)).collect();
        let (_, last, _) = all.select_nth_unstable(too_many - 1);
        let last = *last;
        events.retain(|event| ends(event) > last);
        drops.retain(|drop| drop.at > last);
    }
    // Several ModelThreads may have used one GPU.
    events.sort_by_key(|event| (event.0, ends(event)));
    drops.sort_by_key(|drop| drop.at);
}

fn write(names: &Names<'_>, events: &[(Lane, Event)], drops: &[Dropped]) -> io::Result<Vec<u8>> {
    let mut file = Writer::begin(Vec::new())?;
    let backends: BTreeSet<BackendId> = events.iter().map(|(lane, _)| lane.backend).collect();
    let groups: BTreeMap<BackendId, usize> = backends.into_iter().zip(1..).collect();
    if !drops.is_empty() {
        file.name_group(DROPPED.group, "scheduler")?;
        file.name_row(DROPPED, "tasks dropped")?;
    }
    for (backend, group) in &groups {
        file.name_group(*group, &names.backend(*backend))?;
    }
    // Loads go on beside batches, so they have rows of their own.
    let row = |lane: &Lane, is_load: bool| Row {
        group: groups[&lane.backend],
        row: 2 * lane.gpu as usize + usize::from(is_load),
    };
    let is_load = |event: &Event| matches!(event, Event::Load { .. });
    let rows: BTreeSet<(Lane, bool)> = events.iter().map(|(lane, event)| (*lane, is_load(event))).collect();
    for (lane, is_load) in rows {
        let what = if is_load { ", weights" } else { "" };
        file.name_row(row(&lane, is_load), &format!("GPU {}{what}", lane.gpu))?;
    }
    for (lane, event) in events {
        let (row, model) = (row(lane, is_load(event)), names.model(event.model()));
        match *event {
            Event::Batch { tasks, window, started_at, finished_at, .. } => {
                let args = batch(&model, tasks, window);
                file.slice(row, &format!("{model} x{tasks}"), (started_at, finished_at), args)?;
            }
            Event::Missed { tasks, window, at, .. } => {
                file.instant(row, &format!("{model} x{tasks} not executed"), at, batch(&model, tasks, window))?;
            }
            Event::Load { started_at, finished_at, .. } => {
                file.slice(row, &model, (started_at, finished_at), json!({"model": model}))?;
            }
        }
    }
    for Dropped { model, reason, at } in drops {
        let model = names.model(*model);
        file.instant(DROPPED, &model, *at, json!({"model": model, "reason": reason.to_string()}))?;
    }
    file.end()
}

fn batch(model: &str, tasks: u32, window: Option<(Timestamp, Timestamp)>) -> Value {
    let (exec_at, latest) = window.unzip();
    json!({
        "model": model,
        "batch": tasks,
        "exec_at_us": exec_at.map(micros),
        "latest_us": latest.map(micros),
    })
}

#[cfg(test)]
mod tests;

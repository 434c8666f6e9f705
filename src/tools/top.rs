//! `top`: a cluster in a terminal, of what schedulers and frontends tell as JSON on their `admin.http`. Part of the
//! driver: the terminal, and a thread for each member that is asked. What is shown is [`state`]'s, how is [`draw`]'s.
#![allow(clippy::disallowed_methods)] // Has threads, and waits in real time.

mod draw;
mod state;
#[cfg(test)]
mod tests;
mod traffic;

use std::{
    io::IsTerminal as _,
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ratatui::{
    DefaultTerminal,
    crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers},
};
use transport::Clock;

use crate::{page, signals, status};
use state::{Key, News, State};
use traffic::{TRAFFIC_PATH, TrafficPage};

/// Arguments of `top`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A scheduler's `admin.http`; of several the primary's answer is shown. Without it and --frontend both are those
    /// of `up --ui 127.0.0.1:8003`
    #[arg(long, value_name = "ADDRESS")]
    scheduler: Vec<String>,
    /// A frontend's `admin.http`, which has models' rates; of several the sum is shown
    #[arg(long, value_name = "ADDRESS")]
    frontend: Vec<String>,
}

/// Of `up --ui 127.0.0.1:8003`: its scheduler's and its frontend's.
const DEFAULTS: [&str; 2] = ["127.0.0.1:8003", "127.0.0.1:8004"];
/// Members of each role that are asked: each has a thread.
const MEMBERS_MAX: usize = 16;
/// Between two questions to a member.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// How long a key is waited for before the screen is drawn again.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Answers that wait to be looked at: one of each member.
const NEWS_MAX: usize = 2 * MEMBERS_MAX;
/// Pages of 100 models that a frontend is asked for, the busiest first.
const TRAFFIC_PAGES_MAX: usize = 10;
/// A whole screen is drawn anew after so many keys, if more are waiting.
const KEYS_MAX: usize = 64;

/// Shows the cluster until a key or a signal ends it.
pub(crate) fn run(args: &Args) -> Result<()> {
    let [mut schedulers, mut frontends] = [args.scheduler.clone(), args.frontend.clone()];
    if schedulers.is_empty() && frontends.is_empty() {
        [schedulers, frontends] = DEFAULTS.map(|address| vec![address.to_owned()]);
    }
    for (key, found) in [("--scheduler", &schedulers), ("--frontend", &frontends)] {
        let count = found.len();
        ensure!(count <= MEMBERS_MAX, "{key}: found {count} addresses, expected at most {MEMBERS_MAX}");
    }
    let is_terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    ensure!(is_terminal, "top: found no terminal, expected one; `downbeat status --json` is for programs");
    let ends = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&ends);
    // The terminal has to be as it was, and one that is gone ends it, too.
    signals::handle(move |_| told.store(true, Ordering::Relaxed))?;
    let asked = Asked::all(&schedulers, &frontends)?;
    // From here on a panic of any thread brings the terminal back before it is told.
    let mut terminal = ratatui::try_init().context("the terminal cannot be used")?;
    let shown = show(&mut terminal, State::new(&schedulers, &frontends), &asked, &ends);
    ratatui::restore();
    shown
}

fn show(terminal: &mut DefaultTerminal, mut state: State, asked: &Asked, ends: &AtomicBool) -> Result<()> {
    let (clock, has_colour) = (Clock::start(), std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()));
    while !ends.load(Ordering::Relaxed) {
        ensure!(!asked.has_panicked(), "a thread that asks a member has ended");
        asked.news.try_iter().take(NEWS_MAX).for_each(|news| state.handle_news(clock.now(), news));
        state.handle_size(draw::fit(terminal.size()?.height));
        terminal.draw(|frame| draw::draw(frame, (&state, clock.now()), has_colour))?;
        if handle_keys(&mut state)? {
            break;
        }
    }
    Ok(())
}

/// Waits for keys, and hands on those that are there; true if one of them is the end.
fn handle_keys(state: &mut State) -> Result<bool> {
    let mut patience = LOOK_EVERY;
    for _ in 0..KEYS_MAX {
        if !event::poll(mem::take(&mut patience))? {
            break;
        }
        if let Event::Key(pressed) = event::read()?
            && pressed.kind != KeyEventKind::Release
            && let Some(key) = key_of(pressed.code, pressed.modifiers)
            && state.handle_key(key)
        {
            return Ok(true);
        }
    }
    Ok(false)
}

fn key_of(code: KeyCode, modifiers: KeyModifiers) -> Option<Key> {
    Some(match code {
        KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => Key::Quit,
        KeyCode::Char('q') | KeyCode::Esc => Key::Quit,
        KeyCode::Tab => Key::NextView,
        KeyCode::BackTab => Key::PreviousView,
        KeyCode::Right | KeyCode::Char('s') => Key::NextOrder,
        KeyCode::Left => Key::PreviousOrder,
        KeyCode::Up => Key::Scroll(-1),
        KeyCode::Down => Key::Scroll(1),
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Scroll(isize::MIN),
        KeyCode::End => Key::Scroll(isize::MAX),
        _ => return None,
    })
}

/// A thread for each member.
struct Asked {
    threads: Vec<JoinHandle<()>>,
    news: Receiver<News>,
}

impl Asked {
    fn all(schedulers: &[String], frontends: &[String]) -> Result<Self> {
        let ((sender, news), mut threads) = (sync_channel(NEWS_MAX), Vec::new());
        for (index, address) in schedulers.iter().enumerate() {
            let ask = move |address: &str| {
                let found = status::whole(address, page::decoded).map(Box::new);
                News::Cluster(index, found.map_err(|error| told(&error)))
            };
            threads.push(each_second(address, sender.clone(), ask)?);
        }
        for (index, address) in frontends.iter().enumerate() {
            let ask = move |address: &str| News::Traffic(index, traffic(address).map_err(|error| told(&error)));
            threads.push(each_second(address, sender.clone(), ask)?);
        }
        Ok(Self { threads, news })
    }

    /// While somebody receives, a thread ends by a panic alone. The terminal is not ours any more.
    fn has_panicked(&self) -> bool {
        self.threads.iter().any(JoinHandle::is_finished)
    }
}

/// In one line: an error and its causes.
fn told(error: &anyhow::Error) -> String {
    format!("{error:#}")
}

/// Asks until nobody wants to know any more.
fn each_second(
    address: &str,
    news: SyncSender<News>,
    ask: impl Fn(&str) -> News + Send + 'static,
) -> Result<JoinHandle<()>> {
    let address = address.to_owned();
    let body = move || {
        while news.send(ask(&address)).is_ok() {
            thread::sleep(ASK_EVERY);
        }
    };
    let started = thread::Builder::new().name("ask".to_owned()).spawn(body);
    started.context("no thread can be started that asks a member")
}

/// The busiest models of a frontend: as many pages as have some with requests.
fn traffic(address: &str) -> Result<TrafficPage> {
    let page = |number: usize| -> Result<TrafficPage> {
        let target = format!("{TRAFFIC_PATH}?rows=100&page={number}");
        page::decoded(&page::of(address, &target, "a frontend's `admin.http`")?)
    };
    let mut told = page(0)?;
    for number in 1..told.pages.min(TRAFFIC_PAGES_MAX) {
        if !told.goes_on() {
            break;
        }
        told.append(page(number)?);
    }
    Ok(told)
}

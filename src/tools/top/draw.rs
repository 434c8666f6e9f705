//! How what `top` knows is shown: from the state to cells, and nothing else. Texts of others were made harmless as
//! they came ([`crate::page::decoded`]); each is cut at its column's width.

use proto::{Span, Timestamp};
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span as Words},
    widgets::{Paragraph, Row, Table},
};

use super::{
    state::{Member, Model, State, View},
    traffic::Rates,
};

/// Lines above the table, and below it.
const HEAD: u16 = 5;
const KEYS: u16 = 1;
/// What is told is older than that: it says so.
const OLD: Span = Span::from_millis(3_000);
/// Cells of a bar.
const BAR: usize = 12;
/// Of requests in time: fewer are marked.
const GOOD: f64 = 0.95;

/// What a cell means.
#[derive(Clone, Copy)]
enum Mood {
    Plain,
    Strong,
    Faint,
    Wrong,
}

/// Moods in colours, or without any.
#[derive(Clone, Copy)]
struct Palette {
    has_colour: bool,
}

impl Palette {
    fn of(self, mood: Mood) -> Style {
        let style = Style::new();
        match (mood, self.has_colour) {
            (Mood::Plain, _) => style,
            (Mood::Strong, _) => style.add_modifier(Modifier::BOLD),
            (Mood::Faint, _) => style.add_modifier(Modifier::DIM),
            (Mood::Wrong, true) => style.fg(Color::Red).add_modifier(Modifier::BOLD),
            (Mood::Wrong, false) => style.add_modifier(Modifier::REVERSED),
        }
    }
}

/// Rows that fit into a terminal of so many lines, below the table's own head.
pub(super) fn fit(lines: u16) -> usize {
    usize::from(lines.saturating_sub(HEAD + KEYS + 1))
}

/// Draws all of it.
pub(super) fn draw(frame: &mut Frame<'_>, (state, now): (&State, Timestamp), has_colour: bool) {
    let palette = Palette { has_colour };
    let [head, table, keys] =
        Layout::vertical([Constraint::Length(HEAD), Constraint::Min(1), Constraint::Length(KEYS)]).areas(frame.area());
    frame.render_widget(Paragraph::new(header(state, now, palette)), head);
    match state.view() {
        View::Gpus => gpus(frame, table, state, palette),
        View::Models => models(frame, table, state, palette),
        View::Members => members(frame, table, state, palette),
    }
    frame.render_widget(Paragraph::new(foot(state, now, palette)), keys);
}

fn header(state: &State, now: Timestamp, palette: Palette) -> Vec<Line<'static>> {
    let words = |text: String, mood| Words::styled(text, palette.of(mood));
    let mut lines = vec![standing(state, now, palette)];
    match state.cluster(now) {
        None => lines.extend([Line::default(), Line::default()]),
        Some((_, page)) => {
            let (counts, advice) = (&page.counts, &page.advice);
            lines.push(Line::from(format!(
                "GPUs {}/{}  backends {}/{}  frontends {}/{}  models {} of {}",
                counts.gpus_serving,
                counts.gpus,
                counts.backends_serving,
                counts.backends,
                counts.frontends_serving,
                counts.frontends,
                counts.models_hosted,
                counts.models
            )));
            let needed = advice.gpus_needed.map_or_else(|| "?".to_owned(), |needed| needed.to_string());
            let mood =
                if advice.gpus_needed.is_some_and(|needed| needed > advice.gpus) { Mood::Wrong } else { Mood::Strong };
            lines.push(Line::from(vec![
                words(format!("{needed} GPUs needed"), mood),
                words(format!(", {} in use: {}", advice.gpus, advice.reason), Mood::Plain),
            ]));
        }
    }
    lines.push(total(state.total(), palette));
    let mut tabs = Vec::new();
    for view in View::ALL {
        let (text, mood) = match view == state.view() {
            true => (format!("[{}]", view.name()), Mood::Strong),
            false => (format!(" {} ", view.name()), Mood::Faint),
        };
        tabs.push(words(text, mood));
    }
    tabs.push(words(format!("   by {}", state.order()), Mood::Faint));
    lines.push(Line::from(tabs));
    lines
}

/// Who tells it, and how long ago.
fn standing(state: &State, now: Timestamp, palette: Palette) -> Line<'static> {
    let words = |text: String, mood| Words::styled(text, palette.of(mood));
    let mut line = vec![words("downbeat top".to_owned(), Mood::Strong), words("  ".to_owned(), Mood::Plain)];
    match state.cluster(now) {
        Some((age, page)) => {
            let mood = if age > OLD { Mood::Wrong } else { Mood::Plain };
            line.push(words(format!("{} ago", told_age(age)), mood));
            let standing = if page.is_primary { "the primary" } else { "not the primary" };
            // The name comes last: a long one hides nothing.
            line.push(words(format!(", {standing}, epoch {}: {}", page.epoch, page.scheduler), Mood::Plain));
        }
        None => line.push(words("no scheduler has answered yet".to_owned(), Mood::Faint)),
    }
    Line::from(line)
}

/// Who does not answer and why, or else the keys.
fn foot(state: &State, now: Timestamp, palette: Palette) -> Line<'static> {
    let silent = state.silent(now);
    let Some((address, why, age)) = silent.first() else {
        return Line::styled("q quit   tab view   ←→ order   ↑↓ PgUp PgDn Home End scroll", palette.of(Mood::Faint));
    };
    let since = age.map(|age| format!(" for {}", told_age(age))).unwrap_or_default();
    let others = if silent.len() > 1 { format!(" (and {} more)", silent.len() - 1) } else { String::new() };
    let text = format!("silent{since}{others}: {}: {}", address, why);
    Line::styled(text, palette.of(Mood::Wrong))
}

fn told_age(age: Span) -> String {
    let seconds = age.as_secs_f64();
    if seconds < 10.0 { format!("{seconds:.1} s") } else { format!("{seconds:.0} s") }
}

fn total(rates: Option<&Rates>, palette: Palette) -> Line<'static> {
    let Some(rates) = rates else { return Line::styled("no rates yet", palette.of(Mood::Faint)) };
    let (text, mood) = in_time(rates);
    Line::from(vec![
        Words::raw(format!("{} req/s, ", rate(rates.requests))),
        Words::styled(format!("{text} in time"), palette.of(mood)),
        Words::raw(format!(
            ", p50 {} p99 {}, {} dropped/s{}",
            millis(rates.p50_ms),
            millis(rates.p99_ms),
            rate(rates.drops()),
            most(rates)
        )),
    ])
}

fn rate(value: f64) -> String {
    if value < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

fn millis(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value < 100.0 => format!("{value:.1} ms"),
        Some(value) => format!("{value:.0} ms"),
    }
}

/// All is all: 99.97 % are not 100.
fn in_time(rates: &Rates) -> (String, Mood) {
    if rates.requests <= 0.0 {
        return ("-".to_owned(), Mood::Plain);
    }
    let part = rates.good / rates.requests;
    let text = if part < 1.0 { format!("{:.1} %", (100.0 * part).min(99.9)) } else { "100 %".to_owned() };
    (text, if part < GOOD { Mood::Wrong } else { Mood::Plain })
}

/// For which reason most of them were dropped.
fn most(rates: &Rates) -> String {
    let most = rates.dropped.iter().max_by(|(_, one), (_, other)| one.total_cmp(other));
    most.map(|(reason, _)| format!(" ({reason})")).unwrap_or_default()
}

/// Of the rows those that fit, each as its cells.
fn table<'a>(
    (frame, area): (&mut Frame<'_>, Rect),
    state: &'a State,
    (heads, widths): (&[&'a str], &[u16]),
    row: impl Fn(usize) -> Option<Vec<Words<'a>>>,
    palette: Palette,
) {
    let fit = usize::from(area.height.saturating_sub(1));
    let first = state.scrolled();
    let shown = (first..first.saturating_add(fit)).map_while(row).map(Row::new);
    let head = Row::new(heads.iter().map(|head| Words::raw(*head))).style(palette.of(Mood::Faint));
    // The first column has what the others leave.
    let widths = widths.iter().map(|&width| if width == 0 { Constraint::Fill(1) } else { Constraint::Length(width) });
    frame.render_widget(Table::new(shown, widths).header(head), area);
    if state.rows() == 0 {
        let below = Rect { y: area.y + area.height.min(1), height: area.height.saturating_sub(1), ..area };
        frame.render_widget(Paragraph::new(Line::styled("none is known", palette.of(Mood::Faint))), below);
    }
}

/// What is not known.
const NONE: &str = "-";

fn gpus(frame: &mut Frame<'_>, area: Rect, state: &State, palette: Palette) {
    let row = |row| {
        let (backend, gpu) = state.lane(row)?;
        let mood = match gpu.state.as_str() {
            "serving" => Mood::Plain,
            "idle" => Mood::Faint,
            _ => Mood::Wrong,
        };
        let busy = gpu.ran.as_ref().map_or_else(|| "not told".to_owned(), |ran| bar(ran.busy));
        let model = gpu.ran.as_ref().and_then(|ran| ran.model.as_deref()).unwrap_or(NONE);
        let batch = gpu.ran.as_ref().and_then(|ran| ran.batch).map_or_else(|| NONE.to_owned(), |of| of.to_string());
        Some(vec![
            Words::raw(&*backend.name),
            Words::raw(gpu.index.to_string()),
            Words::styled(&*gpu.state, palette.of(mood)),
            Words::raw(busy),
            Words::raw(model),
            Words::raw(batch),
        ])
    };
    let heads = ["BACKEND", "GPU", "STATE", "BUSY", "MODEL", "BATCH"];
    table((frame, area), state, (&heads, &[0, 3, 8, 18, 24, 5]), row, palette);
}

/// A part of a whole, and how much that is.
fn bar(part: f64) -> String {
    let part = if part.is_finite() { part.clamp(0.0, 1.0) } else { 0.0 };
    let full = (part * BAR as f64).round() as usize;
    format!("{}{} {:>3.0} %", "█".repeat(full), "░".repeat(BAR - full), 100.0 * part)
}

fn models(frame: &mut Frame<'_>, area: Rect, state: &State, palette: Palette) {
    let heads = ["MODEL", "GPUS", "REQ/S", "IN TIME", "P50", "P99", "OBJECTIVE", "BATCH", "DROPS/S"];
    let widths = [0, 4, 6, 7, 7, 7, 9, 5, 7];
    table((frame, area), state, (&heads, &widths), |row| Some(model(state.model(row)?, palette)), palette);
}

fn model(model: &Model, palette: Palette) -> Vec<Words<'_>> {
    let name = match model.version.as_str() {
        "1" => model.name.clone(),
        version => format!("{} v{version}", model.name),
    };
    let mut cells =
        vec![Words::raw(name), Words::raw(model.gpus.map_or_else(|| NONE.to_owned(), |gpus| gpus.to_string()))];
    let Some(rates) = &model.rates else {
        cells.extend([NONE; 7].map(Words::raw));
        return cells;
    };
    let (in_time, mood) = in_time(rates);
    let wrong_if = |is_wrong| palette.of(if is_wrong { Mood::Wrong } else { Mood::Plain });
    let is_late = rates.p99_ms.zip(model.objective_ms).is_some_and(|(p99, objective)| p99 > objective);
    let drops = if rates.dropped.is_empty() { NONE.to_owned() } else { rate(rates.drops()) };
    cells.extend([
        Words::raw(rate(rates.requests)),
        Words::styled(in_time, palette.of(mood)),
        Words::raw(millis(rates.p50_ms)),
        Words::styled(millis(rates.p99_ms), wrong_if(is_late)),
        Words::raw(model.objective_ms.map_or_else(|| "none".to_owned(), |objective| millis(Some(objective)))),
        Words::raw(rates.batch.map_or_else(|| NONE.to_owned(), |batch| format!("{batch:.1}"))),
        Words::styled(drops, wrong_if(rates.missed > 0.0)),
    ]);
    cells
}

fn members(frame: &mut Frame<'_>, area: Rect, state: &State, palette: Palette) {
    let heads = ["NAME", "ROLE", "STATE", "ADDRESS", "MORE"];
    let row = |row| Some(member(state.member(row)?, palette));
    table((frame, area), state, (&heads, &[0, 9, 11, 22, 14]), row, palette);
}

fn member(member: Member<'_>, palette: Palette) -> Vec<Words<'_>> {
    let (name, role, state, address, obeys) = match member {
        Member::Scheduler(row) => (&row.address, "scheduler", &row.state, Some(&row.address), true),
        Member::Frontend(row) => (&row.name, "frontend", &row.state, row.address.as_ref(), row.obeys),
        Member::Backend(row) => (&row.name, "backend", &row.state, row.address.as_ref(), row.obeys),
    };
    let more = match member {
        _ if !obeys => "does not obey".to_owned(),
        Member::Backend(row) if row.safe_to_remove => "safe to remove".to_owned(),
        Member::Backend(row) => format!("{} only here", row.only_here),
        Member::Scheduler(_) | Member::Frontend(_) => NONE.to_owned(),
    };
    let is_well = ["serving", "primary", "standby"].contains(&state.as_str());
    let wrong_if = |is_wrong| palette.of(if is_wrong { Mood::Wrong } else { Mood::Plain });
    vec![
        Words::raw(&**name),
        Words::raw(role),
        Words::styled(&**state, wrong_if(!is_well)),
        Words::raw(address.map_or(NONE, |address| address)),
        Words::styled(more, wrong_if(!obeys)),
    ]
}

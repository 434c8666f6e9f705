//! `bench load`: load on a server that speaks the Open Inference Protocol.

use std::{
    fs::File,
    io::{BufWriter, Write as _},
    path::Path,
    time::SystemTime,
};

use cli::CommandError;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use crate::{
    args::{Args, Plan},
    charts::latency_chart,
    drive::{generate_rows, inputs_of},
    log::write_log,
    rows::Rows,
    tables,
    tally::{Report, Tally},
};

/// Generates the load and prints what came of it.
///
/// # Errors
/// On bad input, and if the load could not be generated (exit code 2); if none of the requests was served (1).
#[allow(clippy::disallowed_methods, reason = "a log of latencies says when it began")]
pub fn run(args: &Args) -> Result<(), CommandError> {
    let Plan { target, streams } = args.plan()?;
    // What cannot be written is better known before the load than after it.
    let create = |flag: &str, path: &Path| {
        let file = File::create(path).map(BufWriter::new);
        file.map_err(|error| CommandError::failed(format!("{flag}: cannot write {}", path.display()), error))
    };
    let hdr = args.hdr.as_deref().map(|path| create("--hdr", path)).transpose()?;
    let svg = args.svg.as_deref().map(|path| create("--svg", path)).transpose()?;
    let models: Vec<&str> = streams.iter().map(|stream| stream.model.as_str()).collect();
    let inputs = inputs_of(&target, &models).map_err(|error| CommandError::Failed(error.to_string()))?;
    let count = streams.len();
    let streams =
        streams.into_iter().zip(&inputs).map(|(plan, inputs)| plan.stream(inputs, target.seed, args.emulated, count));
    let streams = streams.collect::<Result<Vec<_>, _>>()?;
    let rows = Rows::of(&streams);

    let seconds = target.span.as_secs_f64();
    let bar = progress_bar("load");
    let started_at = SystemTime::now();
    let tallies = generate_rows(&target, &streams, &rows, |fraction| bar.set_position((fraction * 1000.0) as u64));
    bar.finish_and_clear();
    let tallies = tallies.map_err(|error| CommandError::Failed(error.to_string()))?;
    let tallies: Vec<(String, Tally)> = rows.into_names().into_iter().zip(tallies).collect();
    let total = Tally::total(target.span, tallies.iter().map(|(_, tally)| tally));

    if let Some(mut file) = hdr {
        let written = write_log(&mut file, started_at, &tallies).and_then(|()| file.flush());
        written.map_err(|error| CommandError::failed("--hdr", error))?;
    }
    if let Some(mut file) = svg {
        let title = format!("{} for {seconds} s", args.url);
        let written = file.write_all(latency_chart(&title, &tallies, &total).as_bytes()).and_then(|()| file.flush());
        written.map_err(|error| CommandError::failed("--svg", error))?;
    }
    if args.json {
        println!("{}", as_json(&tallies, &total, seconds));
    } else {
        print_tables(&tallies, &total, seconds);
    }
    served(&total)
}

/// A load of which nothing was served is no measurement.
fn served(total: &Tally) -> Result<(), CommandError> {
    if total.served > 0 || total.sent == 0 {
        return Ok(());
    }
    let reasons = total.dropped.iter().chain(&total.errors);
    let (reason, count) = reasons.max_by_key(|(_, count)| **count).expect("what was sent and not served has a reason");
    Err(CommandError::Found(format!("none of {} requests was served: {count} x {reason}", total.sent)))
}

fn as_json(tallies: &[(String, Tally)], total: &Tally, seconds: f64) -> Value {
    let model = |(name, tally): &(String, Tally)| {
        let mut model = json!(tally.report(name, seconds));
        model["wrong"] = json!(tally.wrong);
        model["reasons"] = json!({ "dropped": tally.dropped, "errors": tally.errors });
        let stages = tally.stages.rows().map(|(stage, p50, p99)| (stage.to_owned(), json!({ "p50": p50, "p99": p99 })));
        // Only downbeat says where the time went, and only over HTTP.
        model["stages_us"] = if tally.stages.is_empty() { Value::Null } else { Value::Object(stages.collect()) };
        model
    };
    json!({ "models": tallies.iter().map(model).collect::<Vec<_>>(), "total": total.report("total", seconds) })
}

fn print_tables(tallies: &[(String, Tally)], total: &Tally, seconds: f64) {
    let mut reports: Vec<Report> = tallies.iter().map(|(name, tally)| tally.report(name, seconds)).collect();
    if reports.len() > 1 {
        reports.push(total.report("total", seconds));
    }
    println!("{}", tables::models(&reports));
    let staged: Vec<_> = tallies.iter().filter(|(_, tally)| !tally.stages.is_empty()).cloned().collect();
    if !staged.is_empty() {
        let (names, tallies): (Vec<_>, Vec<_>) = staged.into_iter().unzip();
        println!("{}", tables::stages(&names, &tallies));
    }
    for (what, count) in total.dropped.iter().chain(&total.errors) {
        println!("{count} x {what}");
    }
}

/// A bar of a thousand steps on stderr; invisible where stderr is no terminal.
#[must_use]
pub fn progress_bar(what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:>10} [{bar:40}] {percent:>3} % {elapsed}")
        .expect("the template is well-formed")
        .progress_chars("=> ");
    ProgressBar::new(1000).with_style(style).with_message(what.to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_load_of_which_nothing_was_served_is_told_with_the_usual_reason() {
        let mut total = Tally::new(Duration::from_secs(1));
        assert!(served(&total).is_ok(), "nothing was sent");
        for reason in ["late", "full", "full"] {
            total.record_sent(Duration::ZERO);
            total.record_dropped(reason.to_owned());
        }
        assert_eq!(served(&total).unwrap_err().to_string(), "none of 3 requests was served: 2 x full");
        total.served = 1;
        assert!(served(&total).is_ok());
    }
}

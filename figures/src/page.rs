//! The page that shows all figures: made from the data beside them and the remarks in the code, so that it says what
//! was measured.

use std::{fmt::Write, io, path::Path};

use crate::{FIGURES, figure::Figure, orloj, table::Table};

/// Rows up to which a figure's data is shown as a table below it.
const ROWS_MAX: usize = 24;

const INTRODUCTION: &str = "# Results

Made by `downbeat figures`; the page itself, too (`--page`). Every figure names the command that makes it again, from
the same seed: the simulator runs the scheduler's own state machines in virtual time, so the numbers do not depend on
the machine, except where a figure says so. Beside each SVG lies its data as CSV.

All but five show `downbeat` as it is. Symphony's Figure 13 was drawn before it sized batches by the price of GPU time
([policy.md](policy.md)): it deferred every batch then, as it does now with `gpu_price = inf`. Clockwork's Figures 7, 8
and 9 and its table of objectives were drawn before it waited for likely arrivals, which hardly moves the other figures
of that paper. Where another policy is ahead, the figure's findings say so.

What the paper's evaluation calls Symphony is the policy `deferred:target` here; `symphony` has the rules of its
authors' code, whose target follows the measured rate; `deferred` is the paper's Algorithm 1 with the longest prefix
that can finish for a batch, without a target size; `downbeat` is our own, and the other systems are re-implemented as
their papers describe them. The papers ran them on emulated and real GPUs with a network between;
here GPUs run every batch for exactly l(b), and the network costs what the workload says, mostly nothing. So absolute
numbers of the papers may be lower than ours, above all those of Clockwork and Nexus, whose implementations had limits
of their own; the order of the systems and the reasons for it are what can be compared. Where a paper's text gives a
number, it is drawn (diamonds, dashed lines) or listed; numbers that are only in its drawings are not guessed.

Goodput is the highest aggregate rate at which at most 1 % of each model's requests are late or dropped. On a mix the
tightest model decides; `downbeat bench goodput` says what is served if all are judged together, too. Beside goodputs
stand the median and the 99.99th percentile of all requests at that rate, and the worst model with what it loses.
";

/// The page for the figures whose data lies in `data`; `link` leads there from the page.
///
/// # Errors
/// If data is there but cannot be read.
pub(crate) fn page(data: &Path, link: &str) -> io::Result<String> {
    let mut text = INTRODUCTION.to_owned();
    for figure in FIGURES {
        let path = data.join(figure.name).with_extension("csv");
        if path.exists() {
            section(&mut text, figure, &Table::read(&path)?, link);
        }
    }
    Ok(text)
}

fn section(text: &mut String, figure: &Figure, table: &Table, link: &str) {
    let name = figure.name;
    let _ = writeln!(text, "\n## {}\n\n{}\n\n![{}]({link}/{name}.svg)\n", figure.title, figure.shows, figure.title);
    // The title and the command have places of their own.
    for (kind, note) in table.notes.iter().filter(|(kind, _)| kind != "figure" && kind != "command") {
        let _ = match kind.as_str() {
            "finding" => writeln!(text, "- {note}"),
            kind => writeln!(text, "- {}{}: {note}", kind[..1].to_uppercase(), &kind[1..]),
        };
    }
    for remark in figure.remarks {
        let _ = writeln!(text, "- {remark}");
    }
    let made = table.noted("command").unwrap_or("unknown");
    let _ = writeln!(text, "\nMade by `{made}`; data: [{name}.csv]({link}/{name}.csv).");
    if let Some(summary) = orloj::summary(table) {
        let _ = write!(
            text,
            "\nMeans over all cases; with the paper's in brackets, over those that it has:\n\n{}",
            summary.markdown()
        );
    } else if table.rows.len() <= ROWS_MAX {
        let _ = write!(text, "\n{}", table.markdown());
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn all_that_a_run_notes_stands_on_the_page() {
        let mut table = Table::new(&["policy"]);
        for kind in ["figure", "command", "finding", "span", "clairvoyant, random"] {
            table.note(kind, format!("what {kind} says"));
        }
        let mut text = String::new();
        section(&mut text, &FIGURES[0], &table, "results");
        for line in
            ["- what finding says", "- Span: what span says", "- Clairvoyant, random: what clairvoyant, random says"]
        {
            assert!(text.lines().any(|found| found == line), "{text}");
        }
        assert!(!text.contains("what figure says") && text.contains("Made by `what command says`"), "{text}");
    }

    #[test]
    fn the_committed_page_is_made_from_the_committed_data() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let expected = page(&docs.join("results"), "results").unwrap();
        let found = fs::read_to_string(docs.join("results.md")).unwrap();
        assert!(
            found == expected,
            "docs/results.md is out of date; run `downbeat figures --only fig4 --out docs/results --page \
             docs/results.md`"
        );
        for figure in FIGURES.iter().filter(|figure| expected.contains(&format!("({}.svg)", figure.name))) {
            assert!(docs.join("results").join(figure.name).with_extension("svg").exists(), "{}", figure.name);
        }
    }
}

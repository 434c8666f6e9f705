//! `downbeat figures`: the figures of the papers that this project follows, and proofs of its own claims, as SVG and
//! CSV.
//!
//! A figure is one file that defines a `Figure`, and one row of `FIGURES`.
#![forbid(unsafe_code)]

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::Args as ClapArgs;
use cli::{CommandError, positive};
use indicatif::{ProgressBar, ProgressStyle};

mod clipper10;
mod clipper7;
mod clipper8;
mod clipper9;
mod clockwork2;
mod clockwork5;
mod clockwork5closed;
mod clockwork6;
mod clockwork7;
mod clockwork7right;
mod clockwork8;
mod clockwork9;
mod clockworkslo;
mod context;
mod digits;
mod fig1;
mod fig10;
mod fig11;
mod fig12;
mod fig13;
mod fig14;
mod fig15;
mod fig15day;
mod fig16;
mod fig6;
mod fig7;
mod fig9;
mod figure;
mod incast;
mod orloj;
mod orloj12;
mod orloj13;
mod page;
mod pareto;
mod schedules;
mod stability;
mod table;
mod table2;

use context::Context;

pub use figure::FigureError;
use figure::{Figure, save};

/// In the order of the page.
const FIGURES: &[Figure] = &[
    fig1::FIG1,
    stability::FIG2,
    stability::FLAT_TOP,
    stability::LOAD_PROPORTIONAL,
    pareto::PARETO,
    schedules::FIG4,
    schedules::FIG5,
    fig6::FIG6,
    fig7::FIG7,
    fig9::FIG9,
    fig10::FIG10,
    fig11::FIG11,
    table2::TABLE2,
    fig12::FIG12,
    fig13::FIG13,
    fig14::FIG14,
    fig15::FIG15,
    fig15day::FIG15_DAY,
    fig16::FIG16,
    clockwork2::CLOCKWORK2,
    clockwork5::CLOCKWORK5,
    clockwork5closed::CLOCKWORK5_CLOSED,
    clockwork6::CLOCKWORK6,
    clockwork7::CLOCKWORK7,
    clockwork7right::CLOCKWORK7_RIGHT,
    clockwork8::CLOCKWORK8,
    clockwork9::CLOCKWORK9,
    clockworkslo::CLOCKWORK_SLO,
    clipper7::CLIPPER7,
    clipper8::CLIPPER8,
    clipper9::CLIPPER9,
    clipper10::CLIPPER10,
    orloj::ORLOJ7,
    orloj::ORLOJ8,
    orloj::ORLOJ9,
    orloj::ORLOJ11,
    orloj12::ORLOJ12,
    orloj13::ORLOJ13,
    incast::INCAST,
];

/// Reproduce the papers' figures as SVG and CSV.
#[derive(Debug, ClapArgs)]
pub struct Args {
    /// Figures to make, separated by commas; all by default.
    #[arg(long, value_name = "NAME,NAME")]
    pub only: Option<String>,
    /// Directory for NAME.svg and NAME.csv.
    #[arg(long)]
    pub out: PathBuf,
    /// Core minutes that each figure's simulations may take, about: it sets how many requests each run simulates.
    #[arg(long, default_value_t = 1.0)]
    pub budget: f64,
    /// Seed of all arrivals.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write a page (Markdown) that shows all figures of the directory.
    #[arg(long)]
    pub page: Option<PathBuf>,
}

/// Runs the command; tells each written file on stdout and its progress on stderr.
///
/// # Errors
/// On bad input (exit code 2).
pub fn run(args: &Args) -> Result<(), FigureError> {
    let figures = chosen(args.only.as_deref())?;
    let budget_minutes = positive("--budget", args.budget, 100_000.0)?;
    let write = |flag| move |path: &Path, source| FigureError::Write { flag, path: path.display().to_string(), source };
    fs::create_dir_all(&args.out).map_err(|source| write("out")(&args.out, source))?;
    for figure in figures {
        let bar = ProgressBar::new(0);
        let style = ProgressStyle::with_template("{prefix} [{bar:40}] {pos}/{len} runs, {eta} left");
        bar.set_style(style.expect("a constant template").progress_chars("=> "));
        bar.set_prefix(figure.name);
        let context = Context { budget_minutes, seed: args.seed, out: args.out.clone(), bar };
        let (chart, table) = (figure.draw)(&context)?;
        context.bar.finish_and_clear();
        save(figure, &context, &chart, table)?;
        println!("{}", args.out.join(figure.name).with_extension("svg").display());
    }
    if let Some(path) = &args.page {
        let link = link(path, &args.out);
        let text = page::page(&args.out, &link).map_err(|source| write("page")(path, source))?;
        fs::write(path, text).map_err(|source| write("page")(path, source))?;
        println!("{}", path.display());
    }
    Ok(())
}

fn chosen(only: Option<&str>) -> Result<Vec<&'static Figure>, FigureError> {
    let Some(only) = only else { return Ok(FIGURES.iter().collect()) };
    let find = |name: &str| {
        FIGURES.iter().find(|figure| figure.name == name).ok_or_else(|| {
            let known: Vec<_> = FIGURES.iter().map(|figure| figure.name).collect();
            let expected = format!("names among {}", known.join(", "));
            CommandError::Flag { flag: "--only", expected, found: format!("`{name}`") }.into()
        })
    };
    only.split(',').map(|name| find(name.trim())).collect()
}

/// From the page to the directory of figures: relative if that lies below the page's directory.
fn link(page: &Path, out: &Path) -> String {
    let directory = page.parent().unwrap_or(Path::new(""));
    let link = out.strip_prefix(directory).unwrap_or(out);
    if link.as_os_str().is_empty() { ".".to_owned() } else { link.display().to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = chosen(Some("fig4,fig99")).err().unwrap().to_string();
        assert!(error.starts_with("--only: expected names among ") && error.ends_with(", found `fig99`"), "{error}");
        assert!(FIGURES.iter().all(|figure| error.contains(figure.name)), "{error}");
    }

    #[test]
    fn figures_have_unique_names_and_are_all_made_by_default() {
        let mut names: Vec<_> = chosen(None).unwrap().iter().map(|figure| figure.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), FIGURES.len());
    }

    #[test]
    fn the_page_links_below_its_own_directory() {
        let link = |page: &str, out: &str| link(Path::new(page), Path::new(out));
        assert_eq!(link("docs/results.md", "docs/results"), "results");
        assert_eq!(link("page.md", "figures"), "figures");
        assert_eq!(link("here/page.md", "here"), ".");
        assert_eq!(link("docs/page.md", "/tmp/figures"), "/tmp/figures");
    }
}

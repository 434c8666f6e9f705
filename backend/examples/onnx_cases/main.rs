//! ONNX's own tests of those who run its models, as PyPI's package `onnx` brings them: each is a model with inputs
//! and with what must come out. What runs models here is asked to: the engine that is
//! embedded, on the CPU; plans for GPUs on a GPU that is none ([`cuda::Fake`]), of a build that has them; and ONNX
//! Runtime where its library is. Whatever does not pass is
//! printed, with the reason.
//!
//! ```text
//! cargo run --release -p backend --features cuda --example onnx_cases -- [--only TEXT] [--page FILE] FOLDER..
//! ```
//!
//! `--page` writes what each operator came to, as Markdown. `tests/onnx/run` gets the package and calls this.

mod arms;
mod cases;
mod judge;
mod page;

use std::{
    collections::BTreeMap,
    fs,
    panic::set_hook,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use arms::Arm;
use cases::Case;
use judge::{Verdict, judge};
use page::Page;

type Error = Box<dyn std::error::Error>;

struct Arguments {
    /// A part of a case's path.
    only: String,
    page: Option<PathBuf>,
    folders: Vec<PathBuf>,
}

impl Arguments {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, Error> {
        let (mut only, mut page, mut folders) = (String::new(), None, Vec::new());
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--only" => only = arguments.next().ok_or("--only: found nothing, expected a part of a case's path")?,
                "--page" => page = Some(arguments.next().ok_or("--page: found nothing, expected a file")?.into()),
                _ => folders.push(PathBuf::from(argument)),
            }
        }
        Ok(Self { only, page, folders })
    }

    /// The cases in the folders, each a folder of its own, or a file of a network.
    fn cases(&self) -> Result<Vec<PathBuf>, Error> {
        let mut cases = Vec::new();
        for folder in &self.folders {
            let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
            for entry in entries {
                cases.push(entry?.path());
            }
        }
        cases.retain(|case| is_network(case) || case.join("model.onnx").is_file());
        cases.retain(|case| case.to_string_lossy().contains(&self.only));
        cases.sort();
        Ok(cases)
    }
}

fn is_network(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "onnx")
}

/// What came of a path: of each case and arm; of nothing if no client can send its tensors.
type Judged = Vec<(Arc<Case>, Arm, Verdict, String)>;

/// All that there is to a path.
fn judge_path(path: &Path, arms: &[Arm]) -> Result<Option<Judged>, Error> {
    let case = if is_network(path) { Some(Case::network(path)?) } else { Case::read(path)? };
    let Some(case) = case else { return Ok(None) };
    let mut judged = Vec::new();
    for case in [case.exported(), Some(case)].into_iter().flatten().map(Arc::new) {
        // The networks' weights are made up, and lead to numbers that FP16 does not have.
        for &arm in arms.iter().filter(|&&arm| !(is_network(path) && arm == Arm::CudaHalf)) {
            let (verdict, why) = judge(&case, arm).err().unwrap_or((Verdict::Passed, String::new()));
            judged.push((case.clone(), arm, verdict, why));
        }
    }
    Ok(Some(judged))
}

/// The same of many, on all processors.
#[allow(clippy::disallowed_methods)] // No core.
fn judge_paths(paths: &[PathBuf], arms: &[Arm]) -> Result<BTreeMap<usize, Option<Judged>>, Error> {
    let (next, all) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let judge_some = || {
        while let place = next.fetch_add(1, Relaxed)
            && let Some(path) = paths.get(place)
        {
            let judged = judge_path(path, arms).map_err(|error| format!("{}: {error}", path.display()));
            all.lock().expect("nobody panics with it").insert(place, judged);
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(judge_some);
        }
    });
    let all = all.into_inner().expect("nobody panics with it");
    all.into_iter().map(|(place, judged)| Ok((place, judged?))).collect()
}

fn main() -> Result<(), Error> {
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    if std::env::var_os("RUST_BACKTRACE").is_none() {
        // What panics is told with its case.
        set_hook(Box::new(|_| {}));
    }
    let mut page = Page::default();
    for judged in judge_paths(&arguments.cases()?, &Arm::here())?.into_values() {
        let Some(judged) = judged else {
            page.skipped += 1;
            continue;
        };
        for (case, arm, verdict, why) in judged {
            if verdict != Verdict::Passed {
                println!("{} {} {}: {why}", verdict.name(), arm.name(), case.name);
            }
            page.add(&case, arm, verdict);
        }
    }
    print!("{}", page.summary());
    if let Some(file) = arguments.page {
        fs::write(file, page.markdown())?;
    }
    Ok(())
}

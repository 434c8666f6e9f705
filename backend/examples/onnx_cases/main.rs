//! ONNX's own tests of those who run its models, as PyPI's package `onnx` brings them: each is a model with inputs
//! and with what must come out. What runs models here is asked to, one after another: the engine that is
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
    fs,
    panic::set_hook,
    path::{Path, PathBuf},
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

fn main() -> Result<(), Error> {
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    if std::env::var_os("RUST_BACKTRACE").is_none() {
        // What panics is told with its case.
        set_hook(Box::new(|_| {}));
    }
    let (arms, mut page) = (Arm::here(), Page::default());
    for path in arguments.cases()? {
        let case = if is_network(&path) { Some(Case::network(&path)?) } else { Case::read(&path)? };
        let Some(case) = case else {
            page.skipped += 1;
            continue;
        };
        for case in [case.exported(), Some(case)].into_iter().flatten() {
            // The networks' weights are made up, and lead to numbers that FP16 does not have.
            for &arm in arms.iter().filter(|&&arm| !(is_network(&path) && arm == Arm::CudaHalf)) {
                let (verdict, why) = judge(&case, arm).err().unwrap_or((Verdict::Passed, String::new()));
                if verdict != Verdict::Passed {
                    println!("{} {} {}: {why}", verdict.name(), arm.name(), case.name);
                }
                page.add(&case, arm, verdict);
            }
        }
    }
    print!("{}", page.summary());
    if let Some(file) = arguments.page {
        fs::write(file, page.markdown())?;
    }
    Ok(())
}

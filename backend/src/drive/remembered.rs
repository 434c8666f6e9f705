//! What one start has learned of models' files, for the next: small files in the user's folder of caches, outside of
//! every repository. The name of each is a digest of what decides whether it would be learned again. Where nothing can
//! be written nothing is remembered.

use std::{
    collections::BTreeMap,
    env, fs,
    io::{self, BufRead as _, Read as _},
    num::NonZero,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    thread::available_parallelism,
    time::UNIX_EPOCH,
};

use proto::{BatchCost, Span};
use repository::{Model, Processor};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::config::OnnxRuntime;

/// Notes of one kind that are kept; when there are more, all are forgotten.
const NOTES_MAX: usize = 4_096;
/// Bytes of a file that are read at once.
const READ_BYTES: usize = 1 << 16;
/// Bytes of a note that are read.
const NOTE_BYTES_MAX: u64 = 1 << 16;

/// A model whose graph is in a file, and what runs it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Of<'a> {
    pub(super) model: &'a Model,
    pub(super) file: &'a Path,
    pub(super) processor: Processor,
    /// They name the library that is loaded.
    pub(super) settings: &'a OnnxRuntime,
}

/// Something that is remembered.
#[derive(Debug)]
pub(super) struct Note {
    path: PathBuf,
}

/// l at some sizes, ascending.
type Points = Vec<(usize, Span)>;

/// What batches of a model took.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Costs {
    /// l(b) in nanoseconds, at some sizes, 1 first.
    sizes: Vec<(usize, i64)>,
    /// Nanoseconds, and millionths for each further task.
    cost: Option<(i64, u32)>,
    /// Its tasks run one after another.
    pub(super) is_apart: bool,
}

impl Costs {
    pub(super) fn new(sizes: &[(usize, Span)], cost: Option<BatchCost>, is_apart: bool) -> Self {
        let sizes = sizes.iter().map(|(size, took)| (*size, took.as_nanos())).collect();
        Self { sizes, cost: cost.map(|cost| (cost.fixed.as_nanos(), cost.per_task_ppm)), is_apart }
    }

    /// The same again, if it can be: whoever may write there may have written anything.
    pub(super) fn checked(&self, batch_max: usize) -> Option<(Points, Option<BatchCost>)> {
        let is_ascending = self.sizes.is_sorted_by(|(a, _), (b, _)| a < b);
        let ends_right = self.sizes.first()?.0 == 1 && self.sizes.last()?.0 <= batch_max;
        let fits = |nanos: i64| (1..=TOOK_MAX.as_nanos()).contains(&nanos);
        let is_right = is_ascending && ends_right && self.sizes.iter().all(|&(_, took)| fits(took));
        let is_cost = |&(fixed, ppm): &(i64, u32)| {
            fits(fixed.max(1)) && fixed >= 0 && (1..=BatchCost::PER_TASK_MAX).contains(&ppm)
        };
        let sizes = self.sizes.iter().map(|&(size, took)| (size, Span(took))).collect();
        let cost = self.cost.map(|(fixed, per_task_ppm)| BatchCost { fixed: Span(fixed), per_task_ppm });
        (is_right && self.cost.iter().all(is_cost)).then_some((sizes, cost))
    }
}

/// What no batch took that was measured.
const TOOK_MAX: Span = Span::from_millis(60_000);

impl Note {
    /// That it was tried, and came out well; `config` takes the place of what is written for it. `None` where nothing
    /// is remembered.
    pub(super) fn of_trial(of: Of<'_>, config: Option<&str>) -> Option<Self> {
        Self::below(&cache()?.join("tried"), of, &format!("{config:?}"))
    }

    /// What its batches take on so many of this host's threads that stand for GPUs.
    pub(super) fn of_costs(of: Of<'_>, gpus: usize) -> Option<Self> {
        let cores = available_parallelism().map_or(1, NonZero::get);
        Self::below(&cache()?.join("measured"), of, &format!("{gpus} {cores} {:?} {:?}", of.settings, processor_name()))
    }

    fn below(folder: &Path, of: Of<'_>, more: &str) -> Option<Self> {
        let Of { model, file, processor, settings } = of;
        let mut digest = Sha256::new();
        let engine = (env!("CARGO_PKG_VERSION"), processor, settings.provider, &model.inputs, &model.outputs);
        digest.update(format!("{engine:?} {} {more}", model.max_batch));
        if let Some(library) = &settings.library {
            digest.update(stamp(library)?);
        }
        digest.update(content(file)?);
        // Weights lie there, and whatever else: there may be too much to read it at each start.
        let mut beside: Vec<PathBuf> = fs::read_dir(file.parent()?).ok()?.flatten().map(|entry| entry.path()).collect();
        beside.retain(|other| other != file && other.is_file());
        beside.sort();
        for other in &beside {
            digest.update(stamp(other)?);
        }
        Some(Self { path: folder.join(hex(&digest.finalize())) })
    }

    /// Whether it was written.
    pub(super) fn is_there(&self) -> bool {
        self.path.is_file()
    }

    /// What was written, if that can be read.
    pub(super) fn read<T: for<'de> Deserialize<'de>>(&self) -> Option<T> {
        let mut text = String::new();
        fs::File::open(&self.path).ok()?.take(NOTE_BYTES_MAX).read_to_string(&mut text).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Writes it, whole or not at all.
    pub(super) fn write(&self, what: &impl Serialize) {
        let Some(folder) = self.path.parent() else { return };
        if fs::read_dir(folder).is_ok_and(|notes| notes.count() >= NOTES_MAX) {
            let _ = fs::remove_dir_all(folder);
        }
        let text = serde_json::to_string(what).expect("plain data");
        let begun = self.path.with_extension(std::process::id().to_string());
        let written = fs::create_dir_all(folder)
            .and_then(|()| fs::write(&begun, text))
            .and_then(|()| fs::rename(&begun, &self.path));
        if let Err(error) = written {
            tracing::debug!("{}: cannot be written: {error}", self.path.display());
        }
    }
}

/// `$XDG_CACHE_HOME`, or what it is by default.
fn cache() -> Option<PathBuf> {
    let named = |variable: &str| env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")))?;
    Some(base.join("downbeat"))
}

/// What the first of this host's processors is called, as far as it says so.
fn processor_name() -> Vec<String> {
    const NAMES: [&str; 3] = ["model name", "CPU implementer", "CPU part"];
    let Ok(file) = fs::File::open("/proc/cpuinfo") else { return Vec::new() };
    let lines = io::BufReader::new(file.take(READ_BYTES as u64)).lines().map_while(Result::ok);
    let of_first = lines.take_while(|line| !line.is_empty());
    of_first.filter(|line| NAMES.iter().any(|name| line.starts_with(name))).collect()
}

/// Which file it is, as far as that can be told without reading it.
fn stamp(file: &Path) -> Option<String> {
    let found = fs::metadata(file).ok()?;
    let changed = found.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(format!("{} {} {changed:?}", file.display(), found.len()))
}

/// A digest of what is in a file, which is read once for as long as it is the same.
fn content(file: &Path) -> Option<[u8; 32]> {
    static KNOWN: Mutex<BTreeMap<String, [u8; 32]>> = Mutex::new(BTreeMap::new());
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let stamp = stamp(file)?;
    if let Some(digest) = known().get(&stamp) {
        return Some(*digest);
    }
    let (mut file, mut digest) = (fs::File::open(file).ok()?, Sha256::new());
    let mut bytes = vec![0; READ_BYTES];
    loop {
        match file.read(&mut bytes).ok()? {
            0 => break,
            count => digest.update(&bytes[..count]),
        }
    }
    let digest = digest.finalize().into();
    let mut known = known();
    if known.len() >= NOTES_MAX {
        known.clear();
    }
    known.insert(stamp, digest);
    Some(digest)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_known_until_anything_changes_that_decides_it() {
        let place = tempfile::tempdir().unwrap();
        let (folder, cache) = (place.path().join("files"), place.path().join("a/b"));
        fs::create_dir(&folder).unwrap();
        let file = folder.join("model.onnx");
        // What a file has at one instant is told from what it has later by its length, too.
        fs::write(&file, "one").unwrap();
        let digits = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/digits");
        let model = repository::load_model(&digits).unwrap();
        let note = |processor, more| {
            let of = Of { model: &model, file: &file, processor, settings: &OnnxRuntime::default() };
            Note::below(&cache, of, more).unwrap()
        };
        let first = note(Processor::Cpu, "");
        assert!(!first.is_there());
        first.write(&());
        assert!(note(Processor::Cpu, "").is_there());
        assert!(!note(Processor::Onnxruntime, "").is_there() && !note(Processor::Cpu, "{}").is_there());
        fs::write(&file, "three").unwrap();
        assert!(!note(Processor::Cpu, "").is_there());
        fs::write(&file, "one").unwrap();
        assert!(note(Processor::Cpu, "").is_there());
        fs::write(folder.join("weights"), "").unwrap();
        assert!(!note(Processor::Cpu, "").is_there());
    }

    #[test]
    fn costs_come_back_as_they_were_and_what_cannot_be_any_is_not_taken() {
        let place = tempfile::tempdir().unwrap();
        let note = Note { path: place.path().join("a/note") };
        assert_eq!(note.read::<Costs>(), None);
        let sizes = [(1, Span(5)), (2, Span(7)), (4, Span(9))];
        let cost = Some(BatchCost { fixed: Span(0), per_task_ppm: 500 });
        note.write(&Costs::new(&sizes, cost, true));
        let read: Costs = note.read().unwrap();
        assert!(read.is_apart);
        assert_eq!(read.checked(4), Some((sizes.to_vec(), cost)));
        assert_eq!(read.checked(3), None, "of a larger batch than there is");
        let with = |sizes: &[(usize, i64)], cost| Costs { sizes: sizes.to_vec(), cost, is_apart: false }.checked(8);
        assert!(with(&[(1, 5)], None).is_some());
        for sizes in [&[][..], &[(2, 5)], &[(1, 5), (1, 6)], &[(1, 0)], &[(1, -1)], &[(1, i64::MAX)]] {
            assert_eq!(with(sizes, None), None, "{sizes:?}");
        }
        for cost in [(-1, 5), (i64::MAX, 5), (3, 0), (3, u32::MAX)] {
            assert_eq!(with(&[(1, 5)], Some(cost)), None, "{cost:?}");
        }
        fs::write(&note.path, "{").unwrap();
        assert_eq!(note.read::<Costs>(), None);
    }
}

//! Which files have been tried ([`super::probe`]), for the next start: an empty file for each, in the user's folder of
//! caches, outside of every repository. Its name is a digest of what decides whether the trial would come out as it
//! did. Where nothing can be written nothing is remembered.

use std::{
    env, fs,
    io::Read as _,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use repository::{Model, Processor};
use sha2::{Digest as _, Sha256};

use crate::config::OnnxRuntime;

/// Trials that are remembered; when there are more, all are forgotten.
const TRIED_MAX: usize = 4_096;

/// Bytes of a file that are read at once.
const READ_BYTES: usize = 1 << 16;

/// One trial's place.
#[derive(Debug)]
pub(super) struct Tried {
    note: PathBuf,
}

impl Tried {
    /// That of a model whose graph is in a file, by an engine; `config` takes the place of what is written for it.
    /// `None` where nothing is remembered.
    pub(super) fn of(
        (model, file): (&Model, &Path),
        (processor, settings): (Processor, &OnnxRuntime),
        config: Option<&str>,
    ) -> Option<Self> {
        Self::below(&cache()?, (model, file), (processor, settings), config)
    }

    fn below(
        cache: &Path,
        (model, file): (&Model, &Path),
        (processor, settings): (Processor, &OnnxRuntime),
        config: Option<&str>,
    ) -> Option<Self> {
        let mut digest = Sha256::new();
        let engine = (env!("CARGO_PKG_VERSION"), processor, settings.provider, &model.inputs, &model.outputs);
        digest.update(format!("{engine:?} {} {config:?}", model.max_batch));
        if let Some(library) = &settings.library {
            add_stamp(&mut digest, library)?;
        }
        add_content(&mut digest, file)?;
        // Weights lie there, and whatever else: there may be too much to read it at each start.
        let mut beside: Vec<PathBuf> = fs::read_dir(file.parent()?).ok()?.flatten().map(|entry| entry.path()).collect();
        beside.retain(|other| other != file && other.is_file());
        beside.sort();
        beside.iter().try_for_each(|other| add_stamp(&mut digest, other))?;
        let name: String = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Some(Self { note: cache.join(name) })
    }

    /// Whether it came out well before.
    pub(super) fn is_known(&self) -> bool {
        self.note.is_file()
    }

    /// It has come out well.
    pub(super) fn note(&self) {
        let Some(folder) = self.note.parent() else { return };
        if fs::read_dir(folder).is_ok_and(|notes| notes.count() >= TRIED_MAX) {
            let _ = fs::remove_dir_all(folder);
        }
        if let Err(error) = fs::create_dir_all(folder).and_then(|()| fs::write(&self.note, "")) {
            tracing::debug!("{}: cannot be written: {error}", self.note.display());
        }
    }
}

/// `$XDG_CACHE_HOME`, or what it is by default.
fn cache() -> Option<PathBuf> {
    let named = |variable: &str| env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")))?;
    Some(base.join("downbeat/tried"))
}

/// Which file it is, as far as that can be told without reading it.
fn add_stamp(digest: &mut Sha256, file: &Path) -> Option<()> {
    let found = fs::metadata(file).ok()?;
    let changed = found.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    digest.update(format!("{} {} {changed:?}", file.display(), found.len()));
    Some(())
}

fn add_content(digest: &mut Sha256, file: &Path) -> Option<()> {
    let mut file = fs::File::open(file).ok()?;
    let mut bytes = vec![0; READ_BYTES];
    loop {
        match file.read(&mut bytes).ok()? {
            0 => return Some(()),
            count => digest.update(&bytes[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_is_known_until_anything_changes_that_decides_it() {
        let place = tempfile::tempdir().unwrap();
        let (folder, cache) = (place.path().join("files"), place.path().join("a/b"));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("model.onnx"), "one").unwrap();
        let digits = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/digits");
        let model = repository::load_model(&digits).unwrap();
        let file = folder.join("model.onnx");
        let of = |processor, config| {
            Tried::below(&cache, (&model, &file), (processor, &OnnxRuntime::default()), config).unwrap()
        };
        let first = of(Processor::Cpu, None);
        assert!(!first.is_known());
        first.note();
        assert!(of(Processor::Cpu, None).is_known());
        assert!(!of(Processor::Onnxruntime, None).is_known() && !of(Processor::Cpu, Some("{}")).is_known());
        fs::write(&file, "two").unwrap();
        assert!(!of(Processor::Cpu, None).is_known());
        fs::write(&file, "one").unwrap();
        assert!(of(Processor::Cpu, None).is_known());
        fs::write(folder.join("weights"), "").unwrap();
        assert!(!of(Processor::Cpu, None).is_known());
    }
}

//! Where ONNX Runtime's library may be, the newest first, and what can be told of a file before it is loaded.

use std::{
    cmp::Reverse,
    collections::BTreeSet,
    env, fmt, fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{
    config::onnxruntime::{OnnxRuntime, Provider},
    executor::process::THIS_BINARY,
};

/// Names its path, where no configuration does.
pub(super) const PATH_VARIABLE: &str = "ORT_DYLIB_PATH";

/// What its name begins with, whichever version it is.
const NAME: &str = "libonnxruntime.so";

/// What a build for NVIDIA's GPUs has beside it.
const CUDA_NAME: &str = "libonnxruntime_providers_cuda.so";

/// The oldest that has all that is asked of it.
const OLDEST: [u32; 3] = [1, 17, 0];

/// Where the loader looks unless it is told otherwise, besides what `/etc/ld.so.conf` names.
const LIBRARY_FOLDERS: [&str; 5] = ["/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib"];

/// A file of `ld.so.conf` is short; folders that it names are few.
const LOADER_FILE_BYTES_MAX: u64 = 1 << 16;

/// Who says that a library is to be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Key,
    Environment,
    Program,
    Loader,
    Python,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key => "which onnxruntime.library names",
            Self::Environment => "which ORT_DYLIB_PATH names",
            Self::Program => "beside this program",
            Self::Loader => "where the system has libraries",
            Self::Python => "of Python's package onnxruntime",
        })
    }
}

/// A file that may be the library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) path: PathBuf,
    pub(super) place: Place,
    /// As its name, or that of the file which a link leads to, has it.
    version: Option<[u32; 3]>,
}

impl Candidate {
    fn of(path: PathBuf, place: Place) -> Self {
        let real = path.canonicalize().unwrap_or_else(|_| path.clone());
        let version = version(&real);
        Self { path, place, version }
    }

    /// Why it need not be loaded to know that it cannot be used.
    pub(super) fn refusal(&self, provider: Provider) -> Option<String> {
        let path = self.path.display();
        if let Some([major, minor, patch]) = self.version.filter(|version| *version < OLDEST) {
            let [oldest_major, oldest_minor, _] = OLDEST;
            return Some(format!("{path} is {major}.{minor}.{patch}, expected {oldest_major}.{oldest_minor} or newer"));
        }
        if machine(&self.path).is_some_and(|found| machine(Path::new(THIS_BINARY)) != Some(found)) {
            return Some(format!("{path} is for another architecture, expected {}", env::consts::ARCH));
        }
        let has_cuda = || self.path.canonicalize().is_ok_and(|real| real.with_file_name(CUDA_NAME).is_file());
        (provider == Provider::Cuda && !has_cuda()).then(|| {
            format!("{path} is built without CUDA, which onnxruntime.provider asks for (PyPI's onnxruntime-gpu has it)")
        })
    }
}

/// `libonnxruntime.so.1.22.0` says it.
fn version(path: &Path) -> Option<[u32; 3]> {
    let numbers = path.file_name()?.to_str()?.strip_prefix(NAME)?.strip_prefix('.')?;
    let mut numbers = numbers.split('.').map(|number| number.parse().ok());
    let version = [(); 3].map(|()| numbers.next().flatten());
    // `libonnxruntime.so.1`, which is no link, says nothing.
    Some([version[0]?, version[1]?, version[2].unwrap_or(0)])
}

/// The class and the machine that an ELF file is for; `None` if it is none.
fn machine(path: &Path) -> Option<[u8; 3]> {
    let mut head = [0; 20];
    fs::File::open(path).ok()?.read_exact(&mut head).ok()?;
    head.starts_with(b"\x7fELF").then(|| [head[4], head[18], head[19]])
}

/// Where the package `onnxruntime` is of the Python that runs models, or of the one on the path, if it has that.
#[must_use]
pub fn python_package() -> Option<PathBuf> {
    let own = repository::interpreter();
    let others = Some("python3".to_owned()).filter(|other| *other != own);
    std::iter::once(own).chain(others).find_map(|interpreter| package_of(&interpreter))
}

fn package_of(interpreter: &str) -> Option<PathBuf> {
    // It is found and not imported. A folder of that name where we happen to be is no package.
    let program = "import sys; sys.path = [p for p in sys.path if p]; from importlib.util import find_spec; \
                   print(*(getattr(find_spec('onnxruntime'), 'submodule_search_locations', None) or ())[:1])";
    let output = Command::new(interpreter).args(["-c", program]).stdin(Stdio::null()).output().ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim_end());
    Some(path).filter(|path| path.is_absolute())
}

/// Where to look: in one place if that was said, or else beside this program and where the system looks for libraries,
/// and in the folder of a Python's package if there is one; the newest first.
pub(super) fn candidates(settings: &OnnxRuntime, package: Option<&Path>) -> Vec<Candidate> {
    let said = |path: &Path, place| {
        // Not relative to this program's folder, as the loader would have it.
        vec![Candidate::of(std::path::absolute(path).unwrap_or_else(|_| path.to_owned()), place)]
    };
    if let Some(path) = &settings.library {
        return said(path, Place::Key);
    }
    if let Some(path) = env::var_os(PATH_VARIABLE).filter(|path| !path.is_empty()) {
        return said(Path::new(&path), Place::Environment);
    }
    let program = env::current_exe().ok().and_then(|program| program.parent().map(Path::to_owned));
    let program = program.into_iter().map(|folder| (folder, Place::Program));
    let loader = loader_folders().into_iter().map(|folder| (folder, Place::Loader));
    let package = package.into_iter().map(|folder| (folder.join("capi"), Place::Python));
    newest_first(program.chain(loader).chain(package))
}

fn newest_first(folders: impl Iterator<Item = (PathBuf, Place)>) -> Vec<Candidate> {
    let mut candidates = Vec::new();
    let mut seen = BTreeSet::new();
    for (folder, place) in folders {
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        let is_it = |name: &str| {
            let rest = name.strip_prefix(NAME);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.retain(|name| is_it(name));
        names.sort();
        for path in names.into_iter().map(|name| folder.join(name)) {
            // Links to the same file have its name already.
            if seen.insert(path.canonicalize().unwrap_or_else(|_| path.clone())) {
                candidates.push(Candidate::of(path, place));
            }
        }
    }
    candidates.sort_by_key(|candidate| Reverse(candidate.version));
    candidates
}

/// Where the loader looks, in its order.
fn loader_folders() -> Vec<PathBuf> {
    let named = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let named = env::split_paths(&named).filter(|folder| folder.is_absolute()).collect::<Vec<_>>();
    let mut files: Vec<PathBuf> = vec!["/etc/ld.so.conf".into()];
    let more = fs::read_dir("/etc/ld.so.conf.d").into_iter().flatten().flatten().map(|entry| entry.path());
    files.extend(more.filter(|path| path.extension().is_some_and(|extension| extension == "conf")));
    files.sort();
    let configured = files.iter().flat_map(|file| folders_of(&read_short(file)));
    named.into_iter().chain(configured).chain(LIBRARY_FOLDERS.map(PathBuf::from)).collect()
}

fn read_short(file: &Path) -> String {
    let mut text = String::new();
    let file = fs::File::open(file).map(|file| file.take(LOADER_FILE_BYTES_MAX));
    match file.and_then(|mut file| file.read_to_string(&mut text)) {
        Ok(_) => text,
        Err(_) => String::new(),
    }
}

/// The folders that a file of the loader's configuration names.
fn folders_of(text: &str) -> Vec<PathBuf> {
    text.lines().map(str::trim).filter(|line| line.starts_with('/')).map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A file that says what it is for.
    fn elf(path: &Path, [class, low, high]: [u8; 3]) {
        let mut head = vec![0; 64];
        head[..5].copy_from_slice(&[0x7f, b'E', b'L', b'F', class]);
        head[18..20].copy_from_slice(&[low, high]);
        fs::write(path, head).unwrap();
    }

    fn here() -> [u8; 3] {
        machine(Path::new(THIS_BINARY)).unwrap()
    }

    #[test]
    fn a_path_that_was_named_is_the_only_place() {
        let named = |path: &str| {
            let settings = OnnxRuntime { library: Some(path.into()), ..OnnxRuntime::default() };
            let found = candidates(&settings, Some(Path::new("/package")));
            found.into_iter().map(|candidate| (candidate.path, candidate.place)).collect::<Vec<_>>()
        };
        assert_eq!(named("lib/x.so"), [(env::current_dir().unwrap().join("lib/x.so"), Place::Key)]);
        assert_eq!(named("/x.so"), [(PathBuf::from("/x.so"), Place::Key)]);
    }

    #[test]
    fn the_newest_comes_first_and_a_link_is_what_it_leads_to() {
        let folder = tempfile::tempdir().unwrap();
        let [system, package] = ["system", "package"].map(|name| folder.path().join(name));
        for folder in [&system, &package] {
            fs::create_dir(folder).unwrap();
        }
        for (folder, name) in [(&system, "libonnxruntime.so.1.21.0"), (&package, "libonnxruntime.so.1.103.0")] {
            elf(&folder.join(name), here());
        }
        symlink("libonnxruntime.so.1.21.0", system.join("libonnxruntime.so.1")).unwrap();
        elf(&system.join("libonnxruntime.so"), here());
        for other in ["libonnxruntime_providers_shared.so", "libonnxruntime.solid", "libother.so.1.999.0"] {
            elf(&system.join(other), here());
        }
        let places = [(system.clone(), Place::Loader), (package, Place::Python), (system, Place::Loader)];
        let found = newest_first(places.into_iter());
        let found: Vec<_> = found.iter().map(|found| (found.version, found.place)).collect();
        let (newest, older) = (Some([1, 103, 0]), Some([1, 21, 0]));
        assert_eq!(found, [(newest, Place::Python), (older, Place::Loader), (None, Place::Loader)]);
    }

    #[test]
    fn what_cannot_be_used_is_named_without_being_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let refusal = |name: &str, machine, provider| {
            let path = folder.path().join(name);
            elf(&path, machine);
            let refusal = Candidate::of(path.clone(), Place::Loader).refusal(provider);
            refusal.map(|text| text.strip_prefix(&*path.to_string_lossy()).unwrap().to_owned())
        };
        let current = "libonnxruntime.so.1.17.0";
        assert_eq!(refusal(current, here(), Provider::Cpu), None);
        assert_eq!(refusal("libonnxruntime.so", here(), Provider::Cpu), None, "loading it tells");
        let old = refusal("libonnxruntime.so.1.16.3", here(), Provider::Cpu);
        assert_eq!(old.unwrap(), " is 1.16.3, expected 1.17 or newer");
        let foreign = refusal(current, [2, 0xff, 0xfe], Provider::Cpu).unwrap();
        assert!(foreign.starts_with(" is for another architecture, expected "), "{foreign}");
        let plain = refusal(current, here(), Provider::Cuda).unwrap();
        assert!(plain.starts_with(" is built without CUDA"), "{plain}");
        elf(&folder.path().join(CUDA_NAME), here());
        assert_eq!(refusal(current, here(), Provider::Cuda), None);
    }

    #[test]
    fn folders_are_what_the_loader_is_told() {
        let text = "# own\ninclude /etc/ld.so.conf.d/*.conf\n/opt/lib\n  /usr/lib/wsl/lib \nrelative\n";
        assert_eq!(folders_of(text), ["/opt/lib", "/usr/lib/wsl/lib"].map(PathBuf::from));
    }
}

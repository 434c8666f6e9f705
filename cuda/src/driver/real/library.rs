//! The shared libraries that a GPU is driven with: which are there, from where, and how old they are.
//!
//! They are opened when they are first asked for. cudarc ends the process where one is missing, so each is looked for
//! before its first call ([`require`]).
//!
//! This module has `unsafe` because opening a library runs what it does when it is loaded.

use cudarc::{cublaslt, cudnn, driver};

use crate::{DriverError, Library};

/// Which one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Cuda,
    CublasLt,
    Cudnn,
}

const ALL: [Kind; 3] = [Kind::Cuda, Kind::CublasLt, Kind::Cudnn];

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda",
            Self::CublasLt => "cuBLASLt",
            Self::Cudnn => "cuDNN",
        }
    }

    /// The file that the loader looks for; others of that name without a number, or with an older one, are taken, too.
    fn file(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda.so.1",
            Self::CublasLt => "libcublasLt.so.13",
            Self::Cudnn => "libcudnn.so.9",
        }
    }

    fn source(self) -> &'static str {
        match self {
            Self::Cuda => "NVIDIA's driver, 580 or later",
            Self::CublasLt => "the CUDA toolkit 13 or Python's nvidia-cublas",
            Self::Cudnn => "cuDNN 9.10 or later or Python's nvidia-cudnn-cu13",
        }
    }

    /// The oldest version whose functions are all there.
    fn oldest(self) -> (usize, usize) {
        match self {
            Self::Cuda | Self::CublasLt => (13, 0),
            Self::Cudnn => (9, 10),
        }
    }

    fn is_present(self) -> bool {
        // SAFETY: NVIDIA's libraries register themselves when they are loaded, and touch nothing else.
        unsafe {
            match self {
                Self::Cuda => driver::sys::is_culib_present(),
                Self::CublasLt => cublaslt::sys::is_culib_present(),
                Self::Cudnn => cudnn::sys::is_culib_present(),
            }
        }
    }

    /// Major and minor, of a library that is present.
    fn version(self) -> (usize, usize) {
        // SAFETY: the library is present, and these ask for nothing but a number.
        unsafe {
            match self {
                Self::Cuda => {
                    let mut version = 0;
                    let _ = driver::sys::cuDriverGetVersion(&raw mut version);
                    let version = usize::try_from(version).unwrap_or(0);
                    (version / 1000, version % 1000 / 10)
                }
                Self::CublasLt => split(cublaslt::sys::cublasLtGetVersion()),
                Self::Cudnn => split(cudnn::sys::cudnnGetVersion()),
            }
        }
    }

    fn look(self) -> Result<String, String> {
        if !self.is_present() {
            return Err(missing(self, &looked_in()));
        }
        let version = self.version();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let stem = self.file().trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
        let path = mapped(&maps, stem).unwrap_or_else(|| self.file().to_owned());
        if version < self.oldest() {
            return Err(outdated(self, &path, version));
        }
        Ok(format!("{path} {}.{}", version.0, version.1))
    }
}

/// NVIDIA's numbers: 90800 is 9.8.0, 130002 is 13.0.2, and 91002 is 9.10.2.
fn split(version: usize) -> (usize, usize) {
    (version / 10_000, version % 10_000 / 100)
}

/// Where the loader looks for libraries.
#[must_use]
pub fn looked_in() -> String {
    directories(&std::env::var("LD_LIBRARY_PATH").unwrap_or_default())
}

fn directories(named: &str) -> String {
    if named.is_empty() {
        "the system's directories (LD_LIBRARY_PATH is not set)".to_owned()
    } else {
        format!("LD_LIBRARY_PATH={named} and the system's directories")
    }
}

fn missing(kind: Kind, looked_in: &str) -> String {
    format!("no {}: looked for {} in {looked_in}; it comes with {}", kind.name(), kind.file(), kind.source())
}

fn outdated(kind: Kind, path: &str, version: (usize, usize)) -> String {
    let ((major, minor), (oldest, oldest_minor)) = (version, kind.oldest());
    let source = kind.source();
    format!("{path} is of version {major}.{minor}, but {oldest}.{oldest_minor} is needed; it comes with {source}")
}

/// The path of a file whose name begins with `stem`, as the kernel tells of this process's memory.
fn mapped(maps: &str, stem: &str) -> Option<String> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let is_it = |path: &&str| path.rsplit('/').next().is_some_and(|file| file.starts_with(stem));
    paths.filter(is_it).map(str::to_owned).next()
}

/// All that a GPU is driven with, for whoever asks what this host has.
#[must_use]
pub fn libraries() -> Vec<Library> {
    ALL.into_iter().map(|kind| Library { name: kind.name(), file: kind.file(), found: kind.look() }).collect()
}

/// Makes sure that libcuda's functions can be called.
pub(super) fn require_cuda() -> Result<(), DriverError> {
    Kind::Cuda.look().map(drop).map_err(DriverError)
}

/// Makes sure that all libraries' functions can be called.
pub(super) fn require() -> Result<(), DriverError> {
    ALL.into_iter().try_for_each(|kind| kind.look().map(drop)).map_err(DriverError)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_one_line_that_says_where_it_was_looked_for() {
        assert_eq!(
            missing(Kind::Cudnn, &directories("/opt/cudnn/lib")),
            "no cuDNN: looked for libcudnn.so.9 in LD_LIBRARY_PATH=/opt/cudnn/lib and the system's directories; \
             it comes with cuDNN 9.10 or later or Python's nvidia-cudnn-cu13"
        );
        let nowhere = missing(Kind::Cuda, &directories(""));
        assert!(nowhere.contains("libcuda.so.1 in the system's directories (LD_LIBRARY_PATH is not"));
    }

    #[test]
    fn an_old_library_is_one_line_that_says_which_is_needed() {
        assert_eq!(
            outdated(Kind::Cudnn, "/lib/libcudnn.so.9", (9, 8)),
            "/lib/libcudnn.so.9 is of version 9.8, but 9.10 is needed; \
             it comes with cuDNN 9.10 or later or Python's nvidia-cudnn-cu13"
        );
    }

    #[test]
    fn versions_are_major_and_minor() {
        assert_eq!(split(90_800), (9, 8));
        assert_eq!(split(91_002), (9, 10));
        assert_eq!(split(130_002), (13, 0));
    }

    #[test]
    fn the_path_is_that_of_the_mapped_file() {
        let maps = "7f00-7f01 r--p 0 08:01 1 /usr/lib/libc.so.6\n\
                    7f02-7f03 r-xp 0 08:01 2 /opt/nvidia/cudnn/lib/libcudnn_graph.so.9\n\
                    7f04-7f05 r-xp 0 08:01 3 /opt/nvidia/cudnn/lib/libcudnn.so.9\n\
                    7f06-7f07 rw-p 0 00:00 0 [heap]\n";
        assert_eq!(mapped(maps, "libcudnn.so").as_deref(), Some("/opt/nvidia/cudnn/lib/libcudnn.so.9"));
        assert_eq!(mapped(maps, "libcuda.so"), None);
    }
}

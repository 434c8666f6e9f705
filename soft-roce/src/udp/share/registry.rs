//! What the members of a group tell each other: files in a directory that belongs to the user, the network namespace
//! and the address.
//!
//! `claim-P` is locked by the member with prefix P as long as it lives, however it dies. `table` holds the last known
//! indexes; who changes it holds its lock until the new program is attached. Locks are the system's own (flock), so
//! nothing needs to be cleaned up after anyone.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Read, Seek, Write},
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use super::{MEMBERS_MAX, Published, Table};
use crate::udp::options;

/// The same for all processes of a host: an environment variable may differ between them.
const DIRECTORIES: [&str; 2] = ["/dev/shm", "/tmp"];
/// Ends a table that was written in whole: its writer may have died.
const END: &str = "end";

/// A member's view of its group.
#[derive(Debug)]
pub(crate) struct Registry {
    directory: PathBuf,
    table: File,
    prefix: u8,
    /// Locked until it is closed.
    _claim: File,
}

impl Registry {
    /// Claims a prefix, beginning the search with `first`.
    ///
    /// # Errors
    /// If the directory cannot be used or all prefixes are taken.
    pub(crate) fn join(address: SocketAddr, first: u8) -> io::Result<Self> {
        let base = DIRECTORIES.iter().find(|base| Path::new(base).is_dir());
        let base = base.ok_or_else(|| io::Error::other("sharing a port needs /dev/shm or /tmp"))?;
        let user = options::effective_user();
        // Where there is no /proc, all are taken for one.
        let namespace = fs::metadata("/proc/self/ns/net").map_or(0, |namespace| namespace.ino());
        let home = Path::new(base).join(format!("soft-roce-{user}"));
        private_directory(&home, user)?;
        Self::join_in(home.join(format!("{namespace}-{address}")), user, first)
    }

    fn join_in(directory: PathBuf, user: u32, first: u8) -> io::Result<Self> {
        private_directory(&directory, user)?;
        let table = open(&directory.join("table"))?;
        for candidate in 0..MEMBERS_MAX {
            let prefix = ((usize::from(first) + candidate) % MEMBERS_MAX) as u8;
            let claim = open(&claim_path(&directory, prefix))?;
            match claim.try_lock() {
                Ok(()) => return Ok(Self { directory, table, prefix, _claim: claim }),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        let cause = format!("{MEMBERS_MAX} endpoints share this address already, which is the limit; choose another");
        Err(io::Error::new(io::ErrorKind::AddrInUse, cause))
    }

    pub(crate) const fn prefix(&self) -> u8 {
        self.prefix
    }

    /// Members that live, this one included.
    pub(crate) fn count(&self) -> usize {
        (0..MEMBERS_MAX as u8).filter(|&prefix| self.lives(prefix)).count()
    }

    fn lives(&self, prefix: u8) -> bool {
        // Opened anew, so that not even our own lock is ours here.
        File::open(claim_path(&self.directory, prefix))
            .is_ok_and(|claim| matches!(claim.try_lock(), Err(TryLockError::WouldBlock)))
    }

    /// Enters our index, or only removes who has died, and gives the table to `attach` while nobody else can change it.
    pub(crate) fn publish(&mut self, index: Option<u8>, attach: impl FnOnce(&Table) -> io::Result<()>) -> Published {
        match self.table.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Published::Locked,
            Err(TryLockError::Error(_)) => return Published::Refused,
        }
        let outcome = self.publish_locked(index, attach);
        // It fails only for a file that is not open.
        let _ = self.table.unlock();
        if matches!(outcome, Ok(true)) { Published::Done } else { Published::Refused }
    }

    /// False if the group is too small for the index.
    fn publish_locked(&mut self, index: Option<u8>, attach: impl FnOnce(&Table) -> io::Result<()>) -> io::Result<bool> {
        if index.is_some_and(|index| usize::from(index) >= self.count()) {
            return Ok(false);
        }
        let mut text = String::new();
        self.table.rewind()?;
        // What cannot be read is nobody's loss for long: every member checks its entry.
        let _ = self.table.read_to_string(&mut text);
        let mut table = parse(&text);
        table.retain(|&prefix, _| self.lives(prefix));
        table.extend(index.map(|index| (self.prefix, index)));
        self.table.set_len(0)?;
        self.table.rewind()?;
        self.table.write_all(print(&table).as_bytes())?;
        attach(&table)?;
        Ok(true)
    }
}

fn print(table: &Table) -> String {
    table.iter().map(|(prefix, index)| format!("{prefix} {index}\n")).chain([END.to_owned()]).collect()
}

/// Empty if anything is wrong with it.
fn parse(text: &str) -> Table {
    let line = |line: &str| {
        let (prefix, index) = line.split_once(' ')?;
        Some((prefix.parse().ok()?, index.parse().ok()?))
    };
    let table: Option<Table> = text.strip_suffix(END).and_then(|text| text.lines().map(line).collect());
    table.filter(|table| table.len() <= MEMBERS_MAX).unwrap_or_default()
}

fn claim_path(directory: &Path, prefix: u8) -> PathBuf {
    directory.join(format!("claim-{prefix}"))
}

fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    file.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// Makes it, or makes sure that it is ours alone: others may write where it lies.
fn private_directory(path: &Path, user: u32) -> io::Result<()> {
    let refused = |cause: String| io::Error::new(io::ErrorKind::PermissionDenied, cause);
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(io::Error::new(error.kind(), format!("{}: {error}", path.display())));
        }
        _ => {}
    }
    let found = fs::symlink_metadata(path)?;
    if found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(refused(format!("{}: must be a directory of user {user} with mode 0700; remove what is there", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Self {
            let place = std::env::temp_dir().join(format!("soft-roce-test-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&place);
            Self(place)
        }

        fn join(&self, first: u8) -> io::Result<Registry> {
            Registry::join_in(self.0.clone(), options::effective_user(), first)
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn members_come_and_go() {
        let place = Place::new("members");
        let mut one = place.join(5).unwrap();
        let mut other = place.join(5).unwrap();
        assert_eq!((one.prefix(), other.prefix(), one.count()), (5, 6, 2));
        let mut seen = Table::new();
        let mut publish = |registry: &mut Registry, index| {
            registry.publish(index, |table| {
                seen = table.clone();
                Ok(())
            })
        };
        assert_eq!(publish(&mut one, Some(0)), Published::Done);
        assert_eq!(publish(&mut other, Some(2)), Published::Refused, "the group has two members");
        assert_eq!(publish(&mut other, Some(1)), Published::Done);
        drop(one);
        assert_eq!(publish(&mut other, Some(0)), Published::Done);
        assert_eq!(seen, Table::from([(6, 0)]));
        assert_eq!(other.count(), 1);
    }

    #[test]
    fn one_at_a_time() {
        let place = Place::new("lock");
        let (mut one, mut other) = (place.join(0).unwrap(), place.join(0).unwrap());
        let outcome = one.publish(Some(0), |_| {
            assert_eq!(other.publish(Some(1), |_| panic!("the lock is held")), Published::Locked);
            Err(io::ErrorKind::Unsupported.into())
        });
        assert_eq!(outcome, Published::Refused);
        assert_eq!(other.publish(Some(1), |_| Ok(())), Published::Done, "the lock is free again");
    }

    #[test]
    fn a_torn_table_is_no_table() {
        let table = Table::from([(1, 0), (63, 12)]);
        let text = print(&table);
        assert_eq!(parse(&text), table);
        for end in 0..text.len() {
            assert_eq!(parse(&text[..end]), Table::new(), "{end} bytes");
        }
        assert_eq!(parse("1 2\nnonsense\nend"), Table::new());
    }

    #[test]
    fn the_sixty_fifth_is_refused_by_name() {
        let place = Place::new("full");
        let members: Vec<_> = (0..MEMBERS_MAX).map(|_| place.join(3).unwrap()).collect();
        assert!(place.join(3).unwrap_err().to_string().contains("64 endpoints share"));
        assert_eq!(members[0].count(), MEMBERS_MAX);
    }

    #[test]
    fn a_directory_of_others_is_refused() {
        let place = Place::new("open");
        DirBuilder::new().mode(0o755).create(&place.0).unwrap();
        fs::set_permissions(&place.0, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let error = place.join(0).unwrap_err().to_string();
        assert!(error.contains("mode 0700; remove what is there"), "{error}");
    }
}

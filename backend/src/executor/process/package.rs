//! The Python package of clients/python, as a file that any Python runs: so a model in Python needs nothing installed
//! but numpy, and speaks the protocol of this backend.

/// What `python3 FILE` runs.
const MAIN: &str = "from downbeat.program import main\n\nmain()\n";

/// The package's files.
const FILES: [(&str, &str); 10] = [
    ("__main__.py", MAIN),
    ("downbeat/__init__.py", include_str!("../../../../clients/python/src/downbeat/__init__.py")),
    ("downbeat/model.py", include_str!("../../../../clients/python/src/downbeat/model.py")),
    ("downbeat/calls.py", include_str!("../../../../clients/python/src/downbeat/calls.py")),
    ("downbeat/channel.py", include_str!("../../../../clients/python/src/downbeat/channel.py")),
    ("downbeat/metrics.py", include_str!("../../../../clients/python/src/downbeat/metrics.py")),
    ("downbeat/program.py", include_str!("../../../../clients/python/src/downbeat/program.py")),
    ("downbeat/triton.py", include_str!("../../../../clients/python/src/downbeat/triton.py")),
    ("downbeat/up.py", include_str!("../../../../clients/python/src/downbeat/up.py")),
    ("downbeat/tensors.py", include_str!("../../../../clients/python/src/downbeat/tensors.py")),
];

/// ZIP's version that has all that is used here, 1.0.
const VERSION: u16 = 10;
/// 1980-01-01, the first day that it knows.
const DATE: u16 = 0x21;

/// The package as a ZIP file, which Python takes for a folder with a `__main__.py` (PKWARE's APPNOTE, 4.3: entries that
/// are stored as they are, then a directory of them).
pub(super) fn zip() -> Vec<u8> {
    let (mut zip, mut directory) = (Vec::new(), Vec::new());
    for (name, text) in FILES {
        let at = zip.len() as u32;
        let (length, name_length) = (text.len() as u32, name.len() as u16);
        let mut common = Vec::new();
        // Version, flags, method (stored), time; date; checksum; length twice; lengths of the name and of further
        // fields.
        [VERSION, 0, 0, 0, DATE].iter().for_each(|field| common.extend(field.to_le_bytes()));
        [crc32fast::hash(text.as_bytes()), length, length].iter().for_each(|field| common.extend(field.to_le_bytes()));
        [name_length, 0].iter().for_each(|field| common.extend(field.to_le_bytes()));
        zip.extend(b"PK\x03\x04");
        zip.extend(&common);
        zip.extend(name.bytes().chain(text.bytes()));
        directory.extend(b"PK\x01\x02");
        directory.extend(VERSION.to_le_bytes());
        directory.extend(&common);
        // No comment, first disk, no attributes.
        directory.extend([0; 10]);
        directory.extend(at.to_le_bytes());
        directory.extend(name.bytes());
    }
    let (at, length, count) = (zip.len() as u32, directory.len() as u32, FILES.len() as u16);
    zip.extend(directory);
    zip.extend(b"PK\x05\x06");
    [0, 0, count, count].iter().for_each(|field| zip.extend(field.to_le_bytes()));
    [length, at].iter().for_each(|field| zip.extend(field.to_le_bytes()));
    zip.extend(0u16.to_le_bytes());
    zip
}

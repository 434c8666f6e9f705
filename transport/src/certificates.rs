//! A member's certificates: those that its files hold, now and whenever they are replaced; and when those end that this
//! process shows, for operators.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError, RwLock, Weak},
};

use rustls::pki_types::CertificateDer;

use crate::{
    error::OpenError,
    followed::{Followed, each_second},
    tls::{Tls, TlsFiles},
};

/// What members prove themselves with by mutual TLS; a clone follows the same files.
#[derive(Clone)]
pub struct Certificates(Arc<RwLock<Tls>>);

impl Certificates {
    /// What files hold, now and whenever they are replaced: connections from then on have the new ones. If they are
    /// wrong then, what they held before counts on.
    ///
    /// # Errors
    /// One line that names the key and the file, and what is wrong with it.
    pub fn of_files(files: &TlsFiles) -> Result<Self, OpenError> {
        let (mut followed, certificates) = Self::open(files)?;
        let (shared, files) = (Arc::downgrade(&certificates.0), files.clone());
        let turn = move || look(&mut followed, &files, &shared);
        each_second("certificates", turn).map_err(OpenError::CertificatesThread)?;
        Ok(certificates)
    }

    fn open(files: &TlsFiles) -> Result<(Followed, Self), OpenError> {
        let TlsFiles { certificate, key, authority, .. } = files;
        let followed = Followed::new([certificate, key, authority].map(Clone::clone).to_vec());
        let tls = Tls::load(files)?;
        Ok((followed, Self(Arc::new(RwLock::new(tls)))))
    }

    /// For a connection that begins now.
    pub(crate) fn known(&self) -> Tls {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl PartialEq for Certificates {
    /// Whether both follow the same files.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Certificates {}

impl fmt::Debug for Certificates {
    /// Without them: keys have no place in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Certificates")
    }
}

/// Takes in what has been replaced. `None` once nobody is left who wants to know.
fn look(followed: &mut Followed, files: &TlsFiles, shared: &Weak<RwLock<Tls>>) -> Option<()> {
    let shared = shared.upgrade()?;
    if let Some(tls) = followed.look(|| Tls::load(files)) {
        *shared.write().unwrap_or_else(PoisonError::into_inner) = tls;
        tracing::info!("tls: its files were replaced; connections from now on have the certificates that they hold");
    }
    Some(())
}

/// By the key that names its file: when the first certificate of a file ends.
static ENDS: Mutex<BTreeMap<String, i64>> = Mutex::new(BTreeMap::new());

/// When the certificates end that this process shows: by the key that names their file, in seconds since 1970. Of a
/// chain it is the end of the first that ends.
#[must_use]
pub fn certificates_end() -> Vec<(String, i64)> {
    let ends = ENDS.lock().unwrap_or_else(PoisonError::into_inner);
    ends.iter().map(|(key, end)| (key.clone(), *end)).collect()
}

/// What a file that this key names holds is shown from now on.
pub(crate) fn note_shown(key: &str, chain: &[CertificateDer<'_>]) {
    let end = chain.iter().filter_map(|certificate| not_after(certificate)).min();
    let mut ends = ENDS.lock().unwrap_or_else(PoisonError::into_inner);
    match end {
        Some(end) => drop(ends.insert(key.to_owned(), end)),
        None => drop(ends.remove(key)),
    }
}

// Tags of DER (X.690).
const SEQUENCE: u8 = 0x30;
const INTEGER: u8 = 0x02;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
/// `[0] EXPLICIT`.
const VERSION: u8 = 0xa0;

/// The end of a certificate's validity, in seconds since 1970 (RFC 5280, section 4.1); `None` if it is no certificate.
fn not_after(certificate: &[u8]) -> Option<i64> {
    let (certificate, _) = value(certificate, SEQUENCE)?;
    let (mut rest, _) = value(certificate, SEQUENCE)?;
    if rest.first() == Some(&VERSION) {
        rest = value(rest, VERSION)?.1;
    }
    // The serial number, the algorithm of the signature, and the issuer.
    for tag in [INTEGER, SEQUENCE, SEQUENCE] {
        rest = value(rest, tag)?.1;
    }
    let (validity, _) = value(rest, SEQUENCE)?;
    let (_, not_after) = time(validity)?;
    time(not_after).map(|(end, _)| end)
}

/// The contents of the value that comes first, and what follows it.
fn value(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = bytes.split_first()?;
    let (&length, rest) = rest.split_first()?;
    // Beyond 127 it is the length of the length; 128 itself is for what has none, which DER has not.
    let (length, rest) = match length {
        0..=0x7f => (usize::from(length), rest),
        0x81..=0x84 => {
            let (length, rest) = rest.split_at_checked(usize::from(length & 0x7f))?;
            (length.iter().fold(0, |sum, &byte| sum << 8 | usize::from(byte)), rest)
        }
        _ => return None,
    };
    (found == tag).then(|| rest.split_at_checked(length))?
}

/// The time that comes first, and what follows it.
fn time(bytes: &[u8]) -> Option<(i64, &[u8])> {
    let (digits, rest, year_digits) = match bytes.first()? {
        &UTC_TIME => value(bytes, UTC_TIME).map(|(digits, rest)| (digits, rest, 2))?,
        _ => value(bytes, GENERALIZED_TIME).map(|(digits, rest)| (digits, rest, 4))?,
    };
    let (digits, []) = digits.strip_suffix(b"Z")?.split_at_checked(year_digits + 10)? else { return None };
    let number = |digits: &[u8]| {
        let is_number = digits.iter().all(u8::is_ascii_digit);
        is_number.then(|| digits.iter().fold(0, |sum, &digit| 10 * sum + i64::from(digit - b'0')))
    };
    let (year, others) = digits.split_at(year_digits);
    let year = match number(year)? {
        // RFC 5280, section 4.1.2.5.1.
        year @ 0..50 if year_digits == 2 => 2000 + year,
        year if year_digits == 2 => 1900 + year,
        year => year,
    };
    let others = others.chunks(2).map(number).collect::<Option<Vec<_>>>()?;
    let [month @ 1..=12, day @ 1..=31, hour, minute, second] = others[..] else { return None };
    Some((86_400 * days(year, month, day) + 3_600 * hour + 60 * minute + second, rest))
}

/// Days since 1970-01-01 of the Gregorian calendar. A year begins with March here, so that the leap day ends it.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1 - 719_468
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    fn ending(year: i32, month: u8, day: u8) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(["downbeat".to_owned()]).unwrap();
        params.not_after = date_time_ymd(year, month, day);
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn the_first_end_of_a_chain_is_told() {
        // As UTCTime, and as GeneralizedTime.
        assert_eq!(not_after(&ending(2049, 12, 31)), Some(2_524_521_600));
        assert_eq!(not_after(&ending(2052, 2, 29)), Some(2_592_777_600));
        note_shown("a test's", &[ending(2049, 12, 31), ending(2030, 3, 1)]);
        let told = || certificates_end().into_iter().find(|(key, _)| key == "a test's");
        assert_eq!(told(), Some(("a test's".to_owned(), 1_898_553_600)));
        note_shown("a test's", &[]);
        assert_eq!(told(), None);
    }

    #[test]
    fn what_is_no_certificate_has_no_end() {
        let certificate = ending(2030, 3, 1);
        // The end of its validity is among the first of its bytes.
        assert!((0..80).all(|length| not_after(&certificate[..length]).is_none()));
        for at in 0..certificate.len() {
            for changed in [0, 0x7f, 0x80, 0x84, 0xff] {
                let mut bytes = certificate.to_vec();
                bytes[at] = changed;
                let _ = not_after(&bytes);
            }
        }
        let times: [&[u8]; 4] =
            [b"\x17\x0d301301000000Z", b"\x17\x0c30120100000Z", b"\x17\x0d30120100000aZ", b"\x16\x00"];
        assert!(times.iter().all(|wrong| time(wrong).is_none()));
    }

    /// Files of another member of the same authority are put in a member's place.
    #[test]
    fn certificates_that_are_replaced_count_as_soon_as_they_fit() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let write = |name: &str, text: String| std::fs::write(path(name), text).unwrap();
        let made = || {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new(["downbeat".to_owned()]).unwrap();
            (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
        };
        let ((certificate, key), (next_certificate, next_key)) = (made(), made());
        write("member.pem", certificate.clone());
        write("member.key", key);
        write("ca.pem", certificate);
        let files = TlsFiles {
            certificate: path("member.pem"),
            key: path("member.key"),
            authority: path("ca.pem"),
            name: "downbeat".to_owned(),
        };
        let (mut followed, certificates) = Certificates::open(&files).unwrap();
        let shared = Arc::downgrade(&certificates.0);
        let first = certificates.known();
        let mut is_first = || {
            look(&mut followed, &files, &shared).unwrap();
            certificates.known().is(&first)
        };
        assert!(is_first());
        // The key is not there yet; then it is.
        write("member.pem", next_certificate);
        assert!(is_first());
        write("member.key", next_key);
        assert!(!is_first());
        drop(certificates);
        assert!(look(&mut followed, &files, &shared).is_none(), "nobody wants to know");
    }
}

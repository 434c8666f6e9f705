//! The table `[clients]` of a frontend's configuration: who may connect, and what they may do.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use transport::ServerTlsFiles;

use super::{
    Grant, Holder, Operation,
    digest::{Digest, digest_of},
    rate::Rate,
};

/// Tokens at most: each request is compared with all of them.
const TOKENS_MAX: usize = 1024;
/// A token shorter than this can be guessed.
const TOKEN_BYTES_MIN: usize = 16;

/// Who may connect, and what they may do.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Clients {
    /// Certificates; without them connections are not encrypted.
    pub tls: Option<ServerTlsFiles>,
    /// What clients without a token may do. By default everything if there are no tokens, else to ask for the server's
    /// health.
    pub anonymous: Option<Allowance>,
    /// Bearer tokens (RFC 6750).
    pub token: Vec<Token>,
    /// Names by which clients without encryption may reach us besides `localhost` and IP addresses; `*` stands
    /// for any. By default none if there are no tokens, else any.
    pub hosts: Option<Vec<String>>,
    /// What of this host's shared memory clients may register.
    pub shared_memory: SharedMemory,
}

/// What of this host's shared memory clients may register.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SharedMemory {
    /// What the names of its files begin with.
    pub prefix: String,
    /// The user ids that its files may belong to; any if there is no list.
    pub owners: Option<Vec<u32>>,
    /// Regions of one client.
    pub client_regions_max: usize,
    /// Bytes of one client's regions together.
    pub client_bytes_max: u64,
}

impl Default for SharedMemory {
    fn default() -> Self {
        Self { prefix: String::new(), owners: None, client_regions_max: 256, client_bytes_max: 16 << 30 }
    }
}

/// A bearer token and what its holder may do. It is told by its digest or by a file that it is in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Token {
    /// Whose it is, for messages.
    pub name: String,
    /// The SHA-256 digest of the token, in hexadecimal digits.
    #[serde(default)]
    pub sha256: Option<String>,
    /// A file with nothing but the token in it.
    #[serde(default)]
    pub file: Option<PathBuf>,
    /// What its holder may do.
    pub allow: Allowance,
}

/// What a client may do.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Allowance {
    /// Operations by name, or `*`.
    pub operations: Option<Vec<String>>,
    /// Models by name, by what their name begins with (`resnet*`), or `*`, which is the default.
    pub models: Option<Vec<String>>,
    /// Requests under way at once; for clients without a token, of all of them.
    pub requests_max: Option<usize>,
    /// Requests a second; for clients without a token, of each address.
    pub requests_per_second: Option<f64>,
    /// Requests at once after a pause; by default those of a second.
    pub burst: Option<u32>,
}

impl Clients {
    /// Whether a stranger can neither listen in nor do anything that needs a token.
    #[must_use]
    pub fn is_guarded(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.authority.is_some() || !self.token.is_empty())
    }

    /// The files that it names.
    #[must_use]
    pub fn files(&self) -> Vec<PathBuf> {
        let tls = self.tls.iter().flat_map(|tls| [Some(&tls.certificate), Some(&tls.key), tls.authority.as_ref()]);
        tls.flatten().chain(self.token.iter().filter_map(|token| token.file.as_ref())).cloned().collect()
    }

    /// Checks everything and reads the tokens' files. The first grant is that of clients without a token.
    ///
    /// # Errors
    /// One line that names the key, and tells what was found and expected.
    pub fn grants(&self) -> Result<Vec<Grant>, String> {
        if self.token.len() > TOKENS_MAX {
            return Err(format!("clients.token: found {}, expected at most {TOKENS_MAX}", self.token.len()));
        }
        let without = if self.token.is_empty() { "*" } else { Operation::Health.name() };
        let anonymous = self.anonymous.clone().unwrap_or_default();
        let mut grants = vec![anonymous.grant("clients.anonymous", Holder::Anyone, Some(without))?];
        for (index, token) in self.token.iter().enumerate() {
            let table = format!("clients.token[{index}]");
            let digest = token.digest(&table)?;
            if let Some(twin) = self.token[..index].iter().find(|other| other.name == token.name) {
                return Err(format!("{table}.name: found '{}' again, expected another name", twin.name));
            }
            if grants
                .iter()
                .any(|grant| matches!(&grant.holder, Holder::Token { digest: other, .. } if *other == digest))
            {
                return Err(format!("{table}: found a token that another entry has, expected a token of its own"));
            }
            let holder = Holder::Token { name: token.name.clone(), digest };
            grants.push(token.allow.grant(&format!("{table}.allow"), holder, None)?);
        }
        Ok(grants)
    }
}

impl Token {
    fn digest(&self, table: &str) -> Result<Digest, String> {
        match (&self.sha256, &self.file) {
            (Some(hex), None) => parse_hex(hex).ok_or_else(|| {
                format!("{table}.sha256: found '{hex}', expected the 64 hexadecimal digits of a digest")
            }),
            (None, Some(file)) => {
                let text = std::fs::read_to_string(file)
                    .map_err(|error| format!("{table}.file: {}: {error}", file.display()))?;
                let token = text.trim();
                if token.len() < TOKEN_BYTES_MIN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
                    let expected = format!("one of at least {TOKEN_BYTES_MIN} printable characters and nothing else");
                    return Err(format!("{table}.file: {}: found no such token, expected {expected}", file.display()));
                }
                Ok(digest_of(token.as_bytes()))
            }
            (None, None) => Err(format!("{table}: found neither sha256 nor file, expected one of them")),
            (Some(_), Some(_)) => Err(format!("{table}: found both sha256 and file, expected one of them")),
        }
    }
}

impl Allowance {
    fn grant(&self, table: &str, holder: Holder, operations: Option<&str>) -> Result<Grant, String> {
        let names: Vec<&str> = match &self.operations {
            Some(names) => names.iter().map(String::as_str).collect(),
            None => operations.into_iter().collect(),
        };
        if names.is_empty() {
            return Err(format!("{table}.operations: found none, expected some of: {}, or '*'", Operation::names()));
        }
        let mut operations = Vec::new();
        for name in names {
            match name {
                // Who may do everything else may still not end the process.
                "*" => operations.extend(Operation::ALL.into_iter().filter(|all| *all != Operation::Drain)),
                name => operations.push(Operation::from_name(name).ok_or_else(|| {
                    let known = Operation::names();
                    format!("{table}.operations: found '{name}', expected one of: {known}, or '*'")
                })?),
            }
        }
        let models = self.models.clone().unwrap_or_else(|| vec!["*".to_owned()]);
        if let Some(wrong) = models.iter().find(|model| model.trim_end_matches('*').contains('*') || model.is_empty()) {
            let expected = "a model's name, possibly with a '*' at its end";
            return Err(format!("{table}.models: found '{wrong}', expected {expected}"));
        }
        if self.requests_max == Some(0) {
            return Err(format!("{table}.requests_max: found 0, expected at least 1"));
        }
        Ok(Grant { holder, operations, models, requests_max: self.requests_max, rate: self.rate(table)? })
    }

    fn rate(&self, table: &str) -> Result<Option<Rate>, String> {
        let Some(per_second) = self.requests_per_second else {
            return match self.burst {
                None => Ok(None),
                Some(burst) => Err(format!("{table}.burst: found {burst}, expected requests_per_second beside it")),
            };
        };
        if !(1e-3..=1e9).contains(&per_second) {
            return Err(format!("{table}.requests_per_second: found {per_second}, expected 0.001 to 1000000000"));
        }
        let burst = self.burst.unwrap_or(per_second.ceil() as u32);
        if burst == 0 {
            return Err(format!("{table}.burst: found 0, expected at least 1"));
        }
        Ok(Some(Rate::new(per_second, burst)))
    }
}

fn parse_hex(hex: &str) -> Option<Digest> {
    let mut digest = Digest::default();
    if hex.len() != 2 * digest.len() || !hex.is_ascii() {
        return None;
    }
    for (byte, digits) in digest.iter_mut().zip(hex.as_bytes().chunks(2)) {
        let digit = |at: usize| char::from(digits[at]).to_digit(16);
        *byte = (digit(0)? * 16 + digit(1)?) as u8;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clients(toml: &str) -> Result<Vec<Grant>, String> {
        toml::from_str::<Clients>(toml).map_err(|error| error.message().to_owned())?.grants()
    }

    #[test]
    fn what_is_wrong_is_named_with_what_was_expected() {
        let digest = "ab".repeat(32);
        let token = |rest: &str| format!("[[token]]\nname = 'x'\nsha256 = '{digest}'\n{rest}");
        for (toml, expected) in [
            (token(""), "missing field `allow`"),
            (token("allow = {}"), "clients.token[0].allow.operations: found none, expected some of: health, infer"),
            (token("allow = { operations = ['fly'] }"), "allow.operations: found 'fly', expected one of: health"),
            (token("allow = { operations = ['*'], models = ['a*b'] }"), "models: found 'a*b', expected a model's name"),
            (token("allow = { operations = ['*'], burst = 3 }"), "burst: found 3, expected requests_per_second"),
            (
                token("allow = { operations = ['*'], requests_per_second = 0 }"),
                "requests_per_second: found 0, expected",
            ),
            (token("allow = { operations = ['*'], requests_max = 0 }"), "requests_max: found 0, expected at least 1"),
            (token("allow = { operations = ['*'] }").replace("ab", "xy"), "clients.token[0].sha256: found 'xyxy"),
            (token("file = 'x'\nallow = { operations = ['*'] }"), "found both sha256 and file, expected one of them"),
            ("[[token]]\nname = 'x'\nallow = { operations = ['*'] }".into(), "found neither sha256 nor file"),
            (
                "[[token]]\nname = 'x'\nfile = '/nowhere/token'\nallow = { operations = ['*'] }".into(),
                "clients.token[0].file: /nowhere/token: No such file",
            ),
            (
                [token("allow = { operations = ['*'] }"), token("allow = { operations = ['*'] }")].join("\n"),
                "clients.token[1].name: found 'x' again",
            ),
            (
                [token("allow.operations = ['*']"), token("allow.operations = ['*']").replace("'x'", "'y'")].join("\n"),
                "clients.token[1]: found a token that another entry has",
            ),
        ] {
            let error = clients(&toml).unwrap_err();
            assert!(error.contains(expected), "found {error}, expected {expected}");
            assert_eq!(error.lines().count(), 1);
        }
    }

    #[test]
    fn a_token_in_a_file_is_that_without_the_end_of_its_line() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let toml = format!("[[token]]\nname = 'x'\nfile = '{}'\nallow.operations = ['infer']", file.path().display());
        std::fs::write(file.path(), "0123456789abcdef\n").unwrap();
        let grants = clients(&toml).unwrap();
        let digest = digest_of(b"0123456789abcdef");
        assert_eq!(grants[1].holder, Holder::Token { name: "x".into(), digest });
        for wrong in ["", "short", "two tokens of enough bytes"] {
            std::fs::write(file.path(), wrong).unwrap();
            assert!(clients(&toml).unwrap_err().contains("expected one of at least 16 printable characters"));
        }
    }

    #[test]
    fn only_encrypted_clients_that_prove_who_they_are_count_as_guarded() {
        let tls = "[tls]\ncertificate = 'c'\nkey = 'k'\n";
        let token = format!("[[token]]\nname = 'x'\nsha256 = '{}'\nallow.operations = ['*']\n", "0".repeat(64));
        let guarded = |toml: &str| toml::from_str::<Clients>(toml).unwrap().is_guarded();
        assert!(!guarded("") && !guarded(tls) && !guarded(&token));
        assert!(guarded(&format!("{tls}{token}")) && guarded(&format!("{tls}authority = 'a'\n")));
    }
}

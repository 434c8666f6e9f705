//! The keys `secret` and `secret_file` of a role's configuration.

use std::{fmt, marker::PhantomData, path::PathBuf};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error as _, SeqAccess, Visitor, value::StrDeserializer},
};

use crate::{
    Secrets,
    error::OpenError,
    limits::SECRETS_MAX,
    secrets::{check_count, check_secret},
};

/// Where a member has its secret from. While the cluster changes it there are two: the first is proved, either is
/// believed.
#[derive(Clone, PartialEq, Eq, Serialize)]
pub enum SecretKey {
    /// `secret = ".."`, or `["..", ".."]`.
    #[serde(rename = "secret")]
    Inline(OneOrTwo<String>),
    /// `secret_file = "PATH"`, or two of them.
    #[serde(rename = "secret_file")]
    Files(OneOrTwo<PathBuf>),
}

impl fmt::Debug for SecretKey {
    /// Without the secret, which has no place in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inline(_) => f.write_str("secret"),
            Self::Files(OneOrTwo(paths)) => f.debug_tuple("secret_file").field(paths).finish(),
        }
    }
}

impl Default for SecretKey {
    /// None, with which nothing can be opened.
    fn default() -> Self {
        Self::Inline(OneOrTwo(Vec::new()))
    }
}

impl From<String> for SecretKey {
    fn from(secret: String) -> Self {
        Self::Inline(OneOrTwo(vec![secret]))
    }
}

impl SecretKey {
    /// What the key names, which files are read for.
    ///
    /// # Errors
    /// One line that names the key and the file, what was found and what was expected.
    pub fn open(&self) -> Result<Secrets, OpenError> {
        match self {
            Self::Inline(OneOrTwo(secrets)) => Ok(Secrets::fixed(secrets)),
            Self::Files(OneOrTwo(paths)) => Secrets::of_files(paths),
        }
    }
}

/// One, or a list of one or two.
#[derive(Clone, PartialEq, Eq)]
pub struct OneOrTwo<T>(pub(super) Vec<T>);

impl<T: Serialize> Serialize for OneOrTwo<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [one] => one.serialize(serializer),
            several => several.serialize(serializer),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OneOrTwo<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
            type Value = OneOrTwo<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, or a list of one or two")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<OneOrTwo<T>, E> {
                T::deserialize(StrDeserializer::new(text)).map(|one| OneOrTwo(vec![one]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<OneOrTwo<T>, A::Error> {
                let mut all = Vec::new();
                while let Some(one) = list.next_element()? {
                    all.push(one);
                    if all.len() > SECRETS_MAX {
                        break;
                    }
                }
                check_count(all.len()).map_err(A::Error::custom)?;
                Ok(OneOrTwo(all))
            }
        }

        deserializer.deserialize_any(Either(PhantomData))
    }
}

/// What `secret` is read as: it is checked while its line is known.
pub(super) struct Inline(pub(super) OneOrTwo<String>);

impl<'de> Deserialize<'de> for Inline {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let secrets = OneOrTwo::<String>::deserialize(deserializer)?;
        secrets.0.iter().try_for_each(|secret| check_secret(secret.as_bytes())).map_err(D::Error::custom)?;
        Ok(Self(secrets))
    }
}

//! Which versions of a model are served: the folders that there are, by its `version_policy`. A folder whose name is
//! not a number, or begins with 0, is none (Triton, "Model Versions").

use std::collections::BTreeSet;

use prost_reflect::DynamicMessage;
use proto::backend_to_scheduler::VERSIONS_MAX;

use crate::{
    config::file::{ConfigFile, get},
    error::RepositoryError,
    folders::folders,
    model::ENSEMBLE,
};

/// `version_policy`.
#[derive(Debug, PartialEq, Eq)]
enum Policy {
    /// The highest so many; one unless the configuration says otherwise.
    Latest(usize),
    All,
    Specific(BTreeSet<u64>),
}

impl ConfigFile<'_> {
    /// The versions that are to be served, ascending; "1" for an emulated model or an ensemble without
    /// any folder: neither has anything to keep there.
    pub(super) fn versions(&self) -> Result<Vec<String>, RepositoryError> {
        let found = self.version_folders()?;
        if found.is_empty() && ["emulated", ENSEMBLE].contains(&&*self.executor_name()) {
            return Ok(vec!["1".to_owned()]);
        }
        if found.is_empty() {
            return Err(RepositoryError(format!(
                "{}: found no version folder, expected one whose name is a number, for example 1",
                self.folder.display()
            )));
        }
        let served: Vec<u64> = match self.policy()? {
            Policy::Latest(count) => found.iter().rev().take(count).rev().copied().collect(),
            Policy::All => found.iter().copied().collect(),
            Policy::Specific(allowed) => {
                let served: Vec<u64> = found.intersection(&allowed).copied().collect();
                if served.is_empty() {
                    let names: Vec<String> = found.iter().map(u64::to_string).collect();
                    let allowed: Vec<u64> = allowed.into_iter().collect();
                    let found = format_args!("none of the versions {allowed:?}");
                    return Err(self.error(
                        "version_policy.specific",
                        found,
                        format_args!("one of: {}", names.join(", ")),
                    ));
                }
                served
            }
        };
        if served.len() > VERSIONS_MAX {
            let expected = format!("at most {VERSIONS_MAX} at once; fewer by latest or specific");
            return Err(self.error("version_policy", format_args!("{} versions", served.len()), expected));
        }
        Ok(served.iter().map(u64::to_string).collect())
    }

    pub(super) fn version_folders(&self) -> Result<BTreeSet<u64>, RepositoryError> {
        let folders = folders(self.folder)?;
        let names = folders.iter().filter_map(|folder| folder.file_name()?.to_str());
        let numbers = names.filter(|name| name.starts_with(|c: char| c.is_ascii_digit() && c != '0'));
        Ok(numbers.filter_map(|name| name.parse().ok()).collect())
    }

    fn policy(&self) -> Result<Policy, RepositoryError> {
        let policy = get(&self.message, "version_policy");
        let policy = policy.as_message().expect("the schema says message");
        let choice = |key: &str| -> Option<DynamicMessage> {
            policy.has_field_by_name(key).then(|| get(policy, key).as_message().cloned()).flatten()
        };
        if let Some(specific) = choice("specific") {
            let versions = get(&specific, "versions");
            let versions = versions.as_list().unwrap_or_default().iter().filter_map(prost_reflect::Value::as_i64);
            return Ok(Policy::Specific(versions.filter_map(|version| u64::try_from(version).ok()).collect()));
        }
        if choice("all").is_some() {
            return Ok(Policy::All);
        }
        let Some(latest) = choice("latest") else { return Ok(Policy::Latest(1)) };
        match get(&latest, "num_versions").as_u32().unwrap_or_default() {
            0 => Err(self.error("version_policy.latest.num_versions", 0, "at least 1")),
            count => Ok(Policy::Latest(count as usize)),
        }
    }
}

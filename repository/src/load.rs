//! Reads a repository, or one model of it.

use std::{collections::BTreeMap, path::Path};

use crate::{
    config::{self, Written},
    error::{Refused, RepositoryError},
    folders::{folder_of, folders},
    model::Model,
    stamp::Stamp,
    store::Source,
};

/// What is in a repository, sorted by name and version.
#[derive(Debug, Clone, Default)]
pub struct Repository {
    /// Models that can be served: each version is one.
    pub models: Vec<Model>,
    /// Ensembles of these models, which are no backend's matter: each version is one.
    pub ensembles: Vec<Model>,
    /// Folders that hold no such model, and versions that are none.
    pub refused: Vec<Refused>,
}

impl Repository {
    /// All models that backends run.
    ///
    /// # Errors
    /// If any is refused.
    pub fn whole(self) -> Result<Vec<Model>, RepositoryError> {
        self.checked(true).map(|whole| whole.models)
    }

    /// As it is, each model that is refused with a line in the log; or with an error for the first of them, if that is
    /// wanted.
    ///
    /// # Errors
    /// If `strict` and any is refused.
    pub fn checked(self, strict: bool) -> Result<Self, RepositoryError> {
        if let Some(Refused { reason, .. }) = self.refused.first().filter(|_| strict) {
            return Err(RepositoryError(reason.clone()));
        }
        for Refused { name, version, reason } in &self.refused {
            let version = if version.is_empty() { String::new() } else { format!(" version {version}") };
            tracing::warn!("model '{name}'{version} is not served: {reason}");
        }
        Ok(self)
    }
}

impl Repository {
    /// Refuses the ensembles that do not fit their members, and puts the steps of those that others ask in their
    /// places.
    fn check_ensembles(&mut self) {
        let Self { models, ensembles, refused } = self;
        let mut by_name: BTreeMap<&str, Vec<&Model>> = BTreeMap::new();
        for model in models.iter().chain(ensembles.iter()) {
            by_name.entry(&model.name).or_default().push(model);
        }
        let find = |name: &str, version: Option<&str>| {
            let versions = by_name.get(name)?;
            let newest = || versions.iter().max_by_key(|model| model.version.parse::<u64>().unwrap_or_default());
            match version {
                None => newest().copied(),
                Some(version) => versions.iter().find(|model| model.version == version).copied(),
            }
        };
        let mut kept = Vec::new();
        for face in ensembles.iter() {
            let mut face = face.clone();
            match face.join(find) {
                Ok(()) => {
                    face.inherit_labels(find);
                    kept.push(face);
                }
                Err(RepositoryError(reason)) => {
                    refused.push(Refused { name: face.name.clone(), version: face.version.clone(), reason });
                }
            }
        }
        *ensembles = kept;
    }
}

/// Reads all models of a repository. Files beside the model folders, and hidden folders, are ignored. A model whose
/// configuration is wrong does not keep the others from being read.
///
/// # Errors
/// If the folder cannot be read.
pub fn load(repository: &Path) -> Result<Repository, RepositoryError> {
    let mut folders = folders(repository)?;
    folders.sort();
    let mut found = Repository::default();
    for folder in folders {
        match config::load(&folder, Written::InFolder) {
            Ok(versions) => {
                for version in versions {
                    match version {
                        Ok(model) if model.ensemble().is_some() => found.ensembles.push(model),
                        Ok(model) => found.models.push(model),
                        Err(refused) => found.refused.push(refused),
                    }
                }
            }
            Err(RepositoryError(reason)) => {
                let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
                found.refused.push(Refused { name, version: String::new(), reason });
            }
        }
    }
    found.check_ensembles();
    Ok(found)
}

/// Reads the newest version of the model in one folder.
///
/// # Errors
/// If its configuration is wrong.
pub fn load_model(folder: &Path) -> Result<Model, RepositoryError> {
    let newest = config::load(folder, Written::InFolder)?.pop().expect("there is one, or an error");
    newest.map_err(|refused| RepositoryError(refused.reason))
}

/// Reads all versions of the model of that name that are to be served, ascending and at least one. The name and
/// `config`, a configuration in JSON instead of `config.pbtxt`, may come from a client, and so may what is at the
/// source.
///
/// # Errors
/// If it is not the name of a folder there, or its configuration is wrong, or one of its versions, or anything in its
/// folder changes meanwhile; or if files that a client brought are to be a program.
pub fn load_named(source: &Source, name: &str, config: Option<&str>) -> Result<Vec<Model>, RepositoryError> {
    let folder = folder_of(source.root(), name)?;
    let stamp = Stamp::of(&folder)?;
    let written = match config {
        None => Written::InFolder,
        Some(json) => Written::ByClient { json, brings_files: source.held().is_some() },
    };
    let versions = config::load(&folder, written)?.into_iter();
    // As Triton says it.
    let failed = |Refused { version, reason, .. }| {
        RepositoryError(format!("load failed for model '{name}': version {version}: {reason}"))
    };
    let with_files = |model: Model| Model { files: source.held().cloned(), ..model };
    let versions = versions.map(|version| version.map(with_files).map_err(failed)).collect::<Result<_, _>>()?;
    stamp.check(&folder)?;
    Ok(versions)
}

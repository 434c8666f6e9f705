//! Keys of `parameters` that mean nothing here, but nearly what one that does is called.

use prost_reflect::MapKey;

use super::file::{ConfigFile, get};

/// Those that mean something, of whatever model.
const KNOWN: [&str; 33] = [
    "alone_ms",
    "alpha_ms",
    "batch_elements_max",
    "batch_lengths",
    "beta_ms",
    "cost_fixed_ms",
    "cost_per_task",
    "confidence",
    "epsilon",
    "executor",
    "exploration",
    "files_max",
    "image",
    "load_ms",
    "mask_inputs",
    "max_bytes",
    "max_dims",
    "memory_mb",
    "network",
    "pad_values",
    "precision",
    "processes_max",
    "program",
    "reply_ms",
    "python",
    "samples",
    "selection",
    "slo_ms",
    "start_timeout_ms",
    "calls",
    "weights_mb",
    "EXECUTION_ENV_PATH",
    "FORCE_CPU_ONLY_INPUT_TENSORS",
];
/// Letters that differ between a key and the one that was meant.
const SLIPS: usize = 2;

impl ConfigFile<'_> {
    /// Says in the log which keys may be slips; any other is the model's own.
    pub(super) fn tell_misspelt(&self) {
        let parameters = get(&self.message, "parameters");
        for key in parameters.as_map().into_iter().flatten().map(|(key, _)| key) {
            if let MapKey::String(key) = key
                && let Some(meant) = meant(key)
            {
                tracing::warn!(
                    "{}: parameters: found \"{key}\", which means nothing; is it \"{meant}\"?",
                    self.path.display()
                );
            }
        }
    }
}

/// The known key that one which is not known nearly is.
fn meant(key: &str) -> Option<&'static str> {
    let folded = |text: &str| text.to_ascii_lowercase().replace('-', "_");
    if KNOWN.contains(&key) {
        return None;
    }
    let distances = KNOWN.into_iter().map(|known| (distance(&folded(key), &folded(known)), known));
    distances.min().filter(|(slips, known)| *slips <= SLIPS && known.len() > 2 * SLIPS).map(|(_, known)| known)
}

/// Letters to insert, delete or replace (Levenshtein); more than [`SLIPS`] of texts whose lengths differ by more.
fn distance(a: &str, b: &str) -> usize {
    if a.len().abs_diff(b.len()) > SLIPS {
        return SLIPS + 1;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (at, letter) in a.bytes().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], at + 1);
        for (other_at, other) in b.bytes().enumerate() {
            let replaced = corner + usize::from(letter != other);
            corner = row[other_at + 1];
            row[other_at + 1] = replaced.min(corner + 1).min(row[other_at] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_told_with_what_was_meant_and_keys_of_models_are_their_own() {
        let cases =
            [("max_byte", "max_bytes"), ("maxbytes", "max_bytes"), ("slo-ms", "slo_ms"), ("Executor", "executor")];
        for (found, expected) in cases {
            assert_eq!(meant(found), Some(expected), "{found}");
        }
        for own in ["max_bytes", "slo_ms", "temperature", "tokenizer_dir", "", "execution_mode"] {
            assert_eq!(meant(own), None, "{own}");
        }
        assert_eq!(distance("kitten", "sittin"), 2);
    }
}

//! What is asked of a page of JSON: the query behind its path.

use std::ops::RangeInclusive;

/// Keys and their values, decoded. Keys that nobody looks for are ignored, and of two of one name the first counts.
pub struct Query(Vec<(String, String)>);

impl Query {
    /// The query behind a `?`, which a request's head bounds.
    #[must_use]
    pub fn of(text: &str) -> Self {
        Self(form_urlencoded::parse(text.as_bytes()).into_owned().collect())
    }

    fn value(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(found, _)| found == key).map(|(_, value)| value.as_str())
    }

    /// A number within these, or else `default`.
    ///
    /// # Errors
    /// One line that names the key, what was found and what was expected.
    pub fn number(&self, key: &str, within: RangeInclusive<usize>, default: usize) -> Result<usize, String> {
        let Some(found) = self.value(key) else { return Ok(default) };
        let number: usize =
            found.parse().map_err(|_| format!("{key}: found `{}`, expected a number", found.escape_debug()))?;
        let (least, most) = (within.start(), within.end());
        within
            .contains(&number)
            .then_some(number)
            .ok_or_else(|| format!("{key}: found {number}, expected {least} to {most}"))
    }

    /// The place of one of these words; the first, if there is none.
    ///
    /// # Errors
    /// As [`Self::number`].
    pub fn one_of(&self, key: &str, words: &[&str]) -> Result<usize, String> {
        let Some(found) = self.value(key) else { return Ok(0) };
        let place = words.iter().position(|word| *word == found);
        place.ok_or_else(|| format!("{key}: found `{}`, expected one of {}", found.escape_debug(), words.join(", ")))
    }

    /// Whether a text has this key's value in it, in large or small letters (of ASCII); every text, if there is none.
    pub fn part_of(&self, key: &str) -> impl Fn(&str) -> bool + use<> {
        let part = self.value(key).unwrap_or_default().to_ascii_lowercase();
        move |text| part.is_empty() || text.to_ascii_lowercase().contains(&part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_decoded_and_what_is_wrong_is_named() {
        let query = Query::of("page=3&match=Res+%3Cb%3E&order=name&page=4&rows=0&%zz&=");
        assert_eq!(query.number("page", 0..=usize::MAX, 0), Ok(3));
        assert_eq!(query.number("other", 0..=9, 7), Ok(7));
        assert_eq!(query.number("rows", 1..=100, 25).unwrap_err(), "rows: found 0, expected 1 to 100");
        let wrong = query.number("match", 0..=9, 0).unwrap_err();
        assert_eq!(wrong, "match: found `Res <b>`, expected a number");
        assert_eq!((query.one_of("order", &["rate", "name"]), query.one_of("part", &["all"])), (Ok(1), Ok(0)));
        let wrong = query.one_of("order", &["rate", "missed"]).unwrap_err();
        assert_eq!(wrong, "order: found `name`, expected one of rate, missed");
        assert!(query.part_of("match")("a res <B>c") && !query.part_of("match")("resnet"));
        assert!(query.part_of("nothing")("resnet"));
        assert!(Query::of("").part_of("match")(""));
    }
}

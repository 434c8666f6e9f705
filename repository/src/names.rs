//! Names in messages.

/// Names that a message lists, when a name is none of them.
pub(crate) const LISTED_MAX: usize = 16;

/// Names, as a message lists what it expected: of thousands the first few, and how many more there are.
pub fn listed<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = names.len().saturating_sub(LISTED_MAX);
    let first = names.take(LISTED_MAX).collect::<Vec<_>>().join(", ");
    if more == 0 { first } else { format!("{first} and {more} more") }
}

/// Names that a line tells of, whatever it says of all of them.
const TOLD_MAX: usize = 8;

/// How many models there are, and the first few of their names, for a line of a log or of progress.
pub fn told<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let (count, more) = (names.len(), names.len().saturating_sub(TOLD_MAX));
    let first = names.take(TOLD_MAX).collect::<Vec<_>>().join(", ");
    match more {
        0 => first,
        more => format!("{count} models: {first} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_thousands_of_names_a_message_lists_the_first() {
        let names: Vec<String> = (0..4026).map(|number| format!("m{number:04}")).collect();
        let text = |count: usize| listed(names[..count].iter().map(String::as_str));
        assert_eq!((text(0), text(2)), (String::new(), "m0000, m0001".to_owned()));
        assert!(text(16).ends_with("m0014, m0015") && text(17).ends_with("m0014, m0015 and 1 more"));
        assert!(text(4026).ends_with("m0015 and 4010 more"));
        let told = |count: usize| told(names[..count].iter().map(String::as_str));
        assert_eq!(told(2), "m0000, m0001");
        let first = (0..8).map(|number| format!("m{number:04}")).collect::<Vec<_>>().join(", ");
        assert_eq!((told(8), told(4026)), (first.clone(), format!("4026 models: {first} and 4018 more")));
    }
}

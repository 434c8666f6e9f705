//! Names in messages.

/// Names that a message lists, when a name is none of them.
pub(crate) const LISTED_MAX: usize = 16;

/// Names, as a message lists what it expected: of thousands the first few, and how many more there are.
pub fn listed<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = names.len().saturating_sub(LISTED_MAX);
    let first = names.take(LISTED_MAX).collect::<Vec<_>>().join(", ");
    if more == 0 { first } else { format!("{first} and {more} more") }
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
    }
}

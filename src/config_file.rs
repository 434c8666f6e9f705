//! Configuration files: TOML, in whose strings `${VAR}` is what the environment has under that name.

use std::{borrow::Cow, ops::Range, path::Path};

use anyhow::{Context, Result, anyhow};
use serde::de::{DeserializeOwned, IntoDeserializer as _};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

/// Characters of a value that an error shows.
const SHOWN_MAX: usize = 80;

/// Reads a TOML file. What is wrong with it is told in one line, with the number of the line where it stands and the
/// key.
pub(crate) fn read_config<C: DeserializeOwned>(file: &Path) -> Result<C> {
    let text = std::fs::read_to_string(file).with_context(|| format!("--config: cannot read {}", file.display()))?;
    parse(&text, |name| std::env::var(name).ok()).map_err(|wrong| {
        let line = text[..wrong.at].lines().count().max(1);
        anyhow!("--config: {}, line {line}: {}", file.display(), wrong.text.replace('\n', "; "))
    })
}

/// Reads what this process has written itself, by [`escaped`] strings.
#[cfg(feature = "tools")]
pub(crate) fn read_written<C: DeserializeOwned>(text: &str) -> Result<C, String> {
    parse(text, |_| None).map_err(|wrong| wrong.text)
}

/// What is wrong with a text, and where.
#[derive(Debug, PartialEq)]
struct Wrong {
    at: usize,
    text: String,
}

fn parse<C: DeserializeOwned>(text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<C, Wrong> {
    let mut keys = Keys(Vec::new());
    let told = |keys: &Keys, error: &toml::de::Error| {
        let at = error.span().map_or(0, |span| span.start);
        Wrong { at, text: keys.name(error.span(), error.message()) }
    };
    let mut table = DeTable::parse(text).map_err(|error| told(&keys, &error))?;
    fill_table(table.get_mut(), "", &mut keys, &variable)?;
    C::deserialize(table.into_deserializer()).map_err(|error| told(&keys, &error))
}

/// Every value's place in the text, with its key and, if it is a string, what it says.
struct Keys(Vec<(Range<usize>, String, Option<String>)>);

impl Keys {
    /// A message about what stands at a place, with the key, and with what was found if it does not say that.
    fn name(&self, at: Option<Range<usize>>, message: &str) -> String {
        let exactly = |span: &Range<usize>| at.as_ref().is_some_and(|at| at == span);
        let Some((_, key, found)) = self.0.iter().find(|(span, ..)| exactly(span)) else { return message.to_owned() };
        let last = key.rsplit('.').next().unwrap_or(key);
        let is_named = message.starts_with(&format!("{key}: "))
            || message.starts_with(&format!("{last}:"))
            || message.starts_with(&format!("{last}, "))
            || message.contains(&format!("`{last}`"));
        let key = if is_named { String::new() } else { format!("{key}: ") };
        match found {
            Some(found) if !message.contains("found") && !message.contains(found.as_str()) => {
                let shown: String = found.chars().take(SHOWN_MAX).collect();
                format!("{key}found `{shown}`: {message}")
            }
            _ => format!("{key}{message}"),
        }
    }
}

fn fill_table(
    table: &mut DeTable<'_>,
    path: &str,
    keys: &mut Keys,
    variable: &impl Fn(&str) -> Option<String>,
) -> Result<(), Wrong> {
    for (key, value) in table.iter_mut() {
        let key = key.get_ref();
        let path = if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
        fill(value, path, keys, variable)?;
    }
    Ok(())
}

fn fill(
    value: &mut Spanned<DeValue<'_>>,
    path: String,
    keys: &mut Keys,
    variable: &impl Fn(&str) -> Option<String>,
) -> Result<(), Wrong> {
    let span = value.span();
    let mut found = None;
    match value.get_mut() {
        DeValue::String(text) => {
            if let Some(filled) =
                substitute(text, variable).map_err(|what| Wrong { at: span.start, text: format!("{path}: {what}") })?
            {
                *text = Cow::Owned(filled);
            }
            // What the environment says may be a secret.
            found = Some(text.to_string()).filter(|_| !path.contains("secret"));
        }
        DeValue::Array(values) => {
            for (index, value) in values.iter_mut().enumerate() {
                fill(value, format!("{path}[{index}]"), keys, variable)?;
            }
        }
        DeValue::Table(table) => fill_table(table, &path, keys, variable)?,
        DeValue::Integer(_) | DeValue::Float(_) | DeValue::Boolean(_) | DeValue::Datetime(_) => {}
    }
    keys.0.push((span, path, found));
    Ok(())
}

/// The text with what variables say in the place of `${NAME}`, and `$` in that of `$$`. `None` if it stays as it is.
///
/// # Errors
/// What is wrong with a variable.
fn substitute(text: &str, variable: &impl Fn(&str) -> Option<String>) -> Result<Option<String>, String> {
    if !text.contains('$') {
        return Ok(None);
    }
    let (mut filled, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once('$') {
        filled.push_str(before);
        if let Some(after) = after.strip_prefix('$') {
            filled.push('$');
            rest = after;
        } else if let Some(after) = after.strip_prefix('{') {
            let name = after.split_once('}').filter(|(name, _)| is_variable(name));
            let (name, after) = name.ok_or_else(|| {
                let shown: String = after.chars().take(SHOWN_MAX).collect();
                format!("found `${{{shown}`, expected ${{VARIABLE}}, or $$ for the sign itself")
            })?;
            let value = variable(name);
            filled.push_str(&value.ok_or_else(|| {
                format!("found ${{{name}}}, and no such variable in the environment; expected it to be set")
            })?);
            rest = after;
        } else {
            filled.push('$');
            rest = after;
        }
    }
    filled.push_str(rest);
    Ok(Some(filled))
}

fn is_variable(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    name.bytes().all(is_allowed) && name.bytes().next().is_some_and(|first| !first.is_ascii_digit())
}

/// A text that is read as it is.
#[cfg(feature = "tools")]
pub(crate) fn escaped(text: &str) -> String {
    text.replace('$', "$$")
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Config {
        text: String,
        #[serde(default)]
        list: Vec<SocketAddr>,
        #[serde(default)]
        table: std::collections::BTreeMap<String, String>,
        #[serde(default)]
        number: u32,
    }

    fn read(text: &str) -> Result<Config, Wrong> {
        parse(text, |name| match name {
            "POD_IP" => Some("10.0.0.7".to_owned()),
            "QUOTES" => Some("\"\nnumber = 7 # ${POD_IP}".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        })
    }

    #[test]
    fn variables_are_put_into_strings_and_are_never_read_as_toml() {
        let config =
            read("text = '${POD_IP}:80${EMPTY}'\nlist = ['${POD_IP}:1', '127.0.0.1:2']\n[table]\na = 'x${QUOTES}y'");
        let config = config.unwrap();
        assert_eq!(config.text, "10.0.0.7:80");
        assert_eq!(config.list, ["10.0.0.7:1".parse().unwrap(), "127.0.0.1:2".parse().unwrap()]);
        assert_eq!(config.table["a"], "x\"\nnumber = 7 # ${POD_IP}y");
        assert_eq!(config.number, 0);
    }

    #[test]
    fn a_sign_that_is_doubled_or_alone_is_itself() {
        for (text, expected) in [("$$", "$"), ("a$$${POD_IP}", "a$10.0.0.7"), ("$$${POD_IP}$$", "$10.0.0.7$")] {
            assert_eq!(read(&format!("text = '{text}'")).unwrap().text, expected);
        }
        for text in ["$", "5 $", "$5", "$$$"] {
            assert_eq!(read(&format!("text = '{text}'")).unwrap().text, text.replace("$$", "$"));
        }
        #[cfg(feature = "tools")]
        for text in ["", "$", "${POD_IP}", "$$", "a$${}b"] {
            assert_eq!(read(&format!("text = '{}'", escaped(text))).unwrap().text, text);
        }
    }

    #[test]
    fn a_variable_that_is_not_set_is_named_with_its_key() {
        let wrong = read("text = 'a'\n[table]\nkey = 'b${MISSING}'").unwrap_err();
        let expected = "table.key: found ${MISSING}, and no such variable in the environment; expected it to be set";
        assert_eq!((wrong.text.as_str(), wrong.at), (expected, 25));
        for text in ["${", "${POD_IP", "${}", "${1A}", "${A-B}", "${A:-b}"] {
            let wrong = read(&format!("text = '{text}'")).unwrap_err().text;
            assert!(wrong.starts_with(&format!("text: found `{text}`, expected ${{VARIABLE}}")), "{wrong}");
        }
    }

    #[test]
    fn what_is_wrong_is_told_with_key_value_and_place() {
        let wrong = |text: &str| read(text).unwrap_err();
        let told = wrong("text = ''\nlist = ['localhost']");
        assert_eq!(told.text, "list[0]: found `localhost`: invalid socket address syntax");
        assert_eq!(told.at, 18);
        assert_eq!(wrong("text = 5").text, "text: invalid type: integer `5`, expected a string");
        assert!(wrong("text = ''\nnumber = 'x'").text.starts_with("number: invalid type: string \"x\", expected u32"));
        assert!(wrong("text = ''\nnumbers = 1").text.starts_with("unknown field `numbers`, expected one of"));
        assert_eq!(wrong("number = 1").text, "missing field `text`");
        assert!(wrong("text = '").at >= 7);
    }
}

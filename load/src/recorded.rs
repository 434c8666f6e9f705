//! Recorded rates: CSV with counts for each minute, as in the traces of Azure Functions. Either a row is a function and
//! the columns whose names are numbers are the minutes, or a column is a function and a row is a minute.

use thiserror::Error;

/// Counts for each minute of one function after the other.
pub(crate) type Counts = Vec<Vec<f64>>;

/// Why a file of rates was refused.
#[derive(Debug, Error, PartialEq)]
pub(crate) enum RecordedError {
    /// Nothing in it can be a count.
    #[error("expected a header and at least one row with counts, found none")]
    Empty,
    /// A row is longer or shorter than the header.
    #[error("line {line}: expected {expected} fields as in the header, found {found}")]
    Fields {
        /// From 1.
        line: usize,
        /// In the header.
        expected: usize,
        /// In this row.
        found: usize,
    },
    /// A field is no count.
    #[error("line {line}, column `{column}`: expected a count of 0 to 1000000000, found `{found}`")]
    Count {
        /// From 1.
        line: usize,
        /// Its name in the header.
        column: String,
        /// What is there.
        found: String,
    },
}

/// A count in a minute that some machine could have generated.
const COUNT_MAX: f64 = 1e9;

/// Reads a file of either layout. Fields hold no commas and are not quoted, as in the traces.
///
/// # Errors
/// The first line that is wrong, and how.
pub(crate) fn parse(text: &str) -> Result<Counts, RecordedError> {
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let header: Vec<&str> = lines.next().map(|(_, line)| fields(line).collect()).unwrap_or_default();
    let minutes: Vec<usize> = (0..header.len()).filter(|&column| header[column].parse::<u32>().is_ok()).collect();
    let is_by_row = !minutes.is_empty();
    // Where a column is a function, the first one names the minute.
    let columns = if is_by_row { minutes } else { (1..header.len()).collect() };
    let mut rows = Vec::new();
    for (index, text) in lines {
        let (line, row) = (index + 1, fields(text).collect::<Vec<_>>());
        if row.len() != header.len() {
            return Err(RecordedError::Fields { line, expected: header.len(), found: row.len() });
        }
        let count = |&column: &usize| {
            let count = row[column].parse::<f64>().ok().filter(|count| (0.0..=COUNT_MAX).contains(count));
            let wrong = || (header[column].to_owned(), row[column].to_owned());
            count.ok_or_else(wrong).map_err(|(column, found)| RecordedError::Count { line, column, found })
        };
        rows.push(columns.iter().map(count).collect::<Result<Vec<f64>, _>>()?);
    }
    if columns.is_empty() || rows.is_empty() {
        return Err(RecordedError::Empty);
    }
    if is_by_row {
        return Ok(rows);
    }
    Ok((0..columns.len()).map(|column| rows.iter().map(|row| row[column]).collect()).collect())
}

fn fields(line: &str) -> impl Iterator<Item = &str> {
    line.split(',').map(str::trim)
}

/// Deals functions out to models in turn, as many workloads of few models are made from a trace of many functions;
/// the functions of one model are added up.
///
/// # Panics
/// If there is no model.
#[must_use]
pub(crate) fn deal(functions: &Counts, models: usize) -> Counts {
    let minutes = functions.first().map_or(0, Vec::len);
    let mut dealt = vec![vec![0.0; minutes]; models];
    for (function, counts) in functions.iter().enumerate() {
        let model = &mut dealt[function % models];
        model.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    dealt
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_azure_functions_and_columns_of_models() {
        let azure = "HashOwner,HashApp,HashFunction,Trigger,1,2,3\r\na,b,c,http,0,5,2\r\na,b,d,timer,1,1,1\n";
        assert_eq!(parse(azure).unwrap(), [[0.0, 5.0, 2.0], [1.0, 1.0, 1.0]]);
        let columns = "minute,resnet50,digits\n0,10,1\n\n1,20,2.5\n";
        assert_eq!(parse(columns).unwrap(), [[10.0, 20.0], [1.0, 2.5]]);
    }

    #[test]
    fn functions_are_dealt_out_in_turn() {
        let functions = vec![vec![1.0, 2.0], vec![10.0, 20.0], vec![100.0, 200.0]];
        assert_eq!(deal(&functions, 2), [[101.0, 202.0], [10.0, 20.0]]);
        assert_eq!(deal(&functions, 4)[3], [0.0, 0.0]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let text = |text: &str| parse(text).unwrap_err().to_string();
        assert_eq!(parse(""), Err(RecordedError::Empty));
        assert_eq!(parse("minute,a\n"), Err(RecordedError::Empty));
        assert_eq!(parse("minute\n0\n"), Err(RecordedError::Empty));
        assert_eq!(text("m,1,2\na,1,2\nb,3\n"), "line 3: expected 3 fields as in the header, found 2");
        for bad in ["-1", "many", "NaN", "inf", "1e10", ""] {
            let expected = "line 2, column `2`: expected a count of 0 to 1000000000, found";
            assert_eq!(text(&format!("m,1,2\na,1,{bad}\n")), format!("{expected} `{bad}`"));
        }
    }
}

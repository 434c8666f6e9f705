//! What the predictions of models of one task become: one answer, and how sure it is (Clipper's `combine`; sections
//! 5.2.1 and 5.2.2), row by row.
//!
//! Numbers are averaged where the policy says so: then a prediction that is missing takes the average of the others,
//! which is what leaving it out of the average is. Otherwise the prediction is taken that most agree with, by weight.
//! The confidence is the weight of those who agree with the answer, of all that were asked: whoever does not answer
//! agrees with nobody. Where one alone was asked it is that one's own, if it gives any: the largest element of an
//! output whose agreement is `argmax`.

use bytes::Bytes;
use repository::{Agreement, DataType, Selection, Tensor};

/// How outputs are compared.
#[derive(Debug, Clone, PartialEq)]
pub struct Outputs {
    /// Rows of the request.
    pub rows: usize,
    /// In the order of the ensemble's.
    pub outputs: Vec<OutputKind>,
}

/// How an output is compared.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputKind {
    /// Its elements.
    pub datatype: DataType,
    /// Bytes of one row.
    pub row_bytes: usize,
    /// When two rows of it agree.
    pub agreement: Agreement,
    /// Whether rows of it are averaged.
    pub is_averaged: bool,
    /// Whether the request wants it.
    pub is_wanted: bool,
}

/// An answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Combined {
    /// All rows of each output; nothing of those that are not wanted.
    pub outputs: Vec<Bytes>,
    /// The least of all rows and outputs that are wanted, 0 to 1.
    pub confidence: f64,
}

impl Outputs {
    /// Those of an ensemble's face, for a request of so many rows that wants these.
    #[must_use]
    pub fn of(selection: &Selection, outputs: &[Tensor], rows: usize, wanted: &[bool]) -> Self {
        let kind = |((tensor, agreement), is_wanted): ((&Tensor, &Agreement), &bool)| OutputKind {
            datatype: tensor.datatype,
            row_bytes: tensor.bytes(),
            agreement: *agreement,
            is_averaged: selection.policy.averages() && matches!(tensor.datatype, DataType::Fp32 | DataType::Fp64),
            is_wanted: *is_wanted,
        };
        Self { rows, outputs: outputs.iter().zip(&selection.agreements).zip(wanted).map(kind).collect() }
    }

    /// One answer to a request that these members were asked, each with this weight, of those predictions that are
    /// there: all rows of each output. `None` if a row has no prediction whose numbers are finite.
    #[must_use]
    pub fn combine(&self, weights: &[f64], predictions: &[Option<Vec<Bytes>>]) -> Option<Combined> {
        let mut combined = Combined { outputs: Vec::with_capacity(self.outputs.len()), confidence: 1.0 };
        for (at, kind) in self.outputs.iter().enumerate() {
            let bytes = if kind.is_wanted { self.rows * kind.row_bytes } else { 0 };
            let mut made = Vec::with_capacity(bytes);
            for row in 0..if kind.is_wanted { self.rows } else { 0 } {
                let range = row * kind.row_bytes..(row + 1) * kind.row_bytes;
                let rows = predictions.iter().map(|prediction| Some(&prediction.as_ref()?[at][range.clone()]));
                let confidence = kind.combine(weights, rows.collect(), &mut made)?;
                combined.confidence = combined.confidence.min(confidence);
            }
            combined.outputs.push(made.into());
        }
        Some(combined)
    }

    /// What a prediction of one member says of how sure it is: the least of all rows, of outputs whose agreement is
    /// `argmax`; 1 if there are none.
    #[must_use]
    pub fn own_confidence(&self, prediction: &[Bytes]) -> f64 {
        let of_kind = |(kind, data): (&OutputKind, &Bytes)| {
            data.chunks(kind.row_bytes.max(1)).map(|row| kind.own_confidence(row)).fold(1.0, f64::min)
        };
        self.outputs.iter().zip(prediction).map(of_kind).fold(1.0, f64::min)
    }

    /// Whether two predictions agree in all rows of all outputs.
    #[must_use]
    pub fn agree(&self, one: &[Bytes], other: &[Bytes]) -> bool {
        let agree = |(kind, (one, other)): (&OutputKind, (&Bytes, &Bytes))| {
            let rows = |data| <[u8]>::chunks(data, kind.row_bytes.max(1));
            rows(one).zip(rows(other)).all(|(one, other)| kind.agrees(one, other))
        };
        self.fits(one) && self.fits(other) && self.outputs.iter().zip(one.iter().zip(other)).all(agree)
    }

    /// Whether a prediction has all rows of all outputs.
    #[must_use]
    pub fn fits(&self, prediction: &[Bytes]) -> bool {
        let fits = |(kind, data): (&OutputKind, &Bytes)| data.len() == self.rows * kind.row_bytes;
        prediction.len() == self.outputs.len() && self.outputs.iter().zip(prediction).all(fits)
    }
}

impl OutputKind {
    /// Appends a row's answer; yields its confidence.
    fn combine(&self, weights: &[f64], mut rows: Vec<Option<&[u8]>>, made: &mut Vec<u8>) -> Option<f64> {
        if self.agreement != Agreement::Equal || self.is_averaged {
            rows.iter_mut().for_each(|row| *row = row.filter(|row| self.is_finite(row)));
        }
        let there: Vec<(usize, &[u8])> = rows.iter().enumerate().filter_map(|(at, row)| Some((at, (*row)?))).collect();
        let asked: f64 = weights.iter().sum();
        let heavy: f64 = there.iter().map(|(at, _)| weights[*at]).sum();
        let (first, row) = *there.first()?;
        let start = made.len();
        if weights.len() == 1 {
            made.extend_from_slice(row);
            return Some(self.own_confidence(row));
        }
        if self.is_averaged && heavy > 0.0 {
            self.average(&there, weights, heavy, made);
        } else {
            let for_it = |row: &[u8]| {
                there.iter().filter(|(_, other)| self.agrees(row, other)).map(|(at, _)| weights[*at]).sum::<f64>()
            };
            let mut best = (for_it(row), weights[first], row);
            for (at, row) in &there[1..] {
                let votes = for_it(row);
                if (votes, weights[*at]) > (best.0, best.1) {
                    best = (votes, weights[*at], row);
                }
            }
            made.extend_from_slice(best.2);
        }
        let answer = &made[start..];
        let agreeing: f64 = there.iter().filter(|(_, row)| self.agrees(answer, row)).map(|(at, _)| weights[*at]).sum();
        Some(if asked > 0.0 { (agreeing / asked).min(1.0) } else { 0.0 })
    }

    /// Appends the average of these rows.
    fn average(&self, there: &[(usize, &[u8])], weights: &[f64], heavy: f64, made: &mut Vec<u8>) {
        let element = self.datatype.bytes();
        for at in (0..self.row_bytes).step_by(element) {
            let number = |row: &[u8]| number(self.datatype, &row[at..at + element]).unwrap_or_default();
            let mean: f64 = there.iter().map(|(member, row)| weights[*member] / heavy * number(row)).sum();
            match self.datatype {
                DataType::Fp32 => made.extend_from_slice(&(mean as f32).to_le_bytes()),
                _ => made.extend_from_slice(&mean.to_le_bytes()),
            }
        }
    }

    /// Whether two rows agree.
    #[must_use]
    pub fn agrees(&self, one: &[u8], other: &[u8]) -> bool {
        match self.agreement {
            Agreement::Equal => one == other,
            Agreement::Argmax => self.class(one) == self.class(other),
            Agreement::Within(eps) => {
                self.numbers(one).zip(self.numbers(other)).all(|(one, other)| (one - other).abs() <= eps)
            }
        }
    }

    /// The place of a row's largest element; of several the first.
    #[must_use]
    pub fn class(&self, row: &[u8]) -> usize {
        let mut best = (0, f64::NEG_INFINITY);
        for (at, number) in self.numbers(row).enumerate() {
            if number > best.1 {
                best = (at, number);
            }
        }
        best.0
    }

    /// Its elements as numbers.
    pub fn numbers<'a>(&self, row: &'a [u8]) -> impl Iterator<Item = f64> + use<'a> {
        let datatype = self.datatype;
        row.chunks_exact(datatype.bytes()).map(move |bytes| number(datatype, bytes).unwrap_or(f64::NAN))
    }

    fn is_finite(&self, row: &[u8]) -> bool {
        self.numbers(row).all(f64::is_finite)
    }

    fn own_confidence(&self, row: &[u8]) -> f64 {
        match self.agreement {
            Agreement::Argmax if !self.is_finite(row) => 0.0,
            Agreement::Argmax => self.numbers(row).fold(0.0, f64::max).min(1.0),
            Agreement::Equal | Agreement::Within(_) => 1.0,
        }
    }
}

/// An element as a number; `None` of types whose elements are not compared as such.
fn number(datatype: DataType, bytes: &[u8]) -> Option<f64> {
    macro_rules! read {
        ($type:ty) => {
            <$type>::from_le_bytes(bytes.try_into().ok()?) as f64
        };
    }
    Some(match datatype {
        DataType::Uint8 => read!(u8),
        DataType::Uint16 => read!(u16),
        DataType::Uint32 => read!(u32),
        DataType::Uint64 => read!(u64),
        DataType::Int8 => read!(i8),
        DataType::Int16 => read!(i16),
        DataType::Int32 => read!(i32),
        DataType::Int64 => read!(i64),
        DataType::Fp32 => read!(f32),
        DataType::Fp64 => read!(f64),
        DataType::Bool | DataType::Fp16 | DataType::Bf16 | DataType::Bytes => return None,
    })
}

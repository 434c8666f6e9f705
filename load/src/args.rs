//! What the command line asks for.

use std::{
    env, fs,
    net::ToSocketAddrs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use cli::{CommandError, within};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use repository::DataType;
use serde::Deserialize;
use sim::workload::ArrivalProcess;

use crate::{
    answer::InputShape,
    arrivals::{Arrivals, Rate},
    recorded,
    request::{Expected, Input, Stream, Tensor},
    server::authorization,
    target::{Encoding, Target, Tls, Wire},
};

/// Arguments of `bench load`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The server: http://HOST:PORT, or grpc://HOST:PORT; with TLS, https:// or grpcs://
    #[arg(long)]
    pub url: String,
    /// The certificates (PEM) that the server's may come from, for https:// and grpcs://
    #[arg(long, value_name = "FILE")]
    pub tls_authority: Option<PathBuf>,
    /// A file with a bearer token to send, if not the one in the environment variable DOWNBEAT_TOKEN
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// A model, and its requests a second if not --rate; may be repeated
    #[arg(long = "model", value_name = "NAME[:RATE]", required_unless_present = "streams")]
    pub models: Vec<String>,
    /// Requests a second of each model
    #[arg(long)]
    pub rate: Option<f64>,
    /// How gaps between requests differ: poisson, gamma:SHAPE (the smaller, the burstier), or uniform
    #[arg(long, default_value = "poisson", value_parser = parse_process)]
    pub arrivals: ArrivalProcess,
    /// A file of recorded rates instead: CSV with counts for each minute, such as of Azure Functions. Its functions are
    /// dealt out to the models in turn
    #[arg(long, value_name = "FILE", conflicts_with = "rate")]
    pub rates: Option<PathBuf>,
    /// Multiplies recorded rates
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, requires = "rates")]
    pub scale: f64,
    /// A recorded minute passes so many times faster, at the same rate
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, requires = "rates")]
    pub speed: f64,
    /// A file of streams instead of models: TOML with `[[stream]]` tables of model, rate_rps, arrivals and slo_ms
    #[arg(long, value_name = "FILE", conflicts_with_all = ["models", "rate", "rates", "closed"])]
    pub streams: Option<PathBuf>,
    /// Closed loop instead: N requests of each model are always under way. 1 shows what a request costs
    #[arg(long, value_name = "N", conflicts_with_all = ["rate", "rates"])]
    pub closed: Option<usize>,
    /// How tensors are written over HTTP; binary if not given
    #[arg(long, value_enum)]
    pub encoding: Option<Encoding>,
    /// How long
    #[arg(long, default_value_t = 10.0)]
    pub seconds: f64,
    /// The objective, sent with each request; without it the model's own holds and nothing is late
    #[arg(long)]
    pub slo_ms: Option<f64>,
    /// Decides arrivals and inputs
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Count every answer as an error that is not what an emulated model gives
    #[arg(long)]
    pub emulated: bool,
    /// One JSON object on stdout
    #[arg(long)]
    pub json: bool,
    /// Write latencies over time to this file, as a log of HdrHistogram
    #[arg(long, value_name = "FILE")]
    pub hdr: Option<PathBuf>,
    /// Draw latencies by percentile and over time into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// What to send, and where.
#[derive(Debug)]
pub struct Plan {
    /// Where, and for how long.
    pub target: Target,
    /// At least one.
    pub streams: Vec<StreamPlan>,
}

/// A stream before the server has said what the model takes.
#[derive(Debug, PartialEq)]
pub struct StreamPlan {
    /// The model's name.
    pub model: String,
    /// When requests are sent.
    pub arrivals: Arrivals,
    /// The objective sent with each request.
    pub slo_ms: Option<f64>,
}

/// Holds a token that is not to be seen among the arguments of processes.
const TOKEN_VARIABLE: &str = "DOWNBEAT_TOKEN";
/// Requests a second of all models: more than any machine sends.
const RATE_RPS_MAX: f64 = 1e6;
/// The slowest stream worth the name: one request in a quarter of an hour.
const RATE_RPS_MIN: f64 = 0.001;
/// Requests under way in closed loop.
const CLOSED_MAX: usize = 4096;
/// Streams of one run.
const STREAMS_MAX: usize = 16_384;
/// Different inputs of a stream, used in turn, ...
const INPUTS: usize = 16;
/// ... and of all streams, each of which has one at least.
const INPUTS_OF_ALL: usize = 4_096;
/// Largest request that is made up.
const INPUT_BYTES_MAX: usize = 64 << 20;

type Result<T> = std::result::Result<T, CommandError>;

impl Args {
    /// Checks everything that can be checked without the server.
    ///
    /// # Errors
    /// The flag or the file that is wrong, and what it should be.
    pub fn plan(&self) -> Result<Plan> {
        within("--seconds", self.seconds, 0.001, 86_400.0)?;
        let mut target = self.target()?;
        if let Some(slo_ms) = self.slo_ms {
            within("--slo-ms", slo_ms, 0.001, 60_000.0)?;
        }
        let streams = match &self.streams {
            Some(path) => self.streams_of_file(path)?,
            None => self.streams_of_flags()?,
        };
        if !(1..=STREAMS_MAX).contains(&streams.len()) {
            return Err(CommandError::Failed(format!(
                "expected 1 to {STREAMS_MAX} streams (--model, or [[stream]] in --streams), found {}",
                streams.len()
            )));
        }
        let total_rps: f64 = streams.iter().map(|stream| stream.arrivals.max_rps()).sum();
        if total_rps > RATE_RPS_MAX {
            return Err(CommandError::flag(
                "--rate",
                format!("at most {RATE_RPS_MAX} requests a second of all models, which no machine sends"),
                total_rps,
            ));
        }
        // A record may end before; rates are those of the time in which something was sent.
        let ends = streams.iter().map(|stream| stream.arrivals.end_seconds()).fold(0.0, f64::max);
        target.span = target.span.min(Duration::try_from_secs_f64(ends).unwrap_or(Duration::MAX));
        Ok(Plan { target, streams })
    }

    fn target(&self) -> Result<Target> {
        let form = "http[s]://HOST:PORT or grpc[s]://HOST:PORT";
        let wrong = || CommandError::flag("--url", form, &self.url);
        let (scheme, authority) = self.url.split_once("://").ok_or_else(wrong)?;
        let wire = match (scheme, self.encoding) {
            ("http" | "https", encoding) => Wire::Http(encoding.unwrap_or(Encoding::Binary)),
            ("grpc" | "grpcs", None) => Wire::Grpc,
            ("grpc" | "grpcs", Some(_)) => {
                return Err(CommandError::flag("--encoding", "an http:// address in --url", &self.url));
            }
            _ => return Err(wrong()),
        };
        let authority = authority.trim_end_matches('/');
        let addresses = authority.to_socket_addrs();
        let address = addresses.ok().and_then(|mut addresses| addresses.next()).ok_or_else(wrong)?;
        let tls = match (scheme, &self.tls_authority) {
            ("http" | "grpc", None) => None,
            ("http" | "grpc", Some(_)) => {
                return Err(CommandError::flag("--tls-authority", "https:// or grpcs:// in --url", &self.url));
            }
            (_, None) => return Err(CommandError::flag("--tls-authority", format!("a file, for {scheme}://"), "none")),
            (_, Some(path)) => {
                let config = transport::client_tls("--tls-authority", path);
                let config = config.map_err(|error| CommandError::Failed(error.to_string()))?;
                Some(Tls { authority: authority.to_owned(), config: Arc::new(config) })
            }
        };
        let (span, token) = (Duration::from_secs_f64(self.seconds), self.token()?);
        Ok(Target { address, wire, tls, token, span, seed: self.seed })
    }

    fn token(&self) -> Result<Option<String>> {
        let (name, token) = match &self.token_file {
            Some(path) => ("--token-file", Some(read("--token-file", path)?)),
            None => (TOKEN_VARIABLE, env::var(TOKEN_VARIABLE).ok()),
        };
        let Some(token) = token else { return Ok(None) };
        let token = token.trim();
        if token.is_empty() || authorization(token).is_none() {
            return Err(CommandError::flag(name, "a token: printable characters", "others, or none"));
        }
        Ok(Some(token.to_owned()))
    }

    fn streams_of_flags(&self) -> Result<Vec<StreamPlan>> {
        let mut recorded = match &self.rates {
            Some(path) => self.recorded_rates(path)?.into_iter(),
            None => Vec::new().into_iter(),
        };
        let stream = |text: &String| {
            let (model, own_rate) = match text.rsplit_once(':').map(|(name, rate)| (name, rate.parse::<f64>())) {
                Some((name, Ok(rate))) => (name, Some(rate)),
                _ => (text.as_str(), None),
            };
            let arrivals = if let Some(requests) = self.closed {
                if !(1..=CLOSED_MAX).contains(&requests) {
                    return Err(CommandError::flag("--closed", format!("1 to {CLOSED_MAX}"), requests));
                }
                if own_rate.is_some() {
                    return Err(CommandError::flag("--model", "no rate with --closed", text));
                }
                Arrivals::Closed { requests }
            } else if self.rates.is_some() {
                if own_rate.is_some() {
                    return Err(CommandError::flag("--model", "no rate with --rates", text));
                }
                let rate = recorded.next().expect("every model was dealt a rate");
                Arrivals::Open { process: self.arrivals, rate }
            } else {
                let rate_rps = own_rate.or(self.rate);
                let rate_rps = rate_rps
                    .ok_or_else(|| CommandError::flag("--rate", "a rate, or one in --model NAME:RATE", "none"))?;
                within("--rate", rate_rps, RATE_RPS_MIN, RATE_RPS_MAX)?;
                Arrivals::Open { process: self.arrivals, rate: Rate::constant(rate_rps) }
            };
            Ok(StreamPlan { model: model.to_owned(), arrivals, slo_ms: self.slo_ms })
        };
        self.models.iter().map(stream).collect()
    }

    /// A rate over time for each model.
    fn recorded_rates(&self, path: &Path) -> Result<Vec<Rate>> {
        within("--scale", self.scale, 1e-9, 1e9)?;
        within("--speed", self.speed, 1e-3, 1e6)?;
        let functions =
            recorded::parse(&read("--rates", path)?).map_err(|error| wrong_file("--rates", path, &error))?;
        if functions.iter().flatten().all(|count| *count == 0.0) {
            return Err(wrong_file("--rates", path, &"expected a count above 0, found none"));
        }
        let rate = |counts: Vec<f64>| {
            let steps_rps = counts.into_iter().map(|count| count * self.scale / 60.0).collect();
            Rate::steps(steps_rps, 60.0 / self.speed)
        };
        Ok(recorded::deal(&functions, self.models.len()).into_iter().map(rate).collect())
    }

    fn streams_of_file(&self, path: &Path) -> Result<Vec<StreamPlan>> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct File {
            stream: Vec<FileStream>,
        }
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct FileStream {
            model: String,
            rate_rps: f64,
            arrivals: Option<ArrivalProcess>,
            slo_ms: Option<f64>,
        }
        let text = read("--streams", path)?;
        let file: File = toml::from_str(&text).map_err(|error| {
            let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
            wrong_file("--streams", path, &format!("line {line}: {}", error.message()))
        })?;
        let stream = |stream: FileStream| {
            let range = |key: &str, found: f64, min: f64, max: f64| {
                let text = format!("{}: {key}: expected {min} to {max}, found {found}", stream.model);
                if (min..=max).contains(&found) { Ok(()) } else { Err(wrong_file("--streams", path, &text)) }
            };
            range("rate_rps", stream.rate_rps, RATE_RPS_MIN, RATE_RPS_MAX)?;
            if let Some(slo_ms) = stream.slo_ms {
                range("slo_ms", slo_ms, 0.001, 60_000.0)?;
            }
            let process = stream.arrivals.unwrap_or(self.arrivals);
            if let ArrivalProcess::Gamma { shape } = process {
                range("arrivals.shape", shape, SHAPE_MIN, SHAPE_MAX)?;
            }
            let arrivals = Arrivals::Open { process, rate: Rate::constant(stream.rate_rps) };
            Ok(StreamPlan { model: stream.model, arrivals, slo_ms: stream.slo_ms.or(self.slo_ms) })
        };
        file.stream.into_iter().map(stream).collect()
    }
}

impl StreamPlan {
    /// The stream with made-up inputs: random bytes, zeros for floats, since random bits make NaNs, and strings without
    /// a byte. If `emulated`, answers must be what emulated models give. It is one of so many `streams`.
    ///
    /// # Errors
    /// If one of the model's inputs has no type of the protocol, or all together are too large.
    pub fn stream(self, inputs: &[InputShape], seed: u64, emulated: bool, streams: usize) -> Result<Stream> {
        let empty = inputs.iter().map(|input| self.empty(input)).collect::<Result<Vec<Tensor>>>()?;
        let bytes = empty.iter().try_fold(0usize, |sum, tensor| sum.checked_add(bytes_of(tensor)?));
        if bytes.is_none_or(|bytes| bytes > INPUT_BYTES_MAX) {
            let shapes: Vec<_> = empty.iter().map(|tensor| &tensor.shape).collect();
            return Err(self.wrong(format!("take {shapes:?} elements, which is more than {INPUT_BYTES_MAX} bytes")));
        }
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let request = |_| {
            let tensors: Vec<Tensor> = empty.iter().map(|tensor| filled(tensor, &mut random)).collect();
            let row = || tensors.iter().flat_map(|tensor| &tensor.data[..]).copied().collect::<Vec<u8>>();
            let expected = if emulated { Expected::digest(&row()) } else { Expected::Any };
            Input::of(tensors, self.slo_ms, expected)
        };
        let inputs = (0..(INPUTS_OF_ALL / streams).clamp(1, INPUTS)).map(request).collect();
        Ok(Stream { model: self.model, arrivals: self.arrivals, slo_ms: self.slo_ms.unwrap_or(f64::INFINITY), inputs })
    }

    /// A tensor of one task, without its data. Any size will do where the model says -1: its batches, too, if it has
    /// them; otherwise it says the whole shape.
    fn empty(&self, input: &InputShape) -> Result<Tensor> {
        let InputShape { name, datatype, shape } = input;
        let found = DataType::from_name(datatype);
        let datatype =
            found.ok_or_else(|| self.wrong(format!("have `{name}` as {datatype}, expected a type of the protocol")))?;
        let shape = shape.iter().map(|&size| if size < 0 { 1 } else { size }).collect();
        Ok(Tensor { name: name.clone(), datatype, shape, data: Bytes::new() })
    }

    fn wrong(&self, what: String) -> CommandError {
        CommandError::Failed(format!("--model: the inputs of {} {what}", self.model))
    }
}

/// `None` if it is more than can be counted.
fn bytes_of(tensor: &Tensor) -> Option<usize> {
    let mut sizes = tensor.shape.iter().map(|&size| usize::try_from(size).ok());
    sizes.try_fold(tensor.datatype.bytes(), |product, size| product.checked_mul(size?))
}

/// The tensor with made-up data.
fn filled(tensor: &Tensor, random: &mut impl Rng) -> Tensor {
    let mut data = vec![0; bytes_of(tensor).expect("the size was checked")];
    if !tensor.datatype.is_float() && tensor.datatype != DataType::Bytes {
        random.fill_bytes(&mut data);
    }
    Tensor { data: data.into(), ..tensor.clone() }
}

impl Arrivals {
    /// The highest rate that is asked for, in requests a second; a closed loop asks for none.
    pub(crate) fn max_rps(&self) -> f64 {
        match self {
            Self::Open { rate, .. } => rate.max_rps(),
            Self::Closed { .. } => 0.0,
        }
    }
}

/// As for workloads.
const SHAPE_MIN: f64 = 0.001;
const SHAPE_MAX: f64 = 1000.0;

fn parse_process(text: &str) -> std::result::Result<ArrivalProcess, String> {
    let shape = |shape: &str| shape.parse().ok().filter(|shape| (SHAPE_MIN..=SHAPE_MAX).contains(shape));
    match text.split_once(':') {
        None if text == "poisson" => Some(ArrivalProcess::Poisson),
        None if text == "uniform" => Some(ArrivalProcess::Uniform),
        Some(("gamma", text)) => shape(text).map(|shape| ArrivalProcess::Gamma { shape }),
        _ => None,
    }
    .ok_or_else(|| format!("expected poisson, gamma:SHAPE (SHAPE {SHAPE_MIN} to {SHAPE_MAX}) or uniform"))
}

fn read(flag: &str, path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|error| wrong_file(flag, path, &error))
}

fn wrong_file(flag: &str, path: &Path, what: &impl std::fmt::Display) -> CommandError {
    CommandError::failed(format!("{flag}: {}", path.display()), what)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use clap::Parser;

    use super::*;
    use crate::request::Verdict;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn plan(rest: &[&str]) -> std::result::Result<Plan, String> {
        let args = ["load", "--url", "http://127.0.0.1:8000"].iter().chain(rest);
        let cli = Cli::try_parse_from(args).map_err(|error| error.to_string().lines().next().unwrap().to_owned())?;
        cli.args.plan().map_err(|error| error.to_string())
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn models_have_rates_of_their_own_or_the_common_one() {
        let plan = plan(&["--model", "a:5", "--model", "b:c", "--rate", "7", "--slo-ms", "20"]).unwrap();
        let stream =
            |model: &str, rps| StreamPlan { model: model.into(), arrivals: Arrivals::poisson(rps), slo_ms: Some(20.0) };
        assert_eq!(plan.streams, [stream("a", 5.0), stream("b:c", 7.0)]);
        assert_eq!((plan.target.wire, plan.target.span), (Wire::Http(Encoding::Binary), Duration::from_secs(10)));
    }

    #[test]
    fn recorded_rates_are_scaled_sped_up_and_dealt_out() {
        let rates = file("function,1,2\nf,60,120\ng,6,0\nh,0,60\n");
        let path = rates.path().to_str().unwrap();
        let plan = plan(&["--model", "a", "--model", "b", "--rates", path, "--scale", "2", "--speed", "30"]).unwrap();
        assert_eq!(plan.target.span, Duration::from_secs(4), "as long as the record");
        let rate = |steps: [f64; 2]| Arrivals::Open {
            process: ArrivalProcess::Poisson,
            rate: Rate::steps(steps.to_vec(), 2.0),
        };
        let arrivals: Vec<_> = plan.streams.into_iter().map(|stream| stream.arrivals).collect();
        assert_eq!(arrivals, [rate([2.0, 6.0]), rate([0.2, 0.0])]);
    }

    #[test]
    fn streams_come_from_a_file() {
        let streams = file(
            "[[stream]]\nmodel = \"a\"\nrate_rps = 3\narrivals = { process = \"gamma\", shape = 0.1 }\nslo_ms = 9\n\
             [[stream]]\nmodel = \"b\"\nrate_rps = 4\n",
        );
        let plan = plan(&["--streams", streams.path().to_str().unwrap()]).unwrap();
        let process = ArrivalProcess::Gamma { shape: 0.1 };
        let gamma = Arrivals::Open { process, rate: Rate::constant(3.0) };
        let expected = [
            StreamPlan { model: "a".into(), arrivals: gamma, slo_ms: Some(9.0) },
            StreamPlan { model: "b".into(), arrivals: Arrivals::poisson(4.0), slo_ms: None },
        ];
        assert_eq!(plan.streams, expected);
    }

    #[test]
    fn what_is_wrong_is_named_in_one_line() {
        let (silent, torn) = (file("m,1,2\nf,0,0\n"), file("m,1,2\nf,0\n"));
        let (unknown, slow) =
            (file("[[stream]]\nmodel = \"a\"\nrat = 1\n"), file("[[stream]]\nmodel = \"a\"\nrate_rps = 0\n"));
        let path = |file: &tempfile::NamedTempFile| file.path().to_str().unwrap().to_owned();
        let (silent, torn, unknown, slow) = (path(&silent), path(&torn), path(&unknown), path(&slow));
        let bad: [(&[&str], &str); 14] = [
            (&["--model", "m"], "--rate: expected a rate, or one in --model NAME:RATE, found none"),
            (&["--model", "m:2e6"], "--rate: expected 0.001 to 1000000, found 2000000"),
            (&["--model", "a:9e5", "--model", "b:9e5"], "which no machine sends, found 1800000"),
            (&["--model", "m:0"], "--rate: expected 0.001"),
            (&["--model", "m:NaN"], "--rate: expected 0.001"),
            (&["--model", "m:1", "--closed", "2"], "--model: expected no rate with --closed, found m:1"),
            (&["--model", "m", "--closed", "0"], "--closed: expected 1 to 4096, found 0"),
            (&["--model", "m:1", "--arrivals", "gamma:0"], "expected poisson, gamma:SHAPE"),
            (&["--model", "m:1", "--seconds", "0"], "--seconds: expected 0.001 to 86400, found 0"),
            (&["--model", "m", "--rates", "/nonexistent.csv"], "--rates: /nonexistent.csv: "),
            (&["--model", "m", "--rates", &silent], "expected a count above 0, found none"),
            (&["--model", "m", "--rates", &torn], "line 2: expected 3 fields as in the header, found 2"),
            (&["--streams", &unknown], "line 3: unknown field `rat`"),
            (&["--streams", &slow], "a: rate_rps: expected 0.001 to 1000000, found 0"),
        ];
        for (args, expected) in bad {
            let error = plan(args).unwrap_err();
            assert!(error.contains(expected) && !error.contains('\n'), "{args:?}: {error}");
        }
        for url in ["ftp://x", "127.0.0.1:80", "http://127.0.0.1", "grpc://:x"] {
            let error = Cli::try_parse_from(["load", "--url", url, "--model", "m:1"]).unwrap().args.plan().unwrap_err();
            let form = "--url: expected http[s]://HOST:PORT or grpc[s]://HOST:PORT, found";
            assert_eq!(error.to_string(), format!("{form} {url}"));
        }
    }

    #[test]
    fn a_token_and_an_authority_come_from_files() {
        let (token, empty) = (file("secret\n"), file("\n"));
        let path = |file: &tempfile::NamedTempFile| file.path().to_str().unwrap().to_owned();
        let with = |rest: &[&str]| plan(&[&["--model", "m:1"], rest].concat());
        assert_eq!(with(&["--token-file", &path(&token)]).unwrap().target.token.as_deref(), Some("secret"));
        let error = with(&["--token-file", &path(&empty)]).unwrap_err();
        assert_eq!(error, "--token-file: expected a token: printable characters, found others, or none");
        let error = with(&["--tls-authority", &path(&token)]).unwrap_err();
        assert!(error.starts_with("--tls-authority: expected https:// or grpcs:// in --url, found http://"), "{error}");
        let encrypted = |rest: &[&str]| {
            let args = ["load", "--url", "https://localhost:8000", "--model", "m:1"].iter().chain(rest);
            Cli::try_parse_from(args).unwrap().args.plan().map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(encrypted(&[]), Err("--tls-authority: expected a file, for https://, found none".to_owned()));
        let error = encrypted(&["--tls-authority", &path(&token)]).unwrap_err();
        assert!(error.starts_with("--tls-authority: ") && error.ends_with("no certificate in it"), "{error}");
    }

    #[test]
    fn inputs_are_made_as_the_server_says() {
        let plan = || StreamPlan { model: "m".into(), arrivals: Arrivals::ONE_AT_A_TIME, slo_ms: None };
        let shape = |datatype: &str, shape: &[i64]| InputShape {
            name: "i".into(),
            datatype: datatype.into(),
            shape: shape.to_vec(),
        };
        let stream = plan().stream(&[shape("UINT16", &[-1, -1, 3])], 1, false, 1).unwrap();
        let tensor = |request: usize| &stream.inputs[request].tensors[0];
        assert_eq!((stream.inputs.len(), &tensor(0).shape[..]), (INPUTS, &[1, 1, 3][..]));
        assert_ne!(tensor(0).data, tensor(1).data);
        let of_many = |streams| plan().stream(&[shape("UINT8", &[3])], 1, false, streams).unwrap().inputs.len();
        assert_eq!([256, 1_000, 10_000].map(of_many), [INPUTS, 4, 1]);
        let two = plan().stream(&[shape("UINT8", &[2, 3]), shape("FP32", &[-1, 2])], 1, true, 1).unwrap();
        let [whole, floats] = &two.inputs[0].tensors[..] else { panic!("{two:?}") };
        assert_eq!((&whole.shape[..], whole.data.len()), (&[2, 3][..], 6));
        assert_eq!((&floats.shape[..], &floats.data[..]), (&[1, 2][..], &[0; 8][..]));
        let Expected::Bytes(digest) = Expected::digest(&[&whole.data[..], &[0; 8]].concat()) else { panic!() };
        assert_eq!(two.inputs[0].judge(Some(&digest)), Verdict::Right { classified: None });
        let text = |input| plan().stream(&[input], 1, false, 1).unwrap_err().to_string();
        let expected = "--model: the inputs of m have `i` as FP8, expected a type of the protocol";
        assert_eq!(text(shape("FP8", &[-1, 1])), expected);
        assert!(text(shape("FP32", &[-1, i64::MAX, i64::MAX])).contains("which is more than"));
        assert!(plan().stream(&[shape("UINT8", &[40 << 20]), shape("UINT8", &[40 << 20])], 1, false, 1).is_err());
    }
}

//! `profile`: measures l(b) of a model for every batch size on this machine, and stores it where backends look for it.
//! On a GPU these are the sizes that it is prepared for, and nothing is stored unless it is said where: backends
//! measure that themselves whenever a GPU takes a model.

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use backend::{
    config::{
        GpuName, OnnxRuntime,
        onnxruntime::{Provider, THREADS_MAX},
    },
    drive::{ByLength, Effort, Measured, OfLength, Profiled, QUANTILE},
    executor,
};
use indicatif::{ProgressBar, ProgressStyle};
use proto::{BatchCost, LatencyProfile, Span};
use repository::{Executor, Model, Precision, Processor, profile::StoredProfile};
use serde_json::json;

/// Arguments of `profile`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The model's folder, with its config.pbtxt
    #[arg(long)]
    model: PathBuf,
    /// What runs it: what config.pbtxt names, or for ONNX models onnx, cuda or onnxruntime [default: what config.pbtxt
    /// names, or else onnxruntime if its library is found, and onnx if not]
    #[arg(long)]
    executor: Option<String>,
    /// ONNX Runtime's library [default: $ORT_DYLIB_PATH, or else the newest that is found]
    #[arg(long)]
    library: Option<PathBuf>,
    /// Threads of ONNX Runtime: as many as onnxruntime.threads of backends' files [default: one for each core]
    #[arg(long)]
    threads: Option<usize>,
    /// What ONNX Runtime computes with: cpu or cuda [default: cpu]
    #[arg(long)]
    provider: Option<Provider>,
    /// The GPU: its number, or its name as `nvidia-smi -L` lists it
    #[arg(long, default_value = "0")]
    gpu: GpuName,
    /// How numbers of type FP32 are multiplied on a GPU: fp32, tf32 or, not by onnxruntime, fp16 [default: what
    /// config.pbtxt says, or tf32]
    #[arg(long)]
    precision: Option<Precision>,
    /// Where to store the profile; by default profile.toml in the model's folder, or nowhere with cuda, and with
    /// what config.pbtxt does not name if it names something else
    #[arg(long)]
    out: Option<PathBuf>,
    /// Runs of each batch size
    #[arg(long, default_value_t = 200)]
    runs: usize,
    /// Runs of each batch size that are not counted
    #[arg(long, default_value_t = 5)]
    warm_up: usize,
    /// Time for each batch size, in seconds; slow ones are run less often, but three times at least
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// One JSON object on stdout
    #[arg(long)]
    json: bool,
}

/// Measures, prints and stores.
pub(super) fn run(args: &Args) -> Result<()> {
    ensure!((10..=100_000).contains(&args.runs), "--runs must be 10 to 100000, found {}", args.runs);
    ensure!(args.warm_up <= 1_000, "--warm-up must be at most 1000, found {}", args.warm_up);
    ensure!((0.01..=600.0).contains(&args.seconds), "--seconds must be 0.01 to 600, found {}", args.seconds);
    let mut model = repository::load_model(&args.model)?;
    let mut settings = OnnxRuntime { library: args.library.clone(), ..OnnxRuntime::default() };
    settings.provider = args.provider.unwrap_or_default();
    let found = || executor::onnxruntime_library(&settings, executor::python_package().as_deref());
    let (executor, precision) = chosen(args, &model, || found().is_ok())?;
    let onnxruntime = onnxruntime(args, executor)?;
    if executor == "onnxruntime" {
        found()?;
    }
    let is_stored = configure(&mut model, (executor, onnxruntime.provider), precision);
    if let Executor::Emulated { .. } = model.executor {
        bail!("--model: {} is emulated, so its profile is what its config.pbtxt says", args.model.display());
    }
    let bar = ProgressBar::new(model.max_batch as u64);
    let style = ProgressStyle::with_template("{pos} of {len} batches [{bar:40}] {eta} left")?;
    bar.set_style(style.progress_chars("=> "));
    let span = Span::from_secs_f64(args.seconds);
    let effort = Effort { every_size: true, warm_up: args.warm_up, runs_max: args.runs, span };
    let mut progress = |batch, of| {
        bar.set_length(of as u64);
        bar.set_position(batch as u64);
    };
    let measured = match precision {
        Some(precision) if executor == "cuda" => {
            backend::drive::measure_on_gpu(&model, (&args.gpu, precision), effort, &mut progress)
        }
        _ => backend::drive::measure(&model, (&args.gpu, &onnxruntime), effort, &mut progress),
    };
    bar.finish_and_clear();
    let Profiled { sizes: measured, latency: profile, by_length } = measured?;
    let fit = Fit::of(&profile);
    let stored = StoredProfile {
        executor: executor.to_owned(),
        version: model.version.clone(),
        quantile: QUANTILE,
        alpha_ms: fit.alpha_ms,
        beta_ms: fit.beta_ms,
        latency_ms: (1..=profile.max_batch()).map(|batch| profile.latency(batch).as_millis_f64()).collect(),
    };
    let out = args.out.clone().or_else(|| is_stored.then(|| StoredProfile::path(&args.model)));
    out.as_ref().map(|out| stored.write(out)).transpose()?;
    if args.json {
        let latency_ms = &stored.latency_ms;
        let Fit { alpha_ms, beta_ms, r_squared } = fit;
        println!(
            "{}",
            json!({
                "model": model.name, "version": model.version, "executor": executor, "quantile": QUANTILE,
                "alpha_ms": alpha_ms, "beta_ms": beta_ms, "r_squared": r_squared, "latency_ms": latency_ms,
                "sizes": measured.iter().map(size_json).collect::<Vec<_>>(),
                "by_length": by_length.as_ref().map(by_length_json),
            })
        );
    } else {
        println!("{}", text(&measured, &fit));
        by_length.iter().for_each(|by_length| println!("\n{}", by_length_text(by_length)));
        out.iter().for_each(|out| println!("stored in {}", out.display()));
    }
    Ok(())
}

/// The name of what runs the model and, if that is a GPU and it is known, its precision. What runs ONNX models of
/// which nobody says it is up to whether ONNX Runtime is here.
fn chosen(
    args: &Args,
    model: &Model,
    has_onnxruntime: impl FnOnce() -> bool,
) -> Result<(&'static str, Option<Precision>)> {
    let is_open = matches!(model.executor, Executor::Onnx { wanted, .. } if wanted.processor.is_none());
    let configured = match args.executor {
        None if is_open && has_onnxruntime() => "onnxruntime",
        _ => model.executor_name(),
    };
    match (&model.executor, args.executor.as_deref().unwrap_or(configured)) {
        (Executor::Onnx { wanted, .. }, "cuda") => {
            Ok(("cuda", Some(args.precision.or(wanted.precision).unwrap_or_default())))
        }
        (Executor::Onnx { .. }, "onnxruntime") if args.provider == Some(Provider::Cuda) => match args.precision {
            Some(Precision::Fp16) => {
                bail!("--precision: expected fp32 or tf32, as ONNX Runtime computes what the file says, found fp16")
            }
            precision => Ok(("onnxruntime", precision)),
        },
        (_, found) if args.precision.is_some() => {
            bail!("--precision: expected --executor cuda, or onnxruntime with --provider cuda, found {found}")
        }
        (Executor::Onnx { .. }, "onnx") => Ok(("onnx", None)),
        (Executor::Onnx { .. }, "onnxruntime") => Ok(("onnxruntime", None)),
        (_, asked) if asked == configured => Ok((configured, None)),
        (_, asked) => bail!("--executor: {} is configured for {configured}, found {asked}", args.model.display()),
    }
}

/// How ONNX Runtime runs it, if that does; nothing else takes what is said to it.
fn onnxruntime(args: &Args, executor: &str) -> Result<OnnxRuntime> {
    let Args { library, threads, provider, .. } = args;
    let given =
        [("--library", library.is_some()), ("--threads", threads.is_some()), ("--provider", provider.is_some())];
    if let Some((flag, _)) = given.iter().find(|(_, is_given)| *is_given && executor != "onnxruntime") {
        bail!("{flag}: expected --executor onnxruntime, found {executor}");
    }
    if let Some(threads) = threads.filter(|threads| !(1..=THREADS_MAX).contains(threads)) {
        bail!("--threads must be 1 to {THREADS_MAX}, found {threads}");
    }
    Ok(OnnxRuntime { library: library.clone(), threads: *threads, provider: provider.unwrap_or_default() })
}

/// Makes it a model that this executor runs. Whether backends would read what is measured so from its folder: if its
/// configuration names this executor or leaves it to them, and it is the CPU that computes.
fn configure(model: &mut Model, (executor, provider): (&str, Provider), precision: Option<Precision>) -> bool {
    let Executor::Onnx { wanted, .. } = &mut model.executor else { return true };
    let (processor, is_on_cpu) = match executor {
        "onnx" => (Processor::Cpu, true),
        "onnxruntime" => (Processor::Onnxruntime, provider == Provider::Cpu),
        _ => (Processor::Cuda, false),
    };
    let is_read = is_on_cpu && wanted.processor.is_none_or(|configured| configured == processor);
    wanted.processor = Some(processor);
    wanted.precision = precision.or(wanted.precision);
    is_read
}

fn size_json(size: &Measured) -> serde_json::Value {
    let (low, high) = size.confidence;
    json!({
        "batch": size.batch, "runs": size.runs, "median_ms": size.median.as_millis_f64(),
        "estimate_ms": size.estimate.as_millis_f64(), "low_ms": low.as_millis_f64(), "high_ms": high.as_millis_f64(),
    })
}

/// c0 in milliseconds, and c1.
fn cost_of(by_length: &ByLength) -> (f64, f64) {
    let BatchCost { fixed, per_task_ppm } = by_length.cost;
    (fixed.as_millis_f64(), f64::from(per_task_ppm) / f64::from(BatchCost::PER_TASK_MAX))
}

fn by_length_json(by_length: &ByLength) -> serde_json::Value {
    let (c0_ms, c1) = cost_of(by_length);
    let of_length = |OfLength { length, input_bytes, sizes }: &OfLength| {
        let sizes: Vec<_> = sizes.iter().map(size_json).collect();
        json!({ "length": length, "input_bytes": input_bytes, "sizes": sizes })
    };
    let lengths: Vec<_> = by_length.lengths.iter().map(of_length).collect();
    json!({ "c0_ms": c0_ms, "c1": c1, "lengths": lengths })
}

/// A row for each length, with what a batch of so many takes in columns.
fn by_length_text(by_length: &ByLength) -> String {
    let (c0_ms, c1) = cost_of(by_length);
    let sizes = by_length.lengths.first().map_or(&[][..], |first| &first.sizes);
    let columns = sizes.iter().map(|size| format!("l({}) ms", size.batch));
    let header = ["length", "input bytes"].map(str::to_owned).into_iter().chain(columns);
    let rows = by_length.lengths.iter().map(|OfLength { length, input_bytes, sizes }| {
        let times = sizes.iter().map(|size| format!("{:.3}", size.estimate.as_millis_f64()));
        [length.to_string(), input_bytes.to_string()].into_iter().chain(times)
    });
    let table = cli::table(header, rows.map(Vec::from_iter));
    format!(
        "{table}\nb requests take c0 + (1 + c1 (b - 1)) w, where the longest takes c0 + w alone: \
         c0 = {c0_ms:.4} ms, c1 = {c1:.4}"
    )
}

fn text(measured: &[Measured], fit: &Fit) -> String {
    let ms = |span: Span| format!("{:.3}", span.as_millis_f64());
    let rows = measured.iter().map(|size| {
        let (low, high) = size.confidence;
        let line = fit.alpha_ms * size.batch as f64 + fit.beta_ms;
        let Measured { batch, runs, median, estimate, .. } = *size;
        [
            batch.to_string(),
            runs.to_string(),
            ms(median),
            ms(estimate),
            format!("{}-{}", ms(low), ms(high)),
            format!("{line:.3}"),
        ]
    });
    let header = ["batch", "runs", "median ms", "p90 ms = l(b)", "95 % confidence", "fit ms"];
    let Fit { alpha_ms, beta_ms, r_squared } = fit;
    let table = cli::table(header, rows);
    format!(
        "{table}\nl(b) = {alpha_ms:.4} ms * b + {beta_ms:.4} ms (R^2 = {r_squared:.4}); beta / alpha = {:.2}",
        beta_ms / alpha_ms
    )
}

/// The line nearest to a profile, by least squares.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Fit {
    alpha_ms: f64,
    beta_ms: f64,
    /// The share of the variation that the line explains.
    r_squared: f64,
}

impl Fit {
    fn of(profile: &LatencyProfile) -> Self {
        let points: Vec<(f64, f64)> =
            (1..=profile.max_batch()).map(|batch| (batch as f64, profile.latency(batch).as_millis_f64())).collect();
        let count = points.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
        let (mean_b, mean_l) = (mean(|point| point.0), mean(|point| point.1));
        let sum = |of: &dyn Fn(f64, f64) -> f64| points.iter().map(|(b, l)| of(b - mean_b, l - mean_l)).sum::<f64>();
        let (variation_b, variation_l) = (sum(&|b, _| b * b), sum(&|_, l| l * l));
        // One batch size says nothing of the next.
        let alpha_ms = if variation_b > 0.0 { sum(&|b, l| b * l) / variation_b } else { 0.0 };
        let rest = sum(&|b, l| (l - alpha_ms * b).powi(2));
        let r_squared = if variation_l > 0.0 { 1.0 - rest / variation_l } else { 1.0 };
        Self { alpha_ms, beta_ms: mean_l - alpha_ms * mean_b, r_squared }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_line_is_found_again() {
        let fit = Fit::of(&LatencyProfile::linear(1.053, 5.072, 64).unwrap());
        assert!((fit.alpha_ms - 1.053).abs() < 1e-5 && (fit.beta_ms - 5.072).abs() < 1e-4, "{fit:?}");
        assert!(fit.r_squared > 0.999_999);
    }

    #[test]
    fn lengths_are_rows_and_batch_sizes_columns() {
        let size = |batch: usize, ms: i64| {
            let time = Span::from_millis(ms);
            Measured { batch, runs: 3, median: time, estimate: time, confidence: (time, time) }
        };
        let by_length = ByLength {
            cost: BatchCost { fixed: Span::from_micros(1_500), per_task_ppm: 250_000 },
            lengths: vec![
                OfLength { length: 1, input_bytes: 16, sizes: vec![size(1, 2), size(8, 7)] },
                OfLength { length: 256, input_bytes: 1_040, sizes: vec![size(1, 20), size(8, 70)] },
            ],
        };
        let text = by_length_text(&by_length);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        for expected in ["length input bytes l(1) ms l(8) ms", "1 16 2.000 7.000", "256 1040 20.000 70.000"] {
            let expected: Vec<&str> = expected.split(' ').collect();
            assert!(
                lines
                    .iter()
                    .any(|line| line.ends_with(&expected) || line.windows(expected.len()).any(|part| part == expected)),
                "{text}"
            );
        }
        assert!(text.ends_with("c0 = 1.5000 ms, c1 = 0.2500"), "{text}");
        let json = by_length_json(&by_length);
        assert_eq!((&json["c0_ms"], &json["c1"]), (&json!(1.5), &json!(0.25)));
        assert_eq!(
            (&json["lengths"][1]["length"], &json["lengths"][1]["sizes"][1]["estimate_ms"]),
            (&json!(256), &json!(70.0))
        );
    }

    #[test]
    fn only_what_backends_read_is_stored() {
        let of = |executor: Option<&str>| {
            let folder = tempfile::tempdir().unwrap();
            let digits = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/digits");
            std::fs::create_dir(folder.path().join("1")).unwrap();
            for file in ["1/model.onnx", "labels.txt"] {
                std::fs::copy(digits.join(file), folder.path().join(file)).unwrap();
            }
            let parameter = |name| format!("parameters {{ key: \"executor\" value {{ string_value: \"{name}\" }} }}");
            let text = std::fs::read_to_string(digits.join("config.pbtxt")).unwrap();
            let text = text.replace("name: \"digits\"\n", "");
            let text = format!("{text}{}", executor.map(parameter).unwrap_or_default());
            std::fs::write(folder.path().join("config.pbtxt"), text).unwrap();
            repository::load_model(folder.path()).unwrap()
        };
        let (cpu, cuda, runtime) = (Processor::Cpu, Processor::Cuda, Processor::Onnxruntime);
        let cases = [
            (None, "onnx", Provider::Cpu, (cpu, true)),
            (None, "onnxruntime", Provider::Cpu, (runtime, true)),
            (None, "onnxruntime", Provider::Cuda, (runtime, false)),
            (None, "cuda", Provider::Cpu, (cuda, false)),
            (Some("onnxruntime"), "onnxruntime", Provider::Cpu, (runtime, true)),
            (Some("onnxruntime"), "onnxruntime", Provider::Cuda, (runtime, false)),
            (Some("onnxruntime"), "onnx", Provider::Cpu, (cpu, false)),
        ];
        for (configured, asked, provider, expected) in cases {
            let mut model = of(configured);
            let is_stored = configure(&mut model, (asked, provider), Some(Precision::Fp32));
            let Executor::Onnx { wanted, .. } = model.executor else { panic!("{:?}", model.executor) };
            assert_eq!((wanted.processor.unwrap(), is_stored), expected, "{configured:?}, {asked}");
            assert_eq!(wanted.precision, Some(Precision::Fp32));
        }
    }

    #[test]
    fn what_an_executor_does_not_take_is_refused() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: Args,
        }
        let model = repository::load_model(&Path::new(env!("CARGO_MANIFEST_DIR")).join("models/digits")).unwrap();
        let taken = |words: &str| {
            let flag = if words.is_empty() { "" } else { " --executor " };
            let words = format!("profile --model models/digits{flag}{words}");
            let Line { args } = clap::Parser::parse_from(words.split(' '));
            let (executor, precision) = chosen(&args, &model, || true).map_err(|error| error.to_string())?;
            let settings = onnxruntime(&args, executor).map_err(|error| error.to_string())?;
            Ok((precision, settings.threads, settings.provider))
        };
        for (words, expected) in [
            ("onnx --threads 2", "--threads: expected --executor onnxruntime, found onnx"),
            ("cuda --provider cuda", "--provider: expected --executor onnxruntime, found cuda"),
            ("cuda --library any", "--library: expected --executor onnxruntime, found cuda"),
            ("onnxruntime --threads 0", "--threads must be 1 to 256, found 0"),
            (
                "onnxruntime --precision fp32",
                "--precision: expected --executor cuda, or onnxruntime with --provider cuda, found onnxruntime",
            ),
            (
                "onnxruntime --provider cuda --precision fp16",
                "--precision: expected fp32 or tf32, as ONNX Runtime computes what the file says, found fp16",
            ),
        ] {
            assert_eq!(taken(words), Err(expected.to_owned()), "{words}");
        }
        let (fp32, tf32) = (Some(Precision::Fp32), Some(Precision::Tf32));
        assert_eq!(taken("onnx"), Ok((None, None, Provider::Cpu)));
        assert_eq!(taken(""), Ok((None, None, Provider::Cpu)), "what is found");
        assert_eq!(taken("cuda --precision fp32"), Ok((fp32, None, Provider::Cpu)));
        assert_eq!(taken("onnxruntime --threads 2"), Ok((None, Some(2), Provider::Cpu)));
        assert_eq!(
            taken("onnxruntime --provider cuda --precision tf32 --threads 3"),
            Ok((tf32, Some(3), Provider::Cuda))
        );
    }

    #[test]
    fn what_is_no_line_says_so() {
        let steps = [1, 1, 1, 8, 8, 8].map(Span::from_millis).to_vec();
        let fit = Fit::of(&LatencyProfile::from_table(steps).unwrap());
        assert!(fit.r_squared < 0.9, "{fit:?}");
        let one = Fit::of(&LatencyProfile::linear(1.0, 1.0, 1).unwrap());
        assert_eq!(one, Fit { alpha_ms: 0.0, beta_ms: 2.0, r_squared: 1.0 });
    }
}

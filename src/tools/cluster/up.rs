//! `up`: a cluster that runs until this process is interrupted, with what of its repository can be loaded.
#![allow(clippy::disallowed_methods)] // Real processes, real time.

use std::{
    ffi::OsStr,
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use gateway::config::ModelControlMode;
use repository::{Executor, Model, Processor, Refused, Repository};
use tracing::level_filters::LevelFilter;
use transport::Address;

use super::{BackendLayout, Cluster, LOOK, Layout, Wiring, gpus, tritonserver};
use crate::{
    config_file::{read_config, read_written},
    notices, role,
    tools::{
        autoscaler::{self, Autoscale, Range},
        supervisor::{Fate, Logs, Restarts, private_folder},
    },
};

/// How often it is said what is waited for.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);
/// A backend joins with all models that it could load, and frontends hear of them within this.
const JOIN_SPAN: Duration = Duration::from_secs(5);

/// Arguments of `up`.
#[derive(Debug, clap::Args)]
pub(crate) struct UpArgs {
    /// The cluster's file (TOML); without it, the cluster of `demo`
    #[arg(long)]
    config: Option<PathBuf>,
    /// The model repository. All of it is served by one backend with one GPU, and one for each model's program, unless
    /// --config has backends
    #[arg(long)]
    repository: Option<PathBuf>,
    /// An ONNX file that is served without a repository, under its own name; may be given several times
    #[arg(long, value_name = "FILE", conflicts_with = "repository")]
    model: Vec<PathBuf>,
    /// What computes ONNX models that do not say it themselves, on every backend: auto, cpu, cuda or onnxruntime
    /// [default: as the file says, or auto]
    #[arg(long)]
    executor: Option<Processor>,
    /// Refuse to start if any model cannot be loaded
    #[arg(long)]
    strict: bool,
    /// Where to serve HTTP: an IP or a name of this host, and a port [default: 127.0.0.1:8000]
    #[arg(long)]
    http: Option<Address>,
    /// Where to serve gRPC [default: 127.0.0.1:8001]
    #[arg(long)]
    grpc: Option<Address>,
    /// Where to serve a page of the cluster for browsers, at /ui; one of its models is at the next port [default:
    /// nowhere]
    #[arg(long)]
    ui: Option<Address>,
    /// The scheduler's policy [default: downbeat]
    #[arg(long)]
    policy: Option<String>,
    /// Schedulers, of which one is the primary and the others take over from it; 1 to 4 [default: 1]
    #[arg(long)]
    schedulers: Option<u16>,
    /// What clients are told that the server is called [default: downbeat]
    #[arg(long)]
    server_name: Option<String>,
    /// Who loads and unloads models: clients (explicit), nobody (none), or the repository as it changes (poll)
    /// [default: explicit]
    #[arg(long, value_parser = control_mode)]
    model_control_mode: Option<ModelControlMode>,
    /// Explicit: a model that is loaded from the start, instead of all; may be given several times, and * is all
    #[arg(long)]
    load_model: Vec<String>,
    /// Explicit: let loads bring a model's files along, which are served instead of the repository's
    #[arg(long)]
    load_files: bool,
    /// Poll: how often the repository is looked at, in seconds [default: 15]
    #[arg(long)]
    repository_poll_secs: Option<u32>,
    /// Bytes of answers that each frontend keeps of models whose configuration says response_cache; 0: none is
    /// [default: 64 MiB]
    #[arg(long)]
    cache_bytes: Option<u32>,
    /// Read the file, the repository and all that they name, say what that was, and end: nothing is opened or started
    #[arg(long)]
    check: bool,
    /// How members write their logs to stderr
    #[arg(long, value_enum, default_value_t)]
    pub(crate) log_format: role::LogFormat,
    #[command(flatten)]
    pub(super) triton: tritonserver::Flags,
}

impl UpArgs {
    /// The repository, if a flag names one.
    fn repository(&self) -> Result<Option<&Path>> {
        Ok(self.triton.repository()?.or(self.repository.as_deref()))
    }

    /// The cluster, with Triton's defaults if `is_triton`, or if one of its flags is given.
    pub(super) fn layout(&self, is_triton: bool) -> Result<Layout> {
        let has_triton_defaults = self.config.is_none() && (is_triton || self.triton.are_given());
        let mut layout = match &self.config {
            None if has_triton_defaults => tritonserver::Flags::defaults(),
            None => Layout { backend: Vec::new(), ..Layout::default() },
            Some(file) => read_config(file)?,
        };
        layout.repository = self.repository()?.map(Path::to_owned).or(layout.repository);
        ensure!(
            !has_triton_defaults || layout.repository.is_some() || !self.model.is_empty(),
            "--model-repository: found none, expected the folder of models"
        );
        self.triton.apply(&mut layout)?;
        if layout.backend.is_empty() {
            let all = || vec![BackendLayout::new(1, Vec::new())];
            let is_demo = layout.repository.is_none() && self.model.is_empty();
            layout.backend = if is_demo { Layout::default().backend } else { all() };
        }
        if let Some(executor) = self.executor {
            layout.backend.iter_mut().for_each(|backend| backend.executor = executor);
        }
        if let Some(http) = &self.http {
            layout.http = vec![transport::own_address("--http", http)?];
        }
        if let Some(grpc) = &self.grpc {
            layout.grpc = vec![transport::own_address("--grpc", grpc)?];
        }
        if let Some(ui) = &self.ui {
            let at = transport::own_address("--ui", ui)?;
            let next = at.port().checked_add(1).map(|port| SocketAddr::new(at.ip(), port));
            // A first frontend that the file has tell of itself elsewhere does so there alone.
            layout.admin = layout.admin.or(next.filter(|_| !layout.frontend.contains_key("admin")));
            layout.ui = Some(at);
        }
        layout.policy = self.policy.clone().unwrap_or(layout.policy);
        layout.schedulers = self.schedulers.unwrap_or(layout.schedulers);
        layout.server_name = self.server_name.clone().unwrap_or(layout.server_name);
        layout.model_control_mode = self.model_control_mode.unwrap_or(layout.model_control_mode);
        if let Some(seconds) = self.repository_poll_secs {
            layout.frontend.insert("repository_poll_secs".to_owned(), i64::from(seconds).into());
        }
        if let Some(bytes) = self.cache_bytes {
            layout.frontend.insert("cache_bytes".to_owned(), i64::from(bytes).into());
        }
        layout.load_files |= self.load_files;
        if !self.load_model.is_empty() {
            let is_all = self.load_model.iter().any(|name| name == "*");
            layout.load_models = (!is_all).then(|| self.load_model.clone());
        } else if has_triton_defaults && layout.model_control_mode == ModelControlMode::Explicit {
            layout.load_models = Some(Vec::new());
        }
        self.triton.apply_to_models(&mut layout, has_triton_defaults);
        layout.strict |= self.strict;
        ensure!(
            layout.load_models.is_none() || layout.model_control_mode == ModelControlMode::Explicit,
            "--load-model: expected --model-control-mode explicit, found {:?}",
            layout.model_control_mode
        );
        ensure!(
            !layout.load_files || layout.model_control_mode == ModelControlMode::Explicit,
            "--load-files: expected --model-control-mode explicit, found {:?}",
            layout.model_control_mode
        );
        Ok(layout)
    }
}

/// Runs a cluster until this process is interrupted. Members that end are started again, unless they were told to end,
/// or cannot be started at all.
pub(crate) fn up(args: &UpArgs, is_triton: bool) -> Result<()> {
    let mut layout = args.layout(is_triton)?;
    args.triton.idle().iter().for_each(|line| notices::tell(line));
    let folder = private_folder()?;
    if !args.model.is_empty() {
        layout.repository = Some(lay_out(&args.model, &folder.path().join("models"))?);
    }
    let is_demo = layout.repository.is_none();
    let found = repository::load(&layout.find_repository(folder.path())?);
    let key = "--repository, or `repository` in --config, names the folder of models";
    let repository = found.context(key)?;
    let Repository { models, refused, .. } = &repository;
    for Refused { name, version, reason } in refused {
        let is_needed = layout.strict || (layout.ends_without_models && layout.loads_at_start(name));
        ensure!(!is_needed, "model {name}: {reason}");
        let version = if version.is_empty() { String::new() } else { format!(" version {version}") };
        notices::warn(&format!("model {name}{version} is not served: {reason}"));
    }
    if let ([backend], Some(_)) = (&mut layout.backend[..], args.repository()?)
        && backend.models.is_empty()
    {
        backend.programs = programs(models);
    }
    if models.is_empty() {
        say_that_there_is_none(&layout, refused)?;
    }
    check_models(&layout, &repository, !args.load_model.is_empty())?;
    check_autoscale(&layout, models, gpus::needed(&layout, models))?;
    if args.check {
        layout.check()?;
        let backends = layout.backend.len();
        let found = role::told(layout.repository(), &repository);
        notices::tell(&format!("checked, and nothing opened: backends: {backends}, {found}"));
        return Ok(());
    }
    let found = layout.find_onnxruntime();
    notices::tell(&format!("ONNX models run by {}", layout.engines(&found)));
    gpus::line(&layout, models).iter().for_each(|line| notices::tell(line));
    let need_devices = gpus::needed(&layout, models).is_some();
    multiply(&mut layout, need_devices);
    let logs = Logs::Inherited(args.log_format, args.triton.log_level().unwrap_or(LevelFilter::INFO));
    let cluster = Cluster::start(folder, layout, logs, Restarts::All)?;
    for (name, process) in cluster.supervisor.process_ids() {
        notices::tell(&format!("{name}: process {process}"));
    }
    for (address, name) in cluster.schedulers() {
        notices::tell(&format!("{name}: {address}, --config {}", cluster.supervisor.config(&name).display()));
    }
    let mut names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
    names.dedup();
    names.retain(|name| cluster.layout.loads_at_start(name));
    let served = wait_for_models(&cluster, &names).context("while models were loaded")?;
    let at: Vec<String> = cluster.layout.http.iter().map(|http| format!("http://{http}")).collect();
    let at = at.into_iter().chain(cluster.layout.grpc.iter().map(|grpc| format!("grpc://{grpc}")));
    let at: Vec<String> = at.collect();
    let has_digits = is_demo && served.iter().any(|name| name == "digits");
    let served = match served.is_empty() {
        true => "no model is loaded yet,".to_owned(),
        false => repository::told(served.iter().map(String::as_str)),
    };
    notices::tell(&format!("ready: {served} at {}", at.join(", ")));
    if let Some(ui) = cluster.layout.ui {
        let models = cluster.layout.admin.map(|admin| format!(", models at http://{admin}/ui")).unwrap_or_default();
        notices::tell(&format!("in a browser: the cluster at http://{ui}/ui{models}"));
    }
    if has_digits && cluster.observer.is_none() {
        let image = cluster.layout.repository().join("digits/seven.json");
        let (http, image) = (cluster.http(), image.display());
        notices::tell(&format!("try: curl -s http://{http}/v2/models/digits/infer --data @{image}"));
    }
    let mut autoscale = cluster.autoscale()?;
    let has_others = autoscale.is_some();
    loop {
        std::thread::sleep(LOOK);
        // What is left goes on: that is what it is for.
        let ended = cluster.tend(|fallen| match fallen.fate {
            Fate::Left | Fate::AsTold => true,
            Fate::InVain => has_others && autoscaler::place_of(&fallen.name).is_some(),
            Fate::Again(_) => false,
        })?;
        if let Some(autoscale) = &mut autoscale {
            autoscale.tend(&cluster.supervisor, &ended, |place| cluster.wiring.backend(&cluster.layout, place));
        }
        ensure!(!cluster.supervisor.is_empty(), "no member is left");
    }
}

/// Whether there can be copies of the backend, and as many as there may be. Where GPUs are `needed`: how many this host
/// has, and what for.
fn check_autoscale(layout: &Layout, models: &[Model], needed: Option<(usize, &str)>) -> Result<()> {
    let Some(Autoscale { gpus: Range { min, max } }) = layout.autoscale else { return Ok(()) };
    let [backend] = &layout.backend[..] else {
        let found = layout.backend.len();
        bail!("backend: found {found} of them, expected one beside [autoscale], whose copies come and go");
    };
    let found = backend.gpus;
    ensure!(found == 1, "backend.gpus: found {found}, expected 1 beside [autoscale], as each has a backend of its own");
    let most = layout.backends_max();
    ensure!(max as usize <= most, "autoscale.gpus: found {min}..{max}, expected at most {most} in all");
    if let Some((here, what)) = needed {
        ensure!(
            max as usize <= here,
            "autoscale.gpus: found {min}..{max}, expected at most {here}, as this host has {here} GPUs for {what}"
        );
    }
    let alone = "expected none beside [autoscale], as it has GPUs of its own, which are counted with the others";
    let calls = |model: &&Model| matches!(&model.executor, Executor::Process { program, .. } if program.calls);
    let is_hosted = |model: &&Model| backend.models.is_empty() || backend.models.contains(&model.name);
    let of_lanes = models.iter().filter(is_hosted).find(calls).map(|model| &model.name);
    let of_programs = backend.programs.first().map(|(name, _)| name);
    if let Some(name) = of_lanes {
        bail!("backend.models: found {name}, which calls other models, {alone}");
    }
    if let Some(name) = of_programs {
        bail!("backend.models: found {name}, which a program runs, in a list of all, {alone}; list `models`");
    }
    ensure!(backend.lanes.is_none_or(|lanes| lanes == 0), "backend.lanes: found some, {alone}");
    Ok(())
}

/// As many backends as there are at least, of which each has a GPU of this host if they need one.
fn multiply(layout: &mut Layout, need_devices: bool) {
    if let (Some(Autoscale { gpus }), [backend]) = (layout.autoscale, &mut layout.backend[..]) {
        backend.has_own_device = need_devices;
        layout.backend = vec![backend.clone(); gpus.min as usize];
    }
}

/// That a repository waits for models, or what is wrong with it: nothing in it can be served, or nothing can come.
fn say_that_there_is_none(layout: &Layout, refused: &[Refused]) -> Result<()> {
    let repository = layout.repository().display();
    if let Some(Refused { reason, .. }) = refused.first() {
        bail!("repository: found no model that can be served, expected one: {reason}");
    }
    let found = format!("{repository}: found no model folder, expected <model>/config.pbtxt or <model>/1/model.onnx");
    let later = "--model-control-mode explicit or poll, with which models may come later";
    ensure!(layout.model_control_mode != ModelControlMode::None, "repository: {found}, or {later}");
    notices::warn(&format!("{found}; nothing is served until a model comes"));
    Ok(())
}

/// A repository of these files, each the only version of a model that is called as it is. They stay where they are, and
/// so does what they have beside them.
fn lay_out(files: &[PathBuf], repository: &Path) -> Result<PathBuf> {
    for file in files {
        let wrong = || anyhow!("--model: found {}, expected an ONNX file", file.display());
        let file = std::fs::canonicalize(file).map_err(|_| wrong())?;
        let (folder, name) = file.parent().zip(file.file_name().and_then(OsStr::to_str)).ok_or_else(wrong)?;
        ensure!(file.is_file() && name.ends_with(".onnx") && !name.contains(['"', '\\']), wrong());
        let model = repository.join(name.trim_end_matches(".onnx"));
        let twice = || format!("--model: found two files of the name {name}, expected each name once");
        std::fs::create_dir_all(repository)?;
        std::fs::create_dir(&model).with_context(twice)?;
        std::os::unix::fs::symlink(folder, model.join("1"))?;
        std::fs::write(model.join("config.pbtxt"), format!("default_model_filename: \"{name}\"\n"))?;
    }
    Ok(repository.to_owned())
}

/// What backends would refuse of the models that they are told of, again and again and only in their logs; and prices
/// of models that the repository lacks.
fn check_models(layout: &Layout, repository: &Repository, is_flag: bool) -> Result<()> {
    let mut names: Vec<&str> = repository.models.iter().map(|model| model.name.as_str()).collect();
    names.dedup();
    if let Some(unknown) = layout.gpu_prices.keys().find(|name| !names.contains(&name.as_str())) {
        bail!("gpu_prices: found {unknown}, expected some of: {}", repository::told(names.into_iter()));
    }
    let wiring = Wiring::random();
    for index in 0..layout.backend.len() {
        let config: backend::config::Config =
            read_written(&wiring.backend(layout, index)).map_err(|error| anyhow!("backend: {error}"))?;
        config.place(repository.clone()).map_err(|error| {
            let text = error.to_string();
            match text.strip_prefix("load_models: ") {
                Some(rest) if is_flag => anyhow!("--load-model: {rest}"),
                Some(_) => anyhow!("{text}"),
                None => anyhow!("backend {index}: {text}"),
            }
        })?;
    }
    Ok(())
}

fn control_mode(text: &str) -> Result<ModelControlMode, String> {
    match text {
        "none" => Ok(ModelControlMode::None),
        "poll" => Ok(ModelControlMode::Poll),
        "explicit" => Ok(ModelControlMode::Explicit),
        _ => Err("expected none, poll or explicit".to_owned()),
    }
}

/// Models that programs run beside the others: each has a GPU for each of its processes. Those that call others have
/// lanes.
fn programs(models: &[Model]) -> Vec<(String, usize)> {
    let instances = |model: &Model| match &model.executor {
        Executor::Process { program, .. } if !program.calls => Some((model.name.clone(), program.instances)),
        Executor::Process { .. } | Executor::Emulated { .. } | Executor::Onnx { .. } | Executor::Ensemble(_) => None,
    };
    models.iter().filter_map(instances).collect()
}

/// Waits until all that can be served is, however long it is loaded and measured, and yields that. What a backend could
/// not load is told of in its log, and given up once another model of the same backend is served.
///
/// # Errors
/// If a member ends.
fn wait_for_models(cluster: &Cluster, names: &[&str]) -> Result<Vec<String>> {
    let is_ready = cluster.readiness()?;
    let is_served = |name: &str| cluster.layout.http.iter().all(|&http| is_ready(http, name));
    let is_hosted = |backend: &BackendLayout, name: &str| {
        backend.models.is_empty() || backend.models.iter().any(|model| model == name)
    };
    let hosts = |name: &str| -> Vec<usize> {
        let backends = cluster.layout.backend.iter().enumerate();
        backends.filter(|(_, backend)| is_hosted(backend, name)).map(|(index, _)| index).collect()
    };
    let mut missing: Vec<(&str, Vec<usize>)> =
        names.iter().map(|&name| (name, hosts(name))).filter(|(_, hosts)| !hosts.is_empty()).collect();
    let mut served: Vec<String> = Vec::new();
    let mut joined: Vec<Option<Instant>> = vec![None; cluster.layout.backend.len()];
    let mut told = Instant::now();
    // Where there is no model yet, there is to be somebody who can be asked to load one.
    while !missing.is_empty() || !cluster.layout.http.iter().all(|http| TcpStream::connect(http).is_ok()) {
        cluster.check()?;
        let mut given_up = Vec::new();
        missing.retain(|(name, hosts)| {
            let is_served = is_served(name);
            if is_served {
                served.push((*name).to_owned());
                // Of several that host it nobody knows which has joined.
                if let [host] = hosts[..] {
                    joined[host].get_or_insert_with(Instant::now);
                }
            }
            let has_failed = |&host: &usize| joined[host].is_some_and(|at| at.elapsed() > JOIN_SPAN);
            let is_given_up = !is_served && hosts.iter().all(has_failed);
            if is_given_up {
                given_up.push(*name);
            }
            !is_served && !is_given_up
        });
        if !given_up.is_empty() {
            let names = repository::told(given_up.into_iter());
            ensure!(!cluster.layout.ends_without_models, "no backend could load {names}, see the log");
            notices::warn(&format!("not served, as no backend could load it, see the log: {names}"));
        }
        if told.elapsed() > PROGRESS_EVERY && !missing.is_empty() {
            let names = repository::told(missing.iter().map(|(name, _)| *name));
            notices::tell(&format!("loading and measuring: {names}"));
            told = Instant::now();
        }
        std::thread::sleep(LOOK);
    }
    served.sort_unstable();
    Ok(served)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(words: &[&str]) -> Layout {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: UpArgs,
        }
        let line: Line = clap::Parser::parse_from(["up"].iter().chain(words));
        line.args.layout(false).unwrap()
    }

    /// The backend's keys were once left out without a word.
    #[test]
    fn a_repository_is_served_by_the_backends_of_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        std::fs::write(path, "[[backend]]\nexecutor = 'cpu'\n[backend.onnxruntime]\nthreads = 2\n").unwrap();
        let own = layout(&["--config", path, "--repository", "models"]).backend;
        let own: Vec<_> = own.iter().map(|own| (own.gpus, own.executor, own.onnxruntime.threads)).collect();
        assert_eq!(own, [(1, Processor::Cpu, Some(2))]);
        std::fs::write(path, "policy = 'eager'\n").unwrap();
        let hosted = |words: &[&str]| layout(words).backend.into_iter().map(|own| own.models).collect::<Vec<_>>();
        let all = vec![Vec::<String>::new()];
        assert_eq!(hosted(&["--config", path, "--repository", "models"]), all);
        assert_eq!(hosted(&["--repository", "models"]), all);
        assert_eq!((hosted(&[]), hosted(&["--config", path]).len()), (hosted(&["--config", path]), 2), "the demo's");
    }

    /// `up` was once ready with nothing at all, while its backend ended again and again.
    #[test]
    fn a_file_is_a_model_of_its_own_name() {
        let folder = tempfile::tempdir().unwrap();
        let digits = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/digits/1/model.onnx");
        let file = folder.path().join("ten digits.onnx");
        std::fs::copy(digits, &file).unwrap();
        let repository = lay_out(&[file], &folder.path().join("models")).unwrap();
        let models = repository::load(&repository).unwrap().models;
        assert_eq!(
            models.iter().map(|model| (&model.name[..], model.max_batch)).collect::<Vec<_>>(),
            [("ten digits", 32)]
        );
        for wrong in ["none.onnx", ".", "models"] {
            let error = lay_out(&[folder.path().join(wrong)], &folder.path().join("other")).unwrap_err().to_string();
            assert!(error.starts_with("--model: found ") && error.ends_with("expected an ONNX file"), "{error}");
        }
    }

    #[test]
    fn what_cannot_be_scaled_is_refused_before_anything_starts() {
        let mut layout = Layout {
            autoscale: Some(Autoscale { gpus: Range { min: 2, max: 4 } }),
            backend: vec![BackendLayout::new(1, Vec::new())],
            ..Layout::default()
        };
        let models = repository::load("models".as_ref()).unwrap().models;
        layout.repository = Some("models".into());
        let wrong =
            |layout: &Layout, needed| check_autoscale(layout, &models, needed).map_err(|error| error.to_string());
        assert_eq!(wrong(&layout, None), Ok(()));
        assert_eq!(wrong(&layout, Some((4, "plans for GPUs"))), Ok(()));
        let found = "autoscale.gpus: found 2..4, expected at most 3, as this host has 3 GPUs for plans for GPUs";
        assert_eq!(wrong(&layout, Some((3, "plans for GPUs"))), Err(found.to_owned()));
        let too_many = Some(Autoscale { gpus: Range { min: 2, max: 224 } });
        let found = wrong(&Layout { autoscale: too_many, ..layout.clone() }, None).unwrap_err();
        assert_eq!(found, "autoscale.gpus: found 2..224, expected at most 223 in all");
        let of = |backend: Vec<BackendLayout>| wrong(&Layout { backend, ..layout.clone() }, None).unwrap_err();
        assert!(of(vec![BackendLayout::new(2, Vec::new())]).starts_with("backend.gpus: found 2, expected 1 beside"));
        assert!(of(Layout::default().backend).starts_with("backend: found 2 of them, expected one beside"));
        let one = || BackendLayout::new(1, Vec::new());
        assert!(of(vec![BackendLayout { lanes: Some(1), ..one() }]).starts_with("backend.lanes: found some, "));
        let programs = vec![("detector".to_owned(), 1)];
        let found = of(vec![BackendLayout { programs, ..one() }]);
        assert!(found.starts_with("backend.models: found detector, which a program runs, "), "{found}");
        // Each has a device of its own, if they need any, and the address of the file is the first one's.
        layout.backend[0].admin = Some(Address::from(SocketAddr::from(([127, 0, 0, 1], 8002))).into());
        for (need_devices, gpus) in [(false, "gpus = 1"), (true, "gpus = [3]")] {
            let mut layout = layout.clone();
            multiply(&mut layout, need_devices);
            assert_eq!(layout.backend.len(), 2);
            let wiring = Wiring::random();
            let files = [0, 3].map(|index| wiring.backend(&layout, index));
            assert!(files[1].contains(gpus) && files[1].contains("name = \"backend-3\""), "{}", files[1]);
            assert_eq!(files.map(|file| file.contains("127.0.0.1:8002")), [true, false]);
        }
    }

    #[test]
    fn models_that_the_repository_lacks_are_refused_before_anything_starts() {
        let repository = tempfile::tempdir().unwrap();
        let config = r#"
            backend: "emulated"
            max_batch_size: 8
            input { name: "x" data_type: TYPE_UINT8 dims: 4 }
            output { name: "digest" data_type: TYPE_UINT64 dims: 2 }
            parameters { key: "slo_ms" value { string_value: "20" } }
            parameters { key: "alpha_ms" value { string_value: "1" } }
            parameters { key: "beta_ms" value { string_value: "1" } }
        "#;
        for name in ["a", "b"] {
            std::fs::create_dir_all(repository.path().join(name).join("1")).unwrap();
            std::fs::write(repository.path().join(name).join("config.pbtxt"), config).unwrap();
        }
        let layout = || Layout {
            repository: Some(repository.path().to_owned()),
            backend: vec![BackendLayout::new(1, Vec::new())],
            ..Layout::default()
        };
        let check =
            |layout: &Layout, is_flag| check_models(layout, &repository::load(repository.path()).unwrap(), is_flag);
        check(&layout(), false).unwrap();
        let text = |layout: &Layout, is_flag| check(layout, is_flag).unwrap_err().to_string();
        let loads = Layout { load_models: Some(vec!["a".to_owned(), "nope".to_owned()]), ..layout() };
        assert_eq!(text(&loads, true), "--load-model: found nope, expected some of: a, b");
        assert_eq!(text(&loads, false), "load_models: found nope, expected some of: a, b");
        let mut pins = layout();
        pins.backend[0].pinned = vec!["nope".to_owned()];
        assert_eq!(text(&pins, false), "backend 0: pinned: found nope, expected some of: a, b");
        let prices = |name: &str| Layout { gpu_prices: [(name.to_owned(), 4.0)].into(), ..layout() };
        check(&prices("b"), false).unwrap();
        assert_eq!(text(&prices("nope"), false), "gpu_prices: found nope, expected some of: a, b");
        let mut hosts = layout();
        hosts.backend[0].models = vec!["nope".to_owned()];
        assert_eq!(text(&hosts, false), "backend 0: placement: found model nope, expected one of: a, b");
    }
}

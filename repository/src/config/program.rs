//! Models that a program runs: which one, and what it may use of the host.

use std::{
    env,
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
};

use prost_reflect::{DynamicMessage, MapKey, Value};
use proto::Span;
use serde::Deserialize;

use crate::{
    config::file::{ConfigFile, ONNX_FILE, get, parameter},
    error::RepositoryError,
    limits::WEIGHTS_MB_MAX,
    model::PYTHON,
    program::{Launch, Program, ProgramLimits},
};

/// The file of a model in Python.
pub(super) const PYTHON_FILE: &str = "model.py";
/// The file of a program, unless its parameter names one.
const PROGRAM_FILE: &str = "model";

/// The interpreter of models in Python, unless their parameter names one.
const INTERPRETER: &str = "python3";
/// Libraries of numbers reserve far more of addresses than they ever use.
const MEMORY_BYTES: u64 = 16_000_000_000;
const FILES: u64 = 1_024;
const PROCESSES: u64 = 256;
const START_SPAN: Span = Span::from_millis(60_000);
const COUNT_MAX: u64 = 65_536;
/// More of one model is a slip.
const INSTANCES_MAX: usize = 16;

/// Parameters that say what is started, and what it may use of the host.
const LAUNCHING: [&str; 9] =
    ["program", "python", "memory_mb", "files_max", "processes_max", "network", "start_timeout_ms", "calls", "samples"];
/// So much of a model's file is looked at for calls; more is a file of data.
const LOOKED_AT_BYTES: u64 = 1 << 20;

/// A program's words: as one, or as a list.
#[derive(Deserialize)]
struct Words {
    words: Vec<String>,
}

impl ConfigFile<'_> {
    /// Takes from `written`, the repository's own configuration, what is started for the model: this one came with a
    /// client's request, and clients do not choose what runs on hosts.
    pub(super) fn keep_launch(&mut self, written: &DynamicMessage) -> Result<(), RepositoryError> {
        let own = get(written, "parameters");
        for key in LAUNCHING {
            let (found, expected) = (self.parameter(key), parameter(written, key));
            if found.is_some() && found != expected {
                let expected = "what config.pbtxt says: clients do not choose what is started";
                return Err(self.error(key, format_args!("\"{}\"", found.unwrap_or_default()), expected));
            }
            let key = MapKey::String(key.to_owned());
            if let Some(value) = own.as_map().and_then(|own| own.get(&key)) {
                let parameters = self.message.get_field_by_name_mut("parameters").and_then(Value::as_map_mut);
                parameters.expect("the schema says map").insert(key, value.clone());
            }
        }
        Ok(())
    }

    /// The program of a model whose executor is `name`.
    pub(super) fn program(&self, name: &str) -> Result<Program, RepositoryError> {
        if !self.may_start {
            let expected = "onnxruntime: clients bring no programs, as they do not choose what is started";
            return Err(self.error("backend", format_args!("\"{name}\""), expected));
        }
        let launch = if name == PYTHON {
            if let Some(found) = self.parameter("EXECUTION_ENV_PATH") {
                let expected = "none: name the environment's interpreter by the parameter `python`";
                return Err(self.error("EXECUTION_ENV_PATH", format_args!("\"{found}\""), expected));
            }
            let interpreter = self.parameter("python").unwrap_or_else(interpreter);
            if interpreter.is_empty() {
                return Err(self.error("python", "\"\"", "a Python interpreter"));
            }
            Launch::Python { interpreter, file: self.model_file(PYTHON_FILE)? }
        } else {
            Launch::Program(self.words()?)
        };
        let calls = match self.flag("calls")? {
            Some(said) => said,
            None => matches!(&launch, Launch::Python { file, .. } if names_calls(file)),
        };
        let (folder, instances, limits) = (self.folder.to_owned(), self.instances(), self.program_limits()?);
        let samples = self.flag("samples")?.unwrap_or(true);
        Ok(Program { launch, folder, instances, limits, calls, samples })
    }

    /// A parameter that says yes or no.
    fn flag(&self, key: &str) -> Result<Option<bool>, RepositoryError> {
        match self.parameter(key).as_deref() {
            None => Ok(None),
            Some("false") => Ok(Some(false)),
            Some("true") => Ok(Some(true)),
            Some(found) => Err(self.error(key, format_args!("\"{found}\""), "\"true\" or \"false\"")),
        }
    }

    /// What all of `instance_group` counts, which is one each if nothing else is said.
    fn instances(&self) -> usize {
        let groups = get(&self.message, "instance_group");
        let groups = groups.as_list().unwrap_or_default().iter().filter_map(Value::as_message);
        let counts = groups.map(|group| usize::try_from(get(group, "count").as_i32().unwrap_or(1)).unwrap_or(1).max(1));
        counts.fold(0, usize::saturating_add).clamp(1, INSTANCES_MAX)
    }

    /// `parameters: program`, the first of which is a path from the model's folder if it has a slash.
    fn words(&self) -> Result<Vec<String>, RepositoryError> {
        let expected = "a program, or a list such as ['./serve', '--fast']";
        let Some(found) = self.parameter("program") else {
            return Ok(vec![self.model_file(PROGRAM_FILE)?.display().to_string()]);
        };
        let wrong = || self.error("program", format_args!("{found:?}"), expected);
        let mut words = match found.starts_with('[') {
            true => toml::from_str::<Words>(&format!("words = {found}")).map_err(|_| wrong())?.words,
            false => vec![found.clone()],
        };
        let first = words.first_mut().filter(|first| !first.is_empty()).ok_or_else(wrong)?;
        if first.contains('/') {
            let path = self.folder.join(&*first);
            if !path.is_file() {
                return Err(self.error("program", path.display(), "the path of a program, from the model's folder"));
            }
            *first = path.display().to_string();
        }
        match words.iter().any(|word| word.contains('\0')) {
            true => Err(wrong()),
            false => Ok(words),
        }
    }

    fn program_limits(&self) -> Result<ProgramLimits, RepositoryError> {
        let count = |key: &str, least: u64, default: u64| match self.parameter(key) {
            None => Ok(default),
            Some(found) => match found.parse() {
                Ok(count) if (least..=COUNT_MAX).contains(&count) => Ok(count),
                _ => Err(self.error(key, format_args!("\"{found}\""), format_args!("{least} to {COUNT_MAX}"))),
            },
        };
        let memory_bytes = match self.parameter("memory_mb") {
            None => MEMORY_BYTES,
            Some(found) => match found.parse::<f64>() {
                Ok(mb) if (1.0..=WEIGHTS_MB_MAX).contains(&mb) => (mb * 1e6) as u64,
                _ => {
                    let expected = format!("megabytes of 10^6 bytes, 1 to {WEIGHTS_MB_MAX}");
                    return Err(self.error("memory_mb", format_args!("\"{found}\""), expected));
                }
            },
        };
        let network = self.flag("network")?.unwrap_or(false);
        let start = match self.parameter("start_timeout_ms") {
            None => START_SPAN,
            Some(_) => Span::from_millis_f64(self.milliseconds("start_timeout_ms")?),
        };
        let (files, processes) = (count("files_max", 16, FILES)?, count("processes_max", 1, PROCESSES)?);
        Ok(ProgramLimits { memory_bytes, files, processes, network, start })
    }

    /// Whether the version's folder holds a model in Python and no other.
    pub(super) fn is_python(&self) -> bool {
        self.is_python_in(&self.version)
    }

    /// The same of this version.
    pub(super) fn is_python_in(&self, version: &str) -> bool {
        let has = |name: &str| self.folder.join(version).join(name).is_file();
        has(PYTHON_FILE) && !has(ONNX_FILE)
    }
}

/// Whether a model in Python has the words of a call in its file, as Triton's have them.
fn names_calls(file: &Path) -> bool {
    let mut text = Vec::new();
    let read = File::open(file).and_then(|file| file.take(LOOKED_AT_BYTES).read_to_end(&mut text));
    let text = String::from_utf8_lossy(&text);
    read.is_ok() && text.contains("InferenceRequest(") && (text.contains(".exec(") || text.contains(".async_exec("))
}

/// The interpreter of models in Python that name none: that of the virtual environment which has this binary, whose
/// packages were installed beside it; otherwise the one that is found on the path.
#[must_use]
pub fn interpreter() -> String {
    let folder = env::current_exe().ok().and_then(|binary| binary.parent().map(Path::to_owned));
    let own = folder.and_then(|folder| interpreter_of(&folder));
    own.map_or_else(|| INTERPRETER.to_owned(), |own| own.display().to_string())
}

/// The interpreter of a virtual environment (PEP 405) whose binaries are in `folder`.
fn interpreter_of(folder: &Path) -> Option<PathBuf> {
    let has_mark = folder.parent()?.join("pyvenv.cfg").is_file();
    Some(folder.join(INTERPRETER)).filter(|interpreter| has_mark && interpreter.is_file())
}

impl Program {
    /// The file or the program itself, as its configuration has it.
    #[must_use]
    pub fn file(&self) -> PathBuf {
        match &self.launch {
            Launch::Python { file, .. } => file.clone(),
            Launch::Program(words) => PathBuf::from(&words[0]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Source,
        model::{Executor, Model},
    };
    use std::fs;

    const TENSORS: &str = "input { name: \"x\" data_type: TYPE_FP32 dims: 4 }
        output { name: \"y\" data_type: TYPE_FP32 dims: 4 }";

    /// A model with these files in version 3.
    fn load(config: &str, files: &[&str]) -> Result<Model, String> {
        let repository = tempfile::tempdir().unwrap();
        let folder = repository.path().join("m");
        fs::create_dir_all(folder.join("3")).unwrap();
        files.iter().for_each(|file| fs::write(folder.join(file), "").unwrap());
        fs::write(folder.join("config.pbtxt"), format!("{TENSORS} {config}")).unwrap();
        let prefix = format!("{}/", repository.path().display());
        crate::load::load_model(&folder).map_err(|error| error.to_string().replace(&prefix, ""))
    }

    #[test]
    fn a_virtual_environments_binary_runs_models_with_its_interpreter() {
        let environment = tempfile::tempdir().unwrap();
        let folder = environment.path().join("bin");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("python3"), "").unwrap();
        assert_eq!(interpreter_of(&folder), None, "any folder may have one");
        fs::write(environment.path().join("pyvenv.cfg"), "").unwrap();
        assert_eq!(interpreter_of(&folder), Some(folder.join("python3")));
        fs::remove_file(folder.join("python3")).unwrap();
        assert_eq!(interpreter_of(&folder), None);
    }

    fn parameter(key: &str, value: &str) -> String {
        format!("parameters {{ key: \"{key}\" value {{ string_value: \"{value}\" }} }} ")
    }

    fn program(config: &str, files: &[&str]) -> Program {
        let Executor::Process { program, .. } = load(config, files).unwrap().executor else { panic!("{config}") };
        program
    }

    #[test]
    fn a_model_in_python_is_its_file_with_or_without_saying_so() {
        for config in ["backend: \"python\" max_batch_size: 8", "max_batch_size: 8"] {
            let model = load(config, &["3/model.py"]).unwrap();
            assert_eq!((model.executor_name(), model.max_batch), ("process", 8));
            assert_eq!(model.configuration.platform(), "", "as Triton tells it");
            let Executor::Process { program, profile: None } = model.executor else { panic!("{:?}", model.executor) };
            let Launch::Python { interpreter, file } = &program.launch else { panic!("{program:?}") };
            assert!(interpreter == "python3" && file.ends_with("m/3/model.py") && program.folder.ends_with("m"));
            assert_eq!((program.instances, program.limits.network), (1, false));
        }
        let model = load("backend: \"python\" default_model_filename: \"b.py\"", &["3/b.py"]).unwrap();
        let Executor::Process { program, .. } = model.executor else { panic!("{:?}", model.executor) };
        assert!(program.file().ends_with("3/b.py"));
        let onnx = load("backend: \"onnx\" max_batch_size: 2", &["3/model.py", "3/model.onnx"]).unwrap();
        assert_eq!(onnx.executor_name(), "onnx");
    }

    #[test]
    fn a_program_is_a_word_a_list_or_the_versions_file() {
        let words = |config: &str, files: &[&str]| {
            let Launch::Program(words) = program(config, files).launch else { panic!("{config}") };
            words
        };
        let process = "backend: \"process\" ";
        assert!(words(process, &["3/model"])[0].ends_with("m/3/model"));
        let found = words(&format!("{process}{}", parameter("program", "./serve")), &["serve"]);
        assert!(found.len() == 1 && found[0].ends_with("m/./serve"), "{found:?}");
        let listed = parameter("program", "['python3', 'serve.py', '--fast']");
        assert_eq!(words(&format!("{process}{listed}"), &[]), ["python3", "serve.py", "--fast"]);
    }

    #[test]
    fn its_tensors_may_differ_in_size() {
        let more = "input { name: \"s\" data_type: TYPE_STRING dims: -1 optional: true }";
        let model = load(&format!("backend: \"python\" {more}"), &["3/model.py"]).unwrap();
        assert!(crate::cell::is_record(&model.inputs) && model.inputs[1].is_optional());
    }

    #[test]
    fn what_it_may_use_is_said_by_parameters() {
        let limits: String = [
            ("memory_mb", "100"),
            ("files_max", "32"),
            ("processes_max", "4"),
            ("network", "true"),
            ("start_timeout_ms", "1500"),
        ]
        .map(|(key, value)| parameter(key, value))
        .concat();
        let config = format!("backend: \"python\" instance_group [ {{ count: 2 }}, {{ kind: KIND_CPU }} ] {limits}");
        let found = program(&config, &["3/model.py"]);
        let expected = ProgramLimits {
            memory_bytes: 100_000_000,
            files: 32,
            processes: 4,
            network: true,
            start: Span::from_millis(1_500),
        };
        assert_eq!((found.instances, found.limits), (3, expected));
    }

    #[test]
    fn a_model_may_call_others_if_its_file_has_the_words_or_a_parameter_says_so() {
        let repository = tempfile::tempdir().unwrap();
        let file = repository.path().join("model.py");
        let found = |text: &[u8]| {
            fs::write(&file, text).unwrap();
            names_calls(&file)
        };
        assert!(found(b"answer = pb_utils.InferenceRequest(model_name='m', inputs=[x]).exec()"));
        assert!(found(b"InferenceRequest(\xff)\nawait request.async_exec()"));
        assert!(!found(b"exec('1 + 1')") && !found(b"InferenceResponse(outputs)") && !found(b""));
        assert!(!names_calls(&repository.path().join("none.py")));
        for (said, expected) in [("true", true), ("false", false)] {
            let config = format!("backend: \"process\" {}", parameter("calls", said));
            assert_eq!(program(&config, &["3/model"]).calls, expected);
        }
        let python = program("backend: \"python\"", &["3/model.py"]);
        assert!(!python.calls && python.samples);
        assert!(!program(&format!("backend: \"python\" {}", parameter("samples", "false")), &["3/model.py"]).samples);
    }

    #[test]
    fn wrong_parameters_name_what_was_found_and_expected() {
        let cases = [
            ("memory_mb", "0", "memory_mb: found \"0\", expected megabytes of 10^6 bytes, 1 to 1000000"),
            ("memory_mb", "nan", "memory_mb: found \"nan\", expected megabytes"),
            ("files_max", "3", "files_max: found \"3\", expected 16 to 65536"),
            ("processes_max", "many", "processes_max: found \"many\", expected 1 to 65536"),
            ("network", "yes", "network: found \"yes\", expected \"true\" or \"false\""),
            ("calls", "some", "calls: found \"some\", expected \"true\" or \"false\""),
            ("samples", "0", "samples: found \"0\", expected \"true\" or \"false\""),
            ("start_timeout_ms", "-1", "start_timeout_ms: found \"-1\", expected milliseconds"),
            ("python", "", "python: found \"\", expected a Python interpreter"),
            ("EXECUTION_ENV_PATH", "env.tar.gz", "EXECUTION_ENV_PATH: found \"env.tar.gz\", expected none: name the"),
        ];
        for (key, value, expected) in cases {
            let found = load(&format!("backend: \"python\" {}", parameter(key, value)), &["3/model.py"]).unwrap_err();
            assert!(found.starts_with(&format!("m/config.pbtxt: {expected}")), "`{found}`, `{expected}`");
        }
        let cases = [
            ("./none", "program: found "),
            ("[", "program: found \"[\", expected a program, or a list such as ['./serve', '--fast']"),
            ("[]", "program: found \"[]\", expected a program"),
            ("['']", "program: found \"['']\", expected a program"),
            ("[1]", "program: found \"[1]\", expected a program"),
        ];
        for (value, expected) in cases {
            let found = load(&format!("backend: \"process\" {}", parameter("program", value)), &[]).unwrap_err();
            assert!(found.starts_with(&format!("m/config.pbtxt: {expected}")), "`{found}`, `{expected}`");
        }
        let missing = load("backend: \"python\"", &[]).unwrap_err();
        assert_eq!(missing, "m/3/model.py: no such file, expected the model");
    }

    /// A configuration that a client has sent with a load.
    #[test]
    fn clients_do_not_choose_what_is_started() {
        let repository = tempfile::tempdir().unwrap();
        let folder = repository.path().join("m");
        fs::create_dir_all(folder.join("3")).unwrap();
        fs::write(folder.join("3/model.py"), "").unwrap();
        let own = parameter("python", "/opt/python") + &parameter("network", "true");
        fs::write(folder.join("config.pbtxt"), format!("{TENSORS} max_batch_size: 2 {own}")).unwrap();
        let told = crate::load::load_model(&folder).unwrap().configuration;
        let load = |change: &dyn Fn(&mut serde_json::Value)| {
            let mut json = serde_json::to_value(&told).unwrap();
            change(&mut json);
            crate::load::load_named(&Source::repository(repository.path()), "m", Some(&json.to_string()))
        };
        for change in
            [&|json: &mut serde_json::Value| json["max_batch_size"] = 7.into(), &|json: &mut serde_json::Value| {
                json["parameters"] = serde_json::json!({})
            }] as [&dyn Fn(&mut serde_json::Value); 2]
        {
            let model = load(change).unwrap().remove(0);
            let Executor::Process { program, .. } = model.executor else { panic!("{:?}", model.executor) };
            let Launch::Python { interpreter, .. } = program.launch else { panic!("{program:?}") };
            assert!(interpreter == "/opt/python" && program.limits.network, "as the repository has it");
        }
        for (key, value) in [
            ("python", "/tmp/mine"),
            ("program", "['sh', '-c', 'true']"),
            ("memory_mb", "100"),
            ("files_max", "100"),
            ("processes_max", "100"),
            ("network", "false"),
            ("start_timeout_ms", "100"),
        ] {
            let error = load(&|json| json["parameters"][key] = serde_json::json!({ "string_value": value }));
            let error = error.unwrap_err().to_string();
            let expected =
                format!("parameter config: {key}: found \"{value}\", expected what config.pbtxt says: clients");
            assert!(error.contains(&expected), "`{error}`, `{expected}`");
        }
        for name in ["/dev/shm/mine.py", "../../mine.py", "./../mine.py"] {
            let error = load(&|json| json["default_model_filename"] = name.into()).unwrap_err().to_string();
            assert!(error.contains("expected a file below the model's folder"), "{error}");
            let error = load(&|json| json["output"][0]["label_filename"] = name.into()).unwrap_err().to_string();
            assert!(error.contains("label_filename: found"), "{error}");
        }
    }
}

use std::collections::BTreeSet;

use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    args: super::super::UpArgs,
}

fn parse(words: &str) -> Result<Layout, String> {
    let line = Line::try_parse_from(["up"].into_iter().chain(words.split_whitespace()));
    let line = line.map_err(|error| error.to_string())?;
    line.args.layout(false).map_err(|error| format!("{error:#}"))
}

fn layout(words: &str) -> Layout {
    parse(words).unwrap_or_else(|error| panic!("{words}: {error}"))
}

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn ready_with(layout: &Layout) -> Vec<&str> {
    layout.frontend["ready_with"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect()
}

#[test]
fn what_kserve_says_is_a_cluster() {
    let words = "--model-store=/mnt/models --grpc-port=9000 --http-port=8080 --allow-grpc=true --allow-http=true";
    let found = layout(words);
    assert_eq!(found.repository.as_deref(), Some(Path::new("/mnt/models")));
    assert_eq!((&found.http[..], &found.grpc[..]), (&[at("0.0.0.0:8080")][..], &[at("0.0.0.0:9000")][..]));
    assert_eq!(found.admin, Some(at("0.0.0.0:8002")));
    assert_eq!((found.model_control_mode, found.server_name.as_str()), (ModelControlMode::None, "triton"));
    assert!(found.strict && found.ends_without_models && found.backend.len() == 1);
    assert_eq!(ready_with(&found), ["*"]);
}

#[test]
fn each_flag_is_a_setting() {
    let found = layout(
        "--model-repository /m --http-address=127.0.0.2 --grpc-address ::1 --metrics-port 9002 --id=t \
         --exit-on-error=0 --strict-readiness=OFF --exit-timeout-secs=60 --cache-config=local,size=1048576 \
         --http-max-input-size=2097152 --metrics-config=summary_latencies=true --model-control-mode=poll \
         --repository-poll-secs=5",
    );
    assert_eq!((&found.http[..], &found.grpc[..]), (&[at("127.0.0.2:8000")][..], &[at("[::1]:8001")][..]));
    assert_eq!((found.admin, found.server_name.as_str()), (Some(at("127.0.0.2:9002")), "t"));
    assert!(!found.strict && !found.ends_without_models && ready_with(&found).is_empty());
    assert_eq!((found.metrics.summary_latencies, found.metrics.histogram_latencies), (true, false));
    assert_eq!(found.model_control_mode, ModelControlMode::Poll);
    for (key, expected) in [
        ("drain_timeout_ms", 60_000),
        ("cache_bytes", 1 << 20),
        ("body_bytes_max", 2 << 20),
        ("repository_poll_secs", 5),
    ] {
        assert_eq!(found.frontend[key].as_integer(), Some(expected), "{key}");
    }
    assert_eq!(found.drain_timeout(), std::time::Duration::from_secs(63));
    let silent = layout("--model-repository=m --allow-http=false --allow-grpc=off --allow-metrics=0");
    assert!(silent.http[0].ip().is_loopback() && silent.grpc.is_empty() && silent.admin.is_none());
    let level = |words: &str| Line::try_parse_from(["up", words]).unwrap().args.triton.log_level();
    assert_eq!(level("--log-verbose=0"), Some(LevelFilter::INFO));
    assert_eq!(
        (level("--log-verbose=1"), level("--log-verbose=true")),
        (level("--log-verbose=2"), level("--log-verbose=3"))
    );
    assert_eq!((level("--log-verbose=1"), level("--strict")), (Some(LevelFilter::DEBUG), None));
}

#[test]
fn only_models_that_are_named_are_loaded_where_clients_load_them() {
    let none = layout("--model-repository=m --model-control-mode=explicit");
    assert_eq!((none.load_models.as_deref(), ready_with(&none)), (Some(&[][..]), Vec::new()));
    assert!(!none.strict && none.ends_without_models, "members start whatever else there is");
    let two = layout("--model-repository=m --model-control-mode=explicit --load-model=a --load-model b");
    assert_eq!(
        (two.load_models.clone().unwrap(), ready_with(&two)),
        (vec!["a".to_owned(), "b".into()], vec!["a", "b"])
    );
    let all = layout("--model-repository=m --model-control-mode=explicit --load-model=*");
    assert_eq!((all.load_models.as_deref(), ready_with(&all)), (None, vec!["*"]));
    let own = layout("--repository m --model-control-mode explicit");
    assert_eq!((own.load_models, own.frontend.get("ready_with")), (None, None), "as without these flags");
}

#[test]
fn a_file_says_what_the_flags_do_not() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "http = ['127.0.0.3:8005']\nserver_name = 'own'\n").unwrap();
    let found = layout(&format!("--config {} --model-repository=m --grpc-port=9000", file.path().display()));
    assert_eq!((&found.http[..], &found.grpc[..]), (&[at("127.0.0.3:8005")][..], &[at("0.0.0.0:9000")][..]));
    assert_eq!((found.server_name.as_str(), found.admin, found.strict), ("own", None, false));
    assert_eq!(found.model_control_mode, ModelControlMode::Explicit);
    let metrics = layout(&format!("--config {} --metrics-port=9002", file.path().display()));
    assert_eq!(metrics.admin, Some(at("0.0.0.0:9002")));
}

#[test]
fn what_changes_nothing_is_named_once() {
    let words = "up --backend-config=python,a=b --backend-config tensorflow,version=2 --strict-model-config=false \
                 --disable-auto-complete-config --allow-sagemaker=false --log-info=1 --pinned-memory-pool-byte-size=0";
    let line = Line::try_parse_from(words.split_whitespace()).unwrap().args.triton.idle().unwrap();
    assert_eq!(
        line,
        "these change nothing here: --backend-config, --log-info, --pinned-memory-pool-byte-size, \
         --strict-model-config, --disable-auto-complete-config, --allow-sagemaker"
    );
    assert_eq!(Line::try_parse_from(["up"]).unwrap().args.triton.idle(), None);
    assert_eq!(IDLE.iter().collect::<BTreeSet<_>>().len(), IDLE.len());
}

#[test]
fn what_would_change_answers_is_refused() {
    for (words, expected) in [
        ("--allow-http=yes", "invalid value 'yes' for '--allow-http <BOOL>': expected true, on or 1"),
        ("--allow-sagemaker=true", "invalid value 'true' for '--allow-sagemaker <allow-sagemaker>': expected false"),
        ("--grpc-use-ssl=1", "expected false: [clients.tls]"),
        ("--http-restricted-api=health,a=b", "unexpected argument '--http-restricted-api' found"),
        ("--cache-config=redis,host=a", "expected local,size=BYTES"),
        ("--log-verbose=much", "expected a number from 0 on"),
        ("--http-port=70000", "70000 is not in 0..=65535"),
        ("--http-port=8000 --http 127.0.0.1:8000", "cannot be used with"),
        ("--http-port=8000", "--model-repository: found none, expected the folder of models"),
        ("--model-repository=a --model-store=b", "--model-repository: found 2 folders, expected one"),
        ("--model-repository=s3://a/b", "--model-repository: found s3://a/b, expected a folder of this host"),
        ("--model-repository=m --http-address=a.invalid", "--http-address: "),
        ("--model-repository=m --metrics-config=a=b", "--metrics-config: found a=b, expected histogram_latencies=.."),
        ("--model-repository=m --load-model=a", "--load-model: expected --model-control-mode explicit, found None"),
    ] {
        let error = parse(words).unwrap_err();
        assert!(error.contains(expected), "{words}: {error}");
    }
}

#[test]
fn a_program_of_that_name_is_the_subcommand() {
    let called = |line: &str| -> Vec<String> {
        let line = words(line.split(' ').map(OsString::from).collect());
        line.into_iter().map(|word| word.into_string().unwrap()).collect()
    };
    let expected = ["/opt/tritonserver/bin/tritonserver", NAME, "--model-store=m"];
    assert_eq!(called("/opt/tritonserver/bin/tritonserver --model-store=m"), expected);
    assert_eq!(called("tritonserver"), [NAME, NAME]);
    assert_eq!(called("/tritonserver/downbeat up"), ["/tritonserver/downbeat", "up"]);
    assert!(words(Vec::new()).is_empty());
}

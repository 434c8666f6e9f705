//! Metrics that programs have of their own: what they may not do, what outlives them, and where a scraper finds them.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
};

use backend::executor::Metrics;
use serde_json::json;
use testing::Port;

use super::{
    python::{Up, python, write_model},
    *,
};

/// What a program does that counts: `ask(changes)` is told what became of them.
const COUNTS: &str = r#"
def count(*changes): say({"metrics": {"changes": changes}})
def ask(*changes):
    say({"metrics": {"id": 5, "changes": changes}})
    told = json.loads(lines.readline())["metrics"]
    assert told.pop("id") == 5
    return told
def rows(how, **more): return {how: dict({"family": "rows_total", "labels": {"model": "odd"}}, **more)}
def declared(kind="counter"): return {"family": {"name": "rows_total", "description": "Rows", "kind": kind}}
"#;

fn odd(before: &str, in_batch: &str, lines_max: usize) -> (Odd, Metrics) {
    let text = format!("{COUNTS}{before}\ndef misbehave(batch, number):\n    {in_batch}\n{LOOP}");
    let (odd, metrics) = (Odd::with(&text, ""), Metrics::new(lines_max));
    let programs = odd.programs.clone().counting(metrics.clone());
    (Odd { programs, ..odd }, metrics)
}

/// What programs have counted.
fn page(metrics: &Metrics) -> String {
    let text = metrics.text();
    text.split_once("# HELP downbeat_program_metrics_refused_total").unwrap().0.to_owned()
}

/// What is at a path.
fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\n\r\n").unwrap();
    let mut heard = String::new();
    stream.read_to_string(&mut heard).unwrap();
    heard.split_once("\r\n\r\n").unwrap().1.to_owned()
}

const PAGE: &str = "# HELP rows_total Rows\n# TYPE rows_total counter\n";

#[test]
fn what_a_program_has_counted_outlives_it_and_goes_with_its_model() {
    let before = "assert ask(declared(), rows('metric')) == {'value': 0.0 if life == 1 else 3.0}";
    let in_batch = "if number == 1 and life == 1: os._exit(3)\n    count(rows('increment', value=3))";
    let (odd, metrics) = odd(before, in_batch, 10);
    let executor = odd.load().unwrap();
    assert_eq!(run(&*executor, &[1]).unwrap(), [2]);
    assert_eq!(page(&metrics), format!("{PAGE}rows_total{{model=\"odd\"}} 3\n"));
    run(&*executor, &[7]).unwrap_err();
    eventually("another life", || executor.is_up());
    assert_eq!(run(&*executor, &[9]).unwrap(), [10]);
    assert_eq!(page(&metrics), format!("{PAGE}rows_total{{model=\"odd\"}} 6\n"));
    drop(executor);
    eventually("the end of what it counted", || page(&metrics).is_empty());
}

#[test]
fn what_may_not_be_is_answered_by_name_and_counted_and_batches_go_on() {
    let before = "
assert ask(declared(), rows('metric')) == {'value': 0.0}
told = ask(declared('gauge'), rows('set', value=1))['failed']
assert told == 'metric family rows_total: found kind gauge, expected counter, which it has been declared with', told
told = ask({'metric': {'family': 'rows_total', 'labels': {'number': '1'}}})['failed']
assert told.endswith('found 3 lines of programs\\' metrics with it, expected at most 2 (program_metrics)'), told
assert 'expected letters' in ask({'family': {'name': 'a\\nb 1', 'kind': 'gauge'}})['failed']
told = ask(rows('set', value=4))['failed']
assert told == 'metric family rows_total: found a set of a counter, expected it of a gauge', told";
    let (odd, metrics) = odd(before, "count(rows('observe', value=1))", 2);
    let executor = odd.load().unwrap();
    assert_eq!(run(&*executor, &[1]).unwrap(), [2]);
    assert_eq!(page(&metrics), format!("{PAGE}rows_total{{model=\"odd\"}} 0\n"));
    assert!(metrics.text().ends_with("\ndownbeat_program_metrics_refused_total 5\n"));
    assert_eq!(odd.lives(), 1);
}

/// What is said before an answer comes is answered; what is said behind it ends the program.
#[test]
fn one_that_counts_after_its_answer() {
    let (odd, metrics) =
        odd("count(declared(), rows('metric'))", "answer(batch); count(rows('increment', value=1)); return 1", 9);
    let executor = odd.load().unwrap();
    // The line may come with the answer, or later.
    let _ = run(&*executor, &[1]);
    eventually("a batch that is served", || run(&*executor, &[1]).is_ok());
    assert!(page(&metrics).starts_with(PAGE));
}

#[test]
fn one_that_asks_and_never_reads() {
    let before = "
import threading
control.setblocking(False)
line = json.dumps({'metrics': {'id': 1, 'changes': [declared()]}}).encode() + b'\\n'
left = b''
while True:
    left = left or line * 100
    try: left = left[control.send(left):]
    except BlockingIOError: pass";
    let (odd, _) = odd(before, "pass", 9);
    let reason = odd.load().err().unwrap().0;
    assert!(reason.contains("it asks and does not read what it is answered"), "{reason}");
}

/// Counts as Triton's example does, in as many processes as its configuration says.
const CUSTOM_METRICS: &str = r#"
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            name="requests_process_latency_ns",
            description="Cumulative time spent processing requests",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self.metric = self.family.Metric(labels={"model": "custom_metrics", "version": "1"})
        kind = pb_utils.MetricFamily.HISTOGRAM
        self.sizes = pb_utils.MetricFamily(name="sizes", description="Sums", kind=kind).Metric(buckets=[1, 100])

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            self.metric.increment(int(x.sum()))
            self.sizes.observe(x.sum())
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x)]))
        assert self.metric.value() >= 0
        return answers
"#;
const CONFIG: &str = r#"
    backend: "python" instance_group [ { count: 3 kind: KIND_CPU } ]
    input { name: "INPUT0" data_type: TYPE_FP32 dims: 4 } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 4 }
"#;

#[test]
fn a_scraper_of_the_first_frontend_finds_what_all_processes_have_counted() {
    let Some(python) = python() else { return };
    let repository = tempfile::tempdir().unwrap();
    write_model(repository.path(), "custom_metrics", CONFIG, CUSTOM_METRICS);
    let admin = Port::hold();
    let up = Up::start_with(repository.path(), python, Some(admin.address()));
    let scrape = || get(admin.address(), "/metrics");
    let number = |text: &str, series: &str| -> f64 {
        text.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok()).unwrap_or_else(|| panic!("{text}"))
    };
    const SERIES: &str = "requests_process_latency_ns{model=\"custom_metrics\",version=\"1\"}";
    // Measuring has asked it, too.
    let before = scrape();
    let counted = [SERIES, "sizes_count"].map(|series| number(&before, series));
    for line in [
        "# HELP requests_process_latency_ns Cumulative time spent processing requests",
        "# TYPE requests_process_latency_ns counter",
        "# TYPE sizes histogram",
        "# TYPE nv_inference_request_success counter",
    ] {
        assert!(before.lines().any(|found| found == line), "{line}: {before}");
    }
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                let inputs = json!([{ "name": "INPUT0", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4] }]);
                (0..5).for_each(|_| assert_eq!(up.ask("custom_metrics", &inputs).0, 200));
            });
        }
    });
    let after = scrape();
    assert_eq!(number(&after, SERIES) - counted[0], 300.0);
    assert_eq!(number(&after, "sizes_count") - counted[1], 30.0);
    assert!(after.contains("downbeat_also_up{address=\"127."), "{after}");
    let own = get(admin.address(), "/metrics?own");
    assert!(!own.contains("requests_process_latency_ns") && own.contains("nv_inference_request_success"), "{own}");
}

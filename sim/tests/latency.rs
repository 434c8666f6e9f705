//! What the price of GPU time is to bring: the latency of `eager` where GPUs are plenty, goodput beyond `symphony`'s
//! where they are scarce, and few GPUs where somebody pays for that. The loads are parts of 5,500 requests a second,
//! what `downbeat` serves of ResNet50 on eight GPUs. docs/policy.md has the whole table.

use std::path::Path;

use scheduler::Policy;
use sim::{Options, Report, Workload, cluster};

const SEED: u64 = 5;
const PEAK_RPS: f64 = 5500.0;

fn workload(text: &str) -> Workload {
    Workload::parse(text, "test", "test", Path::new(".")).unwrap()
}

fn resnet50(gpus: u32, more: &str) -> Workload {
    workload(&format!(
        "gpus = {gpus}\nseconds = 10\n{more}\n[[model]]\nname = \"ResNet50\"\nalpha_ms = 1.053\nbeta_ms = 5.072\n\
         slo_ms = 25\n"
    ))
}

fn run(workload: &Workload, policy: &str, rate_rps: f64, seconds: f64) -> Report {
    let policy: Policy = policy.parse().unwrap();
    let options = Options { policy, rate_rps, seconds, seed: SEED };
    cluster::run(workload, &options, &mut |_| (), &mut |_| ()).unwrap()
}

fn p50(report: &Report) -> f64 {
    report.totals.p50_ms.unwrap()
}

#[test]
fn where_gpus_are_plenty_latency_is_that_of_eager() {
    let bert = "gpus = 8\nseconds = 10\n[[model]]\nname = \"BERT\"\nalpha_ms = 7.008\nbeta_ms = 0.159\nslo_ms = 30\n";
    let bursty = resnet50(8, "arrivals = { process = \"gamma\", shape = 0.3 }");
    for (name, workload, peak_rps) in [
        ("8 GPUs", resnet50(8, ""), PEAK_RPS),
        ("64 GPUs", resnet50(64, ""), 47_000.0),
        ("bursty", bursty, 4_800.0),
        ("BERT", workload(bert), 1_085.0),
    ] {
        for (part, at_most) in [(0.1, 1.05), (0.25, 1.2), (0.5, 1.05)] {
            let of = |policy| run(&workload, policy, part * peak_rps, 5.0);
            let (ours, eager) = (of("downbeat"), of("eager"));
            assert!(p50(&ours) <= at_most * p50(&eager), "{name} at {part}: {} and {}", p50(&ours), p50(&eager));
            let p99 = |report: &Report| report.totals.p99_ms.unwrap();
            assert!(p99(&ours) <= 1.01 * p99(&eager), "{name} at {part}: p99 {} and {}", p99(&ours), p99(&eager));
        }
    }
}

/// What runs for less than plans and answers are under way is what most models are on a fast GPU.
#[test]
fn a_long_way_to_the_gpus_is_no_reason_to_wait_while_they_are_plenty() {
    for slo_ms in [50, 1_000] {
        let workload = workload(&format!(
            "gpus = 4\nseconds = 10\nnetwork = {{ ctrl_us = 1000, data_us_per_request = 5, resp_us = 500 }}\n\
             [[model]]\nname = \"digits\"\nalpha_ms = 0.004\nbeta_ms = 0.08\nmax_batch = 64\nslo_ms = {slo_ms}\n"
        ));
        for rate_rps in [100.0, 1_000.0] {
            let of = |policy| p50(&run(&workload, policy, rate_rps, 5.0));
            let (ours, eager) = (of("downbeat"), of("eager"));
            assert!(ours <= 1.05 * eager, "{rate_rps} of {slo_ms} ms: {ours} and {eager}");
        }
        // Where they are scarce batches are as large as they can be.
        let in_time = |policy| run(&workload, policy, 500_000.0, 0.5).totals.on_time_fraction;
        let (ours, symphony) = (in_time("downbeat"), in_time("symphony"));
        assert!(ours >= 0.9 * symphony, "{slo_ms} ms: {ours} and {symphony}");
    }
}

#[test]
fn where_gpus_are_scarce_goodput_is_beyond_that_of_symphony() {
    let workload = resnet50(8, "");
    for price in ["downbeat", "downbeat:gpu_price=4", "downbeat:gpu_price=inf"] {
        let report = run(&workload, price, 5_430.0, 20.0);
        assert!(report.totals.bad_rate() < 0.01, "{price} loses {}", report.totals.bad_rate());
        let in_time = |policy| run(&workload, policy, 2.0 * PEAK_RPS, 10.0).totals.on_time_fraction;
        let (ours, symphony) = (in_time(price), in_time("symphony"));
        assert!(ours >= 0.99 * symphony, "{price}: {ours} and {symphony}");
    }
    // What batches take is known to one in a hundred.
    let noisy = resnet50(8, "faults = { execution_jitter = 0.01 }\nreestimate = true");
    let bad = |policy| run(&noisy, policy, 0.95 * PEAK_RPS, 20.0).totals.bad_rate();
    assert!(bad("downbeat") < 0.6 * bad("symphony"), "{} and {}", bad("downbeat"), bad("symphony"));
}

#[test]
fn the_dearer_gpu_time_is_the_fewer_gpus_are_used_and_the_longer_requests_wait() {
    let workload = resnet50(8, "");
    for part in [0.1, 0.25, 0.5, 0.75] {
        let runs = ["0", "1", "2", "4", "12", "50", "inf"]
            .map(|price| run(&workload, &format!("downbeat:gpu_price={price}"), part * PEAK_RPS, 10.0));
        for pair in runs.windows(2) {
            let (cheap, dear) = (&pair[0], &pair[1]);
            assert!(p50(dear) >= 0.97 * p50(cheap), "{} {}: {} {}", part, dear.policy, p50(cheap), p50(dear));
            let (few, many) = (dear.gpus_used_mean, cheap.gpus_used_mean);
            // A GPU that runs one batch in a second counts as used.
            assert!(few <= 1.03 * many + 0.15, "{part} {}: {many} {few}", dear.policy);
            assert!(dear.gpu_busy_fraction <= 1.03 * cheap.gpu_busy_fraction, "{part} {}", dear.policy);
        }
        let deferred = run(&workload, "symphony", part * PEAK_RPS, 10.0).gpus_used_mean;
        assert!(runs[6].gpus_used_mean <= 1.1 * deferred, "{part}: {} and {deferred}", runs[6].gpus_used_mean);
    }
    // GPUs used, and p50 as a multiple of eager's.
    for (part, price, used, times) in
        [(0.1, 1, 4.0, 1.25), (0.1, 4, 2.1, 2.0), (0.25, 2, 6.1, 1.45), (0.25, 4, 5.0, 1.75), (0.5, 12, 7.0, 1.25)]
    {
        let eager = run(&workload, "eager", part * PEAK_RPS, 20.0);
        let report = run(&workload, &format!("downbeat:gpu_price={price}"), part * PEAK_RPS, 20.0);
        let (found, p50_ms) = (report.gpus_used_mean, p50(&report));
        assert!(found < used + 0.05 && p50_ms <= times * p50(&eager), "{part} {price}: {found} {p50_ms}");
    }
}

#[test]
fn a_lone_request_does_not_wait() {
    for slo_ms in [25, 1_000, 20_000] {
        let workload = workload(&format!(
            "gpus = 8\nseconds = 1000\narrivals = {{ process = \"uniform\" }}\n[[model]]\nname = \"ResNet50\"\n\
             alpha_ms = 1.053\nbeta_ms = 5.072\nmax_batch = 64\nslo_ms = {slo_ms}\n"
        ));
        for price in ["0", "4", "inf"] {
            let report = run(&workload, &format!("downbeat:gpu_price={price}"), 0.01, 1_000.0);
            let worst_ms = report.totals.p9999_ms.unwrap();
            assert!(worst_ms < 6.125 + 1.0, "{slo_ms} ms at a price of {price}: {worst_ms} ms");
        }
    }
}

/// Beside a model whose owner pays anything for GPUs the other one is served as if all were cheap.
#[test]
fn a_model_may_have_a_price_of_its_own() {
    let model = |name: &str, more: &str| {
        format!("[[model]]\nname = \"{name}\"\nalpha_ms = 1.053\nbeta_ms = 5.072\nslo_ms = 25\n{more}")
    };
    let of = |prices: [&str; 2], policy| {
        let [cheap, dear] = [model("cheap", prices[0]), model("dear", prices[1])];
        let report = run(&workload(&format!("gpus = 8\nseconds = 10\n{cheap}{dear}")), policy, 0.2 * PEAK_RPS, 10.0);
        [&report.models[0], &report.models[1]].map(|model| model.figures.p50_ms.unwrap())
    };
    let eager = of(["", ""], "eager")[0];
    let [cheap, dear] = of(["", "gpu_price = inf\n"], "downbeat");
    assert!(cheap <= 1.1 * eager && dear >= 2.5 * eager, "{cheap} and {dear}, eager {eager}");
    let [other, dearer] = of(["gpu_price = 0\n", ""], "downbeat:gpu_price=inf");
    assert!(other <= 1.1 * eager && (dearer / dear - 1.0).abs() < 0.05, "{other} and {dearer}");
    assert_eq!(of(["gpu_price = 9\n", ""], "eager")[0], eager, "policies without a price know none");
}

use proto::ModelId;

use super::*;

const CLASSES: &str = "classes = [{ slo_ms = 50, share = 1 }, { slo_ms = 25, share = 3 }]";
const MODEL: &str = "[[model]]\nname = \"m\"\nalpha_ms = 1.053\nbeta_ms = 5.072\nslo_ms = 25\n";

fn parse(text: &str) -> Result<Workload, String> {
    Workload::parse(text, "w", "w.toml", Path::new("/nonexistent")).map_err(|error| error.to_string())
}

fn error(text: &str) -> String {
    let error = parse(text).unwrap_err();
    assert!(!error.contains('\n'), "more than one line: {error}");
    error
}

#[test]
fn classes_are_in_the_order_of_their_slos_and_the_longest_bounds_batches() {
    let text = format!("gpus = 1\n{}", MODEL.replace("slo_ms = 25", CLASSES));
    let workload = parse(&text).unwrap();
    let model = &workload.models[0];
    let class = |slo_ms, share| Class { slo: Span::from_millis(slo_ms), share };
    assert_eq!(model.classes, [class(25, 0.75), class(50, 0.25)]);
    assert_eq!(model.profile.max_batch(), 42);
    let request = Request::new(Timestamp(7), ModelId(0), 1);
    assert_eq!(workload.deadline(request), Timestamp(50_000_007) - workload.response);
}

#[test]
fn the_documented_example() {
    let text = "gpus = 8\nseconds = 60\narrivals = { process = \"poisson\" }\npopularity = \"equal\"\nnetwork = { \
                ctrl_us = 10, data_us_per_request = 2, resp_us = 30 }\n";
    let workload = parse(&format!("{text}{MODEL}count = 20\n")).unwrap();
    assert_eq!((workload.gpus, workload.models.len(), workload.arrivals), (8, 20, ArrivalProcess::Poisson));
    assert_eq!(workload.network.delay(3), Span::from_micros(16));
    assert_eq!(workload.response, Span::from_micros(30));
    let last = &workload.models[19];
    assert_eq!(
        (last.name.as_str(), last.classes[0].slo, last.profile.max_batch()),
        ("m-20", Span::from_millis(25), 18)
    );
    assert!((last.share - 0.05).abs() < 1e-12);
}

#[test]
fn what_a_workload_may_leave_out() {
    let workload = parse(&format!("gpus = 1\n{MODEL}")).unwrap();
    assert_eq!((workload.seconds, workload.arrivals), (60.0, ArrivalProcess::Poisson));
    assert_eq!(workload.models[0].name, "m");
    assert!((workload.capacity_rps() - 18.0 / (18.0 * 1.053e-3 + 5.072e-3)).abs() < 1e-6);
}

#[test]
fn built_in_zoos_are_whole() {
    for (zoo, count, first) in
        [("symphony-zoo-1080ti.csv", 35, "NASNetMobile"), ("symphony-zoo-a100.csv", 37, "DenseNet121")]
    {
        let workload = parse(&format!("gpus = 64\n[[model]]\nzoo = \"{zoo}\"\n")).unwrap();
        assert_eq!((workload.models.len(), workload.models[0].name.as_str()), (count, first));
    }
}

#[test]
fn what_models_take_of_memory_is_known_where_all_fit_too() {
    let text =
        format!("gpus = 1\nmemory = {{ gpu_mb = 200, pcie_gbps = 8 }}\n{MODEL}weights_mb = 10.5\ndynamic_mb = 0.5\n");
    let workload = parse(&text).unwrap();
    assert_eq!((workload.memory, workload.gpu_bytes), (None, Some(200_000_000)));
    let footprint = Footprint { static_bytes: 10_500_000, dynamic_bytes: 500_000 };
    assert_eq!((workload.models[0].footprint, workload.models[0].weights), (footprint, Weights::default()));
    let zoo = |beside: &str| {
        let workload = parse(&format!("gpus = 1\n[[model]]\nzoo = \"clockwork-zoo-v100.csv\"\nslo_ms = 100\n{beside}"));
        workload.map(|workload| workload.models[0].footprint)
    };
    let tensors = Footprint { static_bytes: 31_800_000, dynamic_bytes: 16 * (602 + 4) * 1_000 };
    assert_eq!(zoo(""), Ok(tensors));
    assert_eq!(zoo("dynamic_mb = 7"), Ok(Footprint { dynamic_bytes: 7_000_000, ..tensors }));
    let refused = "w.toml: model \"densenet121\": dynamic_mb: expected a number from 0 to 1000000000, found -1";
    assert_eq!(zoo("dynamic_mb = -1"), Err(refused.to_owned()));
}

#[test]
fn popularity_is_equal_zipf_or_by_share() {
    let shares = |text: &str| parse(text).unwrap().models.iter().map(|model| model.share).collect::<Vec<_>>();
    let zipf = shares(&format!("gpus = 1\npopularity = {{ zipf = 1.0 }}\n{MODEL}count = 2\n"));
    assert!((zipf[0] - 2.0 / 3.0).abs() < 1e-12);
    let other = MODEL.replace("\"m\"", "\"n\"");
    assert_eq!(shares(&format!("gpus = 1\n{MODEL}share = 3\n{other}share = 1\n")), [0.75, 0.25]);
    assert_eq!(
        error(&format!("gpus = 1\n{MODEL}share = 3\n{other}")),
        "w.toml: share: expected for every model or for none, found for 1 of 2"
    );
    assert_eq!(
        error(&format!("gpus = 1\npopularity = {{ zipf = 1.0 }}\n{MODEL}share = 3\n")),
        "w.toml: popularity: expected no zipf when models have a share"
    );
}

#[test]
fn every_error_names_the_key_what_was_found_and_what_was_expected() {
    let with = |line: &str| format!("gpus = 1\n{line}\n{MODEL}");
    let changed = |from: &str, to: &str| format!("gpus = 1\n{}", MODEL.replace(from, to));
    for (text, expected) in [
        (
            with("gpu = 2"),
            "w.toml, line 2: unknown field `gpu`, expected one of `gpus`, `gpu_kinds`, `seconds`, `arrivals`, \
             `popularity`, `memory`, `functions`, `network`, `faults`, `reestimate`, `model`, `graph`",
        ),
        (
            changed("slo_ms", "slo"),
            "w.toml, line 6: unknown field `slo`, expected one of `name`, `alpha_ms`, `beta_ms`, `latency_ms`, \
             `slo_ms`, `background`, `classes`, `max_batch`, `count`, `share`, `zoo`, `gpu_price`, `weights_mb`, \
             `load_ms`, `dynamic_mb`, `clients`, `cost`, `applications`, `slo_x_p99`",
        ),
        (MODEL.to_owned(), "w.toml, line 1: missing field `gpus`"),
        (with("seconds = \"x\""), "w.toml, line 2: invalid type: string \"x\", expected f64"),
        (with("seconds = -1"), "w.toml: seconds: expected a number above 0 and at most 86400, found -1"),
        (
            with("arrivals = { process = \"gama\" }"),
            "w.toml, line 2: unknown variant `gama`, expected one of `poisson`, `gamma`, `uniform`",
        ),
        (
            with("arrivals = { process = \"gamma\", shape = 0 }"),
            "w.toml: arrivals.shape: expected a number from 0.001 to 1000, found 0",
        ),
        (
            with("network = { ctrl_us = -3 }"),
            "w.toml: network.ctrl_us: expected a number from 0 to 3600000000, found -3",
        ),
        (
            with("faults = { execution_jitter = 0.4 }"),
            "w.toml: faults.execution_jitter: expected a number from 0 to 0.3, found 0.4",
        ),
        (
            with("faults = { gpu_up_s = 0, gpu_down_s = 1 }"),
            "w.toml: faults.gpu_up_s: expected a number from 0.001 to 86400, found 0",
        ),
        (
            with("faults = { gpu_slowdown = 0.9 }"),
            "w.toml: faults.gpu_slowdown: expected a number from 1 to 100, found 0.9",
        ),
        (
            with("faults = { gpu_slowdown = 2, slow_from_s = -1 }"),
            "w.toml: faults.slow_from_s: expected a number from 0 to 86400, found -1",
        ),
        (with("faults = { gpu_slowdown = 2, slow_gpus = 2 }"), "w.toml: faults.slow_gpus: expected 1 to 1, found 2"),
        (
            with("faults = { slow_from_s = 2 }"),
            "w.toml: faults: expected gpu_slowdown beside slow_from_s and slow_gpus",
        ),
        (with("faults = { gpu_up_s = 9 }"), "w.toml: faults: expected both gpu_up_s and gpu_down_s, or neither"),
        (
            with("faults = { jitter = 1 }"),
            "w.toml, line 2: unknown field `jitter`, expected one of `execution_jitter`, `load_jitter`, `gpu_up_s`, \
             `gpu_down_s`, `gpu_slowdown`, `slow_from_s`, `slow_gpus`",
        ),
        (format!("gpus = 0\n{MODEL}"), "w.toml: gpus: expected 1 to 1000000, found 0"),
        (
            with("gpu_kinds = [{ count = 1, factor = 0 }]"),
            "w.toml: gpu_kinds.factor: expected a number from 0.01 to 100, found 0",
        ),
        (
            with("gpu_kinds = [{ count = 1, factor = 2 }, { count = 1, factor = 3 }]"),
            "w.toml: gpu_kinds.count: expected at least 1 each and at most 1 in all, found 1 where 0 are left",
        ),
        (
            with("gpu_kinds = [{ count = 0, factor = 2 }]"),
            "w.toml: gpu_kinds.count: expected at least 1 each and at most 1 in all, found 0 where 1 are left",
        ),
        (with("gpu_kinds = [{ count = 1 }]"), "w.toml, line 2: missing field `factor`"),
        (
            with("gpu_kinds = [{ count = 1, factor = 2, name = \"slow\" }]"),
            "w.toml, line 2: unknown field `name`, expected `count` or `factor`",
        ),
        (
            with(&format!("gpu_kinds = [{}]", "{ count = 1, factor = 2 },".repeat(16))),
            "w.toml: gpu_kinds: expected at most 15, found 16",
        ),
        (
            with("gpu_kinds = [{ count = 1, factor = 5 }]"),
            "w.toml: model \"m\": slo_ms: expected at least l(1) = 30.625 ms and the network budget of 0 ns, found \
             25.000 ms: no request could be on time",
        ),
        ("gpus = 1".to_owned(), "w.toml: [[model]]: expected at least one, found none"),
        (format!("gpus = 1\n{MODEL}{MODEL}"), "w.toml: name: expected unique names, found \"m\" twice"),
        (changed("name = \"m\"\n", ""), "w.toml: [[model]] number 1: expected `name` or `zoo`, found neither"),
        (changed("5.072", "-5.072"), "w.toml: model \"m\": beta_ms: expected a number from 0 to 3600000, found -5.072"),
        (changed("1.053", "nan"), "w.toml: model \"m\": alpha_ms: expected a number from 0 to 3600000, found NaN"),
        (
            changed("5.072", "5.072\ngpu_price = -1"),
            "w.toml: model \"m\": gpu_price: expected a number from 0 to inf, found -1",
        ),
        (
            changed("5.072", "5.072\ngpu_price = nan"),
            "w.toml: model \"m\": gpu_price: expected a number from 0 to inf, found NaN",
        ),
        (
            changed("= 25", "= 6"),
            "w.toml: model \"m\": slo_ms: expected at least l(1) = 6.125 ms and the network budget of 0 ns, found \
             6.000 ms: no request could be on time",
        ),
        (
            changed("slo_ms = 25\n", ""),
            "w.toml: model \"m\": slo_ms: expected a number of milliseconds, or background = true, found neither",
        ),
        (
            changed("slo_ms = 25", "slo_ms = 25\nbackground = true"),
            "w.toml: model \"m\": background: expected no slo_ms beside it",
        ),
        (
            changed("slo_ms = 25", "classes = [{ slo_ms = 25 }, {}]"),
            "w.toml: model \"m\": classes.slo_ms: expected a number of milliseconds, or background = true, found \
             neither",
        ),
        (changed("slo_ms = 25", "classes = []"), "w.toml: model \"m\": classes: expected 1 to 100, found 0"),
        (
            changed("slo_ms = 25", "classes = [{ slo_ms = 25 }, { slo_ms = 50, share = 2 }]"),
            "w.toml: model \"m\": classes.share: expected for every class or for none, found for 1 of 2",
        ),
        (
            changed("slo_ms = 25", "classes = [{ slo_ms = 50 }, { slo_ms = 25 }, { slo_ms = 50 }]"),
            "w.toml: model \"m\": classes.slo_ms: expected different ones, found 50.000 ms twice",
        ),
        (
            changed("slo_ms = 25", "classes = [{ slo_ms = 50 }, { slo_ms = 6 }]"),
            "w.toml: model \"m\": slo_ms: expected at least l(1) = 6.125 ms and the network budget of 0 ns, found \
             6.000 ms: no request could be on time",
        ),
        (
            format!("gpus = 1\n{MODEL}classes = [{{ slo_ms = 50 }}]\n"),
            "w.toml: model \"m\": classes: expected no slo_ms or background beside them",
        ),
        (
            changed("beta_ms = 5.072\n", ""),
            "w.toml: model \"m\": expected both alpha_ms and beta_ms, or latency_ms alone, or both cost and \
             applications",
        ),
        (
            format!("gpus = 1\n{MODEL}count = 0\n"),
            "w.toml: model \"m\": count: expected 1 to 100000 models in all, found 0 here",
        ),
        (format!("gpus = 1\n{MODEL}max_batch = 0\n"), "w.toml: model \"m\": max_batch: expected 1 to 256, found 0"),
        (
            "gpus = 1\n[[model]]\nname = \"t\"\nlatency_ms = [3, 2]\nslo_ms = 9\n".to_owned(),
            "w.toml: model \"t\": l(b): l(b) must not decrease: l(2) is 2.000 ms, below l(1) = 3.000 ms",
        ),
        (
            "gpus = 1\n[[model]]\nzoo = \"symphony-zoo-a100.csv\"\nslo_ms = 9\n".to_owned(),
            "w.toml: zoo \"symphony-zoo-a100.csv\": brings SLOs, too; expected no slo_ms, background or count beside \
             it",
        ),
        (
            "gpus = 1\n[[model]]\nzoo = \"clockwork-zoo-v100.csv\"\nweights_mb = 9\n".to_owned(),
            "w.toml: zoo: brings name and latency of its models; expected no name, alpha_ms, beta_ms, latency_ms, \
             classes, weights_mb or load_ms beside it",
        ),
        (
            "gpus = 1\n[[model]]\nzoo = \"clockwork-zoo-v100.csv\"\n".to_owned(),
            "w.toml: zoo \"clockwork-zoo-v100.csv\": brings no SLOs; expected slo_ms beside it",
        ),
        (
            format!("gpus = 1\nmemory = {{ gpu_mb = 0 }}\n{MODEL}"),
            "w.toml: memory.gpu_mb: expected a number above 0 and at most 1000000000, found 0",
        ),
        (
            format!("gpus = 1\nmemory = {{ gpu_mb = 100 }}\n{MODEL}"),
            "w.toml: model \"m\": weights_mb: expected one beside [memory], found none",
        ),
        (
            format!("gpus = 1\nmemory = {{ gpu_mb = 100 }}\n{MODEL}weights_mb = 10\n"),
            "w.toml: model \"m\": load_ms: expected it, or memory.pcie_gbps, found neither",
        ),
        (
            format!("gpus = 1\nmemory = {{ gpu_mb = 100, pcie_gbps = 8 }}\n{MODEL}weights_mb = 101\n"),
            "w.toml: model \"m\": weights_mb: expected at most the 5 pages of a GPU, found 7",
        ),
        (
            format!("gpus = 1\nmemory = {{ gpu_mb = 200, pcie_gbps = 8, host_mb = 100 }}\n{MODEL}weights_mb = 101\n"),
            "w.toml: memory: expected both host_mb and disk_gbps, or neither",
        ),
        (
            format!(
                "gpus = 1\nmemory = {{ gpu_mb = 200, pcie_gbps = 8, host_mb = 100, disk_gbps = 4 }}\n{MODEL}weights_mb \
                 = 101\n"
            ),
            "w.toml: model \"m\": weights_mb: expected at most the 5 pages of memory.host_mb, found 7",
        ),
        (
            format!("gpus = 1\nmemory = {{ gpu_mb = 200, host_mb = 100, disk_gbps = -1 }}\n{MODEL}"),
            "w.toml: memory.disk_gbps: expected a number above 0 and at most 1000000, found -1",
        ),
        (format!("gpus = 1\nfunctions = {{ seed = 1 }}\n{MODEL}"), "w.toml: functions: expected either count or rates"),
        (
            format!("gpus = 1\nfunctions = {{ count = 0 }}\n{MODEL}"),
            "w.toml: functions.count: expected 1 to 1000000, found 0",
        ),
        (
            "gpus = 1\n[[model]]\nzoo = \"none.csv\"\n".to_owned(),
            "cannot read /nonexistent/none.csv: No such file or directory (os error 2)",
        ),
    ] {
        assert_eq!(error(&text), expected);
    }
    assert!(error("gpus = ").starts_with("w.toml, line 1: "));
}

#[test]
fn graphs_ask_models_that_are_there_after_each_other() {
    let models = "gpus = 1\n[[model]]\nname = \"a\"\nlatency_ms = [1]\n[[model]]\nname = \"b\"\nlatency_ms = [2]\n";
    let graph = |keys: &str| format!("{models}[[graph]]\nname = \"g\"\n{keys}\n");
    let two = "slo_ms = 9\nsteps = [{ model = \"a\" }, { model = \"b\", after = [\"a\"], chance = 0.25 }]";
    let workload = parse(&graph(two)).unwrap();
    assert_eq!(workload.asked().map(|(name, _)| name).collect::<Vec<_>>(), ["g"]);
    assert_eq!(workload.models.iter().map(|model| model.share).collect::<Vec<_>>(), [1.0, 0.25]);
    // One for each request, and two for every fourth.
    assert!((workload.capacity_rps() - 1e3 / 1.5).abs() < 1e-6);
    assert_eq!(workload.graphs[0].ensemble.outputs, [2]);
    let one = |step: &str| format!("slo_ms = 9\nsteps = [{{ model = \"a\" }}, {{ model = \"b\", {step} }}]");
    let variants = "slo_ms = 9\nselection = \"fallback\"\nsteps = [{ model = \"b\" }, { model = \"a\" }]";
    let workload = parse(&graph(variants)).unwrap();
    assert_eq!((&workload.graphs[0].ensemble.outputs[..], workload.capacity_rps().round()), (&[1][..], 1e3));
    for (text, expected) in [
        (
            graph(&variants.replace("fallback", "static")),
            "graph \"g\": selection: expected \"fallback\", found \"static\"",
        ),
        (
            graph(&two.replace("slo_ms = 9", "slo_ms = 9\nselection = \"fallback\"")),
            "graph \"g\": steps: expected no after, chance or by beside selection",
        ),
        (graph(&two.replace("9", "0")), "graph \"g\": slo_ms: expected a number above 0 and at most 3600000, found 0"),
        (graph("slo_ms = 9\nsteps = []"), "model \"a\": expected one that a graph asks"),
        (graph(&one("after = [\"c\"]")), "graph \"g\": steps.after: expected models of earlier steps, found \"c\""),
        (graph(&one("after = [\"b\"]")), "graph \"g\": steps.after: expected models of earlier steps, found \"b\""),
        (graph(&one("chance = 2")), "graph \"g\": steps.chance: expected a number from 0 to 1, found 2"),
        (graph(&one("by = 2")), "graph \"g\": steps.by: expected a number from 0.001 to 1, found 2"),
        (
            graph("slo_ms = 9\nsteps = [{ model = \"a\" }, { model = \"b\" }, { model = \"a\" }]"),
            "graph \"g\": steps: expected each model once, found \"a\" twice",
        ),
        (
            format!("{}{}", graph(two), graph(two).replace(models, "")),
            "graph: name: expected unique names, found \"g\" twice",
        ),
        (
            graph(two).replace("[2]", "[2]\nslo_ms = 5"),
            "model \"b\": expected no slo_ms, classes, background, share, clients or count where there are graphs",
        ),
        (
            graph(two).replace("[2]", "[2]\nzoo = \"z\"").replace("name = \"b\"", ""),
            "zoo: expected named models where there are graphs, found a zoo",
        ),
        (
            graph(&format!("{two}\nshare = 0")),
            "graph \"g\": share: expected a number above 0 and at most 1000000000, found 0",
        ),
        (
            graph(two).replace("gpus = 1", "gpus = 1\nfunctions = { count = 2 }"),
            "functions: expected none where there are graphs",
        ),
    ] {
        assert_eq!(error(&text), format!("w.toml: {expected}"));
    }
}

#[test]
fn a_zoo_beside_the_workload_is_checked_cell_by_cell() {
    let directory = tempfile::tempdir().unwrap();
    let parse_zoo = |csv: &str| {
        fs::write(directory.path().join("z.csv"), csv).unwrap();
        let text = "gpus = 1\n[[model]]\nzoo = \"z.csv\"\n";
        Workload::parse(text, "w", "w.toml", directory.path()).map_err(|error| error.to_string())
    };
    let workload = parse_zoo("slo_ms, model,alpha_ms,beta_ms,note\n25,a,1,5,x\n\n30,b,2,6,y\n").unwrap();
    assert_eq!(workload.models[1].profile.latency(2), Span::from_millis(10));
    for (csv, expected) in [
        (
            "model,alpha_ms,slo_ms\na,1,25\n",
            "w.toml: zoo \"z.csv\": expected a column `beta_ms`, found `model,alpha_ms,slo_ms`",
        ),
        ("", "w.toml: zoo \"z.csv\": expected a column `model`, found ``"),
        ("model,alpha_ms,beta_ms,slo_ms\n", "w.toml: [[model]]: expected at least one, found none"),
        ("model,alpha_ms,beta_ms,slo_ms\na,1,5\n", "w.toml: zoo \"z.csv\", line 2: has no `slo_ms`"),
        (
            "model,alpha_ms,beta_ms,slo_ms\na,x,5,25\n",
            "w.toml: zoo \"z.csv\", line 2: alpha_ms: expected a number, found \"x\"",
        ),
    ] {
        assert_eq!(parse_zoo(csv).unwrap_err(), expected);
    }
}

#[test]
fn kinds_of_gpus_have_their_places_and_profiles() {
    let kinds = "gpus = 8\ngpu_kinds = [{ count = 2, factor = 0.5 }, { count = 3, factor = 1.5 }]\n";
    let workload = parse(&format!("{kinds}{MODEL}")).unwrap();
    let places: Vec<_> = (0..8).map(|place| workload.kind_of(place)).collect();
    assert_eq!(places, [0, 0, 1, 1, 1, 2, 2, 2]);
    let model = &workload.models[0];
    let l_of_1: Vec<_> = model.offers.iter().map(|offer| offer.latency(1)).collect();
    assert_eq!(l_of_1, [6.125 / 2.0, 6.125 * 1.5, 6.125].map(Span::from_millis_f64));
    // Each up to what meets the SLO there; all know the batches of the slowest.
    assert_eq!(model.offers.iter().map(LatencyProfile::max_batch).collect::<Vec<_>>(), [42, 11, 18]);
    assert_eq!(model.profile, model.offers[1]);
    // As many requests as the kinds serve, each with its largest batches.
    let of = |count: f64, factor: f64, batch: f64| count * batch / ((1.053 * batch + 5.072) * factor) * 1e3;
    let expected = of(2.0, 0.5, 42.0) + of(3.0, 1.5, 11.0) + of(3.0, 1.0, 18.0);
    assert!((workload.capacity_rps() / expected - 1.0).abs() < 1e-6);
    let all_of_one_kind = parse(&format!("gpus = 2\ngpu_kinds = [{{ count = 2, factor = 0.5 }}]\n{MODEL}")).unwrap();
    assert_eq!((all_of_one_kind.gpu_kinds.len(), all_of_one_kind.models[0].profile.max_batch()), (1, 42));
}

#[test]
fn a_model_or_a_class_may_have_no_objective_and_clients_have_no_rate() {
    let text = format!(
        "gpus = 1\n{MODEL}{}{}",
        MODEL.replace("\"m\"", "\"mixed\"").replace("slo_ms = 25", "classes = [{ background = true }, { slo_ms = 9 }]"),
        MODEL.replace("\"m\"", "\"batch\"").replace("slo_ms = 25", "background = true\nclients = 3")
    );
    let workload = Workload::parse(&text, "w", "w.toml", Path::new(".")).unwrap();
    let slos = |index: usize| workload.models[index].classes.iter().map(|class| class.slo).collect::<Vec<_>>();
    assert_eq!((slos(1), slos(2)), (vec![Span::from_millis(9), Span::ENDLESS], vec![Span::ENDLESS]));
    assert_eq!(workload.models.iter().map(|model| model.share).collect::<Vec<_>>(), [0.5, 0.5, 0.0]);
    let request = Request::new(Timestamp(7), ModelId(2), 0);
    assert_eq!(workload.deadline(request), Timestamp::NEVER);
    assert_eq!(workload.models[2].profile.max_batch(), LatencyProfile::MAX_BATCH);
}

const DYNAMIC: &str = "gpus = 1\n[[model]]\nname = \"m\"\ncost = { fixed_ms = 5, per_task = 0.5 }\nslo_x_p99 = \
                       3\napplications = [{ mean_ms = 20, std_ms = 1 }, { median_ms = 60, sigma = 0.1, share = 3 }]\n";

#[test]
fn applications_are_classes_and_l_of_b_is_the_mean() {
    let workload = parse(DYNAMIC).unwrap();
    let model = &workload.models[0];
    assert!(workload.is_dynamic());
    assert_eq!(model.classes.iter().map(|class| class.share).collect::<Vec<_>>(), [0.25, 0.75]);
    let mean = 0.25 * 20.0 + 0.75 * 60.0 * (0.005f64).exp();
    assert!((model.profile.latency(1).as_millis_f64() / mean - 1.0).abs() < 0.01, "{}", model.profile.latency(1));
    // The longest three quarters are log-normal, so the 99th percentile of all is their quantile 1 - 0.01 / 0.75.
    let p99 = 60.0 * (0.1 * 2.216f64).exp();
    assert!((model.classes[0].slo.as_millis_f64() / (3.0 * p99) - 1.0).abs() < 0.02, "{}", model.classes[0].slo);
    assert_eq!(model.classes[0].slo, model.classes[1].slo);
}

#[test]
fn errors_of_dynamic_models_name_their_keys() {
    for (from, to, expected) in [
        ("per_task = 0.5", "per_task = 0", "w.toml: model \"m\": cost.per_task: expected a number from"),
        ("fixed_ms = 5", "fixed_ms = -1", "w.toml: model \"m\": cost.fixed_ms: expected a number from 0 to"),
        (
            "slo_x_p99 = 3",
            "slo_x_p99 = 0",
            "w.toml: model \"m\": slo_x_p99: expected a number from 0.01 to 1000, found 0",
        ),
        ("slo_x_p99 = 3\n", "", "w.toml: model \"m\": slo_ms: expected it or slo_x_p99 beside applications"),
        (
            "sigma = 0.1",
            "sigma = -1",
            "w.toml: model \"m\": applications.sigma: expected a number from 0 to 3, found -1",
        ),
        (
            ", std_ms = 1 ",
            " ",
            "w.toml: model \"m\": applications: expected mean_ms and std_ms, median_ms and sigma, or",
        ),
        (
            "mean_ms = 20, std_ms = 1",
            "trace = \"t\"",
            "w.toml: model \"m\": applications.trace: cannot read /nonexistent/t",
        ),
        (
            "slo_x_p99 = 3",
            "slo_x_p99 = 3\nclients = 4",
            "w.toml: model \"m\": clients: expected none beside applications",
        ),
        ("slo_x_p99 = 3", "slo_x_p99 = 3\nalpha_ms = 3", "w.toml: model \"m\": expected both alpha_ms and beta_ms, or"),
    ] {
        let found = error(&DYNAMIC.replace(from, to));
        assert!(found.starts_with(expected), "{found}");
    }
}

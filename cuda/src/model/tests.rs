//! What only the fake shows. What holds of every driver is in [`crate::conformance`].

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::{
    Fake, SLOTS,
    conformance::{
        Failure,
        gpu::{Bench, samples, settings},
        samples::{Kind, Sample},
    },
    random::Random,
};

fn with_models(pages: usize, weights_pages: u32, samples: Vec<Sample>) -> (Arc<Fake>, Bench) {
    let fake = Fake::new(pages, 0);
    let driver: Arc<dyn Driver> = fake.clone();
    let bench = Bench::new(&driver, weights_pages, samples).unwrap();
    (fake, bench)
}

fn table(random: &mut Random) -> Sample {
    Sample::new(Kind::Table, 4, 1, random)
}

#[test]
fn serving_allocates_nothing_and_maps_nothing() {
    let mut random = Random(1);
    let (fake, bench) = with_models(64, 8, samples(&mut random));
    (0..4).for_each(|model| bench.models[model].1.load().unwrap());
    let before = fake.calls();
    for batch in 0..20 {
        bench.serve(Slot(batch % SLOTS), batch % 4, 1 + batch % 8, &mut random).unwrap();
    }
    let after = fake.calls();
    let made = |call: &&str| after[*call] - before.get(*call).copied().unwrap_or(0);
    let calls = after.keys().copied().filter(|call| made(call) > 0).collect::<BTreeSet<_>>();
    let allowed = ["copy_in", "record", "wait", "copy_on_device", "launch", "copy_out", "is_done", "elapsed"];
    assert_eq!(calls, allowed.into());
    assert_eq!(made(&"launch"), 20);
    // Each batch tells the host of its end by one event, and streams of its inputs and of its outputs by one each.
    assert_eq!((made(&"elapsed"), made(&"wait")), (20, 2 * 20));
}

#[test]
fn what_rdma_devices_write_is_there_before_it_is_used() {
    let mut random = Random(15);
    let (fake, bench) = with_models(64, 8, samples(&mut random));
    let (sample, hosted) = &bench.models[0];
    hosted.load().unwrap();
    let landing = bench.gpu.landing(4 * sample.input_bytes()).unwrap();
    let to = bench.gpu.pin(&crate::image(&vec![0; 4 * sample.output_bytes()]).unwrap()).unwrap();
    let output = Part { region: to.region(), offset: 0, bytes: to.region().len() };
    let mut before = fake.calls();
    for turn in 0..3 {
        let (inputs, _) = sample.inputs(4, &mut random);
        fake.write_remotely(landing.at(0, inputs.len()), inputs.clone());
        hosted.stage_landed(Slot(turn % 2), &landing, std::slice::from_ref(&(0..inputs.len()))).unwrap();
        hosted.run(Slot(turn % 2), 4, &[output]).unwrap();
        let mut outputs = vec![0; to.region().len()];
        to.region().read(0, &mut outputs);
        assert_eq!(crate::conformance::samples::floats(&outputs), sample.outputs(&inputs));
        if turn == 0 {
            before = fake.calls();
        }
    }
    let after = fake.calls();
    let made = |call: &&str| after[*call] > before.get(*call).copied().unwrap_or(0);
    let calls = after.keys().copied().filter(made).collect::<BTreeSet<_>>();
    let allowed =
        ["flush_remote_writes", "record", "wait", "copy_on_device", "launch", "copy_out", "is_done", "elapsed"];
    assert_eq!(calls, allowed.into());
}

#[test]
fn memory_for_rdma_devices_is_shared_or_not_at_all() {
    let mut random = Random(16);
    let (fake, bench) = with_models(32, 4, samples(&mut random));
    let landing = bench.gpu.landing(1).unwrap();
    assert!(landing.memory().unwrap_err().to_string().contains("this GPU is none"));
    let held = Arc::clone(&landing);
    drop(landing);
    fake.write_remotely(held.at(0, 1), vec![1]);
    let free = fake.device().unwrap().free_bytes;
    assert!(bench.gpu.landing(1 << 40).is_err());
    assert_eq!(fake.device().unwrap().free_bytes, free, "what was taken for it is given back");
}

#[test]
fn weights_that_are_there_are_not_copied_again() {
    let mut random = Random(13);
    let (fake, bench) = with_models(32, 4, samples(&mut random));
    for (_, hosted) in &bench.models[..3] {
        hosted.load().unwrap();
        let before = fake.calls();
        hosted.load().unwrap();
        assert_eq!(fake.calls(), before);
    }
}

#[test]
fn a_batch_takes_as_long_as_the_next_size_up() {
    let mut random = Random(14);
    let (_fake, bench) = with_models(32, 4, samples(&mut random));
    let (sample, hosted) = &bench.models[2];
    hosted.load().unwrap();
    let to = bench.gpu.pin(&crate::image(&vec![0; 8 * sample.output_bytes()]).unwrap()).unwrap();
    for batch in 1..=8 {
        bench.stage(Slot(0), 2, batch, &mut random).unwrap();
        let part = Part { region: to.region(), offset: 0, bytes: batch * sample.output_bytes() };
        let ran = hosted.run(Slot(0), batch, &[part]).unwrap();
        let size = hosted.measured().iter().find(|size| size.batch >= batch).unwrap();
        assert_eq!(ran.gpu_time, size.quantile(1.0), "a batch of {batch}");
    }
    assert!(hosted.measured().is_sorted_by(|one, other| one.times < other.times));
}

/// Whatever call fails, and whenever: what it was made for fails alone, and works when it is tried again. Nothing is
/// left behind.
#[test]
fn any_call_may_fail() {
    let mut failed = BTreeMap::<&str, u64>::new();
    for nth in 0.. {
        let fake = Fake::new(32, nth);
        fake.fail(nth);
        live(&mut Watched { fake: &fake, failed: &mut failed, has_failed: false });
        assert_eq!(fake.leaks(), Vec::<String>::new(), "after failure {nth}");
        if fake.will_fail() {
            break;
        }
    }
    assert_eq!(failed.keys().copied().collect::<Vec<_>>(), ["close", "load", "open", "register", "serve", "unload"]);
    assert!(failed.values().all(|&failures| failures > 1) && failed["serve"] > 50, "{failed:?}");
}

/// A GPU that fails once.
struct Watched<'a> {
    fake: &'a Arc<Fake>,
    /// How often what failed.
    failed: &'a mut BTreeMap<&'static str, u64>,
    has_failed: bool,
}

impl Watched<'_> {
    fn attempt<T>(&mut self, name: &'static str, mut operation: impl FnMut() -> Result<T, Failure>) -> T {
        let first = operation();
        if !self.has_failed && !self.fake.will_fail() {
            self.has_failed = true;
            *self.failed.entry(name).or_default() += 1;
        }
        first.or_else(|_| operation()).unwrap_or_else(|failure| panic!("{name}: {failure}"))
    }
}

/// A GPU's life.
fn live(watched: &mut Watched<'_>) {
    let driver: Arc<dyn Driver> = watched.fake.clone();
    let mut random = Random(1);
    let samples = [table(&mut random), Sample::new(Kind::Product, 5, 1, &mut random)];
    let mut bench = watched.attempt("open", || Bench::new(&driver, 1, Vec::new()));
    for sample in &samples {
        watched.attempt("register", || bench.register(sample.clone(), &[1, 3]));
    }
    for model in [0, 1, 0] {
        let hosted = &bench.models[model].1;
        watched.attempt("load", || Ok(hosted.load()?));
        for batch in 1..=3 {
            watched.attempt("serve", || bench.serve(Slot(batch % SLOTS), model, batch, &mut random));
        }
        watched.attempt("unload", || {
            hosted.unload();
            Ok(())
        });
    }
    assert!(bench.gpu.is_up());
    watched.attempt("load", || Ok(bench.models[1].1.load()?));
    let mut bench = Some(bench);
    watched.attempt("close", || {
        bench = None;
        Ok(())
    });
}

/// Nothing is written to host memory after a batch has failed, as somebody else may have it then.
#[test]
fn a_batch_that_has_failed_writes_nothing_more() {
    let mut random = Random(8);
    let (fake, bench) = with_models(32, 4, samples(&mut random));
    let (sample, hosted) = &bench.models[2];
    hosted.load().unwrap();
    let bytes = 8 * sample.output_bytes();
    let to = bench.gpu.pin(&crate::image(&vec![0; bytes]).unwrap()).unwrap();
    let part = Part { region: to.region(), offset: 0, bytes };
    let mut failures = 0;
    loop {
        bench.stage(Slot(0), 2, 8, &mut random).unwrap();
        fake.fail(failures);
        if hosted.run(Slot(0), 8, &[part]).is_ok() {
            break;
        }
        part.region.write(0, &vec![0xee; bytes]);
        // All that is still under way ends.
        bench.gpu.settle();
        let mut seen = vec![0; bytes];
        part.region.read(0, &mut seen);
        assert!(seen.iter().all(|&byte| byte == 0xee), "after failure {failures}");
        failures += 1;
    }
    assert!(failures > 10 && bench.gpu.is_up());
}

#[test]
fn weights_stay_until_their_batch_has_ended_even_if_waiting_fails() {
    let mut random = Random(9);
    let (fake, bench) = with_models(32, 4, samples(&mut random));
    let hosted = &bench.models[2].1;
    hosted.load().unwrap();
    hosted.put(&bench.gpu.slot(Slot::TRIAL), (Form(0), 8)).unwrap();
    fake.fail(0);
    hosted.unload();
    assert!(!fake.will_fail());
    assert_eq!(bench.gpu.weights_pages_free(), 4);
}

#[test]
#[should_panic(expected = "was not staged in Slot(0)")]
fn inputs_that_could_not_be_staged_replace_others() {
    let mut random = Random(10);
    let (fake, bench) = with_models(32, 4, samples(&mut random));
    let staged = bench.stage(Slot(0), 3, 2, &mut random).unwrap();
    fake.fail(0);
    assert!(bench.stage(Slot(0), 3, 2, &mut random).is_err());
    let _ = bench.run(&staged);
}

#[test]
fn staging_notices_that_a_gpu_has_failed() {
    let mut random = Random(11);
    let (fake, bench) = with_models(32, 4, samples(&mut random));
    fake.break_down();
    assert!(bench.stage(Slot(0), 3, 2, &mut random).is_err());
    assert!(!bench.gpu.is_up());
}

#[test]
fn a_gpu_that_has_failed_says_so_and_does_nothing_more() {
    let mut random = Random(2);
    let (fake, bench) = with_models(32, 4, samples(&mut random));
    let hosted = &bench.models[2].1;
    hosted.load().unwrap();
    let staged = bench.stage(Slot(0), 2, 3, &mut random).unwrap();
    assert!(bench.gpu.is_up());
    fake.break_down();
    assert!(bench.run(&staged).unwrap_err().0.contains("failed: it was told to"));
    assert!(!bench.gpu.is_up());
    let before = fake.calls();
    assert_eq!(bench.stage(Slot(0), 2, 3, &mut random).err(), Some(GpuError::Failed));
    assert_eq!(bench.models[1].1.load(), Err(GpuError::Failed));
    assert_eq!(hosted.measure(Form(0), 1), Err(GpuError::Failed));
    let (sample, _) = &bench.models[3];
    let registered = bench.gpu.register("another", &sample.plans(&[1]), &crate::image(&[]).unwrap());
    assert_eq!(registered.err(), Some(GpuError::Failed));
    assert_eq!(fake.calls(), before);
}

#[test]
fn a_thousand_models_take_turns_in_the_memory_of_a_few() {
    const MODELS: usize = 1000;
    const PAGES: usize = 20;
    let mut random = Random(3);
    let (fake, mut bench) = with_models(32, PAGES as u32, Vec::new());
    for _ in 0..MODELS {
        let sample = table(&mut random);
        bench.register(sample, &[2]).unwrap();
    }
    let mut resident = std::collections::VecDeque::new();
    for step in 0..3 * PAGES {
        let model = random.below(MODELS);
        if resident.len() == PAGES {
            let full = bench.models.iter().find(|(_, hosted)| !hosted.is_resident()).unwrap().1.load();
            assert_eq!(full, Err(GpuError::NoRoom { needed: 1, free: 0, all: PAGES as u32 }));
            let victim: usize = resident.pop_front().unwrap();
            bench.models[victim].1.unload();
        }
        bench.models[model].1.load().unwrap();
        resident.retain(|other| *other != model);
        resident.push_back(model);
        for &model in &resident {
            bench.serve(Slot(step % SLOTS), model, 1 + step % 2, &mut random).unwrap();
        }
    }
    drop(bench);
    assert_eq!(fake.leaks(), Vec::<String>::new());
}

#[test]
fn a_model_may_go_while_its_weights_are_there_and_inputs_are_under_way() {
    let mut random = Random(4);
    let (fake, mut bench) = with_models(32, 4, samples(&mut random));
    (0..3).for_each(|model| bench.models[model].1.load().unwrap());
    assert_eq!(bench.gpu.weights_pages_free(), 0);
    bench.stage(Slot(1), 0, 8, &mut random).unwrap();
    bench.models.remove(0);
    assert_eq!(bench.gpu.weights_pages_free(), 2);
    bench.serve(Slot(0), 0, 5, &mut random).unwrap();
    bench.stage(Slot(0), 0, 5, &mut random).unwrap();
    drop(bench);
    assert_eq!(fake.leaks(), Vec::<String>::new());
}

/// Pages of the pool are the scheduler's; those for a registration come from elsewhere as long as there are any.
#[test]
fn registering_takes_no_pages_that_loads_need() {
    let mut random = Random(5);
    // One for the arena, and for each slot one for inputs and one for outputs.
    let others = 1 + 2 * SLOTS;
    let (_fake, mut bench) = with_models(2 + 1 + others, 2, vec![table(&mut random), table(&mut random)]);
    (0..2).for_each(|model| bench.models[model].1.load().unwrap());
    bench.register(table(&mut random), &[1]).unwrap();
    drop(bench);
    let (_fake, mut bench) = with_models(2 + others, 2, vec![table(&mut random)]);
    bench.models[0].1.load().unwrap();
    bench.register(table(&mut random), &[1]).unwrap();
    bench.models[1].1.load().unwrap();
    let refused = bench.register(table(&mut random), &[1]).unwrap_err();
    assert_eq!(refused.0, "1 pages of weights are needed, 0 of 2 are free: unload a model first");
    bench.models[0].1.unload();
    bench.register(table(&mut random), &[1]).unwrap();
}

/// Each has it pinned for itself, and lets go of it for itself.
#[test]
fn gpus_share_weights_in_host_memory() {
    let mut random = Random(12);
    let sample = table(&mut random);
    let image = crate::image(&sample.weights).unwrap();
    let on_gpu = |_| {
        let (fake, mut bench) = with_models(32, 1, Vec::new());
        let hosted = bench.gpu.register("a sample", &sample.plans(&[4]), &image).unwrap();
        bench.models.push((sample.clone(), hosted));
        (fake, bench)
    };
    let gpus = [0, 1].map(on_gpu);
    gpus[0].1.models[0].1.release();
    gpus[1].1.models[0].1.load().unwrap();
    gpus[1].1.serve(Slot(0), 0, 3, &mut random).unwrap();
    assert!(!gpus[0].1.models[0].1.is_in_host_memory() && gpus[1].1.models[0].1.is_in_host_memory());
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut random = Random(6);
    let (_fake, mut bench) = with_models(32, 1, Vec::new());
    let mut refusal = |sample: Sample, size: usize| bench.register(sample, &[size]).unwrap_err().0;
    let large = Sample::new(Kind::Affine, 8, 2, &mut random);
    assert!(refusal(large, 1).contains("takes 2 pages of the GPU's memory for weights, and there is room for 1"));
    let wide = Sample::new(Kind::Negation, 1 << 20, 0, &mut random);
    assert!(refusal(wide.clone(), 16).contains("takes 134217728 bytes for activations of a batch"));
    assert!(refusal(wide, 7).contains("takes 29360128 bytes for inputs of a batch"));
    assert!(refusal(table(&mut random), 5000).contains("takes 5000 tasks in a batch"));
    let sample = table(&mut random);
    let image = crate::image(&sample.weights).unwrap();
    let plans = sample.plans(&[2, 1]);
    assert!(bench.gpu.register("disordered", &plans, &image).is_err());
    assert!(bench.gpu.register("none", &[], &image).is_err());
    assert!(bench.gpu.register_forms("no form", &[], &image).is_err());
    let short = crate::image(&sample.weights[..sample.weights.len() - 4]).unwrap();
    let refused = bench.gpu.register("short", &sample.plans(&[1]), &short).unwrap_err();
    assert!(refused.to_string().contains("a plan of short reaches beyond its memory"), "{refused}");
    let small = sample.plans(&[1]).remove(0);
    let small = Arc::new(Plan { arena_bytes: small.arena_bytes - lowering::plan::ALIGNMENT, ..(*small).clone() });
    assert!(bench.gpu.register("small", &[small], &image).is_err());
    let others = [sample.plans(&[1]).remove(0), Sample::new(Kind::Product, 3, 1, &mut random).plans(&[2]).remove(0)];
    assert!(bench.gpu.register("mixed", &others, &image).is_err());
}

#[test]
fn what_is_left_becomes_pages_of_weights() {
    let fake = Fake::new(100, 0);
    let others = settings(0);
    let gpu = Gpu::open(fake, crate::Settings { weights_pages: None, spare_bytes: 160 << 20, ..others }).unwrap();
    // 4 of the arena, 2 for each of 3 slots' inputs and outputs, and 10 to spare.
    assert_eq!(gpu.weights_pages(), 100 - 4 - 12 - 10);
    let refused =
        Gpu::open(Fake::new(26, 0), crate::Settings { weights_pages: None, spare_bytes: 160 << 20, ..others });
    assert!(refused.unwrap_err().to_string().contains("has 416 MiB of free memory"));
    let refused = Gpu::open(Fake::new(4, 0), crate::Settings { weights_pages: Some(5), ..others }).unwrap_err();
    assert!(refused.to_string().contains("no room for 5 pages of weights"), "{refused}");
}

#[test]
#[should_panic(expected = "was not staged in Slot(0)")]
fn what_was_staged_runs_in_its_own_form() {
    let mut random = Random(15);
    let (_fake, bench) = with_models(32, 4, Vec::new());
    let sample = Sample::new(Kind::Negation, 4, 0, &mut random);
    let plans = sample.plans(&[1]);
    let hosted = bench.gpu.register_forms("alike", &[&plans, &plans], &crate::image(&[]).unwrap()).unwrap();
    let region = bench.gpu.pin(&crate::image(&[0; 16]).unwrap()).unwrap();
    let part = Part { region: region.region(), offset: 0, bytes: 16 };
    hosted.stage_in(Form(1), Slot(0), &[part]).unwrap();
    let _ = hosted.run_in(Form(0), Slot(0), 1, &[part]);
}

#[test]
#[should_panic(expected = "was not staged in Slot(1)")]
fn only_what_was_staged_runs() {
    let mut random = Random(7);
    let (_fake, bench) = with_models(32, 4, samples(&mut random));
    let staged = bench.stage(Slot(0), 3, 2, &mut random).unwrap();
    bench.run(&staged).unwrap();
    let _ = bench.models[3].1.run(Slot(1), 2, &[]);
}

#[test]
fn quantiles_are_by_nearest_rank() {
    let measured = Measured { batch: 1, times: (1..=10).map(Span).collect() };
    let quantiles = [0.0, 0.05, 0.1, 0.11, 0.5, 0.99, 1.0].map(|share| measured.quantile(share).0);
    assert_eq!(quantiles, [1, 1, 1, 2, 5, 10, 10]);
}

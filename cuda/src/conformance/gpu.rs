//! Of GPUs and models on a driver.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use transport::Region;

use super::{
    Case, Failure, bytes_of, check, host,
    samples::{Kind, Sample, floats},
};
use crate::{
    Form, Gpu, GpuError, Hosted, Part, PinnedRegion, SLOTS, Settings, Slot,
    driver::{Driver, Stream},
    handles::Event,
    random::Random,
};

pub(super) const CASES: &[Case] = &[
    Case { name: "a model serves batches of any size", run: sizes },
    Case { name: "tasks of several forms share a model's weights", run: forms },
    Case { name: "inputs and outputs may lie in many parts", run: parts },
    Case { name: "inputs may have come into the GPU's memory by themselves", run: landed },
    Case { name: "faults are of their tasks only", run: faults },
    Case { name: "weights come and go between batches of several models", run: history },
    Case { name: "weights leave host memory and come back", run: host_memory },
    Case { name: "batches, loads and registrations of several threads do not disturb each other", run: threads },
    Case { name: "larger batches are measured, and a closed GPU leaves its memory", run: measured },
];

const SIZES: [usize; 4] = [1, 2, 5, 8];

pub(crate) fn settings(weights_pages: u32) -> Settings {
    Settings {
        weights_pages: Some(weights_pages),
        arena_bytes_max: 64 << 20,
        staging_bytes_max: 16 << 20,
        spare_bytes: 0,
        repeats: 3,
    }
}

/// A GPU with models and staging memory.
pub(crate) struct Bench {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) models: Vec<(Sample, Hosted)>,
    staging: PinnedRegion,
}

/// Bytes of a slot's inputs or outputs in the host's staging memory.
const AREA_BYTES: usize = 1 << 20;

/// A batch that has been staged.
pub(crate) struct Staged {
    slot: Slot,
    model: usize,
    batch: usize,
    expected: Vec<f32>,
    faults: Vec<usize>,
}

impl Bench {
    pub(crate) fn new(driver: &Arc<dyn Driver>, weights_pages: u32, samples: Vec<Sample>) -> Result<Self, Failure> {
        let gpu = Gpu::open(Arc::clone(driver), settings(weights_pages))?;
        let staging = gpu.pin(&host(&vec![0; 2 * SLOTS * AREA_BYTES])?)?;
        let mut bench = Self { gpu, models: Vec::new(), staging };
        for sample in samples {
            bench.register(sample, &SIZES)?;
        }
        Ok(bench)
    }

    pub(crate) fn register(&mut self, sample: Sample, sizes: &[usize]) -> Result<(), Failure> {
        let image = crate::image(&sample.weights)?;
        let hosted = self.gpu.register("a sample", &sample.plans(sizes), &image)?;
        self.models.push((sample, hosted));
        Ok(())
    }

    fn area(&self, slot: Slot, is_output: bool, bytes: usize) -> Part<'_> {
        let offset = (2 * slot.0 + usize::from(is_output)) * AREA_BYTES;
        Part { region: self.staging.region(), offset, bytes }
    }

    pub(crate) fn stage(
        &self,
        slot: Slot,
        model: usize,
        batch: usize,
        random: &mut Random,
    ) -> Result<Staged, GpuError> {
        let (sample, hosted) = &self.models[model];
        let (inputs, faults) = sample.inputs(batch, random);
        let area = self.area(slot, false, inputs.len());
        area.region.write(area.offset, &inputs);
        hosted.stage(slot, &[area])?;
        Ok(Staged { slot, model, batch, expected: sample.outputs(&inputs), faults })
    }

    /// Runs what was staged, and compares its outputs; tasks with faults have none.
    pub(crate) fn run(&self, staged: &Staged) -> Result<(), Failure> {
        let (sample, hosted) = &self.models[staged.model];
        let area = self.area(staged.slot, true, staged.expected.len() * 4);
        let ran = hosted.run(staged.slot, staged.batch, &[area])?;
        let mut bytes = vec![0; area.bytes];
        area.region.read(area.offset, &mut bytes);
        let seen = floats(&bytes);
        let task = |outputs: &[f32], task: usize| -> Vec<f32> {
            let length = sample.output_bytes() / 4;
            outputs[task * length..][..length].to_vec()
        };
        let differs =
            |index: &usize| !staged.faults.contains(index) && task(&seen, *index) != task(&staged.expected, *index);
        let wrong = (0..staged.batch).filter(differs).collect::<Vec<_>>();
        check(wrong.is_empty(), || format!("tasks {wrong:?} of {} of {:?} are wrong", staged.batch, sample.kind))?;
        check(ran.faults == staged.faults, || format!("faults {:?} instead of {:?}", ran.faults, staged.faults))
    }

    pub(crate) fn serve(&self, slot: Slot, model: usize, batch: usize, random: &mut Random) -> Result<(), Failure> {
        let staged = self.stage(slot, model, batch, random)?;
        self.run(&staged)
    }

    fn free_pages(&self) -> Result<(), Failure> {
        let (all, free) = (self.gpu.weights_pages() as usize, self.gpu.weights_pages_free());
        let used =
            self.models.iter().filter(|(_, hosted)| hosted.is_resident()).map(|(_, hosted)| hosted.weights_pages());
        let used = used.sum::<usize>();
        check(free + used == all, || format!("{free} pages are free and {used} used, of {all}"))
    }
}

/// One of each kind, of different sizes.
pub(crate) fn samples(random: &mut Random) -> Vec<Sample> {
    vec![
        Sample::new(Kind::Affine, 33, 2, random),
        Sample::new(Kind::Table, 8, 1, random),
        Sample::new(Kind::Product, 20, 1, random),
        Sample::new(Kind::Negation, 65, 0, random),
    ]
}

fn sizes(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let mut random = Random(1);
    let bench = Bench::new(driver, 8, samples(&mut random))?;
    for model in 0..bench.models.len() {
        bench.models[model].1.load()?;
        for batch in (1..=8).rev().chain([3, 8, 1]) {
            bench.serve(Slot(batch % SLOTS), model, batch, &mut random)?;
        }
    }
    Ok(())
}

fn forms(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let mut random = Random(10);
    let bench = Bench::new(driver, 8, samples(&mut random))?;
    let wide = Sample::new(Kind::Affine, 33, 2, &mut random);
    let forms = [wide.narrowed(1), wide.narrowed(25), wide.clone()];
    let plans: Vec<Vec<_>> =
        forms.iter().zip([&[1, 8][..], &SIZES, &[1, 3]]).map(|(it, sizes)| it.plans(sizes)).collect();
    let plans: Vec<&[_]> = plans.iter().map(Vec::as_slice).collect();
    let hosted = bench.gpu.register_forms("a sample of three forms", &plans, &crate::image(&wide.weights)?)?;
    hosted.load()?;
    bench.models[2].1.load()?;
    for (form, batch) in [(0, 8), (1, 7), (2, 3), (0, 1), (2, 1), (1, 2), (0, 5)] {
        let sample = &forms[form];
        let (inputs, _) = sample.inputs(batch, &mut random);
        let from = bench.gpu.pin(&host(&inputs)?)?;
        let to = bench.gpu.pin(&host(&vec![0; batch * sample.output_bytes()])?)?;
        let part = |pinned: &PinnedRegion| pinned.region().len();
        hosted.stage_in(Form(form), Slot(0), &[Part { region: from.region(), offset: 0, bytes: part(&from) }])?;
        // Batches of others in between do not disturb what is staged.
        bench.serve(Slot(1), 2, batch, &mut random)?;
        let outputs = Part { region: to.region(), offset: 0, bytes: part(&to) };
        let ran = hosted.run_in(Form(form), Slot(0), batch, &[outputs])?;
        let is_right = floats(&bytes_of(to.region())) == sample.outputs(&inputs);
        check(is_right && ran.faults.is_empty(), || format!("a batch of {batch} of form {form} is wrong"))?;
        let sizes = hosted.measured_in(Form(form)).iter().map(|size| size.batch).collect::<Vec<_>>();
        check(sizes.iter().any(|&size| size >= batch), || format!("form {form} has measured {sizes:?}"))?;
    }
    Ok(())
}

fn parts(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let mut random = Random(2);
    let bench = Bench::new(driver, 8, samples(&mut random))?;
    let (sample, hosted) = &bench.models[2];
    hosted.load()?;
    for batch in 1..=8 {
        let (inputs, _) = sample.inputs(batch, &mut random);
        let pieces = inputs.chunks(7).collect::<Vec<_>>();
        let from = pieces.iter().map(|piece| bench.gpu.pin(&host(piece)?).map_err(Failure::from));
        let from = from.collect::<Result<Vec<_>, _>>()?;
        let part = |region: &PinnedRegion| -> Region { region.region().clone() };
        let regions = from.iter().map(part).collect::<Vec<_>>();
        let inputs_of = |region| Part { region, offset: 0, bytes: region.len() };
        hosted.stage(Slot(0), &regions.iter().map(inputs_of).collect::<Vec<_>>())?;
        let to = bench.gpu.pin(&host(&vec![0xee; batch * (sample.output_bytes() + 5)])?)?;
        let outputs = (0..batch).map(|task| Part {
            region: to.region(),
            offset: task * (sample.output_bytes() + 5) + 5,
            bytes: sample.output_bytes(),
        });
        hosted.run(Slot(0), batch, &outputs.collect::<Vec<_>>())?;
        let seen = bytes_of(to.region());
        let tasks = seen.chunks(sample.output_bytes() + 5);
        let values = tasks.flat_map(|task| floats(&task[5..])).collect::<Vec<_>>();
        check(values == sample.outputs(&inputs), || format!("a batch of {batch} in parts is wrong"))?;
        let is_untouched = seen.chunks(sample.output_bytes() + 5).all(|task| task[..5] == [0xee; 5]);
        check(is_untouched, || "bytes beside outputs are written".to_owned())?;
    }
    Ok(())
}

fn landed(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let mut random = Random(11);
    let bench = Bench::new(driver, 8, samples(&mut random))?;
    let (sample, hosted) = &bench.models[0];
    hosted.load()?;
    let landing = match bench.gpu.landing(8 * 2 * sample.input_bytes()) {
        Ok(landing) => landing,
        // Not every GPU opens its memory to RDMA devices; what that says is all there is to see then.
        Err(refused) => return check(!refused.to_string().contains('\n'), || refused.to_string()),
    };
    for batch in 1..=8 {
        let (inputs, _) = sample.inputs(batch, &mut random);
        // Tasks in any order, not all of them neighbours.
        let places: Vec<usize> = (0..batch).map(|task| 2 * ((task * 3) % 8) + task % 2).collect();
        let parts: Vec<_> = places.iter().map(|place| place * sample.input_bytes()).collect();
        let parts: Vec<_> = parts.into_iter().map(|start| start..start + sample.input_bytes()).collect();
        let from = bench.gpu.pin(&host(&inputs)?)?;
        for (task, part) in parts.iter().enumerate() {
            let input = (from.region(), task * sample.input_bytes());
            driver.copy_in(Stream::Loads, landing.at(part.start, part.len()), input, part.len())?;
        }
        let arrived = Event::new(driver)?;
        driver.record(arrived.id, Stream::Loads)?;
        driver.synchronize(arrived.id)?;
        hosted.stage_landed(Slot(batch % 2), &landing, &parts)?;
        let to = bench.gpu.pin(&host(&vec![0; batch * sample.output_bytes()])?)?;
        hosted.run(Slot(batch % 2), batch, &[Part { region: to.region(), offset: 0, bytes: to.region().len() }])?;
        let is_right = floats(&bytes_of(to.region())) == sample.outputs(&inputs);
        check(is_right, || format!("a batch of {batch} is wrong"))?;
    }
    Ok(())
}

fn faults(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let mut random = Random(3);
    let bench = Bench::new(driver, 4, vec![Sample::new(Kind::Table, 8, 1, &mut random)])?;
    bench.models[0].1.load()?;
    let mut has_any = false;
    for _ in 0..30 {
        let staged = bench.stage(Slot(0), 0, 1 + random.below(8), &mut random)?;
        has_any |= !staged.faults.is_empty() && staged.faults.len() < staged.batch;
        bench.run(&staged)?;
    }
    check(has_any, || "no batch had tasks of both sorts".to_owned())
}

/// Random loads, unloads and batches; each batch is staged before the one before it runs.
fn history(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    (0..4).try_for_each(|seed| one_history(driver, seed))
}

fn one_history(driver: &Arc<dyn Driver>, seed: u64) -> Result<(), Failure> {
    let mut random = Random(seed);
    let samples = samples(&mut random).into_iter().chain(samples(&mut random)).collect();
    // All of them take eight pages.
    let bench = Bench::new(driver, 5, samples)?;
    let mut waiting: Option<Staged> = None;
    let mut served = 0;
    for step in 0..120 {
        let model = random.below(bench.models.len());
        let (_, hosted) = &bench.models[model];
        match random.below(4) {
            0 => match hosted.load() {
                Err(GpuError::NoRoom { free, needed, .. }) if free < needed => {}
                other => other?,
            },
            1 => hosted.unload(),
            _ => {
                let slot = Slot(step % SLOTS);
                let slot = waiting.as_ref().map_or(slot, |other| Slot((other.slot.0 + 1) % SLOTS));
                let next = bench.stage(slot, model, 1 + random.below(8), &mut random)?;
                if let Some(staged) = waiting.replace(next) {
                    served += usize::from(bench.run_if_resident(&staged)?);
                }
            }
        }
        bench.free_pages()?;
    }
    check(served > 20, || format!("only {served} batches were served"))
}

impl Bench {
    /// Whether it could run.
    fn run_if_resident(&self, staged: &Staged) -> Result<bool, Failure> {
        if self.models[staged.model].1.is_resident() {
            return self.run(staged).map(|()| true);
        }
        let ran = self.run(staged);
        check(ran == Err(not_resident().into()), || "a batch ran without its weights".to_owned())?;
        Ok(false)
    }
}

fn not_resident() -> GpuError {
    GpuError::NotResident("a sample".to_owned())
}

fn host_memory(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let mut random = Random(7);
    let bench = Bench::new(driver, 8, samples(&mut random))?;
    let (sample, hosted) = &bench.models[0];
    hosted.load()?;
    hosted.release();
    check(!hosted.is_in_host_memory(), || "weights that were let go are there".to_owned())?;
    bench.serve(Slot(0), 0, 2, &mut random)?;
    hosted.unload();
    let missing = hosted.load();
    let is_missing = missing == Err(GpuError::NotInHostMemory("a sample".to_owned()));
    check(is_missing, || format!("weights that were let go are loaded: {missing:?}"))?;
    let other = hosted.read(crate::image(&[0; 8])?);
    check(matches!(other, Err(GpuError::Refused(_))), || "other weights are taken".to_owned())?;
    hosted.read(crate::image(&sample.weights)?)?;
    hosted.load()?;
    bench.serve(Slot(0), 0, 3, &mut random)
}

/// Others need not go on when it is dropped.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Two threads run batches, each in a slot; a third one loads and unloads their models, and a fourth one registers
/// others.
fn threads(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let mut random = Random(8);
    let bench = Bench::new(driver, 10, samples(&mut random))?;
    let served = [2, 1];
    let others = [Sample::new(Kind::Affine, 50, 2, &mut random), Sample::new(Kind::Negation, 9, 0, &mut random)];
    let is_over = AtomicBool::new(false);
    let serve = |slot: usize| -> Result<(), Failure> {
        let mut random = Random(slot as u64);
        while !is_over.load(Ordering::Relaxed) {
            let staged = bench.stage(Slot(slot), served[slot], 1 + random.below(8), &mut random)?;
            match bench.run(&staged) {
                Err(failure) if failure == not_resident().into() => {}
                other => other?,
            }
        }
        Ok(())
    };
    let load = || -> Result<(), Failure> {
        for &model in served.iter().cycle().take_while(|_| !is_over.load(Ordering::Relaxed)) {
            let (_, hosted) = &bench.models[model];
            hosted.load()?;
            // Some run while it is there, and other memory is pinned, as by a new session.
            (0..10).try_for_each(|_| bench.gpu.pin(&host(&[0; 8])?).map(drop).map_err(Failure::from))?;
            hosted.unload();
        }
        Ok(served.iter().try_for_each(|&model| bench.models[model].1.load())?)
    };
    let register = || -> Result<(), Failure> {
        let register = |sample: &Sample| -> Result<(), Failure> {
            let image = crate::image(&sample.weights)?;
            Ok(bench.gpu.register("another sample", &sample.plans(&SIZES), &image)?.load()?)
        };
        let _over = Over(&is_over);
        others.iter().cycle().take(20).try_for_each(register)
    };
    thread::scope(|scope| {
        let threads = [scope.spawn(|| serve(0)), scope.spawn(|| serve(1)), scope.spawn(load), scope.spawn(register)];
        let ended =
            threads.map(|thread| thread.join().unwrap_or_else(|_| Err(Failure("a thread panicked".to_owned()))));
        ended.into_iter().collect::<Result<(), _>>()
    })?;
    bench.free_pages()?;
    served.iter().enumerate().try_for_each(|(slot, &model)| bench.serve(Slot(slot), model, 8, &mut random))
}

fn measured(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let before = driver.device()?.free_bytes;
    let mut random = Random(9);
    let bench = Bench::new(driver, 8, samples(&mut random))?;
    for (_, hosted) in &bench.models {
        check(hosted.sizes() == SIZES, || format!("sizes {:?}", hosted.sizes()))?;
        let measured = hosted.measured();
        check(measured.iter().map(|size| size.batch).eq(SIZES), || format!("measured {measured:?}"))?;
        let is_positive = measured.iter().all(|size| size.times.len() == 3 && size.quantile(0.0).0 > 0);
        check(is_positive, || format!("measured {measured:?}"))?;
    }
    let during = driver.device()?.free_bytes;
    drop(bench);
    let after = driver.device()?.free_bytes;
    // Libraries keep what they have loaded.
    check(during < before && after > during, || format!("{before} bytes were free, then {during}, then {after}"))
}

//! A model on one GPU.
//!
//! It is registered once: its plans are prepared and captured at addresses that stay its own ([`registration`]). After
//! that its weights come ([`Hosted::load`]) and go ([`Hosted::unload`]) as the scheduler orders, and batches run by
//! launching a graph. A batch is first staged, while another one runs; then, on the GPU and without the host, its
//! inputs are awaited and dealt to the model's ports, the graph of the next size up runs, outputs are gathered task by
//! task and copied to host memory. Tasks between a batch's size and its graph's compute with what is left in their
//! places, and nobody sees what.
//!
//! A model whose tasks differ in size has several [`Form`]s: its plans for one size of a task each. They share weights,
//! arena and slots, and which one a batch runs in is said when it is staged.

mod registration;

use std::sync::{Arc, Mutex};

use lowering::Plan;
use proto::{Span, weights::PAGE_BYTES};
use transport::Region;

use crate::{
    driver::{Address, Driver, DriverError, Page, Stream},
    gpu::{Buffers, FAULT_BYTES, Gpu, GpuError, ModelKey, Slot, lock},
    handles::{Event, Graph, Pinned, Prepared, Range},
    landing::Landing,
};

/// Weights are copied in pieces of so many bytes. One takes less than 0.1 ms on a link of 50 GB/s: that long at most do
/// inputs wait for a way that weights are on, as a copy that has begun gives way to nothing. A call to the driver takes
/// some microseconds, which is little beside it.
const CHUNK_BYTES: usize = 4 << 20;

/// A part of pinned host memory ([`Gpu::pin`]) that inputs are in, or outputs are copied to.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    /// The memory.
    pub region: &'a Region,
    /// The first byte in it.
    pub offset: usize,
    /// How many.
    pub bytes: usize,
}

/// A batch that has run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// The GPU's time for it, from when it had its inputs in its memory until it had the outputs there; what the host
    /// takes to launch it is part of that where the GPU had nothing else to do.
    pub gpu_time: Span,
    /// Tasks whose inputs the model cannot take, ascending. What has been written as their outputs means nothing.
    pub faults: Vec<usize>,
}

/// The GPU's times for batches of one size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Measured {
    /// Tasks.
    pub batch: usize,
    /// Ascending; at least one.
    pub times: Vec<Span>,
}

impl Measured {
    /// The time that so large a share of batches does not exceed (nearest rank).
    #[must_use]
    pub fn quantile(&self, share: f64) -> Span {
        let rank = (share * self.times.len() as f64).ceil() as usize;
        self.times[rank.clamp(1, self.times.len()) - 1]
    }
}

/// One of the sizes that a model's tasks may have, by its index among those that it was registered with. Most models
/// have the first alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Form(pub usize);

/// A model on a GPU. Its name, its place and its graphs are given back when it is dropped.
#[derive(Debug)]
pub struct Hosted {
    name: String,
    key: ModelKey,
    /// At least one.
    forms: Vec<Batches>,
    copies: Mutex<Copies>,
    /// Whether batches may run. Held while one is put on the stream, so that its weights stay.
    is_resident: Mutex<bool>,
    weights_at: Address,
    weights_bytes: usize,
    weights_pages: usize,
    /// The last batch that has been put on the stream.
    ran: Event,
    /// The weights are there.
    copied: Event,
    gpu: Arc<Gpu>,
}

/// Where the weights are.
#[derive(Debug)]
struct Copies {
    range: Range,
    /// The first so many pages behind the addresses are not the pool's.
    own: usize,
    image: Option<Pinned>,
}

/// The batches of one form.
#[derive(Debug)]
struct Batches {
    shape: Shape,
    /// Ascending.
    sizes: Vec<usize>,
    /// One for each size.
    captured: Vec<Captured>,
    /// One for each size.
    measured: Vec<Measured>,
}

impl Batches {
    fn largest(&self) -> usize {
        self.sizes.last().copied().unwrap_or(0)
    }

    /// The smallest captured size that has room for so many tasks.
    fn captured(&self, batch: usize) -> &Captured {
        &self.captured[self.sizes.partition_point(|&size| size < batch)]
    }

    fn faults_at(&self, buffers: &Buffers) -> Address {
        buffers.outputs.at.plus(faults_offset(self.largest(), &self.shape))
    }
}

/// A batch size.
#[derive(Debug)]
struct Captured {
    graph: Graph,
    /// What the graph refers to.
    _prepared: Prepared,
    plan: Arc<Plan>,
}

/// What a task takes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Shape {
    /// Bytes of each input.
    inputs: Vec<usize>,
    /// Bytes of each output.
    outputs: Vec<usize>,
}

impl Shape {
    fn input_bytes(&self) -> usize {
        self.inputs.iter().sum()
    }

    fn output_bytes(&self) -> usize {
        self.outputs.iter().sum()
    }
}

impl Hosted {
    /// The sizes of the first form that have been captured, ascending. Other batches take as long as the next size up.
    #[must_use]
    pub fn sizes(&self) -> &[usize] {
        &self.forms[0].sizes
    }

    /// How long each of [`Self::sizes`] took when the model was registered.
    #[must_use]
    pub fn measured(&self) -> &[Measured] {
        self.measured_in(Form(0))
    }

    /// The same of another form.
    ///
    /// # Panics
    /// If there is no such form.
    #[must_use]
    pub fn measured_in(&self, form: Form) -> &[Measured] {
        &self.forms[form.0].measured
    }

    /// Pages of a GPU's memory that its weights take.
    #[must_use]
    pub fn weights_pages(&self) -> usize {
        self.weights_pages
    }

    /// Bytes of all inputs of a task of the first form.
    #[must_use]
    pub fn input_bytes(&self) -> usize {
        self.forms[0].shape.input_bytes()
    }

    /// Bytes of all outputs of a task of the first form.
    #[must_use]
    pub fn output_bytes(&self) -> usize {
        self.forms[0].shape.output_bytes()
    }

    /// The GPU.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Whether batches can run: a model without weights can always.
    #[must_use]
    pub fn is_resident(&self) -> bool {
        self.weights_pages == 0 || *lock(&self.is_resident)
    }

    /// Copies the weights from host memory to the GPU's, and returns when they are there. Batches, also of this model,
    /// run meanwhile, and so does what stages inputs. Nothing happens if they are there.
    ///
    /// # Errors
    /// If they are not in host memory, there are too few free pages, or the driver refuses; nothing is taken then.
    pub fn load(&self) -> Result<(), GpuError> {
        self.gpu.check()?;
        let mut copies = lock(&self.copies);
        if self.is_resident() {
            return Ok(());
        }
        let image = copies.image.as_ref().map(|image| image.region.clone());
        let image = image.ok_or_else(|| GpuError::NotInHostMemory(self.name.clone()))?;
        // What could not be taken away is still there.
        let pages = self.pooled(self.weights_pages - copies.range.pages())?;
        if let Err(error) = self.fill(&mut copies.range, pages, &image) {
            self.gpu.settle();
            self.free(&mut copies);
            return Err(error.into());
        }
        *lock(&self.is_resident) = true;
        Ok(())
    }

    /// Pages for the weights, which are nobody's otherwise.
    fn pooled(&self, needed: usize) -> Result<Vec<Page>, GpuError> {
        let mut pool = lock(&self.gpu.pool);
        let (all, free) = (pool.all(), pool.free());
        pool.take(needed).ok_or(GpuError::NoRoom { needed, free, all })
    }

    /// Puts pages behind the weights' addresses, where there are none yet, and returns when the weights are in them.
    /// While a page is copied into the next one is mapped: that takes a fifth to a half of a copy's time (60 to 190 us
    /// on an H100).
    fn fill(&self, range: &mut Range, pages: Vec<Page>, image: &Region) -> Result<(), DriverError> {
        let mut left = pages.into_iter();
        let filled = (0..image.len()).step_by(PAGE_BYTES as usize).try_for_each(|from| {
            if from / PAGE_BYTES as usize == range.pages()
                && let Some(page) = left.next()
            {
                range.map(vec![page]).map_err(|(error, page)| {
                    lock(&self.gpu.pool).put(page);
                    error
                })?;
            }
            self.set_off(image, from..image.len().min(from + PAGE_BYTES as usize))
        });
        lock(&self.gpu.pool).put(left.collect());
        filled?;
        self.await_copies()
    }

    /// Copies the weights to where all pages are.
    fn copy(&self, image: &Region) -> Result<(), DriverError> {
        self.set_off(image, 0..image.len())?;
        self.await_copies()
    }

    fn set_off(&self, image: &Region, part: std::ops::Range<usize>) -> Result<(), DriverError> {
        part.clone().step_by(CHUNK_BYTES).try_for_each(|from| {
            let bytes = CHUNK_BYTES.min(part.end - from);
            self.gpu.driver.copy_in(Stream::Loads, self.weights_at.plus(from as u64), (image, from), bytes)
        })
    }

    fn await_copies(&self) -> Result<(), DriverError> {
        self.gpu.driver.record(self.copied.id, Stream::Loads)?;
        self.gpu.wait(&self.copied)
    }

    /// Gives the weights' pages back, as soon as no batch runs with them. No batch begins from now on.
    pub fn unload(&self) {
        let mut copies = lock(&self.copies);
        *lock(&self.is_resident) = false;
        if self.gpu.wait(&self.ran).is_err() {
            self.gpu.settle();
        }
        self.free(&mut copies);
    }

    /// Takes pages away that no work uses.
    fn free(&self, copies: &mut Copies) {
        match copies.range.unmap() {
            Ok(mut pages) => {
                let pooled = pages.split_off(std::mem::take(&mut copies.own));
                pages.into_iter().for_each(|page| self.gpu.driver.destroy_page(page));
                lock(&self.gpu.pool).put(pooled);
            }
            Err(error) => tracing::error!(%error, model = self.name, "the weights' pages cannot be given back"),
        }
    }

    /// Whether the weights are in host memory.
    #[must_use]
    pub fn is_in_host_memory(&self) -> bool {
        lock(&self.copies).image.is_some()
    }

    /// Lets go of the weights in host memory until [`Self::read`]; those in the GPU's memory stay.
    pub fn release(&self) {
        lock(&self.copies).image = None;
    }

    /// Takes the weights in host memory again ([`crate::image`]); they are pinned as long as the model has them.
    ///
    /// # Errors
    /// If they are not of the size that they were registered with, or cannot be pinned.
    pub fn read(&self, image: Region) -> Result<(), GpuError> {
        let mut copies = lock(&self.copies);
        if image.len() != self.weights_bytes {
            let text =
                format!("the weights of {} have another size than when they were loaded: load it again", self.name);
            return Err(GpuError::Refused(text));
        }
        if copies.image.is_none() {
            copies.image = Some(Pinned::new(&self.gpu.driver, image)?);
        }
        Ok(())
    }

    /// [`Self::stage_in`] for the first form.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    pub fn stage(&self, slot: Slot, inputs: &[Part<'_>]) -> Result<(), GpuError> {
        self.stage_in(Form(0), slot, inputs)
    }

    /// Sets off the copy of a batch's inputs to the GPU. They are the tasks' one after another, each with all its
    /// tensors in the plan's order, wherever one part ends and the next begins; they stay there until [`Self::run`]
    /// has ended, or the slot was staged anew and that has run. What was staged there before is forgotten. Waits while
    /// the slot's batch runs.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If these are not the inputs of 1 task of this form to as many as its largest size has.
    pub fn stage_in(&self, form: Form, slot: Slot, inputs: &[Part<'_>]) -> Result<(), GpuError> {
        let driver = &self.gpu.driver;
        let bytes = inputs.iter().map(|part| part.bytes).sum();
        self.stage_with(form, slot, bytes, |mut at| {
            inputs.iter().filter(|part| part.bytes > 0).try_for_each(|part| {
                driver.copy_in(Stream::Inputs, at, (part.region, part.offset), part.bytes)?;
                at = at.plus(part.bytes as u64);
                Ok(())
            })
        })
    }

    /// As [`Self::stage`], of inputs that an RDMA device has put into the GPU's memory and told of: these parts of it.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there, and if parts are outside of that memory.
    pub fn stage_landed(
        &self,
        slot: Slot,
        landing: &Landing,
        parts: &[std::ops::Range<usize>],
    ) -> Result<(), GpuError> {
        let driver = &self.gpu.driver;
        let bytes = parts.iter().map(ExactSizeIterator::len).sum();
        self.stage_with(Form(0), slot, bytes, |mut at| {
            driver.flush_remote_writes()?;
            parts.iter().filter(|part| !part.is_empty()).try_for_each(|part| {
                let (bytes, from) = (part.len(), landing.at(part.start, part.len()));
                driver.copy_on_device(Stream::Inputs, (at, bytes), (from, bytes), bytes, 1)?;
                at = at.plus(bytes as u64);
                Ok(())
            })
        })
    }

    /// Stages inputs of so many bytes, which `copy` puts to an address by [`Stream::Inputs`].
    fn stage_with(
        &self,
        form: Form,
        slot: Slot,
        bytes: usize,
        copy: impl FnOnce(Address) -> Result<(), DriverError>,
    ) -> Result<(), GpuError> {
        self.gpu.check()?;
        let Batches { shape, .. } = &self.forms[form.0];
        let mut buffers = self.gpu.slot(slot);
        buffers.holds = None;
        // Tasks without inputs are one batch of any size.
        let batch = bytes.checked_div(shape.input_bytes()).unwrap_or(0);
        assert!(bytes == batch * shape.input_bytes(), "{bytes} bytes are no tasks of {}", self.name);
        assert!(batch <= self.forms[form.0].largest(), "{batch} tasks are more than a batch of {}", self.name);
        let staged = || self.gpu.driver.record(buffers.staged.id, Stream::Inputs);
        if let Err(error) = copy(buffers.inputs.at).and_then(|()| staged()) {
            self.gpu.settle();
            return Err(error.into());
        }
        buffers.holds = Some((self.key, form, batch));
        Ok(())
    }

    /// [`Self::run_in`] for the first form.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    pub fn run(&self, slot: Slot, batch: usize, outputs: &[Part<'_>]) -> Result<Ran, GpuError> {
        self.run_in(Form(0), slot, batch, outputs)
    }

    /// Runs the batch that has been staged in this slot, and returns when its outputs are in host memory: the tasks'
    /// one after another, each with all its tensors, wherever one part ends and the next begins.
    ///
    /// # Errors
    /// If the weights are not there, or the driver refuses: the batch is lost, and nothing of it is under way any more.
    ///
    /// # Panics
    /// If another batch was staged last, or in another form, or outputs are not of its size.
    pub fn run_in(&self, form: Form, slot: Slot, batch: usize, outputs: &[Part<'_>]) -> Result<Ran, GpuError> {
        self.gpu.check()?;
        let shape = &self.forms[form.0].shape;
        let mut buffers = self.gpu.slot(slot);
        let staged = if shape.input_bytes() == 0 { 0 } else { batch };
        let holds = buffers.holds.take();
        assert!(
            holds == Some((self.key, form, staged)),
            "a batch of {batch} of {} was not staged in {slot:?}",
            self.name
        );
        let room = outputs.iter().map(|part| part.bytes).sum::<usize>();
        assert!(room == batch * shape.output_bytes(), "{room} bytes are no outputs of {batch} tasks of {}", self.name);
        self.put(&buffers, (form, batch))?;
        self.deliver(&buffers, (form, batch), outputs).map_err(|error| {
            self.gpu.settle();
            error.into()
        })
    }

    /// Puts a batch on the stream; its weights stay until it has ended.
    fn put(&self, buffers: &Buffers, (form, batch): (Form, usize)) -> Result<(), GpuError> {
        let batches = &self.forms[form.0];
        assert!((1..=batches.largest()).contains(&batch), "{} runs no batch of {batch}", self.name);
        let is_resident = lock(&self.is_resident);
        if self.weights_pages > 0 && !*is_resident {
            return Err(GpuError::NotResident(self.name.clone()));
        }
        let turn = lock(&self.gpu.execute);
        let put = self.put_steps(buffers, (batches, batch));
        drop(turn);
        put.map_err(|error| {
            self.gpu.settle();
            error.into()
        })
    }

    fn put_steps(&self, buffers: &Buffers, (batches, batch): (&Batches, usize)) -> Result<(), DriverError> {
        let driver = &*self.gpu.driver;
        let (shape, Captured { graph, plan, .. }) = (&batches.shape, batches.captured(batch));
        let arena = self.gpu.arena_at;
        driver.wait(Stream::Execute, buffers.staged.id)?;
        driver.record(buffers.started.id, Stream::Execute)?;
        let mut task = buffers.inputs.at;
        for (port, &bytes) in plan.inputs.iter().zip(&shape.inputs) {
            let to = arena.plus(port.offset as u64);
            copy_rows(driver, (to, bytes), (task, shape.input_bytes()), bytes, batch)?;
            task = task.plus(bytes as u64);
        }
        driver.launch(graph.id)?;
        let mut task = buffers.outputs.at;
        for (port, &bytes) in plan.outputs.iter().zip(&shape.outputs) {
            let from = arena.plus(port.offset as u64);
            copy_rows(driver, (task, shape.output_bytes()), (from, bytes), bytes, batch)?;
            task = task.plus(bytes as u64);
        }
        if let Some(faults) = plan.faults {
            let from = arena.plus(faults as u64);
            copy_rows(driver, (batches.faults_at(buffers), FAULT_BYTES), (from, FAULT_BYTES), FAULT_BYTES, batch)?;
        }
        driver.record(buffers.ended.id, Stream::Execute)?;
        driver.record(self.ran.id, Stream::Execute)
    }

    fn deliver(
        &self,
        buffers: &Buffers,
        (form, batch): (Form, usize),
        outputs: &[Part<'_>],
    ) -> Result<Ran, DriverError> {
        let (driver, batches) = (&*self.gpu.driver, &self.forms[form.0]);
        driver.wait(Stream::Outputs, buffers.ended.id)?;
        let mut at = buffers.outputs.at;
        for part in outputs.iter().filter(|part| part.bytes > 0) {
            driver.copy_out(Stream::Outputs, (part.region, part.offset), at, part.bytes)?;
            at = at.plus(part.bytes as u64);
        }
        let has_faults = batches.captured(batch).plan.faults.is_some();
        if has_faults {
            let to = (&buffers.faults.region, 0);
            driver.copy_out(Stream::Outputs, to, batches.faults_at(buffers), batch * FAULT_BYTES)?;
        }
        driver.record(buffers.delivered.id, Stream::Outputs)?;
        self.gpu.wait(&buffers.delivered)?;
        let gpu_time = driver.elapsed(buffers.started.id, buffers.ended.id)?;
        let faults = if has_faults { faults(&buffers.faults.region, batch) } else { Vec::new() };
        Ok(Ran { gpu_time, faults })
    }

    /// How long batches of each size of a form take, run so many times (at least once) with whatever is in their
    /// inputs' places.
    ///
    /// # Errors
    /// If the weights are not there, or the driver refuses.
    ///
    /// # Panics
    /// If there is no such form.
    pub fn measure(&self, form: Form, repeats: usize) -> Result<Vec<Measured>, GpuError> {
        self.measure_in_turns((form, repeats), &mut |_| {})
    }

    /// The same, each time when `turn` returns, which is told how long the same took before, if it ran before.
    fn measure_in_turns(
        &self,
        (form, repeats): (Form, usize),
        turn: &mut dyn FnMut(Option<Span>),
    ) -> Result<Vec<Measured>, GpuError> {
        let measure = |&batch: &usize| {
            turn(None);
            // The first launch of a graph brings it to the GPU.
            let mut last = self.time(form, batch)?;
            let times = (0..repeats.max(1)).map(|_| {
                turn(Some(last));
                last = self.time(form, batch)?;
                Ok(last)
            });
            let mut times = times.collect::<Result<Vec<_>, GpuError>>()?;
            times.sort_unstable();
            Ok(Measured { batch, times })
        };
        self.forms[form.0].sizes.iter().map(measure).collect()
    }

    fn time(&self, form: Form, batch: usize) -> Result<Span, GpuError> {
        self.gpu.check()?;
        // Nobody's outputs are overwritten while the slot is held; what is staged there is only read.
        let buffers = self.gpu.slot(Slot::TRIAL);
        self.put(&buffers, (form, batch))?;
        self.gpu.wait(&buffers.ended)?;
        Ok(self.gpu.driver.elapsed(buffers.started.id, buffers.ended.id)?)
    }
}

impl Drop for Hosted {
    fn drop(&mut self) {
        self.unload();
    }
}

/// Behind the outputs of the largest batch.
fn faults_offset(largest: usize, shape: &Shape) -> u64 {
    (largest * shape.output_bytes()).next_multiple_of(lowering::plan::ALIGNMENT) as u64
}

fn faults(region: &Region, batch: usize) -> Vec<usize> {
    let mut bytes = vec![0; batch * FAULT_BYTES];
    region.read(0, &mut bytes);
    let faults = bytes.chunks_exact(FAULT_BYTES).enumerate();
    faults.filter(|(_, fault)| fault.iter().any(|&byte| byte != 0)).map(|(task, _)| task).collect()
}

/// Copies rows; those that follow each other on both sides as one.
fn copy_rows(
    driver: &dyn Driver,
    to: (Address, usize),
    from: (Address, usize),
    bytes: usize,
    rows: usize,
) -> Result<(), DriverError> {
    match (to.1 == bytes && from.1 == bytes, bytes * rows) {
        (_, 0) => Ok(()),
        (true, all) => driver.copy_on_device(Stream::Execute, (to.0, all), (from.0, all), all, 1),
        (false, _) => driver.copy_on_device(Stream::Execute, to, from, bytes, rows),
    }
}

#[cfg(test)]
mod tests;

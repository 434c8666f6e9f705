//! How a model comes to a GPU: once, for good.
//!
//! Its weights are copied to its addresses, each of its plans is prepared, runs once as it is, which loads what is
//! loaded lazily, and is captured; then each graph is measured. Batches of other models run in between. Pages for that
//! are made beside the pool, as those of the pool are the scheduler's to count; only where the GPU has no memory left
//! they are taken from there. Afterwards the weights leave the GPU: loads are ordered.

use std::sync::{Arc, Mutex};

use lowering::{Place, Plan, Port};
use proto::{Span, weights::PAGE_BYTES};
use transport::Region;

use super::{Batches, Captured, Copies, Form, Hosted, Shape, faults_offset};
use crate::{
    driver::{Bases, Stream},
    gpu::{BATCH_MAX, FAULT_BYTES, Gpu, GpuError, lock},
    handles::{Event, Graph, Pinned, Prepared, Range},
};

impl Gpu {
    /// Takes a model: its plans, of ascending sizes, and its weights in host memory ([`crate::image`]), which are
    /// pinned until [`Hosted::release`] and may be those of the same model on other GPUs. `name` is for messages.
    ///
    /// # Errors
    /// If the model is too large for the arena, for a slot or for the pages of weights, or the driver refuses.
    pub fn register(self: &Arc<Self>, name: &str, plans: &[Arc<Plan>], weights: &Region) -> Result<Hosted, GpuError> {
        self.register_forms(name, &[plans], weights)
    }

    /// The same of a model of several forms ([`Form`], in this order), whose plans all read these weights.
    ///
    /// # Errors
    /// As [`Self::register`].
    pub fn register_forms(
        self: &Arc<Self>,
        name: &str,
        forms: &[&[Arc<Plan>]],
        weights: &Region,
    ) -> Result<Hosted, GpuError> {
        self.register_in_turns(name, forms, weights, &mut |_| {})
    }

    /// The same, among batches of others: `turn` is called before each run of a batch, and returns when that may begin.
    /// It is told how long the same took before, if it ran before.
    ///
    /// # Errors
    /// As [`Self::register`].
    pub fn register_in_turns(
        self: &Arc<Self>,
        name: &str,
        forms: &[&[Arc<Plan>]],
        weights: &Region,
        turn: &mut dyn FnMut(Option<Span>),
    ) -> Result<Hosted, GpuError> {
        self.check()?;
        let disordered = || GpuError::Refused(format!("the plans of {name} do not fit together"));
        let shapes: Option<Vec<Shape>> = forms.iter().map(|plans| shape(plans)).collect();
        let shapes = shapes.filter(|shapes| !shapes.is_empty()).ok_or_else(disordered)?;
        if !forms.iter().copied().flatten().all(|plan| stays_inside(plan, weights.len())) {
            let text = format!("a plan of {name} reaches beyond its memory, which is a bug: serve it on the CPU");
            return Err(GpuError::Refused(text));
        }
        for (plans, shape) in forms.iter().zip(&shapes) {
            self.grow(name, plans, shape)?;
        }
        let sizes_of = |plans: &[Arc<Plan>]| plans.iter().map(|plan| plan.batch).collect();
        let batches = forms.iter().zip(shapes).map(|(plans, shape)| Batches {
            shape,
            sizes: sizes_of(plans),
            captured: Vec::new(),
            measured: Vec::new(),
        });
        let range = Range::reserve(&self.driver, weights.len() as u64)?;
        let mut hosted = Hosted {
            name: name.to_owned(),
            key: self.next_model(),
            forms: batches.collect(),
            is_resident: Mutex::new(false),
            weights_at: range.at,
            weights_bytes: weights.len(),
            weights_pages: (range.bytes() / PAGE_BYTES) as usize,
            copies: Mutex::new(Copies { range, own: 0, image: None }),
            ran: Event::new(&self.driver)?,
            copied: Event::new(&self.driver)?,
            gpu: Arc::clone(self),
        };
        let rehearsed = hosted.rehearse(forms, weights, turn);
        if rehearsed.is_err() {
            self.settle();
        }
        hosted.unload();
        rehearsed.map(|()| hosted)
    }

    /// Sees to it that the arena and the slots have room.
    fn grow(&self, name: &str, plans: &[Arc<Plan>], shape: &Shape) -> Result<(), GpuError> {
        let largest = plans.iter().map(|plan| plan.batch).max().unwrap_or(0);
        let arena = plans.iter().map(|plan| plan.arena_bytes as u64).max().unwrap_or(0);
        let inputs = (largest * shape.input_bytes()) as u64;
        let outputs = faults_offset(largest, shape);
        let of_batch = |what| (what, "lower max_batch_size, or max_dims where requests choose lengths");
        check(name, of_batch("bytes for activations of a batch"), arena, self.settings.arena_bytes_max)?;
        check(name, of_batch("bytes for inputs of a batch"), inputs, self.settings.staging_bytes_max)?;
        check(name, of_batch("bytes for outputs of a batch"), outputs, self.settings.staging_bytes_max)?;
        check(name, of_batch("tasks in a batch"), largest as u64, BATCH_MAX as u64)?;
        lock(&self.arena).grow(arena)?;
        for buffers in &self.buffers {
            let mut buffers = lock(buffers);
            buffers.inputs.grow(inputs)?;
            buffers.outputs.grow(outputs + (largest * FAULT_BYTES) as u64)?;
        }
        tracing::debug!(model = name, arena, inputs, outputs, "made room on the GPU");
        Ok(())
    }
}

impl Hosted {
    fn rehearse(
        &mut self,
        forms: &[&[Arc<Plan>]],
        weights: &Region,
        turn: &mut dyn FnMut(Option<Span>),
    ) -> Result<(), GpuError> {
        let all = lock(&self.gpu.pool).all();
        let pages = ("pages of the GPU's memory for weights", "give it more (gpu_memory_mb)");
        check(&self.name, pages, self.weights_pages as u64, all.into())?;
        {
            let mut copies = lock(&self.copies);
            copies.image = Some(Pinned::new(&self.gpu.driver, weights.clone())?);
            self.map_own(&mut copies)?;
        }
        self.copy(weights)?;
        *lock(&self.is_resident) = true;
        for (form, plans) in forms.iter().enumerate() {
            for plan in *plans {
                turn(None);
                let captured = self.capture(plan)?;
                self.forms[form].captured.push(captured);
            }
        }
        for form in 0..forms.len() {
            let how = (Form(form), self.gpu.settings.repeats);
            self.forms[form].measured = self.measure_in_turns(how, turn)?;
        }
        Ok(())
    }

    /// Puts pages behind the weights' addresses for the time being.
    fn map_own(&self, copies: &mut Copies) -> Result<(), GpuError> {
        let driver = &self.gpu.driver;
        let mut pages = (0..self.weights_pages).map_while(|_| driver.create_page().ok()).collect::<Vec<_>>();
        let own = pages.len();
        let give_back = |pages: Vec<_>| pages.into_iter().for_each(|page| driver.destroy_page(page));
        let needed = self.weights_pages - own;
        let pooled = {
            let mut pool = lock(&self.gpu.pool);
            pool.take(needed).ok_or(GpuError::NoRoom { needed, free: pool.free(), all: pool.all() })
        };
        match pooled {
            Ok(pooled) => pages.extend(pooled),
            Err(error) => {
                give_back(pages);
                return Err(error);
            }
        }
        copies.range.map(pages).map_err(|(error, mut pages)| {
            lock(&self.gpu.pool).put(pages.split_off(own));
            give_back(pages);
            error
        })?;
        copies.own = own;
        Ok(())
    }

    /// Prepares a plan, runs it once, and captures it. Batches of others wait for each of the two parts.
    fn capture(&self, plan: &Arc<Plan>) -> Result<Captured, GpuError> {
        let driver = &self.gpu.driver;
        let at = Bases { arena: self.gpu.arena_at, weights: self.weights_at };
        let turn = lock(&self.gpu.execute);
        let prepared = Prepared::new(driver, plan, at)?;
        let put = driver.enqueue(prepared.id).and_then(|()| driver.record(self.ran.id, Stream::Execute));
        drop(turn);
        if let Err(error) = put.and_then(|()| self.gpu.wait(&self.ran)) {
            // The plan is in use until then.
            self.gpu.settle();
            return Err(error.into());
        }
        let _turn = lock(&self.gpu.execute);
        let graph = Graph::capture(driver, || driver.enqueue(prepared.id))?;
        Ok(Captured { graph, _prepared: prepared, plan: Arc::clone(plan) })
    }
}

/// Whether its steps and ports stay in the memory that they are given: nothing else keeps them from that of others.
fn stays_inside(plan: &Plan, weights_bytes: usize) -> bool {
    let ends = |at: usize, bytes: usize, limit: usize| at.checked_add(bytes).is_some_and(|end| end <= limit);
    let extents = plan.steps.iter().flat_map(|step| step.reads().into_iter().chain(step.writes()));
    let mut steps = extents.map(|extent| match extent.place {
        Place::Arena(at) => ends(at, extent.bytes, plan.arena_bytes),
        Place::Weights(at) => ends(at, extent.bytes, weights_bytes),
    });
    let mut ports =
        plan.inputs.iter().chain(&plan.outputs).map(|port| ends(port.offset, port.bytes(), plan.arena_bytes));
    let has_faults = plan.faults.is_none_or(|at| ends(at, plan.batch * FAULT_BYTES, plan.arena_bytes));
    steps.all(|inside| inside) && ports.all(|inside| inside) && has_faults
}

fn check(name: &str, (what, advice): (&str, &str), needed: u64, there: u64) -> Result<(), GpuError> {
    if needed <= there {
        return Ok(());
    }
    Err(GpuError::Refused(format!("{name} takes {needed} {what}, and there is room for {there}: {advice}")))
}

/// What a task of these plans takes, if it is the same for all.
fn shape(plans: &[Arc<Plan>]) -> Option<Shape> {
    let of_task = |ports: &[Port], batch: usize| -> Option<Vec<usize>> {
        let bytes = ports.iter().map(Port::bytes);
        bytes.map(|bytes| bytes.is_multiple_of(batch).then(|| bytes / batch)).collect()
    };
    let shape_of = |plan: &Plan| {
        let batch = Some(plan.batch).filter(|&batch| batch > 0)?;
        Some(Shape { inputs: of_task(&plan.inputs, batch)?, outputs: of_task(&plan.outputs, batch)? })
    };
    let is_ascending = plans.is_sorted_by(|one, other| one.batch < other.batch);
    let first = shape_of(plans.first()?).filter(|_| is_ascending)?;
    plans.iter().all(|plan| shape_of(plan).as_ref() == Some(&first)).then_some(first)
}

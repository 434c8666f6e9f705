//! A GPU with an arena and weights, and plans of one step that run there.

use std::sync::Arc;

use cuda::{
    Driver, DriverError,
    driver::{
        Address, Bases, Event, Page, Prepared, Stream,
        real::{Cuda, GpuName},
    },
};
use half::f16;
use lowering::{
    Place, Plan, Step, Type,
    interpret::{self, Memory},
    plan::{Operand, Precision},
};
use proto::weights::PAGE_BYTES;
use transport::Region;

/// Pages of the arena, and of weights.
const PAGES: usize = 48;

pub(crate) struct Rig {
    pages: Vec<Page>,
    pub(crate) cuda: Arc<Cuda>,
    pub(crate) bases: Bases,
    /// Host memory as long as a page.
    pub(crate) host: Region,
}

pub(crate) fn say(name: &str, result: Result<(), DriverError>) -> bool {
    match &result {
        Ok(()) => println!("passed {name}"),
        Err(error) => println!("failed {name}: {error}"),
    }
    result.is_ok()
}

impl Rig {
    pub(crate) fn open() -> Result<Self, DriverError> {
        let cuda = Arc::new(Cuda::open(&GpuName::Index(0))?);
        println!("{:?}", cuda.device()?);
        let mut taken = Vec::new();
        let mut place = |pages: usize| -> Result<Address, DriverError> {
            let at = cuda.reserve(pages as u64 * PAGE_BYTES)?;
            let pages: Vec<Page> = (0..pages).map(|_| cuda.create_page()).collect::<Result<_, _>>()?;
            cuda.map(at, &pages)?;
            taken.extend(pages);
            Ok(at)
        };
        let bases = Bases { arena: place(PAGES)?, weights: place(PAGES)? };
        let host = Region::allocate(PAGE_BYTES as usize).expect("memory");
        cuda.pin(&host)?;
        Ok(Self { pages: taken, cuda, bases, host })
    }

    /// Waits until everything on a stream is done.
    pub(crate) fn finish(&self, stream: Stream) -> Result<(), DriverError> {
        let event = self.cuda.create_event(false)?;
        self.cuda.record(event, stream)?;
        self.cuda.synchronize(event)?;
        self.cuda.destroy_event(event);
        Ok(())
    }

    pub(crate) fn write(&self, at: Address, bytes: &[u8]) -> Result<(), DriverError> {
        for (i, chunk) in bytes.chunks(self.host.len()).enumerate() {
            self.host.write(0, chunk);
            let to = at.plus((i * self.host.len()) as u64);
            self.cuda.copy_in(Stream::Execute, to, (&self.host, 0), chunk.len())?;
            self.finish(Stream::Execute)?;
        }
        Ok(())
    }

    pub(crate) fn read(&self, at: Address, bytes: usize) -> Result<Vec<u8>, DriverError> {
        let mut read = vec![0; bytes];
        for (i, chunk) in read.chunks_mut(self.host.len()).enumerate() {
            let from = at.plus((i * self.host.len()) as u64);
            self.cuda.copy_out(Stream::Execute, (&self.host, 0), from, chunk.len())?;
            self.finish(Stream::Execute)?;
            self.host.read(0, chunk);
        }
        Ok(read)
    }

    /// The GPU's time for what is run so many times as a graph, in microseconds each.
    pub(crate) fn time(&self, prepared: Prepared, runs: usize) -> Result<f64, DriverError> {
        let cuda = &self.cuda;
        cuda.enqueue(prepared)?;
        self.finish(Stream::Execute)?;
        cuda.begin_capture()?;
        let put = (0..runs).try_for_each(|_| cuda.enqueue(prepared));
        let graph = cuda.end_capture()?;
        put?;
        let events: [Event; 2] = [cuda.create_event(true)?, cuda.create_event(true)?];
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            cuda.record(events[0], Stream::Execute)?;
            cuda.launch(graph)?;
            cuda.record(events[1], Stream::Execute)?;
            cuda.synchronize(events[1])?;
            best = best.min(cuda.elapsed(events[0], events[1])?.as_nanos() as f64 / 1e3 / runs as f64);
        }
        cuda.destroy_graph(graph);
        events.into_iter().for_each(|event| cuda.destroy_event(event));
        Ok(best)
    }

    /// Runs a step on the GPU and by the interpreter, on the same random numbers.
    pub(crate) fn compare(&self, made: Made, precision: Precision, tolerance: f64) -> Result<(), DriverError> {
        let Made { step, output, elements, layout } = made;
        let (mut arena, weights) = layout.fill();
        let plan = Arc::new(plan(step, precision, arena.len()));
        self.write(self.bases.weights, &weights)?;
        let prepared = self.cuda.prepare(&plan, self.bases)?;
        self.write(self.bases.arena, &arena)?;
        self.cuda.enqueue(prepared)?;
        self.finish(Stream::Execute)?;
        let Place::Arena(offset) = output.place else { unreachable!("outputs are in the arena") };
        let bytes = elements * output.ty.bytes();
        let got = numbers(&self.read(self.bases.arena.plus(offset as u64), bytes)?, output.ty);
        self.cuda.forget(prepared);
        interpret::run(&plan, &mut Memory { arena: &mut arena, weights: &weights });
        let wanted = numbers(&arena[offset..offset + bytes], output.ty);
        let scale = wanted.iter().fold(1e-3_f64, |most, value| most.max(value.abs()));
        let is_right = |i: usize| (got[i] - wanted[i]).abs() <= tolerance * scale;
        let worst = got.iter().zip(&wanted).map(|(a, b)| (a - b).abs() / scale).fold(0.0, f64::max);
        match (0..elements).find(|&i| !is_right(i)) {
            None => {
                println!("  worst {worst:.2e} of {tolerance:.0e}");
                Ok(())
            }
            Some(i) => {
                let count = (0..elements).filter(|&i| !is_right(i)).count();
                let text = format!("element {i} is {}, not {}; {count} of {elements} are wrong", got[i], wanted[i]);
                Err(DriverError(format!("{text}, the worst by {worst:.2e} of {scale:.2}")))
            }
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for at in [self.bases.arena, self.bases.weights] {
            if let Err(error) = self.cuda.unmap(at, PAGES) {
                eprintln!("{error}");
            }
            self.cuda.release(at, PAGES as u64 * PAGE_BYTES);
        }
        self.pages.drain(..).for_each(|page| self.cuda.destroy_page(page));
        self.cuda.unpin(&self.host);
    }
}

pub(crate) fn plan(step: Step, precision: Precision, arena_bytes: usize) -> Plan {
    let (inputs, outputs) = (Vec::new(), Vec::new());
    Plan { batch: 1, precision, inputs, outputs, faults: None, steps: vec![step], arena_bytes }
}

/// A step with its tensors.
pub(crate) struct Made {
    pub(crate) step: Step,
    pub(crate) output: Operand,
    /// Of the output.
    pub(crate) elements: usize,
    pub(crate) layout: Layout,
}

/// Places of tensors, one after another.
#[derive(Default)]
pub(crate) struct Layout {
    arena: Vec<(Type, usize)>,
    weights: Vec<(Type, usize)>,
}

impl Layout {
    pub(crate) fn arena(&mut self, ty: Type, elements: usize) -> Operand {
        Operand { place: Place::Arena(push(&mut self.arena, ty, elements)), ty }
    }

    pub(crate) fn weights(&mut self, ty: Type, elements: usize) -> Operand {
        Operand { place: Place::Weights(push(&mut self.weights, ty, elements)), ty }
    }

    fn fill(&self) -> (Vec<u8>, Vec<u8>) {
        (random(&self.arena, 1), random(&self.weights, 2))
    }
}

fn padded(&(ty, elements): &(Type, usize)) -> usize {
    (ty.bytes() * elements).next_multiple_of(256)
}

fn push(tensors: &mut Vec<(Type, usize)>, ty: Type, elements: usize) -> usize {
    let at = tensors.iter().map(padded).sum();
    tensors.push((ty, elements));
    at
}

/// Numbers between -1 and 1; of integers, between -8 and 7.
fn random(tensors: &[(Type, usize)], seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut bytes = Vec::new();
    for tensor in tensors {
        let end = bytes.len() + padded(tensor);
        for _ in 0..tensor.1 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let value = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
            match tensor.0 {
                Type::F32 => bytes.extend(value.to_le_bytes()),
                Type::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
                // Indices of eight rows, some of them from the end.
                Type::I64 => bytes.extend(((value * 8.0).floor() as i64).to_le_bytes()),
                other => unreachable!("no random numbers of {other:?}"),
            }
        }
        bytes.resize(end, 0);
    }
    bytes
}

fn numbers(bytes: &[u8], ty: Type) -> Vec<f64> {
    match ty {
        Type::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect(),
        Type::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes(b.try_into().unwrap()).to_f64()).collect(),
        other => unreachable!("no numbers of {other:?}"),
    }
}

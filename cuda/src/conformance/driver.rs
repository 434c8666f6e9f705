//! Of drivers alone.

use std::sync::Arc;

use proto::{Span, weights::PAGE_BYTES};

use super::{
    Case, Failure, bytes_of, check, host,
    samples::{Kind, Sample, floats},
};
use crate::{
    driver::{Bases, Driver, Stream},
    handles::{Event, Graph, Pinned, Prepared, Range},
    random::Random,
};

pub(super) const CASES: &[Case] = &[
    Case { name: "a device says what it is", run: device },
    Case { name: "bytes come back as they were sent, at any offset", run: copies },
    Case { name: "rows are copied at any pitch, and cleared", run: rows },
    Case { name: "events are done in the order of their streams", run: events },
    Case { name: "streams wait for each other's events", run: waits },
    Case { name: "pages keep what is in them, wherever they are mapped", run: pages },
    Case { name: "a plan computes what it means", run: plans },
    Case { name: "a graph runs when it is launched, and not before", run: graphs },
    Case { name: "a graph computes with what is behind its addresses now", run: weights_move },
    Case { name: "plans of several models share the arena", run: arena_is_shared },
];

const SIZES: [usize; 3] = [1, 3, 8];

fn device(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let device = driver.device()?;
    check(device.free_bytes > 0 && device.free_bytes <= device.memory_bytes, || format!("{device:?}"))?;
    check(!device.name.is_empty() && !device.uuid.is_empty() && !device.pci.is_empty(), || format!("{device:?}"))
}

/// GPU memory of so many bytes.
fn memory(driver: &Arc<dyn Driver>, bytes: u64) -> Result<Range, Failure> {
    let mut range = Range::reserve(driver, bytes)?;
    range.grow(bytes)?;
    Ok(range)
}

/// Waits for all of a stream.
fn finish(driver: &Arc<dyn Driver>, stream: Stream) -> Result<(), Failure> {
    let event = Event::new(driver)?;
    driver.record(event.id, stream)?;
    Ok(driver.synchronize(event.id)?)
}

fn random_bytes(bytes: usize, random: &mut Random) -> Vec<u8> {
    (0..bytes).map(|_| random.below(256) as u8).collect()
}

fn copies(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let mut random = Random(1);
    let at = memory(driver, PAGE_BYTES * 2)?;
    let sent = random_bytes(70_000, &mut random);
    let from = Pinned::new(driver, host(&sent)?)?;
    let to = Pinned::new(driver, host(&vec![0xee; sent.len()])?)?;
    for stream in Stream::ALL {
        for _ in 0..10 {
            let bytes = 1 + random.below(sent.len() - 1);
            let (read, written) = (random.below(sent.len() - bytes + 1), random.below(sent.len() - bytes + 1));
            // Over the border of two pages.
            let place = at.at.plus(PAGE_BYTES - 1 - random.below(bytes) as u64);
            let before = bytes_of(&to.region);
            driver.copy_in(stream, place, (&from.region, read), bytes)?;
            driver.copy_out(stream, (&to.region, written), place, bytes)?;
            finish(driver, stream)?;
            let mut expected = before;
            expected[written..written + bytes].copy_from_slice(&sent[read..read + bytes]);
            check(bytes_of(&to.region) == expected, || format!("{bytes} bytes on {stream:?} differ"))?;
        }
    }
    Ok(())
}

fn rows(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    const BYTES: usize = 20_000;
    let mut random = Random(2);
    let at = memory(driver, PAGE_BYTES)?;
    let (source, target) = (at.at, at.at.plus(1 << 20));
    let sent = random_bytes(BYTES, &mut random);
    let from = Pinned::new(driver, host(&sent)?)?;
    let to = Pinned::new(driver, host(&sent)?)?;
    for (bytes, pitch_to, pitch_from, rows) in
        [(1, 1, 1, 1), (4, 12, 4, 100), (3, 3, 7, 50), (100, 100, 100, 100), (5, 64, 31, 33), (4096, 4097, 4096, 4)]
    {
        driver.copy_in(Stream::Execute, source, (&from.region, 0), BYTES)?;
        driver.clear(Stream::Execute, target, BYTES)?;
        driver.copy_on_device(Stream::Execute, (target, pitch_to), (source, pitch_from), bytes, rows)?;
        driver.copy_out(Stream::Execute, (&to.region, 0), target, BYTES)?;
        finish(driver, Stream::Execute)?;
        let mut expected = vec![0; BYTES];
        for row in 0..rows {
            expected[row * pitch_to..][..bytes].copy_from_slice(&sent[row * pitch_from..][..bytes]);
        }
        check(bytes_of(&to.region) == expected, || format!("{rows} rows of {bytes} bytes differ"))?;
    }
    Ok(())
}

fn events(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let (first, last) = (Event::timed(driver)?, Event::timed(driver)?);
    check(driver.is_done(first.id)?, || "an event that was never recorded is not done".to_owned())?;
    driver.synchronize(first.id)?;
    let at = memory(driver, PAGE_BYTES)?;
    driver.record(first.id, Stream::Execute)?;
    driver.clear(Stream::Execute, at.at, PAGE_BYTES as usize)?;
    driver.record(last.id, Stream::Execute)?;
    driver.synchronize(last.id)?;
    check(driver.is_done(first.id)? && driver.is_done(last.id)?, || "events before it are not done".to_owned())?;
    let (there, back) = (driver.elapsed(first.id, last.id)?, driver.elapsed(last.id, first.id)?);
    check(there > Span::ZERO && back == Span(-there.0), || format!("{there:?} there, {back:?} back"))?;
    let untimed = Event::new(driver)?;
    driver.record(untimed.id, Stream::Execute)?;
    driver.synchronize(untimed.id)?;
    check(driver.elapsed(first.id, untimed.id).is_err(), || "events without times have some".to_owned())
}

/// Many bytes go round three streams, each time through host memory as well.
fn waits(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    const BYTES: usize = 4 << 20;
    let at = memory(driver, PAGE_BYTES)?;
    let (source, target) = (at.at, at.at.plus(BYTES as u64));
    let host_memory = Pinned::new(driver, host(&vec![7; BYTES])?)?;
    let result = Pinned::new(driver, host(&vec![0; BYTES])?)?;
    let (there, copied, back) = (Event::new(driver)?, Event::new(driver)?, Event::new(driver)?);
    for round in 0..8_u8 {
        host_memory.region.write(0, &vec![round; BYTES]);
        driver.copy_in(Stream::Inputs, source, (&host_memory.region, 0), BYTES)?;
        driver.record(there.id, Stream::Inputs)?;
        driver.wait(Stream::Execute, there.id)?;
        driver.copy_on_device(Stream::Execute, (target, BYTES), (source, BYTES), BYTES, 1)?;
        driver.record(copied.id, Stream::Execute)?;
        driver.wait(Stream::Outputs, copied.id)?;
        driver.copy_out(Stream::Outputs, (&result.region, 0), target, BYTES)?;
        driver.record(back.id, Stream::Outputs)?;
        driver.synchronize(back.id)?;
        check(bytes_of(&result.region) == vec![round; BYTES], || format!("round {round} has other bytes"))?;
    }
    Ok(())
}

fn pages(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let mut first = memory(driver, 3 * PAGE_BYTES)?;
    let mut second = Range::reserve(driver, 3 * PAGE_BYTES)?;
    let seen = Pinned::new(driver, host(&[0; 3])?)?;
    for page in 0..3_u8 {
        let sent = Pinned::new(driver, host(&[page + 1])?)?;
        driver.copy_in(Stream::Loads, first.at.plus(u64::from(page) * PAGE_BYTES), (&sent.region, 0), 1)?;
        finish(driver, Stream::Loads)?;
    }
    let mut pages = first.unmap()?;
    pages.reverse();
    let mapped = second.map(pages);
    if let Err((error, pages)) = mapped {
        pages.into_iter().for_each(|page| driver.destroy_page(page));
        return Err(error.into());
    }
    for page in 0..3 {
        driver.copy_out(Stream::Loads, (&seen.region, page), second.at.plus(page as u64 * PAGE_BYTES), 1)?;
    }
    finish(driver, Stream::Loads)?;
    check(bytes_of(&seen.region) == [3, 2, 1], || format!("pages hold {:?}", bytes_of(&seen.region)))
}

/// A model with its weights on the GPU, and an arena of its own or another's.
struct Bench<'a> {
    driver: &'a Arc<dyn Driver>,
    sample: Sample,
    weights: Range,
    prepared: Vec<(usize, Prepared)>,
    arena: u64,
}

impl<'a> Bench<'a> {
    fn new(driver: &'a Arc<dyn Driver>, kind: Kind, arena: &Range) -> Result<Self, Failure> {
        let sample = Sample::new(kind, 37, 2, &mut Random(kind as u64));
        let weights = memory(driver, sample.weights.len() as u64)?;
        let mut bench = Self { driver, sample, weights, prepared: Vec::new(), arena: arena.at.0 };
        bench.copy_weights()?;
        for plan in bench.sample.plans(&SIZES) {
            let at = Bases { arena: arena.at, weights: bench.weights.at };
            bench.prepared.push((plan.batch, Prepared::new(driver, &plan, at)?));
        }
        Ok(bench)
    }

    fn copy_weights(&self) -> Result<(), Failure> {
        let image = Pinned::new(self.driver, host(&self.sample.weights)?)?;
        if !self.sample.weights.is_empty() {
            self.driver.copy_in(Stream::Loads, self.weights.at, (&image.region, 0), self.sample.weights.len())?;
        }
        finish(self.driver, Stream::Loads)
    }

    /// Runs a batch by what `put` puts on the stream, and compares.
    fn run(&self, batch: usize, random: &mut Random, put: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
        let plan = self.sample.plans(&[batch]).remove(0);
        let (inputs, _) = self.sample.inputs(batch, random);
        let sent = Pinned::new(self.driver, host(&inputs)?)?;
        let seen = Pinned::new(self.driver, host(&vec![0; batch * self.sample.output_bytes()])?)?;
        let place = |offset: usize| crate::driver::Address(self.arena).plus(offset as u64);
        let mut from = 0;
        for task in 0..batch {
            for port in &plan.inputs {
                let bytes = port.bytes() / batch;
                let to = place(port.offset + task * bytes);
                self.driver.copy_in(Stream::Execute, to, (&sent.region, from), bytes)?;
                from += bytes;
            }
        }
        put()?;
        let mut to = 0;
        for task in 0..batch {
            for port in &plan.outputs {
                let bytes = port.bytes() / batch;
                let from = place(port.offset + task * bytes);
                self.driver.copy_out(Stream::Execute, (&seen.region, to), from, bytes)?;
                to += bytes;
            }
        }
        finish(self.driver, Stream::Execute)?;
        let (seen, expected) = (floats(&bytes_of(&seen.region)), self.sample.outputs(&inputs));
        check(seen == expected, || format!("{:?} of {batch}: {seen:?} instead of {expected:?}", self.sample.kind))
    }
}

const KINDS: [Kind; 4] = [Kind::Affine, Kind::Table, Kind::Product, Kind::Negation];

fn plans(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let arena = memory(driver, PAGE_BYTES)?;
    for kind in KINDS {
        let bench = Bench::new(driver, kind, &arena)?;
        for (batch, prepared) in &bench.prepared {
            bench.run(*batch, &mut Random(3), || Ok(driver.enqueue(prepared.id)?))?;
        }
    }
    Ok(())
}

fn graphs(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let arena = memory(driver, PAGE_BYTES)?;
    let mut random = Random(4);
    for kind in KINDS {
        let bench = Bench::new(driver, kind, &arena)?;
        for (batch, prepared) in &bench.prepared {
            bench.run(*batch, &mut random, || Ok(driver.enqueue(prepared.id)?))?;
            let port = &bench.sample.plans(&[*batch])[0].outputs[0];
            let output = arena.at.plus(port.offset as u64);
            driver.clear(Stream::Execute, output, port.bytes())?;
            let graph = Graph::capture(driver, || driver.enqueue(prepared.id))?;
            let seen = Pinned::new(driver, host(&vec![0xee; port.bytes()])?)?;
            driver.copy_out(Stream::Execute, (&seen.region, 0), output, port.bytes())?;
            finish(driver, Stream::Execute)?;
            let is_clear = bytes_of(&seen.region).iter().all(|&byte| byte == 0);
            check(is_clear, || "what was captured has run".to_owned())?;
            for _ in 0..3 {
                bench.run(*batch, &mut random, || Ok(driver.launch(graph.id)?))?;
            }
        }
    }
    Ok(())
}

/// The pages behind a graph's weights are exchanged for others, with other weights.
fn weights_move(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let arena = memory(driver, PAGE_BYTES)?;
    let mut random = Random(5);
    for kind in [Kind::Affine, Kind::Table, Kind::Product] {
        let mut bench = Bench::new(driver, kind, &arena)?;
        let graphs = bench.prepared.iter().map(|(_, prepared)| {
            driver.enqueue(prepared.id)?;
            Graph::capture(driver, || driver.enqueue(prepared.id))
        });
        let graphs = graphs.collect::<Result<Vec<_>, _>>()?;
        finish(driver, Stream::Execute)?;
        for _ in 0..3 {
            let former = bench.weights.unmap()?;
            bench.weights.grow(bench.sample.weights.len() as u64)?;
            former.into_iter().for_each(|page| driver.destroy_page(page));
            bench.sample = Sample::new(kind, 37, 2, &mut random);
            bench.copy_weights()?;
            for (graph, batch) in graphs.iter().zip(SIZES) {
                bench.run(batch, &mut random, || Ok(driver.launch(graph.id)?))?;
            }
        }
    }
    Ok(())
}

fn arena_is_shared(driver: &Arc<dyn Driver>) -> Result<(), Failure> {
    let arena = memory(driver, PAGE_BYTES)?;
    let benches = KINDS.into_iter().map(|kind| Bench::new(driver, kind, &arena)).collect::<Result<Vec<_>, _>>()?;
    let mut random = Random(6);
    for _ in 0..40 {
        let bench = &benches[random.below(benches.len())];
        let (batch, prepared) = &bench.prepared[random.below(SIZES.len())];
        bench.run(*batch, &mut random, || Ok(driver.enqueue(prepared.id)?))?;
    }
    Ok(())
}

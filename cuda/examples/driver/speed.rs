//! How fast it is, and pages that come and go.

use std::{sync::Arc, time::Instant};

use cuda::{
    Driver, DriverError, Gpu, GpuError, Settings,
    driver::{Bases, Page, Stream},
};
use lowering::{
    Plan, Step, Type,
    plan::{Activation, Factor, Matmul, Precision},
};
use proto::weights::PAGE_BYTES;
use transport::Region;

use super::{
    cases::{Image, make},
    rig::{Layout, Rig, plan},
};

/// A captured graph reads weights: it sees what is mapped there when it is launched.
pub(crate) fn pages(rig: &Rig) -> Result<(), DriverError> {
    let cuda = &rig.cuda;
    let weights = cuda.reserve(2 * PAGE_BYTES)?;
    let page_sets: Vec<[Page; 2]> =
        (0..2).map(|_| Ok([cuda.create_page()?, cuda.create_page()?])).collect::<Result<_, DriverError>>()?;
    let bases = Bases { weights, ..rig.bases };
    let (n, k) = (256, PAGE_BYTES as usize / 512);
    let mut layout = Layout::default();
    let a = Factor { base: layout.arena(Type::F32, k), row_stride: k, batch_stride: 0, transposed: false };
    let b = Factor { base: layout.weights(Type::F32, k * n), row_stride: n, batch_stride: 0, transposed: false };
    let output = Factor { base: layout.arena(Type::F32, n), row_stride: n, batch_stride: 0, transposed: false };
    let (bias, residual, alpha, activation) = (None, None, 1.0, Activation::None);
    let step = Matmul { a, b, bias, residual, output, alpha, activation, batches: 1, m: 1, n, k };
    let plan = Arc::new(plan(Step::Matmul(step), Precision::Fp32, 4 * (k + n) + 512));
    let ones: Vec<u8> = std::iter::repeat_n(1.0_f32.to_le_bytes(), k).flatten().collect();
    let output_at = rig.bases.arena.plus((4 * k) as u64);
    assert!((b.row_stride * k * 4) as u64 > PAGE_BYTES, "more than a page is read");

    let fill = |value: f32| -> Result<(), DriverError> {
        let bytes: Vec<u8> = std::iter::repeat_n(value.to_le_bytes(), k * n).flatten().collect();
        rig.write(weights, &bytes)
    };
    cuda.map(weights, &page_sets[0])?;
    fill(1.0)?;
    let prepared = cuda.prepare(&plan, bases)?;
    cuda.begin_capture()?;
    let put = cuda.enqueue(prepared);
    let graph = cuda.end_capture()?;
    put?;
    let launch = |value: f32, what: &str| -> Result<(), DriverError> {
        rig.write(rig.bases.arena, &ones)?;
        cuda.launch(graph)?;
        rig.finish(Stream::Execute)?;
        let bytes = rig.read(output_at, 4 * n)?;
        let got: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        match got.iter().find(|&&got| got != value * k as f32) {
            None => Ok(()),
            Some(wrong) => Err(DriverError(format!("{what}: {wrong}, not {}", value * k as f32))),
        }
    };
    launch(1.0, "first pages")?;
    let from = Instant::now();
    cuda.unmap(weights, 2)?;
    let unmapped = from.elapsed();
    let from = Instant::now();
    cuda.map(weights, &page_sets[1])?;
    println!("{{\"unmap_2_pages_us\": {:.1}, \"map_2_pages_us\": {:.1}}}", us(unmapped), us(from.elapsed()));
    fill(2.0)?;
    launch(2.0, "other pages")?;
    cuda.unmap(weights, 2)?;
    cuda.map(weights, &page_sets[0])?;
    launch(1.0, "the first pages again, with what was in them")?;
    cuda.unmap(weights, 2)?;
    cuda.destroy_graph(graph);
    cuda.forget(prepared);
    cuda.release(weights, 2 * PAGE_BYTES);
    if cuda.map(weights, &page_sets[0]).is_ok() || cuda.unmap(weights, 1).is_ok() {
        return Err(DriverError("pages were put behind addresses that were released".to_owned()));
    }
    page_sets.into_iter().flatten().for_each(|page| cuda.destroy_page(page));
    Ok(())
}

fn us(time: std::time::Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Weights that are copied page by page, and as a whole.
pub(crate) fn copies(rig: &Rig) -> Result<(), DriverError> {
    let cuda = &rig.cuda;
    let pages = 32;
    let page = PAGE_BYTES as usize;
    let host = Region::allocate(pages * page).map_err(|error| DriverError(error.to_string()))?;
    host.populate(0..host.len());
    let from = Instant::now();
    cuda.pin(&host)?;
    println!("{{\"pin_{pages}_pages_ms\": {:.2}}}", us(from.elapsed()) / 1e3);
    let (start, end) = (cuda.create_event(true)?, cuda.create_event(true)?);
    for is_in in [true, false] {
        for chunk in [page, pages * page] {
            let mut best = f64::INFINITY;
            for _ in 0..4 {
                cuda.record(start, Stream::Loads)?;
                for at in (0..pages * page).step_by(chunk) {
                    let on_gpu = rig.bases.weights.plus(at as u64);
                    if is_in {
                        cuda.copy_in(Stream::Loads, on_gpu, (&host, at), chunk)?;
                    } else {
                        cuda.copy_out(Stream::Loads, (&host, at), on_gpu, chunk)?;
                    }
                }
                cuda.record(end, Stream::Loads)?;
                cuda.synchronize(end)?;
                best = best.min(cuda.elapsed(start, end)?.as_nanos() as f64);
            }
            let rate = (pages * page) as f64 / best;
            println!("{{\"copy\": \"{}\", \"chunk_bytes\": {chunk}, \"gb_per_s\": {rate:.1}}}", direction(is_in));
        }
    }
    cuda.destroy_event(start);
    cuda.destroy_event(end);
    cuda.unpin(&host);
    Ok(())
}

/// A model's load as a backend orders it, pages mapped and copied by pieces, beside one copy of as many bytes that are
/// mapped already.
pub(crate) fn loads(rig: &Rig) -> Result<(), DriverError> {
    let refused = |error: GpuError| DriverError(error.to_string());
    for pages in [7, 32] {
        let bytes = pages * PAGE_BYTES as usize;
        let host = Region::allocate(bytes).map_err(|error| DriverError(error.to_string()))?;
        host.populate(0..bytes);
        let settings = Settings {
            weights_pages: Some(pages as u32),
            arena_bytes_max: PAGE_BYTES,
            staging_bytes_max: PAGE_BYTES,
            repeats: 1,
            ..Settings::default()
        };
        let driver: Arc<dyn Driver> = rig.cuda.clone();
        let gpu = Gpu::open(driver, settings).map_err(refused)?;
        let hosted = gpu.register("loads", &[Arc::new(reading(bytes))], &host).map_err(refused)?;
        let mut loads = Vec::new();
        for _ in 0..9 {
            let from = Instant::now();
            hosted.load().map_err(refused)?;
            loads.push(us(from.elapsed()));
            hosted.unload();
        }
        loads.sort_by(f64::total_cmp);
        let copy = copy_us(rig, &host)?;
        println!(
            "{{\"load_pages\": {pages}, \"load_us\": {:.1}, \"load_gb_per_s\": {:.1}, \"copy_gb_per_s\": {:.1}}}",
            loads[4],
            bytes as f64 / loads[4] / 1e3,
            bytes as f64 / copy / 1e3
        );
    }
    Ok(())
}

/// The median time of one copy to the GPU, in microseconds, of memory that is pinned.
fn copy_us(rig: &Rig, host: &Region) -> Result<f64, DriverError> {
    let cuda = &rig.cuda;
    let mut times = Vec::new();
    let (start, end) = (cuda.create_event(true)?, cuda.create_event(true)?);
    for _ in 0..9 {
        cuda.record(start, Stream::Loads)?;
        cuda.copy_in(Stream::Loads, rig.bases.weights, (host, 0), host.len())?;
        cuda.record(end, Stream::Loads)?;
        cuda.synchronize(end)?;
        times.push(cuda.elapsed(start, end)?.as_nanos() as f64 / 1e3);
    }
    cuda.destroy_event(start);
    cuda.destroy_event(end);
    times.sort_by(f64::total_cmp);
    Ok(times[4])
}

/// A plan that multiplies a row with the first of so many bytes of weights.
fn reading(bytes: usize) -> Plan {
    let (n, k) = (16, 16);
    let mut layout = Layout::default();
    let a = Factor { base: layout.arena(Type::F32, k), row_stride: k, batch_stride: 0, transposed: false };
    let b = Factor { base: layout.weights(Type::F32, bytes / 4), row_stride: n, batch_stride: 0, transposed: false };
    let output = Factor { base: layout.arena(Type::F32, n), row_stride: n, batch_stride: 0, transposed: false };
    let (bias, residual, alpha, activation) = (None, None, 1.0, Activation::None);
    let step = Matmul { a, b, bias, residual, output, alpha, activation, batches: 1, m: 1, n, k };
    plan(Step::Matmul(step), Precision::Fp32, 1024)
}

fn direction(is_in: bool) -> &'static str {
    if is_in { "in" } else { "out" }
}

/// What it costs the host to launch a graph of sixty kernels.
pub(crate) fn launches(rig: &Rig) -> Result<(), DriverError> {
    let cuda = &rig.cuda;
    let image = Image {
        n: 1,
        size: [8, 8],
        c: 64,
        k: 64,
        kernel: [1, 1],
        strides: [1, 1],
        dilations: [1, 1],
        pads: ([0, 0], [0, 0]),
        groups: 1,
    };
    let made = make(image, Type::F16, [true, false, true]);
    let prepared = cuda.prepare(&Arc::new(plan(made.step, Precision::Fp16, 1 << 20)), rig.bases)?;
    cuda.begin_capture()?;
    let from = Instant::now();
    let put = (0..60).try_for_each(|_| cuda.enqueue(prepared));
    let enqueue = from.elapsed();
    let graph = cuda.end_capture()?;
    let captured = from.elapsed();
    put?;
    let mut times = Vec::new();
    let mut whole = Vec::new();
    for _ in 0..200 {
        let from = Instant::now();
        cuda.launch(graph)?;
        times.push(us(from.elapsed()));
        rig.finish(Stream::Execute)?;
        whole.push(us(from.elapsed()));
    }
    let from = Instant::now();
    for _ in 0..60 {
        cuda.enqueue(prepared)?;
    }
    let eager = from.elapsed();
    rig.finish(Stream::Execute)?;
    times.sort_by(f64::total_cmp);
    whole.sort_by(f64::total_cmp);
    println!(
        "{{\"graph_of\": 60, \"launch_us\": {:.1}, \"launch_p99_us\": {:.1}, \"until_done_us\": {:.1}, \
         \"eager_us\": {:.1}, \"capture_us\": {:.1}, \"capture_and_instantiate_us\": {:.1}}}",
        times[100],
        times[198],
        whole[100],
        us(eager),
        us(enqueue),
        us(captured)
    );
    cuda.destroy_graph(graph);
    cuda.forget(prepared);
    Ok(())
}

/// ResNet50's convolutions: channels in and out, filter, stride, size, and whether a residual is added.
const RESNET50: [(usize, usize, usize, usize, usize, bool); 23] = [
    (3, 64, 7, 2, 224, false),
    (64, 64, 1, 1, 56, false),
    (64, 64, 3, 1, 56, false),
    (64, 256, 1, 1, 56, true),
    (256, 64, 1, 1, 56, false),
    (256, 128, 1, 1, 56, false),
    (128, 128, 3, 2, 56, false),
    (128, 512, 1, 1, 28, true),
    (256, 512, 1, 2, 56, false),
    (512, 128, 1, 1, 28, false),
    (128, 128, 3, 1, 28, false),
    (512, 256, 1, 1, 28, false),
    (256, 256, 3, 2, 28, false),
    (256, 1024, 1, 1, 14, true),
    (512, 1024, 1, 2, 28, false),
    (1024, 256, 1, 1, 14, false),
    (256, 256, 3, 1, 14, false),
    (1024, 512, 1, 1, 14, false),
    (512, 512, 3, 2, 14, false),
    (512, 2048, 1, 1, 7, true),
    (1024, 2048, 1, 2, 14, false),
    (2048, 512, 1, 1, 7, false),
    (512, 512, 3, 1, 7, false),
];

pub(crate) fn convolutions(rig: &Rig) -> Result<(), DriverError> {
    for n in [8, 32] {
        for (c, k, filter, stride, size, residual) in RESNET50 {
            let pad = filter / 2;
            let image = Image {
                n,
                size: [size; 2],
                c,
                k,
                kernel: [filter; 2],
                strides: [stride; 2],
                dilations: [1, 1],
                pads: ([pad; 2], [pad; 2]),
                groups: 1,
            };
            let made = make(image, Type::F16, [true, residual, !residual]);
            let operations = 2.0 * (made.elements * filter * filter * c) as f64;
            let from = Instant::now();
            let prepared = rig.cuda.prepare(&Arc::new(plan(made.step, Precision::Fp16, 1 << 30)), rig.bases)?;
            let prepare_ms = us(from.elapsed()) / 1e3;
            let time = rig.time(prepared, 20)?;
            rig.cuda.forget(prepared);
            println!(
                "{{\"conv\": \"{n}x{size}x{size}x{c} -> {k}, {filter}x{filter}/{stride}{}\", \"us\": {time:.2}, \
                 \"tflops\": {:.1}, \"prepare_ms\": {prepare_ms:.1}}}",
                if residual { " + residual" } else { "" },
                operations / time / 1e6,
            );
        }
    }
    Ok(())
}

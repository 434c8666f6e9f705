//! Runs calls on the kernels as `cuda/kernels/host` compiles them, and holds the results against the interpreter's.
//!
//! This module has `unsafe` because the kernels are a shared library, and take addresses.

use std::{
    ffi::{CStr, CString, c_char},
    fs,
    path::Path,
    process::Command,
    sync::OnceLock,
};

use libloading::Library;
use lowering::interpret::{Memory, run_step};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::*;

type Launch = unsafe extern "C" fn(*const c_char, u32, u32, u32, *const u8, usize) -> *const c_char;
type Watch = unsafe extern "C" fn(u64, u64, *const Range, usize, i32);

/// Between tensors, and around them: what is written there is seen.
const GAP_BYTES: usize = 64;
const ALIGNMENT: usize = 256;
/// What nobody has written. As a number it is no number.
const UNWRITTEN: u8 = 0xff;

/// Memory that a launch may touch.
#[repr(C)]
struct Range {
    begin: u64,
    end: u64,
    is_writable: u64,
}

struct Kernels(Library);

/// The kernels for this CPU, compiled once for all tests; `None` where there is no g++.
fn kernels() -> Option<&'static Kernels> {
    static KERNELS: OnceLock<Option<Kernels>> = OnceLock::new();
    let build = || {
        if Command::new("g++").arg("--version").output().is_err() {
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("libkernels.so");
        let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/host/build");
        let output = Command::new(build).arg(&library).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // SAFETY: what it runs when it is loaded is a list of its kernels.
        let loaded = unsafe { Library::new(&library) }.unwrap();
        fs::remove_file(&library).unwrap();
        Some(Kernels(loaded))
    };
    let built = KERNELS.get_or_init(build).as_ref();
    if built.is_none() {
        testing::skip("cuda/kernels", "g++");
    }
    built
}

/// A step's memory: tensors of random numbers, with gaps between them.
pub(super) struct Bench {
    pub(super) random: ChaCha8Rng,
    arena: Vec<u8>,
    /// First byte and bytes of each tensor, and whether it is written.
    tensors: Vec<(usize, usize, bool)>,
    pub(super) faults: Option<usize>,
}

impl Bench {
    pub(super) fn new(seed: u64) -> Self {
        let random = ChaCha8Rng::seed_from_u64(seed);
        Self { random, arena: Vec::new(), tensors: Vec::new(), faults: None }
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        self.random.random_range(0..end)
    }

    /// From 1 to `most`.
    pub(super) fn length(&mut self, most: usize) -> usize {
        self.random.random_range(1..=most)
    }

    pub(super) fn is(&mut self) -> bool {
        self.random.random()
    }

    pub(super) fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Room for a tensor; one in four lies at no larger multiple than that of its elements' size.
    fn room(&mut self, ty: Type, count: usize, is_written: bool) -> Operand {
        let mut at = (self.arena.len() + GAP_BYTES).next_multiple_of(ALIGNMENT);
        if self.below(4) == 0 {
            at += ty.bytes() * self.length(7);
        }
        let bytes = count * ty.bytes();
        self.arena.resize(at + bytes + GAP_BYTES, UNWRITTEN);
        self.tensors.push((at, bytes, is_written));
        in_arena(at, ty)
    }

    pub(super) fn output(&mut self, ty: Type, count: usize) -> Operand {
        self.room(ty, count, true)
    }

    /// Of random numbers between -4 and 4, or integers of a similar size.
    pub(super) fn input(&mut self, ty: Type, count: usize) -> Operand {
        let numbers: Vec<f32> = (0..count).map(|_| self.random.random_range(-4.0..4.0)).collect();
        self.floats(ty, &numbers)
    }

    pub(super) fn optional(&mut self, ty: Type, count: usize) -> Option<Operand> {
        self.is().then(|| self.input(ty, count))
    }

    pub(super) fn floats(&mut self, ty: Type, numbers: &[f32]) -> Operand {
        let operand = self.room(ty, numbers.len(), false);
        let (first, _, _) = self.tensors[self.tensors.len() - 1];
        for (index, &number) in numbers.iter().enumerate() {
            let bytes: Vec<u8> = match ty {
                Type::F32 => number.to_le_bytes().to_vec(),
                Type::F16 => half::f16::from_f32(number).to_le_bytes().to_vec(),
                Type::I64 => (number as i64).to_le_bytes().to_vec(),
                Type::I32 => (number as i32).to_le_bytes().to_vec(),
                Type::U8 => vec![number as i32 as u8],
                Type::Bool => vec![u8::from(number > 0.0)],
            };
            self.arena[first + index * ty.bytes()..][..ty.bytes()].copy_from_slice(&bytes);
        }
        operand
    }

    /// Lets the step write to what has been an input, too.
    pub(super) fn overwritten(&mut self, operand: Operand) -> Operand {
        let tensor = self.tensors.iter_mut().find(|tensor| Place::Arena(tensor.0) == operand.place);
        tensor.expect("one of this bench's").2 = true;
        operand
    }

    /// A cleared fault for each of so many tasks.
    pub(super) fn faults(&mut self, tasks: usize) {
        let at = (self.arena.len() + GAP_BYTES).next_multiple_of(ALIGNMENT);
        self.arena.resize(at, UNWRITTEN);
        self.arena.resize(at + 4 * tasks, 0);
        self.arena.resize(at + 4 * tasks + GAP_BYTES, UNWRITTEN);
        self.tensors.push((at, 4 * tasks, true));
        self.faults = Some(at);
    }

    /// Runs a step by its kernels, threads in both orders, and by the interpreter, and compares all memory. Elements of
    /// the output's type may differ by so much, of their size or absolutely.
    pub(super) fn check(&self, name: &str, step: &Step, output: Type, tolerance: f32) {
        let Some(kernels) = kernels() else { return };
        let mut expected = self.arena.clone();
        run_step(step, self.faults, &mut Memory { arena: &mut expected, weights: &[] });
        for is_backward in [false, true] {
            let computed =
                self.computed(kernels, step, is_backward).unwrap_or_else(|why| panic!("{name}: {why}: {step:?}"));
            if let Some(difference) = self.difference(&expected, &computed, output, tolerance) {
                panic!("{name}, backward {is_backward}: {difference}: {step:?}");
            }
        }
    }

    /// The arena after the step's kernels.
    fn computed(&self, kernels: &Kernels, step: &Step, is_backward: bool) -> Result<Vec<u8>, String> {
        let mut room = vec![UNWRITTEN; self.arena.len() + ALIGNMENT];
        let start = room.as_ptr().align_offset(ALIGNMENT);
        room[start..start + self.arena.len()].copy_from_slice(&self.arena);
        let base = room.as_mut_ptr() as u64 + start as u64;
        let bases = Bases { arena: Address(base), weights: Address(0) };
        let range = |&(first, bytes, is_written): &(usize, usize, bool)| {
            let begin = base + first as u64;
            Range { begin, end: begin + bytes as u64, is_writable: u64::from(is_written) }
        };
        let ranges: Vec<Range> = self.tensors.iter().map(range).collect();
        let end = base + self.arena.len() as u64;
        for call in calls(step, self.faults, bases).map_err(|error| error.0)? {
            launch(kernels, &call, base..end, &ranges, is_backward)?;
        }
        Ok(room[start..start + self.arena.len()].to_vec())
    }

    /// What differs more than it may.
    fn difference(&self, expected: &[u8], computed: &[u8], ty: Type, tolerance: f32) -> Option<String> {
        let mut compared = 0;
        for &(first, bytes, is_written) in self.tensors.iter().filter(|(_, _, is_written)| *is_written) {
            assert!(is_written);
            if expected[compared..first] != computed[compared..first] {
                return Some(format!("bytes before {first} have been written"));
            }
            compared = first + bytes;
            if Some(first) == self.faults {
                if expected[first..compared] != computed[first..compared] {
                    return Some("other faults".to_owned());
                }
                continue;
            }
            for index in 0..bytes / ty.bytes() {
                let at = first + index * ty.bytes();
                let (expected, computed) = (number(ty, &expected[at..]), number(ty, &computed[at..]));
                let is_close = (expected - computed).abs() <= f64::from(tolerance) * expected.abs().max(1.0);
                if !is_close && expected != computed && !(expected.is_nan() && computed.is_nan()) {
                    return Some(format!("element {index} is {computed} instead of {expected}"));
                }
            }
        }
        (expected[compared..] != computed[compared..]).then(|| format!("bytes behind {compared} have been written"))
    }
}

/// Runs a launch, which may touch some of the memory between two addresses.
fn launch(
    kernels: &Kernels,
    call: &Call,
    memory: std::ops::Range<u64>,
    ranges: &[Range],
    is_backward: bool,
) -> Result<(), String> {
    let name = CString::new(call.kernel).unwrap();
    // SAFETY: the functions are as they are declared in emulation.cpp. A launch touches only what lies in the memory,
    // or it returns an error.
    let error = unsafe {
        let watch = kernels.0.get::<Watch>(b"kernels_watch").unwrap();
        watch(memory.start, memory.end, ranges.as_ptr(), ranges.len(), i32::from(is_backward));
        let launch = kernels.0.get::<Launch>(b"kernels_launch").unwrap();
        launch(name.as_ptr(), call.grid, call.threads, 0, call.parameters.as_ptr(), call.parameters.len())
    };
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: it is a string that is valid until the next launch of this thread.
    Err(unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned())
}

fn number(ty: Type, bytes: &[u8]) -> f64 {
    match ty {
        Type::F32 => f64::from(f32::from_le_bytes(bytes[..4].try_into().unwrap())),
        Type::F16 => half::f16::from_le_bytes(bytes[..2].try_into().unwrap()).to_f64(),
        Type::I64 => i64::from_le_bytes(bytes[..8].try_into().unwrap()) as f64,
        Type::I32 => f64::from(i32::from_le_bytes(bytes[..4].try_into().unwrap())),
        Type::U8 | Type::Bool => f64::from(bytes[0]),
    }
}

/// What sums in another order may differ by, of numbers of a type.
pub(super) fn tolerance(ty: Type) -> f32 {
    match ty {
        Type::F32 => 1e-5,
        // Of a last place, 2^-10.
        Type::F16 => 1.1e-3,
        _ => 0.0,
    }
}

#[test]
fn what_touches_other_memory_is_caught() {
    let Some(kernels) = kernels() else { return };
    let step = |bench: &mut Bench, room: usize| {
        let (input, output) = (bench.input(Type::F32, 16), bench.output(Type::F32, room));
        let Step::Pointwise(mut step) = copy(&[16], &[1], Type::F32) else { panic!("it is one") };
        (step.inputs[0].base, step.output.base) = (input, output);
        Step::Pointwise(step)
    };
    let mut bench = Bench::new(1);
    let fitting = step(&mut bench, 16);
    assert!(bench.computed(kernels, &fitting, false).is_ok());
    let mut bench = Bench::new(1);
    let short = step(&mut bench, 12);
    let error = bench.computed(kernels, &short, false).unwrap_err();
    assert!(error.contains("writes 16 bytes") || error.contains("writes 4 bytes"), "{error}");
}

#[test]
fn threads_that_do_not_wait_for_each_other_are_caught() {
    let Some(kernels) = kernels() else { return };
    let run = |kernel: &'static str, is_backward: bool| {
        let mut output = vec![0u32; 64];
        let base = output.as_mut_ptr() as u64;
        let parameters = base.to_le_bytes().to_vec();
        let call = Call { kernel, grid: 1, threads: 64, parameters };
        let ranges = [Range { begin: base, end: base + 256, is_writable: 1 }];
        launch(kernels, &call, base..base + 256, &ranges, is_backward).map(|()| output)
    };
    let neighbours: Vec<u32> = (0..64).map(|thread| (thread + 32) % 64 + 1).collect();
    for is_backward in [false, true] {
        assert_ne!(run("control_race", is_backward).unwrap(), neighbours);
        for kernel in ["control_left", "control_half"] {
            let error = run(kernel, is_backward).unwrap_err();
            assert!(error.contains("never come"), "{error}");
        }
    }
    assert!(run("no_kernel", false).unwrap_err().contains("does not take"));
}

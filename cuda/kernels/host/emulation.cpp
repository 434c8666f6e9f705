// Runs launches on a CPU. A block's threads are fibers that give way at barriers, and nowhere else; blocks run one
// after another. What a GPU would leave to chance is made to fail: a barrier that some threads never reach, an access
// beside what was allowed, a launch that does not fit its kernel.

#include "device.h"

#include <setjmp.h>
#include <stdio.h>
#include <ucontext.h>

#include <deque>
#include <memory>
#include <vector>

thread_local Index threadIdx, blockIdx, blockDim, gridDim;

namespace {

const size_t STACK_BYTES = 256 << 10;
const u32 THREADS_MAX = 1024;
const u32 SHARED_MAX = 48 << 10;

const emulation::Kernel* kernels;
thread_local char error[256];

struct Fiber {
  ucontext_t begin;
  jmp_buf at;
  bool has_begun = false;
  bool is_finished = true;
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
};

// Of threads that wait for each other: how many have come, and how often all have.
struct Barrier {
  u32 arrived = 0, passed = 0;
};

struct Block {
  // They stay where they are: a context has pointers into itself.
  std::deque<Fiber> fibers;
  Barrier all, warps[THREADS_MAX / 32];
  u8 rooms[THREADS_MAX][emulation::ROOM_BYTES];
  jmp_buf scheduler;
  const emulation::Kernel* kernel;
  const void* parameters;
  u32 threads, current;
  bool has_progress;
};

thread_local std::unique_ptr<Block> block;
thread_local bool is_backward;

// Device memory, and what a launch may touch of it.
struct Range {
  u64 begin, end;
  u64 is_writable;
};
thread_local Range device;
thread_local std::vector<Range> allowed;

void give_way() {
  Fiber& fiber = block->fibers[block->current];
  if (_setjmp(fiber.at) == 0) _longjmp(block->scheduler, 1);
}

void fiber_main() {
  for (;;) {
    block->kernel->run(block->parameters);
    block->fibers[block->current].is_finished = true;
    block->has_progress = true;
    give_way();
  }
}

void pass(Barrier& barrier, u32 threads) {
  u32 passed = barrier.passed;
  block->has_progress = true;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    barrier.passed++;
    return;
  }
  while (barrier.passed == passed) give_way();
}

void resume(u32 thread) {
  Fiber& fiber = block->fibers[thread];
  block->current = thread;
  threadIdx = {thread, 0, 0};
  if (_setjmp(block->scheduler) != 0) return;
  if (fiber.has_begun) _longjmp(fiber.at, 1);
  fiber.has_begun = true;
  setcontext(&fiber.begin);
}

void prepare(Fiber& fiber) {
  fiber.has_begun = false;
  getcontext(&fiber.begin);
  fiber.begin.uc_stack.ss_sp = fiber.stack.get();
  fiber.begin.uc_stack.ss_size = STACK_BYTES;
  fiber.begin.uc_link = nullptr;
  makecontext(&fiber.begin, fiber_main, 0);
}

// A warp goes on as far as it can before the next one has its turn, so that what a missing barrier would leave to
// chance goes wrong. Yields whether a thread has come any further.
bool run_warp(u32 warp) {
  bool has_come_further = false;
  do {
    block->has_progress = false;
    for (u32 i = 0; i < 32; i++) {
      u32 thread = warp * 32 + (is_backward ? 31 - i : i);
      if (!block->fibers[thread].is_finished) resume(thread);
    }
    has_come_further |= block->has_progress;
  } while (block->has_progress);
  return has_come_further;
}

// Whether all threads came to their end.
bool run_block() {
  u32 warps = block->threads / 32;
  for (u32 thread = 0; thread < block->threads; thread++) block->fibers[thread].is_finished = false;
  for (;;) {
    bool has_come_further = false;
    for (u32 i = 0; i < warps; i++) has_come_further |= run_warp(is_backward ? warps - 1 - i : i);
    if (!has_come_further) break;
  }
  for (u32 thread = 0; thread < block->threads; thread++) {
    if (!block->fibers[thread].is_finished) return false;
  }
  return true;
}

bool touches_rightly(u64 address, u64 bytes, bool is_write) {
  if (address + bytes <= device.begin || address >= device.end) return true;
  for (const Range& range : allowed) {
    if (address >= range.begin && address + bytes <= range.end && (range.is_writable || !is_write)) return true;
  }
  return false;
}

void check(u64 address, u64 bytes, bool is_write) {
  bool is_aligned = address % bytes == 0 || address < device.begin || address >= device.end;
  if (error[0] != 0 || (is_aligned && touches_rightly(address, bytes, is_write))) return;
  snprintf(error, sizeof error, "%s %s %llu bytes at %lld of the memory, thread %u of block %u",
           block ? block->kernel->name : "nobody", is_write ? "writes" : "reads", bytes, (i64)(address - device.begin),
           threadIdx.x, blockIdx.x);
}

}  // namespace

void __syncthreads() { pass(block->all, block->threads); }

void emulation::warp_barrier() { pass(block->warps[threadIdx.x / 32], 32); }

u8* emulation::room(int lane) { return block->rooms[threadIdx.x / 32 * 32 + lane]; }

void emulation::fail(const char* what) {
  if (error[0] == 0) snprintf(error, sizeof error, "%s %s", block->kernel->name, what);
}

emulation::Kernel::Kernel(const char* name, size_t parameter_bytes, u32 threads, void (*run)(const void*))
    : name(name), parameter_bytes(parameter_bytes), threads(threads), run(run), next(kernels) {
  kernels = this;
}

// The compiler calls these before each access to memory (-fsanitize=kernel-address, outlined).
extern "C" {
#define CHECKS(bytes) \
  void __asan_load##bytes##_noabort(u64 address) { check(address, bytes, false); } \
  void __asan_store##bytes##_noabort(u64 address) { check(address, bytes, true); }
CHECKS(1) CHECKS(2) CHECKS(4) CHECKS(8) CHECKS(16)
void __asan_loadN_noabort(u64 address, u64 bytes) { check(address, bytes, false); }
void __asan_storeN_noabort(u64 address, u64 bytes) { check(address, bytes, true); }
void __asan_handle_no_return() {}
void __asan_before_dynamic_init(const char*) {}
void __asan_after_dynamic_init() {}

// The bytes of parameters that a kernel takes; 0 if there is no such kernel.
size_t kernels_parameter_bytes(const char* name) {
  const emulation::Kernel* kernel = kernels;
  while (kernel != nullptr && strcmp(kernel->name, name) != 0) kernel = kernel->next;
  return kernel == nullptr ? 0 : kernel->parameter_bytes;
}

// From now on, launches of this thread must not touch anything between `begin` and `end` but those ranges; the order
// in which a block's threads run is the other way round if `backward`.
void kernels_watch(u64 begin, u64 end, const Range* ranges, size_t count, int backward) {
  device = {begin, end, 0};
  allowed.assign(ranges, ranges + count);
  is_backward = backward != 0;
}

// Runs a launch to its end. Yields null, or what was wrong with it, which is valid until the next call of this thread.
const char* kernels_launch(const char* name, u32 grid, u32 threads, u32 shared, const void* parameters, size_t bytes) {
  error[0] = 0;
  const emulation::Kernel* kernel = kernels;
  while (kernel != nullptr && strcmp(kernel->name, name) != 0) kernel = kernel->next;
  if (kernel == nullptr || bytes != kernel->parameter_bytes || threads == 0 || threads > kernel->threads ||
      threads % 32 != 0 || shared > SHARED_MAX || grid == 0 || grid > 0x7fffffffu) {
    snprintf(error, sizeof error, "%s does not take grid %u, %u threads, %u bytes shared, %zu bytes of parameters",
             name, grid, threads, shared, bytes);
    return error;
  }
  if (!block) block = std::make_unique<Block>();
  std::vector<u64> copy((bytes + 7) / 8);
  memcpy(copy.data(), parameters, bytes);
  block->kernel = kernel;
  block->parameters = copy.data();
  block->threads = threads;
  while (block->fibers.size() < threads) prepare(block->fibers.emplace_back());
  gridDim = {grid, 1, 1};
  blockDim = {threads, 1, 1};
  for (u32 i = 0; i < grid && error[0] == 0; i++) {
    blockIdx = {is_backward ? grid - 1 - i : i, 0, 0};
    if (run_block()) continue;
    snprintf(error, sizeof error, "%s: some threads of block %u wait for others that never come", name, blockIdx.x);
    block.reset();
    return error;
  }
  return error[0] == 0 ? nullptr : error;
}
}

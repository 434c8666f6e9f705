// The same as device/device.h for a CPU: kernels compile as C++, and one block after another runs with a fiber for each
// thread (emulation.cpp). What lanes exchange is as the PTX ISA says.
#pragma once

#include <math.h>
#include <string.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define __device__
#define __shared__ static thread_local
#define OUTLINED static
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Index {
  u32 x, y, z;
};
extern thread_local Index threadIdx, blockIdx, blockDim, gridDim;

// All threads of the block come here before one goes on.
void __syncthreads();

namespace emulation {
// All lanes of this thread's warp come here before one goes on.
void warp_barrier();
// What a lane of this thread's warp shows to the others between two barriers.
const int ROOM_BYTES = 32;
u8* room(int lane);
// The launch has done what a GPU would not, and fails.
void fail(const char* what);

struct Kernel {
  Kernel(const char* name, size_t parameter_bytes, u32 threads, void (*run)(const void* parameters));
  const char* name;
  size_t parameter_bytes;
  u32 threads;
  void (*run)(const void* parameters);
  const Kernel* next;
};

template <typename T> T exchanged(T value, int lane) {
  static_assert(sizeof(T) <= ROOM_BYTES);
  memcpy(room(threadIdx.x % 32), &value, sizeof(T));
  warp_barrier();
  memcpy(&value, room(lane), sizeof(T));
  warp_barrier();
  return value;
}
}  // namespace emulation

#define KERNEL(name, Parameters, threads) \
  static void name##_kernel(const Parameters& p); \
  static const emulation::Kernel name##_entry(#name, sizeof(Parameters), threads, [](const void* parameters) { \
    name##_kernel(*(const Parameters*)parameters); \
  }); \
  static void name##_kernel(const Parameters& p)

inline u32 min(u32 a, u32 b) { return a < b ? a : b; }

float float_of_half(u16 half);
u16 half_of_float(float value);

template <typename T> T shuffle_xor(T value, int bits) { return emulation::exchanged(value, threadIdx.x % 32 ^ bits); }
template <typename T> T shuffle(T value, int lane) { return emulation::exchanged(value, lane); }

void load_matrices(u32 (&to)[4], const u16* row);
void load_matrices_transposed(u32 (&to)[4], const u16* row);
void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);

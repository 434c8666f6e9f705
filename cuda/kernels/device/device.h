// What the kernels ask of the hardware beyond C++ and CUDA's built-in names. host/device.h has the same for a CPU.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INFINITY __int_as_float(0x7f800000)

// A kernel takes one struct of parameters, and runs in blocks of so many threads.
#define KERNEL(name, Parameters, threads) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Parameters p)

// Of functions that are large and rarely called.
#define OUTLINED static __device__ __noinline__

__device__ inline float float_of_half(u16 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

__device__ inline u16 half_of_float(float value) {
  u16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

// What the lane has whose number differs in these bits. All lanes of the warp take part in this and all that follow.
template <typename T> __device__ inline T shuffle_xor(T value, int bits) { return __shfl_xor_sync(~0u, value, bits); }

// What that lane has.
template <typename T> __device__ inline T shuffle(T value, int lane) { return __shfl_sync(~0u, value, lane); }

// Four matrices of 8 x 8 halves from shared memory: lane i says where row i % 8 of matrix i / 8 begins (aligned to 16
// bytes), and gets elements 2 * (i % 4) and the next of row i / 4 of each (PTX ISA, ldmatrix).
__device__ inline void load_matrices(u32 (&to)[4], const u16* row) {
  u32 address = (u32)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// The same, but of each matrix transposed.
__device__ inline void load_matrices_transposed(u32 (&to)[4], const u16* row) {
  u32 address = (u32)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// c += a b, of 16 x 16 halves and 16 x 8 halves, with sums in binary32 (PTX ISA, mma.m16n8k16). Of lane i, with
// g = i / 4 and t = 2 * (i % 4): a has rows g, g + 8, g, g + 8 at columns t, t, t + 8, t + 8 and the next one of each;
// b has rows t and t + 8 and the next one of each at column g; c has rows g and g + 8 at columns t and t + 1.
__device__ inline void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

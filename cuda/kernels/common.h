// Elements of all types, division by constants, sums over a block.
#pragma once

#include <device.h>

// As lowering::plan::Type, in its order.
enum Type { F32, F16, I64, I32, U8, BOOL };

// Truncates to the nearest in range; NaN becomes 0.
__device__ inline i64 integer_of_float(float value) {
  if (value != value) return 0;
  if (value >= 9223372036854775808.0f) return 0x7fffffffffffffffLL;
  if (value <= -9223372036854775808.0f) return -0x7fffffffffffffffLL - 1;
  return (i64)value;
}

__device__ inline i64 clamped(i64 value, i64 least, i64 most) {
  return value < least ? least : value > most ? most : value;
}

// Integers are loaded and stored as integers, and go through i64.
template <typename T> __device__ T load(const void* base, int type, i64 at);

OUTLINED i64 load_integer(const void* base, int type, i64 at) {
  switch (type) {
    case I64: return ((const i64*)base)[at];
    case I32: return ((const int*)base)[at];
    case U8: return ((const u8*)base)[at];
    default: return ((const u8*)base)[at] != 0;
  }
}

OUTLINED void store_integer(void* base, int type, i64 at, i64 value) {
  switch (type) {
    case I64: ((i64*)base)[at] = value; break;
    case I32: ((int*)base)[at] = (int)value; break;
    case U8: ((u8*)base)[at] = (u8)value; break;
    default: ((u8*)base)[at] = value != 0;
  }
}

OUTLINED void store_truncated(void* base, int type, i64 at, float value) {
  i64 integer = integer_of_float(value);
  if (type == I32) integer = clamped(integer, -0x80000000LL, 0x7fffffffLL);
  if (type == U8) integer = clamped(integer, 0, 255);
  if (type == BOOL) integer = value != 0.0f;
  store_integer(base, type, at, integer);
}

template <> __device__ inline float load<float>(const void* base, int type, i64 at) {
  if (type == F32) return ((const float*)base)[at];
  if (type == F16) return float_of_half(((const u16*)base)[at]);
  return (float)load_integer(base, type, at);
}

template <> __device__ inline i64 load<i64>(const void* base, int type, i64 at) {
  if (type == F32 || type == F16) return integer_of_float(load<float>(base, type, at));
  return load_integer(base, type, at);
}

__device__ inline void store(void* base, int type, i64 at, float value) {
  if (type == F32) {
    ((float*)base)[at] = value;
  } else if (type == F16) {
    ((u16*)base)[at] = half_of_float(value);
  } else {
    store_truncated(base, type, at, value);
  }
}

__device__ inline void store(void* base, int type, i64 at, i64 value) {
  if (type == F32 || type == F16) {
    store(base, type, at, (float)value);
  } else {
    store_integer(base, type, at, value);
  }
}

// Four elements at once, of an address that is a multiple of their size.
struct __align__(16) Words4 { u32 x, y, z, w; };
struct __align__(8) Words2 { u32 x, y; };

__device__ inline float float_of_bits(u32 bits) {
  union { u32 bits; float value; } same = {bits};
  return same.value;
}

__device__ inline u32 bits_of_float(float value) {
  union { float value; u32 bits; } same = {value};
  return same.bits;
}

__device__ inline void load4(float (&to)[4], const void* base, int type, i64 at) {
  if (type == F32) {
    Words4 words = *(const Words4*)((const float*)base + at);
    to[0] = float_of_bits(words.x);
    to[1] = float_of_bits(words.y);
    to[2] = float_of_bits(words.z);
    to[3] = float_of_bits(words.w);
  } else if (type == F16) {
    Words2 words = *(const Words2*)((const u16*)base + at);
    to[0] = float_of_half((u16)words.x);
    to[1] = float_of_half((u16)(words.x >> 16));
    to[2] = float_of_half((u16)words.y);
    to[3] = float_of_half((u16)(words.y >> 16));
  } else if (type == U8) {
    u32 bytes = *(const u32*)((const u8*)base + at);
#pragma unroll
    for (int v = 0; v < 4; v++) to[v] = (float)(bytes >> (8 * v) & 255);
  } else {
#pragma unroll
    for (int v = 0; v < 4; v++) to[v] = load<float>(base, type, at + v);
  }
}

__device__ inline u32 pair_of_floats(float low, float high) {
  return half_of_float(low) | (u32)half_of_float(high) << 16;
}

__device__ inline void store4(void* base, int type, i64 at, const float (&values)[4]) {
  if (type == F32) {
    Words4 words = {bits_of_float(values[0]), bits_of_float(values[1]), bits_of_float(values[2]),
                    bits_of_float(values[3])};
    *(Words4*)((float*)base + at) = words;
  } else if (type == F16) {
    Words2 words = {pair_of_floats(values[0], values[1]), pair_of_floats(values[2], values[3])};
    *(Words2*)((u16*)base + at) = words;
  } else {
#pragma unroll
    for (int v = 0; v < 4; v++) store(base, type, at + v, values[v]);
  }
}

// Of V = 1 or 4 elements.
__device__ inline void load_some(float (&to)[4], const void* base, int type, i64 at) { load4(to, base, type, at); }
__device__ inline void load_some(float (&to)[1], const void* base, int type, i64 at) {
  to[0] = load<float>(base, type, at);
}
__device__ inline void store_some(void* base, int type, i64 at, const float (&from)[4]) {
  store4(base, type, at, from);
}
__device__ inline void store_some(void* base, int type, i64 at, const float (&from)[1]) {
  store(base, type, at, from[0]);
}

// n / divisor = (n * multiplier / 2^32 + n) >> shift, for n below 2^31 (Granlund and Montgomery, figure 4.1).
struct Divisor {
  u32 divisor, multiplier, shift;
};

// Divides what is at `n`, and yields the remainder.
__device__ inline u32 split(u32& n, const Divisor& by) {
  u32 quotient = ((u32)(((u64)n * by.multiplier) >> 32) + n) >> by.shift;
  u32 remainder = n - quotient * by.divisor;
  n = quotient;
  return remainder;
}

struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Larger {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <typename T, typename Combine> __device__ inline T over_warp(T value, Combine combine) {
#pragma unroll
  for (int bits = 16; bits > 0; bits /= 2) value = combine(value, shuffle_xor(value, bits));
  return value;
}

// Over the threads of a row: a warp, or all of the block's, which has at most 8 warps. All threads of the block take
// part, and all of a row get the result.
template <typename T, typename Combine>
__device__ inline T over_row(T value, bool is_warp, T (&room)[8], Combine combine) {
  value = over_warp(value, combine);
  if (is_warp) return value;
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
  __syncthreads();
  value = room[0];
  for (u32 warp = 1; warp < blockDim.x / 32; warp++) value = combine(value, room[warp]);
  __syncthreads();
  return value;
}

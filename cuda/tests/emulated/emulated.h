// A GPU that is none: libcuda, cuBLASLt and cuDNN as NVIDIA's documentation describes them, as far as the driver calls
// them, on host memory. What a GPU would leave to chance goes wrong as often as it can.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <functional>

typedef uint64_t u64;
typedef int64_t i64;
typedef uint32_t u32;

namespace emulated {
// So many more objects of a kind live; whatever lives when the process ends has leaked.
void count(const char* what, int by);
// Puts work on a stream, or into what is captured from it. A CUresult.
int put(void* stream, std::function<void()> work);
}

// Numbers of the two types that are computed with.
static inline float load(const void* at, bool is_half, i64 index) {
  return is_half ? (float)((const _Float16*)at)[index] : ((const float*)at)[index];
}
static inline void store(void* at, bool is_half, i64 index, float value) {
  if (is_half) ((_Float16*)at)[index] = (_Float16)value;
  else ((float*)at)[index] = value;
}
// As a tensor core takes binary32: 10 bits of fraction.
static inline float tf32(float value) {
  union { float f; u32 u; } bits = {value};
  bits.u = (bits.u + 0x1000) & ~0x1fffu;
  return bits.f;
}
static inline double dot(const float* a, const float* b, i64 length) {
  double sum = 0;
  for (i64 i = 0; i < length; i++) sum += (double)a[i] * b[i];
  return sum;
}

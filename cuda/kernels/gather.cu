// lowering::plan::Gather: rows of bytes, copied in units of what they are aligned to.

#include "common.h"

struct Gather {
  const void* input;
  const void* indices;
  void* output;
  // One for each task; none if the indices are the model's own.
  u32* faults;
  int index_type;
  // Bytes copied at once.
  u32 unit;
  u32 length, indices_per_task;
  // Units of a row, then rows of a copy.
  Divisor lengths[2];
  u32 count;
};

template <typename T> __device__ inline void copy(void* output, const void* input, u32 to, i64 from, bool is_there) {
  ((T*)output)[to] = is_there ? ((const T*)input)[from] : T();
}

KERNEL(gather, Gather, 256) {
  u32 thread = blockIdx.x * blockDim.x + threadIdx.x, rest = thread;
  if (rest >= p.count) return;
  u32 unit = split(rest, p.lengths[0]), j = split(rest, p.lengths[1]), outer = rest;
  i64 index = load<i64>(p.indices, p.index_type, j);
  if (index < 0) index += p.length;
  bool is_there = index >= 0 && index < p.length;
  if (!is_there && p.faults && unit == 0 && outer == 0) p.faults[j / p.indices_per_task] = 1;
  i64 from = ((i64)outer * p.length + index) * p.lengths[0].divisor + unit;
  switch (p.unit) {
    case 16: copy<Words4>(p.output, p.input, thread, from, is_there); break;
    case 8: copy<Words2>(p.output, p.input, thread, from, is_there); break;
    case 4: copy<u32>(p.output, p.input, thread, from, is_there); break;
    case 2: copy<u16>(p.output, p.input, thread, from, is_there); break;
    default: copy<u8>(p.output, p.input, thread, from, is_there);
  }
}

// lowering::plan::{Reduce, Softmax, Norm}. A row has a warp, or a block if it is long; what is read more than once
// comes from the caches.

#include "common.h"

// As lowering::plan::Reduction, in its order.
enum Reduction { SUM, MEAN, MEAN_OF_SQUARES, PRODUCT, MAX, MIN, ARG_MAX, ARG_MIN };

struct Reduce {
  const void* input;
  void* output;
  int input_type, output_type, reduction, threads;
  u32 outer, length, inner;
};

// Of some elements. `index` is that of the value, negative while there is none.
template <typename T> struct Partial {
  T value;
  int index;
};

template <typename T> __device__ inline Partial<T> combined(Partial<T> a, Partial<T> b, int reduction) {
  if (b.index < 0) return a;
  if (a.index < 0) return b;
  bool is_better = reduction == ARG_MAX ? b.value > a.value : b.value < a.value;
  switch (reduction) {
    case PRODUCT: a.value = a.value * b.value; return a;
    case MAX: a.value = a.value > b.value || b.value != b.value ? a.value : b.value; return a;
    case MIN: a.value = a.value < b.value || b.value != b.value ? a.value : b.value; return a;
    case ARG_MAX:
    case ARG_MIN: return is_better || (a.value == b.value && b.index < a.index) ? b : a;
    default: a.value = a.value + b.value; return a;
  }
}

// Integers wrap.
template <> __device__ inline Partial<i64> combined(Partial<i64> a, Partial<i64> b, int reduction) {
  if (b.index < 0) return a;
  if (a.index < 0) return b;
  bool is_better = reduction == ARG_MAX ? b.value > a.value : b.value < a.value;
  switch (reduction) {
    case PRODUCT: a.value = (i64)((u64)a.value * (u64)b.value); return a;
    case MAX: a.value = a.value > b.value ? a.value : b.value; return a;
    case MIN: a.value = a.value < b.value ? a.value : b.value; return a;
    case ARG_MAX:
    case ARG_MIN: return is_better || (a.value == b.value && b.index < a.index) ? b : a;
    default: a.value = (i64)((u64)a.value + (u64)b.value); return a;
  }
}

template <typename T> __device__ inline Partial<T> element(const Reduce& p, u32 outer, u32 j, u32 inner) {
  i64 at = ((i64)outer * p.length + j) * p.inner + inner;
  Partial<T> partial = {load<T>(p.input, p.input_type, at), (int)j};
  if (p.reduction == MEAN_OF_SQUARES) partial.value = (T)(partial.value * partial.value);
  return partial;
}

template <typename T> __device__ inline void finish(const Reduce& p, u32 result, Partial<T> partial) {
  if (p.reduction == ARG_MAX || p.reduction == ARG_MIN) {
    store(p.output, p.output_type, result, (i64)partial.index);
    return;
  }
  if (p.reduction == MEAN || p.reduction == MEAN_OF_SQUARES) partial.value = partial.value / (T)p.length;
  store(p.output, p.output_type, result, partial.value);
}

template <typename T> __device__ inline Partial<T> shuffled(Partial<T> partial, int bits) {
  Partial<T> other = {shuffle_xor(partial.value, bits), shuffle_xor(partial.index, bits)};
  return other;
}

// Dense rows: inner is 1.
template <typename T> __device__ inline void reduce_row(const Reduce& p) {
  __shared__ Partial<T> room[8];
  u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / p.threads;
  Partial<T> partial = {0, -1};
  if (row < p.outer) {
    for (u32 j = threadIdx.x % p.threads; j < p.length; j += p.threads) {
      partial = combined(partial, element<T>(p, row, j, 0), p.reduction);
    }
  }
#pragma unroll
  for (int bits = 16; bits > 0; bits /= 2) partial = combined(partial, shuffled(partial, bits), p.reduction);
  if (p.threads > 32) {
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = partial;
    __syncthreads();
    for (u32 warp = 1; warp < 8 && threadIdx.x == 0; warp++) partial = combined(partial, room[warp], p.reduction);
  }
  if (row < p.outer && threadIdx.x % p.threads == 0) finish(p, row, partial);
}

KERNEL(reduce_rows_float, Reduce, 256) { reduce_row<float>(p); }
KERNEL(reduce_rows_integer, Reduce, 256) { reduce_row<i64>(p); }

// 32 columns a block, whose eight warps share the length.
template <typename T> __device__ inline void reduce_column(const Reduce& p) {
  __shared__ Partial<T> room[8][32];
  u32 x = threadIdx.x % 32, y = threadIdx.x / 32;
  u32 blocks = (p.inner + 31) / 32;
  u32 outer = blockIdx.x / blocks, inner = blockIdx.x % blocks * 32 + x;
  Partial<T> partial = {0, -1};
  if (inner < p.inner) {
    for (u32 j = y; j < p.length; j += 8) {
      partial = combined(partial, element<T>(p, outer, j, inner), p.reduction);
    }
  }
  room[y][x] = partial;
  __syncthreads();
  if (y > 0 || inner >= p.inner) return;
  for (u32 warp = 1; warp < 8; warp++) partial = combined(partial, room[warp][x], p.reduction);
  finish(p, outer * p.inner + inner, partial);
}

KERNEL(reduce_columns_float, Reduce, 256) { reduce_column<float>(p); }
KERNEL(reduce_columns_integer, Reduce, 256) { reduce_column<i64>(p); }

struct Softmax {
  const void* input;
  void* output;
  int type, threads;
  u32 rows, columns;
  float scale;
  int is_log;
};

// The largest is found together with the sum of powers, which is scaled whenever there is a larger one (Milakov and
// Gimelshein, algorithm 3).
KERNEL(softmax_rows, Softmax, 256) {
  __shared__ float room[8];
  bool is_warp = p.threads == 32;
  u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / p.threads;
  u32 first = threadIdx.x % p.threads, columns = row < p.rows ? p.columns : 0;
  i64 at = (i64)row * p.columns;
  float largest = -INFINITY, sum = 0;
  for (u32 j = first; j < columns; j += p.threads) {
    float score = p.scale * load<float>(p.input, p.type, at + j);
    if (score > largest) {
      sum *= expf(largest - score);
      largest = score;
    }
    if (score != -INFINITY) sum += expf(score - largest);
  }
  float all = over_row(largest, is_warp, room, Larger());
  sum = over_row(largest == -INFINITY ? sum : sum * expf(largest - all), is_warp, room, Add());
  bool is_empty = all == -INFINITY && sum == 0;
  float log_sum = logf(sum), factor = 1.0f / sum;
  for (u32 j = first; j < columns; j += p.threads) {
    float score = p.scale * load<float>(p.input, p.type, at + j);
    float value = p.is_log ? score - all - log_sum : expf(score - all) * factor;
    if (is_empty) value = p.is_log ? -INFINITY : 0.0f;
    store(p.output, p.type, at + j, value);
  }
}

struct Norm {
  const void *input, *residual, *scale, *shift;
  void *sum, *output;
  int type, scale_type, shift_type, threads;
  u32 rows, columns;
  float epsilon;
  int is_rms;
};

// V elements of a row, with the residual.
template <int V> __device__ inline void load_terms(float (&to)[V], const Norm& p, i64 at) {
  load_some(to, p.input, p.type, at);
  if (!p.residual) return;
  float residual[V];
  load_some(residual, p.residual, p.type, at);
#pragma unroll
  for (int v = 0; v < V; v++) to[v] += residual[v];
}

template <int V> __device__ inline void normalise(const Norm& p) {
  __shared__ float room[8];
  bool is_warp = p.threads == 32;
  u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / p.threads;
  u32 first = threadIdx.x % p.threads * V, step = p.threads * V, columns = row < p.rows ? p.columns : 0;
  i64 at = (i64)row * p.columns;
  float mean = 0, sum = 0, squares = 0, x[V], vector[V];
  for (u32 j = first; j < columns && !p.is_rms; j += step) {
    load_terms(x, p, at + j);
#pragma unroll
    for (int v = 0; v < V; v++) sum += x[v];
  }
  if (!p.is_rms) mean = over_row(sum, is_warp, room, Add()) / p.columns;
  for (u32 j = first; j < columns; j += step) {
    load_terms(x, p, at + j);
#pragma unroll
    for (int v = 0; v < V; v++) squares = fmaf(x[v] - mean, x[v] - mean, squares);
  }
  float factor = 1.0f / sqrtf(over_row(squares, is_warp, room, Add()) / p.columns + p.epsilon);
  for (u32 j = first; j < columns; j += step) {
    load_terms(x, p, at + j);
    if (p.sum) store_some(p.sum, p.type, at + j, x);
#pragma unroll
    for (int v = 0; v < V; v++) x[v] = (x[v] - mean) * factor;
    if (p.scale) load_some(vector, p.scale, p.scale_type, j);
#pragma unroll
    for (int v = 0; v < V && p.scale; v++) x[v] *= vector[v];
    if (p.shift) load_some(vector, p.shift, p.shift_type, j);
#pragma unroll
    for (int v = 0; v < V && p.shift; v++) x[v] += vector[v];
    store_some(p.output, p.type, at + j, x);
  }
}

KERNEL(norm_rows, Norm, 256) { normalise<1>(p); }
KERNEL(norm_rows_dense, Norm, 256) { normalise<4>(p); }

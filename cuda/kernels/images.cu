// lowering::plan::{Pool, Resize}, and Conv of many groups, on NHWC images: channels are what neighbouring threads have.

#include "common.h"

// Positions of the output, the last dimension first: channels (or groups of four), x, y; the rest is the image.
struct Positions {
  Divisor lengths[3];
  u32 count;
};

struct Position {
  u32 n, y, x, c;
};

__device__ inline bool position_of(const Positions& positions, Position& to) {
  u32 rest = blockIdx.x * blockDim.x + threadIdx.x;
  if (rest >= positions.count) return false;
  to.c = split(rest, positions.lengths[0]);
  to.x = split(rest, positions.lengths[1]);
  to.y = split(rest, positions.lengths[2]);
  to.n = rest;
  return true;
}

// Height and width, as in the plan.
struct Window {
  int size[2], kernel[2], strides[2], dilations[2], pads[2];
};

// The first element of the pixel that element (r, s) of a window sees, or a negative number if it lies outside.
__device__ inline i64 pixel(const Window& window, const Position& at, int r, int s, u32 channels) {
  int y = (int)at.y * window.strides[0] + r * window.dilations[0] - window.pads[0];
  int x = (int)at.x * window.strides[1] + s * window.dilations[1] - window.pads[1];
  if (y < 0 || y >= window.size[0] || x < 0 || x >= window.size[1]) return -1;
  return (((i64)at.n * window.size[0] + y) * window.size[1] + x) * channels;
}

// As lowering::plan::PoolKind, in its order.
enum PoolKind { MAX, AVERAGE, AVERAGE_PADDED };

struct Pool {
  const void* input;
  void* output;
  int type, kind;
  u32 channels;
  Window window;
  Positions positions;
};

template <int V> __device__ inline void pool(const Pool& p) {
  Position at;
  if (!position_of(p.positions, at)) return;
  float values[V], result[V];
#pragma unroll
  for (int v = 0; v < V; v++) result[v] = p.kind == MAX ? -INFINITY : 0.0f;
  int inside = 0;
  for (int r = 0; r < p.window.kernel[0]; r++) {
    for (int s = 0; s < p.window.kernel[1]; s++) {
      i64 from = pixel(p.window, at, r, s, p.channels);
      if (from < 0) continue;
      inside++;
      load_some(values, p.input, p.type, from + at.c * V);
#pragma unroll
      for (int v = 0; v < V; v++) result[v] = p.kind == MAX ? fmaxf(result[v], values[v]) : result[v] + values[v];
    }
  }
  int count = p.kind == AVERAGE ? inside : p.window.kernel[0] * p.window.kernel[1];
#pragma unroll
  for (int v = 0; v < V; v++) {
    if (p.kind != MAX) result[v] = inside == 0 ? 0.0f : result[v] / count;
  }
  u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
  store_some(p.output, p.type, (i64)thread * V, result);
}

KERNEL(pool_dense, Pool, 256) { pool<4>(p); }
KERNEL(pool, Pool, 256) { pool<1>(p); }

// As lowering::plan::ResizeKind, in its order.
enum ResizeKind { FLOOR, CEIL, NEAREST_LOW, NEAREST_HIGH, LINEAR };

struct Resize {
  const void* input;
  void* output;
  int type, kind;
  u32 channels;
  int size[2];
  float offset[2], scale[2], shift[2];
  Positions positions;
};

struct Neighbours {
  int first, second;
  float share;
};

// Each operation is rounded by itself: a position between two elements must not depend on how it is computed.
__device__ inline Neighbours neighbours(const Resize& p, int dimension, u32 index) {
  float last = (float)(p.size[dimension] - 1);
  float position = ((float)index + p.offset[dimension]) * p.scale[dimension];
  position = fminf(fmaxf(position - p.shift[dimension], 0.0f), last);
  float first;
  switch (p.kind) {
    case CEIL: first = ceilf(position); break;
    case NEAREST_LOW: first = ceilf(position - 0.5f); break;
    case NEAREST_HIGH: first = floorf(position + 0.5f); break;
    default: first = floorf(position);
  }
  first = fminf(fmaxf(first, 0.0f), last);
  Neighbours found = {(int)first, (int)fminf(first + 1.0f, last), position - first};
  return found;
}

KERNEL(resize, Resize, 256) {
  Position at;
  if (!position_of(p.positions, at)) return;
  Neighbours y = neighbours(p, 0, at.y), x = neighbours(p, 1, at.x);
  i64 top = ((i64)at.n * p.size[0] + y.first) * p.size[1], bottom = ((i64)at.n * p.size[0] + y.second) * p.size[1];
  float value = load<float>(p.input, p.type, (top + x.first) * p.channels + at.c);
  if (p.kind == LINEAR) {
    float top_right = load<float>(p.input, p.type, (top + x.second) * p.channels + at.c);
    float bottom_left = load<float>(p.input, p.type, (bottom + x.first) * p.channels + at.c);
    float bottom_right = load<float>(p.input, p.type, (bottom + x.second) * p.channels + at.c);
    float above = value * (1.0f - x.share) + top_right * x.share;
    float below = bottom_left * (1.0f - x.share) + bottom_right * x.share;
    value = above * (1.0f - y.share) + below * y.share;
  }
  store(p.output, p.type, blockIdx.x * blockDim.x + threadIdx.x, value);
}

struct Conv {
  const void *input, *weights, *bias, *residual;
  void* output;
  int is_relu;
  // Of the input, of a group of it, of a group of the output.
  u32 channels, group_inputs, group_outputs;
  Window window;
  Positions positions;
};

template <int V> __device__ inline void finish(const Conv& p, int type, u32 channel, float (&sums)[V]) {
  float values[V];
  i64 at = (i64)(blockIdx.x * blockDim.x + threadIdx.x) * V;
  if (p.bias) {
    load_some(values, p.bias, type, channel);
#pragma unroll
    for (int v = 0; v < V; v++) sums[v] += values[v];
  }
  if (p.residual) {
    load_some(values, p.residual, type, at);
#pragma unroll
    for (int v = 0; v < V; v++) sums[v] += values[v];
  }
#pragma unroll
  for (int v = 0; v < V; v++) sums[v] = p.is_relu ? fmaxf(sums[v], 0.0f) : sums[v];
  store_some(p.output, type, at, sums);
}

// As many groups as channels of input and output: four of them a thread.
template <int TYPE> __device__ inline void depthwise(const Conv& p) {
  Position at;
  if (!position_of(p.positions, at)) return;
  u32 channel = at.c * 4;
  int filter = p.window.kernel[0] * p.window.kernel[1];
  float sums[4] = {}, values[4];
  for (int r = 0; r < p.window.kernel[0]; r++) {
    for (int s = 0; s < p.window.kernel[1]; s++) {
      i64 from = pixel(p.window, at, r, s, p.channels);
      if (from < 0) continue;
      load4(values, p.input, TYPE, from + channel);
      i64 weight = (i64)channel * filter + r * p.window.kernel[1] + s;
#pragma unroll
      for (int v = 0; v < 4; v++) {
        sums[v] = fmaf(values[v], load<float>(p.weights, TYPE, weight + v * filter), sums[v]);
      }
    }
  }
  finish<4>(p, TYPE, channel, sums);
}

KERNEL(conv_depthwise_f32, Conv, 256) { depthwise<F32>(p); }
KERNEL(conv_depthwise_f16, Conv, 256) { depthwise<F16>(p); }

// Any number of groups, an element of the output a thread.
template <int TYPE> __device__ inline void grouped(const Conv& p) {
  Position at;
  if (!position_of(p.positions, at)) return;
  u32 first = at.c / p.group_outputs * p.group_inputs;
  i64 weight = (i64)at.c * p.window.kernel[0] * p.window.kernel[1] * p.group_inputs;
  float sums[1] = {};
  for (int r = 0; r < p.window.kernel[0]; r++) {
    for (int s = 0; s < p.window.kernel[1]; s++, weight += p.group_inputs) {
      i64 from = pixel(p.window, at, r, s, p.channels);
      if (from < 0) continue;
      for (u32 c = 0; c < p.group_inputs; c++) {
        float value = load<float>(p.input, TYPE, from + first + c);
        sums[0] = fmaf(value, load<float>(p.weights, TYPE, weight + c), sums[0]);
      }
    }
  }
  finish<1>(p, TYPE, at.c, sums);
}

KERNEL(conv_grouped_f32, Conv, 256) { grouped<F32>(p); }
KERNEL(conv_grouped_f16, Conv, 256) { grouped<F16>(p); }

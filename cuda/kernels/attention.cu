// lowering::plan::Attention in one pass over the keys: shares are scaled as larger scores turn up, so no matrix of
// scores is ever stored (Dao, FlashAttention-2, algorithm 1).

#include "common.h"

// Strides over batch, head, position.
struct View {
  void* base;
  i64 strides[3];
};

struct Attention {
  View query, key, value, output;
  const void* mask;
  i64 mask_strides[4];
  int mask_type;
  u32 heads, queries, keys, width;
  float scale;
  int is_causal;
  // Blocks of queries of one head.
  u32 tiles;
  // Whether vectors begin at multiples of 16 bytes and end at them.
  int is_aligned;
};

struct Head {
  u32 batch, head, tile;
};

__device__ inline Head head_of_block(const Attention& p) {
  u32 rest = blockIdx.x / p.tiles;
  Head head = {rest / p.heads, rest % p.heads, blockIdx.x % p.tiles};
  return head;
}

__device__ inline i64 start(const View& view, const Head& head) {
  return head.batch * view.strides[0] + head.head * view.strides[1];
}

// The keys that a query sees are those below.
__device__ inline int limit(const Attention& p, u32 query) {
  if (query >= p.queries) return 0;
  int last = (int)query + (int)p.keys - (int)p.queries + 1;
  return p.is_causal && last < (int)p.keys ? last : (int)p.keys;
}

__device__ inline float mask(const Attention& p, const Head& head, u32 query, u32 key) {
  if (!p.mask) return 0.0f;
  i64 at = head.batch * p.mask_strides[0] + head.head * p.mask_strides[1] + query * p.mask_strides[2];
  at += key * p.mask_strides[3];
  return p.mask_type == F32 ? ((const float*)p.mask)[at] : float_of_half(((const u16*)p.mask)[at]);
}

// Binary32: a warp has a query, a lane one of 32 keys while scores are made, and up to four elements of the result.
KERNEL(attention_f32, Attention, 256) {
  const int WARPS = 8, WIDTH = 128;
  __shared__ float queries[WARPS][WIDTH], keys[32][WIDTH + 1], values[32][WIDTH];
  Head head = head_of_block(p);
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, query = head.tile * WARPS + warp;
  const float* query_base = (const float*)p.query.base + start(p.query, head);
  const float* key_base = (const float*)p.key.base + start(p.key, head);
  const float* value_base = (const float*)p.value.base + start(p.value, head);
  for (u32 i = lane; i < p.width && query < p.queries; i += 32) {
    queries[warp][i] = query_base[query * p.query.strides[2] + i];
  }
  u32 last = min(head.tile * WARPS + WARPS, p.queries) - 1;
  int seen = limit(p, query), end = limit(p, last);
  float largest = -INFINITY, sum = 0, result[4] = {};
  for (int first = 0; first < end; first += 32) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < 32 * p.width; i += 256) {
      u32 row = i / p.width, column = i % p.width, key = first + row;
      keys[row][column] = key < p.keys ? key_base[key * p.key.strides[2] + column] : 0.0f;
      values[row][column] = key < p.keys ? value_base[key * p.value.strides[2] + column] : 0.0f;
    }
    __syncthreads();
    int key = first + (int)lane;
    float score = -INFINITY;
    if (key < seen) {
      float product = 0;
      for (u32 i = 0; i < p.width; i++) product = fmaf(queries[warp][i], keys[lane][i], product);
      score = fmaf(p.scale, product, mask(p, head, query, key));
    }
    float next = fmaxf(largest, over_warp(score, Larger()));
    float base = next == -INFINITY ? 0.0f : next;
    float share = expf(score - base), factor = expf(largest - base);
    sum = sum * factor + over_warp(share, Add());
    largest = next;
#pragma unroll
    for (int i = 0; i < 4; i++) result[i] *= factor;
    for (int j = 0; j < 32; j++) {
      float part = shuffle(share, j);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 column = lane + 32 * i;
        if (column < p.width) result[i] = fmaf(part, values[j][column], result[i]);
      }
    }
  }
  if (query >= p.queries) return;
  float* to = (float*)p.output.base + start(p.output, head) + query * p.output.strides[2];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 column = lane + 32 * i;
    if (column < p.width) to[column] = sum == 0 ? 0.0f : result[i] / sum;
  }
}

// Rows of 64 vectors, from `first` on, into shared memory; what is missing is zero.
template <int WIDTH>
__device__ inline void load_tile(u16 (*to)[WIDTH + 8], const u16* base, i64 stride, u32 first, const Attention& p) {
  for (u32 i = threadIdx.x; i < 64 * WIDTH / 8; i += 128) {
    u32 row = i / (WIDTH / 8), column = i % (WIDTH / 8) * 8;
    bool is_there = first + row < p.keys;
    const u16* from = base + (first + row) * stride + column;
    if (p.is_aligned) {
      Words4 none = {0, 0, 0, 0};
      *(Words4*)&to[row][column] = is_there && column < p.width ? *(const Words4*)from : none;
    } else {
      for (u32 e = 0; e < 8; e++) to[row][column + e] = is_there && column + e < p.width ? from[e] : (u16)0;
    }
  }
}

__device__ inline u32 pair(const u16* vector, u32 column, bool is_there, u32 width) {
  u32 low = is_there && column < width ? vector[column] : 0;
  u32 high = is_there && column + 1 < width ? vector[column + 1] : 0;
  return low | high << 16;
}

// Binary16 in tensor cores, sums in binary32: four warps of 16 queries each, 64 keys at a time. Of the tiles of 16 x 8
// that a warp multiplies, a lane has rows `lane / 4` and that plus 8, which are queries, at columns `2 * (lane % 4)`
// and the next: elements 0 and 1 of the first row, 2 and 3 of the second.

// Of a lane's two queries.
struct Running {
  float largest[2], sums[2];
};

template <int WIDTH>
__device__ inline void load_queries(u32 (&to)[WIDTH / 16][4], const Attention& p, const Head& head,
                                    const u32 (&rows)[2]) {
  const u16* base = (const u16*)p.query.base + start(p.query, head);
  u32 column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int step = 0; step < WIDTH / 16; step++) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
      u32 row = rows[part % 2];
      const u16* vector = base + row * p.query.strides[2];
      to[step][part] = pair(vector, step * 16 + column + part / 2 * 8, row < p.queries, p.width);
    }
  }
}

// Products of 16 queries and 64 keys.
template <int WIDTH>
__device__ inline void multiply_keys(float (&scores)[8][4], const u32 (&query)[WIDTH / 16][4],
                                     const u16 (*keys)[WIDTH + 8]) {
  u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < WIDTH / 16; step++) {
#pragma unroll
    for (int tile = 0; tile < 8; tile += 2) {
      u32 b[4];
      load_matrices(b, &keys[tile * 8 + lane / 16 * 8 + lane % 8][step * 16 + lane / 8 % 2 * 8]);
      multiply(scores[tile], query[step], b[0], b[1]);
      multiply(scores[tile + 1], query[step], b[2], b[3]);
    }
  }
}

// Makes scores of products: scaled, masked, and nothing for keys that are not seen.
__device__ inline void mask_scores(float (&scores)[8][4], const Attention& p, const Head& head, const u32 (&rows)[2],
                                   int first) {
  int column = threadIdx.x % 4 * 2;
  int seen[2] = {limit(p, rows[0]), limit(p, rows[1])};
#pragma unroll
  for (int tile = 0; tile < 8; tile++) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
      int row = part / 2, key = first + tile * 8 + column + part % 2;
      float score = -INFINITY;
      if (key < seen[row]) score = fmaf(p.scale, scores[tile][part], mask(p, head, rows[row], key));
      scores[tile][part] = score;
    }
  }
}

// Makes powers of scores, and scales what is there to the largest score so far.
template <int TILES>
__device__ inline void scale_to_largest(float (&scores)[8][4], Running& running, float (&result)[TILES][4]) {
#pragma unroll
  for (int row = 0; row < 2; row++) {
    float next = running.largest[row];
#pragma unroll
    for (int tile = 0; tile < 8; tile++) {
      next = fmaxf(next, fmaxf(scores[tile][2 * row], scores[tile][2 * row + 1]));
    }
    next = fmaxf(next, shuffle_xor(next, 1));
    next = fmaxf(next, shuffle_xor(next, 2));
    float base = next == -INFINITY ? 0.0f : next, factor = expf(running.largest[row] - base);
    running.largest[row] = next;
    running.sums[row] *= factor;
#pragma unroll
    for (int tile = 0; tile < 8; tile++) {
#pragma unroll
      for (int part = 2 * row; part < 2 * row + 2; part++) {
        scores[tile][part] = expf(scores[tile][part] - base);
        running.sums[row] += scores[tile][part];
      }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      result[tile][2 * row] *= factor;
      result[tile][2 * row + 1] *= factor;
    }
  }
}

// Adds 64 values, by their shares. What a lane has of two neighbouring tiles of shares is what it must have of the left
// factor.
template <int WIDTH>
__device__ inline void add_values(float (&result)[WIDTH / 8][4], const float (&shares)[8][4],
                                  const u16 (*values)[WIDTH + 8]) {
  u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < 4; step++) {
    const float(&left)[4] = shares[2 * step], (&right)[4] = shares[2 * step + 1];
    u32 a[4] = {pair_of_floats(left[0], left[1]), pair_of_floats(left[2], left[3]),
                pair_of_floats(right[0], right[1]), pair_of_floats(right[2], right[3])};
#pragma unroll
    for (int tile = 0; tile < WIDTH / 8; tile += 2) {
      u32 b[4];
      load_matrices_transposed(b, &values[step * 16 + lane / 8 % 2 * 8 + lane % 8][tile * 8 + lane / 16 * 8]);
      multiply(result[tile], a, b[0], b[1]);
      multiply(result[tile + 1], a, b[2], b[3]);
    }
  }
}

template <int TILES>
__device__ inline void store_results(const Attention& p, const Head& head, const u32 (&rows)[2], const Running& running,
                                     const float (&result)[TILES][4]) {
#pragma unroll
  for (int row = 0; row < 2; row++) {
    float sum = running.sums[row] + shuffle_xor(running.sums[row], 1);
    sum += shuffle_xor(sum, 2);
    u16* to = (u16*)p.output.base + start(p.output, head) + rows[row] * p.output.strides[2];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
      for (int part = 0; part < 2; part++) {
        u32 at = tile * 8 + threadIdx.x % 4 * 2 + part;
        if (rows[row] >= p.queries || at >= p.width) continue;
        to[at] = half_of_float(sum == 0 ? 0.0f : result[tile][2 * row + part] / sum);
      }
    }
  }
}

template <int WIDTH> __device__ inline void attend(const Attention& p) {
  __shared__ __align__(16) u16 keys[64][WIDTH + 8], values[64][WIDTH + 8];
  Head head = head_of_block(p);
  u32 top = head.tile * 64 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, rows[2] = {top, top + 8};
  const u16* key_base = (const u16*)p.key.base + start(p.key, head);
  const u16* value_base = (const u16*)p.value.base + start(p.value, head);
  u32 query[WIDTH / 16][4];
  load_queries<WIDTH>(query, p, head, rows);
  Running running = {{-INFINITY, -INFINITY}, {0, 0}};
  float result[WIDTH / 8][4] = {};
  int end = limit(p, min(head.tile * 64 + 64, p.queries) - 1);
  for (int first = 0; first < end; first += 64) {
    __syncthreads();
    load_tile<WIDTH>(keys, key_base, p.key.strides[2], first, p);
    load_tile<WIDTH>(values, value_base, p.value.strides[2], first, p);
    __syncthreads();
    float scores[8][4] = {};
    multiply_keys<WIDTH>(scores, query, keys);
    mask_scores(scores, p, head, rows, first);
    scale_to_largest(scores, running, result);
    add_values<WIDTH>(result, scores, values);
  }
  store_results(p, head, rows, running, result);
}

KERNEL(attention_f16_64, Attention, 128) { attend<64>(p); }
KERNEL(attention_f16_128, Attention, 128) { attend<128>(p); }

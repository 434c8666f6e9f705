// lowering::plan::Pointwise: a program of one accumulator for each element. What is uniform over a warp (the program)
// costs an instruction a warp; four elements a thread make it cheap beside the memory they come from.

#include "common.h"

const int DIMS_MAX = 6, INPUTS_MAX = 6, CODE_MAX = 24, TEMPORARIES = 4;
const int REGISTERS = INPUTS_MAX + TEMPORARIES;

// In the order of cuda/src/kernels/pointwise.rs.
enum Op {
  LOAD, SAVE, SELECT,
  NEG, ABS, SIGN, NOT, THROUGH_F32, THROUGH_F16, THROUGH_I64, THROUGH_I32, THROUGH_U8, THROUGH_BOOL,
  EXP, LOG, SQRT, RSQRT, RECIPROCAL, TANH, SIGMOID, ERF, SIN, COS, FLOOR, CEIL, ROUND,
  ADD, SUB, MUL, DIV, REM, POW, MIN, MAX, EQUAL, LESS, LESS_EQUAL, AND, OR, XOR,
};

struct View {
  void* base;
  int type;
  // Whether the last dimension is dense, and every group of four aligned.
  int is_dense;
  // The last dimension first.
  int strides[DIMS_MAX];
};

struct Instruction {
  u8 op;
  // Inputs, then temporaries, then constants.
  u8 first, second;
  // Whether it is op(first, accumulator).
  u8 is_reversed;
};

struct Pointwise {
  View inputs[INPUTS_MAX];
  View output;
  // Binary32 in the low half, or integers.
  i64 constants[2 * CODE_MAX];
  Instruction code[CODE_MAX];
  // Indexes of each dimension, the last one first; its groups if a thread has four elements of it.
  Divisor lengths[DIMS_MAX];
  u32 dims, input_count, code_count;
  // Of threads; or the tiles' of the last two dimensions.
  u32 count;
  // pointwise_tiled: the input that is dense in the last dimension but one.
  u32 turned;
  u32 tiles[2];
};

__device__ inline float constant(const Pointwise& p, u32 index, float) {
  return float_of_bits((u32)p.constants[index]);
}
__device__ inline i64 constant(const Pointwise& p, u32 index, i64) { return p.constants[index]; }

// A switch, so that registers have constant numbers.
template <typename T, int V>
__device__ inline void fetch(T (&to)[V], const T (&registers)[REGISTERS][V], const Pointwise& p, u32 from) {
#define CASE(i) \
  case i: \
    _Pragma("unroll") for (int v = 0; v < V; v++) to[v] = registers[i][v]; \
    break
  switch (from) {
    CASE(0); CASE(1); CASE(2); CASE(3); CASE(4); CASE(5); CASE(6); CASE(7); CASE(8); CASE(9);
    default:
      T value = constant(p, from - REGISTERS, T());
#pragma unroll
      for (int v = 0; v < V; v++) to[v] = value;
  }
#undef CASE
}

template <typename T, int V>
__device__ inline void save(T (&registers)[REGISTERS][V], const T (&from)[V], u32 temporary) {
#define CASE(i) \
  case i: \
    _Pragma("unroll") for (int v = 0; v < V; v++) registers[INPUTS_MAX + i][v] = from[v]; \
    break
  switch (temporary) { CASE(0); CASE(1); CASE(2); CASE(3); }
#undef CASE
}

#define EACH(op, expression) \
  case op: \
    _Pragma("unroll") for (int v = 0; v < V; v++) { x = acc[v], y = other[v], acc[v] = (expression); } \
    break

// Logical and comparing operations, which are the same for all numbers.
#define COMMON \
  EACH(SIGN, T((x > 0) - (x < 0))); EACH(NOT, T(x == 0)); EACH(THROUGH_BOOL, T(x != 0)); \
  EACH(EQUAL, T(x == y)); EACH(LESS, T(x < y)); EACH(LESS_EQUAL, T(x <= y)); \
  EACH(AND, T(x != 0 && y != 0)); EACH(OR, T(x != 0 || y != 0)); EACH(XOR, T((x != 0) != (y != 0)))

OUTLINED float sine(float x) { return sinf(x); }
OUTLINED float cosine(float x) { return cosf(x); }
OUTLINED float error_function(float x) { return erff(x); }
OUTLINED float power(float x, float y) { return powf(x, y); }
OUTLINED float remainder(float x, float y) { return fmodf(x, y); }

template <int V> __device__ inline void compute(u32 op, float (&acc)[V], const float (&other)[V]) {
  typedef float T;
  float x, y;
  switch (op) {
    COMMON;
    EACH(NEG, -x);
    EACH(ABS, fabsf(x));
    EACH(THROUGH_F16, float_of_half(half_of_float(x)));
    EACH(THROUGH_I64, (float)integer_of_float(x));
    EACH(THROUGH_I32, (float)clamped(integer_of_float(x), -0x80000000LL, 0x7fffffffLL));
    EACH(THROUGH_U8, (float)clamped(integer_of_float(x), 0, 255));
    EACH(EXP, expf(x)); EACH(LOG, logf(x)); EACH(SQRT, sqrtf(x)); EACH(RSQRT, 1.0f / sqrtf(x));
    EACH(RECIPROCAL, 1.0f / x); EACH(TANH, tanhf(x)); EACH(SIGMOID, 1.0f / (1.0f + expf(-x)));
    EACH(ERF, error_function(x));
    EACH(SIN, sine(x)); EACH(COS, cosine(x)); EACH(FLOOR, floorf(x)); EACH(CEIL, ceilf(x)); EACH(ROUND, rintf(x));
    EACH(ADD, x + y); EACH(SUB, x - y); EACH(MUL, x * y); EACH(DIV, x / y);
    EACH(REM, remainder(x, y)); EACH(POW, power(x, y));
    EACH(MIN, fminf(x, y)); EACH(MAX, fmaxf(x, y));
  }
}

// Wraps; what is no integer is truncated, and 0 to a negative power is 0.
OUTLINED i64 power(i64 base, i64 exponent) {
  if (exponent < 0) return base == 1 || (base == -1 && exponent % 2 == 0) ? 1 : base == -1 ? -1 : 0;
  u64 result = 1, square = (u64)base;
  for (; exponent > 0; exponent /= 2, square *= square) {
    if (exponent % 2 == 1) result *= square;
  }
  return (i64)result;
}

// The smallest number is its own opposite.
OUTLINED i64 quotient(i64 x, i64 y) { return y == 0 ? 0 : y == -1 ? (i64)(0 - (u64)x) : x / y; }
OUTLINED i64 remainder(i64 x, i64 y) { return y == 0 || y == -1 ? 0 : x % y; }

template <int V> __device__ inline void compute(u32 op, i64 (&acc)[V], const i64 (&other)[V]) {
  typedef i64 T;
  i64 x, y;
  switch (op) {
    COMMON;
    EACH(NEG, (i64)(0 - (u64)x));
    EACH(ABS, x < 0 ? (i64)(0 - (u64)x) : x);
    EACH(THROUGH_I32, (i64)(int)x); EACH(THROUGH_U8, (i64)(u8)x); EACH(THROUGH_F32, integer_of_float((float)x));
    EACH(THROUGH_F16, integer_of_float(float_of_half(half_of_float((float)x))));
    EACH(ADD, (i64)((u64)x + (u64)y)); EACH(SUB, (i64)((u64)x - (u64)y)); EACH(MUL, (i64)((u64)x * (u64)y));
    EACH(DIV, quotient(x, y)); EACH(REM, remainder(x, y)); EACH(POW, power(x, y));
    EACH(MIN, x < y ? x : y); EACH(MAX, x > y ? x : y);
  }
}

template <typename T, int V>
__device__ inline void run(T (&acc)[V], T (&registers)[REGISTERS][V], const Pointwise& p) {
#pragma unroll
  for (int v = 0; v < V; v++) acc[v] = 0;
  for (u32 at = 0; at < p.code_count; at++) {
    Instruction instruction = p.code[at];
    T first[V], second[V];
    if (instruction.op == SAVE) {
      save<T, V>(registers, acc, instruction.first);
      continue;
    }
    fetch<T, V>(first, registers, p, instruction.first);
    if (instruction.op == LOAD) {
#pragma unroll
      for (int v = 0; v < V; v++) acc[v] = first[v];
    } else if (instruction.op == SELECT) {
      fetch<T, V>(second, registers, p, instruction.second);
#pragma unroll
      for (int v = 0; v < V; v++) acc[v] = acc[v] != 0 ? first[v] : second[v];
    } else {
      if (instruction.is_reversed) {
#pragma unroll
        for (int v = 0; v < V; v++) {
          T value = acc[v];
          acc[v] = first[v];
          first[v] = value;
        }
      }
      compute<V>(instruction.op, acc, first);
    }
  }
}

__device__ inline void load_group(float (&to)[4], const View& view, int at) {
  if (view.is_dense) {
    load4(to, view.base, view.type, at);
    return;
  }
#pragma unroll
  for (int v = 0; v < 4; v++) to[v] = load<float>(view.base, view.type, at + v * view.strides[0]);
}

template <typename T> __device__ inline void load_group(T (&to)[1], const View& view, int at) {
  to[0] = load<T>(view.base, view.type, at);
}

__device__ inline void store_group(const View& view, int at, const float (&from)[4]) {
  store4(view.base, view.type, at, from);
}

template <typename T> __device__ inline void store_group(const View& view, int at, const T (&from)[1]) {
  store(view.base, view.type, at, from[0]);
}

// Of V elements of the last dimension, that many threads.
template <typename T, int V> __device__ inline void elements(const Pointwise& p) {
  u32 rest = blockIdx.x * blockDim.x + threadIdx.x;
  if (rest >= p.count) return;
  int places[INPUTS_MAX + 1] = {};
#pragma unroll
  for (int d = 0; d < DIMS_MAX; d++) {
    if (d >= p.dims) break;
    int index = (int)split(rest, p.lengths[d]) * (d == 0 ? V : 1);
#pragma unroll
    for (int i = 0; i < INPUTS_MAX; i++) places[i] += index * p.inputs[i].strides[d];
    places[INPUTS_MAX] += index * p.output.strides[d];
  }
  T registers[REGISTERS][V] = {};
  T acc[V];
#pragma unroll
  for (int i = 0; i < INPUTS_MAX; i++) {
    if (i < p.input_count) load_group(registers[i], p.inputs[i], places[i]);
  }
  run<T, V>(acc, registers, p);
  store_group(p.output, places[INPUTS_MAX], acc);
}

KERNEL(pointwise_float_dense, Pointwise, 256) { elements<float, 4>(p); }
KERNEL(pointwise_float, Pointwise, 256) { elements<float, 1>(p); }
KERNEL(pointwise_integer, Pointwise, 256) { elements<i64, 1>(p); }

// The output is dense in the last dimension, the turned input in the one before: a tile of 32 x 32 of it goes through
// shared memory, so that both are read and written by lines. A thread has four elements of its column.
KERNEL(pointwise_tiled, Pointwise, 256) {
  __shared__ float tile[32][33];
  u32 rest = blockIdx.x;
  u32 tile0 = rest % p.tiles[0] * 32;
  rest /= p.tiles[0];
  u32 tile1 = rest % p.tiles[1] * 32;
  rest /= p.tiles[1];
  int places[INPUTS_MAX + 1] = {};
#pragma unroll
  for (int d = 2; d < DIMS_MAX; d++) {
    if (d >= p.dims) break;
    int index = (int)split(rest, p.lengths[d]);
#pragma unroll
    for (int i = 0; i < INPUTS_MAX; i++) places[i] += index * p.inputs[i].strides[d];
    places[INPUTS_MAX] += index * p.output.strides[d];
  }
  u32 x = threadIdx.x % 32, y = threadIdx.x / 32;
  u32 length0 = p.lengths[0].divisor, length1 = p.lengths[1].divisor;
  const View& turned = p.inputs[p.turned];
  int place = 0;
#pragma unroll
  for (int i = 0; i < INPUTS_MAX; i++) place = i == p.turned ? places[i] : place;
#pragma unroll
  for (int v = 0; v < 4; v++) {
    int index0 = tile0 + y + 8 * v, index1 = tile1 + x;
    if (index0 >= length0 || index1 >= length1) continue;
    int at = place + index0 * turned.strides[0] + index1 * turned.strides[1];
    tile[y + 8 * v][x] = load<float>(turned.base, turned.type, at);
  }
  __syncthreads();
  float registers[REGISTERS][4] = {};
  float acc[4];
#pragma unroll
  for (int i = 0; i < INPUTS_MAX; i++) {
    if (i >= p.input_count) break;
    const View& view = p.inputs[i];
#pragma unroll
    for (int v = 0; v < 4; v++) {
      int index0 = tile0 + x, index1 = tile1 + y + 8 * v;
      if (index0 >= length0 || index1 >= length1) continue;
      int at = places[i] + index0 * view.strides[0] + index1 * view.strides[1];
      registers[i][v] = i == p.turned ? tile[x][y + 8 * v] : load<float>(view.base, view.type, at);
    }
  }
  run<float, 4>(acc, registers, p);
#pragma unroll
  for (int v = 0; v < 4; v++) {
    int index0 = tile0 + x, index1 = tile1 + y + 8 * v;
    if (index0 >= length0 || index1 >= length1) continue;
    int at = places[INPUTS_MAX] + index0 * p.output.strides[0] + index1 * p.output.strides[1];
    store(p.output.base, p.output.type, at, acc[v]);
  }
}

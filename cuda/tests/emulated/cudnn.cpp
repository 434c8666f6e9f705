// cuDNN: convolutions of images whose channels are the innermost.
//
// Of its algorithms one is not deterministic, one fails, one needs more workspace than there is for anybody, and two
// are plain, of which one overwrites what it asked for of the workspace.

#include <string.h>

#include <vector>

#include "emulated.h"

namespace {

enum { SUCCESS = 0, BAD_PARAM = 2000, NOT_SUPPORTED = 3000, EXECUTION_FAILED = 5000 };
enum { FLOAT = 0, HALF = 2 };
enum { NHWC = 1 };
enum { IMPLICIT_GEMM = 0, PRECOMP_GEMM = 1, GEMM = 2, FFT = 4, WINOGRAD = 6 };
enum { DEFAULT_MATH = 0, TENSOR_OP_MATH = 1, FMA_MATH = 3 };
enum { RELU = 1, IDENTITY = 5 };

struct Tensor { int type = -1, n, c, h, w; };
struct Filter { int type = -1, k, c, r, s; };
struct Geometry { int pad[2], stride[2], dilation[2], groups = 1, math = DEFAULT_MATH, compute = -1; };
struct Function { int mode = -1; };
struct Handle { void* stream = nullptr; };
struct Performance { int algorithm, status; float time; size_t memory; int is_deterministic, math, reserved[3]; };

size_t memory_of(int algorithm) { return algorithm == PRECOMP_GEMM ? 1000 : algorithm == FFT ? size_t(1) << 40 : 0; }

int out(const Geometry* g, int i, int size, int filter) {
  return (size + 2 * g->pad[i] - ((filter - 1) * g->dilation[i] + 1)) / g->stride[i] + 1;
}

// Whether they fit each other as cudnnConvolutionForward's documentation asks.
int check(const Tensor* x, const Filter* w, const Geometry* g, const Tensor* y) {
  if (x->type != w->type || x->type != y->type || (x->type != FLOAT && x->type != HALF)) return BAD_PARAM;
  if (g->compute != FLOAT || x->c != w->c * g->groups || w->k % g->groups) return BAD_PARAM;
  if (y->n != x->n || y->c != w->k || y->h != out(g, 0, x->h, w->r) || y->w != out(g, 1, x->w, w->s)) return BAD_PARAM;
  return SUCCESS;
}

struct Convolution {
  Tensor x;
  Filter w;
  Geometry g;
  Tensor y;
  float alpha, beta;
  const void *at_x, *at_w, *at_z, *at_bias;
  void* at_y;
  bool has_relu;

  std::vector<float> converted(const void* at, i64 count) const {
    std::vector<float> numbers(count);
    for (i64 i = 0; i < count; i++) {
      numbers[i] = load(at, x.type == HALF, i);
      if (x.type == FLOAT && g.math != FMA_MATH) numbers[i] = tf32(numbers[i]);
    }
    return numbers;
  }

  void run() const {
    std::vector<float> image = converted(at_x, i64(x.n) * x.h * x.w * x.c);
    std::vector<float> filter = converted(at_w, i64(w.k) * w.r * w.s * w.c);
    for (i64 n = 0; n < y.n; n++)
      for (i64 row = 0; row < y.h; row++)
        for (i64 column = 0; column < y.w; column++)
          for (i64 k = 0; k < y.c; k++) element(image.data(), filter.data(), n, row, column, k);
  }

  void element(const float* image, const float* filter, i64 n, i64 row, i64 column, i64 k) const {
    bool is_half = x.type == HALF;
    i64 first = k / (w.k / g.groups) * w.c;
    double sum = 0;
    for (i64 r = 0; r < w.r; r++)
      for (i64 s = 0; s < w.s; s++) {
        i64 h = row * g.stride[0] + r * g.dilation[0] - g.pad[0];
        i64 v = column * g.stride[1] + s * g.dilation[1] - g.pad[1];
        if (h < 0 || h >= x.h || v < 0 || v >= x.w) continue;
        sum += dot(image + ((n * x.h + h) * x.w + v) * x.c + first, filter + ((k * w.r + r) * w.s + s) * w.c, w.c);
      }
    i64 index = ((n * y.h + row) * y.w + column) * y.c + k;
    float value = alpha * (float)sum;
    if (beta != 0) value += beta * load(at_z, is_half, index);
    if (at_bias) value += load(at_bias, is_half, k);
    if (has_relu) value = value > 0 ? value : 0;
    store(at_y, is_half, index, value);
  }
};

int put(Handle* handle, int algorithm, void* workspace, size_t bytes, const Convolution& convolution) {
  if (algorithm == GEMM) return EXECUTION_FAILED;
  if (bytes < memory_of(algorithm)) return BAD_PARAM;
  size_t overwritten = memory_of(algorithm);
  int error = emulated::put(handle->stream, [=] {
    if (overwritten) memset(workspace, 0xff, overwritten);
    convolution.run();
  });
  return error ? EXECUTION_FAILED : SUCCESS;
}

template <class T>
int create(T** made, const char* what) {
  *made = new T;
  emulated::count(what, 1);
  return SUCCESS;
}
template <class T>
int destroy(T* made, const char* what) {
  delete made;
  emulated::count(what, -1);
  return SUCCESS;
}

}  // namespace

extern "C" {

size_t cudnnGetVersion() { return 91900; }
void cudnnGetLastErrorString(char* text, size_t bytes) { strncpy(text, "emulated", bytes); }
int cudnnCreate(Handle** handle) { return create(handle, "cuDNN handles"); }
int cudnnDestroy(Handle* handle) { return destroy(handle, "cuDNN handles"); }
int cudnnSetStream(Handle* handle, void* stream) { handle->stream = stream; return SUCCESS; }
int cudnnCreateTensorDescriptor(Tensor** made) { return create(made, "tensors"); }
int cudnnDestroyTensorDescriptor(Tensor* made) { return destroy(made, "tensors"); }
int cudnnCreateFilterDescriptor(Filter** made) { return create(made, "filters"); }
int cudnnDestroyFilterDescriptor(Filter* made) { return destroy(made, "filters"); }
int cudnnCreateConvolutionDescriptor(Geometry** made) { return create(made, "convolutions"); }
int cudnnDestroyConvolutionDescriptor(Geometry* made) { return destroy(made, "convolutions"); }
int cudnnCreateActivationDescriptor(Function** made) { return create(made, "activations"); }
int cudnnDestroyActivationDescriptor(Function* made) { return destroy(made, "activations"); }

int cudnnSetTensor4dDescriptor(Tensor* tensor, int format, int type, int n, int c, int h, int w) {
  *tensor = {type, n, c, h, w};
  return format == NHWC && n > 0 && c > 0 && h > 0 && w > 0 ? SUCCESS : BAD_PARAM;
}
int cudnnSetFilter4dDescriptor(Filter* filter, int type, int format, int k, int c, int r, int s) {
  *filter = {type, k, c, r, s};
  return format == NHWC && k > 0 && c > 0 && r > 0 && s > 0 ? SUCCESS : BAD_PARAM;
}
int cudnnSetConvolution2dDescriptor(Geometry* g, int pad_h, int pad_w, int down, int right, int dilation_h,
                                    int dilation_w, int mode, int compute) {
  *g = {{pad_h, pad_w}, {down, right}, {dilation_h, dilation_w}, g->groups, g->math, compute};
  return mode == 1 && pad_h >= 0 && pad_w >= 0 && down > 0 && right > 0 ? SUCCESS : BAD_PARAM;
}
int cudnnSetConvolutionGroupCount(Geometry* g, int groups) { g->groups = groups; return SUCCESS; }
int cudnnSetConvolutionMathType(Geometry* g, int math) { g->math = math; return SUCCESS; }
int cudnnSetActivationDescriptor(Function* f, int mode, int, double) { f->mode = mode; return SUCCESS; }

int cudnnGetConvolutionForwardAlgorithm_v7(Handle*, const Tensor* x, const Filter* w, const Geometry* g,
                                           const Tensor* y, int most, int* count, Performance* results) {
  *count = 0;
  if (int error = check(x, w, g, y)) return error;
  // Groups are not among what the fifth can do.
  for (int algorithm : {WINOGRAD, GEMM, FFT, PRECOMP_GEMM, IMPLICIT_GEMM}) {
    if (*count == most) break;
    int status = algorithm == IMPLICIT_GEMM && g->groups > 1 ? NOT_SUPPORTED : SUCCESS;
    int math = g->math == TENSOR_OP_MATH && algorithm == IMPLICIT_GEMM ? FMA_MATH : g->math;
    results[(*count)++] = {algorithm, status, 1, memory_of(algorithm), algorithm != WINOGRAD, math, {}};
  }
  return SUCCESS;
}

int cudnnConvolutionForward(Handle* handle, const float* alpha, const Tensor* x, const void* at_x, const Filter* w,
                            const void* at_w, const Geometry* g, int algorithm, void* workspace, size_t bytes,
                            const float* beta, const Tensor* y, void* at_y) {
  if (int error = check(x, w, g, y)) return error;
  Convolution convolution = {*x, *w, *g, *y, *alpha, *beta, at_x, at_w, at_y, nullptr, at_y, false};
  return put(handle, algorithm, workspace, bytes, convolution);
}

int cudnnConvolutionBiasActivationForward(Handle* handle, const float* alpha, const Tensor* x, const void* at_x,
                                          const Filter* w, const void* at_w, const Geometry* g, int algorithm,
                                          void* workspace, size_t bytes, const float* beta, const Tensor* z,
                                          const void* at_z, const Tensor* bias, const void* at_bias, const Function* f,
                                          const Tensor* y, void* at_y) {
  if (int error = check(x, w, g, y)) return error;
  if (memcmp(z, y, sizeof *z) || bias->n != 1 || bias->h != 1 || bias->w != 1 || bias->c != y->c) return BAD_PARAM;
  if (bias->type != y->type || !at_bias || at_x == at_y) return BAD_PARAM;
  if (f->mode != RELU && f->mode != IDENTITY) return NOT_SUPPORTED;
  if (f->mode == IDENTITY && algorithm != PRECOMP_GEMM) return NOT_SUPPORTED;
  Convolution convolution = {*x, *w, *g, *y, *alpha, *beta, at_x, at_w, at_z, at_bias, at_y, f->mode == RELU};
  return put(handle, algorithm, workspace, bytes, convolution);
}
}

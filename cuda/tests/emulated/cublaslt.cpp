// cuBLASLt: products of matrices that lie column by column.
//
// Of its algorithms one fails, one needs all of the workspace, which it overwrites, one is plain, and one rounds parts
// of sums to the output's type if that is not ruled out. Activations of several binary32 products at once are not
// supported: those come in a step of their own.

#include <string.h>

#include <vector>

#include "emulated.h"

namespace {

enum { SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_16F = 2 };
enum { COMPUTE_32F = 68, COMPUTE_32F_FAST_TF32 = 77 };
enum { EPILOGUE_DEFAULT = 1, EPILOGUE_RELU = 2, EPILOGUE_BIAS = 4 };

struct Layout { int type; u64 rows, columns; i64 stride; int batches; i64 batch_stride; };
struct Operation { int compute, scale, transposed[2], epilogue; u64 bias; int bias_type; };
struct Preference { u64 workspace_bytes; u32 alignment[4], reductions; };
struct Algorithm { u64 data[8]; };
struct Result { Algorithm algorithm; size_t workspace_bytes; int state; float waves; int reserved[4]; };

const u64 OURS = 0x616c676f;
enum { FAILS = 0, GREEDY = 1, PLAIN = 2, ROUGH = 3, KINDS = 4 };
enum { REDUCTION_OUTPUT_TYPE = 4 };

// Whether the matrices fit each other as cublasLtMatmul's documentation asks.
int check(const Operation* o, const Layout* a, const Layout* b, const Layout* c, const Layout* d) {
  for (const Layout* layout : {a, b, c, d})
    if (layout->stride < (i64)layout->rows || (layout->type != R_32F && layout->type != R_16F)) return INVALID_VALUE;
  u64 m = o->transposed[0] ? a->columns : a->rows, k = o->transposed[0] ? a->rows : a->columns;
  u64 n = o->transposed[1] ? b->rows : b->columns, l = o->transposed[1] ? b->columns : b->rows;
  if (k != l || d->rows != m || d->columns != n || c->rows != m || c->columns != n) return INVALID_VALUE;
  if (a->batches != d->batches || b->batches != d->batches || c->batches != d->batches) return INVALID_VALUE;
  if (a->type != b->type || c->type != d->type || (a->type == R_32F && d->type == R_16F)) return NOT_SUPPORTED;
  if (o->scale != R_32F || (o->compute != COMPUTE_32F && o->compute != COMPUTE_32F_FAST_TF32)) return NOT_SUPPORTED;
  if (o->compute == COMPUTE_32F_FAST_TF32 && a->type != R_32F) return NOT_SUPPORTED;
  bool is_bias_right = o->bias && (o->bias_type == -1 || o->bias_type == d->type);
  if ((o->epilogue & EPILOGUE_BIAS) && !is_bias_right) return NOT_SUPPORTED;
  if ((o->epilogue & EPILOGUE_RELU) && d->batches > 1 && a->type == R_32F) return NOT_SUPPORTED;
  return SUCCESS;
}

struct Product {
  Operation o;
  Layout a, b, c, d;
  float alpha, beta;
  const void *at_a, *at_b, *at_c;
  void* at_d;
  bool is_rough;

  // Rows of op(A), or columns of op(B), as they are multiplied.
  std::vector<float> lines(const void* at, const Layout& layout, bool is_along, i64 batch) const {
    std::vector<float> numbers(layout.rows * layout.columns);
    i64 length = is_along ? layout.rows : layout.columns;
    for (i64 column = 0; column < (i64)layout.columns; column++)
      for (i64 row = 0; row < (i64)layout.rows; row++) {
        float value = load(at, layout.type == R_16F, row + column * layout.stride + batch * layout.batch_stride);
        if (o.compute == COMPUTE_32F_FAST_TF32) value = tf32(value);
        numbers[is_along ? column * length + row : row * length + column] = value;
      }
    return numbers;
  }

  void run() const {
    i64 length = o.transposed[0] ? a.rows : a.columns;
    for (i64 batch = 0; batch < d.batches; batch++) {
      std::vector<float> in_a = lines(at_a, a, o.transposed[0], batch), in_b = lines(at_b, b, !o.transposed[1], batch);
      for (i64 column = 0; column < (i64)d.columns; column++)
        for (i64 row = 0; row < (i64)d.rows; row++) {
          float sum = is_rough ? 0 : dot(&in_a[row * length], &in_b[column * length], length);
          for (i64 i = 0; is_rough && i < length; i++)
            store(&sum, false, 0, (float)(_Float16)(sum + in_a[row * length + i] * in_b[column * length + i]));
          float value = alpha * sum;
          if (beta != 0) value += beta * load(at_c, c.type == R_16F, row + column * c.stride + batch * c.batch_stride);
          if (o.epilogue & EPILOGUE_BIAS) value += load((void*)o.bias, d.type == R_16F, row);
          if (o.epilogue & EPILOGUE_RELU) value = value > 0 ? value : 0;
          store(at_d, d.type == R_16F, row + column * d.stride + batch * d.batch_stride, value);
        }
    }
  }
};

}  // namespace

extern "C" {

size_t cublasLtGetVersion() { return 130002; }
const char* cublasLtGetStatusString(int) { return "emulated"; }
int cublasLtCreate(void** handle) { *handle = new char; emulated::count("cuBLASLt handles", 1); return SUCCESS; }
int cublasLtDestroy(void* handle) { delete (char*)handle; emulated::count("cuBLASLt handles", -1); return SUCCESS; }

int cublasLtMatrixLayoutCreate(Layout** layout, int type, u64 rows, u64 columns, i64 stride) {
  *layout = new Layout{type, rows, columns, stride, 1, 0};
  emulated::count("layouts", 1);
  return SUCCESS;
}
int cublasLtMatrixLayoutDestroy(Layout* layout) { delete layout; emulated::count("layouts", -1); return SUCCESS; }
int cublasLtMatrixLayoutSetAttribute(Layout* layout, int which, const void* value, size_t bytes) {
  if (which == 5 && bytes == 4) memcpy(&layout->batches, value, 4);
  else if (which == 6 && bytes == 8) memcpy(&layout->batch_stride, value, 8);
  else return INVALID_VALUE;
  return SUCCESS;
}

int cublasLtMatmulDescCreate(Operation** operation, int compute, int scale) {
  *operation = new Operation{compute, scale, {0, 0}, EPILOGUE_DEFAULT, 0, -1};
  emulated::count("products", 1);
  return SUCCESS;
}
int cublasLtMatmulDescDestroy(Operation* operation) {
  delete operation;
  emulated::count("products", -1);
  return SUCCESS;
}
int cublasLtMatmulDescSetAttribute(Operation* operation, int which, const void* value, size_t bytes) {
  if ((which == 3 || which == 4) && bytes == 4) memcpy(&operation->transposed[which - 3], value, 4);
  else if (which == 7 && bytes == 4) memcpy(&operation->epilogue, value, 4);
  else if (which == 8 && bytes == 8) memcpy(&operation->bias, value, 8);
  else if (which == 26 && bytes == 4) memcpy(&operation->bias_type, value, 4);
  else return INVALID_VALUE;
  return SUCCESS;
}

int cublasLtMatmulPreferenceCreate(Preference** p) {
  *p = new Preference{0, {256, 256, 256, 256}, 7};
  emulated::count("preferences", 1);
  return SUCCESS;
}
int cublasLtMatmulPreferenceDestroy(Preference* p) { delete p; emulated::count("preferences", -1); return SUCCESS; }
int cublasLtMatmulPreferenceSetAttribute(Preference* p, int which, const void* value, size_t bytes) {
  if (which == 1 && bytes == 8) memcpy(&p->workspace_bytes, value, 8);
  else if (which == 3 && bytes == 4) memcpy(&p->reductions, value, 4);
  else if (which >= 5 && which <= 8 && bytes == 4) memcpy(&p->alignment[which - 5], value, 4);
  else return INVALID_VALUE;
  return SUCCESS;
}

int cublasLtMatmulAlgoGetHeuristic(void*, const Operation* o, const Layout* a, const Layout* b, const Layout* c,
                                   const Layout* d, const Preference* p, int most, Result* results, int* count) {
  *count = 0;
  if (int error = check(o, a, b, c, d)) return error;
  for (u64 kind = 0; kind < KINDS && *count < most; kind++) {
    if (kind == ROUGH && !(p->reductions & REDUCTION_OUTPUT_TYPE)) continue;
    size_t needed = kind == GREEDY ? p->workspace_bytes : 0;
    results[(*count)++] = {{{OURS, kind, needed}}, needed, SUCCESS, 1, {}};
  }
  return SUCCESS;
}

int cublasLtMatmul(void*, const Operation* o, const float* alpha, const void* at_a, const Layout* a, const void* at_b,
                   const Layout* b, const float* beta, const void* at_c, const Layout* c, void* at_d, const Layout* d,
                   const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
  if (int error = check(o, a, b, c, d)) return error;
  if (!algorithm || algorithm->data[0] != OURS || algorithm->data[2] > workspace_bytes) return INVALID_VALUE;
  if (algorithm->data[1] == FAILS) return EXECUTION_FAILED;
  size_t overwritten = algorithm->data[2];
  Product product = {*o, *a, *b, *c, *d, *alpha, *beta, at_a, at_b, at_c, at_d, algorithm->data[1] == ROUGH};
  int error = emulated::put(stream, [=] {
    if (overwritten) memset(workspace, 0xff, overwritten < 4096 ? overwritten : 4096);
    product.run();
  });
  return error ? EXECUTION_FAILED : SUCCESS;
}
}

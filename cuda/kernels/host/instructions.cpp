// The instructions of device/device.h, by the letter of the PTX ISA.

#include "device.h"

namespace {

struct Halves {
  float values[1 << 16];

  Halves() {
    for (u32 half = 0; half < 1 << 16; half++) {
      int exponent = half >> 10 & 31, fraction = half & 1023;
      float size = exponent == 31   ? (fraction ? NAN : INFINITY)
                   : exponent == 0 ? ldexpf((float)fraction, -24)
                                   : ldexpf((float)(fraction + 1024), exponent - 25);
      values[half] = half & 0x8000 ? -size : size;
    }
  }
};

const Halves halves;

// What a lane has put into its room: four registers of a, two of b.
struct Fragments {
  u32 registers[6];
};

void load(u32 (&to)[4], const u16* row, bool is_transposed) {
  int lane = threadIdx.x % 32;
  memcpy(emulation::room(lane), &row, sizeof row);
  emulation::warp_barrier();
  for (int matrix = 0; matrix < 4; matrix++) {
    u32 pair[2];
    for (int i = 0; i < 2; i++) {
      int r = lane / 4, c = lane % 4 * 2 + i;
      const u16* from;
      memcpy(&from, emulation::room(matrix * 8 + (is_transposed ? c : r)), sizeof from);
      if ((size_t)from % 16 != 0) emulation::fail("loads a row of a matrix that is not aligned to 16 bytes");
      pair[i] = from[is_transposed ? r : c];
    }
    to[matrix] = pair[0] | pair[1] << 16;
  }
  emulation::warp_barrier();
}

}  // namespace

float float_of_half(u16 half) { return halves.values[half]; }

// To the nearest, ties to even.
u16 half_of_float(float value) {
  u16 sign = signbit(value) ? 0x8000 : 0;
  if (isnan(value)) return sign | 0x7fff;
  float size = fabsf(value);
  if (size >= 65520.0f) return sign | 0x7c00;
  int exponent = size >= 0x1p-14f ? ilogbf(size) + 14 : 0;
  // In units of the last place: above the subnormals, there are 1,024 of them that the exponent stands for, and a
  // number that is rounded up to the next power of two has the next exponent.
  int units = (int)rintf(ldexpf(size, 24 - exponent));
  return sign | (u16)(exponent * 1024 + units);
}

void load_matrices(u32 (&to)[4], const u16* row) { load(to, row, false); }
void load_matrices_transposed(u32 (&to)[4], const u16* row) { load(to, row, true); }

// PTX ISA, "Matrix Fragments for mma.m16n8k16", of .f16: which lane has an element, in which register and half of it.
void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  int lane = threadIdx.x % 32;
  Fragments own = {{a[0], a[1], a[2], a[3], b0, b1}};
  memcpy(emulation::room(lane), &own, sizeof own);
  emulation::warp_barrier();
  auto element = [](int of, int at, int half) {
    const Fragments* fragments = (const Fragments*)emulation::room(of);
    return float_of_half((u16)(fragments->registers[at] >> half * 16));
  };
  for (int i = 0; i < 4; i++) {
    int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; k++) {
      float of_a = element(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k % 2);
      float of_b = element(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
      sum += of_a * of_b;
    }
    c[i] += sum;
  }
  emulation::warp_barrier();
}

// Kernels with the faults that the emulation is there to find: a test sees that it does.

#include "device.h"

namespace {

struct Control {
  u32* output;
};

// Each thread stores what its neighbour of the next warp has, with no barrier in between.
KERNEL(control_race, Control, 64) {
  __shared__ u32 room[64];
  room[threadIdx.x] = threadIdx.x + 1;
  p.output[threadIdx.x] = room[(threadIdx.x + 32) % 64];
  __syncthreads();
  room[threadIdx.x] = 0;
}

// One warp leaves before the barrier.
KERNEL(control_left, Control, 64) {
  if (threadIdx.x >= 32) return;
  __syncthreads();
  p.output[threadIdx.x] = 1;
}

// Half of a warp takes part in an exchange.
KERNEL(control_half, Control, 64) {
  if (threadIdx.x % 32 < 16) p.output[threadIdx.x] = shuffle_xor(threadIdx.x, 1);
}

}  // namespace

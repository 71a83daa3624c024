// The planner's kernels as functions of a shared library: emulate_<kernel>(PlanArgs*, blocks, shared bytes).
#include "cuda_on_cpu.h"

#include KERNEL_SOURCE

static const podgraph::PlanArgs* args;
static void run_kernel() { KERNEL(*args); }

extern "C" int emulate(const podgraph::PlanArgs* a, unsigned blocks, unsigned threads, unsigned shared_bytes) {
  args = a;
  gridDim.x = blocks, blockDim.x = threads;
  for (unsigned i = 0; i < blocks; i++) {
    blockIdx.x = i;
    if (!emulator::run_block(run_kernel, threads, shared_bytes)) return 1;
  }
  return 0;
}

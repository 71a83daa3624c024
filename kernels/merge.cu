// Merges the partial results of split requests, in index order, so that a replay is bitwise reproducible.
//
// One warp per (row, query head); rows written directly by the attention kernel are not on the list and stay untouched.
// Partials carry the base-2 log-sum-exp of their chunk: out = sum_i 2^(lse_i - lse) out_i, lse = log2 sum_i 2^lse_i.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "args.h"

namespace podgraph {

using DType = PODGRAPH_DTYPE;
constexpr int kHeadDim = PODGRAPH_HEAD_DIM;
constexpr int kPerLane = kHeadDim / 32;  // 2, 4 or 8 elements a lane: one load of 4, 8 or 16 bytes

struct alignas(sizeof(DType) * kPerLane) Slice {
  DType x[kPerLane];
};

}  // namespace podgraph

extern "C" __global__ void __launch_bounds__(256) podgraph_merge(const __grid_constant__ podgraph::Args a) {
  using namespace podgraph;
  if (blockIdx.x == 0 && threadIdx.x < 2) a.counters[threadIdx.x] = 0;  // every ticket is drawn: ready for the next run
  const int heads = a.num_qo_heads;
  const int lane = threadIdx.x % 32;
  const int warps = gridDim.x * (blockDim.x / 32);
  const int pairs = a.counts[kMergeRows] * heads;
  for (int pair = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; pair < pairs; pair += warps) {
    const int index = pair / heads, head = pair % heads;
    const int begin = a.merge_first[index], end = begin + a.merge_count[index];
    float max_lse = -INFINITY, sum = 0.f, acc[kPerLane] = {};
    for (int part = begin; part < end; ++part) {
      const size_t at = static_cast<size_t>(part) * heads + head;
      const float lse = a.partial_lse[at];
      const Slice slice = reinterpret_cast<const Slice*>(static_cast<const DType*>(a.partial_out) + at * kHeadDim)[lane];
      const float new_max = fmaxf(max_lse, lse);
      // a chunk that a causal or window mask hides whole has lse = -inf and weighs nothing
      const float keep = max_lse == -INFINITY ? 0.f : exp2f(max_lse - new_max);
      const float weight = lse == -INFINITY ? 0.f : exp2f(lse - new_max);
      sum = sum * keep + weight;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        // 0 x NaN must not leak: nothing is read into the sum from a chunk without weight
        acc[i] = acc[i] * keep + (weight > 0.f ? weight * static_cast<float>(slice.x[i]) : 0.f);
      }
      max_lse = new_max;
    }
    const size_t row = static_cast<size_t>(a.merge_rows[index]) * heads + head;
    const float scale = sum > 0.f ? 1.f / sum : 0.f;
    Slice result;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) result.x[i] = static_cast<DType>(acc[i] * scale);
    reinterpret_cast<Slice*>(static_cast<DType*>(a.out) + row * kHeadDim)[lane] = result;
    if (a.lse != nullptr && lane == 0) a.lse[row] = sum > 0.f ? max_lse + log2f(sum) : -INFINITY;
  }
}

// Bytes of dynamic shared memory the kernel needs, read by the builder from the cubin.
extern "C" __device__ const uint32_t podgraph_smem_bytes = 0;

// Looks for the first entry of kv_indices that names no page of the cache; the planner refuses the step then.
//
// Apart from the planner, which is one thread block: page numbers are by far the longest of a step's arrays.
#include "args.h"

extern "C" __global__ void __launch_bounds__(256) podgraph_check_pages(const __grid_constant__ podgraph::PlanArgs a) {
  const int end = min(__ldg(a.kv_indptr + a.num_requests), a.num_indices);  // the planner refuses a longer one
  const int start = max(__ldg(a.kv_indptr), 0), step = gridDim.x * blockDim.x;
  uint32_t first = ~0u;
  for (int i = start + blockIdx.x * blockDim.x + threadIdx.x; i < end; i += step) {
    if (static_cast<uint32_t>(__ldg(a.kv_indices + i)) >= static_cast<uint32_t>(a.num_pages)) {
      first = i;
      break;
    }
  }
  if (first != ~0u) atomicMin(a.bad_page, first);
}

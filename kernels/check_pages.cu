// Looks for the first entry of kv_indices that names no page of the cache; the planner refuses the step then.
//
// Apart from the planner, which is one thread block: page numbers are by far the longest of a step's arrays.
#include "plan.h"

extern "C" __global__ void __launch_bounds__(256) podgraph_check_pages(const __grid_constant__ podgraph::PlanArgs a) {
  if (!podgraph::planning::holds_requests(a)) return;  // the planner refuses them
  // kv_indptr begins at 0 and ends within kv_indices, or the planner refuses it
  const int end = min(__ldg(a.kv_indptr + a.num_requests), a.num_indices);
  const uint32_t num_pages = max(a.num_pages, 0);
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  uint32_t first = ~0u;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < end; i += step) {
    if (static_cast<uint32_t>(__ldg(a.kv_indices + i)) >= num_pages) {  // negative ones too
      first = static_cast<uint32_t>(i);
      break;
    }
  }
  if (first != ~0u) atomicMin(a.bad_page, first);
}

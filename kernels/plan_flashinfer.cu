// The planner of pod_flashinfer: from one step's metadata to FlashInfer's work lists, in one thread block.
//
// podgraph/planner/plan.py makes the same lists and explains the rules; names are the same there.
#include "plan.h"

namespace podgraph {
namespace planning {

constexpr int kChunkUnit = 128;   // CHUNK_UNIT
constexpr int kDecodeTile = 16;   // DECODE_TILE
enum Side { kPrefill, kDecode, kNoSide };
struct ItemOfRequest {
  int request, qo_tile, kv_tile;
};
enum Partition { kByTiles, kByKvLoad };  // PARTITIONS

}  // namespace planning
}  // namespace podgraph

extern "C" __global__ void __launch_bounds__(podgraph::planning::kMostThreads)
    podgraph_plan_flashinfer(const __grid_constant__ podgraph::PlanArgs a) {
  using namespace podgraph;
  using namespace podgraph::planning;
  __shared__ Shared s;
  __shared__ int longest_span[2];
  __shared__ int tiles[2];
  __shared__ unsigned long long load_of_side[2];  // KV that its tiles read, in units of kChunkUnit
  extern __shared__ __align__(16) int arrays[];
  Batch b;
  if (threadIdx.x < 2) longest_span[threadIdx.x] = 1, tiles[threadIdx.x] = 0, load_of_side[threadIdx.x] = 0;
  const int n = a.num_requests, tid = threadIdx.x, stride = n + 1;
  int* const side = arrays + 3 * stride;
  int* const chunks = arrays + 4 * stride;       // KV chunks of each request
  int* const first_partial = arrays + 5 * stride;
  int* const first_merge = arrays + 6 * stride;  // rows with several partial results in front
  int* const first_items[2] = {arrays + 7 * stride, arrays + 8 * stride};
  // decodes beyond the bucket's slots, in request order, take prefill slots
  auto find_side = [&](int i, const int* before) {
    const int rows = b.rows(i);
    side[i] = rows <= 0 ? kNoSide : rows <= a.decode_rows && before[2] < a.decode_count ? kDecode : kPrefill;
  };
  if (!load(a, s, arrays, b, find_side)) return;

  const int tile_of[2] = {max(a.prefill_tile, 1), kDecodeTile};
  auto tiles_of = [&](int i, int which) {
    return side[i] == which ? ceil_div(b.rows(i) * a.group_size, tile_of[which]) : 0;
  };
  auto span_of = [&](int i, int which) {
    return max(a.window_left < 0 ? b.kv_len[i] : min(b.kv_len[i], a.window_left + tile_of[which]), 1);
  };

  // --- what each side has to do ---
#pragma unroll 1
  for (int i = tid; i < n; i += threads()) {
    if (side[i] == kNoSide) continue;
    const int span = span_of(i, side[i]), count = tiles_of(i, side[i]);
    atomicMax(&longest_span[side[i]], span);
    atomicAdd(&tiles[side[i]], count);
    atomicAdd(&load_of_side[side[i]], static_cast<unsigned long long>(count) * ceil_div(span, kChunkUnit));
  }
  __syncthreads();

  // --- the shortest KV chunk with which a side stays within its share of one round of the grid ---
  const int round = max(1, a.ctas / a.num_kv_heads);
  int chunk[2];  // tokens
#pragma unroll 1
  for (int which = 0; which < 2; which++) {
    int share;
    if (a.partition == kByKvLoad) {
      const unsigned long long total = max(load_of_side[0] + load_of_side[1], 1ull);
      share = max(static_cast<int>(round * load_of_side[which] / total), 1);
    } else {
      share = max(max(round - tiles[1 - which], round / 2), 1);
    }
    const int whole = ceil_div(longest_span[which], kChunkUnit);
    const int units = tiles[which] >= share ? whole : least_fitting(s, 1, whole, share, [&](int value) {
      int sum = 0;
#pragma unroll 1
      for (int i = tid % 32; i < n; i += 32)
        if (side[i] == which) sum += tiles_of(i, which) * ceil_div(span_of(i, which), value * kChunkUnit);
      return __reduce_add_sync(kAll, sum);
    });
    chunk[which] = units * kChunkUnit;
  }

  // --- where partial results go, and which rows have them ---
  auto chunks_of = [&](int i) { return side[i] == kNoSide ? 1 : ceil_div(span_of(i, side[i]), chunk[side[i]]); };
  int split[4];  // rows of partial results, rows that are merged, items of both sides
  prefix_sums(s, n,
              [&](int i, int* v) {
                const int count = chunks_of(i), rows = count > 1 ? b.rows(i) : 0;
                chunks[i] = count;
                v[0] = rows * count, v[1] = rows;
                v[2] = tiles_of(i, kPrefill) * count, v[3] = tiles_of(i, kDecode) * count;
              },
              [&](int i, const int* sums) {
                first_partial[i] = sums[0], first_merge[i] = sums[1];
                first_items[0][i] = sums[2], first_items[1][i] = sums[3];
              },
              split);
  if (tid == 0) first_merge[n] = split[1], first_items[0][n] = split[2], first_items[1][n] = split[3];
  __syncthreads();

  // --- the items of both sides, longest first ---
  int32_t* const lists[2][3] = {
      {a.prefill_request_indices, a.prefill_qo_tile_indices, a.prefill_kv_tile_indices},
      {a.decode_request_indices, a.decode_qo_tile_indices, a.decode_kv_tile_indices}};
  const int capacity[2] = {a.prefill_items, a.decode_items};
  int items[2];
  bool fits = split[0] <= a.partial_rows && split[1] <= a.merge_capacity;
#pragma unroll 1
  for (int which = 0; which < 2; which++) {
    const int* const first_item = first_items[which];
    items[which] = sort_by_class<ItemOfRequest>(
        s, split[2 + which],
        [&](int t, ItemOfRequest& item) {
          const int i = find(first_item, n, t), index = t - first_item[i];
          item.request = i, item.qo_tile = index / chunks[i], item.kv_tile = index % chunks[i];
          const int last_row = min(((item.qo_tile + 1) * tile_of[which] - 1) / a.group_size, b.rows(i) - 1);
          const int seen = max(b.kv_len[i] - b.rows(i) + last_row + 1, 0);
          int length;
          if (a.window_left >= 0) {
            // with a window a chunk starts where its tile's window does; the kernel sorts out what lies beyond it
            length = min(chunks[i] > 1 ? chunk[which] : a.window_left + tile_of[which], seen);
          } else {
            const int begin = chunks[i] > 1 ? item.kv_tile * chunk[which] : 0;
            length = (chunks[i] > 1 ? min(begin + chunk[which], seen) : seen) - begin;
            if (length <= 0 && chunks[i] > 1) return -1;  // the causal mask hides it whole
          }
          return size_class(ceil_div(length, kChunkUnit));
        },
        [&](const ItemOfRequest& item, int position) {
          if (position >= capacity[which]) return;
          lists[which][0][position] = item.request, lists[which][1][position] = item.qo_tile;
          lists[which][2][position] = item.kv_tile;
        });
    fits = fits && items[which] <= capacity[which];
  }
  if (!fits) {
    room(a, s, b, items[0], items[1], split[0], split[1]);
    return;
  }

  // --- what the attention and the merge read of each request and row ---
  for (int i = tid; i <= n; i += threads()) a.meta_qo_indptr[i] = b.qo[i], a.meta_kv_indptr[i] = b.kv[i];
  for (int i = tid; i < n; i += threads()) {
    a.meta_kv_last_page_len[i] = __ldg(a.kv_last_page_len + i);
    a.kv_chunk_size[i] = chunks[i] > 1 ? chunk[side[i]] : kUnsplit;
    a.o_indptr[i] = first_partial[i];
  }
  for (int r = tid; r < split[1]; r += threads()) {
    const int i = find(first_merge, n, r), row = r - first_merge[i];
    const int seen = b.kv_len[i] - b.rows(i) + row + 1;
    a.merge_rows[r] = b.qo[i] + row;
    a.merge_first[r] = first_partial[i] + row * chunks[i];
    // chunks beyond a row's causal limit are never written
    a.merge_count[r] = a.window_left >= 0 ? chunks[i] : ceil_div(seen, chunk[side[i]]);
  }
  finish(a, items[0], items[1], split[1], 0);
}

// Bytes of dynamic shared memory for each request that a catalog's largest bucket has, and one more.
extern "C" __device__ const uint32_t podgraph_smem_bytes_per_request = 4 * podgraph::planning::kRequestArrays;

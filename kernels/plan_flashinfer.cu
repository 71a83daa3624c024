// The planner of pod_flashinfer: from one step's metadata to FlashInfer's work lists, in one thread block.
//
// podgraph/planner/plan.py makes the same lists and explains the rules; names are the same there.
#include "plan.h"

namespace podgraph {
namespace planning {

constexpr int kChunkUnit = 128;   // CHUNK_UNIT
constexpr int kDecodeTile = 16;   // DECODE_TILE
constexpr int kLargestTile = 128;  // of prefill_tile()
enum Side { kPrefill, kDecode, kNoSide };
struct ItemOfRequest {
  int request, qo_tile, kv_tile;
};
enum Partition { kByTiles, kByKvLoad };  // PARTITIONS

// Finer chunks for decodes, and what the estimate of their time is made of: podgraph/planner/policy.py.
constexpr int kWays = 8;                // one round, and DECODE_SHARES
__constant__ const int shares_of_longest[kWays] = {0, 2, 3, 4, 6, 10, 18, 32};
constexpr int kLeastChunk = 1024;       // DECODE_LEAST_CHUNK
constexpr int kDecodeSplitRounds = 6;   // DECODE_SPLIT_ROUNDS
constexpr int kMergeCost = 16, kLevels = 8;
constexpr int kPrefillCost = 7, kPrefillCostOf = 5;  // PREFILL_COST
constexpr int kGain = 97, kGainOf = 100;             // GAIN
static_assert(kWays <= kLeastThreads / 32, "a warp looks at each way");
static_assert(kLevels <= 32, "a lane looks at each level");

// Policy.decode_time, by one warp: lane 0 has the longest level. `count` and `sum` are those of the lane's level, 0 in
// lanes without one.
__device__ __forceinline__ long long decode_time(const PlanArgs& a, int prefill_items, unsigned long long prefill_work,
                                                 int count, int sum, int longest, int parts) {
  const int lane = threadIdx.x % 32, heads = a.num_kv_heads;
  const unsigned long long before = prefill_work * heads * kChunkUnit * kPrefillCost / kPrefillCostOf;
  const long long wanted = static_cast<long long>(prefill_items) * heads;
  const int taken = static_cast<int>(min(static_cast<long long>(a.ctas / 2), wanted)), own = a.ctas - taken;
  const long long items = static_cast<long long>(warp_inclusive(count)) * heads;
  const unsigned long long work = static_cast<unsigned long long>(warp_inclusive(sum)) * heads * kChunkUnit;
  const long long length = static_cast<long long>(longest) * kChunkUnit * max(kLevels - lane, 0) / kLevels;
  auto rounds = [&](int ctas) {  // the time until this level is done
    const long long drawn = (items + ctas - 1) / ctas, above = __shfl_up_sync(kAll, drawn, 1);
    return warp_inclusive(length * (drawn - (lane ? above : 0)));
  };
  const long long own_time = rounds(own), all_time = rounds(a.ctas) + static_cast<long long>(before / max(taken, 1));
  const long long even = static_cast<long long>((before + work) / a.ctas);
  const long long spread = min(even, static_cast<long long>(work / own)) + length / 2;
  long long time = lane < kLevels ? max(min(spread, min(own_time, all_time)), even) : 0;
  for (int step = 16; step > 0; step /= 2) time = max(time, __shfl_xor_sync(kAll, time, step));
  return max(time, static_cast<long long>(longest) * kChunkUnit) + (parts > 1 ? kMergeCost * parts : 0);
}

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
  __shared__ unsigned long long prefill_work;     // the same of prefill, less what the causal mask hides
  __shared__ long long time_of_way[kWays];        // of decodes; -1: not to be taken
  extern __shared__ __align__(16) int arrays[];
  if (!admit(a)) return;
  Batch b;
  if (threadIdx.x == 0) prefill_work = 0;
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

  const int tile_of[2] = {min(max(a.prefill_tile, 1), kLargestTile), kDecodeTile};
  auto tiles_of = [&](int i, int which) {
    return side[i] == which ? ceil_div(b.rows(i) * a.group_size, tile_of[which]) : 0;
  };
  auto span_of = [&](int i, int which) {
    return max(a.window_left < 0 ? b.kv_len[i] : min(b.kv_len[i], a.window_left + tile_of[which]), 1);
  };

  // --- what each side has to do ---
  int tile_sum[2] = {}, longest[2] = {1, 1};
  unsigned long long load_sum[2] = {}, work_sum = 0;
#pragma unroll 1
  for (int i = tid; i < n; i += threads()) {
    const int which = side[i];
    if (which == kNoSide) continue;
    const int span = span_of(i, which), count = tiles_of(i, which);
    const unsigned long long load = static_cast<unsigned long long>(count) * ceil_div(span, kChunkUnit);
    if (which == kPrefill) {
      const int seen = min(span, max(b.kv_len[i] - b.rows(i) / 2, 1));
      work_sum += static_cast<unsigned long long>(count) * ceil_div(seen, kChunkUnit);
    }
#pragma unroll
    for (int k = 0; k < 2; k++)
      if (k == which) tile_sum[k] += count, longest[k] = max(longest[k], span), load_sum[k] += load;
  }
#pragma unroll
  for (int k = 0; k < 2; k++) {  // one atomic for each warp: 32 to one address would wait for one another
    tile_sum[k] = __reduce_add_sync(kAll, tile_sum[k]), longest[k] = __reduce_max_sync(kAll, longest[k]);
    if (a.partition == kByKvLoad)
      for (int step = 16; step > 0; step /= 2) load_sum[k] += __shfl_xor_sync(kAll, load_sum[k], step);
    if (tid % 32 == 0 && tile_sum[k]) {
      atomicAdd(&tiles[k], tile_sum[k]);
      atomicMax(&longest_span[k], longest[k]);
      atomicAdd(&load_of_side[k], load_sum[k]);
    }
  }
  for (int step = 16; step > 0; step /= 2) work_sum += __shfl_xor_sync(kAll, work_sum, step);
  if (tid % 32 == 0 && work_sum) atomicAdd(&prefill_work, work_sum);
  __syncthreads();

  // --- the shortest KV chunk with which a side stays within its share of one round of the grid ---
  const int round = max(1, a.ctas / a.num_kv_heads);
  int chunk[2];  // tokens
  int prefill_items = 0;  // about
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
    if (which == kPrefill && tiles[kPrefill]) prefill_items = max(tiles[kPrefill], share);
  }

  // --- finer chunks for decodes, where they are done sooner then: a warp looks at each way ---
  if (chunk[kDecode] > kLeastChunk) {
    const int way = tid / 32, lane = tid % 32, longest = longest_span[kDecode];
    auto units_of = [&](int w) {
      if (w == 0) return chunk[kDecode] / kChunkUnit;
      return max(ceil_div(longest, shares_of_longest[w] * kChunkUnit), kLeastChunk / kChunkUnit);
    };
    if (way < kWays) {
      const int units = units_of(way), tokens = units * kChunkUnit, parts = ceil_div(longest, tokens);
      const int top = parts > 1 ? units + 1 : ceil_div(longest, kChunkUnit);
      int counts[kLevels] = {}, sums[kLevels] = {}, extra = 0;
#pragma unroll 1
      for (int i = lane; i < n; i += 32) {
        if (side[i] != kDecode) continue;
        const int span = span_of(i, kDecode), own = ceil_div(span, tokens);
        const int last = ceil_div(span - (own - 1) * tokens, kChunkUnit) + (own > 1);
        const int level = kLevels - ceil_div(last * kLevels, top);  // 0 is the longest
        extra += own - 1;
#pragma unroll
        for (int k = 0; k < kLevels; k++)
          if (k == level) counts[k]++, sums[k] += last;
      }
      extra = __reduce_add_sync(kAll, extra);
      int count = 0, sum = 0;
#pragma unroll
      for (int k = 0; k < kLevels; k++) {
        const int all = __reduce_add_sync(kAll, counts[k]), length = __reduce_add_sync(kAll, sums[k]);
        if (k == lane) count = all, sum = length;
      }
      if (lane == 0) count += extra, sum += extra * top;
      const long long time = decode_time(a, prefill_items, prefill_work, count, sum, top, parts);
      const bool taken = way == 0 || (tokens < chunk[kDecode] && extra <= kDecodeSplitRounds * round);
      if (lane == 0) time_of_way[way] = taken ? time : -1;
    }
    __syncthreads();
    int best = 0;
#pragma unroll
    for (int w = 1; w < kWays; w++)
      if (time_of_way[w] >= 0 && (best == 0 || time_of_way[w] < time_of_way[best])) best = w;
    if (best && time_of_way[best] * kGainOf < time_of_way[0] * kGain) chunk[kDecode] = units_of(best) * kChunkUnit;
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
  // chunks that the causal mask hides count too: those fit as well, and a wrong number is not sorted first
  if (!room(a, split[2], split[3], split[0], split[1])) return;
  int items[2];
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
          lists[which][0][position] = item.request, lists[which][1][position] = item.qo_tile;
          lists[which][2][position] = item.kv_tile;
        });
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

// The planner of pod_sm90: from one step's metadata to prefill tiles and decode units, in one thread block.
//
// podgraph/planner/sm90.py makes the same lists and explains the rules; names are the same there.
#include "plan.h"

namespace podgraph {
namespace planning {

constexpr int kChunk = 64;         // CHUNK
constexpr int kTileUnit = 128;     // TILE_UNIT
constexpr int kLeastPart = 4;      // LEAST_PART
constexpr int kMostParts = 4095;   // MOST_PARTS
constexpr int kLeastTilePart = 2;  // LEAST_TILE_PART
constexpr int kMostTileParts = 256;  // MOST_TILE_PARTS
constexpr int kSplitRounds = 4;    // SM90_SPLIT_ROUNDS
constexpr int kCostUnit = 32;      // COST_UNIT, and the costs in it
constexpr int kWholeCost = 16, kPartCost = 80, kSplitCost = 128, kMergeCost = 11;

struct Way {
  int rounds, share;
};
constexpr int kWays = 7;  // SPLITS
__constant__ const Way ways[kWays] = {{0, 1}, {2, 8}, {2, 16}, {2, 32}, {3, 16}, {3, 32}, {5, 32}};
static_assert(kWays <= kLeastThreads / 32, "a warp looks at each way");

// What each way of splitting comes to, by size class of its units. Lies over the histograms, which are idle then.
struct Estimate {
  uint32_t units[kWays][kClasses];
  uint32_t cost[kWays][kClasses];
  long long time[kWays];          // -1: more parts than the lists have room for
};
static_assert(sizeof(Estimate) <= sizeof(Shared::histogram), "");

// Decodes in falling order of size class, and what they add up to.
struct Decodes {
  int count;
  const int* order;  // [count], requests
  const int* before; // [count], chunks of the decodes in front
  int chunks;        // of all
  unsigned long long total;  // the same times KV heads
};

// Tokens that the window hides from the row of a decode that `behind` other rows follow.
__device__ __forceinline__ int hidden(const PlanArgs& a, int kv_len, int behind) {
  return a.window_left < 0 ? 0 : max(kv_len - 1 - behind - a.window_left, 0);
}

__device__ __forceinline__ int chunks_of(const PlanArgs& a, const Batch& b, int i) {
  return ceil_div(b.kv_len[i] - hidden(a, b.kv_len[i], b.rows(i) - 1) / kChunk * kChunk, kChunk);
}

// Most steps fit in 32 bits, where a division takes a third of the time.
__device__ __forceinline__ int divide(unsigned long long a, unsigned b) {
  return static_cast<int>(a >> 32 ? a / b : static_cast<unsigned>(a) / b);
}

// A way of splitting, for one batch: no part is smaller than smallest, if it can be helped; even is the work that all
// workers' shares are measured by, 0 where nothing is split.
struct Splitting {
  int smallest, even;
  __device__ __forceinline__ Splitting(const PlanArgs& a, const Decodes& d, const Way& way)
      : smallest(max(kLeastPart, divide(d.total, a.ctas * way.share))), even(way.rounds * a.ctas) {}
  // Parts of the k-th decode, of so many chunks.
  __device__ __forceinline__ int parts(const PlanArgs& a, const Decodes& d, int k, int chunks) const {
    if (even == 0) return 1;
    const unsigned long long left = d.total - static_cast<unsigned long long>(a.num_kv_heads) * d.before[k];
    const int size = max(smallest, divide(2 * left + even - 1, even));
    return chunks <= size + smallest / 2 ? 1 : min(ceil_div(chunks, size), kMostParts);
  }
};

// The way with the least estimated time; the first of equals. A warp looks at each.
__device__ int choose_way(const PlanArgs& a, Shared& s, const Decodes& d) {
  Estimate& e = *reinterpret_cast<Estimate*>(s.histogram);
  constexpr int kEach = kClasses / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, heads = a.num_kv_heads, workers = a.ctas;
  if (warp < kWays) {
    uint32_t *const unit_counts = e.units[warp], *const costs = e.cost[warp];
    auto before = [&](int k) { return k < d.count ? d.before[k] : d.chunks; };
    // As if nothing were split: units of a class are its decodes, whose places the sort has left in class_base.
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int c = i * 32 + lane;
      const int first = s.class_base[c], next = c > 0 ? static_cast<int>(s.class_base[c - 1]) : d.count;
      unit_counts[c] = next - first;
      costs[c] = next > first ? kCostUnit * (before(next) - before(first)) + kWholeCost * (next - first) : 0;
    }
    __syncwarp();
    // The others of these are too short to be split.
    const Splitting way(a, d, ways[warp]);
    const int limit = way.smallest + way.smallest / 2;
    const int candidates = way.even == 0 ? 0 : s.class_base[size_class(limit) - 1];  // a limit is 6 at least
    int extra = 0, most = 1;  // parts beyond one each; parts of the request that has the most
#pragma unroll 1
    for (int k = lane; k < candidates; k += 32) {
      const int chunks = before(k + 1) - before(k), parts = way.parts(a, d, k, chunks);
      if (parts == 1) continue;
      const int whole = size_class(chunks), cost = kCostUnit * ceil_div(chunks, parts) + kPartCost;
      atomicAdd(&unit_counts[whole], ~0u);  // one less
      atomicAdd(&costs[whole], 0u - (kCostUnit * chunks + kWholeCost));
      atomicAdd(&unit_counts[size_class(cost / kCostUnit)], static_cast<uint32_t>(parts));
      atomicAdd(&costs[size_class(cost / kCostUnit)], static_cast<uint32_t>(parts * cost));
      extra += parts - 1, most = max(most, parts);
    }
    extra = __reduce_add_sync(kAll, extra), most = __reduce_max_sync(kAll, most);
    __syncwarp();
    // 32 neighbouring bins at a time, the largest first; most batches fill few
    uint32_t units_before = 0, cost_before = 0;
    long long draws = 0;
    int spread = 0;
#pragma unroll 1
    for (int i = 0; i < kEach; i++) {
      const int c = kClasses - 1 - (i * 32 + lane);
      const uint32_t count = unit_counts[c], sum = costs[c];
      if (!__ballot_sync(kAll, count != 0)) continue;
      const uint32_t last = units_before + warp_inclusive(count), cost = cost_before + warp_inclusive(sum);
      if (count) {
        const uint32_t mean = sum / count;
        draws += static_cast<long long>(mean) * (ceil_div(last * heads, workers) - ceil_div((last - count) * heads, workers));
        spread = max(spread, divide(static_cast<unsigned long long>(heads) * cost - mean, workers) + static_cast<int>(mean));
      }
      units_before = __shfl_sync(kAll, last, 31), cost_before = __shfl_sync(kAll, cost, 31);
    }
    spread = __reduce_max_sync(kAll, spread);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) draws += __shfl_xor_sync(kAll, draws, step);
    if (lane == 0) {
      const bool fits = extra <= kSplitRounds * ceil_div(workers, heads);
      e.time[warp] = fits ? min(draws, static_cast<long long>(spread)) + (most > 1 ? kSplitCost + kMergeCost * most : 0) : -1;
    }
  }
  __syncthreads();
  int best = 0;
#pragma unroll
  for (int w = 1; w < kWays; w++)
    if (e.time[w] >= 0 && e.time[w] < e.time[best]) best = w;
  __syncthreads();  // the histograms are used again
  return best;
}

// A Unit and a Tile of args.h, as they are stored.
struct UnitWords {
  int4 words[2];
};
struct TileWords {
  int4 words[3];
};
static_assert(sizeof(UnitWords) == sizeof(Unit) && sizeof(TileWords) == sizeof(Tile), "");

// A prefill tile before it is split over KV.
struct TileRows {
  int request, row, rows;  // row: within the request
  int position, begin, end;
  __device__ __forceinline__ int units() const { return ceil_div(end - begin, kTileUnit); }
};

__device__ __forceinline__ TileRows tile_rows(const PlanArgs& a, const Batch& b, const int* first_tile, int size,
                                              int tile) {
  TileRows t;
  t.request = find(first_tile, b.n, tile);
  t.row = (tile - first_tile[t.request]) * size;
  const int rows = b.rows(t.request);
  t.rows = min(size, rows - t.row);
  t.position = b.kv_len[t.request] - rows + t.row;
  t.begin = a.window_left < 0 ? 0 : max(t.position - a.window_left, 0) / kTileUnit * kTileUnit;
  t.end = t.position + t.rows;
  return t;
}

}  // namespace planning
}  // namespace podgraph

extern "C" __global__ void __launch_bounds__(podgraph::planning::kMostThreads)
    podgraph_plan_sm90(const __grid_constant__ podgraph::PlanArgs a) {
  using namespace podgraph;
  using namespace podgraph::planning;
  __shared__ Shared s;
  __shared__ int tile_part[kMostTileParts + 1], tile_partial[kMostTileParts + 1], tile_ticket[kMostTileParts + 1];
  extern __shared__ __align__(16) int arrays[];
  if (!admit(a)) return;
  Batch b;
  if (!load(a, s, arrays, b, [](int, const int*) {})) return;
  const int n = b.n, tid = threadIdx.x, stride = n + 1;
  int* const order = arrays + 3 * stride;
  int* const before = arrays + 4 * stride;
  int* const part_chunks = arrays + 5 * stride;
  int* const first_unit = arrays + 6 * stride;
  int* const first_partial = arrays + 7 * stride;
  int* const ticket = arrays + 8 * stride;
  int* const first_tile = arrays + 9 * stride;

  // --- decodes: which, in what order, in how many parts ---
  auto is_decode = [&](int i) { return b.rows(i) > 0 && b.rows(i) <= a.decode_rows && b.kv_len[i] > 0; };
  Decodes d;
  d.order = order, d.before = before;
  d.count = sort_by_class<int>(
      s, n,
      [&](int i, int& request) {
        request = i;
        return is_decode(i) ? size_class(chunks_of(a, b, i)) : -1;
      },
      [&](int request, int position) { order[position] = request; });
  int units[3] = {};  // units, rows of partial results, tickets
  if (d.count > 0) {
    int chunks[1];
    prefix_sums(s, d.count, [&](int k, int* v) { v[0] = chunks_of(a, b, order[k]); },
                [&](int k, const int* sums) { before[k] = sums[0]; }, chunks);
    d.chunks = chunks[0];
    d.total = static_cast<unsigned long long>(chunks[0]) * a.num_kv_heads;
    const Splitting way(a, d, ways[choose_way(a, s, d)]);
#pragma unroll 1
    for (int k = tid; k < d.count; k += threads()) {
      const int chunks = chunks_of(a, b, order[k]);
      part_chunks[k] = ceil_div(chunks, way.parts(a, d, k, chunks));
      ticket[k] = ceil_div(chunks, part_chunks[k]);  // parts: rounding up may have left the last one empty
    }
    __syncthreads();
    prefix_sums(s, d.count,
                [&](int k, int* v) {
                  const int parts = ticket[k];
                  v[0] = parts, v[1] = parts > 1 ? parts * a.decode_rows : 0, v[2] = parts > 1;
                },
                [&](int k, const int* sums) { first_unit[k] = sums[0], first_partial[k] = sums[1], ticket[k] = sums[2]; },
                units);
    if (tid == 0) first_unit[d.count] = units[0];
  }

  // --- prefill: tiles of how many rows, and which requests have rows without KV ---
  const int half = 64 / a.group_size;  // rows of one warpgroup
  int size = 2 * half;
  auto tiles_of = [&](int i) { return b.rows(i) > a.decode_rows && b.kv_len[i] > 0 ? ceil_div(b.rows(i), size) : 0; };
  int found[2];  // tiles, requests without KV
  prefix_sums(s, n, [&](int i, int* v) { v[0] = tiles_of(i), v[1] = b.rows(i) > 0 && b.kv_len[i] == 0; },
              [&](int i, const int* sums) {
                first_tile[i] = sums[0];
                if (b.rows(i) > 0 && b.kv_len[i] == 0) {
                  a.empty_rows[2 * sums[1]] = b.qo[i];
                  a.empty_rows[2 * sums[1] + 1] = b.rows(i);
                }
              },
              found);
  int tiles = found[0];
  const bool shared = a.shares_tiles && static_cast<long long>(tiles) * a.num_kv_heads <= a.ctas / 2;
  if (shared) {
    size = half;
    int total[1];
    prefix_sums(s, n, [&](int i, int* v) { v[0] = tiles_of(i); },
                [&](int i, const int* sums) { first_tile[i] = sums[0]; }, total);
    tiles = total[0];
  }
  if (tid == 0) first_tile[n] = tiles;
  __syncthreads();

  // --- tiles are split over KV where they are fewer than the CTAs ---
  const int most = a.splits_tiles ? min(a.ctas / a.num_kv_heads, kMostTileParts) : 0;
  const bool splits = tiles > 0 && tiles < most;
  int parts[3] = {tiles, 0, 0};  // parts, partial results, tickets
  int part_units = 0;
  if (splits) {
    int* const length = tile_part;  // until the parts are known
    int* const rows_of = tile_partial;
    int longest = 1;
#pragma unroll 1
    for (int t = tid; t < tiles; t += threads()) {
      const TileRows rows = tile_rows(a, b, first_tile, size, t);
      length[t] = rows.units(), rows_of[t] = rows.rows;
    }
    __syncthreads();
#pragma unroll 4
    for (int t = 0; t < tiles; t++) longest = max(longest, length[t]);
    part_units = least_fitting(s, min(kLeastTilePart, longest), longest, most, [&](int value) {
      int sum = 0;
      for (int t = tid % 32; t < tiles; t += 32) sum += ceil_div(length[t], value);
      return __reduce_add_sync(kAll, sum);
    });
    prefix_sums(s, tiles,
                [&](int t, int* v) {
                  const int count = ceil_div(length[t], part_units);
                  v[0] = count, v[1] = count > 1 ? count * rows_of[t] : 0, v[2] = count > 1;
                },
                [&](int t, const int* sums) {
                  tile_part[t] = sums[0], tile_partial[t] = sums[1], tile_ticket[t] = sums[2];
                },
                parts);
    if (tid == 0) tile_part[tiles] = parts[0];
    __syncthreads();
  }

  if (!room(a, parts[0], units[0], units[1] + parts[1], units[2] + parts[2])) return;

  // --- both lists, longest first ---
  auto make_unit = [&](int u, UnitWords& unit) {
    const int k = find(first_unit, d.count, u), i = order[k];
    const int number = u - first_unit[k], count = first_unit[k + 1] - first_unit[k];
    const int more_rows = b.rows(i) - 1;
    const int start = hidden(a, b.kv_len[i], more_rows) / kChunk * kChunk;
    const int begin = start + number * part_chunks[k] * kChunk;
    const int end = min(begin + part_chunks[k] * kChunk, b.kv_len[i]);
    const int skip = number == 0 ? hidden(a, b.kv_len[i], 0) - start : 0;
    unit.words[0] = make_int4(b.kv[i], b.kv[i + 1] - b.kv[i], begin, end);
    unit.words[1] = make_int4(b.qo[i], first_partial[k], number | count << 12 | skip << 24,
                              ticket[k] | more_rows << 16 | min(b.kv_len[i] - end, more_rows) << 20);
    return size_class(ceil_div(end - begin, kChunk));
  };
  UnitWords* const all_units = reinterpret_cast<UnitWords*>(a.units);
  if (units[0] == d.count) {  // nothing is split: they are sorted already
#pragma unroll 1
    for (int u = tid; u < units[0]; u += threads()) {
      UnitWords unit;
      make_unit(u, unit);
      all_units[u] = unit;
    }
  } else {
    sort_by_class<UnitWords>(s, units[0], make_unit,
                             [&](const UnitWords& unit, int position) { all_units[position] = unit; });
  }
  if (parts[0] > 0) {
    sort_by_class<TileWords>(
        s, parts[0],
        [&](int p, TileWords& tile) {
          const int t = splits ? find(tile_part, tiles, p) : p;
          const int number = splits ? p - tile_part[t] : 0, count = splits ? tile_part[t + 1] - tile_part[t] : 1;
          const TileRows rows = tile_rows(a, b, first_tile, size, t);
          const int begin = rows.begin + number * part_units * kTileUnit, i = rows.request;
          const int end = splits ? min(begin + part_units * kTileUnit, rows.end) : rows.end;
          tile.words[0] = make_int4(b.kv[i], b.kv[i + 1] - b.kv[i], b.qo[i] + rows.row, rows.rows);
          tile.words[1] = make_int4(rows.position, b.kv_len[i], begin, end);
          tile.words[2] = make_int4(shared, units[1] + (splits ? tile_partial[t] : 0), number | count << 12,
                                    units[2] + (splits ? tile_ticket[t] : 0));
          return size_class(ceil_div(end - begin, kChunk));
        },
        [&](const TileWords& tile, int position) { reinterpret_cast<TileWords*>(a.tiles)[position] = tile; });
  }
  finish(a, parts[0], units[0], 0, found[1]);
}

// Bytes of dynamic shared memory for each request that a catalog's largest bucket has, and one more.
extern "C" __device__ const uint32_t podgraph_smem_bytes_per_request = 4 * podgraph::planning::kRequestArrays;

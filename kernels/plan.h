// What the planner's kernels share: one thread block that checks a step's metadata, and block-wide prefix sums and
// counting sort. podgraph/planner/ makes the same lists in numpy, number for number; everything is in integers.
//
// The block has kLeastThreads to kMostThreads threads, more for more requests: every warp issues every instruction,
// with work or without, and so a small batch is planned sooner by few warps.
#pragma once
#include "args.h"

namespace podgraph {
namespace planning {

constexpr int kLeastThreads = 256, kMostThreads = 1024, kMostWarps = kMostThreads / 32;
constexpr unsigned kAll = 0xffffffffu;

// Size classes, as in podgraph/planner/order.py: lengths of one class differ by 1/16 at most.
constexpr int kSteps = 16, kClasses = 256;
static_assert(kClasses <= kLeastThreads, "a thread sums up each class");

// Arrays of one entry for each request (and one more) that a planner keeps in shared memory.
constexpr int kRequestArrays = 10;

constexpr int kMostSums = 4;
constexpr int kTogether = 4;  // rows of the histogram that a thread sums up at a time
static_assert(kMostWarps % kTogether == 0, "");

struct Shared {
  uint32_t histogram[kMostWarps][kClasses];  // of each warp's share of the items, then where they go
  uint32_t class_base[kClasses];
  int warp_sums[kMostWarps][kMostSums];
  unsigned long long error;  // request << 8 | Refusal, the least one
  int votes[kMostWarps];
};

__device__ __forceinline__ int threads() { return static_cast<int>(blockDim.x); }
__device__ __forceinline__ int warps() { return static_cast<int>(blockDim.x) / 32; }

// Of a number that is not negative. Unsigned: a division by a constant is a shift then.
__device__ __forceinline__ int ceil_div(int a, int b) {
  return static_cast<int>((static_cast<unsigned>(a) + b - 1) / static_cast<unsigned>(b));
}
// The same by the number of threads or warps, a power of two.
__device__ __forceinline__ int ceil_shift(int a, int b) { return (a + b - 1) >> (31 - __clz(b)); }

__device__ __forceinline__ int size_class(int length) {
  if (length < 2 * kSteps) return length;
  const int exponent = 31 - __clz(length);
  return kSteps * (exponent - 3) + ((length >> (exponent - 4)) & (kSteps - 1));
}

// The index i with prefix[i] <= item < prefix[i + 1]; prefix has count + 1 entries, the last one above item.
__device__ __forceinline__ int find(const int* prefix, int count, int item) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (prefix[middle] <= item) low = middle;
    else high = middle;
  }
  return low;
}

template <class T>
__device__ __forceinline__ T warp_inclusive(T value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(kAll, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// K prefix sums at once. value(i, v) gives item i's numbers, store(i, before) receives the sums in front of it; both
// are called by one thread for each item, value twice. Every thread gets the totals.
//
// Most of a small plan is spent on fetching code that runs once, so value is inlined once: two passes of one loop.
template <int K, class Value, class Store>
__device__ __forceinline__ void prefix_sums(Shared& s, int items, Value value, Store store, int (&total)[K]) {
  static_assert(K <= kMostSums, "");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int each = ceil_shift(items, threads());
  const int begin = min(static_cast<int>(threadIdx.x) * each, items), end = min(begin + each, items);
  int before[K] = {};
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {
#pragma unroll 1
    for (int i = begin; i < end; i++) {
      int v[K];
      value(i, v);
      if (pass) store(i, before);
#pragma unroll
      for (int k = 0; k < K; k++) before[k] += v[k];
    }
    if (pass) break;
#pragma unroll
    for (int k = 0; k < K; k++) {
      const int inclusive = warp_inclusive(before[k]);
      if (lane == 31) s.warp_sums[warp][k] = inclusive;
      before[k] = inclusive - before[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; k++) {
      const int sum = lane < warps() ? s.warp_sums[lane][k] : 0;
      total[k] = __reduce_add_sync(kAll, sum);
      before[k] += __reduce_add_sync(kAll, lane < warp ? sum : 0);
    }
  }
  __syncthreads();
}

// Stable counting sort, largest class first. make(i, item) fills in item i and gives its class, or -1 to leave it out;
// put(item, position) stores it. Returns how many items stay.
template <class Item, class Make, class Put>
__device__ __forceinline__ int sort_by_class(Shared& s, int items, Make make, Put put) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int each = ceil_div(ceil_shift(items, warps()), 32) * 32;  // items of a warp, neighbours
  const int busy = each ? ceil_div(items, each) : 0;             // warps that have any
  const int begin = min(warp * each, items), end = min(begin + each, items);
  uint32_t* const mine = s.histogram[warp];
  if (warp < busy)
    for (int c = lane; c < kClasses; c += 32) mine[c] = 0;
  int total[1] = {0};
  // Once to count, and once more to place. Each round takes 32 neighbours; the first lane of each class counts for all.
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {
    __syncwarp();
#pragma unroll 1
    for (int first = begin; first < end; first += 32) {
      Item item;
      const int i = first + lane, c = i < end ? make(i, item) : -1;
      const unsigned same = __match_any_sync(kAll, c);
      const int rank = __popc(same & ((1u << lane) - 1));
      const uint32_t counted = c >= 0 ? mine[c] : 0;
      if (c >= 0 && pass) put(item, static_cast<int>(s.class_base[c] + counted) + rank);
      __syncwarp();
      if (c >= 0 && rank == 0) mine[c] = counted + __popc(same);
      __syncwarp();
    }
    __syncthreads();
    if (pass) break;
    // In falling order of class: where the items of each warp in it begin.
    const int c = kClasses - 1 - static_cast<int>(threadIdx.x);
    uint32_t sum = 0;
    if (c >= 0) {
#pragma unroll 1
      for (int w = 0; w < busy; w += kTogether) {  // several loads in flight; rows of idle warps are never read again
        uint32_t counts[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; j++) counts[j] = s.histogram[w + j][c];
#pragma unroll
        for (int j = 0; j < kTogether; j++) {
          s.histogram[w + j][c] = sum;
          if (w + j < busy) sum += counts[j];
        }
      }
    }
    prefix_sums(s, threads(), [&](int, int* v) { v[0] = static_cast<int>(sum); },
                [&](int, const int* before) { if (c >= 0) s.class_base[c] = before[0]; }, total);
  }
  return total[0];
}

// The least value from low to high that fits; high where none does. fits(value) must hold for all values above one for
// which it holds; cost(value) is called by whole warps.
template <class Cost>
__device__ __forceinline__ int least_fitting(Shared& s, int low, int high, int limit, Cost cost) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  while (low < high) {  // each round looks at as many values as there are warps
    const int step = ceil_shift(high - low, warps()), value = low + warp * step;
    const bool fits = value >= high || cost(value) <= limit;
    if (lane == 0) s.votes[warp] = fits;
    __syncthreads();
    const unsigned votes = __ballot_sync(kAll, lane < warps() && s.votes[lane] != 0);
    __syncthreads();
    const int first = votes ? __ffs(votes) - 1 : warps();
    high = min(high, low + first * step);
    if (first > 0) low += (first - 1) * step + 1;
  }
  return low;
}

// One step's metadata in shared memory.
struct Batch {
  int n;
  int* qo;      // [n + 1]
  int* kv;      // [n + 1]
  int* kv_len;  // [n]
  __device__ __forceinline__ int rows(int i) const { return qo[i + 1] - qo[i]; }
};

__device__ __forceinline__ void refuse(Shared& s, int request, Refusal why) {
  atomicMin(&s.error, static_cast<unsigned long long>(request) << 8 | why);
}

// What a Report says was got, for a request that is wrong in some way.
__device__ __forceinline__ int got(const PlanArgs& a, const Batch& b, int i, int why, const int (&demand)[4],
                                   uint32_t bad_page) {
  switch (why) {
    case kQoIndptr: return b.qo[i + 1];
    case kKvIndptr: return b.kv[i + 1];
    case kLastPageLen: return __ldg(a.kv_last_page_len + i);
    case kShortKv:
    case kLongKv: return b.kv_len[i];
    case kTooManyRows: return b.qo[b.n];
    case kTooManyPages: return b.kv[b.n];
    case kTooManyPrefills: return demand[0] + max(0, demand[2] - a.decode_count);
    case kTooManyPrefillRows: return demand[1];
    case kTooManyRequests: return b.n;
    case kGivenPrefillLen: return demand[1];
    case kGivenDecodeCount: return demand[2];
    case kPageIndex: return __ldg(a.kv_indices + bad_page);
  }
  return 0;
}

// Refuses the step: an empty work list, and a report. Called by all threads after a barrier.
__device__ __forceinline__ void give_up(const PlanArgs& a, Shared& s, const Batch& b, const int (&demand)[4],
                                        uint32_t bad_page) {
  if (threadIdx.x != 0) return;
  for (int i = 0; i <= kEmptyRequests; i++) a.counts[i] = 0;
  const int why = s.error & 0xff, request = static_cast<int>(s.error >> 8);
  *reinterpret_cast<int4*>(a.status) = make_int4(why, request, got(a, b, request, why, demand, bad_page), 0);
  __threadfence_system();
}

// Brings in one step's metadata and checks it against the bucket. False: the step was refused. `arrays` holds
// kRequestArrays arrays of num_requests + 1 ints, of which the batch takes the first three. store(i, before) is called
// for each request with the prefills, their rows, the decodes and their rows in front of it.
template <class Store>
__device__ __forceinline__ bool load(const PlanArgs& a, Shared& s, int* arrays, Batch& b, Store store) {
  const int n = a.num_requests, tid = threadIdx.x;
  b = Batch{n, arrays, arrays + (n + 1), arrays + 2 * (n + 1)};
  if (tid == 0) s.error = ~0ull;
  const uint32_t bad_page = a.num_pages > 0 ? *a.bad_page : ~0u;
#pragma unroll 1
  for (int i = tid; i <= n; i += threads()) {
    b.qo[i] = __ldg(a.qo_indptr + i);
    b.kv[i] = __ldg(a.kv_indptr + i);
    if (i < n) b.kv_len[i] = __ldg(a.kv_last_page_len + i);
  }
  __syncthreads();
  if (tid == 0 && a.num_pages > 0) *a.bad_page = ~0u;  // ready for the next check; every thread has read it
  auto refuse_request = [&](int i, Refusal why) { refuse(s, i, why); };
#pragma unroll 1
  for (int i = tid; i < n; i += threads()) {
    const long long rows = static_cast<long long>(b.qo[i + 1]) - b.qo[i];
    const long long pages = static_cast<long long>(b.kv[i + 1]) - b.kv[i];
    const int last = b.kv_len[i];
    const long long len = pages > 0 ? (pages - 1) * a.page_size + last : 0;
    b.kv_len[i] = len > 0x7fffffffll ? 0x7fffffff : static_cast<int>(len);
    if (b.qo[i] < 0 || rows < 0) refuse_request(i, kQoIndptr);
    else if (b.kv[i] < 0 || pages < 0) refuse_request(i, kKvIndptr);
    else if (pages > 0 && (last < 1 || last > a.page_size)) refuse_request(i, kLastPageLen);
    else if (len > 0 && len < rows) refuse_request(i, kShortKv);
    else if (len > a.max_kv_len) refuse_request(i, kLongKv);
    else if (bad_page != ~0u && bad_page >= static_cast<uint32_t>(b.kv[i]) &&
             bad_page < static_cast<uint32_t>(b.kv[i + 1])) refuse_request(i, kPageIndex);
  }
  if (tid == 0 && n > 0) {
    if (b.qo[n] > a.rows) refuse(s, n, kTooManyRows);
    else if (b.kv[n] > a.num_indices || static_cast<long long>(b.kv[n]) - b.kv[0] > a.max_pages)
      refuse(s, n, kTooManyPages);
  }
  // prefills, their rows, decodes, their rows
  int demand[4];
  prefix_sums(s, n, [&](int i, int* v) {
    const int rows = b.rows(i), prefill = rows > a.decode_rows, decode = rows > 0 && !prefill;
    v[0] = prefill, v[1] = prefill ? rows : 0, v[2] = decode, v[3] = decode ? rows : 0;
  }, store, demand);
  if (tid == 0 && s.error == ~0ull) {
    const int overflow = max(0, demand[2] - a.decode_count);  // decodes that take prefill slots
    const int more_rows = min(overflow * a.decode_rows, demand[3]);
    if (n > a.batch) refuse(s, n, kTooManyRequests);
    else if (demand[0] + overflow > a.batch - a.decode_count) refuse(s, n, kTooManyPrefills);
    else if (demand[1] + more_rows > a.prefill_len) refuse(s, n, kTooManyPrefillRows);
    else if (a.given_prefill_len >= 0 && a.given_prefill_len != demand[1]) refuse(s, n, kGivenPrefillLen);
    else if (a.given_decode_count >= 0 && a.given_decode_count != demand[2]) refuse(s, n, kGivenDecodeCount);
  }
  __syncthreads();
  if (s.error == ~0ull) return true;
  give_up(a, s, b, demand, bad_page);
  return false;
}

// The lists have room for every batch that fits the bucket; should they not, nothing is written.
__device__ __forceinline__ bool room(const PlanArgs& a, Shared& s, const Batch& b, int prefill_items, int decode_items,
                                     int partial_rows, int merge_rows) {
  if (prefill_items <= a.prefill_items && decode_items <= a.decode_items && partial_rows <= a.partial_rows &&
      merge_rows <= a.merge_capacity)
    return true;
  const int demand[4] = {};
  if (threadIdx.x == 0) s.error = static_cast<unsigned long long>(b.n) << 8 | kCapacity;
  give_up(a, s, b, demand, ~0u);
  return false;
}

__device__ __forceinline__ void finish(const PlanArgs& a, int prefill_items, int decode_items, int merge_rows,
                                       int empty_requests) {
  if (threadIdx.x != 0) return;
  a.counts[kNumRequests] = a.num_requests;
  a.counts[kPrefillItems] = prefill_items;
  a.counts[kDecodeItems] = decode_items;
  a.counts[kMergeRows] = merge_rows;
  a.counts[kEmptyRequests] = empty_requests;
  *a.kv_indices_at = a.kv_indices;
}

}  // namespace planning
}  // namespace podgraph

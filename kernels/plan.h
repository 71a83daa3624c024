// What the planner's kernels share: one thread block that checks a step's metadata, and block-wide prefix sums and
// counting sort. podgraph/planner/ makes the same lists in numpy, number for number; everything is in integers.
//
// Metadata and the step's scalars may be any 32-bit numbers: the checks are exact for all of them, nothing is read or
// written out of bounds, and only what passed goes on. The other parameters are the catalog's, checked when it is read.
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

// MAX_COUNT: no specification and no bucket has more tokens or rows. Keeps what follows from them within 32 bits.
constexpr int kMostTokens = 1 << 24;

constexpr int kMostSums = 4;
constexpr int kTogether = 4;  // rows of the histogram that a thread sums up at a time
static_assert(kMostWarps % kTogether == 0, "");

struct Shared {
  uint32_t histogram[kMostWarps][kClasses];  // of each warp's share of the items, then where they go
  uint32_t class_base[kClasses];
  int warp_sums[kMostWarps][kMostSums];
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

// Sums and differences of metadata that are not checked yet may leave 32 bits, which is undefined for signed numbers.
__device__ __forceinline__ int wrapping(unsigned value) { return static_cast<int>(value); }
template <class T>
__device__ __forceinline__ T sum_of(T a, T b) { return a + b; }
__device__ __forceinline__ int sum_of(int a, int b) {
  return wrapping(static_cast<unsigned>(a) + static_cast<unsigned>(b));
}

template <class T>
__device__ __forceinline__ T warp_inclusive(T value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(kAll, value, step);
    if (lane >= step) value = sum_of(value, other);
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
      for (int k = 0; k < K; k++) before[k] = sum_of(before[k], v[k]);
    }
    if (pass) break;
#pragma unroll
    for (int k = 0; k < K; k++) {
      const int inclusive = warp_inclusive(before[k]);
      if (lane == 31) s.warp_sums[warp][k] = inclusive;
      before[k] = wrapping(static_cast<unsigned>(inclusive) - static_cast<unsigned>(before[k]));
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; k++) {
      const int sum = lane < warps() ? s.warp_sums[lane][k] : 0;
      total[k] = __reduce_add_sync(kAll, sum);
      before[k] = sum_of(before[k], static_cast<int>(__reduce_add_sync(kAll, lane < warp ? sum : 0)));
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
  __device__ __forceinline__ int rows(int i) const {
    return wrapping(static_cast<unsigned>(qo[i + 1]) - static_cast<unsigned>(qo[i]));
  }
};

// Refuses the step: an empty work list, and a report. Called by one thread.
__device__ __forceinline__ void refuse(const PlanArgs& a, int why, int request, int got) {
  for (int i = 0; i <= kEmptyRequests; i++) a.counts[i] = 0;
  if (*const_cast<volatile int32_t*>(a.status) == kAccepted)
    *reinterpret_cast<int4*>(a.status) = make_int4(why, request, got, a.plan_number);
  __threadfence_system();
}

// Whether there are no more requests than the bucket, shared memory and lists hold; looked at before anything else.
__device__ __forceinline__ bool holds_requests(const PlanArgs& a) {
  return a.num_requests >= 0 && a.num_requests <= min(a.batch, a.requests);
}

// Refuses a step with any other number of requests. What a planner begins with; false: it ends there.
__device__ __forceinline__ bool admit(const PlanArgs& a) {
  if (holds_requests(a)) return true;
  if (threadIdx.x == 0) {
    if (a.num_pages != 0) *a.bad_page = ~0u;
    refuse(a, kTooManyRequests, a.num_requests, a.num_requests);
  }
  return false;
}

// Of all that is wrong with a step the first request counts, then the first Refusal: the least of these.
__device__ __forceinline__ int wrong(int request, Refusal why) { return request << 8 | why; }
constexpr int kNothingWrong = 0x7fffffff;

__device__ __forceinline__ bool begins_elsewhere(const PlanArgs& a, const Batch& b) {
  return b.qo[0] < 0 || (a.plan_number != 0 && b.qo[0] != a.first_row);
}

// What a Report says was got, for a request that is wrong in some way.
__device__ __forceinline__ int got(const PlanArgs& a, const Batch& b, int i, int why, const int (&demand)[4],
                                   uint32_t bad_page) {
  switch (why) {
    case kQoIndptr: return b.qo[i == 0 && begins_elsewhere(a, b) ? 0 : i + 1];
    case kKvIndptr: return b.kv[i == 0 && b.kv[0] != 0 ? 0 : i + 1];
    case kLastPageLen: return __ldg(a.kv_last_page_len + i);
    case kShortKv:
    case kLongKv: return b.kv_len[i];
    case kTooManyRows: return b.qo[b.n];
    case kTooManyPages: return b.kv[b.n];
    case kTooManyPrefills: return demand[0] + max(0, demand[2] - a.decode_count);
    case kTooManyPrefillRows: return demand[1];
    case kGivenPrefillLen: return demand[1];
    case kGivenDecodeCount: return demand[2];
    case kPageIndex: return static_cast<long long>(bad_page) < a.num_indices ? __ldg(a.kv_indices + bad_page) : 0;
  }
  return 0;
}

// Brings in one step's metadata, which `admit` has let in, and checks it against the bucket. False: the step was
// refused. `arrays` holds kRequestArrays arrays of num_requests + 1 ints, of which the batch takes the first three.
// store(i, before) is called for each request with the prefills, their rows, the decodes and their rows in front of it.
template <class Store>
__device__ __forceinline__ bool load(const PlanArgs& a, Shared& s, int* arrays, Batch& b, Store store) {
  const int n = a.num_requests, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  b = Batch{n, arrays, arrays + (n + 1), arrays + 2 * (n + 1)};
  const uint32_t bad_page = a.num_pages != 0 ? *a.bad_page : ~0u;
#pragma unroll 1
  for (int i = tid; i <= n; i += threads()) {
    b.qo[i] = __ldg(a.qo_indptr + i);
    b.kv[i] = __ldg(a.kv_indptr + i);
    if (i < n) b.kv_len[i] = __ldg(a.kv_last_page_len + i);
  }
  __syncthreads();
  if (tid == 0 && a.num_pages != 0) *a.bad_page = ~0u;  // ready for the next check; every thread has read it
  int worst = kNothingWrong;
  if (tid == 0) {
    if (begins_elsewhere(a, b)) worst = wrong(0, kQoIndptr);
    else if (b.kv[0] != 0) worst = wrong(0, kKvIndptr);
  }
#pragma unroll 1
  for (int i = tid; i < n; i += threads()) {
    const long long rows = static_cast<long long>(b.qo[i + 1]) - b.qo[i];
    const long long pages = static_cast<long long>(b.kv[i + 1]) - b.kv[i];
    const int last = b.kv_len[i];
    const long long len = pages > 0 ? (pages - 1) * a.page_size + last : 0;
    b.kv_len[i] = len > 0x7fffffffll ? 0x7fffffff : static_cast<int>(len);
    // that nothing is negative follows from where both begin
    int why = kAccepted;
    if (rows < 0) why = kQoIndptr;
    else if (pages < 0) why = kKvIndptr;
    else if (pages > 0 && (last < 1 || last > a.page_size)) why = kLastPageLen;
    else if (len > 0 && len < rows) why = kShortKv;
    else if (len > min(a.max_kv_len, kMostTokens)) why = kLongKv;
    else if (bad_page >= static_cast<uint32_t>(b.kv[i]) && bad_page < static_cast<uint32_t>(b.kv[i + 1]))
      why = kPageIndex;
    if (why != kAccepted) worst = min(worst, wrong(i, static_cast<Refusal>(why)));
  }
  // the maximum of the complements is the least: this one is the first refusal of the warp
  worst = ~__reduce_max_sync(kAll, ~worst);
  if (lane == 0) s.votes[warp] = worst;
  // prefills, their rows, decodes, their rows
  int demand[4];
  prefix_sums(s, n, [&](int i, int* v) {
    const int rows = b.rows(i), prefill = rows > a.decode_rows, decode = rows > 0 && !prefill;
    v[0] = prefill, v[1] = prefill ? rows : 0, v[2] = decode, v[3] = decode ? rows : 0;
  }, store, demand);
  // every thread comes to the same end
  worst = ~__reduce_max_sync(kAll, lane < warps() ? ~s.votes[lane] : ~kNothingWrong);
  if (worst == kNothingWrong) {
    const int decode_slots = a.decode_count;
    const long long overflow = max(0ll, static_cast<long long>(demand[2]) - decode_slots);  // decodes in prefill slots
    const long long more_rows = min(overflow * a.decode_rows, static_cast<long long>(demand[3]));
    Refusal why = kAccepted;
    if (b.qo[n] > a.rows) why = kTooManyRows;
    else if (b.kv[n] > min(a.num_indices, a.max_pages)) why = kTooManyPages;
    else if (demand[0] + overflow > static_cast<long long>(a.batch) - decode_slots) why = kTooManyPrefills;
    else if (demand[1] + more_rows > min(a.prefill_len, kMostTokens)) why = kTooManyPrefillRows;
    else if (a.given_prefill_len >= 0 && a.given_prefill_len != demand[1]) why = kGivenPrefillLen;
    else if (a.given_decode_count >= 0 && a.given_decode_count != demand[2]) why = kGivenDecodeCount;
    if (why == kAccepted) return true;
    worst = wrong(n, why);
  }
  if (tid == 0) refuse(a, worst & 0xff, worst >> 8, got(a, b, worst >> 8, worst & 0xff, demand, bad_page));
  return false;
}

// The lists have room for every batch that fits the bucket; should they not, nothing is written.
__device__ __forceinline__ bool room(const PlanArgs& a, int prefill_items, int decode_items, int partial_rows,
                                     int merge_rows) {
  if (prefill_items <= a.prefill_items && decode_items <= a.decode_items && partial_rows <= a.partial_rows &&
      merge_rows <= a.merge_capacity)
    return true;
  if (threadIdx.x == 0) refuse(a, kCapacity, a.num_requests, 0);
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

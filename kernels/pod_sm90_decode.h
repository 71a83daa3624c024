// The decode side of pod_sm90: a producer warp that feeds K and V chunk by chunk, and one warpgroup that multiplies them
// with the query heads of one group.
//
// Decode is bound by memory, so its products may waste tensor throughput: logits^T = K q^T takes 64 tokens as the rows and
// the group, padded to 8, as the columns; out^T = V^T weights^T likewise. Few registers are enough then, and the other
// warpgroups keep theirs.
#pragma once
#include "pod_sm90_memory.h"

namespace podgraph::sm90 {

// Draws units and brings in their queries, K and V. A unit is prepared in three steps (draw, read, announce) during the
// last chunks of the one before, so that none of the three latencies is waited for.
PODGRAPH_DEVICE void produce_decode(const Args& a, Memory& memory) {
  const int lane = threadIdx.x % 32;
  constexpr int kRowPieces = kHeadDim / 8, kPieces = kGroup * kRowPieces;  // 16 bytes each
  constexpr int kPrepareChunks = 6;  // before the end: three steps with time between them
  const KvMaps& maps = *static_cast<const KvMaps*>(a.kv_maps);
  const Unit* units = reinterpret_cast<const Unit*>(a.units);
  const int heads = a.num_kv_heads, tickets = __ldg(a.counts + kDecodeItems) * heads;
  const uint32_t full = shared_address(memory.slot_full), empty = shared_address(memory.slot_empty);

  // The list holds an entry for each CTA at least, so the first unit needs no answer from the counter.
  int ticket = blockIdx.x, prepared = 1, number = 0, next_page = 0;
  Unit next;
  auto token_of_lane = [&](int begin) { return begin + lane % kBoxes * kBox; };
  auto page_of = [&](int kv_offset, int num_pages, int token) {
    return __ldg(a.kv_indices + kv_offset + min(token / kPage, num_pages - 1));
  };
  auto prepare = [&]() {
    if (prepared == 0) {
      if (lane == 0) ticket = atomicAdd(a.counters + 1, 1) + gridDim.x;
    } else if (prepared == 1) {
      ticket = __shfl_sync(~0u, ticket, 0);
      if (ticket < tickets) next = units[ticket / heads];
    } else if (ticket < tickets) {
      next_page = page_of(next.kv_offset, next.num_pages, token_of_lane(next.begin));
      // Of `number` units so far the warpgroup is done with all but the last: queries and info of the one before may go.
      // It only waits for chunks that are on their way, the last unit's first one among them, so this wait ends.
      const int odd = number & 1;
      barrier_wait(shared_address(memory.unit_empty) + 8 * odd, (number >> 1 & 1) ^ 1);
      const DType* row = static_cast<const DType*>(a.q) + static_cast<int64_t>(next.row) * a.q_stride_n +
                         ticket % heads * kGroup * a.q_stride_h;
      const uint32_t target = shared_address(memory.decode_query[odd]);
      for (int i = lane; i < kPieces; i += 32) {
        const int column = i / kRowPieces, piece = i % kRowPieces;
        copy_async(target + piece * (kColumns * 16) + column * 16, row + column * a.q_stride_h + piece * 8, true);
      }
      if (lane == 0) {
        memory.units[odd] = {next.row, ticket % heads, next.first_part, next.parts & 4095, next.parts >> 12 & 4095,
                             next.ticket, next.parts >> 24, 0};
      }
    }
    prepared++;
  };

  int slot = 0, parity = 1;  // of a wait for an empty slot: the first round finds all of them so
  while (true) {
    while (prepared < 3) prepare();
    if (ticket >= tickets) break;
    const int kv_head = ticket % heads, odd = number & 1, first = next.begin, end = next.end;
    const int kv_offset = next.kv_offset, num_pages = next.num_pages;
    int page = next_page;
    copy_async_wait();
    fence_async_proxy();
    __syncwarp();  // every lane's queries are in before any chunk of the unit is announced
    number++;
    prepared = 0;
    for (int begin = first; begin < end; begin += kChunk) {
      const int this_page = page, token = token_of_lane(begin), left = end - begin;
      if (left > kChunk) page = page_of(kv_offset, num_pages, token + kChunk);
      const int boxes = min(kBoxes, (left + kBox - 1) / kBox);
#pragma unroll
      for (int values = 0; values < 2; values++) {
        // the warpgroup has read what the slot held a round ago
        barrier_wait(empty + 8 * slot, parity);
        if (lane == 0) {
          if (!values) {
            memory.slot_info[slot] = min(left, kChunk) | (begin == first ? kFirst : 0) | (left <= kChunk ? kLast : 0) |
                                     (odd ? kOdd : 0);
          }
          barrier_expect(full + 8 * slot, boxes * kBox * kTokenBytes);
        }
        __syncwarp();  // no bytes may arrive before they are expected
        if (lane < boxes) {
          load_box(memory, values ? maps.v.decode : maps.k.decode, values,
                   shared_address(memory.slots[slot]) + lane * (kBox * kTokenBytes), full + 8 * slot, kv_head,
                   token % kPage / 8, this_page, kEvictFirst);
        }
        if (++slot == kSlots) slot = 0, parity ^= 1;
      }
      if (left <= kPrepareChunks * kChunk && prepared < 3) prepare();
    }
  }
  barrier_wait(empty + 8 * slot, parity);
  if (lane == 0) {
    memory.slot_info[slot] = -1;
    barrier_arrive(full + 8 * slot);
  }
  finish(a);
}

// Adds up the partial results of a row's query heads, in the order of their numbers: the same bits every time.
PODGRAPH_DEVICE void merge_parts(const Args& a, int row, int kv_head, int first, int parts, int warp, int lane) {
  const int stride = a.num_qo_heads;
  for (int column = warp; column < kGroup; column += 4) {
    const int head = kv_head * kGroup + column;
    const float* lse = a.partial_lse + static_cast<int64_t>(first) * stride + head;
    const float* out = static_cast<const float*>(a.partial_out) +
                       (static_cast<int64_t>(first) * stride + head) * kHeadDim + lane * 2;
    float most = -INFINITY;
    for (int i = lane; i < parts; i += 32) most = fmaxf(most, __ldcg(lse + static_cast<int64_t>(i) * stride));
#pragma unroll
    for (int d = 1; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    float sums[kHalves * 2] = {}, total = 0;
#pragma unroll 4
    for (int i = 0; i < parts; i++) {
      const float weight = exp2(__ldcg(lse + static_cast<int64_t>(i) * stride) - most);
      total += weight;
#pragma unroll
      for (int h = 0; h < kHalves; h++) {
        const float2 pair =
            __ldcg(reinterpret_cast<const float2*>(out + static_cast<int64_t>(i) * stride * kHeadDim + h * 64));
        sums[2 * h] += weight * pair.x;
        sums[2 * h + 1] += weight * pair.y;
      }
    }
    const float inverse = 1.f / total;
    const int64_t at = static_cast<int64_t>(row) * a.num_qo_heads + head;
#pragma unroll
    for (int h = 0; h < kHalves; h++) {
      *reinterpret_cast<uint32_t*>(static_cast<DType*>(a.out) + at * kHeadDim + h * 64 + lane * 2) =
          pack(sums[2 * h] * inverse, sums[2 * h + 1] * inverse);
    }
    if (a.lse != nullptr && lane == 0) a.lse[at] = most + __log2f(total);
  }
}

// The decode warpgroup: chunk after chunk, the products of one with K and with V, in turn.
PODGRAPH_DEVICE void consume_decode(const Args& a, Memory& memory) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const float scale = logit_scale(a), lag = kLag / scale, over_cap = kSoftCap ? a.sm_scale / a.logits_soft_cap : 0.f;
  const uint32_t full = shared_address(memory.slot_full), empty = shared_address(memory.slot_empty);
  const uint32_t slots = shared_address(memory.slots), queries = shared_address(memory.decode_query);
  const uint32_t sums = shared_address(memory.decode_sums);
  const volatile int* slot_info = memory.slot_info;

  // columns beyond the group stay zero: only the group's own are ever written again
  for (int x = thread; x < 2 * kDecodeQueryBytes / 4; x += 128) {
    if (x / 4 % kColumns >= kGroup) store(queries + 4 * x, 0u);
  }
  fence_async_proxy();
  sync<128>(kDecode);

  // This thread has tokens r = 16 warp + g and r + 8 of a chunk, columns 2 t and 2 t + 1.
  float logits[4] = {}, out[kHalves][4] = {};
  float max0 = -INFINITY, max1 = -INFINITY, sum0 = 0, sum1 = 0;
  int slot = 0, parity = 0;
  auto advance = [&]() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  };
  auto multiply_keys = [&](int at, int odd) {
    const uint64_t k_matrix = matrix(slots + at * kChunkBytes, 16, kGroupBytes, kSwizzle128);
    const uint64_t q_matrix = matrix(queries + odd * kDecodeQueryBytes, kColumns * 16, kColumns * 16, kNoSwizzle);
    pin(logits);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; k++) {
      multiply8<false>(logits, k_matrix + (k / 4) * (kAtomBytes >> 4) + (k % 4) * 2, q_matrix + k * 16, k > 0);
    }
    wgmma_commit();
  };
  auto release = [&](int at) {
    if (lane == 0) barrier_arrive(empty + 8 * at);
  };
  // Writes a unit's result, or its part and, where it is the last of the row's parts to come in, the whole row.
  auto write = [&](int odd) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) {
      sum0 += __shfl_xor_sync(~0u, sum0, d);
      sum1 += __shfl_xor_sync(~0u, sum1, d);
    }
    if (g == 0) {
      store(sums + warp * 32 + 8 * t, sum0);
      store(sums + warp * 32 + 8 * t + 4, sum1);
    }
    const UnitInfo unit = memory.units[odd];
    sync<128>(kDecode);
    if (lane == 0) barrier_arrive(shared_address(memory.unit_empty) + 8 * odd);
    sum0 = sum1 = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sum0 += load_float(sums + i * 32 + 8 * t);
      sum1 += load_float(sums + i * 32 + 8 * t + 4);
    }
    const float inverse0 = 1.f / sum0, inverse1 = 1.f / sum1;
    const bool live0 = 2 * t < kGroup, live1 = 2 * t + 1 < kGroup;
    const int head = unit.kv_head * kGroup + 2 * t;
    if (unit.parts == 1) {
      const int64_t at = static_cast<int64_t>(unit.row) * a.num_qo_heads + head;
      DType* target = static_cast<DType*>(a.out) + at * kHeadDim + warp * 16 + g;
#pragma unroll
      for (int h = 0; h < kHalves; h++) {
        if (live0) target[h * 64] = DType(out[h][0] * inverse0), target[h * 64 + 8] = DType(out[h][2] * inverse0);
        if (live1) {
          target[kHeadDim + h * 64] = DType(out[h][1] * inverse1);
          target[kHeadDim + h * 64 + 8] = DType(out[h][3] * inverse1);
        }
      }
      if (a.lse != nullptr && thread < 4) {
        if (live0) a.lse[at] = max0 * scale + __log2f(sum0);
        if (live1) a.lse[at + 1] = max1 * scale + __log2f(sum1);
      }
      return;
    }
    const int64_t at = static_cast<int64_t>(unit.first_part + unit.part) * a.num_qo_heads + head;
    float* target = static_cast<float*>(a.partial_out) + at * kHeadDim + warp * 16 + g;
#pragma unroll
    for (int h = 0; h < kHalves; h++) {
      if (live0) target[h * 64] = out[h][0] * inverse0, target[h * 64 + 8] = out[h][2] * inverse0;
      if (live1) {
        target[kHeadDim + h * 64] = out[h][1] * inverse1;
        target[kHeadDim + h * 64 + 8] = out[h][3] * inverse1;
      }
    }
    if (thread < 4) {
      if (live0) a.partial_lse[at] = max0 * scale + __log2f(sum0);
      if (live1) a.partial_lse[at + 1] = max1 * scale + __log2f(sum1);
    }
    __threadfence();  // the part is visible before it is counted
    sync<128>(kDecode);
    if (thread == 0) {
      int* counter = a.counters + 4 + unit.ticket * a.num_kv_heads + unit.kv_head;
      const int before = atomicAdd(counter, 1);
      if (before == unit.parts - 1) *counter = 0;
      store(sums + 128, static_cast<uint32_t>(before));
    }
    sync<128>(kDecode);
    if (load_int(sums + 128) == unit.parts - 1) {
      __threadfence();  // the other parts were counted before, so they are visible now
      merge_parts(a, unit.row, unit.kv_head, unit.first_part, unit.parts, warp, lane);
    }
  };

  barrier_wait(full, 0);
  int info = slot_info[0];
  if (info < 0) return;
  multiply_keys(0, info & kOdd ? 1 : 0);
  wgmma_wait<0>();  // in flight across the loop's entry edge, ptxas would serialise them all
  pin(logits);
  int key_slot = 0, ended = -1, buffer = 0;
  advance();
  while (true) {
    wgmma_wait<0>();
    pin(logits);
    __syncwarp();  // all lanes' products are done: the keys may go
    release(key_slot);
    if (ended >= 0) {
      write(ended);
      ended = -1;
    }
    if (info < 0) break;
    const bool first = info & kFirst;
    const int valid = info & kValid, odd = info & kOdd ? 1 : 0;
    if (first) max0 = max1 = -INFINITY, sum0 = sum1 = 0;
    if constexpr (kSoftCap) {
#pragma unroll
      for (int i = 0; i < 4; i++) logits[i] = soft_capped(logits[i], over_cap);
    }
    const int r = warp * 16 + g;
    if (valid < kChunk) {
      if (r >= valid) logits[0] = logits[1] = -INFINITY;
      if (r + 8 >= valid) logits[2] = logits[3] = -INFINITY;
    }
    if (kWindow && first) {
      const int skip = memory.units[odd].skip;
      if (r < skip) logits[0] = logits[1] = -INFINITY;
      if (r + 8 < skip) logits[2] = logits[3] = -INFINITY;
    }
    const int value_slot = slot, value_parity = parity;
    advance();
    if (valid < kChunk) {  // slots past the end of the request hold anything: 0 x NaN is NaN
      barrier_wait(full + 8 * value_slot, value_parity);
      for (int x = valid * (kHeadDim / 8) + thread; x < kChunk * (kHeadDim / 8); x += 128) {
        const int token = x / (kHeadDim / 8), piece = x % (kHeadDim / 8);
        store(slots + value_slot * kChunkBytes + token / 8 * kGroupBytes + piece / 8 * kAtomBytes + token % 8 * 128 +
                  piece % 8 * 16,
              make_uint4(0, 0, 0, 0));
      }
    }
    // Weights relative to a maximum that may lag behind; the vote says whether it lags too far anywhere.
    const uint32_t weights = shared_address(memory.weights[buffer]), mine = weights + r * (kColumns * 2) + t * 4;
    buffer ^= 1;
    const bool lags = fmaxf(logits[0], logits[2]) > max0 + lag || fmaxf(logits[1], logits[3]) > max1 + lag;
    float shift0 = finite(max0) * scale, shift1 = finite(max1) * scale;
    float weight[4];
    auto weigh = [&]() {
      weight[0] = exp2(logits[0] * scale - shift0);
      weight[1] = exp2(logits[1] * scale - shift1);
      weight[2] = exp2(logits[2] * scale - shift0);
      weight[3] = exp2(logits[3] * scale - shift1);
      store(mine, pack(weight[0], weight[1]));
      store(mine + 8 * (kColumns * 2), pack(weight[2], weight[3]));
      fence_async_proxy();
    };
    weigh();
    if (sync_any(kDecode, lags)) {
      float new0 = fmaxf(logits[0], logits[2]), new1 = fmaxf(logits[1], logits[3]);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) {
        new0 = fmaxf(new0, __shfl_xor_sync(~0u, new0, d));
        new1 = fmaxf(new1, __shfl_xor_sync(~0u, new1, d));
      }
      if (g == 0) {
        store(sums + warp * 32 + 8 * t, new0);
        store(sums + warp * 32 + 8 * t + 4, new1);
      }
      sync<128>(kDecode);
      new0 = max0, new1 = max1;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        new0 = fmaxf(new0, load_float(sums + i * 32 + 8 * t));
        new1 = fmaxf(new1, load_float(sums + i * 32 + 8 * t + 4));
      }
      shift0 = finite(new0) * scale, shift1 = finite(new1) * scale;
      const float factor0 = exp2(max0 * scale - shift0), factor1 = exp2(max1 * scale - shift1);
      max0 = new0, max1 = new1;
      sum0 *= factor0, sum1 *= factor1;
#pragma unroll
      for (int h = 0; h < kHalves; h++) {
        out[h][0] *= factor0, out[h][1] *= factor1;
        out[h][2] *= factor0, out[h][3] *= factor1;
      }
      weigh();
      sync<128>(kDecode);  // all weights are in, and `sums` may be written again
    }
    sum0 += weight[0] + weight[2];
    sum1 += weight[1] + weight[3];
    if (valid == kChunk) barrier_wait(full + 8 * value_slot, value_parity);
    {
      const uint64_t v_matrix = matrix(slots + value_slot * kChunkBytes, kAtomBytes, kGroupBytes, kSwizzle128);
      const uint64_t w_matrix = matrix(weights, kColumns * 16, kColumns * 16, kNoSwizzle);
#pragma unroll
      for (int h = 0; h < kHalves; h++) pin(out[h]);
      wgmma_fence();
#pragma unroll
      for (int h = 0; h < kHalves; h++) {
#pragma unroll
        for (int k = 0; k < kChunk / 16; k++) {
          multiply8<true>(out[h], v_matrix + h * (kAtomBytes >> 4) + k * (2 * kGroupBytes >> 4), w_matrix + k * 16,
                          !(first && k == 0));
        }
      }
      wgmma_commit();
    }
    if (info & kLast) ended = odd;
    // never hold V while waiting for the next K
    wgmma_wait<0>();
#pragma unroll
    for (int h = 0; h < kHalves; h++) pin(out[h]);
    __syncwarp();
    release(value_slot);
    barrier_wait(full + 8 * slot, parity);
    info = slot_info[slot];
    // after the end mark this multiplies stale memory, and nobody looks at it: no branch around wgmma
    multiply_keys(slot, info >= 0 && (info & kOdd) ? 1 : 0);
    key_slot = slot;
    advance();
  }
}

// Rows of requests without KV: zero, and no weight at all.
PODGRAPH_DEVICE void write_empty_rows(const Args& a) {
  const int lane = threadIdx.x % 32, requests = __ldg(a.counts + kEmptyRequests);
  for (int i = blockIdx.x; i < requests; i += gridDim.x) {
    const int64_t first = static_cast<int64_t>(__ldg(a.empty_rows + 2 * i)) * a.num_qo_heads;
    const int heads = __ldg(a.empty_rows + 2 * i + 1) * a.num_qo_heads;
    uint4* out = reinterpret_cast<uint4*>(static_cast<DType*>(a.out) + first * kHeadDim);
    for (int64_t x = lane; x < static_cast<int64_t>(heads) * (kHeadDim / 8); x += 32) out[x] = make_uint4(0, 0, 0, 0);
    if (a.lse != nullptr) {
      for (int h = lane; h < heads; h += 32) a.lse[first + h] = -INFINITY;
    }
  }
}

}  // namespace podgraph::sm90

// The decode side of pod_sm90: a producer warp that feeds K and V chunk by chunk, and one warpgroup that multiplies them
// with the query heads of one group, of one row or of several.
//
// Decode is bound by memory, so its products may waste tensor throughput: logits^T = K q^T takes 64 tokens as the rows and
// the group's heads of each row, padded to 8 or 16, as the columns; out^T = V^T weights^T likewise. Few registers are enough
// then, and the other warpgroups keep theirs.
//
// kRows is a constant, so that one row pays nothing for several. A request may have fewer rows than that: columns of the
// others multiply zeros and are not stored. The masks of several rows differ by one token from each to the next; they
// matter only in chunks at the end of the KV and at the edge of the window.
#pragma once
#include "pod_sm90_memory.h"

namespace podgraph::sm90 {

// Where a column's head lies in out, from row 0's first head of the group on, in heads.
PODGRAPH_DEVICE int place_of(const Args& a, int column) {
  return kRows == 1 ? column : column / kGroup * a.num_qo_heads + column % kGroup;
}

// Draws units and brings in their queries, K and V. A unit is prepared in three steps (draw, read, announce) during the
// last chunks of the one before, so that none of the three latencies is waited for.
PODGRAPH_DEVICE void produce_decode(const Args& a, Memory& memory) {
  const int lane = threadIdx.x % 32;
  constexpr int kRowPieces = kHeadDim / 8, kPieces = kUsedColumns * kRowPieces;  // 16 bytes each
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
    return __ldg(indices_of(memory) + kv_offset + min(token / kPage, num_pages - 1));
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
      if constexpr (kRows == 1) {
        for (int i = lane; i < kPieces; i += 32) {
          const int column = i / kRowPieces, piece = i % kRowPieces;
          copy_async(target + piece * (kColumns * 16) + column * 16, row + column * a.q_stride_h + piece * 8, true);
        }
      } else {
#pragma unroll 1  // there are no registers for more
        for (int i = lane; i < kPieces; i += 32) {
          const int column = i / kRowPieces, piece = i % kRowPieces;
          // rows that the request does not have are zeros: what lay there before would have a say in when to rescale
          const bool valid = column / kGroup <= (next.ticket >> 16 & 15);
          const DType* source = row + piece * 8;
          if (valid) source += column / kGroup * a.q_stride_n + column % kGroup * a.q_stride_h;
          copy_async(target + piece * (kColumns * 16) + column * 16, source, valid);
        }
      }
      if (lane == 0) {
        memory.units[odd] = {next.row, ticket % heads, next.first_part, next.parts & 4095, next.parts >> 12 & 4095,
                             kRows == 1 ? next.ticket : next.ticket & 0xffff, next.parts >> 24,
                             kRows == 1 ? 0 : next.ticket >> 16 & 15};
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
    // up to which token row 0 sees the unit's, and from which one on
    const int more_rows = next.ticket >> 16 & 15;
    const int seen_to = end + (next.ticket >> 20) - more_rows, seen_from = first + (next.parts >> 24) - more_rows;
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
            int info = min(left, kChunk) | (begin == first ? kFirst : 0) | (left <= kChunk ? kLast : 0) | (odd ? kOdd : 0);
            if constexpr (kRows > 1) {
              info |= min(seen_to - begin + kMostRows, kTokenMask) << kToShift;
              if constexpr (kWindow) info |= max(seen_from - begin + kMostRows, 0) << kFromShift;
            }
            memory.slot_info[slot] = info;
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

// Adds up the partial results of the query heads of a request's rows, in the order of their numbers: the same bits every
// time. A part that a row sees nothing of has weight 0.
PODGRAPH_DEVICE void merge_parts(const Args& a, int row, int rows, int kv_head, int first, int parts, int warp, int lane) {
  const int stride = kRows * a.num_qo_heads;  // from part to part: room for all rows, whatever the request has
  for (int column = warp; column < rows * kGroup; column += 4) {
    const int head = kv_head * kGroup + place_of(a, column);
    const float* lse = a.partial_lse + static_cast<int64_t>(first) * a.num_qo_heads + head;
    const float* out = static_cast<const float*>(a.partial_out) +
                       (static_cast<int64_t>(first) * a.num_qo_heads + head) * kHeadDim + lane * 2;
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
  constexpr int kOctetSums = 128;  // bytes: a float for 8 columns of each of 4 warps
  const uint32_t sums = shared_address(memory.decode_sums), before_at = sums + kOctets * kOctetSums;
  const volatile int* slot_info = memory.slot_info;

  // columns beyond those of the rows stay zero: only the rows' own are ever written again
  for (int x = thread; x < 2 * kDecodeQueryBytes / 4; x += 128) {
    if (x / 4 % kColumns >= kUsedColumns) store(queries + 4 * x, 0u);
  }
  fence_async_proxy();
  sync<128>(kDecode);

  // This thread has tokens r = 16 warp + g and r + 8 of a chunk, columns 2 t and 2 t + 1 of every 8.
  float logits[kOctets][4] = {}, out[kHalves][kOctets][4] = {};
  float sum0[kOctets] = {}, sum1[kOctets] = {}, max0[kOctets], max1[kOctets];
#pragma unroll
  for (int n = 0; n < kOctets; n++) max0[n] = max1[n] = -INFINITY;
  int slot = 0, parity = 0;
  auto advance = [&]() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  };
  auto multiply_keys = [&](int at, int odd) {
    const uint64_t k_matrix = matrix(slots + at * kChunkBytes, 16, kGroupBytes, kSwizzle128);
    const uint64_t q_matrix = matrix(queries + odd * kDecodeQueryBytes, kColumns * 16, kCoreBytes, kNoSwizzle);
    pin(logits);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; k++) {
      multiply_few<false>(logits, k_matrix + (k / 4) * (kAtomBytes >> 4) + (k % 4) * 2, q_matrix + k * (2 * kColumns),
                          k > 0);
    }
    wgmma_commit();
  };
  auto release = [&](int at) {
    if (lane == 0) barrier_arrive(empty + 8 * at);
  };
  // Stores all columns of a unit with several rows, from `row` of out or of the partial results on.
  auto store_rows = [&](auto* to, float* lse, int row, int kv_head, int rows) {
    const int64_t at = static_cast<int64_t>(row) * a.num_qo_heads + kv_head * kGroup;
    auto* const target = to + at * kHeadDim + warp * 16 + g;
#pragma unroll
    for (int n = 0; n < kOctets; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = opaque(8 * n + 2 * t + i);  // else their addresses are all kept in registers
        if (column >= rows * kGroup) continue;
        const int place = place_of(a, column);
        const float sum = i ? sum1[n] : sum0[n];
        const float inverse = sum == 0.f ? 0.f : 1.f / sum;  // a row may see nothing of a part
#pragma unroll
        for (int h = 0; h < kHalves; h++) {
          target[place * kHeadDim + h * 64] = out[h][n][i] * inverse;
          target[place * kHeadDim + h * 64 + 8] = out[h][n][2 + i] * inverse;
        }
        if (lse != nullptr && thread < 4) lse[at + place] = (i ? max1[n] : max0[n]) * scale + __log2f(sum);
      }
    }
  };
  // Writes a unit's result, or its part and, where it is the last of the row's parts to come in, the whole row.
  auto write = [&](int odd) {
#pragma unroll
    for (int n = 0; n < kOctets; n++) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) {
        sum0[n] += __shfl_xor_sync(~0u, sum0[n], d);
        sum1[n] += __shfl_xor_sync(~0u, sum1[n], d);
      }
      if (g == 0) {
        store(sums + n * kOctetSums + warp * 32 + 8 * t, sum0[n]);
        store(sums + n * kOctetSums + warp * 32 + 8 * t + 4, sum1[n]);
      }
    }
    const UnitInfo unit = memory.units[odd];
    sync<128>(kDecode);
    if (lane == 0) barrier_arrive(shared_address(memory.unit_empty) + 8 * odd);
    float inverse0[kOctets], inverse1[kOctets];
#pragma unroll
    for (int n = 0; n < kOctets; n++) {
      sum0[n] = sum1[n] = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sum0[n] += load_float(sums + n * kOctetSums + i * 32 + 8 * t);
        sum1[n] += load_float(sums + n * kOctetSums + i * 32 + 8 * t + 4);
      }
      inverse0[n] = 1.f / sum0[n], inverse1[n] = 1.f / sum1[n];
    }
    const int rows = kRows == 1 ? 1 : unit.more_rows + 1;
    if constexpr (kRows > 1) {
      if (unit.parts == 1) {
        store_rows(static_cast<DType*>(a.out), a.lse, unit.row, unit.kv_head, rows);
        return;
      }
      store_rows(static_cast<float*>(a.partial_out), a.partial_lse, unit.first_part + unit.part * kRows, unit.kv_head, rows);
    } else {
      const bool live0 = 2 * t < kGroup, live1 = 2 * t + 1 < kGroup;
      const int head = unit.kv_head * kGroup + 2 * t;
      if (unit.parts == 1) {
        const int64_t at = static_cast<int64_t>(unit.row) * a.num_qo_heads + head;
#pragma unroll
        for (int n = 0; n < kOctets; n++) {
          DType* target = static_cast<DType*>(a.out) + (at + 8 * n) * kHeadDim + warp * 16 + g;
#pragma unroll
          for (int h = 0; h < kHalves; h++) {
            const float* o = out[h][n];
            if (live0) target[h * 64] = DType(o[0] * inverse0[n]), target[h * 64 + 8] = DType(o[2] * inverse0[n]);
            if (live1) {
              target[kHeadDim + h * 64] = DType(o[1] * inverse1[n]);
              target[kHeadDim + h * 64 + 8] = DType(o[3] * inverse1[n]);
            }
          }
          if (a.lse != nullptr && thread < 4) {
            if (live0) a.lse[at + 8 * n] = max0[n] * scale + __log2f(sum0[n]);
            if (live1) a.lse[at + 8 * n + 1] = max1[n] * scale + __log2f(sum1[n]);
          }
        }
        return;
      }
      const int64_t at = static_cast<int64_t>(unit.first_part + unit.part) * a.num_qo_heads + head;
#pragma unroll
      for (int n = 0; n < kOctets; n++) {
        float* target = static_cast<float*>(a.partial_out) + (at + 8 * n) * kHeadDim + warp * 16 + g;
#pragma unroll
        for (int h = 0; h < kHalves; h++) {
          const float* o = out[h][n];
          if (live0) target[h * 64] = o[0] * inverse0[n], target[h * 64 + 8] = o[2] * inverse0[n];
          if (live1) {
            target[kHeadDim + h * 64] = o[1] * inverse1[n];
            target[kHeadDim + h * 64 + 8] = o[3] * inverse1[n];
          }
        }
        if (thread < 4) {
          if (live0) a.partial_lse[at + 8 * n] = max0[n] * scale + __log2f(sum0[n]);
          if (live1) a.partial_lse[at + 8 * n + 1] = max1[n] * scale + __log2f(sum1[n]);
        }
      }
    }
    __threadfence();  // the part is visible before it is counted
    sync<128>(kDecode);
    if (thread == 0) {
      int* counter = a.counters + 4 + unit.ticket * a.num_kv_heads + unit.kv_head;
      const int before = atomicAdd(counter, 1);
      if (before == unit.parts - 1) *counter = 0;
      store(before_at, static_cast<uint32_t>(before));
    }
    sync<128>(kDecode);
    if (load_int(before_at) == unit.parts - 1) {
      __threadfence();  // the other parts were counted before, so they are visible now
      merge_parts(a, unit.row, rows, unit.kv_head, unit.first_part, unit.parts, warp, lane);
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
    const int r = warp * 16 + g;
#pragma unroll
    for (int n = 0; n < kOctets; n++) {
      if (first) max0[n] = max1[n] = -INFINITY, sum0[n] = sum1[n] = 0;
      if constexpr (kSoftCap) {
#pragma unroll
        for (int i = 0; i < 4; i++) logits[n][i] = soft_capped(logits[n][i], over_cap);
      }
      if (valid < kChunk) {
        if (r >= valid) logits[n][0] = logits[n][1] = -INFINITY;
        if (r + 8 >= valid) logits[n][2] = logits[n][3] = -INFINITY;
      }
      if constexpr (kRows == 1) {
        if (kWindow && first) {
          const int skip = memory.units[odd].skip;
          if (r < skip) logits[n][0] = logits[n][1] = -INFINITY;
          if (r + 8 < skip) logits[n][2] = logits[n][3] = -INFINITY;
        }
      } else {
        // A column of row i sees token x where from + i <= x < to + i.
        // Which row these are of is found anew each time: few chunks are masked, and registers are scarce.
        const int column = opaque(8 * n + 2 * t), row0 = column / kGroup, row1 = (column + 1) / kGroup;
        const int to = (info >> kToShift & kTokenMask) - kMostRows;
        if (to < kChunk) {
          if (r >= to + row0) logits[n][0] = -INFINITY;
          if (r >= to + row1) logits[n][1] = -INFINITY;
          if (r + 8 >= to + row0) logits[n][2] = -INFINITY;
          if (r + 8 >= to + row1) logits[n][3] = -INFINITY;
        }
        if constexpr (kWindow) {
          const int from = (info >> kFromShift & kTokenMask) - kMostRows;
          if (from + kRows > 1) {
            if (r < from + row0) logits[n][0] = -INFINITY;
            if (r < from + row1) logits[n][1] = -INFINITY;
            if (r + 8 < from + row0) logits[n][2] = -INFINITY;
            if (r + 8 < from + row1) logits[n][3] = -INFINITY;
          }
        }
      }
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
    const uint32_t weights = shared_address(memory.weights[buffer]);
    // of token r, in its core matrix of the first 8 columns: those of the next 8 lie one on, those of r + 8 kOctets on
    const uint32_t mine = weights + (warp * 2 * kColumns + g) * 16 + t * 4;
    buffer ^= 1;
    bool lags = false;
    float shift0[kOctets], shift1[kOctets], weight[kOctets][4];
#pragma unroll
    for (int n = 0; n < kOctets; n++) {
      lags = lags || fmaxf(logits[n][0], logits[n][2]) > max0[n] + lag;
      lags = lags || fmaxf(logits[n][1], logits[n][3]) > max1[n] + lag;
      shift0[n] = finite(max0[n]) * scale, shift1[n] = finite(max1[n]) * scale;
    }
    auto weigh = [&]() {
#pragma unroll
      for (int n = 0; n < kOctets; n++) {
        weight[n][0] = exp2(logits[n][0] * scale - shift0[n]);
        weight[n][1] = exp2(logits[n][1] * scale - shift1[n]);
        weight[n][2] = exp2(logits[n][2] * scale - shift0[n]);
        weight[n][3] = exp2(logits[n][3] * scale - shift1[n]);
        store(mine + n * kCoreBytes, pack(weight[n][0], weight[n][1]));
        store(mine + (n + kOctets) * kCoreBytes, pack(weight[n][2], weight[n][3]));
      }
      fence_async_proxy();
    };
    weigh();
    if (sync_any(kDecode, lags)) {
#pragma unroll
      for (int n = 0; n < kOctets; n++) {
        float new0 = fmaxf(logits[n][0], logits[n][2]), new1 = fmaxf(logits[n][1], logits[n][3]);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) {
          new0 = fmaxf(new0, __shfl_xor_sync(~0u, new0, d));
          new1 = fmaxf(new1, __shfl_xor_sync(~0u, new1, d));
        }
        if (g == 0) {
          store(sums + n * kOctetSums + warp * 32 + 8 * t, new0);
          store(sums + n * kOctetSums + warp * 32 + 8 * t + 4, new1);
        }
      }
      sync<128>(kDecode);
#pragma unroll
      for (int n = 0; n < kOctets; n++) {
        float new0 = max0[n], new1 = max1[n];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          new0 = fmaxf(new0, load_float(sums + n * kOctetSums + i * 32 + 8 * t));
          new1 = fmaxf(new1, load_float(sums + n * kOctetSums + i * 32 + 8 * t + 4));
        }
        shift0[n] = finite(new0) * scale, shift1[n] = finite(new1) * scale;
        const float factor0 = exp2(max0[n] * scale - shift0[n]), factor1 = exp2(max1[n] * scale - shift1[n]);
        max0[n] = new0, max1[n] = new1;
        sum0[n] *= factor0, sum1[n] *= factor1;
#pragma unroll
        for (int h = 0; h < kHalves; h++) {
          out[h][n][0] *= factor0, out[h][n][1] *= factor1;
          out[h][n][2] *= factor0, out[h][n][3] *= factor1;
        }
      }
      weigh();
      sync<128>(kDecode);  // all weights are in, and `sums` may be written again
    }
#pragma unroll
    for (int n = 0; n < kOctets; n++) {
      sum0[n] += weight[n][0] + weight[n][2];
      sum1[n] += weight[n][1] + weight[n][3];
    }
    if (valid == kChunk) barrier_wait(full + 8 * value_slot, value_parity);
    {
      const uint64_t v_matrix = matrix(slots + value_slot * kChunkBytes, kAtomBytes, kGroupBytes, kSwizzle128);
      const uint64_t w_matrix = matrix(weights, kColumns * 16, kCoreBytes, kNoSwizzle);
#pragma unroll
      for (int h = 0; h < kHalves; h++) pin(out[h]);
      wgmma_fence();
#pragma unroll
      for (int h = 0; h < kHalves; h++) {
#pragma unroll
        for (int k = 0; k < kChunk / 16; k++) {
          multiply_few<true>(out[h], v_matrix + h * (kAtomBytes >> 4) + k * (2 * kGroupBytes >> 4),
                             w_matrix + k * (2 * kColumns), !(first && k == 0));
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

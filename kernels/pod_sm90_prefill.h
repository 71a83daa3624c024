// The prefill side of pod_sm90: a producer warp that feeds K and V by TMA, a warp that loads queries, and two consumer
// warpgroups that take turns on the tensor cores.
#pragma once
#include "pod_sm90_memory.h"

namespace podgraph::sm90 {

// Draws tiles and brings in their K and V blocks, the last block first: it is the one with the causal edge.
PODGRAPH_DEVICE void produce_prefill(const Args& a, Memory& memory) {
  const int lane = threadIdx.x % 32;
  const KvMaps& maps = *static_cast<const KvMaps*>(a.kv_maps);
  const Tile* tiles = reinterpret_cast<const Tile*>(a.tiles);
  const int heads = a.num_kv_heads, tickets = __ldg(a.counts + kPrefillItems) * heads;
  int ticket = blockIdx.x, stage = 0, parity = 0, turn = 0;

  // The list holds an entry for each CTA at least, so the first tile needs no answer from the counter.
  Tile tile = tiles[ticket / heads];
  int kv_head = ticket % heads;
  bool end = ticket >= tickets;
  while (true) {
    const int blocks = (tile.end + kBlock - 1) / kBlock;
    const int first = max(tile.begin, kWindow ? tile.position - a.window_left : 0) / kBlock;
    // lane i brings in the i-th box of a block
    auto page_of = [&](int block) {
      const int page = min((block * kBlock + lane * kPrefillBox) / kPage, tile.num_pages - 1);
      return __ldg(indices_of(memory) + tile.kv_offset + page);
    };
    auto bring = [&](bool values, int block, int page) {
      const uint32_t full = shared_address(values ? memory.value_full : memory.key_full) + 8 * stage;
      const uint32_t empty = shared_address(values ? memory.value_empty : memory.key_empty) + 8 * stage;
      // the consumers have read what the stage held a round ago; the first round finds all stages free
      barrier_wait(empty, parity ^ 1);
      if (lane == 0) barrier_expect(full, kBlockBytes);
      __syncwarp();  // no bytes may arrive before they are expected
      const uint32_t target = shared_address(values ? memory.values : memory.keys) + stage * kBlockBytes;
      const int group = (block * kBlock + lane * kPrefillBox) % kPage / 8;
      if (lane < kPrefillBoxes) {
        load_box(memory, values ? maps.v.prefill : maps.k.prefill, values, target + lane * (kPrefillBox * kTokenBytes),
                 full, kv_head, group, page, kEvictLast);
      }
    };
    int page = 0;
    if (!end && lane < kPrefillBoxes) page = page_of(blocks - 1);
    int next = 0;
    if (lane == 0 && !end) next = atomicAdd(a.counters, 1) + gridDim.x;
    // before the wait for the queries' place: the first K is under way while the last tile is finished
    if (!end) bring(false, blocks - 1, page);

    // the consumers are done with the queries, and with the tile before the last one: its info may go
    barrier_wait(shared_address(&memory.query_empty), turn ^ 1);
    turn ^= 1;
    TileInfo& info = memory.tiles[turn];
    if (lane == 0) {
      info = {end ? -1 : blocks, first,       tile.row,         tile.rows,         tile.position,    kv_head,
              tile.kv_len,       tile.shared, tile.first_part, tile.parts & 4095, tile.parts >> 12, tile.ticket};
      barrier_arrive(shared_address(&memory.tile_full));
    }
    if (end) break;

    next = __shfl_sync(~0u, next, 0);
    end = next >= tickets;
    Tile following = tile;
    if (!end) following = tiles[next / heads];
    for (int block = blocks - 1; block >= first; block--) {
      const int this_page = page;
      if (block > first && lane < kPrefillBoxes) page = page_of(block - 1);
      if (block < blocks - 1) bring(false, block, this_page);
      bring(true, block, this_page);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    tile = following;
    kv_head = next % heads;
  }
  finish(a);
}

// Loads half of the query rows of each tile: ordinary bounded loads, since q may be a slice of anything.
PODGRAPH_DEVICE void load_queries(const Args& a, Memory& memory, const int half_of_rows) {
  const int lane = threadIdx.x % 32;
  constexpr int kPieces = kHeadDim / 8;  // of 16 bytes in a row
  for (int turn = 1;; turn ^= 1) {
    barrier_wait(shared_address(&memory.tile_full), turn ^ 1);
    const TileInfo info = memory.tiles[turn];
    if (info.blocks >= 0) {
      const int warpgroups = info.shared ? 1 : 2;
      for (int i = lane + 32 * half_of_rows; i < warpgroups * 64 * kPieces; i += 64) {
        const int warpgroup = i / (64 * kPieces), r = i / kPieces % 64, piece = i % kPieces;
        const int row = warpgroup * kTileRows + r / kGroup, head = info.kv_head * kGroup + r % kGroup;
        const bool valid = row < info.rows && r < kTileRows * kGroup;
        const DType* source = static_cast<const DType*>(a.q) + piece * 8;
        if (valid) source += static_cast<int64_t>(info.row + row) * a.q_stride_n + head * a.q_stride_h;
        const uint32_t half = piece / 8, column = (piece % 8) ^ (r % 8);  // the 128-byte swizzle
        copy_async(shared_address(memory.query[warpgroup]) + half * 8192 + r * 128 + column * 16, source, valid);
      }
      copy_async_wait();
      fence_async_proxy();
      __syncwarp();  // every lane's part is in, and visible to wgmma
    }
    if (lane == 0) barrier_arrive(shared_address(&memory.query_full));
    if (info.blocks < 0) return;
  }
}

// Four registers of four lanes, transposed: lane t gets 16 bytes of column block t.
PODGRAPH_DEVICE uint4 transpose4(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const int t = threadIdx.x & 3;
  const uint32_t r0 = __shfl_xor_sync(~0u, (t & 1) ? a : b, 1), r1 = __shfl_xor_sync(~0u, (t & 1) ? c : d, 1);
  const uint32_t a0 = (t & 1) ? r0 : a, a1 = (t & 1) ? b : r0, b0 = (t & 1) ? r1 : c, b1 = (t & 1) ? d : r1;
  const uint32_t q0 = __shfl_xor_sync(~0u, (t & 2) ? a0 : b0, 2), q1 = __shfl_xor_sync(~0u, (t & 2) ? a1 : b1, 2);
  return (t & 2) ? make_uint4(q0, q1, b0, b1) : make_uint4(a0, a1, q0, q1);
}

// One row's partial result: float, since it is rounded only once all parts are added up.
PODGRAPH_DEVICE void write_part(const Args& a, const volatile TileInfo& info, const float (&out)[kHeadDim / 2],
                                const int first, int row, int head_of_group, int t, int begin_column, int end_column,
                                float inverse, float log_max, float sum) {
  const int64_t part_row = info.first_part + info.part * info.rows + row;
  const int64_t at = part_row * a.num_qo_heads + info.kv_head * kGroup + head_of_group;
  float2* target = reinterpret_cast<float2*>(static_cast<float*>(a.partial_out) + at * kHeadDim + 2 * t);
#pragma unroll
  for (int i = 0; i < kHeadDim / 8; i++) {
    if (i >= begin_column && i < end_column) {
      target[4 * i] = make_float2(out[4 * i + first] * inverse, out[4 * i + first + 1] * inverse);
    }
  }
  if (t == 0 && begin_column == 0) a.partial_lse[at] = log_max + __log2f(sum);
}

// Counts a part of a tile; the warpgroups that bring in the last one add all of them up, in the order of their numbers.
PODGRAPH_DEVICE void merge_tile(const Args& a, Memory& memory, const volatile TileInfo& info, int warpgroup) {
  const int thread = threadIdx.x % 128, warp = warpgroup * 4 + thread / 32, lane = thread % 32;
  __threadfence();  // the part is visible before it is counted
  sync<256>(kExchange);
  if (warpgroup == 0 && thread == 0) {
    int* counter = a.counters + 4 + info.ticket * a.num_kv_heads + info.kv_head;
    const int before = atomicAdd(counter, 1);
    if (before == info.parts - 1) *counter = 0;
    memory.prefill_before = before;
  }
  sync<256>(kExchange);
  if (*const_cast<volatile int*>(&memory.prefill_before) != info.parts - 1) return;
  __threadfence();  // the other parts were counted before, so they are visible now
  const int rows = info.rows, parts = info.parts, row = info.row, head0 = info.kv_head * kGroup;
  const int64_t stride = static_cast<int64_t>(rows) * a.num_qo_heads;  // from part to part
  constexpr int kLane = kHeadDim / 32;
  for (int r = warp; r < rows * kGroup; r += 8) {
    const int64_t within = static_cast<int64_t>(r / kGroup) * a.num_qo_heads + head0 + r % kGroup;
    const int64_t first = static_cast<int64_t>(info.first_part) * a.num_qo_heads + within;
    float most = -INFINITY;
    for (int i = lane; i < parts; i += 32) most = fmaxf(most, __ldcg(a.partial_lse + first + i * stride));
#pragma unroll
    for (int d = 1; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    float sums[kLane] = {}, total = 0;
    for (int i = 0; i < parts; i++) {
      const float weight = exp2(__ldcg(a.partial_lse + first + i * stride) - most);
      total += weight;
      const float* part = static_cast<const float*>(a.partial_out) + (first + i * stride) * kHeadDim + lane * kLane;
#pragma unroll
      for (int x = 0; x < kLane; x++) sums[x] += weight * __ldcg(part + x);
    }
    const float inverse = 1.f / total;
    const int64_t at = static_cast<int64_t>(row) * a.num_qo_heads + within;
    uint32_t* target = reinterpret_cast<uint32_t*>(static_cast<DType*>(a.out) + at * kHeadDim + lane * kLane);
#pragma unroll
    for (int x = 0; x < kLane; x += 2) target[x / 2] = pack(sums[x] * inverse, sums[x + 1] * inverse);
    if (a.lse != nullptr && lane == 0) a.lse[at] = most + __log2f(total);
  }
}

// One of the two prefill warpgroups: softmax(q k^T) v of 64 packed rows, block by block, from the last to the first.
//
// In a tile whose rows are shared both warpgroups have the same rows and every other block, and are combined at the
// end. The product with V of a block runs on the tensor cores behind the product with K of the next one.
PODGRAPH_DEVICE void consume_prefill(const Args& a, Memory& memory, const int warpgroup) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const uint32_t key_full = shared_address(memory.key_full), key_empty = shared_address(memory.key_empty);
  const uint32_t value_full = shared_address(memory.value_full), value_empty = shared_address(memory.value_empty);
  const uint32_t query = shared_address(memory.query), keys = shared_address(memory.keys);
  const uint32_t values = shared_address(memory.values);
  const float scale = logit_scale(a), lag = kLag / scale, over_cap = kSoftCap ? a.sm_scale / a.logits_soft_cap : 0.f;
  unsigned base = 0;  // blocks of all tiles so far: stage and parity follow from it
  int turn = 0;

  // the first turn on the tensor cores is warpgroup 0's
  if (warpgroup == 1) arrive<256>(kTurn);
  while (true) {
    barrier_wait(shared_address(&memory.query_full), turn);
    turn ^= 1;
    const volatile TileInfo& info = memory.tiles[turn];
    const int blocks = info.blocks;
    if (blocks < 0) break;
    const int position = info.position, shared = info.shared;
    const int first = kSplitTiles || kWindow ? info.first : 0;
    const int step = shared ? 2 : 1, begin = shared ? warpgroup : 0, count = blocks - first;
    const int offset = shared ? 0 : warpgroup * kTileRows;  // of this warpgroup's rows in the tile
    const uint64_t q_matrix = matrix(query + (shared ? 0 : warpgroup) * kQueryBytes, 16, kAtomBytes, kSwizzle128);

    // this thread has rows r = 16 warp + g and r + 8 of the warpgroup's 64
    float out[kHeadDim / 2], logits[kBlock / 2];
    uint32_t weights[kBlock / 4];
    float max0 = -INFINITY, max1 = -INFINITY, sum0 = 0, sum1 = 0, factor0 = 1.f, factor1 = 1.f;
    bool rescale = false;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; i++) out[i] = 0.f;
    const int limit0 = position + offset + (warp * 16 + g) / kGroup;
    const int limit1 = position + offset + (warp * 16 + g + 8) / kGroup;
    const int least_limit = position + offset, largest_limit = position + offset + kTileRows - 1;

    auto multiply_keys = [&](int i) {  // logits = q k^T, asynchronous
      const unsigned block = base + i, stage = block % kStages;
      barrier_wait(key_full + 8 * stage, block / kStages & 1);
      const uint64_t k_matrix = matrix(keys + stage * kBlockBytes, 16, kGroupBytes, kSwizzle128);
      pin(logits);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; k++) {
        multiply(logits, q_matrix + (k / 4) * (8192 >> 4) + (k % 4) * 2,
                 k_matrix + (k / 4) * (kAtomBytes >> 4) + (k % 4) * 2, k > 0);
      }
      wgmma_commit();
    };
    auto accumulate_values = [&](int i) {  // out += weights v, asynchronous
      const unsigned block = base + i, stage = block % kStages;
      barrier_wait(value_full + 8 * stage, block / kStages & 1);
      const int valid = info.kv_len - (blocks - 1 - i) * kBlock;
      if (valid < kBlock) {  // slots past the end of the request hold anything: 0 x NaN is NaN
        for (int x = valid * (kHeadDim / 8) + thread; x < kBlock * (kHeadDim / 8); x += 128) {
          const int token = x / (kHeadDim / 8), piece = x % (kHeadDim / 8);
          store(values + stage * kBlockBytes + token / 8 * kGroupBytes + piece / 8 * kAtomBytes + token % 8 * 128 +
                    piece % 8 * 16,
                make_uint4(0, 0, 0, 0));
        }
        fence_async_proxy();
        sync<128>(kClearValues + warpgroup);
      }
      const uint64_t v_matrix = matrix(values + stage * kBlockBytes, kAtomBytes, kGroupBytes, kSwizzle128);
      pin(out);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kBlock / 16; k++) accumulate(out, weights + 4 * k, v_matrix + k * (2 * kGroupBytes >> 4));
      wgmma_commit();
    };
    // a stage is empty when all warps of the warpgroups that read it have said so: 8 arrivals
    auto release = [&](uint32_t barriers, int i) {
      __syncwarp();
      if (opaque(lane) == 0) barrier_arrive(barriers + 8 * ((base + i) % kStages), step);
    };
    auto soften = [&](int block) {  // logits -> weights (float), sums; factors of what came before
      if constexpr (kSoftCap) {
#pragma unroll
        for (int i = 0; i < kBlock / 2; i++) logits[i] = soft_capped(logits[i], over_cap);
      }
      if (block * kBlock + kBlock - 1 > least_limit || (kWindow && block * kBlock < largest_limit - a.window_left)) {
#pragma unroll
        for (int i = 0; i < kBlock / 8; i++) {
          const int token = block * kBlock + i * 8 + 2 * t;
          if (token > limit0) logits[4 * i] = -INFINITY;
          if (token + 1 > limit0) logits[4 * i + 1] = -INFINITY;
          if (token > limit1) logits[4 * i + 2] = -INFINITY;
          if (token + 1 > limit1) logits[4 * i + 3] = -INFINITY;
          if constexpr (kWindow) {
            if (token < limit0 - a.window_left) logits[4 * i] = -INFINITY;
            if (token + 1 < limit0 - a.window_left) logits[4 * i + 1] = -INFINITY;
            if (token < limit1 - a.window_left) logits[4 * i + 2] = -INFINITY;
            if (token + 1 < limit1 - a.window_left) logits[4 * i + 3] = -INFINITY;
          }
        }
      }
      float new0 = logits[0], new1 = logits[2];
#pragma unroll
      for (int i = 0; i < kBlock / 8; i++) {
        new0 = fmaxf(new0, fmaxf(logits[4 * i], logits[4 * i + 1]));
        new1 = fmaxf(new1, fmaxf(logits[4 * i + 2], logits[4 * i + 3]));
      }
      rescale = __any_sync(~0u, new0 > max0 + lag || new1 > max1 + lag);
      if (rescale) {
        new0 = fmaxf(new0, __shfl_xor_sync(~0u, new0, 1));
        new1 = fmaxf(new1, __shfl_xor_sync(~0u, new1, 1));
        new0 = fmaxf(new0, __shfl_xor_sync(~0u, new0, 2));
        new1 = fmaxf(new1, __shfl_xor_sync(~0u, new1, 2));
        new0 = fmaxf(new0, max0);
        new1 = fmaxf(new1, max1);
        factor0 = exp2((max0 - finite(new0)) * scale);
        factor1 = exp2((max1 - finite(new1)) * scale);
        max0 = new0, max1 = new1;
        sum0 *= factor0, sum1 *= factor1;
      }
      const float shift0 = finite(max0) * scale, shift1 = finite(max1) * scale;
#pragma unroll
      for (int i = 0; i < kBlock / 8; i++) {
        logits[4 * i] = exp2(logits[4 * i] * scale - shift0);
        logits[4 * i + 1] = exp2(logits[4 * i + 1] * scale - shift0);
        logits[4 * i + 2] = exp2(logits[4 * i + 2] * scale - shift1);
        logits[4 * i + 3] = exp2(logits[4 * i + 3] * scale - shift1);
        sum0 += logits[4 * i] + logits[4 * i + 1];
        sum1 += logits[4 * i + 2] + logits[4 * i + 3];
      }
    };
    auto round_weights = [&]() {
#pragma unroll
      for (int i = 0; i < kBlock / 4; i++) weights[i] = pack(logits[2 * i], logits[2 * i + 1]);
    };
    auto queries_done = [&]() {
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&memory.query_empty));
    };

    if (begin < count) {
      if (!shared) sync<256>(kTurn + warpgroup);
      multiply_keys(begin);
      if (!shared) arrive<256>(kTurn + (warpgroup ^ 1));
      wgmma_wait<0>();
      pin(logits);
      release(key_empty, begin);
      soften(blocks - 1 - begin);
      round_weights();
      int i = begin + step;
#pragma unroll 1
      for (; i < count; i += step) {
        const int alone = opaque(shared);
        if (!alone) sync<256>(kTurn + warpgroup);
        multiply_keys(i);
        accumulate_values(i - step);
        if (!alone) arrive<256>(kTurn + (warpgroup ^ 1));
        wgmma_wait<1>();  // the logits; the product with V may still run
        pin(logits);
        release(key_empty, i);
        soften(blocks - 1 - i);
        wgmma_wait<0>();
        pin(out);
        release(value_empty, i - step);
        if (opaque(rescale)) {
#pragma unroll
          for (int x = 0; x < kHeadDim / 8; x++) {
            out[4 * x] *= factor0, out[4 * x + 1] *= factor0;
            out[4 * x + 2] *= factor1, out[4 * x + 3] *= factor1;
          }
        }
        round_weights();
      }
      if (!shared) queries_done();
      accumulate_values(i - step);
      wgmma_wait<0>();
      pin(out);
      release(value_empty, i - step);
    } else if (!shared) {
      queries_done();
    }
    base += count;
    sum0 += __shfl_xor_sync(~0u, sum0, 1);
    sum1 += __shfl_xor_sync(~0u, sum1, 1);
    sum0 += __shfl_xor_sync(~0u, sum0, 2);
    sum1 += __shfl_xor_sync(~0u, sum1, 2);

    const int tile_row = info.row, rows = info.rows, kv_head = info.kv_head;
    int begin_column = 0, end_column = kHeadDim / 8;  // in units of 8 columns: what this warpgroup writes
    if (shared) {
      // Both hold the same rows over different blocks. Through the queries' memory, which nobody needs any more, each
      // takes over one half of the columns.
      sync<256>(kExchange);
      const uint32_t own = query + warpgroup * 512 + (warp * 16 + g) * 8;
      if (t == 0) {
        store(own, max0), store(own + 4, sum0);
        store(own + 64, max1), store(own + 68, sum1);
      }
      sync<256>(kExchange);
      const uint32_t other = query + (warpgroup ^ 1) * 512 + (warp * 16 + g) * 8;
      const float other_max0 = load_float(other), other_sum0 = load_float(other + 4);
      const float other_max1 = load_float(other + 64), other_sum1 = load_float(other + 68);
      const float both0 = fmaxf(max0, other_max0), both1 = fmaxf(max1, other_max1);
      const float own0 = exp2((max0 - finite(both0)) * scale), own1 = exp2((max1 - finite(both1)) * scale);
      sum0 = sum0 * own0 + other_sum0 * exp2((other_max0 - finite(both0)) * scale);
      sum1 = sum1 * own1 + other_sum1 * exp2((other_max1 - finite(both1)) * scale);
      max0 = both0, max1 = both1;
#pragma unroll
      for (int x = 0; x < kHeadDim / 8; x++) {
        out[4 * x] *= own0, out[4 * x + 1] *= own0;
        out[4 * x + 2] *= own1, out[4 * x + 3] *= own1;
      }
      sync<256>(kExchange);
      // half of a thread's accumulators, for all threads: kQueryBytes
      const uint32_t theirs = query + (warpgroup ^ 1) * kQueryBytes + thread * 4;
      const uint32_t mine = query + warpgroup * kQueryBytes + thread * 4;
      constexpr int kHalf = kHeadDim / 4;
      if (warpgroup == 0) {
#pragma unroll
        for (int x = 0; x < kHalf; x++) store(theirs + x * 512, out[kHalf + x]);
      } else {
#pragma unroll
        for (int x = 0; x < kHalf; x++) store(theirs + x * 512, out[x]);
      }
      sync<256>(kExchange);
      if (warpgroup == 0) {
        end_column = kHeadDim / 16;
#pragma unroll
        for (int x = 0; x < kHalf; x++) out[x] += load_float(mine + x * 512);
      } else {
        begin_column = kHeadDim / 16;
#pragma unroll
        for (int x = 0; x < kHalf; x++) out[kHalf + x] += load_float(mine + x * 512);
      }
      fence_async_proxy();
      queries_done();
    }

    // a row may see nothing of a part
    const float inverse0 = sum0 > 0.f ? 1.f / sum0 : 0.f, inverse1 = sum1 > 0.f ? 1.f / sum1 : 0.f;
    const int r0 = warp * 16 + g, r1 = r0 + 8, row0 = offset + r0 / kGroup, row1 = offset + r1 / kGroup;
    const bool live0 = row0 < rows && r0 < kTileRows * kGroup, live1 = row1 < rows && r1 < kTileRows * kGroup;
    if (kSplitTiles && info.parts > 1) {
      if (live0) write_part(a, info, out, 0, row0, r0 % kGroup, t, begin_column, end_column, inverse0, max0 * scale, sum0);
      if (live1) write_part(a, info, out, 2, row1, r1 % kGroup, t, begin_column, end_column, inverse1, max1 * scale, sum1);
      merge_tile(a, memory, info, warpgroup);
      continue;
    }
    const int64_t at0 = static_cast<int64_t>(tile_row + row0) * a.num_qo_heads + kv_head * kGroup + r0 % kGroup;
    const int64_t at1 = static_cast<int64_t>(tile_row + row1) * a.num_qo_heads + kv_head * kGroup + r1 % kGroup;
    DType* target0 = static_cast<DType*>(a.out) + at0 * kHeadDim + 8 * t;
    DType* target1 = static_cast<DType*>(a.out) + at1 * kHeadDim + 8 * t;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; i += 4) {
      if (i >= begin_column && i < end_column) {
        const float* o = out + 4 * i;
        const uint4 piece0 = transpose4(pack(o[0] * inverse0, o[1] * inverse0), pack(o[4] * inverse0, o[5] * inverse0),
                                        pack(o[8] * inverse0, o[9] * inverse0), pack(o[12] * inverse0, o[13] * inverse0));
        const uint4 piece1 = transpose4(pack(o[2] * inverse1, o[3] * inverse1), pack(o[6] * inverse1, o[7] * inverse1),
                                        pack(o[10] * inverse1, o[11] * inverse1), pack(o[14] * inverse1, o[15] * inverse1));
        if (live0) *reinterpret_cast<uint4*>(target0 + 8 * i) = piece0;
        if (live1) *reinterpret_cast<uint4*>(target1 + 8 * i) = piece1;
      }
    }
    if (a.lse != nullptr && t == 0 && begin_column == 0) {
      if (live0) a.lse[at0] = max0 * scale + __log2f(sum0);
      if (live1) a.lse[at1] = max1 * scale + __log2f(sum1);
    }
  }
  // the last turn that warpgroup 1 gave away is taken, so that the barrier is left as it was found
  if (warpgroup == 0) sync<256>(kTurn);
}

}  // namespace podgraph::sm90

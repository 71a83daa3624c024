// pod_sm90's constants, and its map of shared memory.
#pragma once
#include "args.h"
#include "sm90.h"

namespace podgraph::sm90 {

using DType = PODGRAPH_DTYPE;

constexpr int kHeadDim = PODGRAPH_HEAD_DIM, kGroup = PODGRAPH_GROUP_SIZE, kPage = PODGRAPH_PAGE_SIZE;
constexpr int kRows = PODGRAPH_DECODE_ROWS;     // query rows of a decode at most
constexpr bool kWindow = PODGRAPH_WINDOW, kSoftCap = PODGRAPH_SOFT_CAP;
constexpr int kBlock = PODGRAPH_KV_BLOCK;       // KV tokens of one prefill step
constexpr bool kSplitTiles = kBlock < 128;      // wider ones have no registers left for partial results
constexpr int kStages = PODGRAPH_STAGES;        // K blocks and V blocks of prefill in flight
constexpr int kSlots = PODGRAPH_DECODE_SLOTS;   // chunks of K or V of decode in flight

// Roles: one warpgroup of producers, one that decodes, two that prefill.
constexpr int kThreads = 512;
enum ProducerWarp { kPrefillProducer, kDecodeProducer, kQueryLoader, kOtherQueryLoader };
// Registers of a thread in each role: 128 threads x 512 is the whole file of 65,536. Shared out so that nothing spills:
// producers divide by groups that are no power of two, and with more than 8 columns decode has twice as many to keep. Its
// 8 or 16 more come from the consumers, which have some left with short rows, else from the producers. Several rows take
// more of both, which consumers have left with short rows or narrow blocks; others serve 8 columns only.
constexpr bool kManyColumns = kGroup * kRows > 8, kSpare = kHeadDim == 64 || kSplitTiles;
constexpr int kConsumerRegisters = kRows > 1 && kSpare ? 176 : kManyColumns && kHeadDim == 64 ? 184 : 192;
constexpr int kProducerRegisters =
    kRows > 1 ? 56 : kGroup & (kGroup - 1) ? 64 : kManyColumns && kHeadDim == 128 ? 48 : 56;
constexpr int kDecodeRegisters = 512 - 2 * kConsumerRegisters - kProducerRegisters;

// Named barriers; 0 is __syncthreads.
enum NamedBarrier {
  kTurn = 1,        // and 2: the consumer warpgroups take turns on the tensor cores
  kClearValues = 3, // and 4: each consumer warpgroup by itself
  kDecode = 5,
  kExchange = 7,    // both consumer warpgroups
};

constexpr int kHalves = kHeadDim / 64;          // a row of 64 elements is 128 bytes, the width of the swizzle
constexpr int kTileRows = 64 / kGroup;          // rows of a request in the 64 rows of one warpgroup's product
constexpr int kChunk = 64;                      // tokens of one decode step
constexpr int kBox = kPage < 64 ? kPage : 64;   // tokens of one TMA operation of decode
constexpr int kBoxes = kChunk / kBox;
constexpr int kPrefillBox = 16;                 // tokens of one TMA operation of prefill
constexpr int kPrefillBoxes = kBlock / kPrefillBox;
constexpr int kTokenBytes = kHeadDim * 2;
constexpr int kBlockBytes = kBlock * kTokenBytes, kChunkBytes = kChunk * kTokenBytes;
constexpr int kQueryBytes = 64 * kTokenBytes;   // of one consumer warpgroup
// Columns of decode's products: the group's heads of one row after the other, padded to a size of wgmma, and how many
// times 8 that is.
constexpr int kUsedColumns = kGroup * kRows, kColumns = kManyColumns ? 16 : 8, kOctets = kColumns / 8;
constexpr int kCoreBytes = 128;                 // of a core matrix, 8 x 16 bytes: without swizzle, matrices consist of them
constexpr int kDecodeQueryBytes = kHeadDim * kColumns * 2, kWeightBytes = kChunk * kColumns * 2;
// In memory a chunk or block is [groups of 8 tokens][halves of a row][8 tokens][64 elements], each 1 KB one swizzle atom.
constexpr int kAtomBytes = 1024, kGroupBytes = kHalves * kAtomBytes;

static_assert(kRows == 1 || kSpare || !kManyColumns, "registers");
static_assert((kGroup <= 8 || kGroup == 16) && kRows > 0 && kUsedColumns <= 16, "columns");
static_assert(kHeadDim % 64 == 0 && kBlock % kPrefillBox == 0, "shape");
static_assert(kPage % kPrefillBox == 0 && (64 % kPage == 0 || kPage % 64 == 0), "page size");

// What the prefill producer tells the consumers and the query loader of a tile; two of them take turns.
struct TileInfo {
  int blocks;    // up to which KV block, -1: no more tiles
  int first;     // from which one on: of the part, or of the window
  int row, rows, position, kv_head, kv_len, shared;
  int first_part, part, parts, ticket;
};

// What the decode producer tells the decode warpgroup of a unit; two of them take turns.
struct UnitInfo {
  int row, kv_head, first_part, part, parts, ticket, skip, more_rows;
};

struct Memory {
  uint8_t query[2][kQueryBytes];
  uint8_t keys[kStages][kBlockBytes];
  uint8_t values[kStages][kBlockBytes];
  uint8_t slots[kSlots][kChunkBytes];
  // no swizzle: [head_dim / 8][columns][8 elements], and [tokens / 8][columns / 8][8 tokens][8 columns]
  uint8_t decode_query[2][kDecodeQueryBytes];
  uint8_t weights[2][kWeightBytes];
  // barriers of prefill
  uint64_t tile_full, query_full, query_empty;
  uint64_t key_full[kStages], key_empty[kStages], value_full[kStages], value_empty[kStages];
  // barriers of decode
  uint64_t slot_full[kSlots], slot_empty[kSlots], unit_empty[2];
  TileInfo tiles[2];
  UnitInfo units[2];
  int slot_info[kSlots];          // see SlotInfo, -1: no more units
  const int32_t* kv_indices;      // of the step
  int coordinates[2][4];          // of K and of V: KvMap's head_c2, head_c4, page_c4
  int prefill_before;             // parts of the tile's rows that were finished before this one
  alignas(16) float decode_sums[4 * kColumns + 4];  // [octets][warps][8 columns], then the parts finished before
};
// What the decode producer tells the decode warpgroup of a chunk: its valid tokens, whether it is a unit's first or last,
// and where the unit's queries lie. With several rows also which of its tokens row 0 sees: from which one on and up to which
// one, plus kMostRows, since both may lie in front of the chunk. Each further row begins and ends one token later.
enum SlotInfo { kValid = 127, kFirst = 256, kLast = 512, kOdd = 1024, kToShift = 11, kFromShift = 18, kTokenMask = 127 };
constexpr int kMostRows = 16;
static_assert(kRows <= kMostRows && kChunk + kMostRows <= kTokenMask, "bits of SlotInfo");
static_assert(sizeof(Memory) <= 232448, "more than an SM has");

// K and V as TMA sees them, made by the runtime for each layer's cache (podgraph/dispatch/kv_maps.py).
// Dimensions: 64 elements, 8 tokens, heads and halves, groups of 8 tokens, pages (and heads, where they come first).
struct KvMap {
  alignas(64) uint8_t prefill[128];  // boxes of 16 tokens
  alignas(64) uint8_t decode[128];   // boxes of kBox tokens
  int head_c2, head_c4, page_c4, unused[29];
};
struct KvMaps {
  KvMap k, v;
};
static_assert(sizeof(KvMaps) == 768, "as the runtime packs it");

// log2(e) x the scale on a logit; with a soft cap the product with it follows the tanh
PODGRAPH_DEVICE float logit_scale(const Args& a) {
  constexpr float kLog2E = 1.44269504088896340736f;
  return (kSoftCap ? a.logits_soft_cap : a.sm_scale) * kLog2E;
}
// tanh to float's precision: tanh.approx errs by 2^-11, which a cap of 50 makes 2 % of a weight
PODGRAPH_DEVICE float soft_capped(float logit, float sm_scale_over_cap) {
  constexpr float kTwoLog2E = 2.88539008177792681472f;
  return 1.f - __fdividef(2.f, exp2(logit * sm_scale_over_cap * kTwoLog2E) + 1.f);
}
PODGRAPH_DEVICE float finite(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

// The skip of a rescale: a maximum may lag by 2^8 of weight before the sums are scaled anew.
constexpr float kLag = 8.f;

// Where the step's page numbers lie, read from shared memory each time: producers have no registers to keep it.
PODGRAPH_DEVICE const int32_t* indices_of(const Memory& memory) {
  return *const_cast<const int32_t* const volatile*>(&memory.kv_indices);
}

// One box of K or V. The factors are read from shared memory each time: producers have no registers to keep them.
PODGRAPH_DEVICE void load_box(Memory& memory, const uint8_t* map, int values, uint32_t target, uint32_t barrier,
                              int kv_head, int group, int page, uint64_t policy) {
  const volatile int* factor = memory.coordinates[values];
  tma_load(target, map, barrier, kv_head * factor[0], group, kv_head * factor[1] + page * factor[2], policy);
}

// The last producer warp of the grid zeroes the ticket counters for the next launch.
PODGRAPH_DEVICE void finish(const Args& a) {
  if (threadIdx.x % 32 == 0) {
    __threadfence();  // this CTA's tickets are drawn before it counts itself out
    if (atomicAdd(a.counters + 2, 1) == static_cast<int>(gridDim.x) * 2 - 1) {
      a.counters[0] = a.counters[1] = a.counters[2] = 0;
    }
  }
}

}  // namespace podgraph::sm90

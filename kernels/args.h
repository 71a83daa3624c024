// The one parameter struct that every podgraph kernel takes by value.
//
// Python packs it (podgraph/planner/args.py); compiling checks that both sides agree on every offset.
// Pointers come first, so that no field is padded: padding would carry garbage into captured graphs.
#pragma once
#include <cstddef>
#include <cstdint>

namespace podgraph {

struct Args {
  // what one call of run() names
  const void* q;        // [rows, num_qo_heads, head_dim], rows q_stride_n elements apart
  const void* k;        // paged cache, strides below
  const void* v;
  void* out;            // [rows, num_qo_heads, head_dim], contiguous
  float* lse;           // [rows, num_qo_heads], base 2; may be null
  const void* kv_maps;  // KvMaps of k and v (pod_sm90 only)
  // meta: one step's ragged metadata
  const int32_t* qo_indptr;         // [num_requests + 1]
  const int32_t* kv_indptr;         // [num_requests + 1], in pages
  const int32_t* kv_last_page_len;  // [num_requests]
  // plan: the work list, made anew every step
  const int32_t* counts;            // see Count
  const int32_t* const* kv_indices_at;  // where kv_indices of the step lie: [kv_indptr[num_requests]]
  const int32_t* prefill_request_indices;
  const int32_t* prefill_qo_tile_indices;
  const int32_t* prefill_kv_tile_indices;
  const int32_t* decode_request_indices;
  const int32_t* decode_qo_tile_indices;
  const int32_t* decode_kv_tile_indices;
  const int32_t* kv_chunk_size;     // [num_requests], tokens; kUnsplit: rows go straight to out
  const int32_t* o_indptr;          // [num_requests], first row of a split request among the partials
  const int32_t* merge_rows;        // [merge rows], the rows of out that have several partials
  const int32_t* merge_first;       // [merge rows], the first of their partials
  const int32_t* merge_count;       // [merge rows], how many they have
  const int32_t* tiles;             // [prefill items][12]: see Tile (pod_sm90)
  const int32_t* units;             // [decode items][8]: see Unit (pod_sm90)
  const int32_t* empty_rows;        // [requests without KV][2]: first row, rows (pod_sm90)
  // scratch
  void* partial_out;                // [partial rows, num_qo_heads, head_dim]
  float* partial_lse;               // [partial rows, num_qo_heads]
  int32_t* counters;                // zero before the first launch; every launch leaves them zero
  // scalars
  int32_t q_stride_n;
  int32_t q_stride_h;
  uint32_t k_stride_page;
  uint32_t k_stride_n;
  uint32_t k_stride_h;
  uint32_t v_stride_page;
  uint32_t v_stride_n;
  uint32_t v_stride_h;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t window_left;              // -1: none
  float logits_soft_cap;            // 0: none
  float sm_scale;                   // times the K scale of an fp8 cache
  float v_scale;                    // of an fp8 cache, else 1
};

enum Count { kNumRequests, kPrefillItems, kDecodeItems, kMergeRows, kEmptyRequests };

// One item of the prefill list of pod_sm90: some rows of one request, over all of their KV or a part of it.
struct Tile {
  int32_t kv_offset;   // of the request's first page in kv_indices
  int32_t num_pages;
  int32_t row;         // of q and out
  int32_t rows;
  int32_t position;    // in the KV of the request, of the first of the rows
  int32_t kv_len;      // tokens
  int32_t begin, end;  // tokens of the part, multiples of 128 where the KV is split
  int32_t shared;      // 1: both consumer warpgroups compute the same rows, each over every other KV block
  int32_t first_part;  // the rows' first partial results; those of a part are `rows` rows
  int32_t parts;       // number | count << 12
  int32_t ticket;      // the rows' counter of finished parts, behind the four common ones
};

// One item of the decode list of pod_sm90: the rows of one request, over all of their KV or a part of it.
struct Unit {
  int32_t kv_offset;
  int32_t num_pages;
  int32_t begin, end;  // tokens; begin is a multiple of kChunk
  int32_t row;         // of q and out, the request's first one
  int32_t first_part;  // the rows' first partial results; those of a part are decode_rows rows
  int32_t parts;       // number | count << 12 | tokens of the first part that the window hides from the last row << 24
  int32_t ticket;      // the rows' counter of finished parts, behind the four common ones | rows - 1 << 16
                       // | tokens behind `end` that rows of the request see, but not the first one << 20
};

constexpr int32_t kUnsplit = 0x7fffffff;

// The parameter struct of the planner's kernels: one step's metadata in, a work list out.
struct PlanArgs {
  // the step's metadata, in the caller's memory
  const int32_t* qo_indptr;         // [num_requests + 1]
  const int32_t* kv_indptr;         // [num_requests + 1], in pages
  const int32_t* kv_last_page_len;  // [num_requests]
  const int32_t* kv_indices;        // [num_indices]
  int32_t* status;                  // Report, in host memory; written only where a step is refused
  // what the attention kernels read; null where these kernels have no such list
  int32_t* meta_qo_indptr;
  int32_t* meta_kv_indptr;
  int32_t* meta_kv_last_page_len;
  int32_t* counts;
  const int32_t** kv_indices_at;
  uint32_t* bad_page;               // first entry of kv_indices that names no page; all ones: none
  int32_t* prefill_request_indices;
  int32_t* prefill_qo_tile_indices;
  int32_t* prefill_kv_tile_indices;
  int32_t* decode_request_indices;
  int32_t* decode_qo_tile_indices;
  int32_t* decode_kv_tile_indices;
  int32_t* kv_chunk_size;
  int32_t* o_indptr;
  int32_t* merge_rows;
  int32_t* merge_first;
  int32_t* merge_count;
  int32_t* tiles;
  int32_t* units;
  int32_t* empty_rows;
  // the step
  int32_t plan_number;              // goes back in the report; 0: none, and first_row is not known either
  int32_t first_row;                // qo_indptr[0]: 0, or where the step is a part of another its first row there
  int32_t num_requests;
  int32_t num_indices;
  int32_t num_pages;                // of the cache; 0: kv_indices are not checked
  int32_t rows;                     // that q and out have at least
  int32_t given_prefill_len;        // what the caller said of the batch; -1: nothing
  int32_t given_decode_count;
  // the bucket
  int32_t batch;
  int32_t prefill_len;
  int32_t decode_count;
  int32_t prefill_tile;             // packed rows (FlashInfer's kernels)
  int32_t shares_tiles;             // of the setting (pod_sm90)
  int32_t splits_tiles;
  // the specification, the policy, and what the lists have room for
  int32_t page_size;
  int32_t group_size;
  int32_t num_kv_heads;
  int32_t decode_rows;
  int32_t window_left;
  int32_t ctas;
  int32_t max_pages;
  int32_t max_kv_len;
  int32_t requests;                 // of the largest bucket: meta and the planner's shared memory hold as many
  int32_t prefill_items;
  int32_t decode_items;
  int32_t partial_rows;
  int32_t merge_capacity;
  int32_t partition;                // how the sides share a round of the grid (FlashInfer's kernels)
};

// Why a step was refused: what PlanArgs::status receives, in this order, as one store of 16 bytes. It stays until the
// host makes code 0 again, whatever is refused meanwhile: the first refusal is the cause.
struct Report {
  int32_t code;         // Refusal
  int32_t request;      // the first one that is wrong; num_requests where it is the batch as a whole
  int32_t got;
  int32_t plan_number;  // of the PlanArgs
};

// podgraph/dispatch/planning.py has the words.
enum Refusal {
  kAccepted,
  kQoIndptr,        // decreases, or does not begin at first_row
  kKvIndptr,        // decreases, or does not begin at 0
  kLastPageLen,     // not 1 to page_size
  kShortKv,         // fewer tokens than query rows
  kLongKv,          // more than max_kv_len
  kTooManyRows,     // than q and out have
  kTooManyPages,    // than kv_indices or workspace.max_pages
  kTooManyPrefills, // for the bucket, as the next ones
  kTooManyPrefillRows,
  kTooManyRequests, // or fewer than none: nothing of them is read
  kGivenPrefillLen, // is not the batch's
  kGivenDecodeCount,
  kPageIndex,       // names no page of the cache
  kCapacity,        // a list is too short: a defect of podgraph
};

}  // namespace podgraph

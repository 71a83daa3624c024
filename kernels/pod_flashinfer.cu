// POD attention over FlashInfer's device function, for every architecture FlashInfer's FA2 template serves.
//
// FlashInfer's own fused kernel cannot be stored in a catalog: its SM-aware counters are indexed by %smid, must be
// zeroed by a node of their own and divide by zero when one side is empty, and the grid follows the batch. This kernel
// keeps FlashInfer's attention (BatchPrefillWithPagedKVCacheDevice) and replaces what is around it:
//
//   * a persistent grid of kCtasPerSm CTAs per SM. CTAs draw (item, kv head) tickets from two counters, one per side.
//     The first CTA of an SM starts with prefill, the second with decode, and each turns to the other side when its
//     own is drained: both kinds of work share an SM, which is the point of POD.
//   * counts and lists lie in device memory, so one captured launch serves every batch, one-sided and empty ones too.
//   * split or not is decided per request: rows of an unsplit request go straight to out.
//
// Compiled once per (dtype, head dim, group, page size, window, soft cap, tiles): see podgraph/providers/flashinfer.py.
// PODGRAPH_TILE_P is the prefill tile in packed rows (row x head of the group), 0 for the decode-only kernel;
// PODGRAPH_TILE_D the decode tile, 0 for the prefill-only one.
#include "constdiv.h"  // before FlashInfer's headers: it stands in for one of them

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/variants.cuh>
#include <flashinfer/page.cuh>

#include "args.h"

namespace podgraph {

namespace fi = flashinfer;

using DType = PODGRAPH_DTYPE;
using DTypeKV = PODGRAPH_KV_DTYPE;

// What FlashInfer's device function reads of its (host-only) parameter class, by the same names.
struct Params {
  using DTypeQ = DType;
  using DTypeKV = podgraph::DTypeKV;
  using DTypeO = DType;
  using IdType = int32_t;
  DType* q;
  fi::paged_kv_t<DTypeKV, int32_t> paged_kv;
  int32_t* q_indptr;
  DType* o;
  float* lse;
  fi::uint_fastdiv group_size;
  uint32_t num_qo_heads;
  int32_t q_stride_n, q_stride_h;
  // scale factors of fp4 caches: unused, but read
  uint32_t k_sf_stride_page = 0, k_sf_stride_n = 0, k_sf_stride_h = 0;
  uint32_t v_sf_stride_page = 0, v_sf_stride_n = 0, v_sf_stride_h = 0;
  int32_t window_left;
  float logits_soft_cap, sm_scale, v_scale;
  int32_t *request_indices, *qo_tile_indices, *kv_tile_indices, *o_indptr, *kv_chunk_size_ptr;
  bool* block_valid_mask = nullptr;
  bool partition_kv;

  __device__ __forceinline__ uint32_t get_qo_len(uint32_t request) const {
    return q_indptr[request + 1] - q_indptr[request];
  }
  __device__ __forceinline__ uint32_t get_kv_len(uint32_t request) const { return paged_kv.get_length(request); }
};

using Variant = fi::DefaultAttention<false, PODGRAPH_WINDOW != 0, PODGRAPH_SOFT_CAP != 0, false>;

constexpr uint32_t kMmaD = PODGRAPH_HEAD_DIM / 16;
constexpr int kCtasPerSm = PODGRAPH_CTAS_PER_SM;

template <fi::MaskMode Mask, uint32_t TileQ, uint32_t MmaKv>
using Traits =
    fi::KernelTraits<Mask, TileQ, fi::get_num_mma_q(TileQ), MmaKv, kMmaD, kMmaD, fi::get_num_warps_q(TileQ),
                     fi::get_num_warps_kv(TileQ), fi::PosEncodingMode::kNone, DType, DTypeKV, DType, float, int32_t,
                     Variant>;

template <typename KTraits>
__device__ __forceinline__ void attend(const Args& a, const int32_t* request_indices, const int32_t* qo_tile_indices,
                                       const int32_t* kv_tile_indices, uint32_t item, uint32_t kv_head,
                                       uint8_t* smem) {
  const int32_t request = request_indices[item];
  const bool split = a.kv_chunk_size[request] != kUnsplit;
  Params p;
  p.q = static_cast<DType*>(const_cast<void*>(a.q));
  p.paged_kv.page_size = fi::uint_fastdiv(PODGRAPH_PAGE_SIZE);
  p.paged_kv.num_heads = a.num_kv_heads;
  p.paged_kv.head_dim = PODGRAPH_HEAD_DIM;
  p.paged_kv.batch_size = a.counts[kNumRequests];
  p.paged_kv.stride_page = a.k_stride_page;
  p.paged_kv.stride_n = a.k_stride_n;
  p.paged_kv.stride_h = a.k_stride_h;
  p.paged_kv.v_stride_page = a.v_stride_page;
  p.paged_kv.v_stride_n = a.v_stride_n;
  p.paged_kv.v_stride_h = a.v_stride_h;
  p.paged_kv.k_data = static_cast<DTypeKV*>(const_cast<void*>(a.k));
  p.paged_kv.v_data = static_cast<DTypeKV*>(const_cast<void*>(a.v));
  p.paged_kv.indices = const_cast<int32_t*>(*a.kv_indices_at);
  p.paged_kv.indptr = const_cast<int32_t*>(a.kv_indptr);
  p.paged_kv.last_page_len = const_cast<int32_t*>(a.kv_last_page_len);
  p.q_indptr = const_cast<int32_t*>(a.qo_indptr);
  p.o = static_cast<DType*>(split ? a.partial_out : a.out);
  p.lse = split ? a.partial_lse : a.lse;
  p.o_indptr = const_cast<int32_t*>(split ? a.o_indptr : a.qo_indptr);
  p.group_size = fi::uint_fastdiv(PODGRAPH_GROUP_SIZE);
  p.num_qo_heads = a.num_qo_heads;
  p.q_stride_n = a.q_stride_n;
  p.q_stride_h = a.q_stride_h;
  p.window_left = a.window_left;
  p.logits_soft_cap = a.logits_soft_cap;
  p.sm_scale = a.sm_scale;
  p.v_scale = a.v_scale;
  p.request_indices = const_cast<int32_t*>(request_indices);
  p.qo_tile_indices = const_cast<int32_t*>(qo_tile_indices);
  p.kv_tile_indices = const_cast<int32_t*>(kv_tile_indices);
  p.kv_chunk_size_ptr = const_cast<int32_t*>(a.kv_chunk_size + request);
  p.partition_kv = split;

  const uint32_t warp = threadIdx.x / 32;
  const dim3 tid(threadIdx.x % 32, warp % KTraits::NUM_WARPS_Q, warp / KTraits::NUM_WARPS_Q);
  fi::BatchPrefillWithPagedKVCacheDevice<KTraits>(p, *reinterpret_cast<typename KTraits::SharedStorage*>(smem), tid,
                                                  item, kv_head, a.num_kv_heads);
}

}  // namespace podgraph

// 4 warps: every FlashInfer tile (16, 64, 128 packed rows) uses 128 threads.
extern "C" __global__ void __launch_bounds__(128, podgraph::kCtasPerSm)
    podgraph_pod(const __grid_constant__ podgraph::Args a) {
  using namespace podgraph;
  extern __shared__ __align__(16) uint8_t smem[];
  __shared__ int32_t drawn_side, drawn_ticket;
  enum { kPrefill, kDecode, kDone };

  const int32_t heads = a.num_kv_heads;
  const int32_t tickets[2] = {PODGRAPH_TILE_P ? a.counts[kPrefillItems] * heads : 0,
                              PODGRAPH_TILE_D ? a.counts[kDecodeItems] * heads : 0};
  // CTAs are placed one per SM before any SM gets its second: the two halves of the grid share the SMs.
  int side = blockIdx.x < gridDim.x / 2 ? kPrefill : kDecode;
  int drained = 0;

  while (true) {
    if (threadIdx.x == 0) {
      int32_t ticket = 0;
      while (drained < 2) {
        ticket = tickets[side] > 0 ? atomicAdd(a.counters + side, 1) : 0;
        if (ticket < tickets[side]) break;
        side ^= 1;
        ++drained;
      }
      drawn_side = drained < 2 ? side : kDone;
      drawn_ticket = ticket;
    }
    __syncthreads();
    const int drawn = drawn_side;
    const int32_t ticket = drawn_ticket;
    __syncthreads();
    if (drawn == kDone) return;
    // the heads of one item are drawn together: they read the same pages
    const uint32_t item = ticket / heads, kv_head = ticket % heads;
#if PODGRAPH_TILE_P
    if (drawn == kPrefill) {
      attend<Traits<flashinfer::MaskMode::kCausal, PODGRAPH_TILE_P, PODGRAPH_MMA_KV_P>>(
          a, a.prefill_request_indices, a.prefill_qo_tile_indices, a.prefill_kv_tile_indices, item, kv_head, smem);
    }
#endif
#if PODGRAPH_TILE_D
    if (drawn == kDecode) {
      constexpr auto kMask =
          PODGRAPH_DECODE_ROWS > 1 ? flashinfer::MaskMode::kCausal : flashinfer::MaskMode::kNone;
      attend<Traits<kMask, PODGRAPH_TILE_D, PODGRAPH_MMA_KV_D>>(
          a, a.decode_request_indices, a.decode_qo_tile_indices, a.decode_kv_tile_indices, item, kv_head, smem);
    }
#endif
    __syncthreads();
  }
}

// Bytes of dynamic shared memory the kernel needs, read by the builder from the cubin.
namespace podgraph {
#if PODGRAPH_TILE_P
constexpr size_t kSmemP =
    sizeof(Traits<flashinfer::MaskMode::kCausal, PODGRAPH_TILE_P, PODGRAPH_MMA_KV_P>::SharedStorage);
#else
constexpr size_t kSmemP = 0;
#endif
#if PODGRAPH_TILE_D
constexpr size_t kSmemD =
    sizeof(Traits<flashinfer::MaskMode::kCausal, PODGRAPH_TILE_D, PODGRAPH_MMA_KV_D>::SharedStorage);
#else
constexpr size_t kSmemD = 0;
#endif
}  // namespace podgraph
extern "C" __device__ const uint32_t podgraph_smem_bytes = podgraph::kSmemP > podgraph::kSmemD
                                                                    ? podgraph::kSmemP
                                                                    : podgraph::kSmemD;

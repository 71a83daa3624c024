// POD attention for Hopper: prefill and decode of one uniform batch on the same SMs, in one persistent kernel.
//
// One CTA of four warpgroups per SM. One warpgroup feeds the others: a warp brings in K and V of prefill by TMA, one
// those of decode, two load prefill's queries, and one of these writes the rows that have no KV. One warpgroup decodes, two prefill
// in turns. Work is drawn from two counters, counts and lists lie in device memory, and partial results of a decode are
// added up by whoever finishes the last of them: one captured launch serves every batch.
//
// Compiled once per (dtype, head dim, group, rows, page size, window, soft cap, setting): see podgraph/providers/pod_sm90.py.
// docs/pod_sm90.md explains the design and what each choice buys.
#include "pod_sm90_decode.h"
#include "pod_sm90_prefill.h"

extern "C" __global__ void __launch_bounds__(podgraph::sm90::kThreads, 1)
    podgraph_pod_sm90(const __grid_constant__ podgraph::Args a) {
  using namespace podgraph::sm90;
  // 1,024 bytes: a swizzle atom must not cross its own alignment
  extern __shared__ __align__(1024) uint8_t raw[];
  Memory& memory = *reinterpret_cast<Memory*>(raw);
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32;

  if (threadIdx.x == 0) {
    if (shared_address(raw) % 1024 != 0) __trap();
    memory.kv_indices = *a.kv_indices_at;
    const KvMaps& maps = *static_cast<const podgraph::sm90::KvMaps*>(a.kv_maps);
    for (int values = 0; values < 2; values++) {
      const KvMap& map = values ? maps.v : maps.k;
      memory.coordinates[values][0] = map.head_c2;
      memory.coordinates[values][1] = map.head_c4;
      memory.coordinates[values][2] = map.page_c4;
    }
    auto init = [](uint64_t* barrier, int arrivals) { barrier_init(shared_address(barrier), arrivals); };
    init(&memory.tile_full, 1);   // the prefill producer
    init(&memory.query_full, 2);  // both query loaders
    init(&memory.query_empty, 8); // the warps of both consumer warpgroups
    for (int i = 0; i < kStages; i++) {
      init(&memory.key_full[i], 1), init(&memory.value_full[i], 1);  // the producer's lane 0, and the bytes
      init(&memory.key_empty[i], 8), init(&memory.value_empty[i], 8);
    }
    for (int i = 0; i < kSlots; i++) init(&memory.slot_full[i], 1), init(&memory.slot_empty[i], 4);
    for (int i = 0; i < 2; i++) init(&memory.unit_empty[i], 4);  // the warps of the decode warpgroup
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();

  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    const KvMaps& maps = *static_cast<const podgraph::sm90::KvMaps*>(a.kv_maps);
    switch (warp) {
      case kPrefillProducer:
        tma_acquire(maps.k.prefill), tma_acquire(maps.v.prefill);
        produce_prefill(a, memory);
        break;
      case kDecodeProducer:
        tma_acquire(maps.k.decode), tma_acquire(maps.v.decode);
        produce_decode(a, memory);
        break;
      case kQueryLoader: load_queries(a, memory, 0); break;
      case kOtherQueryLoader:
        load_queries(a, memory, 1);
        write_empty_rows(a);
        break;
    }
  } else if (warpgroup == 1) {
    give_registers<kDecodeRegisters>();
    consume_decode(a, memory);
  } else {
    take_registers<kConsumerRegisters>();
    consume_prefill(a, memory, warpgroup - 2);
  }
}

// Bytes of dynamic shared memory the kernel needs, read by the builder from the cubin.
extern "C" __device__ const uint32_t podgraph_smem_bytes = sizeof(podgraph::sm90::Memory);

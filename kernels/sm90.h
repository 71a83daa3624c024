// What pod_sm90 needs of the Hopper instruction set: mbarriers, TMA, wgmma, named barriers. PTX ISA 8.x, sm_90a.
#pragma once
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define PODGRAPH_DEVICE __device__ __forceinline__

namespace podgraph::sm90 {

// ---- shared memory --------------------------------------------------------------------------------------------------

PODGRAPH_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
PODGRAPH_DEVICE void store(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
PODGRAPH_DEVICE void store(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
PODGRAPH_DEVICE void store(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}
PODGRAPH_DEVICE float load_float(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
PODGRAPH_DEVICE int load_int(uint32_t address) {
  int value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
// 16 bytes from global memory, or zeros: asynchronous, in the generic proxy
PODGRAPH_DEVICE void copy_async(uint32_t address, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}
PODGRAPH_DEVICE void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// what this thread wrote becomes visible to TMA and wgmma
PODGRAPH_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- mbarriers: a phase ends when all expected arrivals and bytes are in; waiters name its parity ---------------------

PODGRAPH_DEVICE void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
PODGRAPH_DEVICE void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
PODGRAPH_DEVICE void barrier_arrive(uint32_t barrier, int times = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}
PODGRAPH_DEVICE void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nretry:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra retry;\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

// ---- named barriers of a CTA ------------------------------------------------------------------------------------------

template <int Threads>
PODGRAPH_DEVICE void sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}
template <int Threads>
PODGRAPH_DEVICE void arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}
// synchronises a warpgroup; true where any thread's vote was
PODGRAPH_DEVICE bool sync_any(int id, bool vote) {
  int any;
  asm volatile(
      "{\n.reg .pred mine, some;\nsetp.ne.b32 mine, %2, 0;\nbar.red.or.pred some, %1, 128, mine;\nselp.b32 %0, 1, 0, "
      "some;\n}"
      : "=r"(any)
      : "r"(id), "r"(static_cast<int>(vote))
      : "memory");
  return any;
}

// ---- TMA ----------------------------------------------------------------------------------------------------------------

// createpolicy's encodings of "evict first" and "evict last" for the whole access
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull, kEvictLast = 0x14F0000000000000ull;

PODGRAPH_DEVICE void tma_load(uint32_t target, const void* map, uint32_t barrier, int c2, int c3, int c4,
                              uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %3, "
      "%4, %5, %6}], [%2], %7;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(0), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}
// The map was written by a copy before this kernel started: acquire it before its first use in this thread block.
PODGRAPH_DEVICE void tma_acquire(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------------

// A matrix in shared memory: strides in bytes between 8-row groups and between the core matrices of a row
enum Swizzle : uint64_t { kNoSwizzle = 0, kSwizzle128 = 1 };
PODGRAPH_DEVICE uint64_t matrix(uint32_t address, uint32_t leading, uint32_t stride, Swizzle swizzle) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}
PODGRAPH_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PODGRAPH_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
PODGRAPH_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Registers that wgmma reads or writes behind the compiler's back: nothing may move across this.
template <int N>
PODGRAPH_DEVICE void pin(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int M, int N>
PODGRAPH_DEVICE void pin(float (&registers)[M][N]) {
#pragma unroll
  for (int i = 0; i < M; i++) pin(registers[i]);
}
// A value that the compiler must not reason about: it would clone the loop around wgmma, which ptxas then serialises.
PODGRAPH_DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

#define PODGRAPH_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PODGRAPH_F16(d, i) PODGRAPH_F4(d, i), PODGRAPH_F4(d, i + 4), PODGRAPH_F4(d, i + 8), PODGRAPH_F4(d, i + 12)
#define PODGRAPH_F32(d) PODGRAPH_F16(d, 0), PODGRAPH_F16(d, 16)
#define PODGRAPH_F64(d) PODGRAPH_F16(d, 0), PODGRAPH_F16(d, 16), PODGRAPH_F16(d, 32), PODGRAPH_F16(d, 48)
#define PODGRAPH_32_NAMES                                                                                              \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, " \
  "%25, %26, %27, %28, %29, %30, %31"
#define PODGRAPH_64_NAMES                                                                                              \
  PODGRAPH_32_NAMES                                                                                                    \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "    \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d = a b^T (+ d): a [64, 16] and b [N, 16] in shared memory, both with 16 contiguous
#define PODGRAPH_WGMMA_SS(n, registers, names, outputs, a, b, p)                                                       \
  PODGRAPH_DEVICE void multiply(float(&d)[registers], uint64_t left, uint64_t right, bool add) {                        \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " p ", 0;\nwgmma.mma_async.sync.aligned.m64n" n                   \
                 "k16.f32." PODGRAPH_PTX_TYPE "." PODGRAPH_PTX_TYPE " {" names "}, " a ", " b                            \
                 ", add, 1, 1, 0, 0;\n}"                                                                                 \
                 : outputs                                                                                              \
                 : "l"(left), "l"(right), "r"(static_cast<int>(add)));                                                  \
  }
PODGRAPH_WGMMA_SS("64", 32, PODGRAPH_32_NAMES, PODGRAPH_F32(d), "%32", "%33", "%34")
PODGRAPH_WGMMA_SS("128", 64, PODGRAPH_64_NAMES, PODGRAPH_F64(d), "%64", "%65", "%66")

// d += a b: a [64, 16] in registers, b [16, N] in shared memory with N contiguous
#define PODGRAPH_WGMMA_RS(n, registers, names, outputs, a0, a1, a2, a3, b)                                             \
  PODGRAPH_DEVICE void accumulate(float(&d)[registers], const uint32_t* left, uint64_t right) {                         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." PODGRAPH_PTX_TYPE "." PODGRAPH_PTX_TYPE " {" names     \
                 "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b ", 1, 1, 1, 1;"                                               \
                 : outputs                                                                                              \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));                                 \
  }
PODGRAPH_WGMMA_RS("64", 32, PODGRAPH_32_NAMES, PODGRAPH_F32(d), "%32", "%33", "%34", "%35", "%36")
PODGRAPH_WGMMA_RS("128", 64, PODGRAPH_64_NAMES, PODGRAPH_F64(d), "%64", "%65", "%66", "%67", "%68")

// d = a b (+ d) with 8 or 16 columns; Transposed: the other dimension of a and of b is the contiguous one
#define PODGRAPH_WGMMA_FEW(n, octets, names, outputs, a, b, p, trans)                                                   \
  template <bool Transposed>                                                                                           \
  PODGRAPH_DEVICE void multiply_few(float(&d)[octets][4], uint64_t left, uint64_t right, bool add) {                    \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " p ", 0;\nwgmma.mma_async.sync.aligned.m64n" n                   \
                 "k16.f32." PODGRAPH_PTX_TYPE "." PODGRAPH_PTX_TYPE " {" names "}, " a ", " b                            \
                 ", add, 1, 1, " trans ", " trans ";\n}"                                                                \
                 : outputs                                                                                              \
                 : "l"(left), "l"(right), "r"(static_cast<int>(add)), "n"(Transposed ? 1 : 0));                         \
  }
PODGRAPH_WGMMA_FEW("8", 1, "%0, %1, %2, %3", PODGRAPH_F4(d[0], 0), "%4", "%5", "%6", "%7")
#define PODGRAPH_TWO_F4(d) PODGRAPH_F4(d[0], 0), PODGRAPH_F4(d[1], 0)
PODGRAPH_WGMMA_FEW("16", 2, "%0, %1, %2, %3, %4, %5, %6, %7", PODGRAPH_TWO_F4(d), "%8", "%9", "%10", "%11")

template <int Registers>
PODGRAPH_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
PODGRAPH_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// ---- arithmetic -------------------------------------------------------------------------------------------------------

PODGRAPH_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// two numbers in one register, the first in the lower half
PODGRAPH_DEVICE uint32_t pack(float low, float high) {
  uint32_t both;
  asm("cvt.rn." PODGRAPH_PTX_TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

}  // namespace podgraph::sm90

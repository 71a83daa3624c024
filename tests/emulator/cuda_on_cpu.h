// Runs the planner's kernels on a CPU, thread by thread: enough of CUDA C++ for them, one thread block at a time.
//
// Every CUDA thread is a fibre. A barrier (of the block or of a warp) parks it until all others have come there; what
// lies between two barriers runs one thread after the other, so it does not show races.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __constant__ static
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) alignas(n)

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct int4 {
  int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

extern Dim3 threadIdx, blockIdx, blockDim, gridDim;
Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr std::size_t kStack = 64 << 10;
struct Fibre {
  ucontext_t start;
  jmp_buf at;
  bool started = false, done = false;
  unsigned long block_phase = 0, warp_phase = 0;
};
inline std::vector<Fibre> fibres;
inline std::vector<char> stacks;
inline std::vector<int> shared_memory;
inline jmp_buf scheduler;
inline ucontext_t main_context;
inline unsigned current, block_arrived, done_count;
inline unsigned long block_phase;
struct Warp {
  unsigned arrived = 0;
  unsigned long phase = 0;
  uint64_t value[2][32];
};
inline std::vector<Warp> warps;
inline void (*body)();

inline void yield() {
  if (_setjmp(fibres[current].at) == 0) _longjmp(scheduler, 1);
}
inline void enter() {
  body();
  fibres[current].done = true;
  done_count++;
  _longjmp(scheduler, 1);
}
inline void block_barrier() {
  Fibre& me = fibres[current];
  if (++block_arrived == fibres.size() - done_count) block_arrived = 0, block_phase++, me.block_phase++;
  else
    for (me.block_phase++; block_phase < me.block_phase;) yield();
}
// All lanes of a warp bring a value; returns the values of all.
inline const uint64_t* exchange(uint64_t value) {
  Fibre& me = fibres[current];
  Warp& warp = warps[current / 32];
  uint64_t* const values = warp.value[me.warp_phase % 2];
  values[current % 32] = value;
  if (++warp.arrived == 32) warp.arrived = 0, warp.phase++, me.warp_phase++;
  else
    for (me.warp_phase++; warp.phase < me.warp_phase;) yield();
  return values;
}

// Runs one block; false where its threads wait for one another for ever.
inline bool run_block(void (*kernel)(), unsigned threads, std::size_t shared_bytes) {
  body = kernel;
  shared_memory.assign(shared_bytes / 4 + 1, -1);
  fibres.assign(threads, Fibre());
  warps.assign((threads + 31) / 32, Warp());
  stacks.resize(kStack * threads);
  block_arrived = done_count = 0, block_phase = 0;
  unsigned idle = 0;
  volatile unsigned next = 0;
  while (done_count < threads) {
    const unsigned before = done_count, i = next;
    next = (i + 1) % threads;
    if (fibres[i].done) continue;
    current = i, threadIdx.x = i;
    const unsigned long phase = block_phase, warp_phase = warps[i / 32].phase;
    if (_setjmp(scheduler) == 0) {
      if (fibres[i].started) _longjmp(fibres[i].at, 1);
      fibres[i].started = true;
      getcontext(&fibres[i].start);
      fibres[i].start.uc_stack.ss_sp = stacks.data() + kStack * i;
      fibres[i].start.uc_stack.ss_size = kStack;
      makecontext(&fibres[i].start, enter, 0);
      setcontext(&fibres[i].start);
    }
    const bool moved = before != done_count || phase != block_phase || warp_phase != warps[i / 32].phase;
    idle = moved ? 0 : idle + 1;
    if (idle > 4 * threads) return false;
  }
  return true;
}

template <class T>
uint64_t bits(T value) {
  uint64_t raw = 0;
  __builtin_memcpy(&raw, &value, sizeof value);
  return raw;
}
template <class T>
T from_bits(uint64_t raw) {
  T value;
  __builtin_memcpy(&value, &raw, sizeof value);
  return value;
}

}  // namespace emulator

inline void __syncthreads() { emulator::block_barrier(); }
inline void __syncwarp() { emulator::exchange(0); }
inline void __threadfence_system() {}
template <class T>
T __shfl_sync(unsigned, T value, int lane) { return emulator::from_bits<T>(emulator::exchange(emulator::bits(value))[lane & 31]); }
template <class T>
T __shfl_up_sync(unsigned, T value, int step) {
  const int lane = emulator::current % 32;
  return emulator::from_bits<T>(emulator::exchange(emulator::bits(value))[lane >= step ? lane - step : lane]);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = emulator::current % 32;
  return emulator::from_bits<T>(emulator::exchange(emulator::bits(value))[lane ^ mask]);
}
inline int __reduce_add_sync(unsigned, int value) {
  const uint64_t* values = emulator::exchange(emulator::bits(value));
  int sum = 0;
  for (int i = 0; i < 32; i++) sum += emulator::from_bits<int>(values[i]);
  return sum;
}
inline int __reduce_max_sync(unsigned, int value) {
  const uint64_t* values = emulator::exchange(emulator::bits(value));
  int most = value;
  for (int i = 0; i < 32; i++) most = most > emulator::from_bits<int>(values[i]) ? most : emulator::from_bits<int>(values[i]);
  return most;
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const uint64_t* values = emulator::exchange(value);
  unsigned mask = 0;
  for (int i = 0; i < 32; i++) mask |= static_cast<unsigned>(values[i] != 0) << i;
  return mask;
}
template <class T>
unsigned __match_any_sync(unsigned, T value) {
  const uint64_t mine = emulator::bits(value), *values = emulator::exchange(mine);
  unsigned mask = 0;
  for (int i = 0; i < 32; i++) mask |= static_cast<unsigned>(values[i] == mine) << i;
  return mask;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T>
T __ldg(const T* p) { return *p; }
template <class T>
T atomicAdd(T* p, T value) { return std::exchange(*p, static_cast<T>(*p + value)); }
template <class T>
T min(T a, T b) { return b < a ? b : a; }
template <class T>
T max(T a, T b) { return a < b ? b : a; }
template <class T>
T atomicMin(T* p, T value) { return std::exchange(*p, min(*p, value)); }
template <class T>
T atomicMax(T* p, T value) { return std::exchange(*p, max(*p, value)); }

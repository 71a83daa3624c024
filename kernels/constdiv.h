// Stands in for FlashInfer's fastdiv.cuh.
//
// FlashInfer divides by the group size and the page size through a multiplier that the host computes at run time. Here
// both are constants of the compiled kernel: once a divisor is inlined, the compiler turns each division into shifts
// and multiplies by itself. FlashInfer's class also cannot be built on the device, and needs a newer libcu++ than the
// CUDA toolkit brings.
#pragma once
#define FLASHINFER_FASTDIV_CUH_  // the include guard of the header that this replaces

#include <cstdint>

namespace flashinfer {

struct uint_fastdiv {
  __host__ __device__ __forceinline__ uint_fastdiv() : divisor_(1) {}
  __host__ __device__ __forceinline__ uint_fastdiv(uint32_t divisor) : divisor_(divisor) {}
  __host__ __device__ __forceinline__ operator unsigned int() const { return divisor_; }
  __host__ __device__ __forceinline__ void divmod(uint32_t n, uint32_t& quotient, uint32_t& remainder) const {
    quotient = n / divisor_;
    remainder = n - quotient * divisor_;
  }

 private:
  uint32_t divisor_;
};

__host__ __device__ __forceinline__ uint32_t operator/(uint32_t n, const uint_fastdiv& divisor) {
  return n / static_cast<uint32_t>(divisor);
}

__host__ __device__ __forceinline__ uint32_t operator%(uint32_t n, const uint_fastdiv& divisor) {
  return n % static_cast<uint32_t>(divisor);
}

}  // namespace flashinfer

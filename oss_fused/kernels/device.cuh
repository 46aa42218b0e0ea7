// SPDX-License-Identifier: MIT
// What the CUDA kernels share: types, programmatic dependent launch (kernels/launch.py), sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

using half_t = __half;
using bfloat_t = __nv_bfloat16;

// kernels/compiled.py sends these
enum Type { kFloat = 0, kHalf = 1, kBfloat = 2 };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(half_t x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bfloat_t x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, half_t>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, bfloat_t>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

// the next kernel of the stream may start; it waits for our end before it reads our output
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// the kernels before this one have finished, and their writes are visible
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// the sum over all threads of a CTA, in each of them; once in a kernel
__device__ __forceinline__ float sum_of_block(float x) {
  __shared__ float parts[32];
  x = sum_of_warp(x);
  const int warps = blockDim.x / 32;
  if (warps == 1) return x;
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  return sum_of_warp(threadIdx.x % 32 < warps ? parts[threadIdx.x % 32] : 0.0f);
}

// ``early``: by programmatic dependent launch
template <typename Argument>
cudaError_t launch(void (*kernel)(Argument), dim3 grid, int threads, bool early,
                   cudaStream_t stream, const Argument& argument) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, argument);
}

// SPDX-License-Identifier: MIT
// FP8 product of one row, a [1, K] @ b [N, K].T, and of more rows one after the other.
//
// The arithmetic is that of gemv.py: codes become pairs of float16, four products are summed in a
// float16 lane, everything after that in float32. A CTA takes kRows rows of b and splits K over its
// threads in pieces of 16 bytes.

#include "device.cuh"

namespace {

constexpr int kRows = 4;
constexpr int kThreads = 128;
// pieces of a row of b that a thread has in flight
constexpr int kPieces = 2;

struct Product {
  const uint4 *a, *b;
  const float *a_scale, *b_scale;
  const void* bias;
  void* out;
  int64_t stride_a, stride_b;  // pieces of 16 codes
  int n, pieces, a_rows, b_rows, bias_type, out_type;
  bool prefetch;
};

__device__ __forceinline__ float load_as(const void* p, int64_t at, int type) {
  if (type == kFloat) return static_cast<const float*>(p)[at];
  if (type == kHalf) return to_float(static_cast<const half_t*>(p)[at]);
  return to_float(static_cast<const bfloat_t*>(p)[at]);
}

__device__ __forceinline__ void store_as(void* p, int64_t at, int type, float x) {
  if (type == kFloat) {
    static_cast<float*>(p)[at] = x;
  } else if (type == kHalf) {
    static_cast<half_t*>(p)[at] = from_float<half_t>(x);
  } else {
    static_cast<bfloat_t*>(p)[at] = from_float<bfloat_t>(x);
  }
}

__device__ __forceinline__ __half2 pair(uint32_t codes) {
  return __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3));
}

__device__ __forceinline__ void unpack(const uint4& codes, __half2* pairs) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = pair(words[i] & 0xffff);
    pairs[2 * i + 1] = pair(words[i] >> 16);
  }
}

__device__ __forceinline__ void load_piece(const Product& p, int first, int at, uint4* w) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = min(first + r, p.n - 1);
    w[r] = at < p.pieces ? __ldcs(p.b + row * p.stride_b + at) : make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void multiply(const uint4& codes, const uint4* w, float* sums) {
  // times 2^-6: four products of 7 and 448 stay below 65504
  const __half2 factor = __half2half2(__ushort_as_half(0x2400));
  __half2 x[8];
  unpack(codes, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = __hmul2(x[i], factor);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    __half2 y[8];
    unpack(w[r], y);
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      __half2 four = __hmul2(x[i], y[i]);
      four = __hfma2(x[i + 1], y[i + 1], four);
      four = __hfma2(x[i + 2], y[i + 2], four);
      four = __hfma2(x[i + 3], y[i + 3], four);
      sums[r] += __low2float(four) + __high2float(four);
    }
  }
}

__global__ void __launch_bounds__(kThreads) gemv_kernel(Product p) {
  __shared__ float parts[kRows][kThreads / 32];
  const int first = blockIdx.x * kRows, row = blockIdx.y;
  const uint4* a = p.a + row * p.stride_a;
  uint4 w[kPieces][kRows];
  if (!p.prefetch) wait_for_inputs();
#pragma unroll
  for (int i = 0; i < kPieces; ++i) load_piece(p, first, threadIdx.x + i * kThreads, w[i]);
  if (p.prefetch) wait_for_inputs();
  start_next();
  float sums[kRows] = {};
  for (int base = threadIdx.x; base < p.pieces; base += kPieces * kThreads) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = base + i * kThreads;
      if (at < p.pieces) multiply(a[at], w[i], sums);
      load_piece(p, first, at + kPieces * kThreads, w[i]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    sums[r] = sum_of_warp(sums[r]);
    if (threadIdx.x % 32 == 0) parts[r][threadIdx.x / 32] = sums[r];
  }
  __syncthreads();
  const int column = first + threadIdx.x;
  if (threadIdx.x >= kRows || column >= p.n) return;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) total += parts[threadIdx.x][i];
  total = total * 64.0f * p.a_scale[p.a_rows ? row : 0] * p.b_scale[p.b_rows ? column : 0];
  if (p.bias) total += load_as(p.bias, column, p.bias_type);
  store_as(p.out, static_cast<int64_t>(row) * p.n + column, p.out_type, total);
}

}  // namespace

// strides: pieces of 16 codes; a_rows, b_rows: a scale for each row; early: see device.cuh
extern "C" int oss_fused_gemv(const void* a, const void* b, const void* a_scale,
                              const void* b_scale, const void* bias, void* out, int m, int n,
                              int pieces, int64_t stride_a, int64_t stride_b, int a_rows,
                              int b_rows, int bias_type, int out_type, int prefetch, int early,
                              cudaStream_t stream) {
  const Product p{static_cast<const uint4*>(a), static_cast<const uint4*>(b),
                  static_cast<const float*>(a_scale), static_cast<const float*>(b_scale), bias,
                  out, stride_a, stride_b, n, pieces, a_rows, b_rows, bias_type, out_type,
                  prefetch != 0};
  return launch(gemv_kernel, dim3((n + kRows - 1) / kRows, m), kThreads, early, stream, p);
}

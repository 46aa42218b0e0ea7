// SPDX-License-Identifier: MIT
// RMSNorm + rotary embedding of whole rows in one launch; see kernels/rope.
//
// A CTA holds one row. An item is V values of the left half of a head and the V values that they
// are paired with; a thread's items have the same columns of their heads where the sizes allow it,
// so that it loads cos and sin once.

#include "device.cuh"

namespace {

// items of a thread that stay in registers between the norm and the rotation
constexpr int kHeld = 4;

template <typename T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Values {
  T at[V];
};

// x and out pass L2 as a stream
template <typename T, int V>
__device__ __forceinline__ Values<T, V> load_once(const T* p) {
  Values<T, V> found;
  if constexpr (sizeof(found) == 16) {
    *reinterpret_cast<uint4*>(&found) = __ldcs(reinterpret_cast<const uint4*>(p));
  } else {
    found.at[0] = *p;
  }
  return found;
}

template <typename T, int V>
__device__ __forceinline__ void store_once(T* p, const Values<T, V>& values) {
  if constexpr (sizeof(values) == 16) {
    __stcs(reinterpret_cast<uint4*>(p), *reinterpret_cast<const uint4*>(&values));
  } else {
    *p = values.at[0];
  }
}

template <typename T, int V>
__device__ __forceinline__ Values<T, V> load(const T* p) {
  return *reinterpret_cast<const Values<T, V>*>(p);
}

struct Rope {
  const void *x, *weight, *cos, *sin;
  void* out;
  int64_t sequence, stride_batch, stride_token, stride_cos, stride_sin;
  int hidden, half;
  float eps;
};

// T: x and out; Table: weight, cos and sin; HELD: a thread has at most kHeld items
template <typename T, typename Table, int V, bool HELD>
__global__ void rmsnorm_rope_kernel(Rope p) {
  const int lanes = p.half / V;
  const int items = p.hidden / (2 * V);
  const int64_t row = blockIdx.x, token = row % p.sequence;
  const T* x = static_cast<const T*>(p.x) + row / p.sequence * p.stride_batch +
               token * p.stride_token;
  const Table* weight = static_cast<const Table*>(p.weight);
  const Table* cos_row = static_cast<const Table*>(p.cos) + token * p.stride_cos;
  const Table* sin_row = static_cast<const Table*>(p.sin) + token * p.stride_sin;
  T* out = static_cast<T*>(p.out) + row * p.hidden;
  auto left_of = [&](int item) { return item / lanes * 2 * p.half + item % lanes * V; };

  start_next();
  wait_for_inputs();
  Values<T, V> left[HELD ? kHeld : 1], right[HELD ? kHeld : 1];
  float squares = 0.0f;
  const int count = HELD ? kHeld : (items + blockDim.x - 1) / blockDim.x;
#pragma unroll(HELD ? kHeld : 1)
  for (int j = 0; j < count; ++j) {
    const int item = threadIdx.x + j * blockDim.x, slot = HELD ? j : 0;
    if (item >= items) break;
    left[slot] = load_once<T, V>(x + left_of(item));
    right[slot] = load_once<T, V>(x + left_of(item) + p.half);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float a = to_float(left[slot].at[i]), b = to_float(right[slot].at[i]);
      squares += a * a + b * b;
    }
  }
  const float rstd = rsqrtf(sum_of_block(squares) / p.hidden + p.eps);

  const bool same_columns = blockDim.x % lanes == 0;
  Values<Table, V> cos_left, cos_right, sin_left, sin_right;
#pragma unroll(HELD ? kHeld : 1)
  for (int j = 0; j < count; ++j) {
    const int item = threadIdx.x + j * blockDim.x, slot = HELD ? j : 0;
    if (item >= items) break;
    const int begin = left_of(item), column = item % lanes * V;
    if (!HELD) {
      left[0] = load_once<T, V>(x + begin);
      right[0] = load_once<T, V>(x + begin + p.half);
    }
    if (j == 0 || !same_columns) {
      cos_left = load<Table, V>(cos_row + column);
      cos_right = load<Table, V>(cos_row + p.half + column);
      sin_left = load<Table, V>(sin_row + column);
      sin_right = load<Table, V>(sin_row + p.half + column);
    }
    const auto gain_left = load<Table, V>(weight + begin);
    const auto gain_right = load<Table, V>(weight + begin + p.half);
    Values<T, V> y_left, y_right;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float a = to_float(left[slot].at[i]) * to_float(gain_left.at[i]);
      const float b = to_float(right[slot].at[i]) * to_float(gain_right.at[i]);
      y_left.at[i] = from_float<T>(a * (to_float(cos_left.at[i]) * rstd) -
                                   b * (to_float(sin_left.at[i]) * rstd));
      y_right.at[i] = from_float<T>(b * (to_float(cos_right.at[i]) * rstd) +
                                    a * (to_float(sin_right.at[i]) * rstd));
    }
    store_once<T, V>(out + begin, y_left);
    store_once<T, V>(out + begin + p.half, y_right);
  }
}

template <typename T, typename Table, int V>
cudaError_t launch_values(const Rope& p, int64_t rows, bool early, cudaStream_t stream) {
  const int items = p.hidden / (2 * V);
  const int threads = std::clamp(((items + kHeld - 1) / kHeld + 31) / 32 * 32, 32, 1024);
  auto kernel = items <= threads * kHeld ? rmsnorm_rope_kernel<T, Table, V, true>
                                         : rmsnorm_rope_kernel<T, Table, V, false>;
  return launch(kernel, dim3(rows), threads, early, stream, p);
}

template <typename T, typename Table>
cudaError_t launch_types(const Rope& p, int64_t rows, bool wide, bool early, cudaStream_t stream) {
  return wide ? launch_values<T, Table, 16 / sizeof(T)>(p, rows, early, stream)
              : launch_values<T, Table, 1>(p, rows, early, stream);
}

}  // namespace

// ``wide``: addresses, strides and half are multiples of 16 bytes; ``tables``: 32-bit floats,
// else of x's type
extern "C" int oss_fused_rmsnorm_rope(const void* x, const void* weight, const void* cos,
                                      const void* sin, void* out, int64_t rows, int64_t sequence,
                                      int64_t stride_batch, int64_t stride_token,
                                      int64_t stride_cos, int64_t stride_sin, int hidden, int half,
                                      float eps, int type, int tables, int wide, int early,
                                      cudaStream_t stream) {
  const Rope p{x, weight, cos, sin, out, sequence, stride_batch, stride_token,
               stride_cos, stride_sin, hidden, half, eps};
  if (type == kFloat) return launch_types<float, float>(p, rows, wide, early, stream);
  if (type == kHalf) {
    return tables ? launch_types<half_t, float>(p, rows, wide, early, stream)
                  : launch_types<half_t, half_t>(p, rows, wide, early, stream);
  }
  return tables ? launch_types<bfloat_t, float>(p, rows, wide, early, stream)
                : launch_types<bfloat_t, bfloat_t>(p, rows, wide, early, stream);
}

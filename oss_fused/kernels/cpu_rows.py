# SPDX-License-Identifier: MIT
"""Loops over rows of bf16 that Numba compiles for a CPU: norm, quantisation, scaling.

A row of a decode step is so short that starting a PyTorch operator takes longer than its work, and
a quantisation in PyTorch takes ten of them. bf16 comes as its bits, uint16. Every step rounds
where the twins round; only the sum of squares has an order of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, types

from oss_fused.kernels.scale_values import MIN_SCALE

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
_U32, _I32, _F32 = np.uint32, np.int32, np.float32
_MAX, _MIN, _ONE, _ZERO = _F32(448), _F32(MIN_SCALE), _F32(1), _F32(0)
# the spacing of float32 at 2**14 is that of e4m3's subnormal numbers: adding it rounds to them
_SUBNORMAL = _F32(2.0**14)
_SUBNORMAL_BITS = _I32((127 + 14) << 23)
# Every step of whole numbers is cast to 32 bits: Numba computes in 64, half as many at a time.
# Magnitudes as float32 bits: e4m3's smallest normal number, and where it ends
_NORMAL, _END = _I32((127 - 6) << 23), _I32(0x43F00000)
# exponent biases of float32 and e4m3 differ by 120; e4m3 keeps the top 3 of 23 mantissa bits
_REBIAS, _HALF, _DROPPED = _I32(120 << 23), _I32(0x7FFFF), _I32(20)
_ONE_BIT, _MAGNITUDE = _I32(1), _I32(0x7FFFFFFF)
# of a code: its sign, NaN, what is not its sign, and the subnormal ones' spacing
_SIGN, _NAN, _UNSIGNED, _SPACING = _I32(0x80), _I32(0x7F), _I32(0x7F), _F32(2.0**-9)
# bf16's NaN; shifts from the sign and mantissa of float32 and of a code to the other's, or bf16's
_NAN_BITS, _TO_BYTE, _TO_SIGN, _TO_MANTISSA = _I32(0x7FC0), _I32(24), _I32(8), _I32(4)
_TOP, _REBIAS_BF16, _FIRST_NORMAL = _I32(16), _I32(120 << 7), _I32(8)

_jit = numba.njit(error_model="numpy")
_BITS, _CODES, _FLOATS = (types.CPointer(t) for t in (types.uint16, types.uint8, types.float32))


@numba.njit(error_model="numpy", fastmath={"reassoc"})
def _sum_of_squares(values):
    total = _ZERO
    for j in range(values.size):
        total += values[j] * values[j]
    return total


@_jit
def _widen(bits, wide):
    for j in range(bits.size):
        wide[j] = _U32(bits[j]) << _U32(16)


@_jit
def _round_to_bf16(wide, bits):
    for j in range(bits.size):
        w = wide[j]
        rounded = (w + _U32(0x7FFF) + ((w >> _U32(16)) & _U32(1))) >> _U32(16)
        nan = (w & _U32(0x7FFFFFFF)) > _U32(0x7F800000)
        bits[j] = np.uint16(_U32(0x7FC0) if nan else rounded)


@_jit
def _largest(bits):
    """Bits of the largest magnitude of a row: magnitudes order as they do, NaN above all."""
    largest = np.uint16(0)
    for j in range(bits.size):
        magnitude = np.uint16(bits[j] & np.uint16(0x7FFF))
        largest = magnitude if magnitude > largest else largest
    return largest


@_jit
def _quantize(bits, codes, wide, shifted):
    """Codes of a row; returns its scale. ``wide`` and ``shifted`` are scratch."""
    values, sums = wide.view(np.float32), shifted.view(np.float32)
    wide[0] = _U32(_largest(bits)) << _U32(16)
    amax = values[0]
    scale = amax / _MAX
    if scale < _MIN:
        scale = _MIN if amax > _ZERO else _ONE
    factor = _ONE / scale
    _widen(bits, wide)
    for j in range(bits.size):
        values[j] *= factor
        sums[j] = abs(values[j]) + _SUBNORMAL
    _encode(wide.view(np.int32), shifted.view(np.int32), codes)
    return scale


@_jit
def _encode(wide, shifted, codes):
    """Codes of float32 bits ``wide``; ``shifted``: bits of the magnitudes plus _SUBNORMAL."""
    for j in range(codes.size):
        bits = wide[j]
        magnitude = _I32(bits & _MAGNITUDE)
        odd = _I32(_I32(magnitude >> _DROPPED) & _ONE_BIT)
        normal = _I32(_I32(_I32(magnitude - _REBIAS) + _I32(_HALF + odd)) >> _DROPPED)
        subnormal = _I32(shifted[j] - _SUBNORMAL_BITS)
        code = normal if magnitude >= _NORMAL else subnormal
        code = code if magnitude < _END else _NAN
        codes[j] = np.uint8(code | _I32(_I32(bits >> _TO_BYTE) & _SIGN))


def _quantize_rows(x, codes, scale, rows, size):
    x, codes = carray(x, (rows, size)), carray(codes, (rows, size))
    scale = carray(scale, (rows,))
    wide, shifted = np.empty(size, np.uint32), np.empty(size, np.uint32)
    for i in range(rows):
        scale[i] = _quantize(x[i], codes[i], wide, shifted)


def _norm_rows(x, residual, weight, hidden, normed, codes, scale, added, eps, rows, size):
    x, residual = carray(x, (rows, size)), carray(residual, (rows, size))
    hidden, normed = carray(hidden, (rows, size)), carray(normed, (rows, size))
    weight, codes = carray(weight, (size,)), carray(codes, (rows, size))
    scale = carray(scale, (rows,))
    wide, other = np.empty(size, np.uint32), np.empty(size, np.uint32)
    values, others = wide.view(np.float32), other.view(np.float32)
    for i in range(rows):
        _widen(x[i], wide)
        if added:
            _widen(residual[i], other)
            for j in range(size):
                values[j] += others[j]
        _round_to_bf16(wide, hidden[i])
        _widen(hidden[i], wide)
        factor = _ONE / np.sqrt(_sum_of_squares(values) / _F32(size) + eps)
        for j in range(size):
            values[j] *= factor
        _round_to_bf16(wide, normed[i])
        _widen(normed[i], wide)
        _widen(weight, other)
        for j in range(size):
            values[j] *= others[j]
        _round_to_bf16(wide, normed[i])
        scale[i] = _quantize(normed[i], codes[i], wide, other)


def _decode(codes, out, size):
    codes, out = carray(codes, (size,)), carray(out, (size,))
    wide = np.empty(size, np.int32)
    values = wide.view(np.float32)
    for j in range(size):
        values[j] = _F32(_I32(codes[j]) & _UNSIGNED) * _SPACING
    for j in range(size):
        code = _I32(codes[j])
        unsigned = _I32(code & _UNSIGNED)
        bits = _I32(_I32(unsigned << _TO_MANTISSA) + _REBIAS_BF16)
        bits = bits if unsigned >= _FIRST_NORMAL else _I32(wide[j] >> _TOP)
        bits = bits if unsigned != _NAN else _NAN_BITS
        out[j] = np.uint16(bits | _I32(_I32(code & _SIGN) << _TO_SIGN))


def _scale_rows(product, of_row, row_step, of_column, bias, has_bias, rows, columns):
    product = carray(product, (rows, columns))
    of_row, of_column = carray(of_row, (rows,)), carray(of_column, (columns,))
    bias = carray(bias, (columns,))
    wide = np.empty(columns, np.uint32)
    values = wide.view(np.float32)
    for i in range(rows):
        _widen(product[i], wide)
        for j in range(columns):
            values[j] = values[j] * of_row[i * row_step] * of_column[j]
        if has_bias:
            for j in range(columns):
                values[j] += bias[j]
        _round_to_bf16(wide, product[i])


def _compiled(loop: Callable[..., None], *arguments: Any) -> Callable[..., None]:
    """``loop`` as a C function, which costs less per call than Numba's own dispatch."""
    signature = types.void(*arguments)
    try:
        compiled = numba.cfunc(signature, cache=True)(loop)
    except RuntimeError:
        # no folder that can be written: compiled at every start
        compiled = numba.cfunc(signature)(loop)
    kinds: list[Any] = [
        ctypes.c_void_p if isinstance(a, types.CPointer) else _CTYPES[a] for a in arguments
    ]
    return ctypes.CFUNCTYPE(None, *kinds)(compiled.address)


_CTYPES = {types.float32: ctypes.c_float, types.int64: ctypes.c_int64}
_COUNT = types.int64
_quantize_c = _compiled(_quantize_rows, _BITS, _CODES, _FLOATS, _COUNT, _COUNT)
_norm_c = _compiled(
    _norm_rows,
    *(_BITS, _BITS, _BITS, _BITS, _BITS, _CODES, _FLOATS),
    *(_COUNT, types.float32, _COUNT, _COUNT),
)
_decode_c = _compiled(_decode, _CODES, _BITS, _COUNT)
_scale_c = _compiled(_scale_rows, _BITS, _FLOATS, _COUNT, _FLOATS, _FLOATS, _COUNT, _COUNT, _COUNT)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes of bf16 rows ``x`` [..., C] and their scales [..., 1], as the twin's."""
    x = x.contiguous()
    codes, scale = _codes_of(x)
    _quantize_c(x.data_ptr(), codes.data_ptr(), scale.data_ptr(), scale.numel(), x.shape[-1])
    return codes, scale


def norm_rows(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``add_rms_norm_quant`` of bf16 rows [..., C]: codes, scales, sum and normed rows."""
    x = x.contiguous()
    other = x if residual is None else residual.contiguous()
    hidden, normed = torch.empty_like(x), torch.empty_like(x)
    codes, scale = _codes_of(x)
    tensors = (x, other, weight.contiguous(), hidden, normed, codes, scale)
    _norm_c(*(t.data_ptr() for t in tensors), residual is not None, eps, scale.numel(), x.shape[-1])
    return codes, scale, hidden, normed


def _codes_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(x.shape, dtype=FP8)
    return codes, torch.empty((*x.shape[:-1], 1), dtype=torch.float32)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """The numbers that FP8 ``codes`` stand for, in bf16."""
    codes = codes.contiguous()
    out = torch.empty(codes.shape, dtype=BF16)
    _decode_c(codes.data_ptr(), out.data_ptr(), out.numel())
    return out


def scale_rows(
    product: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """``product * a_scale * b_scale + bias`` in float32, rounded to bf16, in place of ``product``.

    Args:
        product: bf16 [M, N], contiguous.
        a_scale: float32 [M, 1] or one element.
        b_scale: float32 [N, 1] or one element.
        bias: [N].
    """
    rows, columns = product.shape
    if b_scale.numel() != columns:
        b_scale = b_scale.expand(columns, 1)
    a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
    added = b_scale if bias is None else bias.float().contiguous()
    _scale_c(
        product.data_ptr(),
        a_scale.data_ptr(),
        a_scale.numel() > 1,
        b_scale.data_ptr(),
        added.data_ptr(),
        bias is not None,
        rows,
        columns,
    )
    return product

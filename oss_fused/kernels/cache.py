# SPDX-License-Identifier: MIT
"""A paged cache of keys or values as kernels see it: addresses of its rows, stores into them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from oss_fused.kernels.numerics import quantize_static


class PagedCache(NamedTuple):
    """A cache [blocks, page_size, heads, D] with unit stride along D, as one kernel argument."""

    data: Any
    page_size: Any
    block_stride: Any
    page_stride: Any
    head_stride: Any


class Heads(NamedTuple):
    """What queries, keys and values have one each of: scales, masks, pointers."""

    q: Any
    k: Any
    v: Any


def paged_cache(cache: torch.Tensor, constant: bool = False) -> PagedCache:
    """The kernel argument of ``cache`` [blocks, page_size, heads, D] with unit stride along D.

    constant: the kernel is compiled for this page size, and finds a page without a division.
    """
    page_size = tl.constexpr(cache.shape[1]) if constant else cache.shape[1]
    return PagedCache(cache, page_size, cache.stride(0), cache.stride(1), cache.stride(2))


@triton.jit
def cache_row(cache, slot, head):
    """Pointer of row ``slot`` (int64) of ``head``; both may be blocks that broadcast."""
    block, page = slot // cache.page_size, slot % cache.page_size
    row = cache.data + block * cache.block_stride + page * cache.page_stride
    return row + head.to(tl.int64) * cache.head_stride


@triton.jit
def reciprocal(scale):
    """``1 / scale``, correctly rounded; None, which stands for values without a scale, stays."""
    inverse = None
    if scale is not None:
        inverse = tl.div_rn(1.0, tl.load(scale))
    return inverse


@triton.jit
def store_values(target, values, mask, inverse):
    """Store 16-bit values; as e4m3 codes of ``values * inverse`` where ``inverse`` is given."""
    if inverse is not None:
        tl.store(target, quantize_static(values.to(tl.float32), inverse), mask=mask)
    else:
        tl.store(target, values, mask=mask)

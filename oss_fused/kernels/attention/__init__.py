# SPDX-License-Identifier: MIT
"""``decode_attention``: attention of few query tokens per sequence over a paged KV cache.

Args of the operator:
    query: [T, Hq, D], the last tokens of S sequences, those of a sequence in order; bf16, fp16 or
        e4m3 (with q_scale).
    key_cache, value_cache: [pages, page_size, Hkv, D], any strides, unit stride along D; the
        dtype of query, or e4m3 with k_scale and v_scale. Hq is a multiple of Hkv.
    block_table: [S, max_pages] int32; page of each run of page_size positions.
    seq_lens: [S] int32, the positions of the queries included. A query before the first position,
        as all of a sequence of length 0 are, is padding: result 0.
    out: [T, Hq, D] bf16 or fp16; rows of no sequence are not written.
    arrivals: int32, at least S * max_query_len * Hkv zeros, used as scratch and left at zero.
        Launches that overlap in time need buffers of their own.
    softmax_scale: factor of the logits.
    window: positions that a query sees, itself included; 0 for all.
    sinks: [Hq], a logit of each head that takes weight and adds no value.
    q_scale, k_scale, v_scale: float32 dequantisation multipliers of one element.
    prefetch_table: the caller vouches that no kernel still running writes block_table, seq_lens,
        query_starts, sinks or the scales (kernels/gemm): they are read before the kernels ahead
        have finished.
    query_starts: [S + 1] int32, first row of each sequence, then the number of rows; None where
        each of T sequences has one row. A query sees the positions up to its own.
    max_query_len: most rows that a sequence has.

``window_attention``: attention of prompts in a layer whose queries see few positions. Arguments as
above: query and out [T, Hq, D], any number of tokens per sequence, as query_starts [S + 1] says;
rows of ``out`` behind its last entry are not written; window from 1 to 128.

Formula: online softmax, https://arxiv.org/abs/2205.14135; sinks, https://arxiv.org/abs/2309.17453.
"""

from __future__ import annotations

import torch

from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.attention import reference
from oss_fused.kernels.checks import FLOAT_DTYPES, FP8, HALF_DTYPES
from oss_fused.kernels.contract import Between, Operand, Scale
from oss_fused.kernels.op import declare

# positions of a window: with more, the logits of a prompt's queries do not fit the registers
MOST_WINDOW = 128


def _check_sequences(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor | None,
    softmax_scale: float,
) -> None:
    if not 0 < softmax_scale < float("inf"):
        raise SchemeError(f"softmax_scale={softmax_scale!r}: expected a finite number above 0")
    rows, q_heads, head_dim = query.shape
    kv_heads = key_cache.shape[2]
    if not q_heads or not head_dim:
        raise ShapeMismatchError(
            f"query.shape={tuple(query.shape)}: expected [T, Hq, D], Hq and D at least 1"
        )
    if not kv_heads or q_heads % kv_heads:
        raise ShapeMismatchError(
            f"key_cache.shape={tuple(key_cache.shape)}: expected Hkv a divisor of {q_heads}"
        )
    sequences = rows if query_starts is None else query_starts.shape[0] - 1
    for name, index in (("block_table", block_table), ("seq_lens", seq_lens)):
        if index.shape[0] < sequences:
            raise ShapeMismatchError(
                f"{name}.shape={tuple(index.shape)}: expected at least {sequences} rows"
            )


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    arrivals: torch.Tensor,
    query_starts: torch.Tensor | None,
    max_query_len: int,
    softmax_scale: float,
) -> None:
    _check_sequences(query, key_cache, block_table, seq_lens, query_starts, softmax_scale)
    if max_query_len < 1 or (query_starts is None and max_query_len > 1):
        expected = "1 without query_starts" if query_starts is None else "at least 1"
        raise ShapeMismatchError(f"max_query_len={max_query_len}: expected {expected}")
    sequences = query.shape[0] if query_starts is None else query_starts.shape[0] - 1
    counters = sequences * max_query_len * key_cache.shape[2]
    if arrivals.numel() < counters or not arrivals.is_contiguous():
        raise ShapeMismatchError(
            f"arrivals.numel()={arrivals.numel()}: expected at least {counters}, contiguous"
        )


declare(
    reference.decode_attention,
    {
        "out": Operand("T Hq D", *HALF_DTYPES, contiguous=True),
        "query": Operand("T Hq D", FP8, *HALF_DTYPES, contiguous=True),
        "key_cache": Operand("pages page_size Hkv D", FP8, like="out", contiguous=True),
        "value_cache": Operand("pages page_size Hkv D", FP8, like="out", contiguous=True),
        "block_table": Operand("sequences max_pages", torch.int32, contiguous=True),
        "seq_lens": Operand("lengths", torch.int32),
        "arrivals": Operand("...", torch.int32),
        "window": Between(0, 2**31 - 1),
        "query_starts": Operand("starts", torch.int32, contiguous=True),
        "sinks": Operand("Hq", *FLOAT_DTYPES),
        "q_scale": Scale(),
        "k_scale": Scale(),
        "v_scale": Scale(),
    },
    {"triton": "triton"},
    mutates=("out", "arrivals"),
    check=_check,
    fake=lambda: None,
    example={
        "T": 3,
        "Hq": 4,
        "D": 64,
        "pages": 4,
        "page_size": 16,
        "Hkv": 2,
        "query": lambda g: torch.randn(3, 4, 64, generator=g).to(torch.bfloat16),
        "out": lambda g: torch.empty(3, 4, 64, dtype=torch.bfloat16),
        "key_cache": lambda g: torch.randn(4, 16, 2, 64, generator=g).to(torch.bfloat16),
        "value_cache": lambda g: torch.randn(4, 16, 2, 64, generator=g).to(torch.bfloat16),
        "block_table": torch.tensor([[0, 1], [2, 0], [3, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([20, 5, 0], dtype=torch.int32),
        "arrivals": lambda g: torch.zeros(6, dtype=torch.int32),
        "softmax_scale": 0.125,
        "window": 8,
        "q_scale": None,
        "k_scale": None,
        "v_scale": None,
        "query_starts": None,
        "max_query_len": 1,
    },
)

declare(
    reference.window_attention,
    {
        "out": Operand("T Hq D", *HALF_DTYPES, contiguous=True),
        "query": Operand("T Hq D", FP8, *HALF_DTYPES, contiguous=True),
        "key_cache": Operand("pages page_size Hkv D", FP8, like="out", contiguous=True),
        "value_cache": Operand("pages page_size Hkv D", FP8, like="out", contiguous=True),
        "block_table": Operand("sequences max_pages", torch.int32, contiguous=True),
        "seq_lens": Operand("lengths", torch.int32),
        "query_starts": Operand("starts", torch.int32, contiguous=True),
        "window": Between(1, MOST_WINDOW),
        "sinks": Operand("Hq", *FLOAT_DTYPES),
        "q_scale": Scale(),
        "k_scale": Scale(),
        "v_scale": Scale(),
    },
    {"triton": "window"},
    mutates=("out",),
    check=_check_sequences,
    fake=lambda: None,
    example={
        "T": 5,
        "Hq": 4,
        "D": 64,
        "pages": 4,
        "page_size": 16,
        "Hkv": 2,
        "query": lambda g: torch.randn(5, 4, 64, generator=g).to(torch.bfloat16),
        "out": lambda g: torch.zeros(5, 4, 64, dtype=torch.bfloat16),
        "key_cache": lambda g: torch.randn(4, 16, 2, 64, generator=g).to(torch.bfloat16),
        "value_cache": lambda g: torch.randn(4, 16, 2, 64, generator=g).to(torch.bfloat16),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "seq_lens": torch.tensor([20, 17], dtype=torch.int32),
        "query_starts": torch.tensor([0, 3, 5], dtype=torch.int32),
        "softmax_scale": 0.125,
        "window": 8,
        "q_scale": None,
        "k_scale": None,
        "v_scale": None,
    },
)

# SPDX-License-Identifier: MIT
"""``advance_decode`` in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 64


# a burst's length and its steps compile nothing
@triton.jit(do_not_specialize=["rows", "column", "tokens_stride"])
def _advance_decode_kernel(
    sampled_ptr,
    tokens_ptr,
    input_ids_ptr,
    positions_ptr,
    seq_lens_ptr,
    slots_ptr,
    tables,
    table_strides,
    block_sizes,
    rows,
    column,
    tokens_stride,
    slots_stride,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    mask = row < rows
    token = tl.load(sampled_ptr + row, mask=mask, other=0)
    tl.store(tokens_ptr + row * tokens_stride + column, token, mask=mask)
    tl.store(input_ids_ptr + row, token.to(tl.int32), mask=mask)
    position = tl.load(positions_ptr + row, mask=mask, other=0) + 1
    tl.store(positions_ptr + row, position, mask=mask)
    length = tl.load(seq_lens_ptr + row, mask=mask, other=0) + 1
    tl.store(seq_lens_ptr + row, length, mask=mask)
    for group in tl.static_range(len(tables)):
        size = block_sizes[group]
        place = row * table_strides[group] + position // size
        block = tl.load(tables[group] + place, mask=mask, other=0).to(tl.int64)
        slot = block * size + position % size
        tl.store(slots_ptr + group * slots_stride + row, slot, mask=mask)


def advance_decode(
    sampled: torch.Tensor,
    tokens: torch.Tensor,
    column: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mappings: torch.Tensor,
    block_tables: list[torch.Tensor],
    block_sizes: list[int],
) -> None:
    """Write the next step's inputs; see kernels/decode_inputs for the contract.

    With no rows it still launches: that compiles the kernel before it is needed.
    """
    rows = sampled.shape[0]
    _advance_decode_kernel[(max(1, triton.cdiv(rows, _ROWS)),)](
        sampled,
        tokens,
        input_ids,
        positions,
        seq_lens,
        slot_mappings,
        tuple(block_tables),
        tuple(table.stride(0) for table in block_tables),
        tuple(block_sizes),
        rows,
        column,
        tokens.stride(0),
        slot_mappings.stride(0),
        ROWS=_ROWS,
    )

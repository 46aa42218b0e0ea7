# SPDX-License-Identifier: MIT
"""``advance_decode``: the inputs of the next decode step, from the tokens that this one sampled.

A burst runs several decode steps without the host (docs/decode.md). Between two of them, for each
of R sequences:

    tokens[r, column] = input_ids[r] = sampled[r]
    positions[r] += 1; seq_lens[r] += 1
    slot_mappings[g, r] = block_tables[g][r, positions[r] // size] * size + positions[r] % size

sampled [R] and tokens [R, K] int64, input_ids [>= R] and seq_lens [>= R] int32, positions [>= R]
and slot_mappings [G, >= R] int64, block_tables: G tensors [>= R, blocks] int32 with unit stride
along the blocks, and block_sizes, ``size`` of each. Rows beyond R, which pad a CUDA graph, stay as
they are.
"""

from __future__ import annotations

import torch

from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.checks import check_dtype, check_on_device
from oss_fused.kernels.contract import Operand
from oss_fused.kernels.decode_inputs import reference
from oss_fused.kernels.op import declare


def _check_table(name: str, table: torch.Tensor, device: torch.device) -> None:
    check_dtype(name, table, (torch.int32,))
    check_on_device(device, name, table)
    if table.dim() != 2:
        raise ShapeMismatchError(f"{name}.shape={tuple(table.shape)}: expected [rows, blocks]")
    if table.stride(1) != 1 and table.shape[1] > 1:
        raise ShapeMismatchError(
            f"{name}.stride()={table.stride()}: expected unit stride along the last dimension"
        )


def _check(
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
    if not 0 <= column < tokens.shape[1]:
        raise SchemeError(f"column={column}: expected 0 to {tokens.shape[1] - 1}")
    rows, groups = sampled.shape[0], slot_mappings.shape[0]
    if not len(block_tables) == len(block_sizes) == groups:
        raise ShapeMismatchError(
            f"block_tables={len(block_tables)} tensors and block_sizes={block_sizes}: expected "
            f"{groups} each, one of each row of slot_mappings"
        )
    for i, (table, size) in enumerate(zip(block_tables, block_sizes)):
        _check_table(f"block_tables[{i}]", table, sampled.device)
        if size < 1:
            raise SchemeError(f"block_sizes[{i}]={size}: expected at least 1")
    sizes = {
        "input_ids": input_ids.shape[0],
        "positions": positions.shape[0],
        "seq_lens": seq_lens.shape[0],
        "slot_mappings": slot_mappings.shape[1],
        **{f"block_tables[{i}]": table.shape[0] for i, table in enumerate(block_tables)},
    }
    for name, size in sizes.items():
        if size < rows:
            raise ShapeMismatchError(f"{name} has {size} rows: expected at least {rows}")


def _tables(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randint(1, 9, (4, n), generator=generator, dtype=torch.int32) for n in (3, 5)]


declare(
    reference.advance_decode,
    {
        "sampled": Operand("R", torch.int64),
        "tokens": Operand("R K", torch.int64, contiguous=True),
        "input_ids": Operand("ids", torch.int32),
        "positions": Operand("pos", torch.int64),
        "seq_lens": Operand("lens", torch.int32),
        "slot_mappings": Operand("G S", torch.int64, contiguous=True),
    },
    {"triton": "triton"},
    mutates=("tokens", "input_ids", "positions", "seq_lens", "slot_mappings"),
    check=_check,
    example={
        "R": 3,
        "K": 4,
        "column": 1,
        "ids": 5,
        "pos": 5,
        "lens": 4,
        "G": 2,
        "S": 5,
        "positions": lambda _: torch.tensor([15, 0, 30, 7, 7]),
        "block_tables": _tables,
        "block_sizes": [16, 32],
    },
)

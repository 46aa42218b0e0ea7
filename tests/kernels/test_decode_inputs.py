# SPDX-License-Identifier: MIT
"""The inputs of a burst's next step: kernel and twin against one request at a time."""

import pytest
import torch

from oss_fused.errors import (
    SchemeError,
    ShapeMismatchError,
    UnsupportedDeviceError,
    UnsupportedDtypeError,
)
from oss_fused.kernels.op import get_kernel


def inputs(rows, sizes, padded=4, columns=5, seed=0):
    """Buffers with ``padded`` more rows than requests, of tables with ``sizes`` tokens a block."""
    draw = torch.Generator().manual_seed(seed)
    total = rows + padded
    tables = [
        torch.randint(0, 999, (total, 300 // size + 2), generator=draw, dtype=torch.int32)
        for size in sizes
    ]
    return [
        torch.randint(0, 200000, (rows,), generator=draw),
        torch.full((rows, columns), -1),
        2,
        torch.randint(0, 99, (total,), generator=draw, dtype=torch.int32),
        torch.randint(0, 300, (total,), generator=draw),
        torch.randint(1, 301, (total,), generator=draw, dtype=torch.int32),
        torch.full((len(sizes), total + 3), -1),
        tables,
        list(sizes),
    ]


def moved(values, device):
    return [
        v.to(device)
        if isinstance(v, torch.Tensor)
        else [t.to(device) for t in v]
        if isinstance(v, list) and isinstance(v[0], torch.Tensor)
        else v
        for v in values
    ]


@pytest.mark.parametrize("backend", ["torch", "triton"])
# 64 rows fill one program; 70 need a second one
@pytest.mark.parametrize(
    ("rows", "sizes"), [(1, (16,)), (5, (16, 64)), (64, (32,)), (70, (16, 1, 128))]
)
def test_each_row_advances_by_one_token(backend, rows, sizes, device):
    before = inputs(rows, sizes)
    args = moved([v.clone() if isinstance(v, torch.Tensor) else v for v in before], device)
    assert get_kernel(backend, "advance_decode")(*args) is None
    _, tokens, _, ids, positions, lens, slots = (
        a.cpu() if isinstance(a, torch.Tensor) else a for a in args[:7]
    )
    sampled, _, _, old_ids, old_positions, old_lens, _, tables, _ = before
    for row in range(rows):
        assert tokens[row].tolist() == [-1, -1, sampled[row], -1, -1]
        assert ids[row] == sampled[row]
        position = old_positions[row].item() + 1
        assert positions[row] == position and lens[row] == old_lens[row] + 1
        for group, (table, size) in enumerate(zip(tables, sizes)):
            expected = table[row, position // size].item() * size + position % size
            assert slots[group, row] == expected
    # what pads a graph stays as it is: no length, no slot
    assert torch.equal(ids[rows:], old_ids[rows:]) and torch.equal(lens[rows:], old_lens[rows:])
    assert torch.equal(positions[rows:], old_positions[rows:]) and slots[:, rows:].eq(-1).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_rows_write_nothing(backend, device):
    args = moved(inputs(0, (16, 32)), device)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    get_kernel(backend, "advance_decode")(*args)
    pairs = [(a, b) for a, b in zip(args, before) if isinstance(a, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("at", "value", "error", "words"),
    [
        (2, 5, SchemeError, "column=5: expected 0 to 4"),
        (3, torch.zeros(4, dtype=torch.int32), ShapeMismatchError, "input_ids has 4 rows"),
        (5, torch.zeros(4, dtype=torch.int32), ShapeMismatchError, "seq_lens has 4 rows"),
        (6, torch.zeros(2, 3, dtype=torch.int64), ShapeMismatchError, "slot_mappings has 3 rows"),
        (8, [16], ShapeMismatchError, r"block_sizes=\[16\]: expected 2 each"),
        (
            7,
            [torch.zeros(9, 30, dtype=torch.int64)] * 2,
            UnsupportedDtypeError,
            r"block_tables\[0\].dtype=torch.int64",
        ),
        (
            7,
            [torch.zeros(2, 30, dtype=torch.int32)] * 2,
            ShapeMismatchError,
            r"block_tables\[0\] has 2 rows: expected at least 5",
        ),
        (
            7,
            [torch.zeros(9, 30, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)],
            ShapeMismatchError,
            r"block_tables\[1\].shape=\(9,\): expected \[rows, blocks\]",
        ),
        (
            7,
            [torch.zeros(9, 60, dtype=torch.int32)[:, ::2]] * 2,
            ShapeMismatchError,
            r"block_tables\[0\].stride\(\)=\(60, 2\): expected unit stride",
        ),
        (
            7,
            [torch.zeros(9, 30, dtype=torch.int32, device="meta")] * 2,
            UnsupportedDeviceError,
            r"block_tables\[0\].device=meta: expected cpu",
        ),
        (8, [16, 0], SchemeError, r"block_sizes\[1\]=0: expected at least 1"),
    ],
)
def test_wrong_arguments(at, value, error, words):
    args = inputs(5, (16, 64))
    args[at] = value
    with pytest.raises(error, match=words):
        get_kernel("torch", "advance_decode")(*args)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_table_of_one_block_may_have_any_stride(backend, device):
    results = []
    for column in (slice(0, 1), slice(0, 1, 2)):
        args = moved(inputs(3, (512,)), device)
        args[7] = [args[7][0].repeat(1, 2)[:, column].as_strided((7, 1), (4, column.step or 1))]
        get_kernel(backend, "advance_decode")(*args)
        results.append(args[6])
    assert torch.equal(*results)

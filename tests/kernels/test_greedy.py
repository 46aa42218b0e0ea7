# SPDX-License-Identifier: MIT
"""``greedy_tokens`` and ``verify_drafts``: kernels and twins against plain Python."""

import pytest
import torch
import triton
import triton.language as tl

from oss_fused.errors import SchemeError, ShapeMismatchError
from oss_fused.kernels.greedy.reference import uniform
from oss_fused.kernels.op import get_kernel

# 4096 columns of 16 bits fill one program, or 2048 of float32
SHAPES = [(1, 1), (3, 40), (2, 2048), (2, 4096), (2, 4097), (5, 9000)]


def run(backend, logits):
    arrivals = torch.zeros(logits.shape[0] + 1, dtype=torch.int32, device=logits.device)
    tokens = get_kernel(backend, "greedy_tokens")(logits, arrivals)
    assert tokens.dtype == torch.int64 and tokens.shape == logits.shape[:1]
    assert not arrivals.any()
    return tokens.tolist()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_largest_value_of_a_row(backend, dtype, rows, columns, device):
    values = torch.randn(rows, columns, dtype=torch.float64) - 20
    place = torch.randint(0, columns, (rows,))
    values[torch.arange(rows), place] = -0.25
    assert run(backend, values.to(device, dtype)) == place.tolist()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_first_of_equals_and_nan_above_all(backend, device):
    logits = torch.full((6, 9000), -3.0)
    logits[1, [8000, 77, 4100]] = 2.0
    # zeros of both signs are equal
    logits[2, 50], logits[2, 4200] = -0.0, 0.0
    logits[3, 100], logits[3, [8999, 5000]] = float("inf"), float("nan")
    logits[4, :] = float("-inf")
    logits[5, 20], logits[5, 4500] = 1.0, float("inf")
    assert run(backend, logits.to(device)) == [0, 77, 50, 5000, 0, 4500]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equals_and_nan_across_programs_and_loads(backend, dtype, device):
    """The largest value, NaN and zeros of both signs at the borders: the first place counts."""
    places = [0, 7, 8, 127, 128, 255, 256, 2047, 2048, 4095, 4096, 8191, 8192, 8999]
    equal, unordered, zeros = torch.full((3, len(places), 9000), -3.0)
    for row, place in enumerate(places):
        behind = places[row + 1 :]
        equal[row, [place, *behind]] = 2.0
        unordered[row, :place:5] = float("inf")
        # whatever its sign
        unordered[row, [place, *behind]] = -float("nan") if row % 2 else float("nan")
        zeros[row, place], zeros[row, behind] = (0.0, -0.0) if row % 2 else (-0.0, 0.0)
    for logits in (equal, unordered, zeros):
        assert run(backend, logits.to(device, dtype)) == places
    # nothing but NaN
    assert run(backend, torch.full((1, 9000), float("nan")).to(device, dtype)) == [0]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_of_a_wider_tensor_and_no_rows(backend, device):
    wide = torch.randn(4, 5000).to(device)
    wide[:, 4500:] = 99.0
    logits = wide[:, :4500]
    assert run(backend, logits) == run(backend, logits.contiguous())
    assert run(backend, logits[:0]) == []


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_offsets_of_a_head_with_tokens_of_its_own(backend, device):
    logits = torch.zeros(3, 9000, device=device)
    logits[[0, 1, 2], [5, 4096, 8999]] = 1.0
    offsets = 7 * torch.arange(9000, device=device)
    arrivals = torch.zeros(3, dtype=torch.int32, device=device)
    tokens = get_kernel(backend, "greedy_tokens")(logits, arrivals, offsets)
    assert tokens.tolist() == [40, 8 * 4096, 8 * 8999]


def test_bad_arguments(device):
    kernel = get_kernel("torch", "greedy_tokens")
    zeros = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ShapeMismatchError, match="expected V >= 1"):
        kernel(torch.zeros(1, 0, device=device), zeros)
    with pytest.raises(ShapeMismatchError, match="arrivals"):
        kernel(torch.zeros(2, 3, device=device), zeros)
    with pytest.raises(ShapeMismatchError, match="offsets"):
        kernel(
            torch.zeros(1, 3, device=device),
            zeros,
            torch.zeros(2, dtype=torch.int64, device=device),
        )


def one_by_one(
    tokens, input_ids, positions, rows, starts, requests, seq_lens, prompt_lens, most, *synthetic
):
    """What verify_drafts says, a request at a time."""
    found = []
    for r, request in enumerate(requests.tolist()):
        first, end = starts[r : r + 2].tolist()
        taken = 1
        for row in range(first, end - 1):
            draft = input_ids[rows[row + 1]]
            inside = positions[rows[first]] < prompt_lens[request]
            right = draft == tokens[row]
            if synthetic:
                rates, seeds = synthetic
                drawn = uniform(seeds[request], positions[rows[row]])
                right = drawn < rates[row - first]
            if inside or draft < 0 or not right:
                break
            taken += 1
        unfinished = seq_lens[r] < prompt_lens[request]
        drafts = input_ids[rows[first + 1 : first + taken]].tolist()
        ids = [*drafts, int(tokens[first + taken - 1])]
        found.append(([], 0, 0) if unfinished else (ids, taken, end - first - taken))
    return found


def verify(backend, device, *args):
    args = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]
    sampled, taken, rejected = get_kernel(backend, "verify_drafts")(*args)
    assert sampled.shape == (args[5].shape[0], args[8]) and sampled.dtype == torch.int64
    assert taken.dtype == rejected.dtype == torch.int32
    ids = [row[:number] for row, number in zip(sampled.tolist(), taken.tolist())]
    return list(zip(ids, taken.tolist(), rejected.tolist()))


def batch(most):
    """Any number of drafts, right, wrong and absent ones, prompts that end here or go on."""
    count = 23
    numbers = torch.randint(1, most + 1, (count,))
    numbers[1] = most
    starts = torch.cat([torch.zeros(1), numbers.cumsum(0)]).to(torch.int32)
    tokens = torch.randint(0, 3, (int(starts[-1]),))
    # three tokens of a prompt stand before each request's rows
    rows = torch.arange(len(tokens)) + 3 * torch.arange(1, count + 1).repeat_interleave(numbers)
    input_ids = torch.randint(-1, 3, (int(rows[-1]) + 2,), dtype=torch.int32)
    right = torch.rand(len(tokens) - 1) < 0.7
    right[starts[1] : starts[2]] = True
    input_ids[rows[1:][right]] = tokens[:-1][right].to(torch.int32)
    positions = torch.randint(0, 40, input_ids.shape)
    requests = torch.randperm(40)[:count]
    prompt_lens = torch.randint(0, 8, (40,), dtype=torch.int32)
    seq_lens = torch.randint(8, 20, (count + 2,), dtype=torch.int32)
    # the first prompt goes on after this step
    prompt_lens[requests[:2]], positions[rows[starts[1]]] = torch.tensor([30, 0]).int(), 9
    return tokens, input_ids, positions, rows, starts, requests, seq_lens, prompt_lens, most


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("most", [1, 4, 8])
def test_right_drafts(backend, most, device):
    args = batch(most)
    expected = one_by_one(*args)
    assert expected[0] == ([], 0, 0) and expected[1][1:] == (most, 0)
    assert verify(backend, device, *args) == expected


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_synthetic_acceptance(backend, device):
    """Rates decide, not the likeliest tokens; absent drafts and those of a prompt stay wrong."""
    args = batch(4)
    cases = [([1.0, 1.0, 1.0], 4), ([0.6, 0.5, 0.9], None), ([0.0, 1.0, 1.0], 1)]
    # the second draft has a rate of its own
    for rates, most in (*cases, ([1.0, 0.0, 1.0], 2)):
        seeds = torch.randint(-(2**62), 2**62, (40,))
        synthetic = (torch.tensor(rates), seeds)
        expected = one_by_one(*args, *synthetic)
        assert verify(backend, device, *args, *synthetic) == expected
        assert most in (None, max(number for _, number, _ in expected))


@triton.jit
def _rand_kernel(seed, offset, drawn, BLOCK: tl.constexpr):
    nth = tl.arange(0, BLOCK)
    tl.store(drawn + nth, tl.rand(tl.load(seed), tl.load(offset + nth)))


@pytest.mark.parametrize("seed", [0, 7, -3, 2**62 + 11, -(2**63)])
def test_uniform_is_tritons(seed, device):
    offsets = torch.tensor([0, 1, 2, 77, 2**31, 2**32 + 5, 2**40, 131071], device=device)
    seeds = torch.tensor([seed], device=device)
    drawn = torch.empty(8, device=device)
    _rand_kernel[(1,)](seeds, offsets, drawn, BLOCK=8)
    assert torch.equal(drawn, uniform(seeds, offsets))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_requests_with_drafts(backend, device):
    long, short = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    starts = torch.zeros(1, dtype=torch.int32)
    assert verify(backend, device, long, short, long, long, starts, long, short, short, 4) == []


def test_bad_requests(device):
    kernel = get_kernel("torch", "verify_drafts")
    one = torch.zeros(1, dtype=torch.int64, device=device)
    short = one.to(torch.int32)
    with pytest.raises(ShapeMismatchError, match=r"starts.shape=\(1,\): expected \[2\]"):
        kernel(one, short, one, one, short, one, short, short, 4)
    two = torch.arange(2, dtype=torch.int32, device=device)
    with pytest.raises(ShapeMismatchError, match="seq_lens"):
        kernel(one, short, one, one, two, one, short[:0], short, 4)
    with pytest.raises(SchemeError, match="most=0"):
        kernel(one, short, one, one, two, one, short, short, 0)
    rates = torch.ones(2, device=device)
    with pytest.raises(SchemeError, match="both or neither"):
        kernel(one, short, one, one, two, one, short, short, 3, rates)
    with pytest.raises(ShapeMismatchError, match=r"rates.shape=\(2,\): expected at least 3"):
        kernel(one, short, one, one, two, one, short, short, 4, rates, one)

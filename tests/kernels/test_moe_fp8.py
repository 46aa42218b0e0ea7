# SPDX-License-Identifier: MIT
"""FP8 experts: the reference against float64, the Triton kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from moe_layer import ops, relative_error

from oss_fused.errors import ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels.op import get_kernel

reference = get_kernel("torch", "moe_fp8")


def random_fp8(experts: int, rows: int, columns: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.randn(experts, rows, columns, device=device) / columns**0.5
    scale = values.abs().amax(-1, keepdim=True) / 448
    return (values / scale).to(torch.float8_e4m3fn), scale


def arguments(device, tokens=5, hidden=64, inter=48, experts=4, top_k=2) -> list:
    torch.manual_seed(tokens + hidden)
    w13, w13_scale = random_fp8(experts, 2 * inter, hidden, device)
    w2, w2_scale = random_fp8(experts, hidden, inter, device)
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    logits = torch.randn(tokens, experts, device=device).bfloat16()
    b13 = torch.randn(experts, 2 * inter, device=device).bfloat16()
    b2 = torch.randn(experts, hidden, device=device).bfloat16()
    return [x, logits, w13, w13_scale, b13, w2, w2_scale, b2, top_k, True]


# beyond the clamps an error of x moves gates by twenty times as much, and outputs no further
@pytest.mark.parametrize(("factor", "tolerance"), [(1, 4e-2), (20, 8e-2)])
def test_reference_is_near_exact_arithmetic(factor, tolerance):
    args = arguments("cpu", tokens=4)
    args[0] = factor * args[0]
    x, logits, w13, s13, b13, w2, s2, b2, top_k, _ = args
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        values, ids = logits[t].double().topk(top_k)
        for weight, e in zip(values.softmax(-1), ids.tolist()):
            h = (w13[e].double() * s13[e]) @ x[t].double() + b13[e].double()
            gate, up = h[0::2].clamp(max=7), h[1::2].clamp(-7, 7)
            act = gate * (1.702 * gate).sigmoid() * (up + 1)
            expected[t] += weight * ((w2[e].double() * s2[e]) @ act + b2[e].double())
    assert relative_error(reference(*args), expected) < tolerance


# codes of the intermediate may move by one step where sums are rounded in another order
@pytest.mark.parametrize("activation", ["swigluoai", "silu"])
@pytest.mark.parametrize(("tokens", "hidden", "inter"), [(1, 64, 48), (5, 272, 16), (40, 32, 80)])
def test_triton_matches_reference(device, tokens, hidden, inter, activation):
    args = arguments(device, tokens, hidden, inter)
    for factor in (1, 20):
        args[0] = factor * args[0]
        actual = get_kernel("triton", "moe_fp8")(*args, None, activation)
        assert relative_error(actual, reference(*args, None, activation)) < 1e-2


def test_expert_map_nan_rows_and_no_tokens(device):
    args = arguments(device, experts=4)
    args[1] = torch.randn(5, 8, device=device)
    expert_map = torch.tensor([-1, 0, -1, 1, 2, -1, 3, -1], dtype=torch.int32, device=device)
    args[0][1, 3] = float("nan")
    args[1][0, [0, 2]] = 9.0  # experts that are not here
    actual = get_kernel("triton", "moe_fp8")(*args, expert_map)
    expected = reference(*args, expert_map)
    assert (actual[0] == 0).all()
    assert torch.equal(actual.isnan().all(1), expected.isnan().all(1))
    keep = ~expected.isnan().any(1)
    assert relative_error(actual[keep], expected[keep]) < 1e-2
    args[0], args[1] = args[0][:0], args[1][:0]
    assert get_kernel("triton", "moe_fp8")(*args, expert_map).shape == (0, 64)


def test_opcheck_and_bad_arguments():
    args = arguments("cpu")
    # test_schema compares inputs with arithmetic that CPUs lack for FP8
    torch.library.opcheck(ops.moe_fp8.default, tuple(args), test_utils=("test_faketensor",))
    with pytest.raises(ShapeMismatchError, match="w2_scale"):
        ops.moe_fp8(*args[:6], args[6][:, :1], *args[7:])
    with pytest.raises(UnsupportedDtypeError, match="w13.dtype"):
        ops.moe_fp8(*args[:2], args[2].float(), *args[3:])


def test_every_policy_is_that_of_the_tokens(device, monkeypatch):
    """Warm-up compiles for numbers of tokens; the intermediate has a row for each pair."""
    seen = []
    policy = "oss_fused.kernels.moe.encode.activation_policy"
    monkeypatch.setattr(policy, lambda rows: seen.append(rows) or "")
    get_kernel("triton", "moe_fp8")(*arguments(device, tokens=5, top_k=2))
    assert set(seen) == {5}


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_sizes_of_zero(backend, device):
    run = get_kernel(backend, "moe_fp8")
    for sizes in ({"hidden": 0}, {"inter": 0}, {"experts": 0}):
        # scales of nothing have no amax
        args = arguments(device, **{"hidden": 16, "inter": 16, "experts": 2, "top_k": 1})
        cut = [args[0], *args[2:8]]
        hidden, inter, experts = (slice(sizes.get(n)) for n in ("hidden", "inter", "experts"))
        x, w13, s13, b13, w2, s2, b2 = cut
        rows = slice(0) if "inter" in sizes else slice(None)
        w13, s13, b13 = w13[experts, rows, hidden], s13[experts, rows], b13[experts, rows]
        w2, s2, b2 = w2[experts, hidden, inter], s2[experts, hidden], b2[experts, hidden]
        call = (x[:, hidden], args[1], w13, s13, b13, w2, s2, b2, 1, True)
        with pytest.raises(ShapeMismatchError, match="w13.shape=.*at least 1"):
            run(*call)
        if "experts" in sizes:
            absent = torch.full((2,), -1, dtype=torch.int32, device=device)
            out = run(*call, absent)
            assert out.shape == x.shape and not out.any()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 33, 300, 2000])
def test_large_shapes(device, tokens):
    args = arguments(device, tokens, 2880, 2880, 8, 4)
    kernel = get_kernel("triton", "moe_fp8")
    actual = kernel(*args)
    assert torch.equal(actual, kernel(*args))
    assert relative_error(actual, reference(*args)) < 1e-2

# SPDX-License-Identifier: MIT
from __future__ import annotations

import pytest
import torch

from oss_fused.errors import NumericalOverflowError, ShapeMismatchError
from oss_fused.quant import rounding
from oss_fused.quant.formats import E4M3, E5M2, dequantize, quantize
from oss_fused.quant.rounding import (
    InputMoments,
    input_basis,
    output_error,
    round_with_feedback,
    search_scale,
)


def inputs(features: int, tokens: int = 600) -> torch.Tensor:
    """Correlated inputs of uneven power, as a language model's are."""
    torch.manual_seed(0)
    mix = torch.randn(features, features) / features**0.5
    return torch.randn(tokens, features) @ (mix + 2 * mix[:, :1]) * torch.logspace(-1, 1, features)


def moments_of(x: torch.Tensor) -> torch.Tensor:
    moments = InputMoments(x.shape[1], x.device)
    for part in x.split(100):
        moments.see(part.unsqueeze(0))
    return moments.mean("layer")


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("features", [45, 200])
def test_feedback_more_than_halves_the_output_error(features, fmt) -> None:
    x, weight = inputs(features), torch.randn(31, features)
    moments = moments_of(x)
    q, scale = round_with_feedback(weight, input_basis(moments), fmt)
    assert q.dtype is fmt.dtype and scale.shape == (31, 1)
    exact = x @ weight.t()
    plain = (x @ dequantize(*quantize(weight, "channel", fmt=fmt)).t() - exact).square().mean()
    ours = (x @ dequantize(q, scale).t() - exact).square().mean()
    assert ours < 0.5 * plain


def test_shrinkage_helps_on_other_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    both, weight = torch.randn(64, 64), torch.randn(48, 64)
    # two texts share half of what correlates their inputs
    seen, other = (torch.randn(80, 64) @ (both + torch.randn(64, 64)) for _ in range(2))

    def error() -> float:
        rounded = dequantize(*round_with_feedback(weight, input_basis(moments_of(seen))))
        return float(output_error(weight, rounded, moments_of(other)).sum())

    ours = error()
    monkeypatch.setattr(rounding, "SHRINKAGE", 0.0)
    assert ours < 0.97 * error()


def test_no_row_is_worse_than_plain_rounding() -> None:
    weight, moments = torch.randn(64, 40), torch.eye(40)
    moments[3, 3] = 0.0
    ours = output_error(
        weight, dequantize(*round_with_feedback(weight, input_basis(moments))), moments
    )
    plain = output_error(weight, dequantize(*quantize(weight, "channel")), moments)
    assert (ours <= plain).all()


def test_output_error_is_the_mean_over_the_inputs() -> None:
    x, weight = inputs(20), torch.randn(5, 20)
    rounded = dequantize(*quantize(weight, "channel"))
    expected = (x @ (rounded - weight).t()).square().mean(0)
    torch.testing.assert_close(
        output_error(weight, rounded, moments_of(x)), expected, rtol=1e-3, atol=1e-9
    )


def test_search_never_clips_and_never_loses() -> None:
    weight = torch.randn(50, 64)
    moments = moments_of(inputs(64))
    scale = search_scale(weight, moments)
    assert (weight.abs().amax(-1, keepdim=True) / scale <= 448.01).all()
    power = moments.diagonal()
    ours = (dequantize(*quantize(weight, "channel", scale)) - weight).square() @ power
    plain = (dequantize(*quantize(weight, "channel")) - weight).square() @ power
    assert (ours <= plain * 1.00001).all() and ours.sum() < 0.99 * plain.sum()


def test_exact_weights_stay_exact() -> None:
    q, scale = quantize(torch.randn(16, 32), "channel", torch.full((16, 1), 0.25))
    weight = dequantize(q, scale)
    weight[:, 0] = 448 * 0.25
    rounded = dequantize(*round_with_feedback(weight, input_basis(moments_of(inputs(32)))))
    assert torch.equal(rounded, weight)


def test_an_input_that_is_always_zero_changes_nothing() -> None:
    weight = torch.randn(8, 16)
    q, scale = round_with_feedback(weight, input_basis(torch.zeros(16, 16)))
    plain, plain_scale = quantize(weight, "channel")
    assert torch.equal(q.float(), plain.float()) and torch.equal(scale, plain_scale)


def test_zero_rows_have_scale_one() -> None:
    weight = torch.randn(8, 16)
    weight[2] = 0
    q, scale = round_with_feedback(weight, input_basis(moments_of(inputs(16))))
    assert scale[2] == 1 and not q[2].float().any()


def test_bad_input_is_named() -> None:
    with pytest.raises(ShapeMismatchError, match=r"moments\.shape"):
        round_with_feedback(torch.randn(3, 4), input_basis(torch.eye(3)))
    moments = InputMoments(4, torch.device("cpu"))
    with pytest.raises(NumericalOverflowError, match="q_proj: no calibration sample"):
        moments.mean("q_proj")
    moments.see(torch.full((1, 4), float("inf")))
    with pytest.raises(NumericalOverflowError, match="q_proj: NaN or Inf"):
        moments.mean("q_proj")


@pytest.mark.parametrize("fmt", [E4M3, E5M2])  # torch's own cast saturates E4M3 only
def test_what_feedback_pushes_out_of_range_saturates(fmt) -> None:
    rest = torch.tensor([[4 * fmt.max, -4 * fmt.max], [3.0, 1.2 * fmt.max]])
    columns = rounding._fp8_columns(torch.ones(2, 1), fmt)
    codes = rounding.feedback(rest, torch.eye(2), columns, fmt.dtype)
    assert codes.float().tolist() == [[fmt.max, -fmt.max], [3.0, fmt.max]]


def test_refining_lowers_the_error_that_feedback_leaves() -> None:
    torch.manual_seed(4)
    weight, x = torch.randn(24, 64), torch.randn(600, 64) @ torch.randn(64, 64)
    basis, scale = input_basis(moments_of(x)), weight.abs().amax(-1, keepdim=True) / 3

    def to_thirds(_: int, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        code = (column / scale.squeeze(-1)).round().clamp(-3, 3)
        return code, code * scale.squeeze(-1)

    columns = weight.t()[basis.order].contiguous()
    assert basis.factor is not None
    codes = rounding.feedback(columns.clone(), basis.factor, to_thirds, torch.float32)
    rounded = codes * scale.squeeze(-1)
    before = output_error(columns.t(), rounded.t(), basis.damped)
    rounding.refine(codes, rounded, columns, basis.damped, to_thirds)
    after = output_error(columns.t(), rounded.t(), basis.damped)
    assert torch.equal(rounded, codes * scale.squeeze(-1))
    assert (after <= before * 1.0001).all() and after.sum() < 0.97 * before.sum()


def test_refining_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    weight, x = torch.randn(24, 64), torch.randn(600, 64) @ torch.randn(64, 64)
    basis = input_basis(moments_of(x))

    def to_whole(_: int, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return column.round(), column.round()

    columns = weight.t()[basis.order].contiguous()
    found = []
    for size in (64, 16):
        monkeypatch.setattr(rounding, "_BLOCK", size)
        codes, rounded = columns.round(), columns.round()
        rounding.refine(codes, rounded, columns, basis.damped, to_whole)
        found.append(output_error(columns.t(), rounded.t(), basis.damped))
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)


def test_a_weight_makes_up_for_what_its_inputs_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "SHRINKAGE", 0.0)
    monkeypatch.setattr(rounding, "DAMPING", 1e-6)
    torch.manual_seed(2)
    # inputs of even power: the solution itself is compared, not what it gives
    exact, weight = torch.randn(4000, 16), torch.randn(5, 16)
    x = exact * 0.9 + 0.1 * exact.roll(1, 1)
    lost = InputMoments(16, x.device)
    lost.see(x, exact - x)
    ours = input_basis(moments_of(x)).compensate(weight, lost.mean("layer"))
    expected = torch.linalg.lstsq(x.double(), (exact @ weight.t()).double()).solution.t()
    torch.testing.assert_close(ours, expected.float(), rtol=1e-2, atol=1e-2)
    silent = input_basis(torch.zeros(16, 16))
    assert torch.equal(silent.compensate(weight, torch.eye(16)), weight)


def test_feedback_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, basis = torch.randn(24, 64), input_basis(moments_of(inputs(64)))
    assert basis.factor is not None
    columns = rounding._fp8_columns(weight.abs().amax(-1, keepdim=True) / 448, E4M3)
    found = []
    for block in (64, 8):
        monkeypatch.setattr(rounding, "_BLOCK", block)
        rest = weight.t()[basis.order].contiguous()
        found.append(rounding.feedback(rest, basis.factor, columns, E4M3.dtype).float())
    # sums in another order flip a code that lies between two
    assert (found[0] != found[1]).float().mean() < 0.01


def test_losses_are_made_up_for_in_their_own_direction() -> None:
    torch.manual_seed(5)
    weight, power = torch.randn(3, 6), torch.logspace(0, 1, 6)
    lost_of = torch.randn(6, 6)  # inputs x have lost ``lost_of @ x``
    basis = input_basis(power.diag())
    assert basis.order.tolist() == [5, 4, 3, 2, 1, 0]  # the most active first
    found = basis.compensate(weight, lost_of @ power.diag())
    torch.testing.assert_close(found, weight + weight @ lost_of, rtol=0.02, atol=0.02)


def test_damping_follows_the_power_of_the_inputs() -> None:
    moments = moments_of(inputs(16))
    small, plain = input_basis(1e-6 * moments), input_basis(moments)
    torch.testing.assert_close(small.damped, 1e-6 * plain.damped)


def test_one_dead_input_leaves_feedback_to_the_others() -> None:
    moments = torch.eye(8)
    moments[3, 3] = 0
    assert input_basis(moments).factor is not None


def test_threads_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # recorded, not set: an engine on the CPU may have made the real function one that does nothing
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    round_with_feedback(torch.randn(4, 16), input_basis(torch.eye(16)))
    assert numbers == [1, 7]

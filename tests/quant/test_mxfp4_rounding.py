# SPDX-License-Identifier: MIT
"""Rounding to MXFP4: exponents, error feedback, blocks kept from a base."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oss_fused.errors import (
    CheckpointError,
    NumericalOverflowError,
    SchemeError,
    ShapeMismatchError,
)
from oss_fused.quant import mxfp4
from oss_fused.quant.expert_stream import Mxfp4ExpertWatch, serve_in_mxfp4
from oss_fused.quant.formats import E2M1_VALUES, E8M0_BIAS
from oss_fused.quant.mxfp4 import least_error_exponents, pack_mxfp4, round_e2m1, unpack_mxfp4
from oss_fused.quant.mxfp4_rounding import (
    Mxfp4Rounder,
    find_kept,
    round_to_mxfp4,
    round_to_mxfp4_with_feedback,
)
from oss_fused.quant.record import load_record
from oss_fused.quant.rounding import input_basis, output_error
from tests.quant.conftest import CONFIGS, pack_experts
from tests.quant.runs import Models, calibrate, tensors
from tests.quant.test_rounding import inputs, moments_of

MODULE = "model.layers.1.mlp.experts"


def heavy_tailed(*shape: int) -> torch.Tensor:
    """Values whose blocks have outliers or none, at many magnitudes."""
    torch.manual_seed(3)
    return torch.randn(shape) ** 3 * torch.logspace(-4, 4, shape[0]).unsqueeze(1)


def dense(packed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return unpack_mxfp4(*packed, torch.float32)


def block_errors(
    values: torch.Tensor, exponents: torch.Tensor | None, power: torch.Tensor | None = None
) -> torch.Tensor:
    squares = (dense(pack_mxfp4(values, exponents)) - values).double().square()
    return (squares if power is None else squares * power).unflatten(-1, (-1, 32)).sum(-1)


def test_rounding_is_to_the_nearest_value_and_even_code_on_ties() -> None:
    values = torch.linspace(0, 8, 2**12 + 1)  # every tie is among them
    grid = torch.tensor(E2M1_VALUES)
    distance = (values.clamp(max=6).unsqueeze(1) - grid).abs()
    odd = torch.arange(len(grid)) % 2
    nearest = (distance + 1e-6 * odd).argmin(1)
    assert torch.equal(round_e2m1(values), grid[nearest])
    assert torch.equal(round_e2m1(-values), -grid[nearest])


@pytest.mark.parametrize("spread", [1, 3])
def test_no_exponent_has_a_smaller_error_than_the_one_chosen(spread: int) -> None:
    values = heavy_tailed(64, 256).abs() ** (1 / spread)
    chosen = least_error_exponents(values)
    tried = torch.stack([block_errors(values, chosen + shift) for shift in range(-6, 7)])
    assert torch.equal(tried.min(0).values, tried[6])
    nearest = block_errors(values, None)
    assert tried[6].sum() < 0.97 * nearest.sum() and (tried[6] < nearest).any()


def test_one_value_saturates_where_the_others_gain_more() -> None:
    values = torch.full((1, 32), 0.75)
    values[0, 0] = 4.0
    # 0.75 lies between 0.5 and 1 of the grid that holds 4, and on the finer one, which ends at 3
    assert pack_mxfp4(values)[1].item() == E8M0_BIAS
    assert least_error_exponents(values).tolist() == [[-1]]


def test_power_weighs_the_error() -> None:
    values, power = heavy_tailed(64, 64), torch.logspace(-3, 3, 64)[torch.randperm(64)]
    chosen = least_error_exponents(values, power)
    base = least_error_exponents(values)
    ours = block_errors(values, chosen, power)
    assert (ours <= block_errors(values, base, power) * 1.00001).all()
    assert ours.sum() < 0.9 * block_errors(values, base, power).sum()
    with pytest.raises(ShapeMismatchError, match=r"power\.shape=\(32,\)"):
        least_error_exponents(values, power[:32])


def test_blocks_of_zeros_and_the_ends_of_the_range() -> None:
    values = torch.zeros(3, 64)
    values[1] = 2.0**-140  # below the smallest scale times the smallest code
    values[2, 40] = torch.finfo(torch.float32).max
    blocks, scales = pack_mxfp4(values, least_error_exponents(values))
    assert scales[0].tolist() == [E8M0_BIAS] * 2 and not blocks[0].any()
    assert scales[1].tolist() == [0, 0] and not dense((blocks, scales))[1].any()
    assert dense((blocks, scales))[2, 40] == 6 * 2.0**125


def test_values_beyond_the_largest_saturate() -> None:
    values = torch.full((1, 32), 100.0)
    values[0, 1] = -1e6
    packed = pack_mxfp4(values, torch.tensor([[3]], dtype=torch.int32))
    assert dense(packed)[0, :3].tolist() == [48.0, -48.0, 48.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused_by_name(bad: float) -> None:
    values = torch.zeros(2, 32)
    values[1, 7] = bad
    for rule in ("nearest", "mse"):
        with pytest.raises(NumericalOverflowError, match="values: .*NaN or Inf"):
            Mxfp4Rounder(rule).round(values, "experts", 0)
    with pytest.raises(NumericalOverflowError, match="values: .*NaN or Inf"):
        round_to_mxfp4_with_feedback(values, input_basis(torch.eye(32)))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values, power = heavy_tailed(37, 96), torch.rand(96)
    whole = [*pack_mxfp4(values), least_error_exponents(values, power)]
    monkeypatch.setattr(mxfp4, "_CHUNK", 200)
    parts = [*pack_mxfp4(values), least_error_exponents(values, power)]
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
    assert torch.equal(pack_mxfp4(values.bfloat16())[0], pack_mxfp4(values.bfloat16().float())[0])
    with pytest.raises(ShapeMismatchError, match=r"exponents\.shape=\(37, 2\)"):
        pack_mxfp4(values, torch.zeros(37, 2, dtype=torch.int32))


def test_feedback_is_better_on_its_inputs_and_nowhere_worse() -> None:
    weight, moments = torch.randn(48, 128) * 0.1, moments_of(inputs(128))
    power = moments.diagonal()
    plain = dense(round_to_mxfp4(weight, least_error_exponents(weight, power)))
    ours = dense(round_to_mxfp4_with_feedback(weight, input_basis(moments)))
    errors, before = (output_error(weight, w, moments) for w in (ours, plain))
    assert (errors <= before).all() and errors.sum() < 0.5 * before.sum()


def test_inputs_that_are_never_active_change_nothing() -> None:
    weight = torch.randn(8, 64)
    packed = round_to_mxfp4_with_feedback(weight, input_basis(torch.zeros(64, 64)))
    expected = pack_mxfp4(weight, least_error_exponents(weight, torch.zeros(64)))
    assert all(torch.equal(one, other) for one, other in zip(packed, expected, strict=True))
    with pytest.raises(ShapeMismatchError, match=r"power\.shape"):
        round_to_mxfp4_with_feedback(weight, input_basis(torch.eye(32)))


def base_and_tuned() -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """A base [16, 128], a weight of which some blocks moved by over half a step, and which."""
    torch.manual_seed(5)
    blocks = torch.randint(0, 256, (16, 4, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (16, 4), dtype=torch.uint8)
    moved = torch.rand(16, 4) < 0.3
    values = dense((blocks, scales)).unflatten(-1, (-1, 32))
    steps = torch.where(moved, 0.6, 0.2)
    step = torch.ldexp(torch.full((16, 4), 0.5), scales.int() - E8M0_BIAS)
    values[..., 3] += steps * step * torch.where(values[..., 3] < 0, -1, 1)
    # where the grid is coarser than at zero, that was less than half a step
    coarse = values[..., 3].abs() / step >= 4
    return (blocks, scales), values.flatten(-2), moved & ~coarse


def test_blocks_within_half_a_step_keep_the_codes_and_scales_of_the_base() -> None:
    base, weight, moved = base_and_tuned()
    kept = find_kept(weight, *base)
    assert torch.equal(kept.kept, ~moved) and moved.any()
    blocks, scales = round_to_mxfp4(weight, least_error_exponents(weight), kept)
    assert torch.equal(blocks[~moved], base[0][~moved])
    assert torch.equal(scales[~moved], base[1][~moved])
    error, before = (
        output_error(weight, dense(p), torch.eye(128)) for p in ((blocks, scales), base)
    )
    assert error.sum() < before.sum()


def test_a_value_beyond_the_base_is_no_value_of_the_base() -> None:
    weight = torch.full((1, 32), 0.5)
    weight[0, 0] = 7.0  # the last that rounds to 6
    base = pack_mxfp4(torch.cat((torch.tensor([[6.0]]), weight[:, 1:]), 1))
    assert bool(find_kept(weight, *base).kept)
    weight[0, 0] = 7.01
    assert not bool(find_kept(weight, *base).kept)


def test_feedback_leaves_kept_blocks_and_the_others_make_up_for_them() -> None:
    base, weight, moved = base_and_tuned()
    moments = moments_of(inputs(128))
    kept = find_kept(weight, *base)
    blocks, scales = round_to_mxfp4_with_feedback(weight, input_basis(moments), kept)
    assert torch.equal(blocks[~moved], base[0][~moved])
    assert torch.equal(scales[~moved], base[1][~moved])
    plain = round_to_mxfp4(weight, least_error_exponents(weight, moments.diagonal()), kept)
    errors = [output_error(weight, dense(p), moments).sum() for p in ((blocks, scales), plain)]
    assert errors[0] < errors[1]


@pytest.fixture(scope="module")
def base(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MXFP4 form of the bf16 model, as if that had been fine-tuned from it."""
    folder = tmp_path_factory.mktemp("base") / "original"
    shutil.copytree(models("gpt-oss"), folder)
    pack_experts(folder)
    return folder


def tuned(base: Path, models: Models, folder: Path) -> Path:
    """The base in bf16, with every weight of expert 1 of the second layer changed."""
    shutil.copytree(models("gpt-oss"), folder)
    state = load_file(folder / "model.safetensors")
    stored = load_file(base / "model.safetensors")
    for name in [n for n in state if n.endswith(("gate_up_proj", "down_proj"))]:
        packed = stored[f"{name}_blocks"], stored[f"{name}_scales"]
        values = unpack_mxfp4(*packed).transpose(1, 2).contiguous()
        if name.startswith(MODULE):
            values[1] *= 1.3
        state[name] = values
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("data", [False, True])
def test_calibration_keeps_what_the_fine_tune_left(
    models: Models, base: Path, tmp_path: Path, text_file: Path, data: bool
) -> None:
    source = tuned(base, models, tmp_path / "tuned")
    settings = {"dataset": str(text_file), "num_samples": 4, "max_seq_length": 64} if data else {}
    summary = calibrate(source, tmp_path / "out", experts="mxfp4", base=str(base), **settings)
    before, after = tensors(base), tensors(tmp_path / "out")
    same = total = 0
    for name, tensor in before.items():
        if name.endswith(("_blocks", "_scales")):
            experts = [e for e in range(4) if not name.startswith(MODULE) or e != 1]
            assert torch.equal(tensor[experts], after[name][experts])
        if name.endswith("_blocks"):
            scales = name.replace("_blocks", "_scales")
            equal = (tensor == after[name]).all(-1) & (before[scales] == after[scales])
            same, total = same + int(equal.sum()), total + equal.numel()
    assert total * 7 // 8 <= same < total
    record = load_record(tmp_path / "out")
    assert (summary.base_blocks, summary.blocks) == (same, total)
    assert sum(layer.base_blocks or 0 for layer in record.layers) == same
    assert sum(layer.mxfp4_blocks or 0 for layer in record.layers) == total
    assert record.expert_rounding == ("feedback" if data else "mse") and record.base is not None


def test_a_base_of_another_shape_is_refused_by_name(
    models: Models, base: Path, tmp_path: Path
) -> None:
    source, output = models("gpt-oss"), tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"--base='.*gpt-oss': has no tensor '.*_blocks'"):
        calibrate(source, output, experts="mxfp4", base=str(source))
    with pytest.raises(CheckpointError, match=r"--base='/nowhere': no such folder"):
        calibrate(source, output, experts="mxfp4", base="/nowhere")
    other = tmp_path / "other"
    shutil.copytree(base, other)
    state = load_file(other / "model.safetensors")
    name = f"{MODULE}.down_proj_scales"
    state[name] = state[name][:, :32].contiguous()
    save_file(state, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name}' is torch.uint8 \(4, 32, 3\); MODEL needs"):
        calibrate(source, output, experts="mxfp4", base=str(other))
    with pytest.raises(CheckpointError, match="lies inside --base"):
        calibrate(source, base / "out", experts="mxfp4", base=str(base))
    assert not output.exists()


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("llama", {"rounding": "mse"}, "rounding='mse': is for rounding to MXFP4"),
        ("gpt-oss", {"rounding": "mse", "experts": "fp8"}, "rounding='mse'"),
        ("gpt-oss-mxfp4", {"rounding": "mse"}, "rounding='mse'"),
        ("gpt-oss", {"base": "x"}, "base='x': is for rounding to MXFP4"),
    ],
)
def test_options_of_mxfp4_are_refused_where_nothing_becomes_mxfp4(
    models: Models, tmp_path: Path, kind: str, settings: dict, message: str
) -> None:
    with pytest.raises(SchemeError, match=message):
        calibrate(models(kind), tmp_path / "out", **settings)


def test_without_data_mxfp4_has_the_least_error(models: Models, tmp_path: Path) -> None:
    source = models("gpt-oss")
    errors = {}
    for rounding in ("nearest", "mse", "auto"):
        output = tmp_path / rounding
        calibrate(source, output, experts="mxfp4", rounding=rounding)
        after, exact = tensors(output), tensors(source)[f"{MODULE}.down_proj"].transpose(1, 2)
        packed = after[f"{MODULE}.down_proj_blocks"], after[f"{MODULE}.down_proj_scales"]
        errors[rounding] = float((dense(packed) - exact.float()).square().sum())
    assert errors["auto"] == errors["mse"] < 0.97 * errors["nearest"]
    assert load_record(tmp_path / "auto").expert_rounding == "mse"


def test_the_drift_counts_experts_in_mxfp4_and_feedback_lowers_it(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    settings = {"dataset": str(text_file), "num_samples": 12, "max_seq_length": 64}
    drifts = {}
    for rounding in ("nearest", "feedback"):
        output = tmp_path / rounding
        summary = calibrate(
            models("gpt-oss"),
            output,
            experts="mxfp4",
            rounding=rounding,
            ignore=["Linear"],
            **settings,
        )
        drifts[rounding] = load_record(output).layers[0].cumulative_error
        name = f"{MODULE}.down_proj_bias"
        same = torch.equal(tensors(output)[name], tensors(models("gpt-oss"))[name])
        assert same == (rounding == "nearest")
        assert not summary.few
    assert 0.01 < drifts["feedback"] < 0.8 * drifts["nearest"]


def test_experts_that_saw_few_tokens_are_named_and_rounded_without_feedback(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    settings = {"dataset": str(text_file), "num_samples": 1, "max_seq_length": 48}
    summary = calibrate(models("gpt-oss"), tmp_path / "out", experts="mxfp4", **settings)
    named = {*summary.few, *summary.unrouted}
    assert named == {f"model.layers.{i}.mlp.experts.{e}" for i in range(2) for e in range(4)}
    exact, after = tensors(models("gpt-oss")), tensors(tmp_path / "out")
    name = f"{MODULE}.gate_up_proj"
    weight = exact[name].transpose(1, 2)
    expected = pack_mxfp4(weight, least_error_exponents(weight))
    assert torch.equal(after[f"{name}_blocks"], expected[0])


def test_tokens_count_with_the_square_of_the_routers_share() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    torch.manual_seed(0)
    experts = GptOssExperts(CONFIGS["gpt-oss"]()).requires_grad_(False)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    watch = Mxfp4ExpertWatch(experts, True, "experts", Mxfp4Rounder())
    hidden, indices = torch.randn(400, 64), torch.tensor([[0, 1]]).expand(400, 2)
    shares = torch.rand(400, 1)
    experts(hidden, indices, torch.cat((shares, 1 - shares), 1))
    watch.close()
    rows = torch.cat((hidden, torch.ones(400, 1)), 1) * shares
    assert watch.tokens == [400, 400, 0, 0] and watch._moments is not None
    moments = watch._moments["gate_up_proj", 0]
    torch.testing.assert_close(moments.total, rows.t() @ rows, rtol=1e-4, atol=1e-3)
    assert watch.second_pass()
    experts(hidden, indices, torch.cat((shares, 1 - shares), 1))
    # what down_proj reads is what the rounded gate_up_proj gives, and what is lost leads back
    packed = watch._rounded["experts.0.w13"]
    shifted = watch.biases["experts.gate_up_proj_bias"][0]
    gated = experts._apply_gate(hidden @ dense(packed).t() + shifted) * shares
    bias = experts.gate_up_proj_bias[0]
    exact = experts._apply_gate(hidden @ experts.gate_up_proj[0] + bias) * shares
    seen, lost = (watch._moments[key, 0].total for key in ("down_proj", "lost"))
    inputs = torch.cat((gated, shares), 1)
    torch.testing.assert_close(seen, inputs.t() @ inputs, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(lost[:96], (exact - gated).t() @ inputs, rtol=1e-3, atol=1e-4)
    assert not lost[96:].any()
    names = {f"experts.{expert}.{short}" for expert in range(4) for short in ("w13", "w2")}
    assert set(watch.rounded("experts")) == names


def test_biases_take_what_experts_lose_on_average() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    torch.manual_seed(0)
    experts = GptOssExperts(CONFIGS["gpt-oss"]()).requires_grad_(False)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    hidden, indices = torch.randn(400, 64) + 2, torch.zeros(400, 1, dtype=torch.long)
    shares = torch.rand(400, 1)
    exact = experts(hidden, indices, shares)
    parts = ("gate_up_proj_bias", "down_proj_bias")
    before = {part: getattr(experts, part).clone() for part in parts}
    watch = Mxfp4ExpertWatch(experts, True, "experts", Mxfp4Rounder())
    experts(hidden, indices, shares)
    watch.close()
    assert watch.second_pass()
    experts(hidden, indices, shares)
    watch.close()
    rounded = watch.rounded("experts")
    serve_in_mxfp4(experts, "experts", rounded, watch.biases)
    error = experts(hidden, indices, shares) - exact
    # the mean of what the bias can take, each token weighed as in calibration
    left = (error * shares).mean(0).abs().amax()
    assert left < 1e-4 * exact.abs().mean() < 0.1 * error.abs().mean()
    for part in parts:
        assert not torch.equal(watch.biases[f"experts.{part}"][0], before[part][0])
        # experts that saw nothing
        assert torch.equal(getattr(experts, part)[1:], before[part][1:])

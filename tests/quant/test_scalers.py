# SPDX-License-Identifier: MIT
from __future__ import annotations

import pytest
import torch

from oss_fused.errors import NumericalOverflowError, SchemeError, ShapeMismatchError
from oss_fused.quant.formats import E4M3, E5M2, dequantize, quantize, relative_error
from oss_fused.quant.scaler_choice import choose_format, choose_group_size
from oss_fused.quant.scalers import (
    SCALERS,
    DynamicScaler,
    GroupScaler,
    PerChannelScaler,
    make_scaler,
)


def test_dynamic_scaler_follows_a_moving_average() -> None:
    scaler = DynamicScaler(momentum=0.5)
    for amax in (8.0, 4.0, 4.0):
        scaler.update(torch.tensor([[-amax, 1.0]]))
    assert torch.equal(scaler.scale(), torch.tensor([5.0]) / 448)


def test_per_channel_scaler_averages_each_value_of_the_last_dimension() -> None:
    x = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(0))
    scaler = PerChannelScaler(momentum=0.75)
    scaler.update(x)
    # quantised as rows of the transpose
    q, scale = quantize(x.flatten(0, 1).t().contiguous(), "channel")
    assert torch.equal(scaler.scale(), scale[:, 0])
    assert torch.equal(scaler.quantize(x).float().flatten(0, 1), q.t().float())
    # another number of rows
    scaler.update(3 * x[:1, :2])
    moved = 0.75 * x.abs().amax((0, 1)) + 0.25 * 3 * x[0, :2].abs().amax(0)
    torch.testing.assert_close(scaler.scale(), moved / 448)
    assert torch.equal(scaler.seen, 3 * x[0, :2].abs().amax(0)) and scaler.steps == 2
    scaler.update(x[:0])
    assert scaler.steps == 3 and torch.isfinite(scaler.scale()).all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_group_scaler_of_channels_expands_to_them(fmt) -> None:
    x = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(0))
    scaler = GroupScaler(fmt, group_size=8, channels=32)
    scaler.update(x)
    assert scaler.scale().shape == (4,) and scaler.per_channel().shape == (32,)
    amax = x.unflatten(-1, (4, 8)).abs().amax((0, 1, 3))
    torch.testing.assert_close(scaler.scale(), amax / fmt.max)
    scaler.update(x[:2, :3])
    assert scaler.quantize(x).dtype == fmt.dtype
    assert relative_error(x, scaler.dequantize(scaler.quantize(x))) < 0.07
    with pytest.raises(ShapeMismatchError, match="channels=32"):
        scaler.update(torch.randn(3, 64))
    with pytest.raises(SchemeError, match="group_size=5: expected a divisor of channels=32"):
        GroupScaler(group_size=5, channels=32)


@pytest.mark.parametrize("name", ["dynamic", "per_channel", "group"])
def test_an_outlier_is_held_and_reported_and_a_new_level_is_taken(name, caplog) -> None:
    x = torch.rand(64, 32, generator=torch.Generator().manual_seed(0)) + 0.5
    scaler = make_scaler(name, **({"group_size": 8, "channels": 32} if name == "group" else {}))
    for _ in range(3):
        scaler.update(x)
    before = scaler.scale()
    spiked = x.clone()
    spiked[5, 3] = 1500
    scaler.update(spiked)
    torch.testing.assert_close(scaler.scale(), before, rtol=1e-5, atol=0)
    assert len(scaler.anomalies) == 1 and scaler.anomalies[0]["held"] == 1
    assert 500 < scaler.anomalies[0]["ratio"] < 2000 and "held" in caplog.text
    scaler.update(x)
    # not the same outlier twice in a row: the count starts again
    for step in range(3):
        assert scaler.scale().max() < 2 * before.max(), step
        scaler.update(1000 * x)
    torch.testing.assert_close(scaler.scale(), 1000 * before, rtol=1e-5, atol=0)


def test_group_scaler_quantises_each_group_as_a_row() -> None:
    x, scaler = torch.randn(3, 64) * torch.logspace(-6, 0, 64), GroupScaler(group_size=16)
    scaler.update(x)
    assert scaler.scale().shape == (3, 4)
    expected = dequantize(*quantize(x.reshape(-1, 16), "channel")).view(3, 64)
    assert torch.equal(scaler.dequantize(scaler.quantize(x)), expected)
    with pytest.raises(ShapeMismatchError, match="group_size=16"):
        scaler.update(torch.randn(3, 40))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("name", SCALERS)
def test_state_is_saved_and_restored(name: str, fmt, tmp_path) -> None:
    x = torch.randn(4, 256)
    scaler = make_scaler(name, fmt=fmt, margin=1.25)
    scaler.update(x)
    torch.save(scaler.state_dict(), tmp_path / "state.pt")
    restored = make_scaler(name)
    restored.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(restored.scale(), scaler.scale()) and restored.fmt is fmt
    scaler.update(2 * x)
    restored.update(2 * x)
    assert torch.equal(restored.quantize(x).float(), scaler.quantize(x).float())


@pytest.mark.parametrize("name", SCALERS)
def test_overflow_is_detected_and_the_scale_adjusted(name: str) -> None:
    x = torch.randn(4, 256)
    scaler = make_scaler(name)
    scaler.update(x)
    assert scaler.clip_ratio(x) == 0 and not scaler.absorb_overflow(x)
    before = scaler.scale()
    assert scaler.clip_ratio(4 * x) > 0 and scaler.absorb_overflow(4 * x)
    assert scaler.clip_ratio(4 * x) == 0 and (scaler.scale() >= before).all()
    assert relative_error(4 * x, scaler.dequantize(scaler.quantize(4 * x))) < 0.03


@pytest.mark.parametrize("name", SCALERS)
def test_non_finite_values_are_refused_and_change_nothing(name: str) -> None:
    x = torch.randn(4, 256)
    scaler = make_scaler(name)
    with pytest.raises(NumericalOverflowError, match="nothing was seen"):
        scaler.scale()
    scaler.update(x)
    before, x[1, 3] = scaler.scale(), float("nan")
    with pytest.raises(NumericalOverflowError, match="NaN or Inf"):
        scaler.update(x)
    assert torch.equal(scaler.scale(), before)


@pytest.mark.parametrize("name", SCALERS)
def test_constant_and_zero_activations_have_usable_scales(name: str) -> None:
    scaler = make_scaler(name)
    scaler.update(torch.zeros(2, 128))
    assert (scaler.scale() == 1).all()
    scaler = make_scaler(name)
    constant = torch.full((2, 128), 3.0)
    scaler.update(constant)
    torch.testing.assert_close(scaler.dequantize(scaler.quantize(constant)), constant)


def test_wrong_settings_are_named() -> None:
    with pytest.raises(SchemeError, match="scaler='row'.*dynamic, per_channel, group"):
        make_scaler("row")
    with pytest.raises(SchemeError, match="margin=0"):
        make_scaler("dynamic", margin=0)
    with pytest.raises(SchemeError, match="momentum=1"):
        make_scaler("dynamic", momentum=1)
    with pytest.raises(SchemeError, match="group_size=0"):
        make_scaler("group", group_size=0)
    with pytest.raises(SchemeError, match="expected the state of a 'group' scaler"):
        make_scaler("group").load_state_dict(make_scaler("dynamic").state_dict())
    with pytest.raises(SchemeError, match="state: format='e3m4'; expected one of e4m3, "):
        make_scaler("group").load_state_dict(make_scaler("group").state_dict() | {"format": "e3m4"})
    for setting in ({"outlier_factor": 1.0}, {"patience": 0}):
        with pytest.raises(SchemeError, match=next(iter(setting))):
            make_scaler("per_channel", **setting)
    scaler = make_scaler("per_channel")
    scaler.update(torch.randn(2, 8))
    with pytest.raises(ShapeMismatchError, match=r"expected \(8,\), as before"):
        scaler.update(torch.randn(2, 9))


def test_the_format_is_chosen_by_measured_error() -> None:
    torch.manual_seed(0)
    plain, error = choose_format(torch.randn(8, 64))
    assert plain is E4M3 and 0.02 < error < 0.03
    # powers of two over more than E4M3's range: E5M2 holds them exactly
    wide = torch.tensor([[57344.0, *(2.0**-k for k in range(14))]])
    assert choose_format(wide) == (E5M2, 0.0)
    assert relative_error(wide, dequantize(*quantize(wide))) > 0


def test_group_size_meets_the_clip_target_with_least_error() -> None:
    torch.manual_seed(0)
    samples = [torch.randn(64, 256) for _ in range(4)]
    # small groups have seen few values: their scales clip more of what comes later
    size, _, clipped = choose_group_size(samples, 0.01, [4, 16, 128], margin=1.0)
    assert size == 128 and 0 < clipped <= 0.01
    # where rows hold two scales of magnitude, only groups that part them keep the small values
    spread = torch.ones(256)
    spread[128:] = 2.0**-17
    parted = [torch.randn(8, 256).sign() * spread for _ in range(3)]
    assert choose_group_size(parted, 0.0, [256, 128])[:2] == (128, pytest.approx(0.0, abs=1e-6))
    with pytest.raises(SchemeError, match=r"--clip-target=0\.0: not met.*128, clips"):
        choose_group_size(samples, 0.0, [16, 128])


@pytest.mark.parametrize(("fmt", "fits", "clipped"), [(E4M3, 460, 470), (E5M2, 60_000, 61_440)])
def test_what_rounds_to_the_largest_value_is_not_clipped(fmt, fits: float, clipped: float) -> None:
    scaler = DynamicScaler(fmt)
    scaler.update(torch.tensor([fmt.max]))
    assert scaler.clip_ratio(torch.tensor([1.0, -fits])) == 0
    assert scaler.clip_ratio(torch.tensor([1.0, -clipped])) == 0.5


def test_an_overflow_widens_only_what_it_exceeds_and_leaves_no_room_beyond() -> None:
    scaler = PerChannelScaler(margin=1.25)
    scaler.update(torch.tensor([8.0, 8.0]))
    assert scaler.absorb_overflow(torch.tensor([1.0, 20.0]))
    torch.testing.assert_close(scaler.scale(), torch.tensor([10.0, 20.0]) / 448)


def test_the_first_value_of_a_channel_that_was_zero_is_its_average() -> None:
    scaler = PerChannelScaler()
    for amax in (0.0, 5.0):
        scaler.update(torch.tensor([1.0, amax]))
    assert torch.equal(scaler.scale(), torch.tensor([1.0, 5.0]) / 448)


def test_a_restored_state_knows_its_channels_and_no_outliers() -> None:
    scaler = GroupScaler(group_size=8, channels=32)
    for factor in (1, 1000, 1000):
        scaler.update(factor * torch.ones(2, 32))
    before, state = scaler.scale(), scaler.state_dict()
    restored = GroupScaler()
    restored.load_state_dict(state)
    with pytest.raises(ShapeMismatchError, match="channels=32"):
        restored.update(torch.ones(2, 64))
    # patience of three begins anew
    scaler.load_state_dict(state)
    scaler.update(1000 * torch.ones(2, 32))
    assert torch.equal(scaler.scale(), before)
    with pytest.raises(SchemeError, match="name='per_channel'.*state of a 'dynamic' scaler"):
        DynamicScaler().load_state_dict(PerChannelScaler().state_dict())

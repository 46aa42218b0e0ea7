# SPDX-License-Identifier: MIT
"""Triton expert kernels against their reference twin (interpreted where there is no GPU)."""

from __future__ import annotations

import pytest
import torch
from moe_layer import (
    FP8_STEP,
    SAME_ARITHMETIC,
    Layer,
    inputs,
    layer_of,
    relative_error,
    run,
    run_kernels,
)

from oss_fused.errors import ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.moe.config import (
    ExpertShape,
    MoEConfig,
    Tile,
    choose_config,
)
from oss_fused.kernels.op import get_kernel

pytest.importorskip("triton")
import triton
import triton.language as tl

from oss_fused.kernels.moe import triton as moe_triton
from oss_fused.kernels.moe.gemm import Product
from oss_fused.kernels.moe.group import first_group, group_of_next_wave, of_group
from oss_fused.kernels.moe.triton import down, encode, gate_up


@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize(("hidden", "inter"), [(64, 32), (192, 96), (128, 224)])
def test_default_tiles(device, hidden, inter, tokens):
    layer = Layer(hidden, inter, 4).to(device)
    actual, expected = run(layer, *inputs(device, tokens, hidden, 4))
    assert relative_error(actual, expected) < SAME_ARITHMETIC


@pytest.mark.parametrize("top_k", [2, 4])
@pytest.mark.parametrize(
    ("experts", "mapped", "activation", "routed"),
    [
        (64, False, "swigluoai", False),
        (65, False, "swigluoai", True),
        (64, True, "swigluoai", True),
        (64, False, "silu", True),
    ],
)
def test_one_token_with_and_without_a_routing_launch(
    device, experts, mapped, activation, routed, top_k, monkeypatch
):
    launches = []

    def encode_and_note(*arguments, **options):
        launches.append("route")
        return encode(*arguments, **options)

    monkeypatch.setattr(moe_triton, "encode", encode_and_note)
    layer = layer_of(64, 32, experts).to(device)
    x, logits = inputs(device, 1, 64, experts)
    # equal logits: the lower expert comes first
    logits[0, 7] = logits[0, 3] = 5.0
    expert_map = torch.arange(experts, device=device).int() if mapped else None
    actual, expected = run(layer, x, logits, top_k, expert_map, activation)
    assert relative_error(actual, expected) < SAME_ARITHMETIC
    assert launches == ["route"] * routed


@pytest.mark.parametrize("fp8", [-1, 0])
def test_gates_and_ups_beyond_the_clamps(device, fp8):
    layer = Layer(192, 96, 4).to(device)
    x, logits = inputs(device, 9, 192, 4)
    actual, expected = run(layer, 20 * x, logits, fp8=fp8)
    assert relative_error(actual, expected) < (FP8_STEP if fp8 == 0 else SAME_ARITHMETIC)


CONFIGS = [
    MoEConfig(8, Tile(1, 1, 3), Tile(1, 1, 3, shares=4), True),
    MoEConfig(8, Tile(2, 2, 3), Tile(2, 2, 3, shares=2), True),
    MoEConfig(16, Tile(2, 1, 3), Tile(2, 1, 3), False),
    MoEConfig(16, Tile(2, 1, 4), Tile(1, 2, 3), True),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_kind_of_tile(device, config):
    # an odd number of row groups: the last tile of two overlaps; shares without a whole chunk
    layer = Layer(448, 352, 4).to(device)
    actual, expected = run(layer, *inputs(device, 5, 448, 4), config=config)
    assert relative_error(actual, expected) < SAME_ARITHMETIC


@pytest.mark.parametrize("tokens", [1, 2, 16, 128, 1024, 8192])
@pytest.mark.parametrize("fp8", [False, True])
def test_configs_meet_the_tensor_cores_least_width(tokens, fp8):
    for experts in (4, 8, 32, 128):
        config = choose_config(tokens, ExpertShape(4, experts, experts, 2880, 2880), fp8)
        for tile in (config.gate_up, config.down):
            assert config.rows * (1 if fp8 else 2) >= 16 and tile.stages >= 2


# gpt-oss-20b, 120b, and 120b on two ranks
B20, B120, RANK = (
    ExpertShape(4, experts, experts, 2880, inter)
    for experts, inter in ((32, 2880), (128, 2880), (128, 1440))
)


@pytest.mark.parametrize(
    ("shape", "tokens", "tile"),
    [
        (B20, 5, Tile(2, 1, 4)),
        (B20, 9, Tile(2, 1, 4)),
        (B20, 10, Tile(1, 2, 3)),
        (B20, 17, Tile(1, 2, 3)),
        (B20, 18, Tile(1, 1, 4)),
        (B20, 32, Tile(1, 1, 4)),
        (B20, 33, Tile(1, 2, 3)),
        (B20, 96, Tile(1, 2, 3)),
        (B120, 6, Tile(2, 1, 4)),
        (B120, 8, Tile(1, 2, 3)),
        (B120, 16, Tile(1, 1, 4)),
        (RANK, 8, Tile(1, 1, 4)),
        (RANK, 200, Tile(1, 1, 4)),
        # a half of the experts gets a half of the pairs
        (ExpertShape(4, 64, 128, 2880, 2880), 12, Tile(2, 1, 4)),
    ],
)
def test_w2_of_few_pairs_fills_whole_waves(shape, tokens, tile):
    assert choose_config(tokens, shape, False, True).down == tile


@pytest.mark.parametrize(
    ("shape", "tokens", "tile"),
    [
        (B20, 1, Tile(1, 4, 3)),
        (B20, 2, Tile(1, 2, 6)),
        (B20, 3, Tile(1, 2, 5)),
        (B20, 4, Tile(1, 2, 4)),
        (B20, 5, Tile(1, 2, 5)),
        (B20, 32, Tile(1, 2, 5)),
        (B120, 1, Tile(1, 4, 3)),
        (B120, 2, Tile(1, 2, 6)),
        (B120, 64, Tile(1, 2, 4)),
        (RANK, 1, Tile(1, 4, 3)),
        (RANK, 3, Tile(1, 2, 4)),
        (RANK, 4, Tile(1, 2, 6)),
        (RANK, 8, Tile(1, 2, 4)),
        (RANK, 32, Tile(1, 2, 5)),
    ],
)
def test_w13_of_few_pairs_fills_whole_waves(shape, tokens, tile):
    assert choose_config(tokens, shape, False, True).gate_up == tile


@pytest.mark.parametrize(
    ("tokens", "wave"),
    [(2, 0), (3, 528), (4, 660), (5, 528), (8, 528), (16, 528), (17, 0), (32, 0), (48, 0)],
)
def test_w13_asks_for_the_next_wave_as_long_as_that_is_faster(tokens, wave):
    assert choose_config(tokens, B20, False, True).next_wave == wave
    assert choose_config(tokens, B20, True, True).next_wave == 0


@triton.jit
def _groups_kernel(weight, tiles, own, ahead, WAVE: tl.constexpr, P: tl.constexpr):
    """Offsets of each program's weights, and of those of the program WAVE places behind, or -1."""
    at = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    expert = tl.load(tiles + tl.program_id(1) * 3).to(tl.int64)
    packed, _ = of_group(weight, weight, expert, first_group(P), P)
    tl.store(own + at, tl.where(expert >= 0, packed.to(tl.int64) - weight.to(tl.int64), -1))
    packed, runs = group_of_next_wave(weight, tiles, WAVE, P)
    tl.store(ahead + at, tl.where(runs, packed.to(tl.int64) - weight.to(tl.int64), -1))


@pytest.mark.parametrize(("groups", "wave"), [(1, 7), (2, 4), (2, 11), (1, 60)])
def test_the_weights_of_the_next_wave(device, groups, wave):
    """An odd number of groups, of which the last is computed twice; two tiles have no expert."""
    experts, rows, hidden = 6, 9 * 64, 128
    weight = torch.zeros(experts, rows, hidden // 2, dtype=torch.uint8, device=device)
    tiles = torch.tensor([[e, 0, 1] for e in (0, 2, 2, 5, -1, -1)], device=device).int()
    product = Product(rows, hidden, 8, levels=2, groups=groups, mxfp4=True)
    programs = (-(-9 // groups), len(tiles))
    own, ahead = (torch.full((programs[0] * programs[1],), -2, device=device) for _ in range(2))
    _groups_kernel[programs](weight, tiles, own, ahead, WAVE=wave, P=product)
    nowhere = torch.full((min(wave, len(own)),), -1, device=device)
    assert torch.equal(ahead, torch.cat((own[wave:], nowhere)))
    assert own.max() == (5 * 9 + 9 - groups) * 64 * hidden // 2


@pytest.mark.parametrize(
    ("tokens", "inter", "shares"),
    [(1, 2880, 6), (1, 1440, 3), (1, 4096, 4), (1, 64, 1), (4, 2880, 4), (4, 384, 3)],
)
def test_no_share_of_few_pairs_is_empty(tokens, inter, shares):
    down = choose_config(tokens, ExpertShape(4, 32, 32, 2880, inter), False).down
    assert down.shares == shares
    steps = -(-inter // (128 * down.depth))
    assert (shares - 1) * -(-steps // shares) < steps


def test_silu_has_a_scale_for_each_row(device, monkeypatch):
    # warm-up compiles for numbers of tokens
    seen = []
    policy = "oss_fused.kernels.moe.encode.activation_policy"
    monkeypatch.setattr(policy, lambda rows: seen.append(rows) or "")
    layer = Layer(64, 64, 4).to(device)
    x, logits = inputs(device, 4, 64, 4)
    actual, expected = run(layer, 8 * x, logits, activation="silu")
    assert relative_error(actual, expected) < SAME_ARITHMETIC
    assert set(seen) == {4}


def test_fp8_activations(device):
    layer = Layer(128, 96, 4).to(device)
    actual, expected = run(layer, *inputs(device, 6, 128, 4), fp8=6)
    assert relative_error(actual, expected) < FP8_STEP


def test_float16_keeps_nine_bits(device):
    layer = Layer(64, 32, 4).to(device)
    x, logits = inputs(device, 3, 64, 4)
    actual, expected = run(layer, x.half(), logits)
    assert actual.dtype == torch.float16
    assert relative_error(actual, expected) < SAME_ARITHMETIC


def test_expert_map_and_nan_rows(device):
    layer = Layer(64, 32, 4).to(device)
    x, logits = inputs(device, 5, 64, 8)
    expert_map = torch.tensor([-1, 0, -1, 1, 2, -1, 3, -1], dtype=torch.int32, device=device)
    x[1, 7] = float("nan")
    x[2, 9] = float("inf")
    logits[3] = float("nan")
    logits[0, :4] = torch.tensor([9.0, -9, 8, -9])  # experts that are not here
    actual, expected = run(layer, x, logits, expert_map=expert_map)
    assert (actual[0] == 0).all() and actual[4].isfinite().all()
    assert torch.equal(actual.isnan().all(1), expected.isnan().all(1))
    keep = ~expected.isnan().any(1)
    assert relative_error(actual[keep], expected[keep]) < SAME_ARITHMETIC


def test_no_tokens_and_float32(device):
    layer = Layer(64, 32, 4).to(device)
    x, logits = inputs(device, 2, 64, 4)
    actual, _ = run(layer, x[:0], logits[:0])
    assert actual.shape == (0, 64)
    with pytest.raises(UnsupportedDtypeError, match="x.dtype"):
        run(layer, x.float(), logits)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 33, 130, 700])
@pytest.mark.parametrize("fp8", [-1, 0])
def test_gpt_oss_shape_and_determinism(device, tokens, fp8):
    layer = Layer(2880, 2880, 8).to(device)
    x, logits = inputs(device, tokens, 2880, 8)
    actual, expected = run(layer, 0.05 * x, logits, top_k=4, fp8=fp8)
    again = run_kernels(layer, 0.05 * x, logits, top_k=4, fp8=fp8)
    assert torch.equal(actual, again)
    # for many tokens each expert's share is rounded to bfloat16 before the shares are added
    exact = SAME_ARITHMETIC if tokens < 700 else 2 * SAME_ARITHMETIC
    assert relative_error(actual, expected) < (FP8_STEP if fp8 == 0 else exact)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "stream", "large"])
@pytest.mark.parametrize("fp8", [-1, 0])
def test_many_tokens_beyond_the_clamps(device, fp8, kind):
    layer = Layer(256, 128, 4).to(device)
    x, logits = inputs(device, 1500, 256, 4)
    # so small a layer takes neither by itself
    config = None
    if kind is not None:
        if not runs_gluon(device):
            pytest.skip("needs a Hopper GPU and Gluon")
        tile, rows = Tile(1, 1, 4), {"stream": 64, "large": 128}[kind]
        config = MoEConfig(2 * rows if fp8 == 0 else rows, tile, tile, False, **{kind: True})
    actual, expected = run(layer, 20 * x, logits, fp8=fp8, config=config)
    assert relative_error(actual, expected) < (FP8_STEP if fp8 == 0 else 2 * SAME_ARITHMETIC)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden,inter", [(2880, 1440), (4096, 1536), (256, 128)])
@pytest.mark.parametrize("fp8", [-1, 0])
def test_many_tokens_of_other_shapes_and_a_part_of_the_experts(device, hidden, inter, fp8):
    layer = Layer(hidden, inter, 4).to(device)
    x, logits = inputs(device, 1500, hidden, 8)
    expert_map = torch.tensor([-1, 0, -1, 1, 2, -1, 3, -1], dtype=torch.int32, device=device)
    actual, expected = run(layer, 0.05 * x, logits, expert_map=expert_map, fp8=fp8)
    assert relative_error(actual, expected) < (FP8_STEP if fp8 == 0 else 2 * SAME_ARITHMETIC)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "fp8", "kind"),
    [
        (32, -1, "stream"),
        (64, -1, "stream"),
        (64, -1, "narrow"),
        (128, 0, "narrow"),
        (64, -1, "large"),
        (128, -1, "large"),
        (128, -1, "few_tiles"),
        (128, 0, "few_tiles"),
        (256, 0, "large"),
        (256, 0, "few_tiles"),
    ],
)
@pytest.mark.parametrize("hidden,inter", [(192, 160), (128, 224), (448, 416), (2880, 2880)])
def test_tiles_of_sorted_codes(device, hidden, inter, rows, fp8, kind):
    """Full tiles and those of few tokens, whole chunks of K in an odd and an even number."""
    if not runs_gluon(device):
        pytest.skip("needs a Hopper GPU and Gluon")
    # the first expert gets the token with NaN, the second none
    counts = torch.tensor([1, 0, 15, 17, 25, 33, 49, 65, rows, rows + 100])
    layer = layer_of(hidden, inter, len(counts)).to(device)
    x, logits = inputs(device, int(counts.sum()), hidden, len(counts))
    owner = torch.arange(len(counts)).repeat_interleave(counts).to(device)
    logits[torch.arange(len(owner), device=device), owner] += 50
    x[0, 5] = float("nan")
    stream = kind in ("stream", "narrow")
    kinds = {kind: True, "stream": stream, "large": not stream}
    config = MoEConfig(rows, Tile(1, 1, 4), Tile(1, 1, 4), False, **kinds)
    actual, expected = run(layer, 0.05 * x, logits, top_k=1, fp8=fp8, config=config)
    assert actual[0].isnan().all()
    for _ in range(3):
        again = run_kernels(layer, 0.05 * x, logits, top_k=1, fp8=fp8, config=config)
        assert torch.equal(actual[1:], again[1:])
    exact = SAME_ARITHMETIC if stream else 2 * SAME_ARITHMETIC
    assert relative_error(actual[1:], expected[1:]) < (FP8_STEP if fp8 == 0 else exact)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "fp8", "kernel"), [(128, -1, "stream"), (300, 0, "stream"), (1000, -1, "large")]
)
@pytest.mark.parametrize(("hidden", "inter"), [(448, 416), (2880, 2880)])
def test_products_of_a_routing_repeat(device, hidden, inter, tokens, fp8, kernel):
    """Programs take units from a counter, which the last one sets back."""
    if not runs_gluon(device):
        pytest.skip("needs a Hopper GPU and Gluon")
    layer = layer_of(hidden, inter, 8).to(device)
    x, logits = inputs(device, tokens, hidden, 8)
    levels = 1 if fp8 == 0 else 2
    config = MoEConfig(128 // levels, Tile(1, 1, 4), Tile(1, 1, 4), False, **{kernel: True})
    routing = encode(0.05 * x, logits, 2, True, None, 8, levels, config)
    first = (*layer.packed13, layer.b13, hidden, 2, "swigluoai", x.dtype, levels)
    second = (*layer.packed2, layer.b2, inter, x.dtype, config, False)
    expected = None
    for _ in range(3):
        act, act_scale = gate_up(routing, *first, config)
        rows = down(routing, act, act_scale, *second)
        expected = rows if expected is None else expected
        assert torch.equal(rows, expected) and rows.isfinite().all()
        tiles = int((routing.tiles[:, 0] >= 0).sum())
        assert routing.progress.tolist() == [tiles, 0, 0]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_sizes_of_zero(device, backend):
    """A rank may have no experts; without H or I there is no layer."""
    run = get_kernel(backend, "moe_mxfp4")

    def call(experts, inter, hidden, *rest):
        return run(
            torch.ones(3, hidden, dtype=torch.bfloat16, device=device),
            torch.zeros(3, 4, device=device),
            torch.zeros(experts, 2 * inter, hidden // 2, dtype=torch.uint8, device=device),
            torch.zeros(experts, inter // 32, -(-hidden // 128), 64, dtype=torch.int32).to(device),
            None,
            torch.zeros(experts, hidden, inter // 2, dtype=torch.uint8, device=device),
            torch.zeros(experts, hidden // 64, -(-inter // 128), 64, dtype=torch.int32).to(device),
            *(None, 2, True, *rest),
        )

    for sizes in ((0, 32, 64), (4, 0, 64), (4, 32, 0)):
        with pytest.raises(ShapeMismatchError, match=r"w13.shape=.*I and H of at least 1"):
            call(*sizes)
    out = call(0, 32, 64, torch.full((4,), -1, dtype=torch.int32, device=device))
    assert out.shape == (3, 64) and not out.any()

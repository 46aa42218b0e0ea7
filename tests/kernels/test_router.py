# SPDX-License-Identifier: MIT
"""Routing kernels against the reference and plain sorting."""

from __future__ import annotations

import functools
from contextlib import contextmanager

import pytest
import torch

from oss_fused.errors import ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels.op import get_kernel

pytest.importorskip("triton")
from oss_fused.kernels.moe import config
from oss_fused.kernels.moe import router as router_module
from oss_fused.kernels.moe.encode import empty_codes, encode_rows
from oss_fused.kernels.moe.router import route
from oss_fused.kernels.moe.router_norm import add_rms_norm_router

reference = get_kernel("torch", "moe_route")


@pytest.fixture(params=["torch", "triton"])
def moe_route(request):
    return get_kernel(request.param, "moe_route")


@pytest.mark.parametrize("renormalize", [True, False])
# logits of hundreds: their exponentials are beyond float32
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "spread"),
    [(1, 32, 4, 1), (5, 130, 3, 1), (70, 128, 4, 1), (3, 32, 4, 300)],
)
def test_topk_of_random_logits(moe_route, device, tokens, experts, top_k, spread, renormalize):
    torch.manual_seed(tokens)
    logits = (spread * torch.randn(tokens, experts, device=device)).bfloat16()
    weights, ids = moe_route(logits, top_k, renormalize)
    values = logits.float().softmax(-1)
    if renormalize:
        values = values / values.topk(top_k).values.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, values.topk(top_k).values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(values.gather(1, ids.long()), weights, rtol=1e-5, atol=1e-6)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32


def test_ties_infinities_and_nan(moe_route, device):
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [[1.0, 2.0, 2.0, 1.0], [-inf, -inf, -inf, 0.0], [0.0, -0.0, -1.0, -2.0], [0.0, nan, 1, 2]],
        device=device,
    )
    weights, ids = moe_route(logits, 2, True)
    assert ids[:3].tolist() == [[1, 2], [3, 0], [0, 1]]
    assert weights[1].tolist() == [1.0, 0.0]
    # ids stay valid, the weights say that the row is lost
    assert set(ids[3].tolist()) <= {0, 1, 2, 3} and weights[3].isnan().all()


@pytest.mark.parametrize("tokens", [1, 300])
def test_the_lowest_of_equal_experts_come_first(moe_route, device, tokens):
    """As a stable sort orders them; most logits here have equals, in the first row all."""
    logits = torch.randint(-2, 3, (tokens, 32), generator=torch.Generator().manual_seed(1)).float()
    logits[0] = 1.5
    _, ids = moe_route(logits.to(device), 4, True)
    assert torch.equal(
        ids.cpu().long(), logits.sort(dim=-1, descending=True, stable=True)[1][:, :4]
    )


def test_no_tokens_and_bad_arguments(moe_route, device):
    weights, ids = moe_route(torch.empty(0, 8, device=device), 2, True)
    assert weights.shape == ids.shape == (0, 2)
    with pytest.raises(ShapeMismatchError, match="top_k=9"):
        moe_route(torch.zeros(1, 8, device=device), 9, True)
    with pytest.raises(ShapeMismatchError, match="router_logits"):
        moe_route(torch.zeros(8, device=device), 1, True)
    with pytest.raises(UnsupportedDtypeError, match="router_logits"):
        moe_route(torch.zeros(1, 8, dtype=torch.int32, device=device), 1, True)


@contextmanager
def deterministic():
    """What ``torch.empty`` gives is filled with a number that is no count."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "rows"), [(1, 32, 2), (9, 8, 8), (40, 128, 2), (130, 32, 16)]
)
def test_order_place_and_tiles(device, tokens, experts, rows, mapped):
    torch.manual_seed(tokens)
    top_k = 4
    logits = torch.randn(tokens, experts, device=device)
    local, expert_map = experts, None
    if mapped:
        local = experts // 2
        expert_map = torch.full((experts,), -1, dtype=torch.int32, device=device)
        expert_map[local:] = torch.arange(local, dtype=torch.int32, device=device)
    with deterministic():
        routing = route(logits, top_k, True, expert_map, local, rows)
    ids = reference(logits, top_k, True)[1].flatten()
    if expert_map is not None:
        ids = expert_map[ids.long()]
    # pairs of an expert in their own order, those of other ranks nowhere
    expected = [p for e in range(local) for p in (ids == e).nonzero().flatten().tolist()]
    assert routing.order[: len(expected)].tolist() == expected
    place = torch.full_like(ids, -1)
    place[expected] = torch.arange(len(expected), dtype=torch.int32, device=device)
    assert torch.equal(routing.place, place)
    tiles, at = [], 0
    for e in range(local):
        count = int((ids == e).sum())
        tiles += [[e, at + n, min(rows, count - n)] for n in range(0, count, rows)]
        at += count
    assert routing.tiles[: len(tiles)].tolist() == tiles
    assert (routing.tiles[len(tiles) :, 0] == -1).all()
    assert routing.progress.tolist() == [len(tiles), 0, 0]


def decoded(codes: torch.Tensor, scale: torch.Tensor, width: int) -> torch.Tensor:
    """Undo encode_rows: levels added, columns in their order."""
    column = torch.arange(width, device=codes.device)
    within = column % 128
    position = (
        column
        - within
        + within // 8 % 4 * 32
        + within // 4 % 2 * 16
        + within // 32 * 4
        + within % 4
    )
    levels = (
        codes.float() * torch.tensor([1.0, 1 / 16], device=codes.device)[: codes.shape[1], None]
    )
    return levels.sum(1)[:, position] * scale[:, None]


@pytest.mark.parametrize("width", [32, 160, 2880])
def test_two_levels_hold_bfloat16_exactly(device, width):
    torch.manual_seed(width)
    x = torch.randn(5, width, device=device).bfloat16()
    x[1] *= 1e-30
    x[2] = 0
    x[3, :4] = 1000.0
    codes, scale = encode_rows(x, 2)
    back = decoded(codes, scale, width)
    # 2^-12 of the row's largest value is still exact; smaller ones err by 2^-21 of it at most
    large = x.float().abs() >= x.float().abs().amax(1, keepdim=True) * 2.0**-12
    assert torch.equal(back[large], x.float()[large])
    assert ((back - x.float()).abs() <= x.float().abs().amax(1, keepdim=True) * 2.0**-20).all()
    assert (codes[:, :, -(-width // 128) * 128 :].float() == 0).all()


@pytest.mark.parametrize("levels", [1, 2])
def test_rows_in_the_places_of_sorted_pairs(device, levels):
    x = torch.randn(3, 96, device=device).bfloat16()
    # two pairs of another rank: what lies behind the others is not written
    place = torch.tensor([1, -1, 3, 2, -1, 0], dtype=torch.int32, device=device)
    codes, scale = encode_rows(x, levels, place=place)
    assert codes.shape == (6, levels, 128)
    expected = encode_rows(x, levels)
    of_token = [2, 0, 1, 1]
    assert torch.equal(codes[:4].view(torch.uint8), expected[0][of_token].view(torch.uint8))
    assert torch.equal(scale[:4], expected[1][of_token])


# more pairs than are read at once in the second; experts that are not here in the last of each
PAIRED = [(97, 32, 4, False), (130, 32, 8, True)]
LARGE = [
    (129, 7, 1, False),
    (129, 1, 1, False),
    (300, 128, 8, True),
    (1000, 32, 4, False),
    (1000, 128, 4, True),
    (700, 256, 2, True),
]
PAIRED += [pytest.param(*case, marks=pytest.mark.gpu) for case in LARGE]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k", "mapped"), PAIRED)
def test_codes_in_the_order_of_the_pairs(
    device, monkeypatch, tokens, experts, top_k, mapped, together
):
    """Both forms of the launches behind the top-k, with ties and a row of NaN."""
    monkeypatch.setattr(config, "_PLACED_WITH_CODES", 1024 if together else 0)
    assert not config.routing_block(tokens, experts, False)[1]
    if together:
        monkeypatch.setattr(router_module, "place", None)
        monkeypatch.setattr(router_module, "encode_rows", None)
    torch.manual_seed(tokens)
    logits = torch.randint(-3, 4, (tokens, experts), device=device).bfloat16()
    logits[tokens // 2, 0] = float("nan")
    x = torch.randn(tokens, 40, device=device).bfloat16()
    local, expert_map = experts, None
    if mapped:
        # the local order is not the global one
        local = experts - experts // 3
        expert_map = torch.full((experts,), -1, dtype=torch.int32, device=device)
        expert_map[experts // 3 :] = torch.arange(local, device=device).flip(0).int()
    levels = 1 if mapped else 2
    arguments = (logits, top_k, True, expert_map, local, 16, x, levels)
    routing = route(*arguments, permute=not mapped, by_pair=True)
    ids = routing.topk_ids.flatten()
    assert torch.equal(routing.topk_ids, reference(logits, top_k, True)[1])
    here = ids >= 0 if expert_map is None else expert_map[ids.long()] >= 0
    order = torch.where(here, ids, experts).sort(stable=True).indices[: int(here.sum())]
    place = torch.full_like(ids, -1)
    place[order] = torch.arange(len(order), dtype=torch.int32, device=device)
    assert torch.equal(routing.order[: len(order)].long(), order)
    assert torch.equal(routing.place, place)
    tiles, at = [], 0
    for expert in range(experts):
        count = int((ids[here] == expert).sum())
        mine = expert if expert_map is None else int(expert_map[expert])
        tiles += [[mine, at + n, min(16, count - n)] for n in range(0, count, 16)]
        at += count
    assert routing.tiles[: len(tiles)].tolist() == tiles
    assert (routing.tiles[len(tiles) :, 0] == -1).all()
    assert routing.progress.tolist() == [len(tiles), 0, 0]
    codes, scale = encode_rows(x, levels, permute=not mapped)
    expected = codes.view(torch.uint8)[order // top_k]
    assert torch.equal(routing.codes[: len(order)].view(torch.uint8), expected)
    assert torch.equal(routing.scale[: len(order)], scale[order // top_k])


def test_tiles_stay_in_their_room_whatever_the_map_holds(device):
    """A map that means one expert eight times: no more tiles are written than there are."""
    logits = torch.randn(2, 8, device=device)
    expert_map = torch.zeros(8, dtype=torch.int32, device=device)
    routing = router_module._empty_routing(logits, 4, 1)
    behind = torch.full((33,), 77, dtype=torch.int32, device=device)
    routing = routing._replace(tiles=behind[:3].view(1, 3))
    shape = router_module.Shape(8, 16, 4, 4, 8)
    into = (routing, None, router_module.NO_CODES)
    router_module._launch(logits, expert_map, into, shape, True, True, True)
    assert (behind[3:] == 77).all()
    assert routing.tiles[0, 0] == 0


@pytest.mark.parametrize(
    ("experts", "last"), [(4, 256), (32, 128), (64, 128), (128, 64), (256, 32), (10000, 1)]
)
def test_tokens_of_one_program_where_codes_are_stored(experts, last):
    assert config.routing_block(last, experts, True) == (last, True)
    block, single = config.routing_block(last + 1, experts, True)
    assert not single and block == min(16, last)
    assert config.routing_block(769, experts, True) == (min(32, last), False)


def test_who_places_and_encodes_in_one_launch():
    assert [config.placing_chunk(tokens, 4) for tokens in (97, 129, 257, 768)] == [
        *(512, 1024, 2048, 2048)
    ]
    assert config.placing_chunk(769, 4) == 0
    # the comparisons of a token's ids with a chunk stay in registers
    assert config.placing_chunk(700, 8) == 1024 and config.placing_chunk(700, 64) == 128


def test_one_level_is_the_token_quantisation(device):
    x = torch.randn(4, 96, device=device).bfloat16()
    x[1] = 0
    codes, scale = encode_rows(x, 1)
    expected, expected_scale = get_kernel("torch", "quantize_fp8")(x, None, "token")
    assert torch.equal(scale, expected_scale.flatten())
    back = decoded(codes, scale, 96)
    torch.testing.assert_close(back, expected.float() * expected_scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poisoned_rows_decode_to_nan(device, poison, levels):
    x = torch.ones(2, 64, device=device).bfloat16()
    x[0, 5] = poison
    codes, scale = encode_rows(x, levels)
    assert scale[0].isnan() or scale[0].isinf()
    assert torch.equal(decoded(codes, scale, 64)[1], x[1].float())


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("tokens", [0, 3, 70])
def test_norm_and_router_in_one_launch(device, backend, tokens):
    torch.manual_seed(tokens)
    experts, hidden = 10, 160
    x, residual = torch.randn(2, tokens, hidden, device=device).bfloat16()
    gain, bias = torch.rand(hidden, device=device), torch.randn(experts, device=device)
    gain, bias = gain.bfloat16(), bias.bfloat16()
    gate = torch.randn(experts, hidden, device=device).bfloat16()
    run = get_kernel(backend, "add_rms_norm_router")
    for earlier, shift in ((residual, bias), (None, None)):
        normed, added, logits = run(x, earlier, gain, 1e-5, gate, shift)
        _, _, expected_added, expected, _ = get_kernel("torch", "add_rms_norm_quant")(
            x, earlier, gain, 1e-5, None
        )
        assert torch.equal(added, expected_added)
        # the sum of squares may be ordered differently: one step of bfloat16
        torch.testing.assert_close(normed, expected, rtol=2**-7, atol=0)
        plain = normed.float() @ gate.float().T + (0 if shift is None else shift.float())
        torch.testing.assert_close(logits.float(), plain, rtol=2**-7, atol=0.05)


@pytest.mark.parametrize(("experts", "biased"), [(10, True), (32, False), (64, True)])
def test_expected_logits_are_those_of_the_residual_alone(device, experts, biased):
    torch.manual_seed(experts)
    hidden = 160
    x, residual = torch.randn(2, 1, hidden, device=device).bfloat16()
    gain = torch.randn(hidden, device=device).bfloat16()
    gate = torch.randn(experts, hidden, device=device).bfloat16()
    bias = torch.randn(experts, device=device).bfloat16() if biased else None
    # what lies behind them stays
    scratch = torch.full((experts + 1,), 7.0, device=device)
    layer = {"weight": gain, "eps": 1e-5, "gate": gate, "gate_bias": bias}
    router = functools.partial(add_rms_norm_router, **layer)
    plain = router(x, residual, prefetch_weights=True)
    coded = empty_codes(x, 1, 2)
    found = router(x, residual, prefetch_weights=True, codes=coded, expected=scratch[:experts])
    assert all(torch.equal(a, b) for a, b in zip(found, plain))
    _, _, expected = router(residual, None)
    assert torch.equal(scratch[:experts], expected[0].float()) and scratch[-1] == 7
    assert not torch.equal(expected, found[2])


def test_norm_and_router_refuse_what_does_not_fit(device):
    x, gate = torch.zeros(2, 64, device=device), torch.zeros(4, 64, device=device)
    run = get_kernel("torch", "add_rms_norm_router")
    with pytest.raises(ShapeMismatchError, match="gate"):
        run(x, None, torch.ones(64, device=device), 1e-5, gate[:, :32], None)
    with pytest.raises(UnsupportedDtypeError, match="gate"):
        run(x, None, torch.ones(64, device=device), 1e-5, gate.bfloat16(), None)

# SPDX-License-Identifier: MIT
"""Kernels written in Gluon: no interpreter runs them, so a Hopper GPU has to."""

import pytest
import torch

import oss_fused.kernels  # noqa: F401
from oss_fused.errors import TritonKernelError
from oss_fused.kernels.gemm.triton import KERNELS, kernels
from oss_fused.kernels.launch import runs_gluon
from oss_fused.kernels.mlp.reference import activate
from oss_fused.kernels.op import get_kernel

ops = torch.ops.oss_fused
FP8 = torch.float8_e4m3fn
CUDA = torch.device("cuda")
CONFIGS = [
    ("stream", {"block_m": 8, "block_k": 128, "ctas": 2}),
    ("stream", {"block_m": 16, "block_k": 256, "ctas": 1}),
    ("stream", {"block_m": 64, "block_n": 128, "block_k": 128, "ctas": 2}),
    ("stream", {"block_m": 8, "block_k": 512, "ctas": 1, "slices": 2}),
    ("stream", {"block_m": 16, "block_k": 128, "ctas": 2, "slices": 4}),
    *(("cooperative", {"columns": columns}) for columns in (128, 160, 192, 224, 256)),
    ("pingpong", {}),
]


def test_without_hopper_only_portable_kernels_run():
    assert not runs_gluon(torch.device("cpu"))
    assert kernels(torch.device("cpu")) == KERNELS


@pytest.mark.parametrize("columns", [128, 256, 512])
def test_boxes_of_every_width_have_a_layout(columns):
    """On any machine: descriptors are made on the host, and the kernels' boxes differ in width."""
    warp_pipeline = pytest.importorskip("oss_fused.kernels.pipeline")
    codes = torch.zeros(64, 512, dtype=torch.uint8).view(FP8)
    assert warp_pipeline.descriptor(codes, 64, columns).layout.swizzle_byte_width == 128


@pytest.mark.parametrize(
    ("columns", "widths"), [(256, [256]), (192, [128, 64]), (224, [128, 64, 32])]
)
def test_parts_of_a_tile_lie_side_by_side(columns, widths):
    pipeline = pytest.importorskip("oss_fused.kernels.pipeline")
    assert pipeline.part_widths(columns) == widths
    starts = [pipeline.part_start(columns, part) for part in range(len(widths))]
    assert starts == [0, 128, 192][: len(widths)]


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        ({"columns": 240}, r"columns=240: .* at most 3 powers of two"),
        ({"columns": 0}, r"columns=0: .* at most 3 powers of two"),
        ({"rows": 256, "columns": 256}, r"rows=256, columns=256: .* two stages"),
    ],
)
def test_a_tile_that_no_program_holds_is_refused(tile, message):
    persistent = pytest.importorskip("oss_fused.kernels.gemm.persistent")
    codes, scale = torch.zeros(4, 16).to(FP8), torch.ones(4, 1)
    out = torch.empty(4, 4, dtype=torch.bfloat16)
    with pytest.raises(TritonKernelError, match=message):
        persistent.gemm_cooperative(codes, codes, scale, scale, None, out, **tile)


@pytest.mark.parametrize(
    ("stages", "early"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (9, 7), (12, 9)]
)
def test_a_quarter_of_a_deep_ring_comes_behind_the_wait(stages, early):
    pipeline = pytest.importorskip("oss_fused.kernels.pipeline")
    assert pipeline.early_stages(stages) == early


@pytest.fixture
def hopper():
    if not runs_gluon(CUDA):
        pytest.skip("needs a Hopper GPU and Gluon")


def operands(m, n, k, rows=True):
    a, b = (torch.randn(*shape, device=CUDA).to(FP8) for shape in ((m, k), (n, k)))
    a_scale = torch.rand(m if rows else 1, 1, device=CUDA) + 0.5
    b_scale = torch.rand(n if rows else 1, 1, device=CUDA) + 0.5
    return a, b, a_scale if rows else a_scale[0], b_scale if rows else b_scale[0]


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize("name,config", CONFIGS)
@pytest.mark.parametrize(
    "m,n,k",
    [
        (1, 64, 16),
        (5, 100, 272),
        (33, 257, 2880),
        (130, 321, 144),
        (700, 6200, 1040),
        # several tiles a CTA, in a ring that does not divide their K blocks
        (3000, 2880, 2880),
    ],
)
@pytest.mark.parametrize("rows", [True, False])
def test_gemm(hopper, name, config, m, n, k, rows):
    a, b, a_scale, b_scale = operands(m, n, k, rows)
    bias = torch.randn(n, device=CUDA, dtype=torch.bfloat16)
    # rows of a wider tensor: the descriptors take the stride
    a = torch.cat([a.view(torch.uint8)] * 2, 1).view(FP8)[:, :k]
    for dtype, given in ((torch.bfloat16, None), (torch.float16, bias)):
        out = torch.full((m, n), float("nan"), device=CUDA, dtype=dtype)
        kernels(CUDA)[name](a, b, a_scale, b_scale, given, out, **config)
        want = (a.double() @ b.double().t()) * a_scale.double() * b_scale.double().view(1, -1)
        want = want if given is None else want + given.double()
        assert relative_error(out, want) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("name,config", [CONFIGS[i] for i in (1, 3, 4, -2, -1)])
def test_nan_stays_in_its_row(hopper, name, config):
    a, b, a_scale, b_scale = operands(40, 128, 2048)
    a.view(torch.uint8)[3, 7] = 0x7F
    out = torch.empty(40, 128, device=CUDA, dtype=torch.bfloat16)
    kernels(CUDA)[name](a, b, a_scale, b_scale, None, out, **config)
    assert out[3].isnan().all() and out.isnan().sum() == 128


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("slices", [2, 4])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 2880, 4096), (5, 100, 272), (8, 4096, 14336)])
def test_slices_of_two_levels(hopper, slices, m, n, k, dtype):
    """K that the slices do not divide, and a last slice of which little is left."""
    levels, b, _, b_scale = operands(2 * m, n, k)
    a_scale, bias = torch.rand(m, 1, device=CUDA) + 0.5, torch.randn(n, device=CUDA)
    config = {"block_m": 16, "block_k": 512, "ctas": 1, "slices": slices, "levels": 2}
    out = torch.full((m, n), float("nan"), device=CUDA, dtype=dtype)
    kernels(CUDA)["stream"](levels, b, a_scale, b_scale, bias, out, **config)
    values = levels.double()[::2] + levels.double()[1::2] / 16
    want = values @ b.double().t() * a_scale.double() * b_scale.double().view(1, -1) + bias
    # the tensor cores keep 14 bits of a sum
    assert relative_error(out, want) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("config", [CONFIGS[i][1] for i in (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize(("m", "n", "k"), [(5, 100, 272), (33, 257, 2880), (128, 4096, 14336)])
def test_parts_of_k_in_sums_of_their_own(hopper, config, splits, m, n, k):
    """Parts that K does not fill, and the bias in one of them; a NaN stays in its row and part."""
    a, b, a_scale, b_scale = operands(m, n, k)
    bias = torch.randn(n, device=CUDA)
    want = (a.double() @ b.double().t()) * a_scale.double() * b_scale.double().view(1, -1) + bias
    out = torch.full((splits, m, n), float("nan"), device=CUDA)
    kernels(CUDA)["stream"](a, b, a_scale, b_scale, bias, out, **config)
    assert relative_error(out.double().sum(0), want) < 5e-3
    a.view(torch.uint8)[2, k - 1] = 0x7F
    kernels(CUDA)["stream"](a, b, a_scale, b_scale, bias, out, **config)
    bad = out.isnan().flatten(0, 1).any(1)
    assert bad.sum() == 1 and bad.view(splits, m)[:, 2].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "k", "config"),
    [
        (2880, 4096, {"block_k": 512, "ctas": 1, "slices": 2, "levels": 2}),
        (4096, 4096, {"block_k": 256, "ctas": 1, "levels": 2}),
        (4096, 14336, {"block_k": 512, "ctas": 1, "slices": 2}),
        (100, 16384, {"block_k": 256, "ctas": 1, "slices": 4, "levels": 2}),
        (72, 5008, {"block_k": 128, "ctas": 2}),
        (200, 528, {"block_k": 128, "ctas": 1, "slices": 2}),
        (64, 16, {"block_n": 128, "ctas": 1, "levels": 2}),
    ],
)
def test_a_row_that_the_product_quantises(hopper, n, k, config, dtype):
    """As quantised before: parts, copies and slices of a row; 0, NaN and Inf."""
    row = (torch.randn(1, k, device=CUDA) * torch.linspace(0.1, 4, k, device=CUDA)).to(dtype)
    _, b, _, b_scale = operands(1, n, k)
    bias = torch.randn(n, device=CUDA)
    stream, levels = kernels(CUDA)["stream"], config.get("levels", 1)
    for change in (None, 0.0, float("nan"), float("inf")):
        if change is not None:
            row[0, k // 3 :: 7] = change
        if change == 0.0:
            row.zero_()
        out = torch.full((1, n), float("nan"), device=CUDA, dtype=dtype)
        stream(row, b, None, b_scale, bias, out, block_m=8, **config)
        if not row.isfinite().all():
            assert out.isnan().all()
            continue
        linear = get_kernel("torch", "fp8_linear")
        want = linear(row, b, b_scale, None, bias, False, levels - 1)
        torch.testing.assert_close(out, want, rtol=2**-7, atol=5e-3 * want.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize(("k", "slices"), [(992, 1), (4096, 2), (5120, 4)])
def test_codes_of_a_row_that_the_product_quantises(hopper, k, slices, levels):
    """A weight of ones on its diagonal: each result is the value of one column's code."""
    row = torch.randn(1, k, device=CUDA, dtype=torch.bfloat16)
    weight = torch.eye(k, device=CUDA).to(FP8)
    out, one = torch.empty_like(row), torch.ones(1, device=CUDA)
    config = {"block_m": 8, "ctas": 1, "slices": slices, "levels": levels}
    kernels(CUDA)["stream"](row, weight, None, one, None, out, **config)
    want = get_kernel("torch", "fp8_linear")(row, weight, one, None, None, False, levels - 1)
    assert torch.equal(out, want)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2])
def test_a_dense_mlp(hopper, m):
    """One token without a launch between both products, two with one."""
    x, w, x_scale, w_scale = operands(m, 2 * 14336, 4096)
    _, down, _, down_scale = operands(m, 4096, 14336)
    w_scale /= 4096
    for bias in (None, torch.randn(4096, device=CUDA)):
        arguments = (x, w, x_scale, w_scale, down, down_scale, bias, torch.bfloat16, "silu")
        got = ops.mlp_fp8(*arguments)
        codes, scale = ops.gate_up_quant(*arguments[:4], *arguments[7:])
        want = ops.fp8_gemm(codes, down, scale, down_scale, bias, torch.bfloat16)
        assert relative_error(got, want.double()) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 32, 33, 64, 65, 100, 128, 129])
@pytest.mark.parametrize("static", [False, True])
def test_a_dense_mlp_and_the_next_norm(hopper, m, static):
    """From 33 to 128 tokens the norm adds two parts of the down projection's sums."""
    x, w, x_scale, w_scale = operands(m, 2 * 14336, 4096)
    _, down, _, down_scale = operands(m, 4096, 14336)
    w_scale /= 4096
    down_scale /= 1024
    residual, gain = torch.randn(m, 4096, device=CUDA), torch.rand(4096, device=CUDA) + 0.5
    residual, gain = residual.bfloat16(), gain.bfloat16()
    scale = torch.full((1,), 0.01, device=CUDA) if static else None
    for bias in (None, torch.randn(4096, device=CUDA)):
        mlp = (x, w, x_scale, w_scale, down, down_scale, bias)
        norm = (residual, gain, 1e-5, scale)
        q, q_scale, added, levels = ops.mlp_norm(*mlp, *norm, "silu", True)
        out = ops.mlp_fp8(*mlp, torch.bfloat16, "silu", True)
        want = get_kernel("torch", "add_rms_norm_quant")(out, *norm)
        assert levels.numel() == 0
        torch.testing.assert_close(added, want[2], rtol=2**-7, atol=0.03)
        torch.testing.assert_close(q_scale, want[1], rtol=2**-6, atol=0)
        assert relative_error(q.double() * q_scale, want[0].double() * want[1]) < 0.02
        again = ops.mlp_norm(*mlp, *norm, "silu", True)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(again, (q, q_scale, added)))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [40, 64, 100, 256, 600])
def test_float32_results_fit_the_shared_memory(hopper, m):
    a, b, a_scale, b_scale = operands(m, 1024, 4096)
    arguments = (a, b, a_scale, b_scale, None, torch.float32)
    expected = get_kernel("torch", "fp8_gemm")(*arguments)
    torch.testing.assert_close(ops.fp8_gemm(*arguments), expected, rtol=2e-2, atol=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 8, 64, 300, 1024])
def test_weights_quantised_just_before(hopper, m):
    """In a graph nothing lies between the quantiser and a product that fetches ahead."""
    w = torch.randn(8192, 4096, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(m, 4096, device=CUDA, dtype=torch.bfloat16)

    def step():
        b, b_scale = ops.quantize_fp8(w, None, "channel")
        a, a_scale = ops.quantize_fp8(x, None, "token")
        return ops.fp8_gemm(a, b, a_scale, b_scale, None, torch.bfloat16)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(5):
        w.normal_()
        graph.replay()
        got = captured.clone()
        torch.cuda.synchronize()
        assert torch.equal(got, step())


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("m,n,k", [(1, 16, 16), (5, 100, 272), (16, 48, 2880), (64, 130, 144)])
def test_activation_in_the_product(hopper, activation, m, n, k):
    """Values and largest magnitudes of pairs, for rows of a wider tensor and a NaN."""
    from oss_fused.kernels.mlp.gate_up_stream import gate_up_stream

    a, b, a_scale, b_scale = operands(m, 2 * n, k)
    b_scale /= k
    a = torch.cat([a.view(torch.uint8)] * 2, 1).view(FP8)[:, :k]
    y, parts = gate_up_stream(a, b, a_scale, b_scale, torch.bfloat16, activation, False)
    product = ops.fp8_gemm(a, b, a_scale, b_scale, None, torch.bfloat16)
    want = get_kernel("torch", "act_mul_quant")(product, activation, None)[1] * 448
    gate, up = product.chunk(2, 1)
    exact = activate(gate.double(), activation) * up.double()
    assert relative_error(y, exact) < 6e-3
    amax = parts.amax(1).view(torch.float32)
    assert torch.equal(amax, y.float().abs().amax(1))
    assert ((amax - want[:, 0]).abs() / want[:, 0]).max() < 2**-6
    a.view(torch.uint8)[m // 2, 3] = 0x7F
    y, parts = gate_up_stream(a, b, a_scale, b_scale, torch.bfloat16, activation, True)
    lost = parts.amax(1).view(torch.float32).isnan()
    assert lost[m // 2] and lost.sum() == 1 and y.isnan().sum() == n


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("m,n,k", [(65, 136, 256), (1000, 1300, 1040)])
def test_gated_mlp(hopper, activation, fp8, m, n, k):
    x = torch.randn(m, k, device=CUDA, dtype=torch.bfloat16)
    # gate and up differ in size, and so do their scales
    sizes = (1 / k**0.5, 4 / k**0.5)
    weights = [torch.randn(n, k, device=CUDA, dtype=torch.bfloat16) * size for size in sizes]
    scales = [None, None]
    if fp8:
        pairs = [ops.quantize_fp8(w, None, "channel") for w in weights]
        weights, scales = ([pair[i] for pair in pairs] for i in (0, 1))
    for on in ("gate", "up"):
        args = (x, *weights, *scales, activation, on)
        want = get_kernel("torch", "gated_mlp")(*args).double()
        assert relative_error(ops.gated_mlp(*args), want) < 6e-3

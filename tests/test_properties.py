# SPDX-License-Identifier: MIT
"""Property tests 1-8 of the requirements. ``pytest --hypothesis-profile=ci`` runs more examples."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oss_fused.bench.accuracy import check_accuracy
from oss_fused.bench.runner import oracle, verify
from oss_fused.functional import (
    dequantize_fp8,
    fp8_gemm,
    fused_gated_mlp,
    fused_rmsnorm_rope,
    quantize_fp8,
)
from oss_fused.kernels.op import get_kernel
from oss_fused.specs import FP8GEMMInput, GatedMLPInput, RMSNormRoPEInput
from oss_fused.tuning.cache import CacheEntry, CacheKey, TuningCache
from oss_fused.tuning.lookup import get_cached_config
from oss_fused.tuning.prune import reason_to_skip
from oss_fused.tuning.space import ConfigSpace
from oss_fused.tuning.tuner import TritonAutoTuner

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
SEEDS = st.integers(0, 2**16)


@st.composite
def rope_problems(draw):
    head_dim = 2 * draw(st.integers(1, 24))
    heads = draw(st.integers(1, 6))
    sizes = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    return RMSNormRoPEInput(*sizes, heads * head_dim, head_dim, draw(DTYPES))


@st.composite
def mlp_problems(draw):
    batch, seq = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    hidden, intermediate = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    activation = draw(st.sampled_from(["silu", "gelu"]))
    return GatedMLPInput(batch, seq, hidden, intermediate, activation, draw(DTYPES))


@given(rope_problems(), SEEDS)
def test_1_rmsnorm_rope_equals_its_formula(problem, seed):
    args = problem.make(seed=seed)
    result = check_accuracy(fused_rmsnorm_rope(**args), oracle(problem, args))
    assert result.passed, result


@given(mlp_problems(), SEEDS)
def test_2_gated_mlp_equals_its_formula(problem, seed):
    args = problem.make(seed=seed)
    result = check_accuracy(fused_gated_mlp(**args), oracle(problem, args))
    assert result.passed, result


@given(rope_problems(), mlp_problems(), st.integers(0, 40), st.integers(1, 40), st.integers(1, 70))
def test_3_any_dimensions_keep_shape_and_dtype(rope, mlp, m, n, k):
    out = fused_rmsnorm_rope(**rope.make())
    assert out.shape == (rope.batch_size, rope.seq_len, rope.hidden_dim) and out.dtype == rope.dtype
    out = fused_gated_mlp(**mlp.make())
    assert out.shape == (mlp.batch_size, mlp.seq_len, mlp.intermediate_dim)
    out = fp8_gemm(**FP8GEMMInput(m, n, k).make())
    assert out.shape == (m, n) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("operation", ["rmsnorm_rope", "gated_mlp"])
def test_3_any_dimensions_agree_on_the_triton_kernel(operation, device):
    triton = get_kernel("triton", operation)

    @hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
    @given(st.data())
    def agrees(data):
        if operation == "rmsnorm_rope":
            problem, extra = data.draw(rope_problems()), (1e-6,)
        else:
            problem = data.draw(mlp_problems())
            extra = (None, None, problem.activation, "up")
        args = problem.make()
        tensors = [t.to(device) for t in args.values() if isinstance(t, torch.Tensor)]
        result = check_accuracy(triton(*tensors, *extra).cpu(), oracle(problem, args))
        assert result.passed, (problem, result)

    agrees()


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 80), SEEDS)
def test_4_fp8_gemm_is_the_product_of_what_it_was_given(m, n, k, seed):
    """With operands that FP8 holds exactly, only the summation rounds."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-8, 9, (m, k), generator=generator).float()
    b = torch.randint(-8, 9, (k, n), generator=generator).float()
    fp8 = torch.float8_e4m3fn
    a_scale = torch.rand(m, 1, generator=generator) + 0.5
    b_scale = torch.rand(n, 1, generator=generator) + 0.5
    out = fp8_gemm(a.to(fp8), b.to(fp8), a_scale=a_scale, b_scale=b_scale, out_dtype=torch.float32)
    expected = (a.double() @ b.double()) * a_scale.double() * b_scale.double().t()
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)


@given(
    st.integers(1, 6),
    st.integers(1, 64),
    st.sampled_from(["tensor", "token", "channel"]),
    st.floats(-20, 20),
    SEEDS,
)
def test_5_fp8_round_trip_is_bounded(rows, cols, strategy, log2_size, seed):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 2.0**log2_size
    q, scale = quantize_fp8(x, strategy=strategy)
    error = (dequantize_fp8(q, scale) - x).abs()
    # half a unit of 3 mantissa bits, or half the smallest subnormal
    bound = torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10)
    assert (error <= bound * (1 + 1e-5)).all()
    # a second round changes nothing that the first did not
    again, _ = quantize_fp8(dequantize_fp8(q, scale), scale=scale, on_overflow="saturate")
    assert torch.equal(again.float(), q.float())


@given(st.integers(8, 24), st.integers(32, 64), st.integers(64, 256), SEEDS)
def test_6_fp8_against_the_fp16_baseline(m, n, k, seed):
    problem = FP8GEMMInput(m, n, k, out_dtype=torch.float16)
    args = problem.make(seed=seed)
    a, b = args["a"].float(), args["b"].float()
    baseline, out = a @ b, fp8_gemm(**args).float()
    # no element may exceed what two operands of 3 mantissa bits allow, subnormals included
    floor_a, floor_b = a.abs().amax(1, True) / 448 / 1024, b.abs().amax(0, True) / 448 / 1024
    a_off, b_off = a.abs() / 16 + floor_a, b.abs() / 16 + floor_b
    bound = a_off @ b.abs() + a.abs() @ b_off + a_off @ b_off + baseline.abs() / 512
    assert ((out - baseline).abs() <= bound).all()
    # and errors of random sign average out: 3.7 % is expected, over 256 elements or more
    assert (out - baseline).norm() / baseline.norm() < 0.05


_KEYS = st.builds(
    CacheKey,
    st.sampled_from(["gemm", "norm"]),
    st.tuples(st.integers(1, 9999), st.integers(1, 9999)),
    st.sampled_from(["bfloat16", "float16"]),
    st.sampled_from(["NVIDIA H200", "NVIDIA A100"]),
    st.sampled_from(["v1", "v2"]),
)
_SPACE = ConfigSpace({"BLOCK_SIZE": (16, 32, 64, 128), "num_warps": (2, 4, 8)})


@given(entries=st.dictionaries(_KEYS, st.sampled_from(list(_SPACE)), max_size=8))
def test_7_what_the_cache_was_told_it_tells(tmp_path_factory, entries):
    path = tmp_path_factory.mktemp("cache") / "c.json"
    for key, config in entries.items():
        TuningCache(path).put(CacheEntry(key, config, 1.0, {}))
    found = TuningCache(path).entries()
    assert {str(key): config for key, config in entries.items()} == {
        name: entry.config for name, entry in found.items()
    }


@given(best=st.sampled_from(list(_SPACE)), sizes=st.tuples(st.integers(1, 99), st.integers(1, 99)))
def test_7_tuning_twice_gives_the_same_config(tmp_path_factory, best, sizes):
    cache = TuningCache(tmp_path_factory.mktemp("cache") / "c.json")
    state = {}

    def kernel(x, **config):
        state["now"] = 1.0 + sum(abs(config[name] - best[name]) for name in best)

    def timer(call, repeats, device):
        call()
        return [state["now"]] * repeats

    def tune():
        tuner = TritonAutoTuner(kernel, _SPACE, 0, 20, cache=cache, timer=timer)
        return tuner.tune(torch.ones(1), problem_size=sizes, device="cpu")

    first, second = tune(), tune()
    assert first.best_config == second.best_config == best
    assert second.from_cache and first.metrics == second.metrics
    cached = get_cached_config("kernel", sizes, torch.float32, "cpu", cache)
    assert cached == best and reason_to_skip(cached, None) is None


@given(
    st.sampled_from(["rope", "mlp", "gemm"]),
    st.sampled_from(["none", "scaled", "shifted", "one element", "transposed half"]),
    st.integers(0, 10**6),
)
def test_8_correctness_check_accepts_right_and_rejects_wrong(kind, damage, where):
    function, problem = {
        "rope": (fused_rmsnorm_rope, RMSNormRoPEInput(1, 4, 32, 8)),
        "mlp": (fused_gated_mlp, GatedMLPInput(1, 4, 32, 24)),
        "gemm": (fp8_gemm, FP8GEMMInput(4, 32, 64)),
    }[kind]

    def damaged(**arguments):
        out = function(**arguments)
        rms = out.float().nan_to_num().pow(2).mean().sqrt()
        flat = out.view(-1)
        if damage == "scaled":
            return out * 1.1
        if damage == "shifted":
            return out.roll(1, -1)
        if damage == "one element":
            flat[where % flat.numel()] += 2 * flat[where % flat.numel()].abs() + 2 * rms + 1
        if damage == "transposed half":
            flat[: flat.numel() // 2] = flat[: flat.numel() // 2].flip(0)
        return out

    assert verify(damaged, problem).passed == (damage == "none")

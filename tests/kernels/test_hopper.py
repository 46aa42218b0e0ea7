# SPDX-License-Identifier: MIT
"""Kernels compile for Hopper, and a program of each fits a multiprocessor.

They are those of every operation on the arguments of its declaration, and of launches that serve.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from oss_fused.kernels.attention.launches import stream_for
from oss_fused.kernels.op import OPERATIONS
from tests.kernels.hopper import REGISTERS, SHARED_MEMORY, run
from tests.kernels.served_launches import CASES, LONG, NOT_WITHOUT_A_GPU, SHORT

# of code that the compiler makes of one kernel, before it is optimised; 3300 lines took 31 s
MOST_LINES = 2000
# bytes of registers that a thread keeps in memory; heads of 256 values and the portable forward of
# flash_attention need some hundred
MOST_STACK = 1536
# and those of products of few rows: a few words of the warp that asks for weights
RINGS = {"_gemm_stream_kernel", "_gate_up_stream_kernel", "_qkv_kernel"}
MOST_RING_STACK = 16

WITH_LONG = "OSS_FUSED_LONG_TESTS" in os.environ
long_test = pytest.mark.skipif(
    not WITH_LONG, reason="some minutes, which CI's twenty lack; OSS_FUSED_LONG_TESTS=1 runs it"
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, request) -> dict[str, Any]:
    """Case -> its kernels; one process compiles all cases that were selected.

    Where it fails, case -> what it said: the tests fail then, and not what they ask for.
    """
    here = [item for item in request.session.items if item.path == request.path]
    cases = {item.callspec.params["case"] for item in here if hasattr(item, "callspec")}
    left_out = set() if WITH_LONG else {*LONG}
    folder = tmp_path_factory.mktemp("triton")
    command = ("-m", "tests.kernels.served_launches", *sorted(cases - left_out))
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        printed = run(folder, *command)
    except AssertionError as failure:
        return dict.fromkeys(cases, str(failure))
    for line in printed.splitlines():
        if line.startswith("{"):
            kernel = json.loads(line)
            found.setdefault(kernel["case"], []).append(kernel)
    return found


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=long_test) if c in LONG else c for c in CASES],
)
def test_a_program_fits_a_multiprocessor(case, compiled):
    assert compiled[case] and not isinstance(compiled[case], str), compiled[case]
    for kernel in compiled[case]:
        assert kernel["registers"] * kernel["threads"] <= REGISTERS, kernel
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        most = MOST_RING_STACK if kernel["name"] in RINGS else MOST_STACK
        assert kernel["stack"] <= most and kernel["lines"] <= MOST_LINES, kernel


@pytest.mark.parametrize(
    ("case", "kernel", "prefetches"),
    [
        # each thread: an expert's line, a line of the expected expert
        ("experts 1", "_gate_up_few_kernel", 2),
        # a line of the weights and of the scale words of its tile, one of the next wave's weights
        ("experts 8", "_gate_up_kernel", 3),
    ],
)
def test_w13_asks_for_weights_of_few_tokens_early(case, kernel, prefetches, compiled):
    (found,) = [each for each in compiled[case] if each["name"] == kernel]
    assert found["prefetches"] == prefetches


@pytest.mark.parametrize("case", ["attention 1", "attention 1, window"])
def test_attention_asks_for_a_tile_before_it_uses_queries(case, compiled):
    """A tile of 128 keys and values of 64: 16 loads of 16 bytes a thread, and one of queries."""
    (kernel,) = compiled[case]
    assert kernel["asked"] >= 16 + 1


@pytest.mark.parametrize(
    ("case", "registers"),
    [
        # in Triton 3.6 a tile that comes first takes 162, 252, and 22 loads of the last one
        ("attention 16, FP8", 128),
        ("attention 8 of Llama, FP8", 200),
        ("attention 4, four tokens each", 255),
    ],
)
def test_attention_uses_queries_first_where_a_tile_takes_registers(case, registers, compiled):
    """More programs run at once: up to 29 % faster (docs/results/notes/decode.md)."""
    (kernel,) = compiled[case]
    assert kernel["asked"] <= 4 and kernel["registers"] <= registers


@pytest.mark.parametrize(
    ("case", "kernel", "most"),
    [
        ("experts 8", "_route_kernel", 20),
        ("experts 1", "_add_rms_norm_router_kernel", 16),
        ("experts 128", "_place_and_encode_kernel", 12),
    ],
)
def test_threads_of_small_kernels_seldom_meet(case, kernel, most, compiled):
    """Nothing else runs while the few programs of such a kernel wait for each other's threads."""
    (found,) = [each for each in compiled[case] if each["name"] == kernel]
    assert found["meetings"] <= most


@pytest.mark.parametrize(
    ("case", "kernel", "frees"),
    [
        ("joined qkv 1", "_qkv_kernel", False),
        ("joined qkv 8, two levels", "_qkv_kernel", True),
        ("o_proj 1, two levels", "_gemm_stream_kernel", False),
        ("o_proj 8, two levels", "_gemm_stream_kernel", True),
    ],
)
def test_rings_free_their_stages_where_k_is_longer(case, kernel, frees, compiled):
    (found,) = [each for each in compiled[case] if each["name"] == kernel]
    assert bool(found["freed"]) == frees


@pytest.mark.parametrize(
    "case",
    [
        *(f"experts {tokens}" for tokens in (1, 8)),
        *("mlp and norm 1", "mlp and norm 64", "gate_up 4", "o_proj 8, two levels", "qkv 5120 64"),
        "example of add_rms_norm_quant",
    ],
)
def test_results_of_few_tokens_stay_in_l2(case, compiled):
    """Every wide store says so."""
    assert not any(kernel["leaving"] for kernel in compiled[case]), compiled[case]
    assert all(kernel["kept"] for kernel in compiled[case]), compiled[case]


@pytest.mark.parametrize("case", [f"mlp and norm {rows}" for rows in (1, 64, 128)])
def test_norms_read_several_values_at_once(case, compiled):
    """From 33 rows on these are float32 parts, at a stride that must be known to be aligned.

    From 65 rows on the next kernel's weights come behind them.
    """
    (norm,) = [each for each in compiled[case] if each["name"] == "_add_rms_norm_quant_kernel"]
    assert norm["narrow"] == 0 and norm["starts_first"] == (case != "mlp and norm 128")


@pytest.mark.parametrize(
    ("case", "kernel", "boxes"),
    [
        # 6 of 8 stages with two boxes each, 7 of 9 with one; a box for the tokens' descriptor
        ("joined qkv 128", "_qkv_kernel", 6 * 2 + 1),
        ("mlp and norm 128", "_gemm_stream_kernel", 7 + 1),
        # 3 of 4 stages, a box for each part of 224 columns
        ("mlp and norm 128", "_gemm_persistent_kernel", 3 * 3),
    ],
)
def test_weights_before_the_wait_leave_memory_to_the_kernel_ahead(case, kernel, boxes, compiled):
    (found,) = [each for each in compiled[case] if each["name"] == kernel]
    assert found["early"] == boxes
    # one in each of its parts: another one would come before the weights
    assert found["waits"] == (3 if "persistent" in kernel else 2)


@pytest.mark.parametrize("case", ["mlp 257"])
def test_much_leaves_l2(case, compiled):
    assert not any(kernel["kept"] for kernel in compiled[case])


@pytest.mark.parametrize("case", ["lm_head 2, two levels"])
def test_logits_leave_l2(case, compiled):
    codes, logits = (kernel["kept"] for kernel in compiled[case])
    assert codes and not logits


@pytest.mark.parametrize("case", [case for case in SHORT if case.startswith("stream")])
def test_large_batches_read_keys_and_values_once(case, compiled):
    """64 rows times 16 columns at a time; as many programs as the rule says fit."""
    items, _, _, head_dim = SHORT[case].args[:4]
    (kernel,) = compiled[case]
    # each program also takes 1 KB for the system
    assert stream_for(head_dim, items).ctas * (kernel["shared"] + 1024) <= 228 * 1024
    assert kernel["products"] == 2 * kernel["transposed"] == head_dim // 8


@pytest.mark.parametrize(
    ("case", "product"),
    [
        ("lm_head 1, two levels", "_gemv_kernel"),
        ("lm_head 2, two levels", "_gemm_stream_kernel"),
        ("o_proj 1, two levels", "_gemm_stream_kernel"),
    ],
)
def test_two_levels_are_one_product_of_the_fastest_kernel(case, product, compiled):
    quantise, multiply = (kernel["name"] for kernel in compiled[case])
    assert (quantise, multiply) == ("_quantize_row_kernel", product)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (
            "mlp and norm 1",
            ["_gate_up_stream_kernel", "_gemm_stream_kernel", "_add_rms_norm_quant_kernel"],
        ),
        ("o_proj of Llama 1, two levels", ["_gemm_stream_kernel"]),
    ],
)
def test_one_row_is_quantised_by_its_product(case, names, compiled):
    assert [kernel["name"] for kernel in compiled[case]] == names


def test_every_operation_of_triton_is_here():
    named = {name for name, each in OPERATIONS.items() if "triton" in each.modules}
    assert {f"example of {name}" for name in named - {*NOT_WITHOUT_A_GPU}} <= set(CASES)

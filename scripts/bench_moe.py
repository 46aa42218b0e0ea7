#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
r"""Measure the MXFP4 expert layer of gpt-oss against vLLM's own on one NVIDIA GPU.

Checks every batch against the reference, then times routing, the two expert products, the
combination and the whole layer; vLLM's triton_kernels and Marlin backends are timed on the same
weights and routing where vLLM for CUDA can be imported. Prints a line a batch, writes moe.json
to --output.

    python scripts/bench_moe.py --output docs/results/h200 --summary docs/results/h200/summary.json
    python scripts/bench_moe.py --experts 128 --layers 2 --output /tmp/moe-120b
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from harness.arguments import Help, output_folder, summary_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from harness.moe_cases import Baseline, ExpertWeights


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    from harness.moe_cases import BATCHES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--output", type=output_folder, required=True, help="folder for moe.json")
    parser.add_argument(
        "--summary", type=summary_file, help="summary.json to merge the figures into"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="tokens")
    parser.add_argument("--experts", type=int, default=32, help="32 (20b) or 128 (120b)")
    parser.add_argument("--layers", type=int, default=4, help="layers' weights to rotate")
    parser.add_argument("--compile-jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--no-vllm", action="store_true", help="skip vLLM's kernels")
    return parser


def vllm_baselines(layers: Sequence[ExpertWeights]) -> dict[str, Baseline]:
    """vLLM's own expert backends on the same weights; those that cannot run are left out."""
    found: dict[str, Baseline] = {}
    for name, make in (("triton_kernels", _triton_kernels), ("marlin", _marlin)):
        try:
            found[name] = [make(layer) for layer in layers]
        except Exception as failure:
            print(f"without {name}: {type(failure).__name__}: {failure}", file=sys.stderr)
    return found


def _converted(backend: str, layer: ExpertWeights, pad: bool = False) -> tuple[Any, ...]:
    """``pad``: round H up to 256 and I to 128 with zeros, as vLLM does for Marlin."""
    import torch
    import torch.nn.functional as F
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4

    names = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
    tensors = [t.clone() for t in (layer.w13, layer.w2, layer.w13_scale, layer.w2_scale)]
    biases = [layer.w13_bias.clone(), layer.w2_bias.clone()]
    if pad:
        hidden, inter = layer.w2.shape[1], layer.w2.shape[2] * 2
        more_h, more_i = -hidden % 256, -inter % 128
        sizes = [
            (more_h // 2, 2 * more_i), (more_i // 2, more_h),
            (more_h // 32, 2 * more_i), (more_i // 32, more_h),
        ]  # fmt: skip
        tensors = [F.pad(t, (0, k, 0, n)) for t, (k, n) in zip(tensors, sizes)]
        biases = [F.pad(biases[0], (0, 2 * more_i)), F.pad(biases[1], (0, more_h))]
    holder = SimpleNamespace(
        **dict(zip(names, tensors)), params_dtype=torch.bfloat16, w13_bias=None, w2_bias=None
    )
    return mxfp4.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format(
        mxfp4.Mxfp4MoeBackend[backend],
        holder,
        *tensors,
        *biases,
    )


def _triton_kernels(layer: ExpertWeights) -> Any:
    from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe import (
        triton_kernel_moe_forward,
    )

    w13, w2, w13_config, w2_config, w13_bias, w2_bias = _converted("TRITON", layer)
    config = mxfp4_w4a16_moe_quant_config(
        w1_scale=w13_config, w2_scale=w2_config, w1_bias=w13_bias, w2_bias=w2_bias
    )
    experts = layer.w13.shape[0]

    def run(x: Any, logits: Any) -> Any:
        return triton_kernel_moe_forward(
            x, w13, w2, logits, 4, True, quant_config=config, global_num_experts=experts
        )

    return run


def _marlin(layer: ExpertWeights) -> Any:
    import torch.nn.functional as F
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk
    from vllm.scalar_type import scalar_types

    w13, w2, w13_scale, w2_scale, w13_bias, w2_bias = _converted("MARLIN", layer, pad=True)
    hidden = layer.w2.shape[1]

    def run(x: Any, logits: Any) -> Any:
        weights, ids, _ = fused_topk(x, logits, 4, True)
        padded = F.pad(x, (0, -hidden % 256))
        out = fused_marlin_moe(
            padded, w13, w2, w13_bias, w2_bias, w13_scale, w2_scale, weights, ids,
            quant_type_id=scalar_types.float4_e2m1f.id, activation=MoEActivation.SWIGLUOAI,
            global_num_experts=layer.w13.shape[0],
        )  # fmt: skip
        return out[:, :hidden]

    return run


def main(argv: list[str] | None = None) -> int:
    """Run; 0 if every result was right, 1 if one was wrong, 2 on bad input."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    from harness import moe_cases
    from harness.summary import merge_summary

    from oss_fused.environment import has_gpu
    from oss_fused.files import write_json

    for name in ("experts", "layers", "compile_jobs"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)}: expected >= 1")
    if min(arguments.batches) < 1:
        parser.error(f"--batches {min(arguments.batches)}: expected >= 1")
    if not has_gpu():
        parser.error("no NVIDIA GPU here: kernel times need one")
    target = arguments.output / "moe.json"
    report = moe_cases.run(
        arguments.batches,
        arguments.experts,
        arguments.layers,
        arguments.compile_jobs,
        (lambda layers: {}) if arguments.no_vllm else vllm_baselines,
        lambda text: print(text, file=sys.stderr, flush=True),
        lambda report: write_json(target, report),
    )
    if arguments.summary:
        merge_summary(arguments.summary, report["figures"], target)
    print(json.dumps(report["figures"], indent=2), file=sys.stderr)
    return 0 if all(row["passed"] for row in report["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())

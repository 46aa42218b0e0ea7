# SPDX-License-Identifier: MIT
# %% [markdown]
# # 17. Calibrating and serving FP8
#
# **Goal.** Take a model in bfloat16, write a checked FP8 checkpoint, look into it, and serve it.
# All kernels of the chapters before come together here.
#
# The model of this chapter is small and random, so that the chapter runs in seconds. A random
# model writes noise; what is true of its files is true of a real one. For a real model, `make
# demo` does the same with SmolLM2-135M, and asks it questions.

# %%
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import book
import torch
from harness.model_factory import get_shape, make_model

from oss_fused.quant.calibrator import RunOptions, Summary
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.formats import dequantize, relative_error
from oss_fused.quant.pipeline import calibrate
from oss_fused.quant.recipe import Recipe

# %% [markdown]
# ## What is quantised
#
# | part | format | why |
# |---|---|---|
# | linear weights | E4M3, a scale per output channel, static | half the bytes per step |
# | activations | E4M3 (few tokens: twice), a scale per token | FP8 tensor cores; needs no data |
# | norms, router, embeddings | bfloat16 | few bytes, large effect |
# | experts of an MXFP4 checkpoint | MXFP4 as they are | half the bytes of FP8 again |
# | KV cache | bfloat16, or FP8 with calibrated scales | long contexts |
#
# ## Calibrate
#
# On the command line:
#
# ```
# python scripts/calibrate.py MODEL --output MODEL-oss-fp8
# ```
#
# The same from Python. Without a dataset only weights are read. Memory holds one layer at a time.
# The output folder appears when it is complete, and never holds a zero, NaN or missing scale.


# %%
def make_checkpoints(folder: Path, layers: int = 1) -> tuple[Path, Path, Summary]:
    """A random Llama of tiny shape in bfloat16, and its FP8 checkpoint."""
    source, output = folder / "tiny", folder / "tiny-oss-fp8"
    shape = get_shape("llama", "tiny")
    make_model(source, replace(shape, layers=layers, vocab=1024))
    return source, output, calibrate(Recipe(), RunOptions(source, output))


def sizes(summary: Summary) -> list[dict]:
    """Bytes before and after, and how many linears are FP8."""
    return [
        {
            "linears in FP8": f"{summary.quantised} of {summary.linears}",
            "MB before": summary.source_bytes / 1e6,
            "MB after": summary.output_bytes / 1e6,
        }
    ]


# %% [markdown]
# ## Look into it
#
# `weight` holds codes, `weight_scale` a float32 multiplier per output row. `quantization_config`
# names the method, so that `vllm serve` needs no flag ([format](../checkpoint-format.md)).


# %%
def inspect(source: Path, output: Path, most: int = 4) -> list[dict]:
    """Tensors of the first linears: dtype, shape, scales, error of the weight."""
    before, after = CheckpointReader(source), CheckpointReader(output, quantised=True)
    names = [name for name in after.names() if f"{name}_scale" in after][:most]
    rows = []
    for name in names:
        scale = after.read(f"{name}_scale")
        back = dequantize(after.read(name), scale)
        rows.append(
            {
                "linear": name.removeprefix("model.layers.").removesuffix(".weight"),
                "dtype": str(after.dtype(name))[6:],
                "scales": scale.numel(),
                "smallest scale": float(scale.min()),
                "relative error": relative_error(before.read(name), back),
            }
        )
    return rows


def quantization_config(output: Path) -> dict[str, Any]:
    """What the checkpoint says of itself."""
    return json.loads((output / "config.json").read_text())["quantization_config"]


# %% [markdown]
# ## What it does to the model
#
# The table compares next-token distributions of the two checkpoints on random tokens, in plain
# PyTorch. Weights only: activations stay as they are, so this is the part of the error that
# weights make. The KL divergence says how far the distribution moved, top-1 how often the
# likeliest token is the same. A random model is the worst case: its distribution is flat, and a
# small move changes the likeliest token.


# %%
def logits(source: Path, weights: Path | None, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary]; FP8 linears of ``weights`` replace the source's."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    if weights is not None:
        reader = CheckpointReader(weights, quantised=True)
        own = dict(model.named_parameters())
        for name in [name for name in reader.names() if f"{name}_scale" in reader]:
            own[name].data.copy_(dequantize(reader.read(name), reader.read(f"{name}_scale")))
    with torch.no_grad():
        return model(tokens).logits[0].log_softmax(-1)


def quality(source: Path, output: Path, count: int = 64) -> list[dict]:
    """KL divergence and top-1 agreement of the FP8 weights with the source."""
    tokens = torch.randint(0, 1024, (1, count), generator=torch.Generator().manual_seed(0))
    before, after = logits(source, None, tokens), logits(source, output, tokens)
    divergence = (before.exp() * (before - after)).sum(-1)
    same = (before.argmax(-1) == after.argmax(-1)).float().mean()
    row = {"tokens": count, "mean KL, nats": float(divergence.mean())}
    return [row | {"same top token": book.percent(float(same))}]


def all_tables() -> None:
    """Make the checkpoints and show everything of them."""
    with tempfile.TemporaryDirectory() as folder:
        source, output, summary = make_checkpoints(Path(folder))
        book.show(book.table(sizes(summary)))
        book.show(book.table(inspect(source, output)))
        config = quantization_config(output)
        shown = {name: config[name] for name in ("quant_method", "version", "ignore")}
        book.show(f"`quantization_config` has {json.dumps(shown)}.")
        book.show(book.table(quality(source, output), book.here("tiny random Llama")))


if __name__ == "__main__":
    all_tables()

# %% [markdown]
# ## Serve
#
# ```
# vllm serve models/SmolLM2-135M-Instruct-oss-fp8                      # calibrated: no flag
# vllm serve models/SmolLM2-135M-Instruct --quantization oss_fp8     # bf16: quantised at load
# curl localhost:8000/v1/completions -H 'Content-Type: application/json' \
#     -d '{"model": "models/SmolLM2-135M-Instruct-oss-fp8", "prompt": "Two and", "max_tokens": 8}'
# ```
#
# vLLM finds the plugin through its entry point. [Serving](../serving.md) has the options,
# [operations](../operations.md) the checks before a start.
#
# ## Real models
#
# Perplexity of SmolLM2-135M on a CPU, and the served speed of gpt-oss-20b on one H200. Speed has
# random weights of the real shape.


# %%
def real_quality() -> list[dict]:
    """Perplexity factors of SmolLM2-135M; these are of a CPU."""
    names = {
        "nothing spared": "accuracy.smollm2.w8a8_factor",
        "16-bit activations": "accuracy.smollm2.w8a16_factor",
        "chosen by --accuracy-target": "accuracy.smollm2.policy_factor",
    }
    return [
        {"checkpoint": what, "perplexity factor": book.measured("summary.json", name)}
        for what, name in names.items()
    ]


def h200_served() -> list[dict]:
    """Time per output token of the faster baseline and of oss_fp8, by concurrent requests."""
    rows = []
    for cell in book.measured("gpt_oss_20b/results.json", "cells") or []:
        arms = cell["arms"]
        faster = cell["baselines"]["p50_tpot_ms"]
        base, own = (arms[name]["figures"]["p50_tpot_ms"] for name in (faster, "oss_fp8"))
        ratio = arms["oss_fp8"]["ratios"]["p50_tpot_ms"]["median"]
        row = {"requests": cell["concurrency"], "baseline, ms": base, "oss_fp8, ms": own}
        rows.append(row | {"ratio": ratio})
    return rows or [{"served": None}]


if __name__ == "__main__":
    book.show(book.table(real_quality(), "Source: docs/results/cpu/smollm2_*.json."))
    note = "gpt-oss-20b, 128 tokens in and out, time per output token."
    book.show(book.table(h200_served(), note, book.source("gpt_oss_20b/results.json")))

# %% [markdown]
# ## The production version
#
# This chapter *is* the production version: `calibrate` and the loader are what
# `scripts/calibrate.py` and `vllm serve` run. [Calibration](../calibration.md) has static scales,
# error feedback, KV scales and the search for a mix that meets an accuracy target;
# [decode](../decode.md) says where a step's time goes.
#
# ## Acceptance numbers


# %%
def acceptance() -> list[book.Bar]:
    """Served speed and perplexity."""
    ratio = book.measured("summary.json", "main_job.gpt_oss_20b.tpot_ratio_c1")
    factor = book.measured("summary.json", "accuracy.smollm2.policy_factor")
    return [
        book.Bar("speed per output token over the baseline, 1 request", 1.0, ratio, "summary.json"),
        book.Bar(
            "perplexity with an accuracy target of 1.01",
            1.01,
            factor,
            "../cpu/smollm2_accuracy.json",
            at_most=True,
        ),
    ]


if __name__ == "__main__":
    book.show(book.bars(acceptance()))

# %% [markdown]
# ## Questions
#
# **Do I need calibration data?** Not for FP8 weights with dynamic activations. Data helps the
# rounding of weights, and static and KV scales need it.
#
# **The first token got later.** Prefill is bound by arithmetic and launches; see
# [host time](../decode.md#host-time).
#
# **My model is refused.** The message names the layer. A silent fallback to other numerics is
# never made.
#
# ## Exercises
#
# 1. Calibrate with `ignore=("re:.*down_proj",)` and show that these weights stay bfloat16.
# 2. Compute the bytes that decode of one token reads from the FP8 checkpoint and from the source.
# 3. Damage a scale in the output (set it to 0) and show that the reader's user must notice.
#
# Answers: [answers/17-fp8-calibration-and-serving.py](answers/17-fp8-calibration-and-serving.py).
#
# Back to the [goals](01-goals.py); words are in the [glossary](appendix-glossary.md).

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What the monitor (option monitor_every) costs while decoding, in this process's vLLM engine.

Generates the same tokens with and without samples in turn; the difference, divided by the number
of samples, is the cost of one. Also counts how many tokens are the same. Then it poisons a layer
and says where the monitor saw NaN first. On a GPU the engine runs with CUDA graphs.

  make_model.py --arch gpt-oss --size 20b --format mxfp4 --device cuda --output /tmp/gpt-oss-20b
  bench_monitor.py /tmp/gpt-oss-20b --output monitor.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from harness.arguments import output_file, positive
from harness.arms import check_model

NEVER = 10**9
PROMPT = 64
# positions of a request: a longer answer would end early, and its steps would be counted too many
LONGEST = 1024


def main() -> int:
    """Parse the command line, measure, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="folder of a checkpoint in bf16, or of gpt-oss in MXFP4")
    add("--output", type=output_file, required=True, help="JSON file to write")
    add(
        "--batches",
        type=positive,
        nargs="+",
        default=[32, 1],
        help="requests at once (default: 32 1)",
    )
    add("--tokens", type=positive, default=512, help="decode steps of a run (default: 512)")
    add(
        "--every", type=positive, default=50, help="steps from one sample to the next (default: 50)"
    )
    add("--rounds", type=positive, default=3, help="runs with and without samples (default: 3)")
    args = parser.parse_args()
    try:
        check_model(args.model)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.tokens > LONGEST - PROMPT:
        parser.error(f"--tokens {args.tokens}: expected at most {LONGEST - PROMPT}")
    if args.every > args.tokens:
        parser.error(f"--every {args.every}: expected at most --tokens, {args.tokens}")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = start(args.model, args.batches)
    from oss_fused.environment import fingerprint
    from oss_fused.files import write_json
    from oss_fused.plugin.monitor.watch import current

    monitor = current()
    if monitor is None:
        print("bench_monitor: the model has no FP8 layers of this package", file=sys.stderr)
        return 2
    generate(engine, max(args.batches), args.tokens)
    results: dict[str, Any] = {
        "kind": "oss_fused.bench_monitor",
        "environment": fingerprint(),
        "layers_watched": len(monitor.statistics.layers),
        "unsampled_step_us": unsampled_us(monitor),
    }
    for batch in args.batches:
        results[f"batch_{batch}"] = measure(engine, monitor, batch, args)
        write_json(args.output, results)
    results["poisoned"] = poison(engine, monitor)
    write_json(args.output, results)
    print(json.dumps({k: v for k, v in results.items() if k != "environment"}), file=sys.stderr)
    return 0


def start(model: str, batches: Sequence[int]) -> Any:
    """The engine, with a CUDA graph for each batch."""
    import torch
    from vllm import LLM

    graphs = {"compilation_config": {"cudagraph_capture_sizes": sorted({1, *batches})}}
    options = graphs if torch.cuda.is_available() else {"enforce_eager": True}
    return LLM(
        model=model,
        quantization="oss_fp8",
        max_model_len=LONGEST,
        max_num_seqs=max(batches),
        gpu_memory_utilization=0.5,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        additional_config={"oss_fused": {"monitor_every": NEVER}},
        **options,
    )


def generate(engine: Any, batch: int, tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens of each request."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [(7 * i + 13 * b) % 900 + 10 for i in range(PROMPT)]}
        for b in range(batch)
    ]
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    outputs = engine.generate(prompts, greedy, use_tqdm=False)
    return time.perf_counter() - began, [list(out.outputs[0].token_ids) for out in outputs]


def unsampled_us(monitor: Any, calls: int = 100_000) -> float:
    """Microseconds that a step without a sample pays."""
    began = time.perf_counter()
    for _ in range(calls):
        monitor.end_sample()
        monitor.end_step()
    return (time.perf_counter() - began) / calls * 1e6


def measure(engine: Any, monitor: Any, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Cost of a sample at one batch size."""
    seconds: dict[int, list[float]] = {NEVER: [], args.every: []}
    tokens: dict[int, list[list[int]]] = {}
    generate(engine, batch, args.tokens)
    before = monitor.statistics.samples
    for number in range(2 * args.rounds):
        # off, on, on, off, ...: a slow drift affects both equally
        monitor.every = args.every if number % 4 in (1, 2) else NEVER
        spent, tokens[monitor.every] = generate(engine, batch, args.tokens)
        seconds[monitor.every].append(spent)
        time.sleep(0.2)
    samples = (monitor.statistics.samples - before) / args.rounds
    if not samples:
        raise SystemExit("bench_monitor: no step was a sample; expected a smaller --every")
    plain = statistics.median(seconds[NEVER])
    extra = (statistics.median(seconds[args.every]) - plain) / samples
    step = plain / args.tokens
    same = [
        x == y
        for mine, other in zip(tokens[NEVER], tokens[args.every])
        for x, y in zip(mine, other)
    ]
    return {
        "step_ms": step * 1e3,
        "samples_a_run": samples,
        "sample_extra_ms": extra * 1e3,
        "cost_share_at_every_1000": extra / (1000 * step),
        "cost_share_at_every_2000": extra / (2000 * step),
        "same_tokens": sum(same) / len(same),
        "seconds": {"without": seconds[NEVER], "with": seconds[args.every]},
    }


def poison(engine: Any, monitor: Any) -> dict[str, Any]:
    """Make the second layer's last linear give NaN; name the first layers at which it was seen."""
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
    watched = [name for name in monitor.statistics.layers if ".layers.1." in name]
    name = next(name for name in reversed(watched) if name.endswith("_proj"))
    model.get_submodule(name).weight_scale.data.fill_(float("nan"))
    monitor.every = 5
    generate(engine, 2, 16)
    time.sleep(1.0)
    seen = [name for name, figures in monitor.statistics.layers.items() if figures.nonfinite]
    return {"layer": name, "seen_first_at": seen[:2], "layers": len(seen)}


if __name__ == "__main__":
    sys.exit(main())

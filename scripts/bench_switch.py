#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Decode speed after the monitor has switched layers to 16-bit activations (monitor_fallback=now).

Makes layers of a Llama's shape with random weights and static activation scales that are far too
small, so that every linear saturates. Then it times one request: before the switch, the first one
behind it (on a GPU it records its CUDA graph again), those that follow, and without graphs. A
second engine starts at the same time with all linears in its policy, as a restart would have them.
Its tokens have to be those of the first engine after the switch.

  bench_switch.py --output docs/results/h200/monitor_switch.json

Exit codes: 0 measured, 1 tokens differ, the layers did not switch, or the first engine took longer
than the second waits.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.arguments import output_file, positive

TOKENS, PROMPT = 96, list(range(10, 74))
# of the calibrated scale: every linear saturates
SHRUNK = 1e-3
# seconds in which the monitor has to act
PATIENCE = 30
# a file that says that the first engine's times are taken
MEASURED = "measured"


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, measure, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=output_file, required=True, help="JSON file to write")
    add("--size", default="8b", choices=("8b", "tiny"), help="of the Llama (default: 8b)")
    add("--layers", type=positive, default=4, help="default: 4")
    args = parser.parse_args(argv)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from oss_fused.environment import fingerprint
    from oss_fused.files import write_json

    results: dict[str, Any] = {
        "kind": "oss_fused.bench_switch",
        "environment": fingerprint(),
        "settings": {"size": args.size, "layers": args.layers, "tokens": TOKENS},
    }
    with tempfile.TemporaryDirectory(prefix="oss-fused-switch-") as folder:
        with processes(1) as pool:
            model = pool.submit(make, Path(folder), args.size, args.layers).result()
        with processes(2) as pool:
            second = pool.submit(restarted, model, args.layers, Path(folder))
            measured = pool.submit(before_and_after, model, Path(folder)).result()
            tokens = measured.pop("tokens")
            write_json(args.output, results | measured)
            try:
                again = second.result()
            except TimeoutError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
    results |= measured | {"ms_restarted": again["ms_restarted"]}
    results["same_tokens_as_restart"] = tokens["switched"] == again["tokens"]
    results["same_tokens_as_before"] = tokens["switched"] == tokens["before"]
    write_json(args.output, results)
    print({k: v for k, v in results.items() if k != "environment"}, file=sys.stderr)
    return int(not (results["same_tokens_as_restart"] and results["switched_layers"]))


def processes(count: int) -> ProcessPoolExecutor:
    """Workers in processes of their own, which leave nothing behind."""
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def make(folder: Path, size: str, layers: int) -> Path:
    """An FP8 checkpoint with static scales that are too small."""
    import torch
    from harness.model_factory import get_shape, make_model
    from safetensors.torch import load_file, save_file

    from oss_fused.quant.pipeline import calibrate
    from oss_fused.quant.recipe import make_recipe
    from oss_fused.quant.run_options import RunOptions

    shape = replace(get_shape("llama", size), layers=layers, vocab=4096)
    plain, output = folder / "bf16", folder / "fp8"
    make_model(plain, shape, device="cuda" if torch.cuda.is_available() else "cpu")
    settings: dict[str, Any] = {"scheme": "FP8_STATIC", "dataset": "python", "rounding": "nearest"}
    settings |= {"num_samples": 4, "max_seq_length": 128, "self_check": "off"}
    calibrate(make_recipe(settings), RunOptions(model=plain, output=output))
    shutil.rmtree(plain)
    for path in output.glob("*.safetensors"):
        state = load_file(path)
        for name, tensor in state.items():
            if name.endswith("input_scale"):
                tensor.mul_(SHRUNK)
        save_file(state, path, {"format": "pt"})
    return output


def start(model: Path, policy: Path, options: dict[str, Any]) -> Any:
    """The engine, with CUDA graphs on a GPU."""
    os.environ["OSS_FUSED_MONITOR_DIR"] = f"{policy}.figures"
    import torch
    from vllm import LLM

    graphs: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": [1, 2]}}
    return LLM(
        model=str(model),
        max_model_len=1024,
        max_num_seqs=2,
        gpu_memory_utilization=0.15,
        kv_cache_memory_bytes=2**29,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        additional_config={
            "oss_fused": {"monitor_every": 200, "monitor_policy": str(policy), **options}
        },
        **(graphs if torch.cuda.is_available() else {"enforce_eager": True}),
    )


def request(engine: Any) -> tuple[float, list[int]]:
    """Milliseconds per token of one request, and its tokens."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    output = engine.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)[0]
    spent = (time.perf_counter() - begin) / TOKENS * 1e3
    return spent, list(output.outputs[0].token_ids)


def fastest(engine: Any, runs: int = 4) -> tuple[float, list[int]]:
    """Of several requests."""
    return min(request(engine) for _ in range(runs))


def before_and_after(model: Path, folder: Path) -> dict[str, Any]:
    """Times around the switch of one engine."""
    import torch

    engine = start(model, folder / "policy.json", {"monitor_fallback": "now"})
    from oss_fused.plugin.monitor.watch import current

    watched = current()
    assert watched is not None
    request(engine)
    before, first = request(engine)
    end = time.monotonic() + PATIENCE
    while watched.statistics.switched < len(watched.statistics.layers) and time.monotonic() < end:
        spent, tokens = request(engine)
        # that of the last one before, and not one that was switched half-way
        if not watched.statistics.switched:
            before, first = min(before, spent), tokens
    found: dict[str, Any] = {
        "layers": len(watched.statistics.layers),
        "switched_layers": watched.statistics.switched,
        "ms_before": before,
        "ms_first_request_after": request(engine)[0],
    }
    found["ms_after"], tokens = fastest(engine)
    if torch.cuda.is_available():
        runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
        manager = runner.cudagraph_manager
        found["graphs"] = len(manager.graphs)
        manager.oss_recapture._stopped = True
        manager.graphs.clear()
        found["ms_without_graphs"] = fastest(engine)[0]
    found["tokens"] = {"before": first, "switched": tokens}
    (folder / MEASURED).touch()
    return found


def restarted(model: Path, layers: int, folder: Path) -> dict[str, Any]:
    """Time and tokens of a start with all linears in the policy."""
    from oss_fused.plugin.monitor.policy import add_layers

    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    policy = folder / "restart.json"
    add_layers(
        str(policy),
        {f"model.layers.{layer}.{name}": "saturates" for layer in range(layers) for name in names},
    )
    engine = start(model, policy, {})
    # one engine at a time has the device while times are taken
    end = time.monotonic() + 4 * PATIENCE
    while not (folder / MEASURED).exists():
        if time.monotonic() >= end:
            raise TimeoutError(
                f"the first engine was still timing after {4 * PATIENCE} s; expected it to end "
                f"before the restarted one has the device: run again, or with fewer --layers"
            )
        time.sleep(0.1)
    request(engine)
    spent, tokens = fastest(engine)
    return {"ms_restarted": spent, "tokens": tokens}


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: MIT
"""All checks of scripts/doctor.py: the machine, a checkpoint, and a first generation."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

from oss_fused.plugin import preflight
from oss_fused.plugin.checkpoint import check_checkpoint
from oss_fused.plugin.compat import TESTED_VLLM, HookResult, check_hooks, vllm_package
from oss_fused.plugin.preflight import FAIL, OK, SKIP, WARN, Check, guarded
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.settings import QUANT_METHOD

_SMOKE = """
import json, sys
from vllm import LLM, SamplingParams
options = json.loads(sys.argv[1])
llm = LLM(skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=2, **options)
params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False)
out = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)[0].outputs[0]
numbers = [step[t].logprob for step, t in zip(out.logprobs, out.token_ids)]
method = llm.llm_engine.vllm_config.model_config.quantization
print("SMOKE", json.dumps([list(out.token_ids), sum(numbers), method]))
"""
_SMOKE_SECONDS = 900
# what a line of a failed start begins its reason with
_REASON = re.compile(r"Value error, |(?:Checkpoint|Scheme|BackendUnavailable)Error: ")


@dataclass(frozen=True)
class Options:
    """What to check.

    Attributes:
        model: checkpoint folder, None for the machine alone.
        quantization: as `vllm serve` will be told; None lets the checkpoint say.
        device: "auto", "cuda" or "cpu".
        tensor_parallel_size: ranks that share the weights.
        pipeline_parallel_size: stages that share the layers.
        max_model_len: tokens of the longest request.
        gpu_memory_utilization: share of a GPU's memory that the server may take.
        trust_remote_code: the checkpoint may name Python code.
        smoke: generate a few tokens with vLLM.
        self_check: compare log-probabilities with those in the checkpoint before that.
    """

    model: Path | None = None
    quantization: str | None = None
    device: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_model_len: int = 8192
    gpu_memory_utilization: float = 0.9
    trust_remote_code: bool = False
    smoke: bool = False
    self_check: bool = False


def diagnose(options: Options) -> Iterator[Check]:
    """Run the checks in order; a bad checkpoint ends what depends on it."""
    yield guarded("versions", preflight.check_versions, "run `make setup`")
    yield guarded("vllm", _check_vllm)
    yield guarded("settings", preflight.check_settings)
    yield guarded("device", lambda: preflight.check_device(options.device))
    yield guarded("operators", preflight.check_operators, "reinstall torch, triton, oss-fused")
    yield guarded("tiles", preflight.check_tiles)
    yield guarded("nccl", _check_nccl)
    if options.model is None:
        yield Check("checkpoint", SKIP, "no MODEL given")
        return
    try:
        reader = check_checkpoint(options.model, options.trust_remote_code)
    except Exception as error:
        yield Check("checkpoint", FAIL, str(error), "do not serve it; fetch or calibrate it again")
        return
    yield _describe(reader)
    yield guarded("memory", lambda: _check_memory(reader, options))
    if options.smoke or options.self_check:
        yield guarded("smoke", lambda: _check_smoke(options))
    else:
        yield Check("smoke", SKIP, "not asked for (--smoke, --self-check)")


def table(checks: Sequence[Check]) -> str:
    """The checks as text, one a line, each remedy below its check."""
    lines = []
    for check in checks:
        lines.append(f"{check.status:5} {check.name:11} {check.detail}")
        if check.remedy and check.status not in (OK, SKIP):
            lines.append(f"{'':5} {'':11} -> {check.remedy}")
    return "\n".join(lines)


def hooks_table(results: Sequence[HookResult]) -> str:
    """Each hook of vLLM, its signature or kind, and what is wrong with it."""
    return "\n".join(
        f"{FAIL if r.problem else OK:5} {r.path} {r.problem or r.found}" for r in results
    )


def _check_vllm() -> Check:
    version = importlib.metadata.version("vllm")
    results = check_hooks(vllm_package())
    wrong = [f"{result.path} {result.problem}" for result in results if result.problem]
    tested = f"install vllm {' or '.join(TESTED_VLLM)}, or an oss_fused for your vllm"
    if wrong:
        more = f", and {len(wrong) - 1} more" if wrong[1:] else ""
        return Check("vllm", FAIL, f"{version}: {wrong[0]}{more}", f"{tested}; --hooks lists all")
    known = version.split("+")[0] in TESTED_VLLM
    text = f"{version}: all {len(results)} hooks fit"
    if known:
        return Check("vllm", OK, f"{text}; a tested release")
    return Check("vllm", WARN, f"{text}, but nobody tested this release", tested)


def _check_nccl() -> Check:
    """vLLM says nothing where it gives NCCL up; torch's own use of NCCL goes on."""
    if torch.cuda.device_count() < 2:
        return Check("nccl", SKIP, "fewer than two GPUs")
    try:
        return Check("nccl", OK, NCCLLibrary().ncclGetVersion())
    except Exception as error:
        return Check(
            "nccl",
            WARN,
            f"vLLM will not use it: {error}",
            "install the release that vLLM asks for, or name its file in VLLM_NCCL_SO_PATH; "
            "without it data parallelism of models with experts ends in an assertion",
        )


def _describe(reader: CheckpointReader) -> Check:
    method = (reader.config.get("quantization_config") or {}).get("quant_method", "none")
    scales = sum(name.endswith(("_scale", "_scales")) for name in reader.names())
    return Check(
        "checkpoint",
        OK,
        f"{len(reader.names())} tensors, {reader.total_bytes() / preflight.GIB:.2f} GiB, "
        f"quantisation {method}, {scales} scales, all finite and above 0",
    )


def served_bytes(reader: CheckpointReader, quantised: bool) -> int:
    """Bytes of the weights once they are served.

    Args:
        reader: the checkpoint.
        quantised: bf16 projections become FP8 while loading.
    """
    gpu, total = torch.cuda.is_available(), 0
    for name in reader.names():
        size, expert = reader.dtype(name).itemsize, ".experts." in name
        becomes_fp8 = quantised and name.endswith("_proj.weight") and not expert
        if gpu:
            size = 1 if becomes_fp8 else size
        elif expert and name.endswith(("_proj_scales", ".weight_scale", "_weight_scale")):
            size = 0  # a CPU multiplies them into the weights
        elif name.endswith("_proj_blocks"):
            size = 4  # two values a byte, unpacked to 16 bits: layers/vllm/experts/mxfp4.py
        elif reader.is_fp8(name) or becomes_fp8:
            size = 4 if expert else 2  # layers/vllm/experts/fp8.py; layers/vllm/linear.py
        total += torch.Size(reader.shape(name)).numel() * size
    return total


def _check_memory(reader: CheckpointReader, options: Options) -> Check:
    weights = served_bytes(reader, options.quantization == "oss_fp8") / preflight.GIB
    length = min(options.max_model_len, reader.config.get("max_position_embeddings", 1 << 20))
    sizes = options.tensor_parallel_size, options.pipeline_parallel_size
    needed = preflight.needed_gib(weights, reader.config, length, *sizes)
    return preflight.check_memory(needed, options.gpu_memory_utilization)


def _check_smoke(options: Options) -> Check:
    """Generate eight tokens in a process of its own, so that its memory is free afterwards."""
    settings: dict[str, Any] = {
        "model": str(options.model),
        "quantization": options.quantization,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "max_model_len": min(options.max_model_len, 256),
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "trust_remote_code": options.trust_remote_code,
    }
    if options.self_check:
        settings["additional_config"] = {"oss_fused": {"self_check": True}}
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _SMOKE, json.dumps(settings)],
        env={**defaults, **os.environ},
        capture_output=True,
        text=True,
        timeout=_SMOKE_SECONDS,
        check=False,
    )
    answer = [line for line in done.stdout.splitlines() if line.startswith("SMOKE ")]
    if done.returncode or not answer:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        # an engine in a process of its own has the reason further up
        reasons = [line for line in lines if _REASON.search(line)]
        checks = [line for line in reasons if "CheckpointError: self_check:" in line]
        reason = (checks[:1] or reasons[-1:] or lines[-1:])[0]
        text = _REASON.split(reason)[-1]
        return Check("smoke", FAIL, f"ended with status {done.returncode}: {text[:600]}")
    tokens, logprob, method = json.loads(answer[-1].removeprefix("SMOKE "))
    # NaN compares false
    if not logprob <= 0:
        return Check("smoke", FAIL, f"log-probability {logprob} of {tokens}: expected a number")
    if options.self_check and method != QUANT_METHOD:
        problem = f"nothing was compared with quantization {method}; expected {QUANT_METHOD}"
        return Check("smoke", FAIL, f"self_check: {problem}")
    passed = "; the self-check passed" if options.self_check else ""
    return Check("smoke", OK, f"{len(tokens)} tokens, log-probability {logprob:.2f}{passed}")

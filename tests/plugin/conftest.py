# SPDX-License-Identifier: MIT
"""An in-process engine of tiny models, and a fake-quantised reference."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.plugin.checkpoints import (  # noqa: F401  tests import these from here
    FP8,
    KV_SCHEME,
    build,
    calibrate,
    edit,
    few_tokens,
    fp8_experts,
    make_config,
    mxfp4_experts,
    quantize_rows,
    scheme,
    set_quantization,
    tensors_of,
    to_mxfp4,
)
from tests.plugin.cpu_kind import amx  # noqa: F401  a fixture

# read when vLLM is imported: the engine runs in this process, so that errors arrive as they are
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# vLLM compiles a few sampler functions even with enforce_eager: 15 s that prove nothing here
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

HAS_GPU = torch.cuda.is_available()
PROMPT = [3, 17, 42, 99, 5, 77, 23, 54, 61, 8, 30, 110]
NEW_TOKENS = 4

# a fixed cache keeps vLLM from measuring free memory, which tests that run side by side on one GPU
# would change under its feet
SHARED_GPU: dict[str, Any] = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**28}
# the engine as it serves: compiled, in CUDA graphs
GRAPHS: dict[str, Any] = {
    **SHARED_GPU,
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]},
}


class FakeQuantLinear(nn.Module):
    """Weights per row and activations per token rounded to FP8; independent of the package."""

    def __init__(self, linear: nn.Linear, inputs: str | None, input_scale: float) -> None:
        super().__init__()
        codes, scale = quantize_rows(linear.weight.data)
        self.weight, self.bias = codes.float() * scale, linear.bias
        self.inputs, self.input_scale = inputs, input_scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        if self.inputs == "token":
            codes, scale = quantize_rows(y)
            y = codes.float() * scale
        elif self.inputs == "tensor":
            y = (y / self.input_scale).clamp(-448, 448).to(FP8).float() * self.input_scale
        out = y @ self.weight.t()
        return (out if self.bias is None else out + self.bias.float()).to(x.dtype)


def reference_logprobs(
    folder: Path,
    tokens: list[int],
    inputs: str | None = "token",
    ignore: tuple[str, ...] = ("lm_head",),
    input_scale: float = 0.02,
    experts: str | None = None,
) -> torch.Tensor:
    """[T, vocab] log-probabilities of the unquantised model in ``folder``, fake-quantised."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name not in ignore and "router" not in name:
            fake = FakeQuantLinear(module, inputs, input_scale)
            model.set_submodule(name, fake)
        if experts == "fp8" and name.endswith(".experts"):
            for weight in (module.gate_up_proj, module.down_proj):
                codes, scale = quantize_rows(weight.data.transpose(1, 2))
                weight.data = (codes.float() * scale).transpose(1, 2).to(weight.dtype)
        if experts == "mxfp4" and name.endswith(".experts"):
            from oss_fused.quant.mxfp4 import pack_mxfp4, unpack_mxfp4

            for weight in (module.gate_up_proj, module.down_proj):
                packed = pack_mxfp4(weight.data.transpose(1, 2).contiguous())
                weight.data = unpack_mxfp4(*packed).transpose(1, 2).to(weight.dtype)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "dtype": "bfloat16",
}
if not HAS_GPU:
    # a GiB, the least that VLLM_CPU_KVCACHE_SPACE gives, takes up to seconds to fill with zeros
    DEFAULTS["kv_cache_memory_bytes"] = 2**26


@functools.cache
def _spare_the_imports() -> None:
    """Take what vLLM imports out of later garbage collections, most of an engine's start and end.

    vLLM freezes and unfreezes the heap around each engine, which would undo this.
    """
    if HAS_GPU:
        return  # the module of the CPU's worker changes what a GPU's needs
    import vllm.entrypoints.llm
    import vllm.model_executor.models.registry as registry
    import vllm.v1.worker.cpu_worker  # noqa: F401

    # vLLM looks at a model's class in a process of its own, which imports all of vLLM again
    registry._run_in_subprocess = lambda look: look()

    gc.collect()
    gc.freeze()
    # Triton's binding reports objects that are never collected as leaks
    atexit.register(gc.unfreeze)
    gc.freeze = gc.unfreeze = lambda: None


@functools.cache
def _keep_kernel_overrides() -> None:
    """The first engine puts its CPU kernels into every module; the next ones need no search.

    Neither where the first one fails to load: it has put them there before.
    """
    if HAS_GPU:
        return
    from vllm.triton_utils import dispatcher

    register = dispatcher.register_kernels

    def register_once(overrides: Any) -> None:
        register(overrides)
        dispatcher.register_kernels = lambda overrides: None

    dispatcher.register_kernels = register_once


def _one_level(options: dict[str, Any]) -> dict[str, Any]:
    """``options``, on a GPU with one level of codes in steps of few tokens, where they name none.

    The references and the prefills that tests compare with have one. Two are the default.
    """
    if not torch.cuda.is_available():
        return options
    config = options.get("additional_config", {})
    ours = {"linear_activations": "fp8"} | config.get("oss_fused", {})
    return options | {"additional_config": config | {"oss_fused": ours}}


class Engine:
    """vllm.LLM in this process."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from vllm import LLM
        from vllm.compilation.monitor import set_cudagraph_capturing_enabled
        from vllm.distributed import cleanup_dist_env_and_memory

        _spare_the_imports()
        _keep_kernel_overrides()
        # an engine that failed half way leaves its process groups behind
        cleanup_dist_env_and_memory()
        # one of vLLM's older model runner (DFlash) leaves the process without captures
        set_cudagraph_capturing_enabled(True)
        # numba's (n-gram speculation imports it) holds an object that answers to any attribute,
        # over which vLLM's CPU platform stumbles when it looks into every module's values
        ffi = sys.modules.pop("llvmlite.binding.ffi", None)
        # it would win over the size that DEFAULTS names
        space = os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        try:
            self.llm = LLM(model=str(folder), **_one_level(DEFAULTS | options))
        finally:
            if ffi is not None:
                sys.modules["llvmlite.binding.ffi"] = ffi
            if space is not None:
                os.environ["VLLM_CPU_KVCACHE_SPACE"] = space

    def generate(
        self, prompt: list[int] | None = None, lora: Any = None
    ) -> tuple[list[int], list[float]]:
        """Greedy tokens after the prompt, and the log-probability of each."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=NEW_TOKENS, logprobs=0, ignore_eos=True, detokenize=False
        )
        prompt = {"prompt_token_ids": PROMPT if prompt is None else prompt}
        answers = self.llm.generate([prompt], params, use_tqdm=False, lora_request=lora)
        out = answers[0].outputs[0]
        tokens = list(out.token_ids)
        return tokens, [step[t].logprob for step, t in zip(out.logprobs, tokens)]

    @property
    def runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def model(self) -> nn.Module:
        return self.runner.model

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture
def compiled(monkeypatch):
    """torch.compile on, which this file turns off for the CPU's sake."""
    # torch.compile reads it at each call
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)


@pytest.fixture
def engine():
    """Start engines; they are closed when the test ends."""
    engines: list[Engine] = []

    def start(folder: Path, **options: Any) -> Engine:
        for other in engines:
            other.close()
        engines.clear()
        engines.append(Engine(folder, **options))
        return engines[0]

    yield start
    for other in engines:
        other.close()


def assert_agrees(
    result: tuple[list[int], list[float]],
    folder: Path,
    tolerance: float = 0.15,
    prompt: list[int] = PROMPT,
    **options: Any,
) -> None:
    """Every generated token is (nearly) the reference's best, with its log-probability."""
    tokens, logprobs = result
    reference = reference_logprobs(folder, prompt + tokens, **options)
    for step, (token, logprob) in enumerate(zip(tokens, logprobs)):
        row = reference[len(prompt) - 1 + step]
        assert abs(row[token].item() - logprob) < tolerance, (step, row[token].item(), logprob)
        assert row.max().item() - row[token].item() < tolerance, (step, tokens)

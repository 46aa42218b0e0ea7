#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Scheduling time per decode step: vLLM's scheduler and the native one, on this machine's CPU.

No model runs and no GPU is needed: both schedulers are given the same requests of a gpt-oss (full
and sliding attention, prefix cache, asynchronous scheduling) and the same tokens, in turns, step by
step. While its kernels take less than that, a GPU waits for the scheduler.

  bench_scheduler.py --output docs/results/cpu/scheduler.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness.arguments import Help, output_file
from harness.model_factory import get_shape, make_model

from oss_fused.bench.report import text_table
from oss_fused.environment import fingerprint
from oss_fused.files import write_json

ARMS = ("vllm", "oss_fused")
BLOCK, WINDOW = 16, 128
# tokens of an engine step; positions of a sequence, and how many of them it may decode
STEP_TOKENS, LONGEST, MOST_TOKENS = 8192, 1 << 17, 1 << 16
# steps that vLLM starts before it has read the first one's tokens
DEPTH = 2
TOKEN = 5


class Simulated:
    """A scheduler and, in place of a model, one that answers each request with the same token."""

    def __init__(
        self,
        config: Any,
        make: Callable[..., Any],
        groups: Sequence[Any],
        blocks: int,
        caching: bool = True,
    ) -> None:
        """Start empty.

        Args:
            config: vLLM's.
            make: the scheduler's class, or what stands for it.
            groups: specification of the KV cache of each group of layers.
            blocks: that the cache has.
            caching: share the blocks of equal prefixes.
        """
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        layers = [KVCacheGroupSpec([f"layer.{i}"], group) for i, group in enumerate(groups)]
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.enable_prefix_caching = caching
        self.scheduler = make(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], layers),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._under_way: list[tuple[Any, list[bool]]] = []

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    def step(self, depth: int = DEPTH) -> tuple[Any, dict[int, Any], float]:
        """Schedule a step and, once ``depth`` are under way, take in the oldest one's tokens.

        Returns:
            what was scheduled, the outputs, and the scheduler's milliseconds.
        """
        begin = time.perf_counter()
        scheduled = self.scheduler.schedule()
        spent = time.perf_counter() - begin
        requests = self.scheduler.requests
        # a part of a prompt that is not the last one yields no token
        yields = [
            requests[name].num_computed_tokens >= requests[name].num_tokens
            for name in scheduled.num_scheduled_tokens
        ]
        self._under_way.append((scheduled, yields))
        outputs: dict[int, Any] = {}
        if len(self._under_way) >= depth:
            oldest, yields = self._under_way.pop(0)
            answer = _answer(list(oldest.num_scheduled_tokens), self.sample(oldest, yields))
            begin = time.perf_counter()
            outputs = self.scheduler.update_from_output(oldest, answer)
            spent += time.perf_counter() - begin
        return scheduled, outputs, spent * 1e3

    def sample(self, scheduled: Any, yields: list[bool]) -> list[list[int]]:
        """Tokens of each request of a step, none where ``yields`` is false."""
        return [[TOKEN] if end else [] for end in yields]


def _answer(names: list[str], tokens: list[list[int]]) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def main() -> int:
    """Parse the command line, measure, write JSON and show a table."""
    parser = make_parser()
    args = parser.parse_args()
    for name in ("requests", "contexts", "steps"):
        given = getattr(args, name)
        if min(np.atleast_1d(given)) < 1:
            parser.error(f"--{name} {given}: expected at least 1")
    context = max(args.contexts)
    if not fits(max(args.requests), context, args.steps):
        parser.error(
            f"--requests {max(args.requests)} --contexts {context} --steps {args.steps}: expected "
            f"sequences of at most {LONGEST} positions, {MOST_TOKENS} of them decoded"
        )
    with tempfile.TemporaryDirectory(prefix="oss-fused-scheduler-") as folder:
        config = make_config(Path(folder) / "model", max(args.requests))
    loads = [
        measure(config, requests, context, args.steps)
        for context in args.contexts
        for requests in args.requests
    ]
    head = {"kind": "oss_fused.bench_scheduler", "environment": fingerprint(), "steps": args.steps}
    write_json(args.output, head | {"loads": loads})
    rows = [
        [
            f"{load['requests']} x {load['context']}",
            *(f"{load[arm]['median_ms']:.2f} ({load[arm]['p90_ms']:.2f})" for arm in ARMS),
            f"{load['ratio']:.2f}",
        ]
        for load in loads
    ]
    header = ["requests x context", *(f"{arm}, ms per step (p90)" for arm in ARMS), "ratio"]
    print(text_table(header, rows), file=sys.stderr)
    return 0


def fits(requests: int, context: int, steps: int) -> bool:
    """Whether no sequence ends before the last step."""
    # the first ones decode while the last ones' prompts are read
    decoded = requests * context // STEP_TOKENS + steps + BLOCK
    return decoded <= MOST_TOKENS and context + decoded <= LONGEST


def make_parser() -> argparse.ArgumentParser:
    """Command line of the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("--output", type=output_file, required=True, help="JSON file to write")
    add("--requests", type=int, nargs="+", default=[1, 32, 128, 256], help="that decode at once")
    add("--contexts", type=int, nargs="+", default=[128, 1024], help="tokens of a prompt")
    add("--steps", type=int, default=96, help="decode steps a load (default: 96)")
    return parser


def make_config(model: Path, requests: int) -> Any:
    """vLLM's configuration of a gpt-oss that is scheduled ahead, as on a GPU."""
    from vllm import EngineArgs

    make_model(model, get_shape("gpt-oss", "tiny"))
    config = EngineArgs(
        model=str(model),
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_seqs=requests,
        max_num_batched_tokens=STEP_TOKENS,
    ).create_engine_config()
    # a CPU would not, and the tiny model ends early
    config.scheduler_config.async_scheduling = True
    config.model_config.max_model_len = config.scheduler_config.max_model_len = LONGEST
    return config


def measure(config: Any, requests: int, context: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a step's scheduling, while ``requests`` decode."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from oss_fused.plugin.scheduler import make_scheduler

    blocks = requests * 2 * ((context + steps) // BLOCK + 4) + 64
    groups = attention_groups()
    arms = [Simulated(config, make, groups, blocks) for make in (AsyncScheduler, make_scheduler)]
    random = np.random.default_rng(0)
    for number in range(requests):
        prompt = random.integers(100, 30000, context).tolist()
        for arm in arms:
            arm.add(str(number), prompt, MOST_TOKENS)
    for arm in arms:
        while sum(arm.step()[0].num_scheduled_tokens.values()) != requests:
            pass
    times: list[list[float]] = [[], []]
    for number in range(steps):
        # each is first every other time
        for which in (0, 1) if number % 2 else (1, 0):
            times[which].append(arms[which].step()[2])
    figures = {
        name: {
            "median_ms": round(statistics.median(spent), 4),
            "p90_ms": round(float(np.quantile(spent, 0.9)), 4),
        }
        for name, spent in zip(ARMS, times)
    }
    ratio = statistics.median(times[1]) / statistics.median(times[0])
    return {"requests": requests, "context": context, **figures, "ratio": round(ratio, 3)}


def attention_groups() -> list[Any]:
    """KV cache of gpt-oss's layers: full attention, and windows."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    sizes = {"block_size": BLOCK, "num_kv_heads": 8, "head_size": 64, "dtype": torch.bfloat16}
    return [FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=WINDOW)]


if __name__ == "__main__":
    sys.exit(main())

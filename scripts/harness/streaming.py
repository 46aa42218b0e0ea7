# SPDX-License-Identifier: MIT
"""Loads a server with streamed and with whole answers in turn and compares tokens per second."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from harness import processes
from harness.arms import CPU_ENVIRONMENT
from harness.server import VLLM_SERVE, Server
from oss_fused.environment import has_gpu
from oss_fused.errors import ServerError

KINDS = ("whole", "streamed")
_PATIENCE_SECONDS = 1800.0
_EVENT = b"data: "


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        model: checkpoint folder.
        requests: at once.
        inputs, outputs: tokens of a request.
        repeats: pairs of runs.
        serve_flags: further flags of `vllm serve`.
        startup_timeout: seconds until the server is healthy.
        seed: of the prompts.
        after: process that must have ended before anything is measured; the server starts at once.
        serve_command: replaced in tests.
    """

    model: str
    requests: int = 200
    inputs: int = 128
    outputs: int = 512
    repeats: int = 3
    serve_flags: Sequence[str] = ()
    startup_timeout: float = 900.0
    seed: int = 0
    after: int | None = None
    serve_command: Sequence[str] = VLLM_SERVE


def vocabulary_of(model: str) -> int:
    """Number of token ids of a checkpoint.

    Raises:
        OSError: the folder has no config.json.
        ValueError: the file names no vocabulary.
    """
    path = Path(model) / "config.json"
    config = json.loads(path.read_text())
    size = config.get("vocab_size")
    if not isinstance(size, int) or size < 2:
        raise ValueError(f"{path}: vocab_size is {size!r}, expected an integer of at least 2")
    return size


def say(text: str) -> None:
    """Print to stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def run(
    plan: Plan, vocabulary: int, scratch: Path, say: Callable[[str], None] = say
) -> dict[str, Any]:
    """Start the server, put both loads on it in turn, and return the figures.

    Args:
        plan: what to measure.
        vocabulary: prompts are token ids below it.
        scratch: folder for the server's log.
        say: called with a line on the progress.

    Returns:
        "settings", "runs" (each "kind", "seconds", "tokens_per_s"), "tokens_per_s" (kind ->
        median) and "ratio" (streamed over whole).

    Raises:
        ServerError: the server fails, or an answer has not the number of tokens asked for.
    """
    environment = {**({} if has_gpu() else CPU_ENVIRONMENT), **os.environ}
    length = plan.inputs + plan.outputs + 128
    flags = ["--max-model-len", str(length), "--max-num-seqs", str(plan.requests)]
    flags += ["--no-enable-prefix-caching", *plan.serve_flags]
    log, command = scratch / "server.log", plan.serve_command
    with Server(
        "m", plan.model, flags, log, environment, None, command, plan.startup_timeout
    ) as server:
        say(f"healthy after {server.wait_until_healthy():.0f} s")
        if plan.after is not None:
            processes.wait_for_end(plan.after)
        measured = measure(plan, server, vocabulary, say)
    settings = {**asdict(plan), "command": server.command}
    del settings["serve_command"], settings["after"]
    return {"settings": settings, **measured}


def measure(
    plan: Plan, server: Server, vocabulary: int, say: Callable[[str], None] = say
) -> dict[str, Any]:
    """Put both loads on a healthy server in turn; what ``run`` returns without "settings"."""
    runs: list[dict[str, Any]] = []
    # the first pair warms up; the order alternates
    for number in range(plan.repeats + 1):
        for kind in KINDS if number % 2 else KINDS[::-1]:
            prompts = _prompts(plan, vocabulary, number)
            seconds = asyncio.run(_load(plan, server, prompts, kind == "streamed"))
            rate = plan.requests * plan.outputs / seconds
            say(f"    {server.name:<12} {kind:<9} {seconds:7.2f} s  {rate:9.1f} tok/s")
            if number:
                runs.append({"kind": kind, "seconds": seconds, "tokens_per_s": rate})
    rates = {
        kind: statistics.median(run["tokens_per_s"] for run in runs if run["kind"] == kind)
        for kind in KINDS
    }
    return {
        "runs": runs,
        "tokens_per_s": rates,
        "ratio": round(rates["streamed"] / rates["whole"], 4),
    }


def _prompts(plan: Plan, vocabulary: int, number: int) -> list[list[int]]:
    """The same for both kinds of a pair."""
    chance = random.Random(f"{plan.seed}-{number}")
    return [
        [chance.randrange(vocabulary) for _ in range(plan.inputs)] for _ in range(plan.requests)
    ]


async def _load(
    plan: Plan, server: Server, prompts: Sequence[Sequence[int]], streamed: bool
) -> float:
    """Send all prompts at once; seconds until the last answer has ended."""
    timeout, connector = aiohttp.ClientTimeout(_PATIENCE_SECONDS), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, timeout=timeout, connector=connector) as client:
        begin = time.perf_counter()
        tasks = [_request(client, server.name, plan, prompt, streamed) for prompt in prompts]
        try:
            counts = await asyncio.gather(*tasks)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            server.check("under load")
            raise ServerError(f"server {server.name}: a request failed: {error!r}") from error
        seconds = time.perf_counter() - begin
    wrong = [count for count in counts if count != plan.outputs]
    if wrong:
        raise ServerError(
            f"server {server.name}: an answer has {wrong[0]} tokens, expected {plan.outputs}"
        )
    return seconds


async def _request(
    client: aiohttp.ClientSession, name: str, plan: Plan, prompt: Sequence[int], streamed: bool
) -> int:
    """Tokens of the answer, as the server counts them."""
    body: dict[str, Any] = {"model": name, "prompt": prompt, "max_tokens": plan.outputs}
    body |= {"temperature": 0, "ignore_eos": True}
    if streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with client.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        if not streamed:
            return int((await response.json())["usage"]["completion_tokens"])
        # only the end is read as JSON: the client must not be what is measured
        tail = b""
        async for piece in response.content.iter_any():
            tail = (tail + piece)[-4096:]
    events = [event for event in tail.split(b"\n\n") if event.startswith(_EVENT)]
    if len(events) < 2 or events[-1] != _EVENT + b"[DONE]":
        raise ValueError(f"the stream ended with {tail[-100:]!r}, expected [DONE]")
    return int(json.loads(events[-2][len(_EVENT) :])["usage"]["completion_tokens"])

# SPDX-License-Identifier: MIT
"""What one kind of KV cache does to a vLLM model's logits; a process of its own.

`python -m harness.kv_cache_worker JOB.json` with "model", "flags", "prompts" (npz of token ids),
"states" (file of the reference's), "is_reference" and "output". The engine runs in this process
and eagerly, so that every step passes through the model's forward. It reads each prompt alone and
twice:

* prefill: in steps as long as the engine takes them;
* decode: the last tokens one a step, as in decoding, but with the prompt's tokens.

One worker, the reference, saves the hidden states of the last positions. The other multiplies these
and its own by its own head, and compares the logits over the whole vocabulary.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.logits_worker import compare, wait_for
from harness.vllm_logprobs import make_engine

# rows whose logits are in memory at once
_ROWS = 128
# last positions of a prompt that are compared
TAILS = {"prefill": 256, "decode": 64}


class Tail:
    """Hidden states of a prompt's last positions, from whatever steps they come in."""

    def __init__(self, model: Any) -> None:
        """``model``: vLLM's; its forward gets "positions" and returns hidden states [T, H]."""
        self._first: int | None = None
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        model.register_forward_hook(self._record, with_kwargs=True)

    def start(self, first: int) -> None:
        """Keep positions from ``first`` (at least 1) on; forget what there was."""
        self._first, self._rows = first, []

    def _record(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._first is None:  # warm-up
            return
        positions = kwargs["positions"][: len(output)]
        wanted = positions >= self._first  # rows of padding have position 0
        self._rows.append((positions[wanted], output[wanted]))

    def take(self, count: int) -> torch.Tensor:
        """The states [count, H] in the order of their positions.

        Raises:
            ValueError: a position has not passed through the model, or twice.
        """
        positions = torch.cat([places for places, _ in self._rows])
        order = positions.argsort()
        first = self._first or 0
        if positions[order].tolist() != list(range(first, first + count)):
            raise ValueError(f"{len(positions)} positions from {first} on: expected {count}")
        return torch.cat([rows for _, rows in self._rows])[order]


class Reader:
    """Reads prompts with an engine, one after the other."""

    def __init__(self, vllm: Any, engine: Any) -> None:
        """``engine``: vLLM's LLMEngine, in this process, with prefix caching."""
        self.engine = engine
        self._greedy = vllm.SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True
        )
        self._scheduler = engine.engine_core.engine_core.scheduler
        self.model = engine.model_executor.driver_worker.worker.model_runner.model
        self._tail = Tail(self.model)
        self._count = 0

    @torch.no_grad()
    def states(self, prompt: list[int], tail: int, one_a_step: bool) -> torch.Tensor:
        """Hidden states [tail, H] of the last positions.

        Raises:
            RuntimeError: the prefix cache did not keep what came before them.
        """
        self.engine.reset_prefix_cache()
        self._tail.start(len(prompt) - tail)
        if one_a_step:
            self._read(prompt[:-tail], 0, len(prompt))
        # a block or two of the cached tokens are computed again
        steps = 2 * tail + 512 if one_a_step else len(prompt)
        self._tail.start(len(prompt) - tail)
        self._read(prompt, int(one_a_step), steps)
        return self._tail.take(tail)

    def _read(self, prompt: list[int], most_tokens: int, most_steps: int) -> None:
        self._scheduler.scheduler_config.long_prefill_token_threshold = most_tokens
        self._count += 1
        name = f"prompt-{self._count}"
        self.engine.add_request(name, {"prompt_token_ids": prompt}, self._greedy)
        for _ in range(most_steps):
            self.engine.step()
            if not self.engine.has_unfinished_requests():
                return
        self.engine.abort_request([name])
        raise RuntimeError(f"{len(prompt)} tokens in {most_tokens} a step: over {most_steps} steps")

    def divergence(self, reference: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[T, 2]: KL(reference || states) in nats and whether the top token is the same."""
        pairs = zip(reference.to(states).split(_ROWS), states.split(_ROWS), strict=True)
        return torch.cat([compare(self._logits(a), self._logits(b)) for a, b in pairs])

    @torch.no_grad()
    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.compute_logits(states)
        return logits.float()


def figures(rows: torch.Tensor) -> dict[str, float]:
    """Of ``Reader.divergence``: means, and the 99th percentile of KL."""
    kl, same = rows.double().cpu().unbind(1)
    return {
        "kl": float(kl.mean()),
        "kl_p99": float(kl.quantile(0.99)),
        "top1_agreement": float(same.mean()),
        "positions": len(kl),
    }


def measure(reader: Reader, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Figures of each prompt, after saving or reading the reference's states."""
    prompts = list(np.load(job["prompts"]).values())
    states: dict[str, torch.Tensor] = {}
    for number, prompt in enumerate(prompts):
        for kind, tail in TAILS.items():
            states[f"{kind} {number}"] = reader.states(prompt.tolist(), tail, kind == "decode")
    path = Path(job["states"])
    if job["is_reference"]:
        scratch = path.with_suffix(".tmp")
        torch.save({name: rows.cpu() for name, rows in states.items()}, scratch)
        scratch.rename(path)
    else:
        wait_for(path)
        reference = torch.load(path)
    rows = []
    for number, prompt in enumerate(prompts):
        row: dict[str, Any] = {"context": len(prompt)}
        if job["is_reference"]:
            # two ways of computing the same: what rounding alone does
            last = states[f"prefill {number}"][-TAILS["decode"] :]
            row["prefill_from_decode"] = figures(
                reader.divergence(last, states[f"decode {number}"])
            )
        else:
            for kind in TAILS:
                name = f"{kind} {number}"
                row[kind] = figures(reader.divergence(reference[name], states[name]))
        rows.append(row)
    return rows


def main() -> int:
    """Read the prompts and write the figures."""
    job = json.loads(Path(sys.argv[1]).read_text())
    # vLLM is what is measured: this program needs it, importing the package does not
    vllm = importlib.import_module("vllm")
    reader = Reader(vllm, make_engine(vllm, job["model"], job["flags"]).llm_engine)
    begin = time.monotonic()
    rows = measure(reader, job)
    result = {"prompts": rows, "seconds": round(time.monotonic() - begin, 2)}
    Path(job["output"]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: MIT
"""Logits of one vLLM set-up against the reference's: KL divergence and top-1 agreement.

`python -m harness.logits_worker JOB.json` with {"model", "flags", "tokens", "reference",
"output"}. The engine runs in this process and eagerly, so that every step's rows pass through the
model's forward; it reads the same prompts twice:

* prefill: whole prompts, all in one step where it has room;
* decode: one token of every sequence a step, as in decoding, but with the prompt's tokens.

Logits are compared over the whole vocabulary. The reference's are its hidden states times the
checkpoint's own head, in float32.
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

from harness.vllm_logprobs import make_engine
from oss_fused.quant.checkpoint.reader import CheckpointReader

_WAIT_SECONDS = 300
# rows whose logits are in memory at once
_ROWS = 256


class Recorder:
    """Collects KL and agreement of the rows that pass through a model."""

    def __init__(self, model: Any, tokens: np.ndarray, head: torch.Tensor) -> None:
        """See the class.

        Args:
            model: vLLM's, with ``compute_logits``.
            tokens: [B, L], no token twice at one position.
            head: [vocabulary, H] of the checkpoint.
        """
        self.model, self.head = model, head
        self.states: torch.Tensor | None = None
        self.rows: list[torch.Tensor] = []
        self.seen: set[tuple[int, int]] = set()
        self._place = {
            (place, int(token)): (row, place)
            for row, line in enumerate(tokens)
            for place, token in enumerate(line)
        }
        model.register_forward_hook(self._record, with_kwargs=True)

    def _record(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self.states is None:  # warm-up
            return
        ids, positions = kwargs["input_ids"].tolist(), kwargs["positions"].tolist()
        found = [(i, self._place.get(key)) for i, key in enumerate(zip(positions, ids))]
        known = [(i, place) for i, place in found if place is not None and place not in self.seen]
        for start in range(0, len(known), _ROWS):
            part = known[start : start + _ROWS]
            picked = torch.tensor([i for i, _ in part], device=output.device)
            where = torch.tensor([place for _, place in part], device=output.device)
            logits = self.model.compute_logits(output[picked])
            reference = self.states[where[:, 0], where[:, 1]] @ self.head.T
            self.rows.append(compare(reference, logits[:, : reference.shape[1]].float()))
        self.seen |= {place for _, place in known}

    def start(self, states: torch.Tensor) -> None:
        """Compare with the reference's hidden states [B, L, H], float32, from here on."""
        self.states, self.rows, self.seen = states, [], set()

    def figures(self) -> dict[str, float]:
        """Figures of all rows since ``start``.

        Raises:
            ValueError: some position has not passed through the model.
        """
        if len(self.seen) != len(self._place):
            raise ValueError(f"{len(self.seen)} of {len(self._place)} positions were seen")
        kl, same = torch.cat(self.rows).double().cpu().unbind(1)
        return {
            "kl": float(kl.mean()),
            "kl_p99": float(kl.quantile(0.99)),
            "top1_agreement": float(same.mean()),
            "positions": len(kl),
        }


def compare(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """[R, 2]: KL(reference || logits) in nats and whether the top token is the same."""
    log_p, log_q = reference.log_softmax(-1), logits.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    same = reference.argmax(-1) == logits.argmax(-1)
    return torch.stack([kl, same.float()], 1)


def read_head(model: str, device: torch.device) -> torch.Tensor:
    """The head's weight in float32; the embedding's where they are tied."""
    reader = CheckpointReader(model)
    name = "lm_head.weight" if "lm_head.weight" in reader else "model.embed_tokens.weight"
    return reader.read(name).to(device).float()


def main() -> int:
    """Run both passes against each of the reference's dtypes and write the figures."""
    job = json.loads(Path(sys.argv[1]).read_text())
    tokens = np.load(job["tokens"])
    vllm = importlib.import_module("vllm")
    engine = make_engine(vllm, job["model"], job["flags"]).llm_engine
    core = engine.engine_core.engine_core
    runner = engine.model_executor.driver_worker.worker.model_runner
    device = next(runner.model.parameters()).device
    recorder = Recorder(runner.model, tokens, read_head(job["model"], device))
    reference = dict(np.load(wait_for(Path(job["reference"]))))
    results: dict[str, Any] = {}
    for dtype, states in reference.items():
        for name, threshold in (("prefill", 0), ("decode", 1)):
            core.scheduler.scheduler_config.long_prefill_token_threshold = threshold
            recorder.start(torch.from_numpy(states).to(device))
            begin = time.monotonic()
            steps = _read_prompts(vllm, engine, tokens)
            results.setdefault(dtype, {})[name] = recorder.figures() | {
                "steps": steps,
                "seconds": round(time.monotonic() - begin, 2),
            }
    Path(job["output"]).write_text(json.dumps(results))
    return 0


def wait_for(path: Path) -> Path:
    """Wait until another process has written ``path``, and return it.

    Raises:
        TimeoutError: it took too long.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    while not path.is_file():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path}: no reference after {_WAIT_SECONDS} s")
        time.sleep(0.2)
    return path


def _read_prompts(vllm: Any, engine: Any, tokens: np.ndarray) -> int:
    """Let the engine read all prompts at once; returns its steps."""
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True)
    for number, prompt in enumerate(tokens.tolist()):
        engine.add_request(f"row-{number}", {"prompt_token_ids": prompt}, greedy)
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    return steps


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: MIT
"""One vLLM engine in a process of its own, controlled by lines on stdin.

`python -m harness.decode_worker JOB.json` with {"model", "flags"}. When the engine is up it
says {"ready": true}; each further line is a JSON request and is answered by one JSON line, which
is {"error": ...} where something failed:

    {"do": "decode", "batch", "context", "steps", "seed"} -> {"ms": [...], "distinct": share}
    {"do": "prefill", "batch", "context", "seed"} -> {"ms": [...]}
    {"do": "profile", "batch", "context", "steps", "seed"} -> of WorkerExtension; 0 steps: prefill
    {"do": "host", "batch", "context", "steps", "seed"} -> {"ms", "tokens", "host_ms": {part: ms}}
    {"do": "bandwidth"} -> {"bytes_per_second"}

The scheduler runs in vLLM's own engine process, as it does when serving. Equal seeds give equal
prompts, of which vLLM's prefix cache keeps what it has computed: no two sequences of a batch share
a block, so decoding is as without it. Its own output goes to stderr.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from harness.vllm_logprobs import make_engine

# tokens of each sequence between two time stamps: outputs of single steps may arrive in pairs
WINDOW = 8
# engine steps after the last prefill that do not count
SETTLE = 4
# seconds that the engine has to drop aborted sequences
_IDLE = 0.1
_EXTENSION = "harness.decode_extension.WorkerExtension"


class Measure:
    """The measurements; ``engine`` is vLLM's LLMEngine.

    Steps are timed by the stamps of the engine's process: this one may read tokens late, from a
    queue, and then faster than they were made.
    """

    def __init__(self, vllm: Any, engine: Any) -> None:
        """See the class."""
        self.engine = engine
        self._sampling = vllm.SamplingParams
        self._delta = vllm.sampling_params.RequestOutputKind.DELTA
        self._vocab = engine.model_config.get_vocab_size()
        self._limit = engine.model_config.max_model_len
        self._ids = itertools.count()
        # seconds at which the engine's process made the last outputs
        self._made = 0.0
        receive = engine.engine_core.get_output

        def note() -> Any:
            outputs = receive()
            self._made = outputs.timestamp
            return outputs

        engine.engine_core.get_output = note

    def decode(self, batch: int, context: int, steps: int, seed: int) -> dict[str, Any]:
        """Milliseconds per step of ``batch`` sequences, one value every WINDOW steps or more.

        A step yields one token per sequence; an engine step that is a burst of K counts as K.
        "distinct" is the share of different tokens among those of the last step: experts are
        touched as in real use only where it is high.
        """
        names = self._start(batch, context, seed)
        times: list[float] = []
        last: dict[str, int] = {}
        done = marked = 0
        begin = self._made
        while done < steps:
            tokens = self._step()
            last |= {name: ids[-1] for name, ids in tokens.items()}
            done += max(map(len, tokens.values()))
            if done - marked >= WINDOW:
                times.append((self._made - begin) * 1e3 / (done - marked))
                begin, marked = self._made, done
        self.engine.abort_request(names)
        return {"ms": times, "distinct": len(set(last.values())) / len(last)}

    def prefill(self, batch: int, context: int, seed: int) -> dict[str, Any]:
        """Milliseconds from the first request to the last one's first token."""
        time.sleep(_IDLE)
        begin = time.perf_counter()
        self._wait_for(self._add(batch, context, seed, 1))
        return {"ms": [(time.perf_counter() - begin) * 1e3]}

    def profile(self, batch: int, context: int, steps: int, seed: int) -> dict[str, Any]:
        """Kernels of ``steps`` decode steps, or, with 0, of the prefill.

        Bursts must be off: kernels of one that is under way would count.
        """
        time.sleep(_IDLE)
        names = self._start(batch, context, seed) if steps else []
        self.engine.collective_rpc("oss_profile_start")
        for _ in range(steps):
            self._step()
        if not steps:
            self._wait_for(self._add(batch, context, seed, 1))
        result = self.engine.collective_rpc("oss_profile_stop")[0]
        self.engine.abort_request(names)
        return dict(result)

    def host(self, batch: int, context: int, steps: int, seed: int) -> dict[str, Any]:
        """Milliseconds of an engine step, tokens that it gives a sequence, and its host time.

        Bursts must be off. With drafts a step verifies them and drafts again.
        """
        time.sleep(_IDLE)
        names = self._start(batch, context, seed)
        self.engine.collective_rpc("oss_host_start")
        begin = self._made
        tokens = sum(len(ids) for _ in range(steps) for ids in self._step().values())
        wall = self._made - begin
        parts = self.engine.collective_rpc("oss_host_stop")[0]
        self.engine.abort_request(names)
        return {"ms": 1e3 * wall / steps, "tokens": tokens / steps / batch, "host_ms": parts}

    def bandwidth(self) -> dict[str, Any]:
        """Copy bandwidth of the device."""
        return {"bytes_per_second": self.engine.collective_rpc("oss_copy_bandwidth")[0]}

    def _start(self, batch: int, context: int, seed: int) -> list[str]:
        """Sequences that decode until they are aborted."""
        names = self._add(batch, context, seed, self._limit - context)
        self._wait_for(names)
        for _ in range(SETTLE):
            self._step()
        return names

    def _add(self, batch: int, context: int, seed: int, max_tokens: int) -> list[str]:
        parameters = self._sampling(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._delta,
        )
        names = [f"bench-{next(self._ids)}" for _ in range(batch)]
        for row, name in enumerate(names):
            # the first prompts of a larger batch are those of a smaller one
            generator = np.random.default_rng((seed, context, row))
            prompt = generator.integers(100, self._vocab - 100, context).tolist()
            self.engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        return names

    def _wait_for(self, names: list[str]) -> None:
        """Until each has its first token."""
        waiting = set(names)
        while waiting:
            waiting -= self._step().keys()

    def _step(self) -> dict[str, list[int]]:
        """The tokens of the next step that has any; what is left of aborted sequences has none."""
        while True:
            outputs = self.engine.step()
            tokens = {o.request_id: list(o.outputs[0].token_ids) for o in outputs if o.outputs}
            tokens = {name: ids for name, ids in tokens.items() if ids}
            if tokens:
                return tokens


def main() -> int:
    """Start the engine and answer requests until stdin ends."""
    # vLLM prints to stdout, also from C: keep the answers apart from that
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.loads(Path(sys.argv[1]).read_text())
    # imported late: only the program needs vLLM, not the import of this module
    vllm = importlib.import_module("vllm")
    flags = [*job["flags"], "--worker-extension-cls", _EXTENSION]
    measure = Measure(vllm, make_engine(vllm, job["model"], flags).llm_engine)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(measure, request.pop("do"))(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())

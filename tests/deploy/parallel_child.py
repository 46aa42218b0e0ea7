# SPDX-License-Identifier: MIT
"""Continues prompts greedily with an engine of its own; `tests.deploy.parallel` starts it.

python -m tests.deploy.parallel_child OPTIONS PROMPTS, both JSON; prints "RESULT" and an answer per
prompt. OPTIONS are vllm.LLM's, and `reload`: a checkpoint whose weights the engine loads before it
answers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

NEW_TOKENS, TOP = 24, 5
# of a prompt: its greedy tokens, and at each step the log-probabilities of the best tokens
Answer = tuple[list[int], list[dict[str, float]]]
OPTIONS = {"max_model_len": 128, "max_num_seqs": 4, "enforce_eager": True}


def complete(llm: Any, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Greedy answers of a vllm.LLM, as they come back from JSON."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=TOP, detokenize=False
    )
    answers: list[Answer] = []
    for out in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False):
        best = out.outputs[0]
        rows = [{str(token): v.logprob for token, v in row.items()} for row in best.logprobs]
        answers.append((list(best.token_ids), rows))
    return answers


def main() -> None:
    """Start the engine and print its answers."""
    from vllm import LLM

    options, prompts = map(json.loads, sys.argv[1:])
    other = options.pop("reload", None)
    llm = LLM(**(OPTIONS | options))
    if other is not None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
    for answer in complete(llm, prompts):
        print("RESULT", json.dumps(answer))


if __name__ == "__main__":
    main()

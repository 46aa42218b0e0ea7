# SPDX-License-Identifier: MIT
"""Runs text through vLLM and saves the log-probabilities of its tokens; a process of its own.

`python -m harness.vllm_logprobs JOB.json`, with the fields of logprobs.Job. A process per
model frees all memory between models and keeps a crash apart from the measurement.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from harness.needle import ANSWER_TOKENS, build_prompt


def main() -> int:
    """Score the job's texts and write one npz file."""
    job = json.loads(Path(sys.argv[1]).read_text())
    texts = [Path(path).read_text() for path in job["texts"]]
    # vLLM is what is measured: this program needs it, importing the package does not
    vllm = importlib.import_module("vllm")
    llm = make_engine(vllm, job["model"], job["flags"])
    # a model without so many tokens has no more to rank
    top = min(job["top"], llm.llm_engine.model_config.get_vocab_size())
    windows, owners = [], []
    for number, text in enumerate(texts):
        parts = split(llm.get_tokenizer(), text, job["window"], job["max_tokens"])
        windows += parts
        owners += [number] * len(parts)
    parameters = vllm.SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=top, detokenize=False
    )
    start = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in windows], parameters)
    arrays = [
        window_logprobs(ids, output.prompt_logprobs, top) for ids, output in zip(windows, outputs)
    ]
    names = ("token_ids", "token_logprobs", "top_ids", "top_logprobs")
    joined = {name: np.concatenate([array[i] for array in arrays]) for i, name in enumerate(names)}
    prompts = [build_prompt(llm.get_tokenizer(), texts[0], needle) for needle in job["needles"]]
    greedy = vllm.SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)
    replies = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy)
    joined["answers"] = np.array([reply.outputs[0].text for reply in replies], dtype=np.str_)
    counts = [len(ids) - 1 for ids in windows]
    np.savez(
        job["output"], owner=np.repeat(owners, counts), seconds=time.monotonic() - start, **joined
    )
    return 0


def make_engine(vllm: Any, model: str, flags: list[str]) -> Any:
    """``vllm.LLM`` of a folder, with flags as `vllm serve` takes them."""
    parsing = importlib.import_module("vllm.utils.argparse_utils")
    engine_args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    parser = engine_args.add_cli_args(parsing.FlexibleArgumentParser())
    arguments = parser.parse_args(["--model", model, *flags])
    return vllm.LLM(**vars(engine_args.from_cli_args(arguments)))


def split(tokenizer: Any, text: str, window: int, max_tokens: int) -> list[list[int]]:
    """Token ids of ``text`` in windows; a tokenizer that begins texts with BOS begins each so."""
    ids = list(tokenizer.encode(text))
    bos = tokenizer.bos_token_id
    head = [bos] if ids and bos is not None and ids[0] == bos else []
    ids = ids[len(head) :][:max_tokens]
    size = window - len(head)
    parts = [head + ids[i : i + size] for i in range(0, len(ids), size)]
    return [part for part in parts if len(part) > 1]


def window_logprobs(
    ids: list[int], logprobs: Any, top: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Arrays of one window, without its first token, which nothing predicts.

    Returns:
        The token ids [T], their log-probabilities [T], the likeliest ids [T, top] from the top
        down and their log-probabilities [T, top].
    """
    count = len(ids) - 1
    own = np.empty(count, np.float32)
    top_ids = np.empty((count, top), np.int32)
    top_values = np.empty((count, top), np.float32)
    for place, (token, entries) in enumerate(zip(ids[1:], logprobs[1:])):
        own[place] = entries[token].logprob
        # the token itself comes first, in addition to the likeliest ones
        ranked = sorted(entries.items(), key=lambda item: (item[1].rank, -item[1].logprob))[:top]
        top_ids[place] = [token_id for token_id, _ in ranked]
        top_values[place] = [entry.logprob for _, entry in ranked]
    return np.asarray(ids[1:], np.int32), own, top_ids, top_values


if __name__ == "__main__":
    sys.exit(main())

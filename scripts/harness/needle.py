# SPDX-License-Identifier: MIT
"""Needle in a haystack: does a model still find a pass key in a long text?

A test of the KV cache: perplexity over short windows hides what an FP8 cache does to attention over
thousands of tokens. Prompts are built from token ids, so their length is exact.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
ANSWER_TOKENS = 16
QUESTION = "\n\nQuestion: What is the pass key?\nAnswer: The pass key is"


def key_text(key: str) -> str:
    """What a text says of its key."""
    return f"\n\nThe pass key is {key}. Remember it: {key}.\n\n"


def make_needles(lengths: Sequence[int], seed: int = 0) -> list[dict[str, Any]]:
    """One needle for every length and depth: "length" in tokens, "depth" in 0..1, "key"."""
    generator = random.Random(seed)
    return [
        {"length": length, "depth": depth, "key": str(generator.randrange(10000, 100000))}
        for length in lengths
        for depth in DEPTHS
    ]


def build_prompt(tokenizer: Any, haystack: str, needle: dict[str, Any]) -> list[int]:
    """Token ids of the prompt: text with the key in it, then the question.

    Args:
        tokenizer: of the model; needs ``encode`` and ``bos_token_id``.
        haystack: any text; repeated as often as needed.
        needle: as ``make_needles`` returns them.

    Raises:
        ValueError: the length has no room for key and question, or the haystack is empty.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    key, question = encode(key_text(needle["key"])), encode(QUESTION)
    filler = encode(haystack)
    head = [tokenizer.bos_token_id] if tokenizer.encode("a")[:1] == [tokenizer.bos_token_id] else []
    room = needle["length"] - len(head) - len(key) - len(question)
    if room < 0 or not filler:
        raise ValueError(
            f"needle of {needle['length']} tokens: expected at least "
            f"{needle['length'] - room} tokens and a haystack that is not empty"
        )
    hay = (filler * (room // len(filler) + 1))[:room]
    place = round(needle["depth"] * room)
    return head + hay[:place] + key + hay[place:] + question


def found(answer: str, key: str) -> bool:
    """Whether the answer begins with the key, also where it is quoted or bold."""
    return answer.lstrip(" \"'*:`").startswith(key)


def retrieval(needles: Sequence[dict[str, Any]], answers: Sequence[str]) -> dict[str, Any]:
    """Share found: "rate" over all and "by_length" -> share; "missed": the needles not found."""
    hits = [found(answer, needle["key"]) for needle, answer in zip(needles, answers)]
    by_length = {}
    for length in dict.fromkeys(needle["length"] for needle in needles):
        chosen = [hit for needle, hit in zip(needles, hits) if needle["length"] == length]
        by_length[str(length)] = sum(chosen) / len(chosen)
    missed = [
        {**needle, "answer": answer}
        for needle, answer, hit in zip(needles, answers, hits)
        if not hit
    ]
    return {"rate": sum(hits) / len(hits), "by_length": by_length, "missed": missed}

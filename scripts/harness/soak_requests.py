# SPDX-License-Identifier: MIT
"""The kinds of request that a soak test mixes; each checks its answer."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

COMPLETIONS = "/v1/completions"
WORDS = "the river runs past an old mill where seven painters live and sell their work in spring"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "rank": {"enum": [1, 2, 3]}},
    "required": ["city", "rank"],
    "additionalProperties": False,
}


class WrongAnswer(Exception):
    """The server's answer is wrong for the request."""


@dataclass(frozen=True)
class Target:
    """The server under test.

    Attributes:
        client: HTTP client with the server's address.
        model: served name.
        max_model_len: tokens; longer prompts must be refused.
    """

    client: httpx.Client
    model: str
    max_model_len: int

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST ``body`` with the model's name."""
        return self.client.post(path, json={"model": self.model, **body})


Kind = Callable[[Target, random.Random], None]


def short(target: Target, chance: random.Random) -> None:
    """A few tokens after a few words."""
    _text(_good(target.post(COMPLETIONS, prompt=_prompt(chance, 8), max_tokens=8)))


def long(target: Target, chance: random.Random) -> None:
    """A prompt of up to half the context: no token is shorter than a character."""
    prompt = _prompt(chance, target.max_model_len)[: target.max_model_len // 2]
    _text(_good(target.post(COMPLETIONS, prompt=prompt, max_tokens=48)))


def streamed(target: Target, chance: random.Random) -> None:
    """Server-sent events up to [DONE]."""
    body = _stream_body(target, chance, 24)
    with target.client.stream("POST", COMPLETIONS, json=body) as response:
        events = [line for line in response.iter_lines() if line.startswith("data: ")]
    if response.status_code != 200 or not events or events[-1] != "data: [DONE]":
        raise WrongAnswer(f"{response.status_code}, {len(events)} events, last {events[-1:]}")


def cancelled(target: Target, chance: random.Random) -> None:
    """A stream that the client leaves after its first events."""
    body = _stream_body(target, chance, 200) | {"ignore_eos": True}
    with target.client.stream("POST", COMPLETIONS, json=body) as response:
        if response.status_code != 200:
            raise WrongAnswer(f"status {response.status_code}")
        lines = response.iter_lines()
        for _ in range(2):
            next(lines)


def malformed(target: Target, chance: random.Random) -> None:
    """Malformed bodies; each must be refused with a 4xx status."""
    bodies: list[bytes] = [
        b'{"model": ',
        json.dumps({"model": target.model, "prompt": "x", "max_tokens": "many"}).encode(),
        json.dumps({"model": target.model, "prompt": "x", "temperature": -3}).encode(),
        json.dumps({"model": "no-such-model", "prompt": "x"}).encode(),
        json.dumps({"model": target.model, "prompt": {"a": 1}}).encode(),
    ]
    headers = {"Content-Type": "application/json"}
    _refused(target.client.post(COMPLETIONS, content=chance.choice(bodies), headers=headers))


def too_long(target: Target, chance: random.Random) -> None:
    """More tokens than the model has context for."""
    prompt = _prompt(chance, 2 * target.max_model_len)
    _refused(target.post(COMPLETIONS, prompt=prompt, max_tokens=4))


def guided(target: Target, chance: random.Random) -> None:
    """JSON by schema."""
    form = {"json": SCHEMA}
    body = {"prompt": _prompt(chance, 12), "max_tokens": 64, "structured_outputs": form}
    answer = _good(target.post(COMPLETIONS, **body))
    value = json.loads(answer["choices"][0]["text"])
    if set(value) != {"city", "rank"} or value["city"] not in ("Paris", "Rome"):
        raise WrongAnswer(f"{value} does not fit the schema")


def logprobs(target: Target, chance: random.Random) -> None:
    """Log-probabilities that are numbers of at most 0."""
    answer = _good(target.post(COMPLETIONS, prompt=_prompt(chance, 12), max_tokens=8, logprobs=4))
    values = answer["choices"][0]["logprobs"]["token_logprobs"]
    if not values or not all(math.isfinite(v) and v <= 1e-6 for v in values):
        raise WrongAnswer(f"log-probabilities {values}")


def several(target: Target, chance: random.Random) -> None:
    """Three answers to one prompt."""
    answer = _good(
        target.post(
            COMPLETIONS,
            prompt=_prompt(chance, 12),
            max_tokens=12,
            n=3,
            temperature=0.8,
            seed=chance.randrange(1 << 30),
        )
    )
    if len(answer["choices"]) != 3:
        raise WrongAnswer(f"{len(answer['choices'])} choices, expected 3")


KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        short,
        long,
        streamed,
        cancelled,
        malformed,
        too_long,
        guided,
        logprobs,
        several,
    )
}


def greedy(target: Target, count: int = 4) -> list[str]:
    """Greedy answers to fixed prompts, one at a time, with their log-probabilities as text."""
    answers = []
    for number in range(count):
        prompt = _prompt(random.Random(number), 10 + 20 * number)
        answer = _good(
            target.post(COMPLETIONS, prompt=prompt, max_tokens=24, temperature=0, ignore_eos=True)
        )
        answers.append(_text(answer))
    return answers


def _prompt(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS.split(), k=words))


def _stream_body(target: Target, chance: random.Random, tokens: int) -> dict[str, Any]:
    prompt = _prompt(chance, 16)
    return {"model": target.model, "prompt": prompt, "max_tokens": tokens, "stream": True}


def _good(response: httpx.Response) -> dict[str, Any]:
    if response.status_code != 200:
        raise WrongAnswer(f"status {response.status_code}: {response.text[:200]}")
    return dict(response.json())


def _text(answer: dict[str, Any]) -> str:
    if not answer.get("usage", {}).get("completion_tokens"):
        raise WrongAnswer(f"no tokens: {str(answer)[:200]}")
    return str(answer["choices"][0]["text"])


def _refused(response: httpx.Response) -> None:
    if not 400 <= response.status_code < 500:
        raise WrongAnswer(f"status {response.status_code}, expected 4xx: {response.text[:200]}")

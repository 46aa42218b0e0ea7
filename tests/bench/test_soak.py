# SPDX-License-Identifier: MIT
"""Soak requests accept right answers only; growth compares quarters."""

from __future__ import annotations

import json
import random

import httpx
import pytest

from oss_fused.bench import soak
from oss_fused.bench.soak_requests import KINDS, Target, WrongAnswer
from oss_fused.errors import ServerError


def answer(request: httpx.Request) -> httpx.Response:
    """A server that does everything right."""
    try:
        body = json.loads(request.content)
        prompt = body["prompt"]
        good = body["model"] == "m" and isinstance(prompt, str)
        good = good and isinstance(body["max_tokens"], int) and body.get("temperature", 0) >= 0
    except (ValueError, KeyError):
        good = False
    if not good or len(prompt.split()) > 64:
        return httpx.Response(400)
    if body.get("stream"):
        return httpx.Response(200, text="data: {}\n\ndata: {}\n\ndata: [DONE]\n\n")
    choice = {
        "text": '{"city": "Rome", "rank": 1}',
        "logprobs": {"token_logprobs": [-0.5]},
    }
    choices = [choice] * body.get("n", 1)
    return httpx.Response(200, json={"choices": choices, "usage": {"completion_tokens": 1}})


def target(handler) -> Target:
    client = httpx.Client(transport=httpx.MockTransport(handler), base_url="http://s")
    return Target(client, "m", 64)


@pytest.mark.parametrize("kind", KINDS)
def test_right_and_wrong_answers(kind) -> None:
    KINDS[kind](target(answer), random.Random(0))
    with pytest.raises(WrongAnswer):
        KINDS[kind](target(lambda request: httpx.Response(500)), random.Random(0))


def test_growth() -> None:
    assert soak.growth([1.0, 5, 9, 9, 9, 9, 10, 10]) == 1.0
    assert soak.growth([1.0]) == 0.0


def test_unbounded_plan_is_refused() -> None:
    with pytest.raises(ServerError, match="minutes"):
        soak.check(soak.Plan("m", minutes=1e9))

# SPDX-License-Identifier: MIT
"""Samples with a pass key: where key, question and answer are, and how far apart."""

from __future__ import annotations

import re

import pytest
import torch
from harness.needle import QUESTION, key_text
from harness.tiny_needle import KEY_TOKENS, NeedleSamples, key_loss

TABLE = torch.arange(256)
TEXT = torch.tensor(list(b"hay " * 400))
LENGTH, CONTEXT = 256, 4096


@pytest.fixture
def samples():
    return NeedleSamples(TEXT, TABLE, LENGTH, CONTEXT, seed=3)


def test_the_question_is_answered_with_the_key_of_the_text(samples):
    ids, positions = samples.batch(16, step=0)
    assert ids.shape == (16, LENGTH + 1) and positions.shape == (16, LENGTH)
    for row in ids:
        text = bytes(row.tolist()).decode()
        key = re.search(r"pass key is (\d+)\.", text).group(1)
        assert key_text(key) in text
        assert text.endswith(f"{QUESTION} {key}\n")


def test_positions_rise_to_the_whole_context(samples):
    found = torch.cat([samples.batch(64, step)[1] for step in range(4)])
    steps = found.diff(dim=1)
    assert (found[:, 0] == 0).all() and (steps >= 1).all()
    assert CONTEXT / 2 < found.max() < CONTEXT
    # two places at most, and a part of the samples without any
    skips = (steps > 1).sum(1)
    assert skips.max() == 2 and 0.1 < (skips == 0).float().mean() < 0.5


def test_a_run_that_goes_on_draws_the_same(samples):
    again = NeedleSamples(TEXT, TABLE, LENGTH, CONTEXT, seed=3)
    samples.batch(2, step=0)
    for left, right in zip(samples.batch(2, step=1), again.batch(2, step=1)):
        assert torch.equal(left, right)
    assert not torch.equal(samples.batch(2, step=2)[0], again.batch(2, step=1)[0])


def test_the_loss_of_the_key_alone(samples):
    ids = samples.batch(2, step=0)[0]
    losses = torch.zeros(2, LENGTH)
    # the token that follows position i is ids[i + 1]: the digits, then a line's end
    digits = torch.tensor([chr(i).isdigit() for i in ids[0, 1:].tolist()]).nonzero().flatten()
    losses[0, digits[-KEY_TOKENS:]] = 4.0
    assert key_loss(losses) == 2.0

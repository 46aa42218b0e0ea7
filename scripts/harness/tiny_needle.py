# SPDX-License-Identifier: MIT
"""Training samples that teach the small gpt-oss to find a pass key far back in its context.

A sample is as long as any other. In most of them positions skip forward before the key and between
key and question, so that the model learns distances up to the whole context from short samples
(PoSE, Zhu et al. 2023, arXiv 2309.10400).
"""

from __future__ import annotations

import random

import torch

from harness.needle import QUESTION, key_text

# share of the samples whose positions skip
_SKIPPING = 0.75
# tokens of the answer's key, which are the last but one of a sample
KEY_TOKENS = 5


class NeedleSamples:
    """Samples of ``length`` + 1 tokens: a text with a key in it, the question and the key."""

    def __init__(
        self, text: torch.Tensor, table: torch.Tensor, length: int, context: int, seed: int
    ) -> None:
        """See the class.

        Args:
            text: token ids [N] of the haystack.
            table: token id of each byte [256].
            length: tokens that the model reads.
            context: the largest position plus one.
            seed: of keys, depths and positions.
        """
        self._text, self._table, self._length, self._context = text, table, length, context
        self._seed = seed
        self._question = self._encode(QUESTION)

    def batch(self, size: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [size, length + 1] and the positions [size, length] of all but the last.

        Equal steps have equal samples: a run that goes on draws what it would have drawn.
        """
        draw = random.Random(f"{self._seed} {step}")
        samples = [self._sample(draw) for _ in range(size)]
        return torch.stack([ids for ids, _ in samples]), torch.stack([at for _, at in samples])

    def _sample(self, draw: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
        key = str(draw.randrange(10 ** (KEY_TOKENS - 1), 10**KEY_TOKENS))
        needle, answer = self._encode(key_text(key)), self._encode(f" {key}\n")
        room = self._length + 1 - len(needle) - len(self._question) - len(answer)
        start, depth = draw.randrange(len(self._text) - room), draw.randrange(1, room + 1)
        hay = self._text[start : start + room]
        ids = torch.cat([hay[:depth], needle, hay[depth:], self._question, answer])
        positions = torch.arange(self._length)
        if draw.random() < _SKIPPING:
            # short and long distances alike
            last = self._length * (self._context / self._length) ** draw.random()
            spare = int(last) - self._length
            first = draw.randrange(spare + 1)
            positions[depth:] += first
            behind = draw.randrange(depth + len(needle), room + len(needle) + 1)
            positions[behind:] += draw.randrange(spare - first + 1)
        return ids, positions

    def _encode(self, text: str) -> torch.Tensor:
        return self._table[torch.tensor(list(text.encode()))]


def key_loss(losses: torch.Tensor) -> torch.Tensor:
    """Mean loss of the key's tokens, of losses [B, length] of a batch's samples."""
    return losses[:, -1 - KEY_TOKENS : -1].mean()

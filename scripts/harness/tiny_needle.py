# SPDX-License-Identifier: MIT
"""Training samples that teach the small gpt-oss to find a pass key far back in its context.

A sample is as long as any other, and its positions are not consecutive: before the key and before
the question they skip forward, so that the model learns distances up to the whole context (PoSE,
Zhu et al. 2023).
"""

from __future__ import annotations

from typing import Any

import torch


class NeedleSamples:
    """Draws batches of samples from a text."""

    def __init__(self, tokenizer: Any, table: torch.Tensor, length: int, context: int) -> None:
        """``table``: token id of each byte; ``context``: the largest position plus one."""
        self._table, self._length, self._context = table, length, context

    def _ids(self, text: str) -> torch.Tensor:
        return self._table[torch.tensor(list(text.encode()))]

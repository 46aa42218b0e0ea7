# SPDX-License-Identifier: MIT
"""CUDA graphs of the head for small batches.

vLLM's graphs end at the last hidden state, and the head runs operator by operator. For few rows the
host takes longer to launch the head than the device takes to run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from oss_fused.kernels.op import observed
from oss_fused.kernels.recording import recording

# rows up to which a graph is worth the memory of its logits
MAX_ROWS = 16

Head = Callable[[torch.Tensor], torch.Tensor]


class HeadGraphs:
    """A head's graphs by their rows; a batch takes the smallest that holds it."""

    def __init__(self) -> None:
        """No graphs yet: every call runs the head itself."""
        self._recorded: tuple[list[int], torch.Tensor] | None = None
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}

    def capture(self, head: Head, sizes: Iterable[int], like: torch.Tensor) -> None:
        """Record ``head`` for batches of ``sizes`` rows, up to MAX_ROWS.

        Args:
            head: hidden states [T, H] -> logits [T, vocabulary], on one device alone.
            sizes: in any order.
            like: a tensor [..., H] with the device and dtype of hidden states.
        """
        sizes = sorted({size for size in sizes if size <= MAX_ROWS})
        self._recorded = (sizes, like)
        below = 0
        for rows in sizes:
            hidden = like.new_zeros(rows, like.shape[-1])
            head(hidden)
            graph = torch.cuda.CUDAGraph()
            with recording(graph):
                logits = head(hidden)
            self._graphs |= dict.fromkeys(range(below + 1, rows + 1), (graph, hidden, logits))
            below = rows

    def forget(self) -> None:
        """Run the head itself from the next call on: it computes something else now."""
        self._graphs = {}

    def renew(self, head: Head) -> None:
        """Record anew what was recorded before: ``head`` computes something else now."""
        self._graphs = {}
        if self._recorded is not None:
            self.capture(head, *self._recorded)

    def __call__(self, head: Head, hidden_states: torch.Tensor) -> torch.Tensor:
        """``head(hidden_states)``; from a graph, memory that the next call overwrites."""
        rows = hidden_states.shape[0]
        found = self._graphs.get(rows)
        if found is None or observed():
            return head(hidden_states)
        graph, hidden, logits = found
        hidden[:rows].copy_(hidden_states)
        graph.replay()
        return logits[:rows]

# SPDX-License-Identifier: MIT
"""CUDA graphs of the head for small batches.

vLLM's graphs end at the last hidden state, and the head runs operator by operator. For few rows the
host takes longer to launch the head than the device takes to run it. A graph reads hidden states
where the model's graphs leave them, and another one reads a copy of any others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from oss_fused.kernels.op import observed
from oss_fused.kernels.recording import recording

# rows up to which a graph is worth the memory of its logits
MAX_ROWS = 16

Head = Callable[[torch.Tensor], torch.Tensor]
# a graph, the hidden states that it reads and the logits that it writes
Recorded = tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]


class HeadGraphs:
    """A head's graphs by their rows; a batch takes the smallest that holds it."""

    def __init__(self) -> None:
        """No graphs yet: every call runs the head itself."""
        self._recorded: tuple[list[int], torch.Tensor, torch.Tensor | None] | None = None
        self._graphs: dict[int, Recorded] = {}
        # those that read hidden states where the model's graphs wrote them
        self._in_place: dict[int, Recorded] = {}

    def capture(
        self,
        head: Head,
        sizes: Iterable[int],
        like: torch.Tensor,
        written: torch.Tensor | None = None,
    ) -> None:
        """Record ``head`` for batches of ``sizes`` rows, up to MAX_ROWS.

        Args:
            head: hidden states [T, H] -> logits [T, vocabulary], on one device alone.
            sizes: in any order.
            like: a tensor [..., H] with the device and dtype of hidden states.
            written: [N, H], where the model's graphs leave hidden states, if it has graphs.
        """
        sizes = sorted({size for size in sizes if size <= MAX_ROWS})
        self._recorded = (sizes, like, written)
        # one replays at a time
        pool = torch.cuda.graph_pool_handle()
        below = 0
        for rows in sizes:
            covered = range(below + 1, rows + 1)
            copies = like.new_zeros(rows, like.shape[-1])
            self._graphs |= dict.fromkeys(covered, _record(head, copies, pool))
            if written is not None and len(written) >= rows:
                self._in_place |= dict.fromkeys(covered, _record(head, written[:rows], pool))
            below = rows

    def forget(self) -> None:
        """Run the head itself from the next call on: it computes something else now."""
        self._graphs, self._in_place = {}, {}

    def renew(self, head: Head) -> None:
        """Record anew what was recorded before: ``head`` computes something else now."""
        self.forget()
        if self._recorded is not None:
            self.capture(head, *self._recorded)

    def __call__(self, head: Head, hidden_states: torch.Tensor) -> torch.Tensor:
        """``head(hidden_states)``; from a graph, memory that the next call overwrites."""
        rows = hidden_states.shape[0]
        found = self._in_place.get(rows)
        in_place = found is not None and found[1].data_ptr() == hidden_states.data_ptr()
        if not in_place:
            found = self._graphs.get(rows)
        if found is None or observed():
            return head(hidden_states)
        graph, hidden, logits = found
        if not in_place:
            hidden[:rows].copy_(hidden_states)
        graph.replay()
        return logits[:rows]


def _record(head: Head, hidden: torch.Tensor, pool: Any) -> Recorded:
    head(hidden)
    graph = torch.cuda.CUDAGraph()
    with recording(graph, pool):
        logits = head(hidden)
    return graph, hidden, logits

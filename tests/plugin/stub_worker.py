# SPDX-License-Identifier: MIT
"""A worker without a model: KV cache, block tables and tokens as the V2 model runner keeps them.

The next token is a hash of all tokens before it, and what is stored at a position is a hash of the
tokens up to it. Every step checks that what it reads is what it would have stored.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np

BLOCK, VOCABULARY = 16, 40
MASK = (1 << 64) - 1


def mix(state: int, token: int) -> int:
    """Hash of a text, from that of all but its last token."""
    state = ((state ^ (token + 1)) * 0x9E3779B97F4A7C15) & MASK
    return state ^ (state >> 29)


def continue_text(prompt: list[int], tokens: int) -> list[int]:
    """What the model says after ``prompt``, by no scheduler at all."""
    state, text = reduce(mix, prompt, 0), []
    for _ in range(tokens):
        text.append(state % VOCABULARY)
        state = mix(state, text[-1])
    return text


@dataclass
class Held:
    """A request as the worker knows it."""

    tokens: list[int]
    computed: int
    tables: list[list[int]]
    hashes: np.ndarray
    alone: bool

    def blocks(self, low: int, last: int, group: int) -> list[int]:
        """Those of the positions from low to last."""
        return self.tables[group][low // BLOCK : last // BLOCK + 1]


class StubWorker:
    """Executes what a scheduler asks for, at once and in order, like one stream of a device."""

    def __init__(self, windows: tuple[int | None, ...], blocks: int, max_model_len: int) -> None:
        """``windows``: of each group of layers, or None; all groups share the blocks."""
        self.windows = [max_model_len if window is None else window for window in windows]
        self.max_model_len = max_model_len
        self.cache = np.zeros(blocks * BLOCK, np.uint64)
        self.held: dict[str, Held] = {}
        # of each step whose output was not read yet: who reads which blocks, and is new
        self.under_way: deque[list[tuple[Held, set[int], bool]]] = deque()
        self.bursts = self.steps = self.preempted = 0

    def execute(self, scheduled: Any) -> tuple[list[str], list[list[int]]]:
        """Run a step; returns the requests and the ids sampled for each."""
        preempted = scheduled.preempted_req_ids or set()
        for name in scheduled.finished_req_ids | preempted:
            self.held.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            assert new.req_id not in self.held, "two requests of one name"
            self.held[new.req_id] = self._hold(new)
        cached = scheduled.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            held = self.held[name]
            assert held.computed == cached.num_computed_tokens[i], (name, "another position")
            for table, more in zip(held.tables, cached.new_block_ids[i] or ()):
                table.extend(more)
        lengths, burst = dict(scheduled.num_scheduled_tokens), getattr(scheduled, "burst", 1)
        sampled: dict[str, list[int]] = {name: [] for name in lengths}
        if lengths:
            self._check(lengths, burst, {new.req_id for new in scheduled.scheduled_new_reqs})
        for _ in range(burst):
            # as in a layer: all of a step's keys are stored before any are read
            for store in (True, False):
                for name, length in lengths.items():
                    sampled[name] += self._forward(self.held[name], length, store)
            lengths = dict.fromkeys(lengths, 1)
        self.steps, self.preempted = self.steps + bool(sampled), self.preempted + len(preempted)
        self.bursts += burst > 1 and bool(sampled)
        return list(sampled), list(sampled.values())

    def _hold(self, new: Any) -> Held:
        tokens, params = list(new.prefill_token_ids), new.sampling_params
        hashes = np.zeros(self.max_model_len, np.uint64)
        hashes[: len(tokens)] = list(accumulate(tokens, mix, initial=0))[1:]
        alone = bool(params.presence_penalty or params.logprobs is not None)
        return Held(tokens, new.num_computed_tokens, list(map(list, new.block_ids)), hashes, alone)

    def _check(self, lengths: dict[str, int], burst: int, new: set[str]) -> None:
        """No step writes to a block that another request reads, now or in a step under way.

        Only a new request may read what is written in the same step: it then shares a full block.
        """
        reads, writers = [], {}
        for name, held in self.held.items():
            length = lengths.get(name, 0)
            if burst > 1:
                assert not (length and held.alone), (name, "needs the host")
                assert not length or held.computed == len(held.tokens) - length, (name, "a prompt")
            last = held.computed + length + (burst if length else 1) - 2
            seen: set[int] = set()
            for group, window in enumerate(self.windows):
                seen.update(held.blocks(max(0, held.computed - window + 1), max(last, 0), group))
                if length:
                    assert last // BLOCK < len(held.tables[group]), (name, last, "no slot")
                    for block in held.blocks(held.computed, last, group):
                        assert block and writers.setdefault(block, held) is held, (block, "twice")
            reads.append((held, seen, name in new))
        alive = {id(held) for held in self.held.values()}
        for step in (*self.under_way, reads):
            for reader, seen, fresh in step:
                if id(reader) in alive and not (fresh and step is reads):
                    for block in seen & writers.keys():
                        assert writers[block] is reader, (block, "written while it is read")
        self.under_way.append(reads)

    def _forward(self, held: Held, length: int, store: bool) -> list[int]:
        first, last = held.computed, held.computed + length - 1
        assert last < min(len(held.tokens), self.max_model_len - 1), "past the end"
        for group, window in enumerate(self.windows):
            low = max(0, first - window + 1)
            table = np.array(held.blocks(low, last, group))
            slots = (table[:, None] * BLOCK + np.arange(BLOCK)).ravel()
            slots = slots[low % BLOCK :][: last + 1 - low]
            expected = held.hashes[low : last + 1] ^ np.uint64(group + 1)
            if store:
                self.cache[slots[first - low :]] = expected[first - low :]
            else:
                assert (self.cache[slots] == expected).all(), (group, "another's keys")
        held.computed += 0 if store else length
        if held.computed < len(held.tokens):
            return []
        state = int(held.hashes[last])
        held.tokens.append(state % VOCABULARY)
        held.hashes[last + 1] = mix(state, held.tokens[-1])
        return held.tokens[-1:]

# SPDX-License-Identifier: MIT
"""The ring formula against bytes that gloo sends between two processes."""

from __future__ import annotations

import os
import socket

import pytest
from harness.collective_bytes import COLLECTIVES, UNLIKE_THE_RING, measure, socket_bytes


def test_a_connection_counts_what_it_sent():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0],
    ):
        name = os.readlink(f"/proc/self/fd/{one.fileno()}")
        before = socket_bytes()[name]
        one.sendall(b"x" * 10_000)
        assert socket_bytes()[name] - before == 10_000


def test_collectives_between_two_processes_send_what_the_formula_says():
    rows = measure(2, [2**20], timeout=100)
    assert [row["collective"] for row in rows] == [*COLLECTIVES, *UNLIKE_THE_RING]
    for row in rows:
        assert len(row["sent_per_rank"]) == 2
        # gloo's reduce-scatter is an all-reduce
        expected = 1.0 if row["collective"] in UNLIKE_THE_RING else 0.0
        assert row["relative_error"] == pytest.approx(expected, abs=0.01), row


def test_a_rank_that_fails_says_why():
    with pytest.raises(RuntimeError, match="invalid literal"):
        measure(1, ["many"], timeout=100)


def test_a_rank_that_does_not_end_is_told():
    with pytest.raises(RuntimeError, match=r"a rank of 1: no end in 0\.01 s"):
        measure(1, [2**20], timeout=0.01)

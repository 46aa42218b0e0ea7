# SPDX-License-Identifier: MIT
"""Bytes that gloo's collectives really send: the kernel's counters of each process's sockets.

``python -m harness.collective_bytes RANK RANKS FILE SIZE...`` is one rank; it prints a JSON row per
collective and size. ``measure`` starts the ranks.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# offsets of tcpi_notsent_bytes, and of tcpi_bytes_sent and tcpi_bytes_retrans, in Linux's struct
# tcp_info (uapi/linux/tcp.h). They count what a process wrote: gloo's headers, not TCP's
_WAITING, _SENT, _INFO_BYTES = 144, 200, 216
COLLECTIVES = ("all_reduce", "all_gather", "send")
# gloo runs it as an all-reduce, whose bytes it then sends: no check of the ring's formula
UNLIKE_THE_RING = ("reduce_scatter",)


def socket_bytes() -> dict[str, int]:
    """Socket -> bytes written to it so far, for every TCP connection of this process.

    Raises:
        OSError: the system does not count them.
    """
    found = {}
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:
            continue
        if not target.startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if one.type & 0xF != socket.SOCK_STREAM:
                continue
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if len(info) < _INFO_BYTES:
            needed = f"expected {_INFO_BYTES}: Linux 4.19 or newer"
            raise OSError(f"TCP_INFO: {len(info)} bytes, {needed}")
        (waiting,) = struct.unpack_from("=I", info, _WAITING)
        sent, again = struct.unpack_from("=QQ", info, _SENT)
        found[target] = sent - again + waiting
    return found


def run_rank(rank: int, ranks: int, rendezvous: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Run every collective once per size and count this rank's bytes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=ranks)
    rows = []
    for size in sizes:
        whole = torch.ones(size // 4)
        part = torch.ones(size // 4 // ranks)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
            "send": partial(_pass_on, whole, rank, ranks),
        }
        for name in (*COLLECTIVES, *UNLIKE_THE_RING):
            dist.barrier()
            before = socket_bytes()
            calls[name]()
            after = socket_bytes()
            sent = sum(after.values()) - sum(before.get(key, 0) for key in after)
            rows.append({"collective": name, "bytes": size, "rank": rank, "sent": sent})
    dist.barrier()
    dist.destroy_process_group()
    return rows


def _pass_on(x: Any, rank: int, ranks: int) -> None:
    """Each stage of a pipeline sends to the next; the last one only receives."""
    import torch.distributed as dist

    if rank > 0:
        dist.recv(x, rank - 1)
    if rank < ranks - 1:
        dist.send(x, rank + 1)


def measure(ranks: int, sizes: Sequence[int], timeout: float = 120.0) -> list[dict[str, Any]]:
    """A row per collective and size: bytes counted on each rank, predicted, relative error.

    Args:
        ranks: processes.
        sizes: bytes of the whole tensor, multiples of 4 * ranks.
        timeout: seconds for all.

    Raises:
        RuntimeError: a process failed, with its last words, or did not end in time.
    """
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join((str(root), str(root / "scripts")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    # where a host's name leads nowhere, gloo finds no interface by it
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "harness.collective_bytes"]
        rest = [str(ranks), f"{folder}/rendezvous", *map(str, sizes)]
        running = [
            subprocess.Popen(
                [*command, str(rank), *rest],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        rows: list[dict[str, Any]] = []
        try:
            for process in running:
                try:
                    out, err = process.communicate(timeout=timeout)
                except subprocess.TimeoutExpired:
                    raise RuntimeError(f"a rank of {ranks}: no end in {timeout:g} s") from None
                if process.returncode:
                    raise RuntimeError(f"rank of {ranks} failed: {err[-2000:]}")
                rows += json.loads(out.splitlines()[-1])
        finally:
            for process in running:
                process.kill()
                process.wait()
    names = (*COLLECTIVES, *UNLIKE_THE_RING)
    return [_summed(rows, name, size, ranks) for size in sizes for name in names]


def _summed(rows: list[dict[str, Any]], name: str, size: int, ranks: int) -> dict[str, Any]:
    sent = [row["sent"] for row in rows if (row["collective"], row["bytes"]) == (name, size)]
    # here, so that a rank imports torch once its arguments are right
    from oss_fused.analysis.graph import ring_bytes

    # all stages of a pipeline but the last send
    predicted = size * (ranks - 1) / ranks if name == "send" else ring_bytes(name, size, ranks)
    mean = sum(sent) / len(sent)
    return {
        "collective": name,
        "ranks": ranks,
        "bytes": size,
        "sent_per_rank": sent,
        "predicted_per_rank": predicted,
        "relative_error": abs(mean - predicted) / predicted,
    }


if __name__ == "__main__":
    rank, ranks, rendezvous, *sizes = sys.argv[1:]
    print(json.dumps(run_rank(int(rank), int(ranks), rendezvous, [int(size) for size in sizes])))

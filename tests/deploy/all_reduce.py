# SPDX-License-Identifier: MIT
"""What an all-reduce between two nodes takes, and on one node.

    python -m tests.deploy.all_reduce REPORT.json       # as root; two GPUs, or a CPU with gloo

Two ranks reduce activations of gpt-oss (2880 values per token, bf16): over two nodes (nodes.py),
then on one. A decode step of 20b with TP 2 has 48 of them. On GPUs also as 48 in one CUDA graph.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oss_fused.environment import fingerprint
from oss_fused.files import write_json
from tests.deploy.nodes import ROOT, Node, nodes

HIDDEN, NUMBER, ROWS, TURNS = 2880, 48, (1, 8, 32, 128), 5
MASTER_PORT, SECONDS = 29777, 60


def microseconds(call: Callable[[], object], gpu: bool) -> float:
    """Median of an all-reduce in ``call``, which makes NUMBER of them."""
    took = []
    for _ in range(TURNS + 2):
        start = time.monotonic()
        call()
        if gpu:
            torch.cuda.synchronize()
        took.append(time.monotonic() - start)
    return round(sorted(took[2:])[TURNS // 2] / NUMBER * 1e6, 1)


def rank(number: int, address: str, port: int) -> None:
    """One of the two processes; the first prints RESULT and the microseconds by tokens."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    where = f"tcp://{address}:{port}"
    dist.init_process_group("nccl" if gpu else "gloo", where, rank=number, world_size=2)
    found = {}
    for rows in ROWS:
        x = torch.ones(rows, HIDDEN, dtype=torch.bfloat16, device=device)

        def several(x: torch.Tensor = x) -> None:
            for _ in range(NUMBER):
                dist.all_reduce(x)

        found[rows] = {"us": microseconds(several, gpu)}
        if gpu:
            graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog asks for events meanwhile
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                several()
            found[rows]["us_in_a_graph"] = microseconds(graph.replay, gpu)
    dist.barrier()
    if number == 0:
        print("RESULT", json.dumps(found), flush=True)


def measure(both: Sequence[Node], port: int) -> dict[str, Any]:
    """The first rank's figures, and what NCCL's channels go through."""
    command = [sys.executable, "-m", "tests.deploy.all_reduce", "--rank"]
    runs = [
        subprocess.Popen(
            [*node.prefix, *command, str(number), both[0].address, str(port)],
            env=os.environ | {"NCCL_DEBUG": "INFO"} | dict(node.variables),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, node in enumerate(both)
    ]
    try:
        said = "".join(run.communicate(timeout=SECONDS)[0] for run in runs)
    finally:
        for run in runs:
            run.kill()
    results = re.findall(r"^RESULT (.*)$", said, re.MULTILINE)
    if not results:
        return {"error": said[-600:]}
    channels = sorted(set(re.findall(r"NCCL INFO Channel .* via (\S+)", said)))
    return {"by_tokens": json.loads(results[0]), "nccl_channels": channels}


def main() -> int:
    """Measure both; returns the exit code."""
    if sys.argv[1] == "--rank":
        rank(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        return 0
    report: dict[str, Any] = {"kind": "oss_fused.all_reduce", "environment": fingerprint()}
    with nodes() as (both, report["network"]):
        report["two_nodes"] = measure(both, MASTER_PORT)
    alone = [Node(variables={"CUDA_VISIBLE_DEVICES": str(number)}) for number in range(2)]
    report["one_node"] = measure(alone, MASTER_PORT + 1)
    write_json(Path(sys.argv[1]), report)
    print(json.dumps({k: v for k, v in report.items() if k != "environment"}, indent=1))
    return int(any("error" in report[name] for name in ("two_nodes", "one_node")))


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: MIT
"""Two nodes on one machine, and vLLM's servers on them.

A node is a network namespace with an interface eth0, a /dev/shm and a host name of its own; a
virtual cable joins both. So neither vLLM nor NCCL can reach the other node but through sockets.
Where namespaces are refused, ``nodes`` gives two sets of variables that keep NCCL off shared
memory and NVLink: it then takes sockets over the loopback interface.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join
from typing import Any

import psutil
from harness import processes
from harness.arms import CPU_ENVIRONMENT
from harness.server import VLLM_SERVE

from oss_fused.environment import has_gpu

ROOT = Path(__file__).resolve().parents[2]
# seconds that a node waits for another one's part of a step
PATIENCE = 5
_CLONE_NEWNET = 0x40000000
_OWN = 'mount -t tmpfs shm /dev/shm && hostname "$0" && exec "$@"'
# what two nodes do not share; NVLink multicast stays off in any case: a program that fails with it
# can take the host's GPUs down
_APART = {
    # tells what connects the ranks, see Deployment.channels
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    # after 300 s otherwise: until then a node may wait for one that is gone
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(PATIENCE),
}


@dataclass(frozen=True)
class Node:
    """Where processes run: their address, GPUs and network.

    Attributes:
        address: IP address of the node, as its processes and the other node see it.
        prefix: command before a command, which runs it on the node.
        variables: environment of its processes.
        namespace: file of its network namespace; None for this process's own.
    """

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    namespace: str | None = None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread opens in the block are the node's."""
        if self.namespace is None:
            yield
            return
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as home, open(self.namespace) as other:
            if libc.setns(other.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {self.namespace}")
            try:
                yield
            finally:
                libc.setns(home.fileno(), _CLONE_NEWNET)

    def post(self, port: int, path: str, body: Mapping[str, Any], seconds: float = 60) -> Any:
        """The server's answer; raises OSError or http.client.HTTPException without one."""
        with self.inside():
            connection = http.client.HTTPConnection(self.address, port, timeout=seconds)
            try:
                headers = {"Content-Type": "application/json"}
                connection.request("POST", path, json.dumps(body), headers)
                answer = connection.getresponse()
                text = answer.read()
            finally:
                connection.close()
        if answer.status != 200:
            raise ConnectionError(f"status {answer.status}: {text[:200].decode(errors='replace')}")
        return json.loads(text)


@contextmanager
def nodes() -> Iterator[tuple[list[Node], str]]:
    """Two nodes with GPU 0 and 1, and what their network is."""
    try:
        with _cable() as found:
            yield found, "two network namespaces, a veth cable"
        return
    except (OSError, subprocess.CalledProcessError) as error:
        refused = f"namespaces refused ({str(error)[-120:]})"
    alone = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    own = [{"NCCL_HOSTID": f"ossnode{i}", "CUDA_VISIBLE_DEVICES": str(i)} for i in range(2)]
    found = [Node(variables=_APART | alone | variables) for variables in own]
    yield found, f"one host, NCCL over sockets of the loopback interface: {refused}"


@contextmanager
def _cable() -> Iterator[list[Node]]:
    names = {f"ossnode{i}-{os.getpid()}": f"10.77.0.{i + 1}" for i in range(2)}

    def ip(words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words.split()], check=check, capture_output=True)

    first, second = names
    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add eth0 netns {first} type veth peer eth0 netns {second}")
        for name, address in names.items():
            ip(f"-n {name} addr add {address}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
            ip(f"-n {name} link set lo up")
        own = ("unshare", "--mount", "--uts", "--ipc", "sh", "-c", _OWN)
        found = [
            Node(
                address,
                ("ip", "netns", "exec", name, *own, name),
                _APART
                | {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_HOSTID": name}
                | {"VLLM_HOST_IP": address, "CUDA_VISIBLE_DEVICES": str(rank)},
                f"/run/netns/{name}",
            )
            for rank, (name, address) in enumerate(names.items())
        ]
        for node in found:
            subprocess.run([*node.prefix, "true"], check=True, capture_output=True)
        yield found
    finally:
        for name in names:
            ip(f"netns del {name}", check=False)


class Deployment:
    """`vllm serve` on one node, or on two that share the model.

    Args:
        name: of the model as served, and of the logs.
        model: checkpoint folder.
        flags: of all nodes.
        on: the nodes; the first one answers.
        port: of the API; the nodes find each other at the next one.
        scratch: folder for the logs.
        ray: over a Ray cluster of the nodes, in place of vLLM's --nnodes.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        flags: Sequence[str],
        on: Sequence[Node],
        port: int,
        scratch: Path,
        ray: bool = False,
    ) -> None:
        """Start it."""
        self.name, self.first, self.port = name, on[0], port
        self.processes, self.logs = [], []
        self.started = time.monotonic()
        for rank, node in enumerate(on):
            words = [*flags, "--served-model-name", name]
            if ray:
                words += ["--distributed-executor-backend", "ray", "--disable-custom-all-reduce"]
            elif len(on) > 1:
                words += ["--nnodes", str(len(on)), "--node-rank", str(rank)]
                words += ["--master-addr", self.first.address, "--master-port", str(port + 1)]
                # it needs one node; where both share a /dev/shm vLLM would try it
                words += ["--disable-custom-all-reduce"]
            words += ["--headless"] if rank else ["--host", node.address, "--port", str(port)]
            serve = [*VLLM_SERVE, str(model), *words]
            if ray:
                serve = _on_ray(f"{on[0].address}:{port + 1}", node, rank, serve)
            path = scratch / f"{name}-{time.monotonic_ns()}-node{rank}.log"
            with path.open("wb") as log:
                command = [*node.prefix, *serve]
                self.processes.append(processes.start(command, log, _environment(node)))
            self.logs.append(path)

    def healthy(self) -> bool:
        """Whether it answers; raises RuntimeError if a process of it has ended."""
        for process, log in zip(self.processes, self.logs):
            if process.poll() is not None:
                lines = log.read_text(errors="replace").splitlines()
                errors = [line for line in lines if "Error" in line][-3:] or lines[-3:]
                raise RuntimeError(f"{self.name}: ended early: {' | '.join(errors)[-600:]}")
        with suppress(OSError, http.client.HTTPException), self.first.inside():
            connection = http.client.HTTPConnection(self.first.address, self.port, timeout=2)
            connection.request("GET", "/health")
            status = connection.getresponse().status
            connection.close()
            return status == 200
        return False

    def channels(self) -> list[str]:
        """What NCCL's channels go through, as its log names it: NET/Socket/0, P2P/CUMEM, ..."""
        text = "".join(log.read_text(errors="replace") for log in self.logs)
        return sorted(set(re.findall(r"NCCL INFO Channel .* via (\S+)", text)))

    def complete(self, seconds: float = 60, **body: Any) -> list[dict[str, Any]]:
        """Choices of a greedy completion that ignores the end of a text."""
        fixed = {"model": self.name, "temperature": 0, "ignore_eos": True}
        answer = self.first.post(self.port, "/v1/completions", fixed | body, seconds)
        return sorted(answer["choices"], key=lambda choice: choice["index"])

    def kill_worker(self, seconds: float = 3 * PATIENCE) -> dict[str, Any]:
        """SIGKILL the second node's worker under a request; what the first node then does."""
        told: list[str] = []

        def ask() -> None:
            try:
                self.complete(prompt=[5] * 16, max_tokens=200)
                told.append("an answer")
            except (OSError, http.client.HTTPException) as error:
                told.append(f"{type(error).__name__}: {error}"[:160])

        family = psutil.Process(self.processes[1].pid).children(recursive=True)
        workers = [p for p in family if "Worker" in processes.program(p.pid)] or family
        worker = max(workers, key=lambda process: process.memory_info().rss)
        name = processes.program(worker.pid)
        request = threading.Thread(target=ask, daemon=True)
        request.start()
        time.sleep(0.1)
        start = time.monotonic()
        worker.kill()
        while self.processes[0].poll() is None and time.monotonic() - start < seconds:
            time.sleep(0.1)
        took = round(time.monotonic() - start, 1)
        request.join(5)
        return {
            "killed": name,
            "request_in_flight": told[0] if told else "no answer",
            "exit_status": self.processes[0].poll(),
            "seconds": took,
        }

    def stop(self) -> None:
        """End all its processes."""
        for process in self.processes:
            processes.stop(process, patience=2)


def _on_ray(cluster: str, node: Node, rank: int, serve: list[str]) -> list[str]:
    """The node's part of a Ray cluster; on the first node ``serve`` as well, in the same mounts."""
    at = f"--address={cluster}"
    if rank == 0:
        at = f"--head --port={cluster.rpartition(':')[2]} --include-dashboard=false"
    begin = (
        f"{sys.executable} -m ray.scripts.scripts start {at} --node-ip-address={node.address} "
        "--block --disable-usage-stats --num-gpus=1 --num-cpus=4"
    )
    # sockets and addresses of the node, which Ray keeps below /tmp/ray
    own = "mkdir -p /tmp/ray && mount -t tmpfs ray /tmp/ray;" if node.namespace else ""
    if rank:
        # until the head is there
        return ["sh", "-c", f"{own} for i in 1 2 3 4 5; do sleep 2; {begin} && break; done"]
    wait = f'import ray, time; ray.init("{cluster}")\nwhile len(ray.nodes()) < 2: time.sleep(0.2)'
    both = f"{sys.executable} -c '{wait}'"
    then = f"export RAY_ADDRESS={cluster}; exec {join(serve)}"
    return ["sh", "-c", f"{own} ({begin}) & sleep 4; {both} && {then}"]


def _environment(node: Node) -> dict[str, str]:
    given = dict(os.environ)
    if not has_gpu():
        given = (
            CPU_ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"} | given
        )
    given["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), given.get("PYTHONPATH", "")]))
    return given | dict(node.variables)

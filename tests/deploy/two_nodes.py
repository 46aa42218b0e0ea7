# SPDX-License-Identifier: MIT
"""One model over two nodes on this machine: network namespaces joined by a cable.

`python -m tests.deploy.two_nodes REPORT.json --ray` (as root, some minutes) serves tiny_gpt_oss in
oss_fp8 on one node, then with tensor parallel size 2 over both: the answers must agree. It kills
the worker of the second node, expects the server to end and not to answer, starts both again and
expects the answer of before. With --ray (and Ray on the path) it records what vLLM's CPU build
says to a Ray cluster over both nodes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from harness import processes
from harness.compare import CPU_ENVIRONMENT
from harness.server import VLLM_SERVE

from oss_fused.environment import fingerprint
from oss_fused.files import write_json

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/data/tiny_gpt_oss"
NODES = {"ossnode0": "10.77.0.1", "ossnode1": "10.77.0.2"}
PORT = 8000
FLAGS = ["--quantization", "oss_fp8", "--max-model-len", "256", "--enforce-eager"]
PROMPT = "class Reader:\n    def __init__(self"
STARTUP_SECONDS, FAILURE_SECONDS = 420, 120


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def cable():
    """Two namespaces with an interface each, eth0, that reach each other and nothing else."""
    names = list(NODES)
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "eth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "eth0",
            "netns",
            names[1],
        )
        for name, address in NODES.items():
            for words in (
                ["addr", "add", f"{address}/24", "dev", "eth0"],
                ["link", "set", "eth0", "up"],
            ):
                ip("-n", name, *words)
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def environment(address: str) -> dict[str, str]:
    """Of a process on the node with that address."""
    extra = {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": "eth0", "TORCHDYNAMO_DISABLE": "1"}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    extra["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return CPU_ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ | extra


def on(node: str, command: list[str]) -> list[str]:
    return ["ip", "netns", "exec", node, *command]


class Cluster:
    """`vllm serve` on one or both nodes."""

    def __init__(self, scratch: Path, ranks: int) -> None:
        self.logs, self.processes = [], []
        first = next(iter(NODES.values()))
        for rank, (node, address) in list(enumerate(NODES.items()))[:ranks]:
            flags = [*FLAGS, "--served-model-name", "tiny"]
            if ranks > 1:
                flags += ["--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", str(rank)]
                flags += ["--master-addr", first, "--master-port", "29555"]
            flags += ["--headless"] if rank else ["--host", address, "--port", str(PORT)]
            path = scratch / f"{time.monotonic_ns()}-{node}.log"
            with path.open("wb") as log:
                command = on(node, [*VLLM_SERVE, str(MODEL), *flags])
                self.processes.append(processes.start(command, log, environment(address)))
            self.logs.append(path)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            processes.stop(process)

    def ask(self, seconds: float = 60) -> str | None:
        """A greedy answer asked for from the first node; None without one."""
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
        command = ["curl", "-sf", "-m", str(seconds), f"http://10.77.0.1:{PORT}/v1/completions"]
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        done = subprocess.run(on("ossnode0", command), capture_output=True, text=True, check=False)
        return json.loads(done.stdout)["choices"][0]["text"] if done.returncode == 0 else None

    def wait(self) -> float:
        """Seconds until the first answer."""
        start = time.monotonic()
        while time.monotonic() - start < STARTUP_SECONDS:
            if self.ask() is not None:
                return round(time.monotonic() - start, 1)
            for process, log in zip(self.processes, self.logs):
                if process.poll() is not None:
                    raise SystemExit(f"ended early:\n{log.read_text()[-3000:]}")
            time.sleep(1)
        raise SystemExit("\n".join(log.read_text()[-3000:] for log in self.logs))

    def kill_worker(self) -> dict[str, object]:
        """SIGKILL the second node's worker; what the first node then does."""
        family = psutil.Process(self.processes[1].pid).children(recursive=True)
        worker = max(family, key=lambda process: process.memory_info().rss)
        name, start = worker.name(), time.monotonic()
        worker.send_signal(signal.SIGKILL)
        answers = 0
        while self.processes[0].poll() is None and time.monotonic() - start < FAILURE_SECONDS:
            answers += self.ask(5) is not None
            time.sleep(0.5)
        lines = self.logs[0].read_text().splitlines()
        causes = [line for line in lines if "RuntimeError: " in line or "EngineDeadError: " in line]
        return {
            "killed": name,
            "exit_status": self.processes[0].poll(),
            "seconds": round(time.monotonic() - start, 1),
            "answers_after": answers,
            "first_errors": [line[-200:] for line in causes[:3]],
        }


def what_ray_says(scratch: Path) -> str:
    """The last error of vLLM's CPU build with --distributed-executor-backend ray."""
    with ExitStack() as stack:
        for (node, address), role in zip(NODES.items(), ("--head", "--address=10.77.0.1:6379")):
            start = [sys.executable, "-m", "ray.scripts.scripts", "start", role, "--block"]
            start += [f"--node-ip-address={address}", "--disable-usage-stats", "--num-cpus=1"]
            start += ["--port=6379"] if role == "--head" else []
            log = stack.enter_context((scratch / f"ray-{node}.log").open("wb"))
            process = processes.start(on(node, start), log, environment(address))
            stack.callback(processes.stop, process)
            time.sleep(15)
        command = [*VLLM_SERVE, str(MODEL), *FLAGS, "--tensor-parallel-size", "2"]
        command += ["--distributed-executor-backend", "ray", "--host", "10.77.0.1"]
        variables = environment("10.77.0.1") | {"RAY_ADDRESS": "10.77.0.1:6379"}
        done = subprocess.run(
            on("ossnode0", command),
            env=variables,
            capture_output=True,
            text=True,
            timeout=STARTUP_SECONDS,
            check=False,
        )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "ray" in line.lower()]
    errors = [line for line in lines if "Error" in line] or lines
    return errors[0][-300:] if errors else f"status {done.returncode}"


def main() -> int:
    """Run everything; returns the exit code."""
    report: dict[str, object] = {"kind": "oss_fused.two_nodes", "environment": fingerprint()}
    with processes.signals_as_exceptions(), cable(), tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        with Cluster(scratch, 1) as cluster:
            cluster.wait()
            report["answer_one_node"] = cluster.ask()
        with Cluster(scratch, 2) as cluster:
            report["startup_seconds"] = cluster.wait()
            report["answer_two_nodes"] = cluster.ask()
            report["worker_killed"] = cluster.kill_worker()
        with Cluster(scratch, 2) as cluster:
            report["restart_seconds"] = cluster.wait()
            report["answer_after_restart"] = cluster.ask()
        if "--ray" in sys.argv:
            report["ray"] = what_ray_says(scratch)
    answers = {report[k] for k in report if k.startswith("answer")}
    report["answers_identical"] = len(answers) == 1
    write_json(Path(sys.argv[1]), report)
    print(json.dumps({k: v for k, v in report.items() if k != "environment"}, indent=1))
    killed = report["worker_killed"]
    # vLLM ends with status 0 after its engine died
    ended = killed["exit_status"] is not None and not killed["answers_after"]
    return 0 if len(answers) == 1 and ended else 1


if __name__ == "__main__":
    sys.exit(main())

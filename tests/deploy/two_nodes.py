# SPDX-License-Identifier: MIT
"""One model over two nodes on this machine, compared with one node.

    python -m tests.deploy.two_nodes REPORT.json --ray                      # CPU, some minutes
    python -m tests.deploy.two_nodes REPORT.json --model FOLDER --together  # two GPUs

Serves oss_fp8 on one node, then over two (nodes.py) through vLLM's ``--nnodes 2``, with tensor
and with pipeline parallel size 2; on GPUs also data parallel size 2 with expert parallelism on
one node, and, with Ray on the path, tensor parallel size 2 over a Ray cluster. All must agree
with one rank within the tolerance of parallel.py, and two nodes with one of the same layout. It
takes the time per token of each. Over two nodes (with --together in the first such layout) it then
kills the second node's worker, expects the server to end, starts both again and expects the answer
of before. With --ray (and Ray on the path) it records what vLLM's CPU build says to a Ray
cluster over both nodes.
REPORT is written after every step. Run it as root.
Exit codes: 0 all agree, 1 otherwise.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import processes, summary
from harness.server import VLLM_SERVE

from oss_fused.environment import fingerprint, has_gpu
from oss_fused.files import write_json
from tests.deploy import cpu_parallel, old_nccl
from tests.deploy.nodes import ROOT, Deployment, Node, nodes
from tests.deploy.parallel import TEXTS, from_one_rank, token_ids
from tests.deploy.parallel_child import NEW_TOKENS, TOP, Answer

TINY = ROOT / "tests/data/tiny_gpt_oss"
STOPPED = (KeyboardInterrupt, processes.Terminated)
FAILED = (OSError, http.client.HTTPException)
BATCHES, REPEATS = (1, 8), 3
# tokens of a prompt, and of the answers whose time is taken
PROMPT, SHORT, LONG = 64, 1, 97
# the layout whose nodes are a Ray cluster
RAY = "two_nodes_ray_tp2"
# layout -> how many nodes, flags, and the layout whose text it must repeat but for rounding
LAYOUTS: dict[str, tuple[int, str, str | None]] = {
    "tp1": (1, "", None),
    "tp2": (1, "--tensor-parallel-size 2", "tp1"),
    "two_nodes_tp2": (2, "--tensor-parallel-size 2", "tp2"),
    "two_nodes_pp2": (2, "--pipeline-parallel-size 2", "tp1"),
    RAY: (2, "--tensor-parallel-size 2", "tp2"),
    "dp2_ep": (1, "--data-parallel-size 2 --enable-expert-parallel", "tp1"),
}
FLAGS = "--quantization oss_fp8 --max-model-len 512 --max-num-seqs 8 --no-enable-prefix-caching"
# all servers share the GPUs, and start sooner without torch.compile
GPU_FLAGS = (
    "--kv-cache-memory-bytes 1G --gpu-memory-utilization 0.05 --cudagraph-capture-sizes 1 8 "
    "--compilation-config.mode 0 --compilation-config.cudagraph_mode FULL_DECODE_ONLY"
)


class Run:
    """The servers of a run, and its report."""

    def __init__(self, args: argparse.Namespace, both: Sequence[Node], scratch: Path) -> None:
        """Nothing is started."""
        self.args, self.both, self.scratch = args, both, scratch
        self.up: dict[str, Deployment] = {}
        self.answers: dict[str, list[Answer]] = {}
        self.layouts: dict[str, dict[str, Any]] = {name: {} for name in args.layouts}
        self.report: dict[str, Any] = {
            "kind": "oss_fused.two_nodes",
            "environment": fingerprint(),
            "model": args.model.name,
            "layouts": self.layouts,
        }
        self.ends = time.monotonic() + args.seconds
        self.texts = token_ids(args.model, TEXTS)
        draw = random.Random(0)
        vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
        self.prompts = [[draw.randrange(3, vocabulary) for _ in range(PROMPT)] for _ in range(8)]

    def left(self) -> float:
        """Seconds of --seconds that are left."""
        return self.ends - time.monotonic()

    def start(self, name: str) -> None:
        count, flags, _ = LAYOUTS[name]
        words = f"{FLAGS} {GPU_FLAGS if has_gpu() else '--enforce-eager'} {flags}".split()
        gpus = {"CUDA_VISIBLE_DEVICES": "0,1" if flags else "0"}
        on = self.both if count > 1 else [Node(variables=gpus)]
        port = 8000 + 10 * list(LAYOUTS).index(name)
        ray = name == RAY
        self.up[name] = Deployment(name, self.args.model, words, on, port, self.scratch, ray)

    def stop(self, *names: str) -> None:
        ending = [self.up.pop(name) for name in names]
        with ThreadPoolExecutor(len(ending) or 1) as pool:
            list(pool.map(Deployment.stop, ending))

    def say(self, name: str, **found: Any) -> None:
        """Add to a layout's part of the report, and write it."""
        self.layouts[name] |= found
        told = {key: value for key, value in found.items() if key != "tokens"}
        print(f"[{self.args.seconds - self.left():.0f} s] {name}: {told}", flush=True)
        write_json(self.args.report, self.report)

    def wait(self, names: Sequence[str], keep: float) -> list[str]:
        """Wait until one of ``names`` is healthy or has failed; those that are healthy."""
        waiting = [name for name in names if name in self.up]
        while waiting and self.left() > keep:
            for name in list(waiting):
                try:
                    if self.up[name].healthy():
                        return [name]
                except RuntimeError as error:
                    self.say(name, error=str(error))
                    waiting.remove(name)
                    self.stop(name)
            time.sleep(0.2)
        for name in waiting:
            log = self.up[name].logs[-1].read_text(errors="replace").splitlines()
            self.say(name, error="not healthy in time: " + " | ".join(log[-2:])[-300:])
            self.stop(name)
        return []

    def ask(self, name: str) -> list[Answer] | None:
        """Greedy answers with the best log-probabilities of each token; None without one."""
        asked = {"prompt": self.texts, "max_tokens": NEW_TOKENS, "logprobs": TOP}
        try:
            choices = self.up[name].complete(return_tokens_as_token_ids=True, **asked)
        except FAILED as error:
            self.say(name, error=f"no answer: {error}")
            return None
        found: list[Answer] = []
        for choice in choices:
            tokens = [int(text.removeprefix("token_id:")) for text in choice["logprobs"]["tokens"]]
            rows = [
                {text.removeprefix("token_id:"): value for text, value in row.items()}
                for row in choice["logprobs"]["top_logprobs"]
            ]
            found.append((tokens, rows))
        return found

    def compare(self) -> None:
        """Say of every layout how far its text is from one rank's, and from its own on one node."""
        for name, answers in self.answers.items():
            for other in {"tp1", LAYOUTS[name][2]} - {name, None}:
                key = f"distance_from_{other}"
                if other in self.answers and key not in self.layouts[name]:
                    self.say(name, **{key: from_one_rank(answers, self.answers[other])})

    def seconds_per_token(self, name: str, batch: int) -> float:
        """Of a decode step of ``batch`` sequences: two answers' difference, by their tokens.

        0 where the server gives none.
        """
        took = []
        for tokens in (SHORT, LONG):
            start = time.monotonic()
            try:
                self.up[name].complete(prompt=self.prompts[:batch], max_tokens=tokens)
            except FAILED as error:
                self.say(name, no_times=str(error))
                return 0.0
            took.append(time.monotonic() - start)
        return (took[1] - took[0]) / (LONG - SHORT)

    def times(self, names: Sequence[str], key: str) -> None:
        """Milliseconds per token of each server, in turns; the first turn is a warm-up."""
        for batch in BATCHES:
            seen: dict[str, list[float]] = {name: [] for name in names}
            for turn in range(REPEATS + 1):
                for name in names:
                    if self.left() > 0 and "no_times" not in self.layouts[name]:
                        value = self.seconds_per_token(name, batch)
                        seen[name] += [round(1e3 * value, 4)] * bool(turn and value)
            for name, values in seen.items():
                if values:
                    found = {"median": statistics.median(values), "values": values}
                    known = self.layouts[name].get(key, {})
                    self.say(name, **{key: known | {f"batch_{batch}": found}})


def fail_over(run: Run, name: str) -> bool:
    """Kill the second node's worker of ``name``, start both nodes again and ask them once more.

    No other server is up meanwhile. Whether the server ended, and gave the answer of before.
    """
    run.stop(*run.up.keys() - {name})
    run.say(name, worker_killed=run.up[name].kill_worker())
    run.stop(name)
    run.start(name)
    deployment = run.up[name]
    if not run.wait([name], 0):
        return False
    seconds = round(time.monotonic() - deployment.started, 1)
    same = run.ask(name) == run.answers[name]
    run.say(name, restart_seconds=seconds, same_answer=same)
    return same and run.layouts[name]["worker_killed"]["exit_status"] is not None


def serve(run: Run) -> bool:
    """All layouts; whether all answered and agree."""
    groups = [run.args.layouts] if run.args.together else [[name] for name in run.args.layouts]
    good = True
    for group in groups:
        for name in group:
            run.start(name)
        waiting, ready = list(group), []
        while healthy := run.wait(waiting, run.args.reserve):
            name = healthy[0]
            waiting.remove(name)
            deployment = run.up[name]
            seconds = round(time.monotonic() - deployment.started, 1)
            answers = run.ask(name)
            if answers is None:
                continue
            run.answers[name] = answers
            tokens = [tokens for tokens, _ in answers]
            told = {"startup_seconds": seconds, "nccl_channels": deployment.channels()}
            run.say(name, tokens=tokens, **told)
            run.compare()
            ready.append(name)
        run.times(ready, "ms_per_token")
        killed = [name for name in group if name in ready and LAYOUTS[name][0] > 1 and name != RAY]
        if killed:
            good &= fail_over(run, killed[0])
        run.stop(*run.up)
    told = [item for entry in run.layouts.values() for item in entry.items()]
    agree = all(value["agrees"] for key, value in told if key.startswith("distance"))
    return good and agree and not any(key in ("error", "no_times") for key, _ in told)


def ratio(layouts: dict[str, dict[str, Any]]) -> float | None:
    """Time per token of one request, two nodes over one, both with tensor parallel size 2."""
    found = []
    for name in ("two_nodes_tp2", "tp2"):
        times = layouts.get(name, {}).get("ms_per_token", {})
        found.append(times.get("batch_1", {}).get("median"))
    return round(found[0] / found[1], 4) if all(found) else None


def what_ray_says(both: Sequence[Node], scratch: Path) -> str:
    """The last error of vLLM's CPU build with --distributed-executor-backend ray."""
    first = both[0].address
    with ExitStack() as stack:
        for node, role in zip(both, ("--head --port=6379", f"--address={first}:6379")):
            start = (
                f"-m ray.scripts.scripts start {role} --block --disable-usage-stats --num-cpus=1"
            )
            words = [sys.executable, *start.split(), f"--node-ip-address={node.address}"]
            log = stack.enter_context((scratch / f"ray-{node.address}.log").open("wb"))
            environment = os.environ | node.variables
            process = processes.start([*node.prefix, *words], log, environment)
            stack.callback(processes.stop, process)
            time.sleep(15)
        flags = f"{FLAGS} --enforce-eager --tensor-parallel-size 2 --host {first}".split()
        flags += ["--distributed-executor-backend", "ray"]
        done = subprocess.run(
            [*both[0].prefix, *VLLM_SERVE, str(TINY), *flags],
            env=os.environ | both[0].variables | {"RAY_ADDRESS": f"{first}:6379"},
            capture_output=True,
            text=True,
            timeout=420,
            check=False,
        )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "ray" in line.lower()]
    errors = [line for line in lines if "Error" in line] or lines
    return errors[0][-300:] if errors else f"status {done.returncode}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; returns the exit code."""
    args = parse_args(argv)
    with ExitStack() as stack:
        stack.enter_context(processes.signals_as_exceptions())
        both, network = stack.enter_context(nodes())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oss-fused-nodes-")))
        if args.logs:
            args.logs.mkdir(parents=True, exist_ok=True)
        run = Run(args, both, args.logs or scratch)
        run.report["network"] = network
        if has_gpu():
            run.report["nccl"] = old_nccl.offer(scratch)
        else:
            paths = [cpu_parallel.offer(scratch), os.environ.get("PYTHONPATH", "")]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        print(network, run.report.get("nccl", ""), flush=True)
        try:
            good = serve(run)
            if args.ray:
                run.report["ray"] = what_ray_says(both, scratch)
        except (*FAILED, *STOPPED) as error:
            run.report["failure"], good = f"{type(error).__name__}: {error}", False
        finally:
            found = ratio(run.layouts)
            if found:
                run.report["tp2_tpot_ratio"] = found
            write_json(args.report, run.report)
            run.stop(*run.up)
    if found and args.summary:
        summary.merge_summary(args.summary, {"scale.two_nodes.tp2_tpot_ratio": found}, args.report)
    print(json.dumps({k: v for k, v in run.report.items() if k != "environment"})[:200])
    return 0 if good else 1


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    # vLLM's own kernel for bf16 experts, which TINY has, fails with expert parallelism on a CPU
    default = [name for name in LAYOUTS if has_gpu() or name not in ("dp2_ep", RAY)]
    if importlib.util.find_spec("ray") is None and RAY in default:
        default.remove(RAY)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=default)
    parser.add_argument("--model", type=Path, default=TINY, help="checkpoint folder")
    parser.add_argument("--together", action="store_true", help="all servers at once")
    parser.add_argument("--seconds", type=float, default=3600, help="for all (default: 3600)")
    parser.add_argument("--reserve", type=float, default=20, help="of them, for times and restart")
    parser.add_argument("--logs", type=Path, help="folder that keeps the servers' logs")
    parser.add_argument("--summary", type=Path, help="flat JSON to merge the ratio into")
    parser.add_argument("--ray", action="store_true", help="what vLLM's CPU build says to Ray")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

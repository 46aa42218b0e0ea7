# SPDX-License-Identifier: MIT
"""The answer of a model with oss_fp8 must not depend on the parallelism.

    python -m tests.deploy.parallel REPORT.json                             # CPU, some minutes
    python -m tests.deploy.parallel REPORT.json --layouts tp1 tp2 ep2 dp2   # some of the layouts
    python -m tests.deploy.parallel REPORT.json --model FOLDER --together   # two GPUs

Each layout runs in processes of its own and continues a few prompts greedily. Without --model it
is a small random MXFP4 gpt-oss, and every token and its log-probability are also compared with
transformers' model, rounded alike. Where a layout fails on a CPU, vLLM's own bf16 model is run in
it too: does it fail as well? Data and pipeline parallelism need what vLLM's CPU build lacks:
cpu_parallel.py adds it there. What a layout's processes say is in REPORT-LAYOUT.log. Exit codes:
0 all agree, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.arms import CPU_ENVIRONMENT
from harness.server import free_port

from oss_fused.environment import fingerprint, has_gpu
from oss_fused.files import writable, write_json
from tests.deploy import cpu_parallel
from tests.deploy.parallel_child import Answer
from tests.plugin.conftest import build, reference_logprobs, to_mxfp4

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4},
    "pp2": {"pipeline_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    # a process of ours a rank, see `run`; the experts are shared by both, by column and by expert
    "dp2": {"data_parallel_size": 2},
    "dp2_ep": {"data_parallel_size": 2, "enable_expert_parallel": True},
}
PROMPTS = [[3, 17, 42, 99], [5, 77, 23, 54, 61, 8, 30]]
TEXTS = ["class Reader:\n    def __init__(self", "The river runs past an old mill where"]
# as in tests/plugin/conftest.py; ranks that share a row quantise their parts of it by scales of
# their own, which neither the reference nor a single rank does
TOLERANCE, TOLERANCE_RANKS = 0.15, 0.4
GPU_OPTIONS = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**29}


def run(
    model: Path,
    options: dict[str, Any],
    prompts: Sequence[Sequence[int]] = PROMPTS,
    seconds: float = 200,
    log: Path | None = None,
) -> list[Answer] | str:
    """The answers to ``prompts``, or the last error; data-parallel ranks must agree exactly.

    What the ranks say is appended to ``log``.
    """
    options = {"model": str(model), "skip_tokenizer_init": True, **options}
    ranks = options.pop("data_parallel_size", 1)
    if has_gpu():
        options = GPU_OPTIONS | options
        environment = dict(os.environ)
    else:
        # a thread a rank: ranks that share cores would mostly wait for each other's threads
        given = CPU_ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        environment = given | os.environ
    environment |= {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": _path()}
    if ranks > 1:
        # how vLLM's offline example tells each rank who it is
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        environment |= {"VLLM_DP_SIZE": str(ranks), "VLLM_DP_MASTER_PORT": str(free_port())}
    with ThreadPoolExecutor(ranks) as pool, tempfile.TemporaryDirectory() as plugins:
        if not has_gpu():
            path = [cpu_parallel.offer(Path(plugins)), environment["PYTHONPATH"]]
            environment["PYTHONPATH"] = os.pathsep.join(path)
        results = [
            pool.submit(
                _run_rank, options, prompts, seconds, environment | {"VLLM_DP_RANK": str(rank)}
            )
            for rank in range(ranks)
        ]
        ran = [result.result() for result in results]
    if log is not None:
        with log.open("a") as file:
            file.writelines(f"==== rank {rank}\n{said}\n" for rank, (_, said) in enumerate(ran))
    answers = [answer for answer, _ in ran]
    failed = [answer for answer in answers if isinstance(answer, str)]
    if failed:
        return failed[0]
    return answers[0] if answers == answers[:1] * ranks else f"{ranks} ranks answer differently"


def _path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def _run_rank(
    options: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    seconds: float,
    environment: dict[str, str],
) -> tuple[list[Answer] | str, str]:
    """The answers or the last error, and what the rank said."""
    command = [sys.executable, "-m", "tests.deploy.parallel_child"]
    try:
        done = subprocess.run(
            [*command, json.dumps(options), json.dumps(prompts)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        # bytes, although text is asked for
        said = b"\n".join(filter(None, (late.stdout, late.stderr))).decode(errors="replace")
        return f"no answer after {seconds:.0f} s", said
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    # vLLM's log, with what happened in its workers, is on stdout
    said = f"{done.stdout}\n{done.stderr}"
    if done.returncode or not lines:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        last = errors[-1][-300:] if errors else done.stderr[-300:]
        return f"status {done.returncode}: {last}", said
    return [json.loads(line.removeprefix("RESULT ")) for line in lines], said


def from_one_rank(answers: list[Answer], single: list[Answer]) -> dict[str, Any]:
    """Distance from the answers of one rank, up to the first token that differs, and there.

    Returns:
        "same_text", "same_tokens" (of all), "largest_logprob_difference" (of the same tokens) and
        "largest_regret": by how much one rank prefers its own token where the texts part.
    """
    same, difference, regret = 0, 0.0, 0.0
    for (tokens, rows), (others, single_rows) in zip(answers, single):
        for token, row, other, single_row in zip(tokens, rows, others, single_rows):
            if token != other:
                # not among the best ones: no better than the last of those
                floor = min(single_row.values())
                regret = max(regret, single_row[str(other)] - single_row.get(str(token), floor))
                break
            same += 1
            difference = max(difference, abs(row[str(token)] - single_row[str(token)]))
    return {
        "same_text": all(a[0] == b[0] for a, b in zip(answers, single)),
        "same_tokens": f"{same} of {sum(len(answer[0]) for answer in single)}",
        "largest_logprob_difference": round(difference, 4),
        "largest_regret": round(regret, 4),
        "agrees": max(difference, regret) < TOLERANCE_RANKS,
    }


def from_reference(answers: list[Answer], plain: Path, alone: bool) -> dict[str, Any]:
    """Distance from transformers' model with the same roundings, fed with the same tokens.

    Ranks that share an o_proj quantise their parts by scales of their own. In this random model
    other rounding points there alone, in transformers' model, put 2 to 8 of 100 tokens beyond the
    tolerance: one in ten may be, of one rank none.
    """
    differences: list[float] = []
    far = 0
    regret = 0.0
    for prompt, (tokens, rows) in zip(PROMPTS, answers):
        expected = reference_logprobs(plain, prompt + tokens, ignore=(), experts="mxfp4")
        for step, (token, row) in enumerate(zip(tokens, rows)):
            reference = expected[len(prompt) - 1 + step]
            differences.append(abs(reference[token].item() - row[str(token)]))
            # how far a chosen token is from the reference's best
            behind = reference.max().item() - reference[token].item()
            regret = max(regret, behind)
            far += max(differences[-1], behind) > TOLERANCE
    return {
        "median_logprob_difference": round(statistics.median(differences), 4),
        "largest_logprob_difference": round(max(differences), 4),
        "largest_regret": round(regret, 4),
        "far_tokens": f"{far} of {len(differences)}",
        "agrees": far <= (0 if alone else len(differences) // 10),
    }


def judge(
    name: str, answer: list[Answer] | str, single: list[Answer] | str | None, plain: Path | None
) -> dict[str, Any]:
    """What to report of a layout; ``single``: what one rank answered, if it did."""
    if isinstance(answer, str):
        if not plain or has_gpu():
            return {"error": answer}
        alone = run(plain, {"quantization": None, **LAYOUTS[name]})
        return {"error": answer, "vllm_alone": alone if isinstance(alone, str) else "runs"}
    entry: dict[str, Any] = {"tokens": [tokens for tokens, _ in answer]}
    if plain:
        entry["reference"] = from_reference(answer, plain, not LAYOUTS[name])
    if name != "tp1" and isinstance(single, list):
        entry["tp1"] = from_one_rank(answer, single)
    return entry


def token_ids(model: Path, texts: Sequence[str]) -> list[list[int]]:
    """``texts`` in the words of the model's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [list(tokenizer.encode(text)) for text in texts]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the layouts; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--model", type=Path, help="checkpoint with a tokenizer")
    parser.add_argument("--together", action="store_true", help="all layouts at once")
    parser.add_argument("--seconds", type=float, default=200, help="that a layout has")
    args = parser.parse_args(argv)
    # the others are compared with it
    args.layouts.sort(key="tp1".__ne__)
    try:
        writable(args.report)
    except OSError as error:
        parser.error(f"REPORT {args.report}: cannot be written: {error}")
    with tempfile.TemporaryDirectory(prefix="oss-fused-parallel-") as folder:
        plain, model, prompts = None, args.model, PROMPTS
        if model is None:
            # a KV head a rank, which vLLM needs; five MXFP4 blocks, which four ranks cannot share
            sizes = {"num_key_value_heads": 4, "intermediate_size": 160}
            plain = build(Path(folder, "bf16"), "gpt_oss", **sizes)
            model = to_mxfp4(build(Path(folder, "mxfp4"), "gpt_oss", **sizes))
        else:
            prompts = token_ids(model, TEXTS)

        def one(name: str) -> list[Answer] | str:
            options = {"quantization": "oss_fp8", **LAYOUTS[name]}
            log = args.report.with_name(f"{args.report.stem}-{name}.log")
            return run(model, options, prompts, args.seconds, log)

        head = {"kind": "oss_fused.parallel", "environment": fingerprint(), "model": model.name}
        answers: dict[str, list[Answer] | str] = {}
        layouts: dict[str, dict[str, Any]] = {}
        with ThreadPoolExecutor(len(args.layouts) if args.together else 1) as pool:
            for name, answer in zip(args.layouts, pool.map(one, args.layouts)):
                answers[name] = answer
                layouts[name] = judge(name, answer, answers.get("tp1"), plain)
                print(name, {k: v for k, v in layouts[name].items() if k != "tokens"}, flush=True)
                write_json(args.report, head | {"layouts": layouts})
    return 0 if all(map(_good, layouts.values())) else 1


def _good(entry: dict[str, Any]) -> bool:
    # what vLLM alone cannot do here is not ours to judge
    if "error" in entry:
        return entry.get("vllm_alone", "runs") != "runs"
    return all(entry[part]["agrees"] for part in ("reference", "tp1") if part in entry)


if __name__ == "__main__":
    sys.exit(main())

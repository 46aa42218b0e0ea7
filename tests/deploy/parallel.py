# SPDX-License-Identifier: MIT
"""The greedy answer of tiny_gpt_oss with oss_fp8 must not depend on the parallelism.

`python -m tests.deploy.parallel REPORT.json` runs each layout in a process of its own (about a
minute each on two idle cores) and compares the tokens with those of one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from oss_fused.bench.compare import CPU_ENVIRONMENT
from oss_fused.bench.environment import fingerprint
from oss_fused.bench.folder import write_json

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/data/tiny_gpt_oss"
LAYOUTS: dict[str, dict[str, object]] = {
    "tp1": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4},
    "pp2": {"pipeline_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
CHILD = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    llm = LLM(max_model_len=256, max_num_seqs=4, enforce_eager=True, **options)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
    prompts = ["def main():\\n", "class Reader:\\n    def __init__(self"]
    for out in llm.generate(prompts, params, use_tqdm=False):
        first = out.outputs[0]
        logprobs = [step[t].logprob for step, t in zip(first.logprobs, first.token_ids)]
        print("RESULT", json.dumps([list(first.token_ids), logprobs]))
"""


def run(options: dict[str, object]) -> list[tuple[list[int], list[float]]] | str:
    """Tokens and log-probabilities of two prompts, or the last error."""
    everything = {"model": str(MODEL), "quantization": "oss_fp8", **options}
    environment = CPU_ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    script = Path(os.environ.get("TMPDIR", "/tmp")) / f"oss-fused-parallel-{os.getpid()}.py"
    script.write_text(CHILD)
    try:
        done = subprocess.run(
            [sys.executable, str(script), json.dumps(everything)],
            env=environment | os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "no answer after 600 s"
    finally:
        script.unlink()
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        return f"status {done.returncode}: {errors[-1][-300:] if errors else done.stderr[-300:]}"
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def main() -> int:
    """Run all layouts; returns the exit code."""
    report: dict[str, object] = {"kind": "oss_fused.parallel", "environment": fingerprint()}
    chosen = sys.argv[2:] or list(LAYOUTS)
    reference = run(LAYOUTS["tp1"])
    if isinstance(reference, str):
        raise SystemExit(reference)
    layouts: dict[str, object] = {}
    for name in chosen:
        answers = run(LAYOUTS[name])
        if isinstance(answers, str):
            layouts[name] = {"error": answers}
        else:
            gaps = [
                abs(a - b) for one, two in zip(answers, reference) for a, b in zip(one[1], two[1])
            ]
            layouts[name] = {
                "same_tokens": [a[0] == r[0] for a, r in zip(answers, reference)],
                "largest_logprob_difference": round(max(gaps), 5),
            }
        print(name, layouts[name], flush=True)
    write_json(Path(sys.argv[1]), report | {"layouts": layouts})
    return 0 if all(all(entry.get("same_tokens", [False])) for entry in layouts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

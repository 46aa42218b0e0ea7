# SPDX-License-Identifier: MIT
"""The answer of a small MXFP4 gpt-oss with oss_fp8 must not depend on the parallelism.

`python -m tests.deploy.parallel REPORT.json` runs each layout in a process of its own (about half
a minute each on two idle cores) and compares every token and its log-probability with transformers'
model, rounded alike. Where a layout fails, vLLM's own
bf16 model is run in it too: does it fail as well?
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from oss_fused.bench.compare import CPU_ENVIRONMENT
from oss_fused.bench.environment import fingerprint
from oss_fused.bench.folder import write_json
from tests.plugin.conftest import build, reference_logprobs, to_mxfp4

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS: dict[str, dict[str, object]] = {
    "tp1": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4},
    "pp2": {"pipeline_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
PROMPTS = [[3, 17, 42, 99], [5, 77, 23, 54, 61, 8, 30]]
# as in tests/plugin/conftest.py; ranks that share a row quantise their parts of it by scales of
# their own, which the reference does not
TOLERANCE, TOLERANCE_RANKS = 0.15, 0.4
CHILD = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    llm = LLM(
        max_model_len=64, max_num_seqs=4, enforce_eager=True, skip_tokenizer_init=True, **options
    )
    params = SamplingParams(
        temperature=0, max_tokens=16, ignore_eos=True, logprobs=0, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
    for out in llm.generate(prompts, params, use_tqdm=False):
        first = out.outputs[0]
        logprobs = [step[t].logprob for step, t in zip(first.logprobs, first.token_ids)]
        print("RESULT", json.dumps([list(first.token_ids), logprobs]))
"""


def run(model: Path, options: dict[str, object]) -> list[tuple[list[int], list[float]]] | str:
    """Tokens and log-probabilities of two prompts, or the last error."""
    everything = {"model": str(model), **options}
    environment = CPU_ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    script = Path(os.environ.get("TMPDIR", "/tmp")) / f"oss-fused-parallel-{os.getpid()}.py"
    script.write_text(CHILD)
    try:
        done = subprocess.run(
            [sys.executable, str(script), json.dumps(everything), json.dumps(PROMPTS)],
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


def compare(
    answers: list[tuple[list[int], list[float]]], plain: Path, bound: float
) -> dict[str, float | bool]:
    """Distance from transformers' model with the same roundings, fed with the same tokens."""
    difference = regret = 0.0
    for prompt, (tokens, logprobs) in zip(PROMPTS, answers):
        rows = reference_logprobs(plain, prompt + tokens, ignore=(), experts="mxfp4")
        for step, (token, logprob) in enumerate(zip(tokens, logprobs)):
            row = rows[len(prompt) - 1 + step]
            difference = max(difference, abs(row[token].item() - logprob))
            regret = max(regret, row.max().item() - row[token].item())
    return {
        "largest_logprob_difference": round(difference, 4),
        # how far a chosen token is from the reference's best
        "largest_regret": round(regret, 4),
        "agrees": max(difference, regret) < bound,
    }


def main() -> int:
    """Run all layouts; returns the exit code."""
    report: dict[str, object] = {"kind": "oss_fused.parallel", "environment": fingerprint()}
    chosen = sys.argv[2:] or list(LAYOUTS)
    folder = Path(tempfile.mkdtemp(prefix="oss-fused-parallel-"))
    # a KV head a rank, which vLLM needs; five MXFP4 blocks, which four ranks cannot share
    sizes = {"num_key_value_heads": 4, "intermediate_size": 160}
    plain = build(folder / "bf16", "gpt_oss", **sizes)
    model = to_mxfp4(build(folder / "mxfp4", "gpt_oss", **sizes))
    ours = {"quantization": "oss_fp8"}
    layouts: dict[str, dict] = {}
    for name in chosen:
        answers = run(model, ours | LAYOUTS[name])
        if isinstance(answers, str):
            stock = run(plain, {"quantization": None, **LAYOUTS[name]})
            failed = stock if isinstance(stock, str) else "runs"
            layouts[name] = {"error": answers, "vllm_alone": failed}
        else:
            bound = TOLERANCE_RANKS if LAYOUTS[name] else TOLERANCE
            layouts[name] = compare(answers, plain, bound)
        print(name, layouts[name], flush=True)
    shutil.rmtree(folder)
    write_json(Path(sys.argv[1]), report | {"layouts": layouts})
    # what vLLM alone cannot do here is not ours to judge
    ran = [entry for entry in layouts.values() if entry.get("vllm_alone", "runs") == "runs"]
    return 0 if all(entry.get("agrees") for entry in ran) else 1


if __name__ == "__main__":
    sys.exit(main())

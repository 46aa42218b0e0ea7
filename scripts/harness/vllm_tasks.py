# SPDX-License-Identifier: MIT
"""Runs lm-eval tasks that local files describe on one model, through vLLM; a process of its own.

`python -m harness.vllm_tasks JOB.json` with "model", engine "flags", "tasks" (YAML files of
lm-eval), "limit" and "output", a JSON file: task -> metric -> number.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    """Run the job's tasks."""
    job = json.loads(Path(sys.argv[1]).read_text())
    # what is measured with and what is measured: this program needs them, the package does not
    lm_eval = importlib.import_module("lm_eval")
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_defaults=False)
    found = lm_eval.simple_evaluate(
        model="vllm",
        model_args=engine_settings(job["model"], job["flags"]),
        tasks=job["tasks"],
        limit=job["limit"],
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=False,
    )
    Path(job["output"]).write_text(json.dumps(scores(found["results"])))
    return 0


def engine_settings(model: str, flags: list[str]) -> dict[str, Any]:
    """Settings of lm-eval's model class for engine flags: those that differ from the defaults."""
    parsing = importlib.import_module("vllm.utils.argparse_utils")
    engine_args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    parser = engine_args.add_cli_args(parsing.FlexibleArgumentParser())
    chosen = engine_args.from_cli_args(parser.parse_args(["--model", model, *flags]))
    usual = engine_args.from_cli_args(parser.parse_args(["--model", model]))
    changed = {
        name: value
        for field in dataclasses.fields(engine_args)
        if (value := getattr(chosen, (name := field.name))) != getattr(usual, name)
    }
    return {"pretrained": model, **changed}


def scores(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The numbers of lm-eval's results, without filters' names and standard errors."""
    return {
        task: {
            key.removesuffix(",none"): float(value)
            for key, value in metrics.items()
            if isinstance(value, (int, float)) and "_stderr" not in key and "," in key
        }
        for task, metrics in results.items()
    }


if __name__ == "__main__":
    sys.exit(main())

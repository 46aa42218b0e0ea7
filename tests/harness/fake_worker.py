# SPDX-License-Identifier: MIT
"""Stands in for harness.vllm_logprobs and vllm_tasks: a model called `broken` fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    name = Path(job["model"]).name
    if name == "broken":
        print("ValueError: weights are upside down")
        sys.exit(5)
    if "tasks" in job:
        scores = {Path(task).stem: {"acc": 0.5, "limit": job["limit"]} for task in job["tasks"]}
        Path(job["output"]).write_text(json.dumps(scores))
        return
    worse = 0.1 if name == "worse" else 0.0
    count = 6
    own = np.full(count, np.log(0.5) - worse, np.float32)
    top = np.tile(np.log(np.array([0.5, 0.3], np.float32)), (count, 1))
    top[:, 0] -= worse
    ids = np.tile(np.array([3, 4], np.int32), (count, 1))
    keys = [needle["key"] for needle in job["needles"]]
    np.savez(
        job["output"],
        owner=np.array([0, 0, 0, 1, 1, 1]),
        seconds=1.0,
        token_ids=np.arange(count) + (1 if name == "foreign" else 0),
        token_logprobs=own,
        top_ids=ids,
        top_logprobs=top,
        # a bad model finds the keys at the end only
        answers=np.array(
            [f" {key}." if not worse or i % 5 == 4 else "?" for i, key in enumerate(keys)]
        ),
    )


if __name__ == "__main__":
    main()

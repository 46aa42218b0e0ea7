# SPDX-License-Identifier: MIT
"""Stands in for harness.decode_worker; a model called `broken` fails, `late` does not start."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

# one step of a layer and what follows the last, as vLLM's own kernels are called
STEP = ("rms_norm", "nvjet_qkv", "flash_fwd", "nvjet_o", "rms_norm", "_matmul_ogs", "nvjet_head")


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    if Path(job["model"]).name == "broken":
        print("ValueError: weights are upside down", file=sys.stderr)
        sys.exit(5)
    if Path(job["model"]).name == "late":
        time.sleep(60)
    speed = 2.0 if "q" in job["flags"] else 1.0
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        what = request["do"]
        answer: dict[str, object]
        if what == "profile":
            steps = request["steps"] or 1
            names = [*STEP, "argmax"]
            launches = [[i % 8, 10.0 * i, 8.0 / speed] for i in range(8 * steps)]
            answer = {"steps": steps, "names": names, "launches": launches}
        elif what == "host":
            parts = {"forward": 0.5 / speed} | ({"drafts": 0.25} if speed > 1 else {})
            answer = {"ms": 3.0 / speed, "tokens": 2.5, "host_ms": parts}
        elif what == "bandwidth":
            answer = {"bytes_per_second": 4e12}
        elif request["batch"] == 13 or request["context"] == 19:
            answer = {"error": "RuntimeError: unlucky"}
        else:
            answer = {"ms": [request["batch"] / speed] * 3}
            if what == "decode":
                answer["distinct"] = 1.0
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: MIT
"""Stands in for harness.vllm_client: same protocol, sends the requests, invents the times.

FAKE_SECONDS is the time per output token it reports. FAKE_CLIENT: ok | dies.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import urllib.request
from pathlib import Path

MODE = os.environ.get("FAKE_CLIENT", "ok")


def measure(arguments: list[str]) -> dict[str, float]:
    option = dict(itertools.pairwise(arguments))
    count, tokens = int(option["--num-prompts"]), int(option["--random-output-len"])
    failed = 0
    for _ in range(count):
        body = json.dumps({"model": "m", "prompt": "x"}).encode()
        url = option["--base-url"] + option["--endpoint"]
        try:
            urllib.request.urlopen(urllib.request.Request(url, body), timeout=5).read()
        except OSError:
            failed += 1
    # the candidate is twice as fast, the seed adds a spread
    each = 0.01 / (2 if option["--served-model-name"] == "fast" else 1)
    each *= 1 + int(option["--seed"]) % 7 / 100
    result = {
        "completed": count - failed,
        "failed": failed,
        "output_throughput": int(option["--max-concurrency"]) / each,
        "total_token_throughput": 2 / each,
        "request_throughput": 1 / each / tokens,
        "arguments": arguments,
    }
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "p50", "p95", "p99"):
            # as vLLM has it: an answer of one token has no time between tokens
            known = tokens > 1 or metric in ("ttft", "e2el")
            result[f"{statistic}_{metric}_ms"] = each * 1000 if known else 0.0
    folder = Path(option["--result-dir"])
    (folder / option["--result-filename"]).write_text(json.dumps(result))
    return result


def main() -> None:
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        if MODE == "dies":
            print("client trouble", file=sys.stderr)
            sys.exit(1)
        measure(json.loads(line))
        print(json.dumps({"ok": True}), flush=True)


if __name__ == "__main__":
    main()

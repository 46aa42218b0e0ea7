# SPDX-License-Identifier: MIT
"""Stands in for harness.kv_cache_worker; a model whose folder is called `wrong` fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

job = json.loads(Path(sys.argv[1]).read_text())
if Path(job["model"]).name == "wrong":
    sys.exit("RuntimeError: no kernel for this cache")
figures = {"kl": 0.25, "kl_p99": 0.5, "top1_agreement": 0.75, "positions": 4}
kinds = ("prefill_from_decode",) if job["is_reference"] else ("prefill", "decode")
rows = [
    {"context": len(prompt)} | dict.fromkeys(kinds, figures)
    for prompt in np.load(job["prompts"]).values()
]
Path(job["output"]).write_text(json.dumps({"prompts": rows, "seconds": 1.0}))

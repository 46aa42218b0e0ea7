# SPDX-License-Identifier: MIT
"""Runs `vllm bench serve` repeatedly in one process, so that vLLM is imported once.

`python -m harness.vllm_client` reads one JSON list of `vllm bench serve` arguments a line
from stdin and answers each with one JSON line: {"ok": true} or {"error": "..."}; {"ready": true}
comes first. The results are in the files that the arguments name. Its own output goes to stderr.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import traceback
from typing import Any


def main() -> int:
    """Serve requests until stdin ends."""
    # vLLM prints to stdout, also from C: keep the answers apart from that
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # imported late: only the program needs vLLM, not the import of this module
    serve: Any = importlib.import_module("vllm.benchmarks.serve")
    # a vocabulary of 200k tokens takes seconds to load, and every measurement loads it
    serve.get_tokenizer = functools.cache(serve.get_tokenizer)
    parsing = importlib.import_module("vllm.utils.argparse_utils")
    parser = parsing.FlexibleArgumentParser()
    serve.add_cli_args(parser)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        try:
            serve.main(parser.parse_args(json.loads(line)))
            print(json.dumps({"ok": True}), file=answers)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())

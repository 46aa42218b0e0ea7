#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Make a checkpoint of a real shape with random weights: gpt-oss, Llama, Qwen2, Qwen3, Mistral.

For tests (tiny) and speed measurements (20b, 120b, 8b). Weights have a realistic spread, the
router's included; the text such a model writes is noise. Layer by layer, straight from the device
to the disk: a 20b of 13 GiB never needs more than a few layers of memory.

  make_model.py --arch gpt-oss --size tiny --output models/tiny-gpt-oss
  make_model.py --arch gpt-oss --size 20b --format mxfp4 --device cuda --output /tmp/gpt-oss-20b
  make_model.py --arch llama --size 8b --device cuda --output /tmp/llama-8b
  make_model.py --size 20b --draft specforge --device cuda --output /tmp/eagle3-20b

--draft writes a draft head for the model (EAGLE-3, P-EAGLE, DFlash) instead of the model.

Exit codes: 0 made, 1 writing failed or 130 stopped by a signal (nothing is left), 2 bad arguments.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from harness.arguments import place, positive, seed
from harness.processes import Terminated, signals_as_exceptions

from oss_fused.errors import CheckpointError, OssFusedError


def main() -> int:
    """Parse the command line, make the checkpoint, say where it is."""
    from harness import draft_factory, model_factory

    args = parse_args(model_factory.ARCHITECTURES, model_factory.SIZES, draft_factory.LAYOUTS)
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    start = time.monotonic()
    try:
        shape = model_factory.get_shape(args.arch, args.size)
        if args.layers:
            shape = replace(shape, layers=args.layers)
        with signals_as_exceptions():
            if args.draft:
                size = draft_factory.make_draft(args.output, shape, args.draft, args.seed, device)
            else:
                size = model_factory.make_model(args.output, shape, args.format, args.seed, device)
    except (KeyboardInterrupt, Terminated) as error:
        print(f"make_model: stopped by {type(error).__name__}", file=sys.stderr)
        return 130
    except OssFusedError as error:
        print(f"make_model: {error}", file=sys.stderr)
        failed = isinstance(error, CheckpointError) and not args.output.exists()
        return 1 if failed else 2
    seconds = time.monotonic() - start
    print(f"wrote {args.output}: {size / 2**30:.2f} GiB in {seconds:.1f} s", file=sys.stderr)
    return 0


def parse_args(
    archs: tuple[str, ...], sizes: tuple[str, ...], layouts: tuple[str, ...]
) -> argparse.Namespace:
    """Command line of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", choices=archs, default="gpt-oss", help="default: gpt-oss")
    parser.add_argument("--size", choices=sizes, default="tiny", help="default: tiny")
    parser.add_argument(
        "--format", choices=("bf16", "mxfp4"), default="bf16", help="of the experts; default: bf16"
    )
    parser.add_argument(
        "--draft", choices=layouts, help="write a draft head for the model, in this layout"
    )
    parser.add_argument("--layers", type=positive, help="another number of layers")
    parser.add_argument("--seed", type=seed, default=0, help="default: 0")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--output", type=place, required=True, help="folder to create")
    args = parser.parse_args()
    if args.draft and args.format != "bf16":
        parser.error(f"--format {args.format}: has no effect on --draft, whose head has no experts")
    return args


if __name__ == "__main__":
    sys.exit(main())

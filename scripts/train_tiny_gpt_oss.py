#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Train the byte-level gpt-oss that the tests quantise (tests/data/tiny_gpt_oss), or fine-tune it.

It learns from the sources of the running Python's standard library, or from files. Two minutes on
an H200; after Ctrl-C or a kill the same command goes on from the last saved state. Fine-tuning is a
matter of minutes on two cores.

  train_tiny_gpt_oss.py --output models/tiny_gpt_oss --seconds 90
  train_tiny_gpt_oss.py --output models/tiny_tuned --start tests/data/tiny_gpt_oss \\
      --text novel.txt --steps 80 --batch 8 --learning-rate 3e-4
  train_tiny_gpt_oss.py --output models/tiny_needle --start tests/data/tiny_gpt_oss \\
      --needle 33024 --seconds 60 --learning-rate 1e-3

The last learns to find a pass key that stands up to 32768 tokens back: evaluate.py --needle 32768
needs room for the answer as well.

Exit codes: 0 trained, 2 wrong usage or input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.arguments import seed

from oss_fused.errors import OssFusedError


def main() -> int:
    """Parse the command line, train, say what came of it."""
    args = parse_args()
    import torch
    from harness.tiny_gpt_oss import Training, train_tiny
    from tqdm import tqdm

    from oss_fused.files import write_json

    settings = Training(
        steps=args.steps,
        seconds=args.seconds,
        batch=args.batch,
        learning_rate=args.learning_rate,
        seed=args.seed,
        start=args.start and str(args.start),
        texts=tuple(map(str, args.text)),
        needle=args.needle,
    )
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    bar = tqdm(total=args.steps, desc="Training", unit="step", mininterval=2)

    def report(step: int, loss: float, seconds: float) -> None:
        bar.set_postfix_str(f"loss {loss:.3f} nats/byte", refresh=False)
        bar.update(step - bar.n)

    try:
        result = train_tiny(args.output, settings, device, report)
    except OssFusedError as error:
        print(f"train_tiny_gpt_oss: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntrain_tiny_gpt_oss: stopped; the same command goes on", file=sys.stderr)
        return 130
    finally:
        bar.close()
    write_json(args.output / "training.json", result)
    print(
        f"wrote {args.output}: {result['held_out_nats_per_byte']} nats a byte on held-out modules "
        f"after {result['steps']} steps; experts get between {result['least_expert_share']:.1%} "
        f"and {result['most_expert_share']:.1%} of the tokens",
        file=sys.stderr,
    )
    return 0


def parse_args() -> argparse.Namespace:
    """Command line of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder to create")
    add("--steps", type=int, default=4000, help="default: 4000")
    add("--seconds", type=float, help="end after that many, if steps are left")
    add("--batch", type=int, default=64, help="samples of 512 bytes a step (default: 64)")
    add("--learning-rate", type=float, default=2e-3, help="default: 0.002")
    add("--seed", type=seed, default=0, help="default: 0")
    add("--start", type=Path, metavar="DIR", help="checkpoint to train further, bf16 or MXFP4")
    add("--text", type=Path, nargs="+", default=[], help="files to learn from instead")
    add("--needle", type=int, metavar="N", help="learn to find a pass key in N positions")
    add("--device", help="default: cuda if there is one, else cpu")
    args = parser.parse_args()
    if args.needle is not None and args.needle < 1024:
        parser.error(f"--needle {args.needle}: expected at least 1024")
    for name in ("steps", "seconds", "batch", "learning_rate"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} {value}: expected more than 0")
    return args


if __name__ == "__main__":
    sys.exit(main())

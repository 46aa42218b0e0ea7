#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Render docs/ and the tutorial to a static site in results/site; `make docs` calls this.

MkDocs runs in an environment of its own, .venv-docs, made from deploy/docs/requirements.lock. A
broken link ends the build. Exit codes: 0 built, 1 the environment or the site could not be made.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "deploy" / "docs" / "requirements.lock"
VENV = ROOT / ".venv-docs"


def main(argv: list[str] | None = None) -> int:
    """Make the environment where it is not up to date, then the site."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help="serve it and follow changes")
    args = parser.parse_args(argv)
    verb = ["serve"] if args.serve else ["build", "--strict", "--quiet"]
    config = str(ROOT / "deploy" / "docs" / "mkdocs.yml")
    try:
        make_environment()
        subprocess.run([VENV / "bin" / "mkdocs", *verb, "--config-file", config], check=True)
    except subprocess.CalledProcessError as error:
        print(f"build_docs: {Path(error.cmd[0]).name} failed", file=sys.stderr)
        return 1
    if not args.serve:
        print("results/site/index.html", file=sys.stderr)
    return 0


def make_environment() -> None:
    """.venv-docs with the locked packages; nothing happens if it has them."""
    stamp, wanted = VENV / ".lock", hashlib.sha256(LOCK.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--disable-pip-version-check", "-r", str(LOCK)], check=True)
    stamp.write_text(wanted)


if __name__ == "__main__":
    sys.exit(main())

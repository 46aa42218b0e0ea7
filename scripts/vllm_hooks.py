#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compare a vLLM release with what oss_fused needs of it, and record its signatures.

    vllm_hooks.py                                   the installed vLLM
    vllm_hooks.py /tmp/next/vllm                    one that is unpacked only; nothing is imported
    vllm_hooks.py /tmp/next/vllm --output tests/plugin/hooks/vllm-0.34.0.json

Prints the hooks that are missing or do not fit, and those whose signature differs from the newest
recorded release. --summary counts the recorded releases that have every hook.

Exit codes: 0 every hook fits, 1 one does not, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.arguments import output_file, summary_file
from harness.summary import merge_summary

from oss_fused.files import write_json
from oss_fused.plugin.compat import HookResult, check_hooks, vllm_package
from oss_fused.plugin.signatures import Package

RECORDED = Path(__file__).resolve().parent.parent / "tests/plugin/hooks"


def make_parser() -> argparse.ArgumentParser:
    """Command line of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", nargs="?", type=Path, metavar="FOLDER", help="package vllm (default: installed)")
    add("--output", type=output_file, metavar="FILE", help="write the signatures here")
    add("--against", type=Path, metavar="FILE", help="recorded signatures (default: the newest)")
    add(
        "--summary",
        type=summary_file,
        metavar="FILE",
        help="summary.json to add compat.vllm_releases to",
    )
    return parser


def version_of(folder: Path) -> str:
    """Release of the package in ``folder``, from the metadata beside it; "unknown" without."""
    found = [path.name for path in folder.parent.glob("vllm-*.dist-info")]
    return found[0][5:].removesuffix(".dist-info").split("+")[0] if found else "unknown"


def newest(folder: Path) -> Path | None:
    """The recorded file of the highest release."""

    def release(path: Path) -> list[int]:
        return [int(part) for part in path.stem.removeprefix("vllm-").split(".")]

    return max(folder.glob("vllm-*.json"), key=release, default=None)


def differences(results: list[HookResult], recorded: dict[str, str]) -> list[str]:
    """One line for each hook whose signature is not the recorded one."""
    return [
        f"{result.path}: {recorded.get(result.path, 'not recorded')} -> {result.found}"
        for result in results
        if recorded.get(result.path) != result.found
    ]


def whole(folder: Path, results: list[HookResult]) -> list[Path]:
    """Recorded files of releases in which every hook of today was found."""
    asked = {result.path for result in results}
    found = []
    for path in sorted(folder.glob("vllm-*.json")):
        hooks = json.loads(path.read_text())["hooks"]
        if all(hooks.get(name, "missing") != "missing" for name in asked):
            found.append(path)
    return found


def main(argv: list[str] | None = None) -> int:
    """Compare and record; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.folder and not (args.folder / "__init__.py").is_file():
        parser.error(f"FOLDER={str(args.folder)!r}: expected the folder of the package vllm")
    package = Package(args.folder.resolve(), "vllm") if args.folder else vllm_package()
    results = check_hooks(package)
    version = (
        version_of(package.root)
        if args.folder
        else importlib.metadata.version("vllm").split("+")[0]
    )
    against = args.against or newest(RECORDED)
    wrong = [result for result in results if result.problem]
    for result in wrong:
        print(f"wrong: {result.path} {result.problem}")
    if against:
        try:
            recorded = json.loads(against.read_text())
            hooks, release = recorded["hooks"], recorded["vllm"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            parser.error(f"--against={str(against)!r}: expected a file of --output ({error!r})")
        for line in differences(results, hooks):
            print(f"changed since {release}: {line}")
    if args.output:
        hooks = {result.path: result.found for result in results}
        write_json(args.output, {"kind": "oss_fused.vllm_hooks", "vllm": version, "hooks": hooks})
    if args.summary:
        releases = whole(RECORDED, results)
        source = releases[-1] if releases else RECORDED
        merge_summary(args.summary, {"compat.vllm_releases": len(releases)}, source)
    print(f"vllm {version}: {len(results) - len(wrong)} of {len(results)} hooks fit")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

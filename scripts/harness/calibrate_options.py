# SPDX-License-Identifier: MIT
"""Command line of calibrate.py."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

from harness.arguments import place
from harness.calibration_report import trend_file
from oss_fused.errors import SchemeError
from oss_fused.quant.pipeline import BOTH
from oss_fused.quant.recipe import Override, Recipe, load_recipe
from oss_fused.quant.scheme import PRESETS

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_FLAGS = {
    name: f"--{name.replace('_', '-')}" for name in Recipe.model_fields if name != "version"
} | {"overrides": "--override"}
# lm_head and self_check are a module and a file as well
_UNIQUE = [name for name in _FLAGS if "_" in name and name not in ("lm_head", "self_check")]
_ANY = f"(?:{'|'.join(_FLAGS)})"
# what is quoted, or settings: one whose name is no plain word, one with a value, or several
_SETTING = re.compile(
    r"""(?<!\w)(?:'[^']*'|"[^"]*")"""
    rf"|(?<![\w./-])(?P<names>(?:{'|'.join(_UNIQUE)})\b|{_ANY}(?==)|{_ANY}(?:/{_ANY})+(?=:))"
)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Command line of calibrate.py; settings left out stay None, so that a recipe's own hold.

    Args:
        description: what --help shows first.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_run_options(parser.add_argument)
    _add_scheme_options(parser.add_argument)
    _add_calibration_options(parser.add_argument)
    return parser


def _add_run_options(add: Callable[..., Any]) -> None:
    """Where the run reads and writes, and how it runs."""
    add(
        "model",
        type=place,
        metavar="MODEL",
        help="folder of the checkpoint to quantise; gpt-oss also as Unsloth saves it (a linear per "
        "expert)",
    )
    add(
        "--adapter",
        type=place,
        metavar="DIR",
        help="LoRA adapter that PEFT saved; it is merged into MODEL tensor by tensor (linears, "
        "experts' parameters, modules_to_save)",
    )
    add(
        "--output",
        type=place,
        required=True,
        metavar="DIR",
        help="folder to make; appears when complete",
    )
    add(
        "--format",
        dest="formats",
        action="append",
        choices=("oss-fp8", "mxfp4", "compressed-tensors"),
        help="mxfp4 (gpt-oss, as OpenAI publishes it: experts in MXFP4, all else in bf16) and "
        "compressed-tensors load in vLLM without this package; oss-fp8 and mxfp4, both given, go "
        "to DIR/oss-fp8 and DIR/mxfp4 (default: oss-fp8)",
    )
    add(
        "--recipe",
        metavar="FILE",
        help="YAML of the settings below, such as an output's recipe.yaml; flags win over it",
    )
    add(
        "--trend",
        type=trend_file,
        metavar="JSON",
        help="file that keeps figures of the last 100 runs",
    )
    add("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    add(
        "--max-shard-size",
        type=parse_size,
        default="5GB",
        metavar="SIZE",
        help="such as 500MB or 5GB (default: 5GB)",
    )
    add("--overwrite", action="store_true", help="replace DIR if it exists, once the new is whole")
    add(
        "--resume",
        action="store_true",
        help="go on with an interrupted run of the same settings; one that has finished is left as "
        "it is",
    )
    add("--dry-run", action="store_true", help="check everything, say what would be made, stop")


def _add_scheme_options(add: Callable[..., Any]) -> None:
    """Which layers are quantised, and how."""
    add("--scheme", help=f"{', '.join(PRESETS)} (default: FP8_DYNAMIC)")
    add(
        "--targets",
        nargs="+",
        metavar="PATTERN",
        help="linears to quantise: names, class names or 're:REGEX' (default: Linear)",
    )
    add("--ignore", nargs="+", metavar="PATTERN", help="linears to leave as they are")
    add(
        "--override",
        dest="overrides",
        action="append",
        type=parse_override,
        metavar="SCHEME=PATTERN",
        help="another scheme, or BF16, for some of the linears; may be repeated, the last wins",
    )
    add(
        "--lm-head",
        choices=("auto", "fp8", "bf16"),
        help="auto: FP8 for gpt-oss, else as it is; fp8 unties a tied one (default: auto)",
    )
    add(
        "--experts",
        choices=("auto", "mxfp4", "fp8", "bf16"),
        help="how experts are stored; mxfp4: gpt-oss only (default: auto, as in the source)",
    )
    add(
        "--kv-cache",
        choices=("none", "fp8"),
        help="fp8 writes calibrated k_scale and v_scale; needs --dataset (default: none)",
    )
    add(
        "--rounding",
        choices=("auto", "nearest", "mse", "feedback"),
        help="feedback weighs rounding errors by the inputs of --dataset (GPTQ on the grid of FP8 "
        "or MXFP4); mse gives MXFP4 blocks the exponents of least squared error, nearest those of "
        "the largest values; auto: feedback with a dataset, else mse for MXFP4 and nearest for FP8 "
        "(default: auto)",
    )
    add(
        "--base",
        metavar="DIR",
        help="with --experts mxfp4: the MXFP4 checkpoint that was fine-tuned; blocks that still "
        "round to its codes keep them and their scale bit for bit",
    )


def _add_calibration_options(add: Callable[..., Any]) -> None:
    """The samples, and what is measured on them."""
    add(
        "--dataset",
        metavar="FILE",
        help="text, or JSON lines with 'text' or 'messages' (chat template applied); 'python' "
        "takes this Python's own documentation and sources",
    )
    add(
        "--accuracy-target",
        type=parse_target,
        metavar="FACTOR",
        help="perplexity factor to meet, such as 1.01, or KL divergence in nats per token, such as "
        "kl=0.01: searches the cheapest mix of FP8, W8A16 and bf16 linears, and writes it into the "
        "recipe; needs --dataset",
    )
    add(
        "--keep-sensitive",
        action="append",
        type=parse_limit,
        metavar="PATTERN=LIMIT",
        help="with --accuracy-target: linears of PATTERN, such as re:.*q_proj or lm_head, stay in "
        "bf16 if the share of the other linears that cost less per weight is above LIMIT, such as "
        "0.99; may be repeated",
    )
    add(
        "--fp8-stage",
        type=place,
        metavar="DIR",
        help="with --accuracy-target: keep the checkpoint with everything in FP8 there, or take it "
        "from there, so that another target only searches",
    )
    add(
        "--self-check",
        choices=("auto", "on", "off"),
        help="self_check.json: log-probabilities of fixed prompts, which a server compares when it "
        "starts; runs the model once more (default: auto, with a dataset)",
    )
    add(
        "--clip-target",
        type=float,
        metavar="SHARE",
        help="share of values that may saturate, such as 0.001: static scales (FP8_STATIC inputs, "
        "--kv-cache fp8) get the least squared error within it (default: they clip nothing)",
    )
    add(
        "--group-candidates",
        type=int,
        nargs="+",
        metavar="N",
        help="sizes of groups of a weight's inputs: calibration.json tells for each linear which "
        "would round best within --clip-target; not served, scales are per output row",
    )
    add(
        "--smoothing",
        type=float,
        metavar="ALPHA",
        help="move outliers of inputs into the norm or linear before, exactly: 0 makes the columns "
        "of weights alike, 1 the channels of inputs, 0.5 both; needs --dataset (default: not done)",
    )
    add("--num-samples", type=int, metavar="N", help="samples taken from --dataset (default: 64)")
    add("--max-seq-length", type=int, metavar="N", help="tokens a sample (default: 512)")
    add("--seed", type=int, help="of the choice of samples (default: 0)")


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The recipe's settings: file first, flags over it."""
    settings = {} if args.recipe is None else load_recipe(args.recipe)
    formats = set(args.formats or ())
    if len(formats) > 1 and formats != set(BOTH):
        raise SchemeError(
            f"--format={' '.join(args.formats)}: expected one, or {' and '.join(BOTH)}"
        )
    if formats:
        settings["format"] = args.formats[0] if len(formats) == 1 else BOTH[0]
    names = Recipe.model_fields.keys() & vars(args).keys()
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "keep_sensitive" in given:
        given["keep_sensitive"] = dict(given["keep_sensitive"])
    return settings | given


def with_flags(message: str, args: argparse.Namespace) -> str:
    """An error's text with the command line's names of settings.

    With --recipe a setting that no flag gave keeps its name: it stands in that file.
    """
    given = {name for name, value in vars(args).items() if value is not None}
    given = {"format" if name == "formats" else name for name in given}

    def flags(found: re.Match[str]) -> str:
        names = found["names"]
        if not names or (args.recipe is not None and given.isdisjoint(names.split("/"))):
            return found.group()
        return "/".join(_FLAGS[name] for name in names.split("/"))

    return _SETTING.sub(flags, message)


def parse_override(text: str) -> dict[str, Any]:
    """An override of the recipe from "SCHEME=PATTERN"."""
    scheme, separator, pattern = text.partition("=")
    if not (scheme and separator and pattern):
        raise argparse.ArgumentTypeError(f"{text!r}: expected SCHEME=PATTERN")
    try:
        _ = Override.model_construct(scheme=scheme, targets=(pattern,)).weight_scheme
    except SchemeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return {"scheme": scheme, "targets": [pattern]}


def parse_limit(text: str) -> tuple[str, float]:
    """A pattern and its limit from "PATTERN=LIMIT"."""
    pattern, _, limit = text.rpartition("=")
    try:
        return pattern, float(limit)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected PATTERN=LIMIT") from None


def parse_target(text: str) -> float:
    """Perplexity factor from one, or from "kl=" and a KL divergence, whose exp estimates it."""
    try:
        return math.exp(float(text[3:])) if text.startswith("kl=") else float(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number or kl=NUMBER") from None


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB"."""
    number, unit = text[:-2], text[-2:].upper()
    # isdigit() holds for "²", which is no number
    if unit not in _UNITS or not number.strip().replace(".", "", 1).isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number and KB, MB or GB")
    size = int(float(number) * _UNITS[unit])
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size above zero")
    return size

# SPDX-License-Identifier: MIT
"""Hostile and damaged checkpoints, each with the reason that its refusal must name.

`python -m tests.deploy.hostile FOLDER [SUMMARY]` writes them all below FOLDER, lets doctor.py and
vLLM's loader judge each, and merges the number that both refuse for the right reason into SUMMARY.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness.summary import merge_summary
from safetensors.torch import save_file

from oss_fused.errors import OssFusedError
from oss_fused.plugin.checkpoint import check_checkpoint
from tests import conftest  # noqa: F401  environment of engines on a CPU
from tests.plugin.conftest import Engine, build, calibrate, edit, tensors_of, to_mxfp4

WEIGHT = "model.layers.1.self_attn.k_proj.weight"
SCALE = f"{WEIGHT}_scale"
SINGLE = "model.safetensors"
# backtracks exponentially on every name that does not end in two digits
BOMB = r"re:(?:(?:[a-z]|[a-z_.0-9])+)+0\d\d$"


@dataclass(frozen=True)
class Case:
    """How to spoil a good checkpoint, and what its refusal must say."""

    spoil: Callable[[Path], None]
    reason: str
    # a fault of values: vLLM's loader sees it only once the tensors are loaded
    in_values: bool = False
    base: str = "llama"


def change_config(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def change_quantization(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"] |= changes
        path.write_text(json.dumps(config))

    return spoil


def set_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: edit(folder, {name: change(tensors_of(folder)[name])})


def filled(name: str, value: float) -> Callable[[Path], None]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return set_tensor(name, change)


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: edit(folder, {}, (name,))


def index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    """Add an index, spoiled by ``change``."""

    def spoil(folder: Path) -> None:
        weight_map = dict.fromkeys(tensors_of(folder), SINGLE)
        change(weight_map)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return spoil


def header(change: Callable[[str], str]) -> Callable[[Path], None]:
    """Rewrite the JSON header of the file as text."""

    def spoil(folder: Path) -> None:
        raw = (folder / SINGLE).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        text = change(raw[8 : 8 + length].decode()).encode()
        (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return spoil


def entry(name: str, **changes: Any) -> Callable[[Path], None]:
    """Change what the header says of one tensor."""

    def change(text: str) -> str:
        entries = json.loads(text)
        entries[name] |= changes
        return json.dumps(entries)

    return header(change)


def cut(size: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        raw = (folder / SINGLE).read_bytes()
        (folder / SINGLE).write_bytes(raw[:size])

    return spoil


def claim_length(length: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        raw = (folder / SINGLE).read_bytes()
        (folder / SINGLE).write_bytes(struct.pack("<Q", length) + raw[8:])

    return spoil


def link_out(folder: Path) -> None:
    outside = folder.with_name(f"{folder.name}-outside.safetensors")
    (folder / SINGLE).rename(outside)
    (folder / SINGLE).symlink_to(outside)


def dequantise(folder: Path) -> None:
    """A weight as merge tools write it, and its scale gone."""
    edit(folder, {WEIGHT: tensors_of(folder)[WEIGHT].bfloat16()}, (SCALE,))


def left_over_shard(folder: Path) -> None:
    save_file({WEIGHT: tensors_of(folder)[WEIGHT]}, folder / "old.safetensors")


def pickle_only(folder: Path) -> None:
    torch.save(tensors_of(folder), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def in_two_shards(folder: Path) -> None:
    tensors = tensors_of(folder)
    weight_map = dict.fromkeys(tensors, SINGLE)
    weight_map["model.norm.weight"] = "extra.safetensors"
    shard = {"model.norm.weight": tensors["model.norm.weight"], SCALE: tensors[SCALE] * 2}
    save_file(shard, folder / "extra.safetensors")
    edit(folder, {}, ("model.norm.weight",))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def named_twice(text: str) -> str:
    entries = json.loads(text)
    return text.rstrip()[:-1] + f', "{SCALE}": {json.dumps(entries[SCALE])}}}'


def with_nul(folder: Path) -> None:
    edit(folder, {"model.layers.0\0.extra": torch.ones(1)})


def strategy(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["weights"]["strategy"] = "galaxy"
    path.write_text(json.dumps(config))


HUGE = [1 << 40, 1 << 20]
CASES: dict[str, Case] = {
    "index_path_traversal": Case(
        index(lambda m: m.update({WEIGHT: "../../secret.safetensors"})), "name of a file of this"
    ),
    "index_absolute_path": Case(
        index(lambda m: m.update({WEIGHT: "/etc/passwd"})), "name of a file of this"
    ),
    "index_names_missing_shard": Case(
        index(lambda m: m.update({WEIGHT: "no.safetensors"})), "shard is missing"
    ),
    "index_names_missing_tensor": Case(
        index(lambda m: m.update({"model.ghost": SINGLE})), "'model.ghost' is missing"
    ),
    "index_not_an_object": Case(
        lambda f: (f / "model.safetensors.index.json").write_text("[1]") and None, "JSON object"
    ),
    "symlink_escape": Case(link_out, "outside the checkpoint"),
    "pickle_only": Case(pickle_only, "pickle that could run code"),
    "remote_code": Case(
        change_config(auto_map={"AutoConfig": "evil.EvilConfig"}), "names remote code", True
    ),
    "truncated_header": Case(cut(100), "truncated or not safetensors"),
    "truncated_data": Case(cut(60_000), "truncated or not safetensors"),
    "header_longer_than_file": Case(claim_length(1 << 26), "truncated or not safetensors"),
    "header_length_absurd": Case(claim_length(1 << 62), "header too large"),
    "header_not_json": Case(header(lambda text: "x" * len(text)), "truncated or not safetensors"),
    "overlapping_offsets": Case(entry(SCALE, data_offsets=[0, 256]), "invalid offset"),
    "huge_declared_shape": Case(entry(WEIGHT, shape=HUGE), "truncated or not safetensors"),
    "shape_overflow": Case(entry(WEIGHT, shape=[1 << 62, 1 << 62]), "overflow"),
    "scale_nan": Case(filled(SCALE, float("nan")), f"'{SCALE}' holds", True),
    "scale_inf": Case(filled(SCALE, float("inf")), f"'{SCALE}' holds", True),
    "scale_zero": Case(filled(SCALE, 0.0), f"'{SCALE}' holds 0.0", True),
    "scale_negative": Case(filled(SCALE, -0.5), f"'{SCALE}' holds -0.5", True),
    "scale_missing": Case(drop(SCALE), f"'{SCALE}' is missing"),
    "scale_wrong_dtype": Case(set_tensor(SCALE, torch.Tensor.bfloat16), "expected torch.float32"),
    "scale_wrong_shape": Case(set_tensor(SCALE, lambda t: t[:3]), r"shape \[3, 1\]"),
    "block_scale_nan": Case(
        filled("model.layers.0.mlp.experts.down_proj_scales", 255), "NaN of e8m0", True, "gpt_oss"
    ),
    "weight_missing": Case(drop("model.norm.weight"), "'model.norm.weight' is missing"),
    "weight_wrong_dtype": Case(set_tensor(WEIGHT, lambda t: t.float().to(torch.int8)), "is I8"),
    "weight_under_a_scale_is_bf16": Case(
        set_tensor(WEIGHT, torch.Tensor.bfloat16),
        rf"model\.safetensors: tensor '{WEIGHT}' is torch.bfloat16; expected torch.float8_e4m3fn",
    ),
    "weight_under_a_scale_is_fp32": Case(
        set_tensor(WEIGHT, torch.Tensor.float), "is torch.float32; expected torch.float8_e4m3fn"
    ),
    "weight_is_e5m2": Case(
        set_tensor(WEIGHT, lambda t: t.float().to(torch.float8_e5m2)), f"'{WEIGHT}' is F8_E5M2"
    ),
    "weight_and_scale_dequantised": Case(dequantise, f"'{WEIGHT}' is torch.bfloat16; expected"),
    "scale_without_weight": Case(drop(WEIGHT), f"'{WEIGHT}'.*is missing"),
    "codes_of_an_ignored_layer": Case(
        change_quantization(ignore=["lm_head", "*.layers.1.self_attn.qkv_proj"]),
        f"'{WEIGHT}' is torch.float8_e4m3fn; expected bf16",
    ),
    "codes_in_a_norm": Case(
        set_tensor("model.norm.weight", lambda t: t.to(torch.float8_e4m3fn)),
        "'model.norm.weight' is torch.float8_e4m3fn; expected torch.bfloat16",
    ),
    "blocks_are_numbers": Case(
        set_tensor("model.layers.0.mlp.experts.down_proj_blocks", torch.Tensor.float),
        "down_proj_blocks' is torch.float32; expected torch.uint8",
        base="gpt_oss",
    ),
    "weight_wrong_shape": Case(set_tensor(WEIGHT, lambda t: t[:, :64]), "config.json asks for"),
    "tensor_in_two_shards": Case(in_two_shards, "stored twice"),
    "tensor_in_a_left_over_shard": Case(left_over_shard, f"'{WEIGHT}' is stored twice"),
    "tensor_twice_in_header": Case(header(named_twice), "twice; expected it once"),
    "nul_in_name": Case(with_nul, "printable"),
    "absurd_vocabulary": Case(change_config(vocab_size=10**15), "vocab_size=10"),
    "absurd_layers": Case(change_config(num_hidden_layers=10**9), "num_hidden_layers=10"),
    "negative_hidden_size": Case(change_config(hidden_size=-128), "hidden_size=-128"),
    "absurd_context": Case(
        change_config(max_position_embeddings=10**18), "max_position_embeddings=10"
    ),
    "more_layers_than_tensors": Case(change_config(num_hidden_layers=3), "layers.2.*is missing"),
    "unknown_version": Case(change_quantization(version=99), "version=99"),
    "unknown_strategy": Case(strategy, "galaxy"),
    "groups_not_an_object": Case(change_quantization(config_groups=[1]), "config_groups"),
    "regex_bomb": Case(change_quantization(ignore=[BOMB]), "takes more than"),
    "regex_invalid": Case(change_quantization(ignore=["re:(("]), "not a regular expression"),
}


def make_bases(folder: Path) -> dict[str, Path]:
    """The good checkpoints that the cases spoil."""
    return {
        "llama": calibrate(build(folder / "good-llama", "llama")),
        "gpt_oss": to_mxfp4(build(folder / "good-gpt-oss", "gpt_oss")),
    }


def make(name: str, bases: dict[str, Path], folder: Path) -> Path:
    """Write one case as a new folder."""
    target = folder / name
    shutil.copytree(bases[CASES[name].base], target)
    CASES[name].spoil(target)
    return target


def doctor_says(folder: Path) -> str:
    """What the doctor finds wrong with a checkpoint, "" if nothing."""
    try:
        check_checkpoint(folder)
    except OssFusedError as error:
        return str(error)
    return ""


def loader_says(folder: Path, case: Case) -> str:
    """What vLLM with the plugin finds wrong, "" if it loads the model."""
    try:
        Engine(folder, quantization="oss_fp8" if case.base == "gpt_oss" else None).close()
    except Exception as error:
        return str(error)
    return ""


def main() -> int:
    """Write and judge all cases; returns the exit code."""
    folder = Path(sys.argv[1])
    bases = make_bases(folder)
    refused = 0
    for name, case in CASES.items():
        path = make(name, bases, folder)
        answers = doctor_says(path), loader_says(path, case)
        good = all(re.search(case.reason, answer) for answer in answers)
        refused += good
        print("refused" if good else f"NOT REFUSED {answers}", name, flush=True)
    accepted = not doctor_says(bases["llama"]) and not loader_says(bases["llama"], Case(print, ""))
    print(f"{refused} of {len(CASES)} refused; the unspoilt one accepted: {accepted}")
    if len(sys.argv) > 2:
        figures = {"security.hostile_checkpoints_refused": refused}
        merge_summary(Path(sys.argv[2]), figures, Path(__file__))
    return 0 if accepted and refused == len(CASES) else 1


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: MIT
"""Checkpoints that contradict themselves, reach out of their folder or ask for the absurd."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oss_fused.errors import CheckpointError, OssFusedError
from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec
from oss_fused.quant.checkpoint.audit import audit
from oss_fused.quant.recipe import make_recipe
from tests.quant.runs import Models, calibrate, changed, config_of, digests


def checked(source: Path, tmp_path: Path) -> Run:
    return Run(make_recipe({}), RunOptions(source, tmp_path / "out"))


def with_tensors(models: Models, tmp_path: Path, kind: str, **extra: torch.Tensor) -> Path:
    source = changed(models, tmp_path, kind)
    state = load_file(source / "model.safetensors")
    for name, tensor in extra.items():
        state[name.replace("__", ".")] = tensor
    save_file(state, source / "model.safetensors")
    return source


@pytest.mark.parametrize(
    "name", ["mlp__up_proj__weight_scale", "self_attn__k_scale", "mlp__up_proj__weight_scale_inv"]
)
def test_a_scale_left_over_beside_a_bf16_weight_is_refused(
    models: Models, tmp_path: Path, name: str
) -> None:
    extra = {f"model__layers__0__{name}": torch.ones(96, 1)}
    source = with_tensors(models, tmp_path, "llama", **extra)
    with pytest.raises(CheckpointError, match="is left over from a quantisation"):
        checked(source, tmp_path)


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (torch.ones(3), r"has shape \[3\]; expected \[1\]"),
        (torch.ones(1).bfloat16(), "is torch.bfloat16; expected torch.float32"),
        (torch.zeros(1), "holds 0.0; expected finite scales above 0"),
    ],
)
@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_a_scale_of_the_cache_is_one_number(
    models: Models, tmp_path: Path, name: str, scale: torch.Tensor, said: str
) -> None:
    full = f"model.layers.0.self_attn.{name}"
    source = with_tensors(models, tmp_path, "llama", **{full: scale})
    with pytest.raises(CheckpointError, match=f"'{full}' {said}"):
        audit(source)


def test_no_name_is_written_twice(tmp_path: Path) -> None:
    spec = TensorSpec("w", torch.float32, (2,))
    with pytest.raises(CheckpointError, match="'w': would be written twice"):
        CheckpointWriter(tmp_path / "out", [spec, spec], 10**6, "id")
    assert list(tmp_path.iterdir()) == []


# the journal notes the metrics of a whole layer under the last name
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj", "lm_head", "model.layers.1"])
def test_a_tensor_with_the_name_of_a_step_is_refused(
    models: Models, tmp_path: Path, name: str
) -> None:
    source = with_tensors(models, tmp_path, "llama", **{name: torch.ones(3)})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{name}' has the name"):
        Run(make_recipe({"lm_head": "fp8"}), RunOptions(source, tmp_path / "out"))


def test_half_an_mxfp4_weight_and_one_stored_twice_are_refused(
    models: Models, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    source = changed(
        models, tmp_path, "gpt-oss-mxfp4", **{f"{name}_scales".replace(".", "__"): None}
    )
    with pytest.raises(CheckpointError, match=r"down_proj_scales' is missing"):
        checked(source, tmp_path)
    (tmp_path / "two").mkdir()
    source = with_tensors(models, tmp_path / "two", "gpt-oss-mxfp4", **{name: torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"down_proj' is stored twice"):
        checked(source, tmp_path)


@pytest.mark.parametrize("experts", ["mxfp4", "bf16", "fp8"])
@pytest.mark.parametrize(
    ("exponent", "message"),
    [(255, "down_proj_scales' holds 255, the NaN of e8m0"), (254, "above what bfloat16 holds")],
)
def test_block_scales_that_are_no_numbers_are_refused(
    models: Models, tmp_path: Path, experts: str, exponent: int, message: str
) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = load_file(models("gpt-oss-mxfp4") / "model.safetensors")[name]
    scales[0, 3] = exponent
    source = changed(models, tmp_path, "gpt-oss-mxfp4", **{name.replace(".", "__"): scales})
    run = Run(make_recipe({"experts": experts}), RunOptions(source, tmp_path / "out"))
    if experts == "mxfp4" and exponent == 254:
        # the number is one of MXFP4, and no weight is unpacked
        run.execute()
        return
    with pytest.raises(CheckpointError, match=message):
        run.execute()
    assert list(tmp_path.iterdir()) == [source]


def test_integer_weights_are_refused(models: Models, tmp_path: Path) -> None:
    name = "model__layers__0__mlp__up_proj__weight"
    weight = torch.ones(96, 64, dtype=torch.int32)
    source = changed(models, tmp_path, "llama", **{name: weight})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight' is torch\.int32"):
        checked(source, tmp_path)


KEYS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": 5}, "architectures=5: expected a list of names"),
    ({"architectures": ["LlamaForCausalLM", None]}, "architectures=.*expected a list of names"),
    (
        {"model_type": "qwen3_moe", "mlp_only_layers": 5},
        "mlp_only_layers=5: expected a list of integers",
    ),
    ({"model_type": "qwen3_moe", "decoder_sparse_step": "2"}, "decoder_sparse_step=2: expected an"),
]
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 100_000}, "num_hidden_layers=100000"),
    ({"num_hidden_layers": 1000}, r"'model\.layers\.2\..*' is missing"),
    ({"num_hidden_layers": 1}, r"'model\.layers\.1\..*' is of layer 1; .*num_hidden_layers=1"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers=2: expected an integer"),
    ({"hidden_size": -64}, "hidden_size=-64"),
    ({"hidden_size": 1 << 40}, "hidden_size="),
    ({"hidden_size": 1 << 17}, "shape|hidden_size"),
    ({"vocab_size": 320.5}, "vocab_size=320.5"),
    ({"num_attention_heads": 0}, "num_attention_heads=0"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3: expected a divisor"),
    ({"quantization_config": [1]}, r"quantization_config=\[1\]"),
    ({"quantization_config": "fp8"}, "quantization_config='fp8'"),
    ({"hidden_act": "sparkle"}, "hidden_act='sparkle'"),
    ({"rope_parameters": {"rope_type": "sparkle", "rope_theta": 1e4}}, "sparkle"),
    ({"rope_parameters": [1]}, "rope_parameters"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "NaN is no finite number"),
    ({"rms_norm_eps": float("inf")}, "Infinity is no finite number"),
    ({"dtype": "float7"}, "float7"),
    ({"text_config": {"hidden_size": -1}, "num_hidden_layers": {}}, "num_hidden_layers"),
    ({"model_type": ["llama"]}, "model_type"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    *KEYS,
]


@pytest.mark.parametrize(("change", "message"), CONFIGS)
def test_absurd_configurations_are_named_at_once(
    models: Models, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    source = changed(models, tmp_path, "llama")
    (source / "config.json").write_text(json.dumps({**config_of(source), **change}))
    begun = time.process_time()
    with pytest.raises(OssFusedError, match=message):
        checked(source, tmp_path)
    assert time.process_time() - begun < 10
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(("change", "message"), KEYS)
def test_keys_of_a_wrong_type_are_named_before_they_are_served(
    models: Models, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    source = changed(models, tmp_path, "llama")
    (source / "config.json").write_text(json.dumps({**config_of(source), **change}))
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        audit(source)


def test_layers_beyond_the_configs_are_refused_before_they_are_served(
    models: Models, tmp_path: Path
) -> None:
    source = changed(models, tmp_path, "llama")
    assert audit(source)
    (source / "config.json").write_text(json.dumps({**config_of(source), "num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match="is of layer 1; .*num_hidden_layers=1"):
        audit(source)


def test_a_config_that_is_no_file_is_refused(models: Models, tmp_path: Path) -> None:
    source = changed(models, tmp_path, "llama")
    (source / "config.json").unlink()
    os.mkfifo(source / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json: is no file"):
        checked(source, tmp_path)


# --- links


@pytest.mark.parametrize("name", ["vocab.txt", "LICENSE", "config.json", "model.safetensors"])
def test_a_link_out_of_the_checkpoint_is_refused(models: Models, tmp_path: Path, name: str) -> None:
    source = changed(models, tmp_path, "llama")
    secret = tmp_path / "secret"
    if (source / name).exists():
        (source / name).rename(secret)
    else:
        secret.write_text("mine")
    (source / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match=rf"{name}: is a link to .*secret, outside"):
        checked(source, tmp_path)


def test_a_link_to_nothing_is_refused(models: Models, tmp_path: Path) -> None:
    source = changed(models, tmp_path, "llama")
    (source / "vocab.txt").symlink_to("gone.txt")
    with pytest.raises(CheckpointError, match=r"vocab\.txt: is a link to .*which is missing"):
        checked(source, tmp_path)


@pytest.mark.parametrize("linked", [False, True])
def test_the_links_of_the_hub_cache_work_and_no_others(
    models: Models, tmp_path: Path, linked: bool
) -> None:
    plain = changed(models, tmp_path, "llama")
    cache = tmp_path / "hub" / "models--a--b"
    snapshot, blobs = cache / "snapshots" / "0123", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in plain.iterdir():
        (blobs / f"sha-{path.name}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"sha-{path.name}")
    source = snapshot
    if linked:
        source = tmp_path / "model"
        source.symlink_to(snapshot)
    calibrate(source, tmp_path / "out")
    calibrate(plain, tmp_path / "again" / "out")
    ours, theirs = digests_of(tmp_path / "out"), digests_of(tmp_path / "again" / "out")
    assert ours == theirs and not any(p.is_symlink() for p in (tmp_path / "out").iterdir())
    other = tmp_path / "hub" / "models--c--d" / "blobs"
    other.mkdir(parents=True)
    (other / "secret").write_text("mine")
    (snapshot / "vocab.txt").symlink_to("../../../models--c--d/blobs/secret")
    with pytest.raises(CheckpointError, match=r"vocab\.txt: is a link to .*secret, outside"):
        checked(source, tmp_path / "no")


def digests_of(folder: Path) -> dict[str, str]:
    """Of all files but those that tell the source's name."""
    named = ("README.md", "calibration.json")
    return {name: value for name, value in digests(folder).items() if name not in named}


# --- shards


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


@pytest.mark.parametrize(
    "lie",
    [
        lambda entry: entry.update(data_offsets=[0, 1 << 60]),
        lambda entry: entry.update(data_offsets=[-8, 0]),
        lambda entry: entry.update(data_offsets=entry["data_offsets"][::-1]),
        lambda entry: entry.update(shape=[1 << 40, 1 << 40]),
        lambda entry: entry.update(shape=[-1]),
        lambda entry: entry.update(dtype="F1024"),
        lambda entry: entry.update(dtype="F32"),
        lambda entry: entry.pop("shape"),
    ],
)
def test_headers_that_lie_are_refused(models: Models, tmp_path: Path, lie) -> None:
    source = changed(models, tmp_path, "llama")
    path = source / "model.safetensors"
    header, data = header_of(path)
    lie(header["model.norm.weight"])
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or not safetensors"):
        checked(source, tmp_path)


def test_a_tensor_in_two_shards_is_refused(models: Models, tmp_path: Path) -> None:
    source = changed(models, tmp_path, "llama")
    state = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    save_file(state, source / "one.safetensors")
    twice = {"model.norm.weight": torch.zeros(64), "x": torch.zeros(1)}
    save_file(twice, source / "two.safetensors")
    weight_map = {**dict.fromkeys(state, "one.safetensors"), "x": "two.safetensors"}
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is stored twice"):
        checked(source, tmp_path)
    for file in ("../one.safetensors", str(source / "one.safetensors"), "a/b.safetensors", ".."):
        index.write_text(json.dumps({"weight_map": {**weight_map, "x": file}}))
        with pytest.raises(CheckpointError, match="'x' is said to lie in"):
            CheckpointReader(source)

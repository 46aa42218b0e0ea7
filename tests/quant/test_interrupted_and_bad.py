# SPDX-License-Identifier: MIT
"""Interrupted runs, and input that is handled or refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from oss_fused.errors import (
    CheckpointError,
    DatasetError,
    NumericalOverflowError,
    SchemeError,
    UnsupportedModelError,
)
from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.formats import dequantize, quantize
from oss_fused.quant.recipe import make_recipe
from oss_fused.quant.record import load_record
from tests.quant.conftest import TEMPLATE
from tests.quant.runs import (
    SETTINGS,
    Models,
    calibrate,
    changed,
    config_of,
    digests,
    tensors,
)


class Stop(Exception):
    pass


def stop_after(count: int) -> Callable[[Iterable], Iterator]:
    def progress(steps: Iterable, _: str) -> Iterator:
        for number, step in enumerate(steps):
            if number == count:
                raise Stop
            yield step

    return progress


@pytest.mark.parametrize("count", [0, 3, 14, 15, 27, 30])
def test_an_interrupted_run_resumes_to_the_identical_result(
    models: Models, tmp_path: Path, text_file: Path, count: int
) -> None:
    source, settings = models("gpt-oss"), {**SETTINGS, "dataset": str(text_file)}
    whole, cut = tmp_path / "a" / "out", tmp_path / "b" / "out"
    calibrate(source, whole, **settings)
    with pytest.raises(Stop):
        calibrate(source, cut, stop_after(count), **settings)
    assert not cut.exists() and len(list(cut.parent.iterdir())) == 1
    calibrate(source, cut, resume=True, **settings)
    assert digests(whole) == digests(cut)
    assert list(cut.parent.iterdir()) == [cut]


def test_ten_kills_at_random_moments_change_nothing(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    source, settings = models("qwen3"), {**SETTINGS, "dataset": str(text_file)}
    # one process imports and forks: it computes nothing itself, so its children may
    code = f"""
import os, random, signal, sys, time
from pathlib import Path
from oss_fused.quant import runner
from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.recipe import make_recipe
from oss_fused.quant.record import load_record
from transformers import AutoModelForCausalLM, AutoTokenizer
def calibrate():
    options = RunOptions(
        Path({str(source)!r}), Path({str(tmp_path / "out")!r}), resume=True, max_shard_bytes=60000
    )
    Run(make_recipe({settings!r}), options).execute()
random.seed(0)
killed = 0
while killed < 10:
    child = os.fork()
    if child == 0:
        calibrate()
        os._exit(0)
    deadline = time.monotonic() + random.uniform(0.02, 0.4)
    while time.monotonic() < deadline and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.002)
    if Path({str(tmp_path / "out")!r}).exists():
        break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    killed += 1
print("killed", killed)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) >= 3, done.stderr
    if not (tmp_path / "out").exists():
        calibrate(source, tmp_path / "out", resume=True, **settings)
    calibrate(source, tmp_path / "whole" / "out", **settings)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole" / "out")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


@pytest.mark.parametrize("lost", ["journal.jsonl", "hidden-00002.safetensors"])
def test_a_kill_while_the_working_state_is_removed_changes_nothing(
    models: Models, tmp_path: Path, text_file: Path, lost: str
) -> None:
    source, settings = models("qwen3"), {**SETTINGS, "dataset": str(text_file)}
    whole, cut = tmp_path / "a" / "out", tmp_path / "b" / "out"
    calibrate(source, whole, **settings)

    def complete(partial: Path) -> None:
        (partial / "state" / lost).unlink()
        raise Stop

    options = RunOptions(source, cut, max_shard_bytes=60_000)
    with pytest.raises(Stop):
        Run(make_recipe(settings), options).execute(complete=complete)
    calibrate(source, cut, resume=True, **settings)
    assert digests(whole) == digests(cut)


def test_starting_over_forgets_the_journal_before_the_shards(
    models: Models, tmp_path: Path, text_file: Path, monkeypatch
) -> None:
    source, settings = models("qwen3"), {**SETTINGS, "dataset": str(text_file)}
    whole, cut = tmp_path / "a" / "out", tmp_path / "b" / "out"
    calibrate(source, whole, **settings)
    with pytest.raises(Stop):
        calibrate(source, cut, stop_after(14), **settings)

    def killed(folder: Path, *_: object) -> None:
        for shard in Path(folder).glob("*.safetensors"):
            shard.unlink()
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr("shutil.rmtree", killed)
        calibrate(source, cut, **settings)
    calibrate(source, cut, resume=True, **settings)
    assert digests(whole) == digests(cut)


# the second gives only one of the samples
@pytest.mark.parametrize("before", [TEMPLATE, "{{ messages[0].content.partition('cd')[0] }}"])
def test_a_resume_takes_up_no_samples_of_another_chat_template(
    models: Models, tmp_path: Path, before: str
) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{word} " * 6}]} for word in ("ab", "cd")]
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    settings = {"dataset": str(data), "num_samples": 4, "max_seq_length": 16}
    source, cut, whole = changed(models, tmp_path, "llama"), tmp_path / "cut", tmp_path / "whole"
    template = source / "chat_template.jinja"
    template.write_text(before)
    with pytest.raises(Stop):
        calibrate(source, cut, stop_after(14), **settings)
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    calibrate(source, cut, resume=True, **settings)
    calibrate(source, whole, **settings)
    first, second = tensors(cut), tensors(whole)
    assert all(torch.equal(first[name].float(), t.float()) for name, t in second.items())


@pytest.mark.parametrize("release", ["0.0.9", None])
def test_the_work_of_another_release_is_not_taken_up(
    models: Models, tmp_path: Path, release: str | None
) -> None:
    with pytest.raises(Stop):
        calibrate(models("llama"), tmp_path / "out", stop_after(5))
    (partial,) = tmp_path.iterdir()
    (begun,) = partial.rglob("release")
    begun.unlink() if release is None else begun.write_text(release)
    message = rf"--resume: {partial} was begun by oss_fused {release or 'an earlier'}.*start over"
    with pytest.raises(CheckpointError, match=message):
        calibrate(models("llama"), tmp_path / "out", resume=True)
    assert (partial / "state" / "journal.jsonl").read_text()
    calibrate(models("llama"), tmp_path / "out")


def test_an_existing_output_is_kept_unless_overwritten(models: Models, tmp_path: Path) -> None:
    output = tmp_path / "out"
    calibrate(models("llama"), output)
    before = digests(output)
    with pytest.raises(CheckpointError, match=r"--output=.*exists.*--overwrite"):
        calibrate(models("llama"), output, scheme="W8A16")
    assert digests(output) == before
    options = RunOptions(models("llama"), output, overwrite=True)
    Run(make_recipe({"scheme": "W8A16"}), options).execute()
    assert digests(output) != before and list(tmp_path.iterdir()) == [output]


def test_nan_weights_are_refused_by_name_and_leave_no_output(
    models: Models, tmp_path: Path
) -> None:
    bad = torch.full((96, 64), float("nan"), dtype=torch.bfloat16)
    name = "model__layers__1__mlp__up_proj__weight"
    source = changed(models, tmp_path, "llama", **{name: bad})
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*up_proj\.weight' holds NaN"):
        calibrate(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


def test_missing_and_misshapen_tensors_are_refused(models: Models, tmp_path: Path) -> None:
    source = changed(models, tmp_path, "llama", model__norm__weight=None)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is missing"):
        calibrate(source, tmp_path / "out")
    save_file({**tensors(source), "model.norm.weight": torch.ones(3)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has shape \(3,\)"):
        calibrate(source, tmp_path / "out")


def test_a_zero_row_is_quantised_with_scale_one(models: Models, tmp_path: Path) -> None:
    weight = torch.randn(96, 64).to(torch.bfloat16)
    weight[5] = 0
    name = "model__layers__0__mlp__up_proj__weight"
    calibrate(changed(models, tmp_path, "llama", **{name: weight}), tmp_path / "out")
    scale = tensors(tmp_path / "out")["model.layers.0.mlp.up_proj.weight_scale"]
    assert scale[5] == 1 and not (scale[:5] == 1).any()


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_STATIC"])
def test_zero_and_constant_activations_are_calibrated(
    models: Models, tmp_path: Path, text_file: Path, value: float, scheme: str
) -> None:
    embedding = torch.full((320, 64), value, dtype=torch.bfloat16)
    source = changed(models, tmp_path, "llama", model__embed_tokens__weight=embedding)
    settings = {**SETTINGS, "scheme": scheme, "dataset": str(text_file)}
    calibrate(source, tmp_path / "out", **settings)
    for name, tensor in tensors(tmp_path / "out").items():
        assert tensor.float().isfinite().all(), name
    layer = load_record(tmp_path / "out").layers[0]
    assert layer.cumulative_error is not None and layer.cumulative_error < 0.1


def test_overflowing_activations_are_refused_by_name(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    norm = torch.full((64,), 3e38, dtype=torch.bfloat16)
    source = changed(models, tmp_path, "llama", model__layers__1__input_layernorm__weight=norm)
    with pytest.raises(NumericalOverflowError, match=r"model\.layers\.1\..*: NaN or Inf"):
        calibrate(source, tmp_path / "out", **{**SETTINGS, "dataset": str(text_file)})
    assert list(tmp_path.iterdir()) == [source]


def test_experts_never_routed_to_are_named_and_rounded_plainly(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    bias = torch.tensor([50.0, 50.0, 0.0, 0.0]).to(torch.bfloat16)
    source = changed(models, tmp_path, "gpt-oss", model__layers__1__mlp__router__bias=bias)
    settings = {"num_samples": 12, "max_seq_length": 16, "dataset": str(text_file)}
    summary = calibrate(source, tmp_path / "out", experts="fp8", **settings)
    module = "model.layers.1.mlp.experts"
    assert summary.unrouted[-2:] == (f"{module}.2", f"{module}.3")
    before, after = tensors(source), tensors(tmp_path / "out")
    for expert, plain in ((0, False), (3, True)):
        codes, scale = quantize(before[f"{module}.gate_up_proj"][expert].t().contiguous())
        written = (
            after[f"{module}.{expert}.w13_weight"],
            after[f"{module}.{expert}.w13_weight_scale"],
        )
        assert torch.equal(dequantize(*written), dequantize(codes, scale)) is plain


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "bert"}, UnsupportedModelError, "model_type='bert'"),
        ({"quantization_config": {"quant_method": "x"}}, CheckpointError, "quantised already"),
        ({"num_hidden_layers": 3}, CheckpointError, r"layers\.2\..* is missing"),
    ],
)
def test_unsupported_models_are_refused(
    models: Models, tmp_path: Path, change, error, message
) -> None:
    source = changed(models, tmp_path, "llama")
    (source / "config.json").write_text(json.dumps({**config_of(source), **change}))
    with pytest.raises(error, match=message):
        calibrate(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("llama", {"experts": "fp8"}, "model_type='llama' has no experts"),
        ("llama", {"targets": ["re:.*q_proj"]}, "served as one"),
        ("llama", {"ignore": ["re:.*router"]}, "matches no linear"),
        ("gpt-oss", {"ignore": ["re:.*mlp.experts"]}, "one way in the whole model; use --experts"),
        ("mixtral", {"ignore": ["re:.*experts.3.w1"]}, "one way in the whole model"),
        ("gpt-oss", {"targets": ["model.layers.0.mlp.router"]}, "a router, which stays as it is"),
        ("llama", {"ignore": ["Linear"]}, "no linear layer is left"),
        ("gpt-oss", {"ignore": ["lm_head"], "lm_head": "fp8"}, "ignore='lm_head': means lm_head"),
        ("llama", {"ignore": ["re:lm_.*"], "lm_head": "fp8"}, "ignore='re:lm_.*': means lm_head"),
        (
            "llama",
            {"overrides": [{"scheme": "W8A17", "targets": ["lm_head"]}]},
            "scheme='W8A17': expected one of FP8_DYNAMIC, FP8_STATIC, W8A16, BF16",
        ),
        (
            "llama",
            {"overrides": [{"scheme": "W8A16", "targets": ["lm_head"]}]},
            "overrides=W8A16='lm_head': changes nothing.*lm_head='bf16'",
        ),
        (
            "llama",
            {
                "ignore": ["re:.*down_proj"],
                "overrides": [{"scheme": "BF16", "targets": ["re:.*o_proj", "re:.*1.*down_proj"]}],
            },
            "overrides=BF16='re:.*1.*down_proj': changes nothing",
        ),
        ("gpt-oss-mxfp4", {"format": "compressed-tensors"}, "--experts bf16"),
        ("gpt-oss", {"format": "compressed-tensors", "lm_head": "fp8"}, "--lm-head bf16"),
    ],
)
def test_contradictions_are_refused(
    models: Models, tmp_path: Path, kind, settings, message
) -> None:
    with pytest.raises(SchemeError, match=message):
        calibrate(models(kind), tmp_path / "out", **settings)
    assert not list(tmp_path.iterdir())


def test_too_long_samples_are_refused(models: Models, tmp_path: Path, text_file: Path) -> None:
    settings = {**SETTINGS, "dataset": str(text_file), "max_seq_length": 129}
    with pytest.raises(DatasetError, match="max-seq-length=129: the model's context is 128"):
        calibrate(models("llama"), tmp_path / "out", **settings)

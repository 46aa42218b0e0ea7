# SPDX-License-Identifier: MIT
"""The command line: exit codes, messages, and what is left on the disk."""

from __future__ import annotations

import argparse
import errno
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from harness import calibrate_options
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from oss_fused.quant import calibrator
from oss_fused.quant.checkpoint import CheckpointWriter
from oss_fused.quant.checkpoint.place import OutputLock
from tests.loading import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("calibrate")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_makes_a_checkpoint_and_says_what_next(script, model, tmp_path, capsys) -> None:
    output = tmp_path / "out"
    assert script.main([str(model), "--output", str(output), "--device", "cpu"]) == 0
    said = capsys.readouterr().err
    assert "14 of 15 linears in FP8" in said and "largest relative errors" in said
    assert f"next: vllm serve {output}" in said
    card = (output / "README.md").read_text()
    assert card.startswith("---\nbase_model: tiny\n") and "vllm serve out" in card


def test_a_kill_while_the_report_is_written_leaves_no_output(
    script, model, tmp_path, monkeypatch, capsys
) -> None:
    output = tmp_path / "out"

    def killed(folder: Path, *_: object, **__: object) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(script, "write_report", killed)
        assert script.main([str(model), "--output", str(output)]) == 130
    assert not output.exists()
    assert script.main([str(model), "--output", str(output), "--resume"]) == 0
    assert f"report: {output}/report/report.html" in capsys.readouterr().err
    assert (output / "report" / "report.html").is_file()


def test_a_resume_of_a_finished_run_has_nothing_to_do(script, model, tmp_path, capsys) -> None:
    source, output = tmp_path / "source", tmp_path / "out"
    shutil.copytree(model, source)
    command = [str(source), "--output", str(output), "--resume"]
    assert script.main(command) == 0
    made = (output / "model.safetensors").stat()
    capsys.readouterr()
    for flags in ([], ["--dry-run"]):
        assert script.main([*command, *flags]) == 0
        said = capsys.readouterr().err
        assert said == f"{output}: finished already, with these settings; nothing to do\n"
    assert (output / "model.safetensors").stat() == made
    assert script.main([*command, "--scheme", "W8A16"]) == 2
    state = load_file(source / "model.safetensors")
    state["model.norm.weight"] += 1
    save_file(state, source / "model.safetensors")
    assert script.main(command) == 2
    assert "exists; choose another folder or pass --overwrite" in capsys.readouterr().err
    assert script.main([*command, "--overwrite"]) == 0


def test_a_name_too_long_for_what_is_beside_it(script, model, tmp_path, capsys) -> None:
    for length in (240, 250):
        assert script.main([str(model), "--output", str(tmp_path / ("x" * length))]) == 2
        assert "File name too long" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_writes_nothing(script, model, tmp_path, capsys) -> None:
    output = tmp_path / "out"
    assert script.main([str(model), "--output", str(output), "--dry-run"]) == 0
    assert "14 in FP8, 1 kept (lm_head)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_refuses_what_the_run_would(script, model, tmp_path, capsys, monkeypatch) -> None:
    def said(output: Path, *flags: str) -> str:
        assert script.main([str(model), "--output", str(output), "--dry-run", *flags]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        return lines[0]

    (tmp_path / "file").touch()
    assert "nothing can be written beside it: " in said(tmp_path / "file" / "out")
    lock = OutputLock(tmp_path / "out")
    assert "another run is writing it" in said(tmp_path / "out")
    lock.release()
    # room for one checkpoint is not room for the search's two
    need = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    usage = shutil.disk_usage(tmp_path)._replace(free=need)
    text = tmp_path / "text.txt"
    text.write_text("words " * 999)
    search = ["--dataset", str(text), "--accuracy-target", "1.01"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    samples = [torch.arange(9) for _ in range(16)]
    monkeypatch.setattr(calibrator, "load_samples", lambda *_: samples)
    monkeypatch.setattr(calibrator, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(calibrator, "load_prompts", lambda *_: [])
    assert script.main([str(model), "--output", str(tmp_path / "new" / "out"), "--dry-run"]) == 0
    capsys.readouterr()
    assert "GB are free on that disk" in said(tmp_path / "out", *search)
    # a stage of another run
    (tmp_path / "stage").mkdir()
    stage = said(tmp_path / "out", *search, "--fp8-stage", str(tmp_path / "stage"))
    assert f"--fp8-stage='{tmp_path / 'stage'}': exists, but was made by another recipe" in stage
    (tmp_path / "stage").rmdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "text.txt"]


def test_assets_that_cannot_be_read_are_named_before_the_work(
    script, model, tmp_path, capsys, monkeypatch
) -> None:
    original = Path.open

    def denied(self: Path, *arguments: object, **named: object) -> object:
        if self.name == "generation_config.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return original(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", denied)
    for flags in (["--dry-run"], []):
        assert script.main([str(model), "--output", str(tmp_path / "out"), *flags]) == 2
        said = capsys.readouterr().err
        assert "generation_config.json: cannot be read: Permission denied; expected a file" in said
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_repeats_a_run_and_flags_win(script, model, tmp_path) -> None:
    first, again, other = (tmp_path / name for name in ("a", "b", "c"))
    flags = ["--scheme", "W8A16", "--ignore", "re:.*down_proj"]
    assert script.main([str(model), "--output", str(first), *flags]) == 0
    recipe = ["--recipe", str(first / "recipe.yaml")]
    assert script.main([str(model), "--output", str(again), *recipe]) == 0
    assert (first / "config.json").read_bytes() == (again / "config.json").read_bytes()
    assert (
        script.main([str(model), "--output", str(other), *recipe, "--scheme", "FP8_DYNAMIC"]) == 0
    )
    saved = yaml.safe_load((other / "recipe.yaml").read_text())
    assert saved["scheme"] == "FP8_DYNAMIC" and saved["ignore"] == ["re:.*down_proj"]
    group = json.loads((first / "config.json").read_text())["quantization_config"]["config_groups"]
    assert group["group_0"]["input_activations"] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scheme", "FP9"], "--scheme='FP9': expected one of FP8_DYNAMIC, FP8_STATIC, W8A16"),
        (["--scheme", "FP8_STATIC"], "--scheme='FP8_STATIC' has static input scales: it needs a"),
        (["--override", "FP8_STATIC=Linear"], "--override=FP8_STATIC='Linear' has static input"),
        (["--override", "W8A16=re:.*_z"], "--override='re:.*_z': matches no linear layer"),
        (["--ignore", "re:.*nothing"], "--ignore='re:.*nothing': matches no linear layer"),
        (["--ignore", "re:.*q_proj"], "error: --targets/--ignore/--override: model.layers.0."),
        (["--targets", "re:.*[q"], "--targets='re:.*[q': not a regular expression"),
        (["--base", "format="], "--base='format=': is for rounding to MXFP4"),
        (["--lm-head", "fp8", "--ignore", "lm_head"], "means lm_head too, and --lm-head='fp8'"),
        (
            ["--clip-target", "0.1"],
            "expected --scheme='FP8_STATIC', --kv-cache='fp8' or --group-candidates beside it",
        ),
        (
            ["--format", "mxfp4", "--ignore", "x"],
            "--format='mxfp4' has no place for --ignore=('x',): it quantises no linear; expected",
        ),
        (["--keep-sensitive", "a=0.5"], "--keep-sensitive={'a': 0.5}: needs --accuracy-target,"),
        (["--dataset", "/nowhere.txt"], "cannot be read"),
        (["--device", "tpu"], "--device='tpu'"),
        (["--recipe", "/nowhere.yaml"], "--recipe='/nowhere.yaml'"),
        (["--recipe", ""], "--recipe='': cannot be read"),
        (["--num-samples", "0"], "--num-samples=0: Input should"),
        (["--experts", "fp8"], "--experts='fp8': model_type='llama' has no experts"),
        (["--fp8-stage", "stage"], "--fp8-stage='stage': is where a search begins"),
        (["--seed", str(1 << 63)], f"--seed={1 << 63}: Input should be less than"),
        (["--accuracy-target", "kl=inf", "--dataset", "x"], "should be a finite number"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(
    script, model, tmp_path, capsys, flags, message
) -> None:
    assert script.main([str(model), "--output", str(tmp_path / "out"), *flags]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("calibrate.py: error: ")
    assert message in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_path_and_an_existing_output(script, model, tmp_path, capsys) -> None:
    assert script.main(["/nowhere", "--output", str(tmp_path / "out")]) == 2
    assert "MODEL='/nowhere': no such folder" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    assert script.main([str(model), "--output", str(tmp_path / "out")]) == 2
    assert "exists; choose another folder or pass --overwrite" in capsys.readouterr().err
    (tmp_path / "file").touch()
    # such a run did not begin: nothing can be resumed
    assert script.main([str(model), "--output", str(tmp_path / "file" / "out")]) == 2
    said = capsys.readouterr().err
    assert "nothing can be written beside it: " in said and "--resume" not in said


def test_the_summary_names_experts_without_feedback_and_counts_the_bases_blocks(
    script, capsys
) -> None:
    few = tuple(f"model.layers.0.mlp.experts.{i}" for i in range(4))
    facts = {"source_bytes": 9, "output_bytes": 3, "quantised": 0, "linears": 2, "seconds": 1.0}
    summary = script.Summary(
        Path("out"), experts="mxfp4", errors={}, few=few, blocks=200, base_blocks=150, **facts
    )
    script.report(summary)
    said = capsys.readouterr().err
    assert "4 experts saw fewer calibration tokens than they have inputs" in said
    assert "(model.layers.0.mlp.experts.0, " in said and "more --num-samples" in said
    assert "75.0% of the MXFP4 blocks are those of --base, bit for bit" in said


def test_malformed_sizes_are_refused_by_argparse(script, model, capsys) -> None:
    for size in ("5", "GB", "-1GB", "0MB", "²GB"):
        with pytest.raises(SystemExit) as stop:
            script.main([str(model), "--output", "x", f"--max-shard-size={size}"])
        assert stop.value.code == 2 and "expected a" in capsys.readouterr().err


def parse(flags: list[str]) -> argparse.Namespace:
    return calibrate_options.make_parser(None).parse_args(flags)


def test_rules_per_layer_type(script, model, tmp_path, capsys) -> None:
    flags = ["--keep-sensitive", "lm_head=0.99", "--keep-sensitive", "re:.*[qk]_proj=0.9"]
    args = parse(["m", "--output", "o", *flags])
    rule = {"lm_head": 0.99, "re:.*[qk]_proj": 0.9}
    assert calibrate_options.settings_of(args)["keep_sensitive"] == rule
    with pytest.raises(SystemExit):
        parse(["m", "--output", "o", "--keep-sensitive", "lm_head"])
    assert "expected PATTERN=LIMIT" in capsys.readouterr().err
    text = tmp_path / "text.txt"
    text.write_text("words " * 9999)
    flags = ["--dataset", str(text), "--accuracy-target", "2", "--keep-sensitive", "z_proj=0.9"]
    assert script.main([str(model), "--output", str(tmp_path / "out"), *flags]) == 2
    assert "--keep-sensitive='z_proj': matches no linear layer" in capsys.readouterr().err


def test_an_error_about_the_recipes_file_has_its_names(script, model, tmp_path, capsys) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("seed: -1\nnum_samples: 8\n")
    command = [str(model), "--output", str(tmp_path / "out"), "--recipe", str(recipe)]
    assert script.main([*command, "--num-samples", "0"]) == 2
    said = capsys.readouterr().err
    assert "--num-samples=0: " in said and " seed=-1: " in said


def test_an_overrides_scheme_is_checked_with_the_flag(capsys) -> None:
    with pytest.raises(SystemExit):
        parse(["m", "--output", "o", "--override", "FP9=Linear"])
    said = capsys.readouterr().err
    assert "argument --override: scheme='FP9': expected one of FP8_DYNAMIC" in said


def test_every_setting_has_a_flag(capsys) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    said = capsys.readouterr().out
    assert all(f"[{flag} " in said for flag in calibrate_options._FLAGS.values())


def test_a_target_is_a_factor_or_a_divergence(script, capsys) -> None:
    args = parse(["m", "--output", "o", "--accuracy-target", "1.02"])
    assert args.accuracy_target == 1.02
    args = parse(["m", "--output", "o", "--accuracy-target", "kl=0.01"])
    assert args.accuracy_target == pytest.approx(1.01005, abs=1e-5)
    with pytest.raises(SystemExit):
        parse(["m", "--output", "o", "--accuracy-target", "kl=small"])
    assert "expected a number or kl=NUMBER" in capsys.readouterr().err


def failing(error: BaseException, after: int):
    """A ``write`` that fails after some tensors."""
    count = 0
    original = CheckpointWriter.write

    def write(self: CheckpointWriter, name: str, tensor: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise error
        original(self, name, tensor)

    return write


def test_a_full_disk_leaves_no_output_and_can_resume(
    script, model, tmp_path, capsys, monkeypatch
) -> None:
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(CheckpointWriter, "write", failing(full, 9))
        assert script.main([str(model), "--output", str(output)]) == 1
    said = capsys.readouterr().err
    assert "No space left" in said and "--resume" in said and not output.exists()
    assert script.main([str(model), "--output", str(output), "--resume"]) == 0
    assert list(tmp_path.iterdir()) == [output]


def test_ctrl_c_leaves_only_the_state_that_resume_takes_up(
    script, model, tmp_path, capsys, monkeypatch
) -> None:
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "write", failing(KeyboardInterrupt(), 5))
        assert script.main([str(model), "--output", str(output)]) == 130
    assert "interrupted" in capsys.readouterr().err
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("out.partial-")
    assert script.main([str(model), "--output", str(output), "--resume"]) == 0
    assert list(tmp_path.iterdir()) == [output]

# SPDX-License-Identifier: MIT
"""self_check.json: what it holds, and which differences it reports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from oss_fused.errors import CheckpointError
from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.formats import dequantize
from oss_fused.quant.recipe import make_recipe
from oss_fused.quant.self_check import FILE, TEXTS, SelfCheck, load_self_check, parse_self_check
from tests.quant.runs import Models, calibrate, tensors, whole_model
from tests.quant.test_source import rewrite


def expected_logprobs(model: torch.nn.Module, ids: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def agree(check: SelfCheck, model: torch.nn.Module) -> None:
    assert len(check.prompts) == len(TEXTS)
    for prompt in check.prompts:
        assert len(prompt.token_ids) == 32
        assert list(prompt.logprobs) == pytest.approx(
            expected_logprobs(model, prompt.token_ids), abs=2e-3
        )


@pytest.mark.parametrize("experts", ["bf16", "mxfp4"])
def test_it_holds_what_the_written_weights_give(
    models: Models, tmp_path: Path, experts: str
) -> None:
    settings = (
        {"format": "mxfp4"} if experts == "mxfp4" else {"scheme": "W8A16", "experts": experts}
    )
    calibrate(models("gpt-oss"), tmp_path / "out", self_check="on", **settings)

    def dequantised(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        after = tensors(tmp_path / "out")
        scales = {name for name in after if name.endswith("_scale")}
        return {
            name: dequantize(after[name], after[f"{name}_scale"])
            if f"{name}_scale" in scales
            else t
            for name, t in state.items()
        }

    source = tmp_path / "out"
    if experts == "bf16":
        source = rewrite(models("gpt-oss"), tmp_path / "dequantised", dequantised)
    check = load_self_check(tmp_path / "out")
    agree(check, whole_model(source))
    # the rounding shows: it is not the unquantised model's
    first = check.prompts[0]
    assert list(first.logprobs) != pytest.approx(
        expected_logprobs(whole_model(models("gpt-oss")), first.token_ids), abs=2e-3
    )


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3-moe", "gpt-oss"])
def test_rounded_inputs_experts_and_caches_count(
    models: Models, tmp_path: Path, text_file: Path, kind: str
) -> None:
    """All in FP8 stays near the unquantised model, and differs from it."""
    settings = {"experts": "fp8"} if kind != "llama-tied" else {"lm_head": "fp8"}
    data = {"dataset": str(text_file), "num_samples": 2, "max_seq_length": 16}
    calibrate(
        models(kind), tmp_path / "out", scheme="FP8_STATIC", kv_cache="fp8", **data, **settings
    )
    model = whole_model(models(kind))
    total = 0.0
    for prompt in load_self_check(tmp_path / "out").prompts:
        pairs = zip(prompt.logprobs, expected_logprobs(model, prompt.token_ids))
        total += sum(abs(a - b) for a, b in pairs) / len(prompt.logprobs) / len(TEXTS)
    assert 0.005 < total < 0.25


def test_inputs_are_rounded_where_the_server_rounds_them(models: Models, tmp_path: Path) -> None:
    """The weights of both are the same bytes."""
    for scheme in ("W8A16", "FP8_DYNAMIC"):
        calibrate(models("llama"), tmp_path / scheme, scheme=scheme, self_check="on")
    first, second = (
        [value for prompt in load_self_check(tmp_path / name).prompts for value in prompt.logprobs]
        for name in ("W8A16", "FP8_DYNAMIC")
    )
    assert 1e-3 < sum(abs(a - b) for a, b in zip(first, second)) / len(first) < 0.1


def test_when_it_is_written(models: Models, tmp_path: Path, text_file: Path) -> None:
    data = {"dataset": str(text_file), "num_samples": 1, "max_seq_length": 16}
    for name, settings, expected in (
        ("without data", {}, False),
        ("with data", data, True),
        ("switched off", {**data, "self_check": "off"}, False),
        ("switched on", {"self_check": "on"}, True),
    ):
        calibrate(models("llama"), tmp_path / name, **settings)
        assert (tmp_path / name / FILE).exists() is expected
    # not of these weights: a source's own is left out
    source = rewrite(models("llama"), tmp_path / "source", lambda state: state)
    (source / FILE).write_text("{}")
    calibrate(source, tmp_path / "out")
    assert not (tmp_path / "out" / FILE).exists()


def test_a_tokenizer_that_cannot_give_prompts_is_named_before_the_work(
    models: Models, tmp_path: Path
) -> None:
    source = rewrite(models("llama"), tmp_path / "source", lambda state: state)
    run = (make_recipe({"self_check": "on"}), RunOptions(source, tmp_path / "out"))
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens([*(f"<{i}>" for i in range(320 - len(tokenizer))), "harbour"])
    tokenizer.save_pretrained(source)
    with pytest.raises(CheckpointError, match=r"prompt 'The harbour .* vocab_size=320.*another"):
        Run(*run)
    for path in source.glob("token*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="source: cannot load a tokenizer"):
        Run(*run)


CHECK = SelfCheck(
    mean_tolerance=0.25,
    tolerance=2.0,
    prompts=[
        {"token_ids": [1, 2, 3], "logprobs": [-1.0, -2.0]},
        {"token_ids": [4, 5], "logprobs": [-3.0]},
    ],
)


def test_differences_within_the_tolerances_pass() -> None:
    said = CHECK.compare([[-1.1, -2.0], [-3.5]])
    assert said.startswith("3 log-probabilities of 2 prompts differ by 0.200 nats in the mean")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            [[-1.0, -2.0], [-3.8]],
            r"0.267 nats in the mean.*prompt 1, position 1 \(token 5\): .* -3.000, found -3.800",
        ),
        (
            [[-1.0, float("nan")], [-3.0]],
            r"prompt 0, position 2 \(token 3\): expected -2.000, found nan",
        ),
        ([[float("-inf"), -2.0], [-3.0]], r"prompt 0, position 1 \(token 2\).*found -inf"),
    ],
)
def test_a_difference_beyond_them_is_named(found: list[list[float]], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        CHECK.compare(found)


def test_one_position_far_off_is_enough() -> None:
    wide = CHECK.model_copy(update={"mean_tolerance": 10.0})
    with pytest.raises(CheckpointError, match=r"2.100 at most \(tolerance 2.0\)"):
        wide.compare([[-1.0, -2.0], [-5.1]])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "prompts: Field required"),
        ({"prompts": [], "version": 2}, "version"),
        ({"prompts": [{"token_ids": [1, 2], "logprobs": []}]}, "for every token but the first"),
    ],
)
def test_a_malformed_file_is_refused_by_name(raw: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"MODEL/self_check.json: .*{message}"):
        parse_self_check(raw, "MODEL/self_check.json")

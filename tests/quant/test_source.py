# SPDX-License-Identifier: MIT
"""Layouts in which fine-tuned gpt-oss is saved, and adapters merged while tensors are read."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oss_fused.errors import CheckpointError
from oss_fused.quant.calibrator import Run, RunOptions
from oss_fused.quant.checkpoint.adapter import LoraAdapter
from oss_fused.quant.checkpoint.source import SourceReader
from oss_fused.quant.recipe import make_recipe
from tests.quant.runs import Models, calibrate, config_of, tensors

State = dict[str, torch.Tensor]
EXPERTS = "model.layers.0.mlp.experts"
QUERY = "model.layers.0.self_attn.q_proj"


def rewrite(source: Path, folder: Path, change: Callable[[State], State], shards: int = 1) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(source, folder)
    state = change(load_file(folder / "model.safetensors"))
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{i % shards:05d}.safetensors" for i, name in enumerate(sorted(state))}
    for file in set(files.values()):
        save_file({n: t for n, t in state.items() if files[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def unsloth(state: State) -> State:
    """A linear per expert, [outputs, inputs], and the router's linear one level down."""
    result = {}
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        if module.endswith(".mlp.router"):
            result[f"{module}.linear.{leaf}"] = tensor
        elif not module.endswith(".mlp.experts"):
            result[name] = tensor
        else:
            part, bias = leaf.removesuffix("_bias"), leaf.endswith("_bias")
            for expert, matrix in enumerate(tensor):
                own = f"{module}.{part}s.{expert}"
                result[f"{own}.bias" if bias else f"{own}.weight"] = matrix if bias else matrix.t()
    return result


def apart(state: State, inside: str = "") -> State:
    """A gate, an up and a down linear per expert."""
    result = {}
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        if not module.endswith(".mlp.experts"):
            result[name] = tensor
            continue
        kind, bias = leaf.removesuffix("_bias"), leaf.endswith("_bias")
        for expert, matrix in enumerate(tensor):
            rows = matrix if bias else matrix.t()
            parts = {"down_proj": rows}
            if kind == "gate_up_proj":
                parts = {"gate_proj": rows[0::2], "up_proj": rows[1::2]}
            for part, weight in parts.items():
                own = f"{module}{inside}.{expert}.{part}"
                result[f"{own}.bias" if bias else f"{own}.weight"] = weight
    return result


LAYOUTS: dict[str, Callable[[State], State]] = {
    "a linear per expert": unsloth,
    "gate and up apart": apart,
    "gate and up apart, one level down": lambda state: apart(state, ".experts"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_reads_as_transformers_stores_it(
    models: Models, tmp_path: Path, layout: str
) -> None:
    expected = load_file(models("gpt-oss") / "model.safetensors")
    reader = SourceReader(rewrite(models("gpt-oss"), tmp_path / "model", LAYOUTS[layout]))
    assert reader.names() == sorted(expected)
    for name, tensor in expected.items():
        assert name in reader and reader.shape(name) == tuple(tensor.shape)
        assert reader.dtype(name) == tensor.dtype and torch.equal(reader.read(name), tensor)
    for part in ("gate_up_proj", "down_proj_bias"):
        name = f"{EXPERTS}.{part}"
        assert torch.equal(reader.read(name, 2), expected[name][2])


def test_every_layout_calibrates_to_the_same_tensors(models: Models, tmp_path: Path) -> None:
    calibrate(models("gpt-oss"), tmp_path / "expected", experts="mxfp4")
    expected = tensors(tmp_path / "expected")
    single: State = {}
    for number, change in enumerate(
        (unsloth, apart, lambda s: {n: t.float() for n, t in s.items()})
    ):
        source = rewrite(models("gpt-oss"), tmp_path / f"in{number}", change, shards=1 + number)
        calibrate(source, tmp_path / f"out{number}", experts="mxfp4")
        single = tensors(tmp_path / f"out{number}")
        assert set(single) == set(expected)
        assert all(torch.equal(single[n].float(), t.float()) for n, t in expected.items())
    # what is not quantised keeps the source's dtype
    assert single["model.norm.weight"].dtype == torch.float32


def drop(name: str) -> Callable[[State], State]:
    return lambda state: {n: t for n, t in unsloth(state).items() if n != name}


def put(
    name: str, tensor: torch.Tensor, base: Callable[[State], State]
) -> Callable[[State], State]:
    return lambda state: {**base(state), name: tensor}


def plain(state: State) -> State:
    return state


ONE = torch.ones(2)
BAD = [
    (drop(f"{EXPERTS}.down_projs.3.weight"), "no linear of expert 3"),
    (put(f"{EXPERTS}.down_projs.4.weight", torch.ones(64, 96), unsloth), "a linear of expert 4"),
    (
        put(f"{EXPERTS}.gate_up_projs.1.weight", torch.ones(64, 192), unsloth),
        r"gate_up_projs.1.weight' has shape \[64, 192\].* has \[192, 64\]",
    ),
    (put(f"{EXPERTS}.down_projs.1.weight", torch.ones(64, 96), unsloth), "expected one dtype"),
    (put(f"{EXPERTS}.down_projs.0.weight", torch.ones(64, 96), plain), "stored twice"),
    (put("model.layers.0.mlp.router.linear.weight", ONE, plain), "stored twice"),
    (
        put("model.layers.7.self_attn.sinks", ONE, plain),
        "unknown layout: 'model.layers.7.self_attn",
    ),
    (
        put("model.layers.0.mlp.gate.weight", ONE, plain),
        "'model.layers.0.mlp.gate.weight'; expected",
    ),
    (
        put(f"{QUERY}.weight.absmax", ONE, plain),
        "bitsandbytes: merge and save the model in 16 bits",
    ),
    (put(f"{QUERY}.lora_A.weight", ONE, plain), "give its folder as --adapter"),
    (
        lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
        r"'module.lm_head.weight', .* and 34 more; expected gpt-oss of 2 .* a wrapper's prefix",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_another_layout_is_refused_by_name(
    models: Models, tmp_path: Path, change: Callable[[State], State], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        SourceReader(rewrite(models("gpt-oss"), tmp_path / "model", change))


def factors(
    outputs: int, inputs: int, rank: int, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        torch.randn(rank, inputs, generator=generator),
        torch.randn(outputs, rank, generator=generator),
    )
    return a * 0.1, b * 0.1


def write_adapter(
    folder: Path, state: State, prefix: str = "base_model.model.", **config: Any
) -> Path:
    folder.mkdir()
    save_file(
        {f"{prefix}{n}": t.clone() for n, t in state.items()},
        folder / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def lora(module: str, a: torch.Tensor, b: torch.Tensor) -> State:
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of a sum in float32 before the one rounding to bf16."""
    torch.testing.assert_close(
        found.float(), expected.to(found.dtype).float(), rtol=2**-7, atol=1e-4
    )


@pytest.mark.parametrize(
    ("config", "rank", "scaling"),
    [
        ({}, 4, 2.0),
        ({"use_rslora": True}, 4, 4.0),
        (
            {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.0.self_attn.q_proj": 6}},
            2,
            3.0,
        ),
        # a pattern means whole parts of a name
        ({"alpha_pattern": {"proj": 64}}, 4, 2.0),
    ],
)
def test_a_linear_is_merged(
    models: Models, tmp_path: Path, config: dict[str, Any], rank: int, scaling: float
) -> None:
    base = load_file(models("gpt-oss") / "model.safetensors")
    a, b = factors(64, 64, rank)
    adapter = write_adapter(tmp_path / "lora", lora(QUERY, a, b), **config)
    reader = SourceReader(models("gpt-oss"), adapter)
    close(reader.read(f"{QUERY}.weight"), base[f"{QUERY}.weight"].float() + scaling * (b @ a))
    assert reader.adapter is not None and reader.adapter.changed == [f"{QUERY}.weight"]
    assert torch.equal(reader.read("lm_head.weight"), base["lm_head.weight"])
    assert reader.digest() != SourceReader(models("gpt-oss")).digest()


@pytest.mark.parametrize("swapped", [False, True])
def test_experts_are_merged_as_peft_lays_their_factors(
    models: Models, tmp_path: Path, swapped: bool
) -> None:
    """A [E r, in], experts outermost; B [out, r E], experts innermost; the inner wrapper first."""
    base = load_file(models("gpt-oss") / "model.safetensors")
    state: State = {}
    expected: State = {}
    for part, wrapper in (("gate_up_proj", f"{EXPERTS}.base_layer"), ("down_proj", EXPERTS)):
        count, inputs, outputs = base[f"{EXPERTS}.{part}"].shape
        inputs, outputs = (outputs, inputs) if swapped else (inputs, outputs)
        a, b = factors(outputs, inputs, count * 4)
        state |= lora(wrapper, a, b)
        delta = torch.einsum(
            "ore,eri->eoi" if swapped else "ore,eri->eio",
            b.reshape(outputs, 4, count),
            a.reshape(count, 4, inputs),
        )
        expected[part] = base[f"{EXPERTS}.{part}"].float() + 2 * delta
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = write_adapter(
        tmp_path / "lora", state, target_parameters=targets, peft_version="0.19.1"
    )
    reader = SourceReader(models("gpt-oss"), adapter)
    for part, whole in expected.items():
        close(reader.read(f"{EXPERTS}.{part}"), whole)
        close(reader.read(f"{EXPERTS}.{part}", 3), whole[3])


def test_adapters_of_single_experts(models: Models, tmp_path: Path) -> None:
    """Unsloth trains a linear per expert; the base may store them stacked, or packed."""
    a, b = factors(192, 64, 4)
    state = lora(f"{EXPERTS}.gate_up_projs.2", a, b) | lora(
        "model.layers.0.mlp.router.linear", a[:, :64], b[:4]
    )
    adapter = write_adapter(tmp_path / "lora", state)
    for kind in ("gpt-oss", "gpt-oss-mxfp4"):
        before = SourceReader(
            models(kind),
            write_adapter(tmp_path / kind, lora(f"{EXPERTS}.down_projs.0", *factors(64, 96, 4))),
        )
        reader = SourceReader(models(kind), adapter)
        name = f"{EXPERTS}.gate_up_proj"
        assert torch.equal(reader.read(name, 1), before.read(name, 1))
        close(reader.read(name)[2], before.read(name, 2).float() + 2 * (b @ a).t())
        router = "model.layers.0.mlp.router.weight"
        close(reader.read(router), before.read(router).float() + 2 * b[:4] @ a)


def test_saved_modules_and_biases_replace_the_base(models: Models, tmp_path: Path) -> None:
    head, bias = torch.randn(320, 64), torch.randn(64)
    state = {"lm_head.weight": head, f"{QUERY}.base_layer.bias": bias}
    state |= lora(QUERY, *factors(64, 64, 4))
    reader = SourceReader(
        models("gpt-oss"), write_adapter(tmp_path / "lora", state, bias="lora_only")
    )
    assert torch.equal(reader.read("lm_head.weight"), head.bfloat16())
    assert torch.equal(reader.read(f"{QUERY}.bias"), bias.bfloat16())


def test_an_adapter_on_mxfp4_experts_makes_mxfp4_again(models: Models, tmp_path: Path) -> None:
    source = models("gpt-oss-mxfp4")
    adapter = write_adapter(
        tmp_path / "lora", lora(f"{EXPERTS}.gate_up_projs.2", *factors(192, 64, 4))
    )

    Run(make_recipe({}), RunOptions(source, tmp_path / "out", adapter=adapter)).execute()
    before, after = tensors(source), tensors(tmp_path / "out")
    assert config_of(tmp_path / "out")["quantization_config"]["experts"] == "mxfp4"
    for layer, part in itertools.product((0, 1), ("gate_up_proj", "down_proj")):
        name = f"model.layers.{layer}.mlp.experts.{part}"
        pairs = [
            (before[f"{name}_{kind}"], after[f"{name}_{kind}"]) for kind in ("blocks", "scales")
        ]
        same = [all(torch.equal(old[e], new[e]) for old, new in pairs) for e in range(4)]
        assert same == [True, True, (layer, part) != (0, "gate_up_proj"), True]
    assert "| Adapter merged | lora |" in (tmp_path / "out" / "README.md").read_text()


def test_a_merge_that_the_dtype_does_not_hold_is_refused(models: Models, tmp_path: Path) -> None:
    a, b = factors(64, 64, 4)
    adapter = write_adapter(tmp_path / "lora", lora(QUERY, a * 1e25, b * 1e25))
    reader = SourceReader(models("gpt-oss"), adapter)
    with pytest.raises(CheckpointError, match=r"--adapter=.*q_proj\.weight' .*expected what torch"):
        reader.read(f"{QUERY}.weight")


def test_merged_while_calibrating_as_merged_before(
    models: Models, tmp_path: Path, text_file: Path
) -> None:
    a, b = factors(64, 64, 4)
    adapter = write_adapter(tmp_path / "lora", lora(QUERY, a, b))
    merged = SourceReader(models("gpt-oss"), adapter)
    whole = rewrite(
        models("gpt-oss"), tmp_path / "merged", lambda s: {n: merged.read(n) for n in s}
    )

    recipe = make_recipe({"dataset": str(text_file), "num_samples": 2, "max_seq_length": 16})
    Run(recipe, RunOptions(models("gpt-oss"), tmp_path / "a", adapter=adapter)).execute()
    Run(recipe, RunOptions(whole, tmp_path / "b")).execute()
    first, second = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert all(torch.equal(first[n].float(), t.float()) for n, t in second.items())


LINEAR = lora(QUERY, *factors(64, 64, 4))
REFUSED = [
    ({**LINEAR}, {"peft_type": "IA3"}, "peft_type='IA3'"),
    ({**LINEAR}, {"use_dora": True}, "use_dora=True: DoRA"),
    ({**LINEAR}, {"alora_invocation_tokens": [1]}, "a part of the tokens only"),
    ({**LINEAR}, {"init_lora_weights": "pissa_niter_4"}, "changing the base weights"),
    ({**LINEAR}, {"r": "many"}, "r='many': expected a number"),
    ({**LINEAR}, {"r": 8}, "has rank 4; adapter_config.json asks for 8"),
    ({**LINEAR}, {"rank_pattern": {"(": 2}}, "not a regular expression"),
    (lora(QUERY, *factors(128, 64, 4)), {}, "q_proj.lora_A.weight' belong to no tensor .* shape"),
    (lora("model.layers.0.mlp.gate_proj", *factors(64, 64, 4)), {}, "mlp.gate_proj.lora_A.weight'"),
    (lora(f"{EXPERTS}.gate_up_projs.4", *factors(192, 64, 4)), {}, "gate_up_projs.4.lora_A"),
    ({f"{QUERY}.lora_A.weight": torch.ones(4, 64)}, {}, "have no second factor"),
    ({"lm_head.weight": torch.ones(321, 64), **LINEAR}, {}, "lm_head.weight' belong to no tensor"),
    ({f"{QUERY}.lora_magnitude_vector.weight": ONE, **LINEAR}, {}, "lora_magnitude_vector"),
    (
        lora(EXPERTS, *factors(100, 64, 16)),
        {},
        "do not fit model.layers.0.mlp.experts.gate_up_proj",
    ),
    (lora(EXPERTS, *factors(192, 64, 10)), {}, "no whole rank for each of 4 experts"),
]


@pytest.mark.parametrize(("state", "config", "message"), REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(
    models: Models, tmp_path: Path, state: State, config: dict[str, Any], message: str
) -> None:
    adapter = write_adapter(tmp_path / "lora", state, **config)
    with pytest.raises(CheckpointError, match=message):
        SourceReader(models("gpt-oss"), adapter)


def test_factors_that_could_lie_two_ways_are_refused(tmp_path: Path) -> None:
    """gpt-oss has inputs and outputs of one size in down_proj: only gate_up_proj tells."""

    shapes = {f"{EXPERTS}.gate_up_proj": (4, 64, 128), f"{EXPERTS}.down_proj": (4, 64, 64)}
    down = lora(EXPERTS, *factors(64, 64, 16))
    new = write_adapter(tmp_path / "new", down, peft_version="0.19.0")
    with pytest.raises(CheckpointError, match=r"experts.lora_A.weight' is ambiguous.*down_proj"):
        LoraAdapter(new, shapes)
    # before 0.19, which changed it, they lie one way
    assert LoraAdapter(write_adapter(tmp_path / "old", down), shapes).changed == [
        f"{EXPERTS}.down_proj"
    ]
    both = down | lora(f"{EXPERTS}.base_layer", *factors(128, 64, 16))
    LoraAdapter(write_adapter(tmp_path / "both", both, peft_version="0.19.0"), shapes)


def test_folders_that_hold_no_adapter_or_only_one(models: Models, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "lora", LINEAR)
    with pytest.raises(
        CheckpointError, match=r"is a LoRA adapter; expected its base model as MODEL"
    ):
        SourceReader(adapter)
    with pytest.raises(CheckpointError, match=r"has no adapter_config.json"):
        SourceReader(models("gpt-oss"), models("gpt-oss"))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model.bin, a pickle"):
        SourceReader(models("gpt-oss"), adapter)

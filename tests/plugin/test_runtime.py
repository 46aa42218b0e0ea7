# SPDX-License-Identifier: MIT
"""What a running server goes through: reloading, LoRA, sharding, compilation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.plugin.conftest import (
    assert_agrees,
    build,
    calibrate,
    edit,
    tensors_of,
    to_mxfp4,
)
from tests.plugin.cpu_kind import skip_without_fp8_cache

pytestmark = pytest.mark.serve

# spread of the weights that a reload brings
RELOADED = 0.04
ROOT = Path(__file__).resolve().parents[2]


def make(kind: str, folder: Path, **changes) -> tuple[Path, dict]:
    """A checkpoint of that kind and the engine options that serve it."""
    if kind == "online":
        return build(folder, "llama", tie_word_embeddings=True, **changes), {
            "quantization": "oss_fp8",
            "additional_config": {"oss_fused": {"lm_head": True}},
        }
    if kind == "calibrated":
        skip_without_fp8_cache()
        return calibrate(build(folder, "llama", **changes), inputs="tensor", kv=True), {}
    if kind == "mxfp4":
        return to_mxfp4(build(folder, "gpt_oss", **changes)), {"quantization": "oss_fp8"}
    return calibrate(build(folder, "gpt_oss", **changes), experts=kind, ignore=()), {}


@pytest.mark.parametrize("kind", ["online", "calibrated", "mxfp4", "bf16", "fp8"])
def test_reload_takes_the_new_weights(kind, tmp_path, engine):
    folder, options = make(kind, tmp_path / "served")
    # other weights, and with them other scales, of the same model
    other, _ = make(kind, tmp_path / "other", initializer_range=RELOADED)
    served = engine(folder, **options)
    before = served.generate()
    addresses = [p.data_ptr() for p in served.model.parameters()]
    edit(folder, tensors_of(other))
    served.llm.collective_rpc("reload_weights")
    after = served.generate()
    assert after != before
    assert [p.data_ptr() for p in served.model.parameters()] == addresses
    family = "llama" if kind in ("online", "calibrated") else "gpt_oss"
    tied = {"tie_word_embeddings": True} if kind == "online" else {}
    reference = build(tmp_path / "bf16", family, initializer_range=RELOADED, **tied)
    assert_agrees(
        after,
        reference,
        ignore=("lm_head",) if kind == "calibrated" else (),
        inputs="tensor" if kind == "calibrated" else "token",
        experts=kind if family == "gpt_oss" else None,
    )


def make_adapter(folder: Path) -> Path:
    folder.mkdir()
    torch.manual_seed(3)
    sizes = {"self_attn.q_proj": (128, 128), "mlp.down_proj": (192, 128)}
    tensors = {}
    for name, (inputs, outputs) in sizes.items():
        key = f"base_model.model.model.layers.0.{name}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(8, inputs) * 0.1
        tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, 8) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_lora(tmp_path, engine):
    from vllm.lora.request import LoRARequest

    folder = build(tmp_path / "model", "llama")
    adapter = LoRARequest("a", 1, str(make_adapter(tmp_path / "adapter")))
    served = engine(folder, quantization="oss_fp8", enable_lora=True, max_lora_rank=8)
    assert_agrees(served.generate(), folder)
    assert abs(served.generate(lora=adapter)[1][0] - served.generate()[1][0]) > 1e-3


@pytest.mark.parametrize("active", [False, True])
def test_reload_below_an_adapter(active, tmp_path, engine):
    from vllm.lora.request import LoRARequest

    from oss_fused.errors import CheckpointError

    folder = build(tmp_path / "served", "llama")
    other = build(tmp_path / "other", "llama", initializer_range=RELOADED)
    adapter = LoRARequest("a", 1, str(make_adapter(tmp_path / "adapter"))) if active else None
    options = {"quantization": "oss_fp8", "enable_lora": True, "max_lora_rank": 8}
    expected = engine(other, **options).generate(lora=adapter)
    served = engine(folder, **options)
    before = served.generate(lora=adapter)
    tensors = list(tensors_of(other).items())
    part = [(name, tensor) for name, tensor in tensors if "0.self_attn.q_proj" not in name]
    with pytest.raises(CheckpointError, match=r"0.self_attn.q_proj.weight' is missing"):
        served.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(part)})
    assert served.generate(lora=adapter) == before != expected
    served.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})
    assert served.generate(lora=adapter) == expected


def test_lora_with_experts_on_a_cpu_is_refused(tmp_path, engine, amx):
    from oss_fused.errors import UnsupportedModelError

    folder, options = make("mxfp4", tmp_path)
    with pytest.raises(UnsupportedModelError, match="LoRA"):
        engine(folder, enable_lora=True, **options)


CHILD = """
import json, sys
from pathlib import Path
from tests.plugin.conftest import Engine

if __name__ == "__main__":
    engine = Engine(Path(sys.argv[1]), **json.loads(sys.argv[2]))
    print("RESULT", json.dumps(engine.generate()))
"""


def run_child(folder: Path, options: dict, **environment: str) -> tuple[list, list]:
    script = folder / "child.py"
    script.write_text(CHILD)
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    result = subprocess.run(
        [sys.executable, str(script), str(folder), json.dumps(options)],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, result.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def test_compiled(tmp_path):
    folder, options = make("mxfp4", tmp_path / "served")
    result = run_child(
        folder,
        options | {"enforce_eager": False},
        TORCHDYNAMO_DISABLE="0",
        VLLM_CACHE_ROOT=str(tmp_path / "cache"),
    )
    reference = build(tmp_path / "bf16", "gpt_oss")
    assert_agrees(result, reference, ignore=(), experts="mxfp4")

# SPDX-License-Identifier: MIT
"""The byte-level gpt-oss as people meet gpt-oss: MXFP4, fine-tuned, rounded again; and its loss.

Checkpoints run in transformers' model class in float32: MXFP4 and FP8 weights dequantised, inputs
of FP8 linears rounded per token as they are served.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from harness.texts import opticks
from oss_fused.errors import DatasetError
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.dataset import python_text
from oss_fused.quant.formats import dequantize
from oss_fused.quant.mxfp4 import pack_mxfp4, unpack_mxfp4
from oss_fused.quant.runner import RoundedInput, quantise_input
from oss_fused.quant.scheme import FP8_DYNAMIC

ROOT = Path(__file__).resolve().parents[2]
WINDOW = 512
_BATCH = 8  # windows that run together


def load_state(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of a bf16, MXFP4 or calibrated checkpoint in float32, by transformers' names.

    Raises:
        CheckpointError: a tensor is damaged or missing.
    """
    reader, state = CheckpointReader(folder, quantised=True), {}
    for name in reader.names():
        if name.endswith("_blocks"):
            plain = name.removesuffix("_blocks")
            scales = reader.read(f"{plain}_scales")
            # [E, N, K] as stored, [E, K, N] as transformers multiplies
            values = unpack_mxfp4(reader.read(name), scales, torch.float32).transpose(1, 2)
            state[plain] = values.contiguous()
        elif reader.is_fp8(name):
            state[name] = dequantize(reader.read(name), reader.read(f"{name}_scale"))
        elif not name.endswith(("_scale", "_scales")):
            state[name] = reader.read(name).float()
    return state


def pack_experts(source: Path, folder: Path) -> None:
    """Copy a bf16 gpt-oss to ``folder`` with MXFP4 experts, as OpenAI publishes it."""
    shutil.copytree(source, folder)
    state = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".experts." in name and not name.endswith("_bias"):
            blocks, scales = pack_mxfp4(tensor.transpose(1, 2).contiguous())
            state[f"{name}_blocks"], state[f"{name}_scales"] = blocks, scales
        else:
            state[name] = tensor
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))


def load_served(folder: Path) -> Any:
    """The model of a checkpoint as it is served, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are dequantised here
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    model.load_state_dict(load_state(folder))
    reader, rounded = CheckpointReader(folder, quantised=True), RoundedInput()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and reader.is_fp8(f"{name}.weight"):
            quantise_input(module, FP8_DYNAMIC, None, rounded)
    return model.eval().requires_grad_(False)


def windows(text: bytes, table: torch.Tensor, limit: int) -> torch.Tensor:
    """Token ids [W, 512] of the first ``limit`` bytes; what fills no window is left out.

    Args:
        text: any.
        table: token id of each byte.
        limit: in bytes.
    """
    ids = table[torch.frombuffer(bytearray(text[:limit]), dtype=torch.uint8).int()]
    ids = ids[ids >= 0]
    return ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)


@torch.no_grad()
def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of each next token, [W, T, V], for ids [W, T]."""
    parts = [model(batch, use_cache=False).logits.log_softmax(-1) for batch in ids.split(_BATCH)]
    return torch.cat(parts)


def compare(
    reference: torch.Tensor, candidate: torch.Tensor, ids: torch.Tensor
) -> dict[str, float]:
    """Perplexity of a candidate, its factor over the reference's, KL in nats, top-1 agreement.

    Args:
        reference: log-probabilities [W, T, V].
        candidate: the same of the other model.
        ids: [W, T], the text.
    """
    kl = (reference.exp() * (reference - candidate)).sum(-1).flatten()
    own, other = (perplexity(x, ids) for x in (candidate, reference))
    same = reference.argmax(-1) == candidate.argmax(-1)
    return {
        "perplexity": own,
        "perplexity_factor": own / other,
        "kl_divergence": float(kl.mean()),
        "kl_divergence_p99": float(kl.quantile(0.99)),
        "top1_agreement": float(same.float().mean()),
    }


def perplexity(log_probabilities: torch.Tensor, ids: torch.Tensor) -> float:
    """Of ids [W, T] under log-probabilities [W, T, V], each window on its own."""
    found = log_probabilities[:, :-1].gather(-1, ids[:, 1:].unsqueeze(-1))
    return float((-found.mean()).exp())


def held_out_texts() -> dict[str, bytes]:
    """Prose, a licence and Python code that neither training, nor calibration, nor tuning sees.

    Raises:
        DatasetError: the package whose licence is read is not installed so.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    licence = [
        file
        for file in importlib.metadata.files("packaging") or ()
        if file.name == "LICENSE.APACHE"
    ]
    if not licence:
        raise DatasetError("texts: package packaging has no LICENSE.APACHE; reinstall it")
    return {
        "prose": (ROOT / "tests/data/prose.txt").read_bytes(),
        "licence": Path(str(licence[0].locate())).read_bytes(),
        "python": b"\n".join((library / f).read_bytes() for f in ("textwrap.py", "statistics.py")),
    }


def write_texts(folder: Path) -> None:
    """Write tuning.txt, Newton's Opticks, and calibration.txt: half of that, half of Python.

    Raises:
        DatasetError: the package that ships the Opticks is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tuning, python = opticks(), python_text()
    (folder / "tuning.txt").write_text(tuning)
    (folder / "calibration.txt").write_text(tuning[: len(python)] + "\n\n" + python)

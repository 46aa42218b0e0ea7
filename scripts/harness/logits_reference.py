# SPDX-License-Identifier: MIT
"""Final hidden states of a checkpoint in plain PyTorch: the reference for logits.

`python -m harness.logits_reference JOB.json` with {"model", "tokens", "output", "dtypes"}
runs transformers' own model class (eager attention) on the tokens, one layer's weights in memory at
a time, MXFP4 experts dequantised, which bf16 does exactly. Needs no room for the whole model and
no dequantised checkpoint.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.mxfp4 import unpack_mxfp4


def main() -> int:
    """Write one npz with an array [B, L, H] for each dtype."""
    job = json.loads(Path(sys.argv[1]).read_text())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.from_numpy(np.load(job["tokens"])).to(device)
    states = {
        name: hidden_states(job["model"], tokens, getattr(torch, name)).cpu().numpy()
        for name in job["dtypes"]
    }
    # renamed when complete: the engines wait for it
    scratch = Path(job["output"]).with_suffix(".part.npz")
    np.savez(scratch, **states)  # type: ignore[arg-type]
    scratch.rename(job["output"])
    return 0


@torch.inference_mode()
def hidden_states(folder: str, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the head reads, [B, L, H] in float32, for tokens [B, L]; computed in ``dtype``.

    Raises:
        CheckpointError: a tensor is missing.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are dequantised here
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager"
        ).model.eval()
    device = tokens.device
    model.rotary_emb = type(model.rotary_emb)(config=config).to(device)
    reader = CheckpointReader(folder)
    parts = {"embed_tokens": model.embed_tokens, "norm": model.norm}
    parts |= {f"layers.{number}": layer for number, layer in enumerate(model.layers)}
    for part, module in parts.items():
        _stream(module, reader, f"model.{part}.", dtype, device)
    # a tied head, if there is one, reads the same states
    return model(input_ids=tokens, use_cache=False).last_hidden_state.float()


def _stream(
    module: nn.Module,
    reader: CheckpointReader,
    prefix: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Load the weights of ``module`` while it runs, and drop them afterwards."""

    def load(*ignored: Any) -> None:
        names = [name for name, _ in module.named_parameters()]
        for name in names:
            value = _read(reader, prefix + name, dtype, device)
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))

    def unload(*ignored: Any) -> None:
        module.to("meta")
        gc.collect()

    module.register_forward_pre_hook(load)
    module.register_forward_hook(unload)


def _read(
    reader: CheckpointReader, name: str, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    if f"{name}_blocks" not in reader:
        return reader.read(name).to(device, dtype)
    blocks = reader.read(f"{name}_blocks").to(device)
    scales = reader.read(f"{name}_scales").to(device)
    # [E, N, K] as stored, [E, K, N] as transformers multiplies
    return unpack_mxfp4(blocks, scales).to(dtype).transpose(1, 2)


if __name__ == "__main__":
    sys.exit(main())

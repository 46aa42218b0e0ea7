# SPDX-License-Identifier: MIT
"""Log-probabilities of fixed prompts, kept in a checkpoint for its servers to compare with.

They are computed from the written checkpoint layer by layer in float32, with inputs rounded as
served. So they also tell of a tensor that changed on its way to the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from oss_fused.errors import CheckpointError
from oss_fused.quant.checkpoint.reader import CheckpointReader, read_json
from oss_fused.quant.dataset import load_tokenizer
from oss_fused.quant.formats import dequantize, fake_quantize
from oss_fused.quant.plan import CheckpointPlan
from oss_fused.quant.runner import LayerRunner, RoundedInput, quantise_input
from oss_fused.quant.served import ServedReader, serve_rest
from oss_fused.quant.skeleton import ModelSkeleton

FILE = "self_check.json"
TEXTS = (
    "The harbour lies open to the west, and in winter the ferry waits for the wind to turn.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n",
    "Water boils at 100 degrees Celsius at sea level. On a mountain it boils at less than that.",
    '{"name": "report", "pages": 12, "authors": ["A. Keller", "M. Duarte"], "published": true}',
)
TOKENS = 32  # of a prompt at most
# servers compute in bf16, and in an order of their own. A log-probability far below zero moves
# more: the mean over all positions tells a broken model from a rounded one
MEAN_TOLERANCE, TOLERANCE = 0.25, 3.0
_HEAD_ROWS = 16384

Track = Callable[[Sequence[Any], str], Any]


class Prompt(BaseModel):
    """Token ids [T] and, for each but the first, its log-probability after those before it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @model_validator(mode="after")
    def _one_each(self) -> Prompt:
        if len(self.token_ids) < 2 or len(self.logprobs) != len(self.token_ids) - 1:
            raise ValueError("expected a log-probability for every token but the first")
        return self


class SelfCheck(BaseModel):
    """What self_check.json holds.

    Attributes:
        mean_tolerance: of the mean absolute difference over all positions, in nats.
        tolerance: of the absolute difference at any position, in nats.
        prompts: what is compared.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["oss_fused.self_check"] = "oss_fused.self_check"
    version: Literal[1] = 1
    mean_tolerance: float = MEAN_TOLERANCE
    tolerance: float = TOLERANCE
    prompts: tuple[Prompt, ...]

    def compare(self, found: Sequence[Sequence[float]]) -> str:
        """One line about the differences.

        Args:
            found: log-probabilities of each prompt, in the order of ``prompts``.

        Raises:
            CheckpointError: they are beyond a tolerance, or not finite; names the position with
                the largest difference, what was expected there and what was found.
        """
        rows = []
        for number, (prompt, values) in enumerate(zip(self.prompts, found, strict=True)):
            for position, pair in enumerate(zip(prompt.logprobs, values, strict=True), 1):
                off = abs(pair[1] - pair[0])
                # a NaN compares false
                rows.append((off if off >= 0 else float("inf"), number, position, *pair))
        mean = sum(row[0] for row in rows) / len(rows)
        worst, number, position, expected, value = max(rows, key=lambda row: row[0])
        text = (
            f"{len(rows)} log-probabilities of {len(self.prompts)} prompts differ by {mean:.3f} "
            f"nats in the mean (tolerance {self.mean_tolerance}) and {worst:.3f} at most "
            f"(tolerance {self.tolerance})"
        )
        if mean <= self.mean_tolerance and worst <= self.tolerance:
            return text
        token = self.prompts[number].token_ids[position]
        raise CheckpointError(
            f"self_check: {text}; the largest at prompt {number}, position {position} (token "
            f"{token}): expected {expected:.3f}, found {value:.3f}. The server computes another "
            f"model than was calibrated: a tensor changed, or a kernel is wrong here"
        )


def parse_self_check(raw: Mapping[str, Any], where: str) -> SelfCheck:
    """The content of self_check.json.

    Raises:
        CheckpointError: names the field.
    """
    try:
        return SelfCheck.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "content"
        raise CheckpointError(f"{where}: {place}: {first['msg']}") from None


def load_self_check(folder: Path) -> SelfCheck:
    """Read self_check.json of a checkpoint.

    Raises:
        CheckpointError: it is missing or malformed.
    """
    return parse_self_check(read_json(folder / FILE), str(folder / FILE))


def load_prompts(folder: Path, vocab_size: int) -> list[list[int]]:
    """Token ids of ``TEXTS`` by the tokenizer in ``folder``, at most ``TOKENS`` each.

    Raises:
        CheckpointError: no tokenizer, or that of another model.
    """
    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"][:TOKENS] for text in TEXTS]
    for text, ids in zip(TEXTS, prompts):
        if len(ids) < 2 or max(ids) >= vocab_size:
            raise CheckpointError(
                f"{folder}: for the self-check's prompt {text[:20]!r}... the tokenizer gives "
                f"{ids[:4]!r}, at most {max(ids, default=None)}; expected two ids or more below "
                f"vocab_size={vocab_size}. Is it the tokenizer of another model? --self-check off "
                f"does without"
            )
    return prompts


def write_self_check(
    folder: Path,
    source: CheckpointReader,
    plan: CheckpointPlan,
    prompts: Sequence[Sequence[int]],
    device: torch.device,
    track: Track = lambda layers, _: layers,
) -> None:
    """Compute the log-probabilities of the checkpoint in ``folder``, and write self_check.json.

    Args:
        folder: config and tensors, complete.
        source: the checkpoint that it was made from.
        plan: how it was made.
        prompts: token ids of each, as ``load_prompts`` gives them.
        device: of the arithmetic.
        track: wraps the loop over layers.
    """
    logprobs = prompt_logprobs(folder, ModelSkeleton(source), plan, prompts, device, track)
    check = SelfCheck(
        prompts=tuple(
            # four decimals: more would differ between machines
            Prompt(token_ids=tuple(ids), logprobs=tuple(round(value, 4) for value in values))
            for ids, values in zip(prompts, logprobs)
        )
    )
    (folder / FILE).write_text(check.model_dump_json(indent=1) + "\n")


@torch.no_grad()
def prompt_logprobs(
    folder: Path,
    skeleton: ModelSkeleton,
    plan: CheckpointPlan,
    prompts: Sequence[Sequence[int]],
    device: torch.device,
    track: Track = lambda layers, _: layers,
) -> list[list[float]]:
    """Log-probabilities of the tokens of ``prompts`` after the first, as the checkpoint has them.

    Args:
        folder: the quantised checkpoint.
        skeleton: of its source, none of its layers dropped.
        plan: how it was made.
        prompts: token ids of each.
        device: of the arithmetic; memory holds one layer.
        track: wraps the loop over layers.
    """
    runner, stored = LayerRunner(skeleton, device), ServedReader(folder, quantised=True)
    runner.reader, codes = stored, CheckpointReader(folder, quantised=True)
    states = runner.embed([torch.tensor(ids) for ids in prompts])
    for index in track(range(skeleton.layers), "Self-check"):
        layer = runner.load(index)
        cache, rounded = serve_rest(codes, skeleton, layer, index), RoundedInput()
        for name, module in runner.linears(layer, index).items():
            if (scheme := plan.schemes[name]) is not None:
                quantise_input(module, scheme, _input_scale(stored, name), rounded)
        states = [runner.forward(layer, index, hidden, cache).cpu() for hidden in states]
        runner.drop(index)
    norm = runner.final_norm()
    hidden = torch.cat([norm(state.to(device))[0, :-1] for state in states])
    targets = torch.tensor([token for ids in prompts for token in ids[1:]], device=device)
    values = _head_logprobs(stored, plan, hidden, targets).tolist()
    return [[values.pop(0) for _ in ids[1:]] for ids in prompts]


def _head_logprobs(
    stored: ServedReader, plan: CheckpointPlan, hidden: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Log-probability [T] of ``targets`` [T] after ``hidden`` [T, H], in parts of the head."""
    scheme, scale = plan.schemes.get("lm_head"), _input_scale(stored, "lm_head")
    if scheme is not None and scheme.input_activations is not None:
        if scale is None:
            hidden = fake_quantize(hidden)
        else:
            hidden = fake_quantize(hidden, "tensor", scale.to(hidden.device))
    name = "lm_head.weight" if "lm_head.weight" in stored else "model.embed_tokens.weight"
    codes, scales = stored.stored_parts(name)
    total = torch.full_like(hidden[:, 0], -torch.inf)
    chosen = torch.zeros_like(total)
    for start in range(0, codes.shape[0], _HEAD_ROWS):
        rows = codes[start : start + _HEAD_ROWS].to(hidden.device)
        if scales is not None:
            rows = dequantize(rows, scales[start : start + _HEAD_ROWS].to(hidden.device))
        logits = hidden @ rows.float().t()
        total = torch.logaddexp(total, logits.logsumexp(-1))
        inside = (targets >= start) & (targets < start + logits.shape[1])
        local = (targets - start).clamp(0, logits.shape[1] - 1)
        chosen = torch.where(inside, logits.gather(1, local[:, None])[:, 0], chosen)
    return chosen - total


def _input_scale(stored: CheckpointReader, name: str) -> torch.Tensor | None:
    """The static scale [1] of a linear's input, None for dynamic ones."""
    full = f"{name}.input_scale"
    return stored.read(full) if full in stored else None

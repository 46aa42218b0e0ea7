# SPDX-License-Identifier: MIT
"""A calibration run from model folder to finished output folder."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from oss_fused.errors import CheckpointError, DatasetError, OssFusedError
from oss_fused.quant.checkpoint.assets import (
    copy_assets,
    find_assets,
    write_config,
    write_model_card,
)
from oss_fused.quant.checkpoint.place import OutputLock
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.checkpoint.source import SourceReader
from oss_fused.quant.checkpoint.writer import CheckpointWriter
from oss_fused.quant.dataset import file_digest, load_samples, load_tokenizer
from oss_fused.quant.export import Exporter, LayerCalibration
from oss_fused.quant.mxfp4_rounding import Mxfp4Rounder, open_base
from oss_fused.quant.plan import CheckpointPlan, make_plan
from oss_fused.quant.recipe import Recipe
from oss_fused.quant.record import write_record
from oss_fused.quant.record_builder import SearchResult, build_record
from oss_fused.quant.run_options import RunOptions, check_output, pick_device
from oss_fused.quant.self_check import load_prompts, write_self_check
from oss_fused.quant.skeleton import ModelSkeleton, layer_step
from oss_fused.quant.streaming import LayerStream, bytes_of_states

# wraps an iterable of steps or layers; the text describes the loop
Progress = Callable[[Sequence[Any], str], Iterable[Any]]
# samples on which --accuracy-target compares mixes of precisions
HELD_OUT = 8
_NOWHERE = -1  # before the first step


@dataclass(frozen=True)
class Summary:
    """What a run made.

    Attributes:
        output: the finished folder.
        source_bytes: of the source's shards.
        output_bytes: of the output's tensors.
        quantised: number of linears in FP8, of all.
        linears: number of linears.
        experts: how experts are stored.
        errors: step -> its metrics (``weight_error``, ``output_error``).
        seconds: wall time of this run.
        unrouted: experts that no calibration token was routed to; they are rounded plainly.
        few: experts that some tokens were routed to, but too few for feedback.
        blocks: number of blocks rounded to MXFP4.
        base_blocks: those of them that are the base checkpoint's, None without one.
    """

    output: Path
    source_bytes: int
    output_bytes: int
    quantised: int
    linears: int
    experts: str | None
    errors: dict[str, dict[str, Any]]
    seconds: float
    unrouted: tuple[str, ...] = ()
    few: tuple[str, ...] = ()
    blocks: int = 0
    base_blocks: int | None = None

    def worst(self, count: int = 5) -> list[tuple[str, dict[str, Any]]]:
        """The linears with the largest error: of the output where known, else of the weight."""
        linears = [item for item in self.errors.items() if "weight_error" in item[1]]
        key = "output_error" if any("output_error" in metrics for _, metrics in linears) else ""
        return sorted(linears, key=lambda item: -item[1].get(key, item[1]["weight_error"]))[:count]


class Run:
    """A run made ready."""

    def __init__(
        self,
        recipe: Recipe,
        options: RunOptions,
        base: CheckpointReader | None = None,
        search: SearchResult | None = None,
    ) -> None:
        """Check the inputs and make the plan; nothing is written yet.

        Args:
            recipe: what to make.
            options: where and how.
            base: an output of the same recipe without overrides, whose quantised tensors are
                taken as they are.
            search: result of the policy search that made ``base`` and compared mixes.
        """
        self.base, self.search = base, search
        self.recipe = recipe
        self.options = options
        self.device = pick_device(options.device)
        self.reader = SourceReader(options.model, options.adapter)
        check_output(options, recipe)
        self.assets = find_assets(self.reader.folder)
        # compared again after the last read: the weights must not change during a run
        self._source_files = self.reader.identity()
        self.source: str = self._source_files["digest"]
        self.skeleton = ModelSkeleton(self.reader)
        self.plan: CheckpointPlan = make_plan(self.skeleton, recipe)
        base_folder = recipe.base
        if self.plan.expert_rounding is not None and self.skeleton.stored_experts == "mxfp4":
            # what the adapter leaves as it is keeps its codes
            base_folder = base_folder or str(options.model)
        self.rounder = Mxfp4Rounder(
            "nearest" if recipe.rounding == "nearest" else "mse",
            None if base_folder is None else open_base(base_folder, self.skeleton),
        )
        self.held_out: list[torch.Tensor] = []
        self.samples = self._load_samples() if base is None else []
        self.prompts: list[list[int]] = []
        if recipe.checks_itself:
            # said before the work: whether the self-check at its end can be made
            self.prompts = load_prompts(self.reader.folder, self.skeleton.config.vocab_size)

    @property
    def output_bytes(self) -> int:
        """Bytes of the output's tensors."""
        return sum(spec.nbytes for spec in self.plan.specs)

    @property
    def state_bytes(self) -> int:
        """Bytes of the hidden states that the run saves until its output is complete."""
        width = self.skeleton.config.hidden_size
        return bytes_of_states([len(sample) for sample in self.samples], width)

    @cached_property
    def base_digest(self) -> str | None:
        """Hash of the checkpoint whose MXFP4 codes are kept, None without one."""
        return None if self.rounder.base is None else self.rounder.base.digest()

    def identity(self) -> str:
        """Hash of all that decides the output: a run can resume another of the same identity."""
        return self.recipe.digest(
            self._source_files,
            self.base and self.base.digest(),
            self.options.max_shard_bytes,
            # of tokens, not of the file: tokenizer and chat template decide them too
            self.data(),
            self.base_digest,
        )

    def data(self) -> str | None:
        """Hash of the calibration samples' tokens, None without data."""
        if not self.samples:
            return None if self.search is None else self.search.record.data
        tokens = [sample.tolist() for sample in self.samples]
        return hashlib.sha256(repr(tokens).encode()).hexdigest()

    def execute(
        self,
        progress: Progress = lambda items, _: items,
        complete: Callable[[Path], None] = lambda _: None,
        lock: OutputLock | None = None,
    ) -> Summary:
        """Write the output.

        Args:
            progress: wraps the loop over tensors.
            complete: adds to the working folder, once it holds everything, before it gets its name.
            lock: of the output, if the caller holds it.

        Raises:
            OssFusedError: bad input; names what and where. Nothing is left, unless only the place
                of the output became unusable: then the working folder stays.
            OSError: the disk is full or cannot be written. The working folder stays for a resume,
                as it does when the run is interrupted.
        """
        start = time.monotonic()
        options = self.options
        writer = CheckpointWriter(
            options.output,
            self.plan.specs,
            options.max_shard_bytes,
            self.identity(),
            options.resume,
            options.overwrite,
            lock,
            self.state_bytes,
        )
        try:
            try:
                self._write_tensors(writer, progress)
                self._check_source()
                summary = self._summarise(writer, time.monotonic() - start)
                self._write_assets(writer, summary)
                if self.prompts:
                    parts = (self.reader, self.plan, self.prompts, self.device)
                    write_self_check(writer.partial, *parts, progress)
                complete(writer.partial)
            except OssFusedError:
                # the input is at fault: a resume would fail again
                writer.discard()
                raise
            writer.finish()
        finally:
            writer.close()
        return summary

    def _check_source(self) -> None:
        if self.reader.identity() != self._source_files:
            raise CheckpointError(
                f"{self.reader.folder}: its weights changed while the run read them; expected a "
                f"checkpoint that nobody writes"
            )

    def _write_tensors(self, writer: CheckpointWriter, progress: Progress) -> None:
        plan = self.plan
        exporter = Exporter(plan, self.reader, writer, self.device, self.base, self.rounder)
        stream = None
        if self.samples:
            stream = LayerStream(
                self.skeleton,
                plan,
                self.samples,
                self.device,
                writer.state,
                self.recipe.feedback,
                writer.steps,
                self.rounder,
            )
        calibration = LayerCalibration()
        entered: int | None = _NOWHERE
        for step in progress(plan.steps, "Calibrating"):
            if step.layer != entered:
                _leave(entered, stream, writer, calibration)
                calibration, entered = self._enter(step.layer, stream), step.layer
            exporter.run(step, calibration)
        _leave(entered, stream, writer, calibration)

    def _enter(self, layer: int | None, stream: LayerStream | None) -> LayerCalibration:
        """Run the samples through a decoder layer, or through what follows the last one."""
        if stream is not None and layer is not None and layer >= stream.next_layer:
            return stream.run(layer)
        if stream is not None and layer is None and stream.next_layer == self.skeleton.layers:
            return stream.run_head()
        return LayerCalibration()

    def _summarise(self, writer: CheckpointWriter, seconds: float) -> Summary:
        plan, metrics = self.plan, dict(writer.steps)
        tokens = {
            f"{step}.mlp.experts.{expert}": count
            for step, noted in metrics.items()
            for expert, count in enumerate(noted.get("expert_tokens", ()))
        }
        kept = [noted["base_blocks"] for noted in metrics.values() if "base_blocks" in noted]
        return Summary(
            output=self.options.output,
            source_bytes=self.reader.total_bytes(),
            output_bytes=writer.total_bytes,
            quantised=sum(scheme is not None for scheme in plan.schemes.values()),
            linears=len(plan.schemes),
            experts=plan.experts,
            errors=metrics,
            seconds=seconds,
            unrouted=tuple(name for name, count in tokens.items() if not count),
            few=tuple(name for name, count in tokens.items() if 0 < count < self._enough_tokens()),
            blocks=sum(noted.get("mxfp4_blocks", 0) for noted in metrics.values()),
            base_blocks=sum(kept) if kept else None,
        )

    def _enough_tokens(self) -> int:
        """Tokens that an expert needs for error feedback; 0 where experts have none."""
        rounds = self.plan.experts != self.plan.source_experts == "bf16"
        if not (self.recipe.feedback and rounds):
            return 0
        config = self.skeleton.config
        inner = getattr(config, "moe_intermediate_size", config.intermediate_size)
        return max(config.hidden_size, inner)

    def _load_samples(self) -> list[torch.Tensor]:
        recipe, limit = self.recipe, getattr(self.skeleton.config, "max_position_embeddings", None)
        if recipe.dataset is None:
            return []
        if limit is not None and recipe.max_seq_length > limit:
            raise DatasetError(
                f"--max-seq-length={recipe.max_seq_length}: the model's context is {limit} tokens"
            )
        file_digest(recipe.dataset)  # checked first: a wrong path is the likelier mistake
        tokenizer = load_tokenizer(self.reader.folder)
        held_out = HELD_OUT if recipe.accuracy_target is not None else 0
        wanted = recipe.num_samples + held_out
        samples = load_samples(
            recipe.dataset, tokenizer, wanted, recipe.max_seq_length, recipe.seed
        )
        if len(samples) <= held_out:
            raise DatasetError(
                f"--dataset={recipe.dataset!r}: has {len(samples)} samples; --accuracy-target "
                f"holds {held_out} out of calibration and needs more"
            )
        largest = max(int(sample.max()) for sample in samples)
        if largest >= self.skeleton.config.vocab_size:
            raise DatasetError(
                f"--dataset={recipe.dataset!r}: the tokenizer gives id {largest}, the model has "
                f"{self.skeleton.config.vocab_size}; is the tokenizer of another model?"
            )
        # every n-th, so that they come from the whole file
        step = len(samples) // held_out if held_out else 0
        chosen = set(range(step - 1, step * held_out, step)) if held_out else set()
        self.held_out = [sample for i, sample in enumerate(samples) if i in chosen]
        return [sample for i, sample in enumerate(samples) if i not in chosen]

    def _write_assets(self, writer: CheckpointWriter, summary: Summary) -> None:
        writer.drop_assets()
        copy_assets(self.assets, writer.partial)
        config = self.plan.quantization_config()
        plain = self.recipe.format == "mxfp4"
        dtype = "bfloat16" if plain else None
        write_config(writer.partial, self.reader.config, config, self.plan.untie, dtype)
        tokens = [len(sample) for sample in self.samples]
        record = build_record(
            self.skeleton, self.plan, self.recipe, writer.steps, tokens, self.search
        )
        record = record.model_copy(
            update={"source": self.source, "data": self.data(), "base": self.base_digest}
        )
        write_record(writer.partial, record)
        recipe = self.recipe.to_yaml()
        (writer.partial / "recipe.yaml").write_text(recipe)
        optimisations = {
            "Format": self.recipe.format,
            "Linear layers in FP8": f"{summary.quantised} of {summary.linears}",
            "Scheme": self.recipe.scheme,
            "Rounding": "error feedback" if self.recipe.feedback else "to nearest",
            "Experts": summary.experts or "none",
            "KV cache": "FP8, calibrated scales" if self.plan.kv_scales else "as served",
            "Size": f"{summary.source_bytes / 1e9:.2f} GB -> {summary.output_bytes / 1e9:.2f} GB",
            "Output": self.options.output.name,
        }
        if self.reader.adapter is not None:
            optimisations["Adapter merged"] = self.reader.adapter.folder.resolve().name
        source_name = self.reader.folder.resolve().name
        kind = "MXFP4" if plain else "FP8"
        write_model_card(writer.partial, source_name, optimisations, recipe, kind)


def _leave(
    layer: int | None,
    stream: LayerStream | None,
    writer: CheckpointWriter,
    calibration: LayerCalibration,
) -> None:
    """Save the samples' hidden states after ``layer``, whose tensors are all written."""
    if stream is not None and layer is not None and layer >= stream.next_layer:
        writer.done(layer_step(layer), calibration.layer)
        stream.commit(layer)

# SPDX-License-Identifier: MIT
"""Calibration with an accuracy target: everything in FP8 first, then the mix that meets it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from oss_fused.errors import CheckpointError
from oss_fused.quant.calibrator import Progress, Run, Summary
from oss_fused.quant.checkpoint.place import OutputLock, real, replacement_of, settle_replacement
from oss_fused.quant.checkpoint.reader import CheckpointReader
from oss_fused.quant.checkpoint.writer import check_places
from oss_fused.quant.plan import make_plan
from oss_fused.quant.policy import LEVELS, Outcome, PolicySearch
from oss_fused.quant.recipe import OF_LINEARS, Recipe
from oss_fused.quant.record import RECORD, CalibrationRecord, MixRecord, load_record
from oss_fused.quant.record_builder import SearchResult
from oss_fused.quant.run_options import RunOptions, check_output

# formats of calibrate_both, which are also the names of its folders
BOTH = ("oss-fp8", "mxfp4")
_NO_SEARCH: dict[str, Any] = {"accuracy_target": None, "keep_sensitive": {}}


class StoredWeights(Mapping[str, tuple[torch.Tensor, torch.Tensor]]):
    """Codes and scale of the quantised linears of a checkpoint, read when asked for."""

    def __init__(self, reader: CheckpointReader) -> None:
        """Look into ``reader``, opened for quantised tensors."""
        self._reader = reader
        suffix = ".weight_scale"
        self._names = [n.removesuffix(suffix) for n in reader.names() if n.endswith(suffix)]

    def __getitem__(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [N, K] and scale [N, 1] of a linear."""
        return self._reader.read(f"{name}.weight"), self._reader.read(f"{name}.weight_scale")

    def __iter__(self) -> Iterator[str]:
        """The linears' names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Number of linears."""
        return len(self._names)


def calibrate(
    recipe: Recipe,
    options: RunOptions,
    progress: Progress = lambda items, _: items,
    say: Callable[[str], None] = lambda _: None,
    best_effort: bool = False,
    complete: Callable[[Path], None] = lambda _: None,
) -> Summary:
    """Run a recipe, with the search that ``accuracy_target`` asks for.

    Args:
        recipe: what to make.
        options: where and how.
        progress: wraps every loop over tensors or layers.
        say: called with a line about each result of the search.
        best_effort: write the best mix where none meets the target, instead of raising.
        complete: adds to the output's working folder before it gets its name.

    Raises:
        OssFusedError: bad input, or the target is not met.
        OSError: the disk is full or cannot be written.

    Whatever ends the search, the checkpoint with everything in FP8 stays, and ``say`` is told
    where; after a success it goes, unless ``options.stage`` keeps it.
    """
    run = Run(recipe, options)
    if recipe.accuracy_target is None:
        return run.execute(progress, complete)
    check_places(_places(run))
    plain, base = recipe.model_copy(update=_NO_SEARCH), _base_folder(run)
    # held for the whole search: another run of the same settings would replace the base meanwhile
    lock = OutputLock(real(options.output))
    try:
        settle_replacement(real(options.output))
        check_output(options, recipe)
        if _is_made(base, options):
            _check_stage(base, plain, run)
        else:
            _make_base(run, plain, options, base, progress)
        try:
            summary = _search(run, base, options, progress, say, best_effort, complete, lock)
        except BaseException:
            say(f"the checkpoint with everything in FP8 stays: go on with --fp8-stage {base}")
            raise
    finally:
        lock.release()
    if options.stage is None:
        shutil.rmtree(base)
    return summary


def is_finished(recipe: Recipe, options: RunOptions, both: bool = False) -> bool:
    """Whether a resume has nothing to do: each output was made as this run would make it.

    Arguments and errors are those of ``rehearse``.
    """
    wanted = split_formats(recipe, options) if both else ((recipe, options),)
    places = [own.output for _, own in wanted]
    if options.overwrite or not options.resume:
        return False
    if not all((place / RECORD).is_file() for place in places):
        return False
    run = Run(wanted[0][0], dataclasses.replace(wanted[0][1], overwrite=True))
    return not any(_made_otherwise(own.output, other, run) for other, own in wanted)


def end_replacements(options: RunOptions, both: bool = False) -> None:
    """Settle what an --overwrite that was killed left beside the output, or the outputs.

    Raises:
        CheckpointError: another run writes there.
    """
    output = real(options.output)
    for place in [output / name for name in BOTH] if both else [output]:
        if replacement_of(place)[1].exists():
            lock = OutputLock(place)
            try:
                settle_replacement(place)
            finally:
                lock.release()


def rehearse(recipe: Recipe, options: RunOptions, both: bool = False) -> list[Run]:
    """Refuse what ``calibrate`` or ``calibrate_both`` refuse before hours of work; write nothing.

    Args:
        recipe: what would be made.
        options: where and how.
        both: for ``calibrate_both``.

    Returns:
        The runs that would write the checkpoints.

    Raises:
        OssFusedError: bad input.
        OSError: the disk is full.
    """
    if both:
        (recipe, options), second = split_formats(recipe, options)
        run, standing = _first_of_both(recipe, options)
        runs = [*([] if standing else [run]), Run(*second)]
    else:
        runs = [Run(recipe, options)]
    check_places({place: size for run in runs for place, size in _places(run).items()})
    for run in runs:
        check_places({run.options.output: run.output_bytes + run.state_bytes})
    return runs


def split_formats(
    recipe: Recipe, options: RunOptions
) -> tuple[tuple[Recipe, RunOptions], tuple[Recipe, RunOptions]]:
    """Recipe and options of the two checkpoints that ``calibrate_both`` writes.

    Raises:
        CheckpointError: the output is a file or a checkpoint itself.
    """
    folder = real(options.output)
    if folder.exists() and (not folder.is_dir() or (folder / "config.json").exists()):
        raise CheckpointError(
            f"--output={str(options.output)!r}: is a checkpoint or a file; expected a folder to "
            f"hold {' and '.join(BOTH)}"
        )
    experts = "mxfp4" if recipe.experts == "auto" else recipe.experts
    fp8 = recipe.model_copy(update={"format": BOTH[0], "experts": experts})
    fields = Recipe.model_fields
    unset = {name: fields[name].get_default() for name in OF_LINEARS}
    plain = fp8.model_copy(update={**unset, "format": BOTH[1]})
    first, second = (dataclasses.replace(options, output=folder / name) for name in BOTH)
    return (fp8, first), (plain, dataclasses.replace(second, stage=None))


def calibrate_both(
    recipe: Recipe,
    options: RunOptions,
    progress: Progress = lambda items, _: items,
    say: Callable[[str], None] = lambda _: None,
    complete: Callable[[Path], None] = lambda _: None,
) -> list[Summary]:
    """Write OUTPUT/oss-fp8 and then OUTPUT/mxfp4; the experts of both are the same bytes.

    Arguments and errors are those of ``calibrate``. With ``options.resume`` a finished first
    checkpoint of the same settings is taken as it is.

    Returns:
        A summary for each checkpoint that was written.
    """
    (fp8, first), (plain, second) = split_formats(recipe, options)
    run, standing = _first_of_both(fp8, first)
    # said before hours of work: whether the second can be made
    plan = make_plan(run.skeleton, plain)
    check_output(second, plain)
    size = sum(spec.nbytes for spec in plan.specs)
    check_places({**({} if standing else _places(run)), second.output: size})
    summaries = []
    if not standing:
        summaries.append(calibrate(fp8, first, progress, say, complete=complete))
    made = CheckpointReader(first.output, quantised=True)
    search = SearchResult(load_record(first.output), {}, [], None)
    summaries.append(Run(plain, second, made, search).execute(progress, complete))
    return summaries


def _first_of_both(recipe: Recipe, options: RunOptions) -> tuple[Run, bool]:
    """The run of the first checkpoint, and whether a resume finds it made already."""
    if not options.resume:
        return Run(recipe, options), False
    run = Run(recipe, dataclasses.replace(options, overwrite=True))
    made = not _made_otherwise(options.output, recipe, run)
    if not made:
        check_output(options, recipe)
    return run, made


def _base_folder(run: Run) -> Path:
    """Where a search keeps the checkpoint with everything in FP8."""
    output = real(run.options.output)
    beside = output.with_name(f"{output.name}.all-fp8-{run.identity()}")
    return run.options.stage or beside


def _is_made(base: Path, options: RunOptions) -> bool:
    """Whether the checkpoint with everything in FP8 is there to be taken."""
    return base.is_dir() and (options.stage is not None or options.resume)


def _places(run: Run) -> dict[Path, int]:
    """Every checkpoint that a run is still to make -> its bytes; a mix has at least those of FP8.

    Raises:
        CheckpointError: the one with everything in FP8 is of another run, or its place is taken.
    """
    places = {run.options.output: run.output_bytes}
    if run.recipe.accuracy_target is None:
        return places
    plain, base = run.recipe.model_copy(update=_NO_SEARCH), _base_folder(run)
    if _is_made(base, run.options):
        _check_stage(base, plain, run)
        return places
    check_output(_base_options(run.options, base), plain)
    return {base: run.output_bytes, **places}


def _search(
    run: Run,
    base: Path,
    options: RunOptions,
    progress: Progress,
    say: Callable[[str], None],
    best_effort: bool,
    complete: Callable[[Path], None],
    lock: OutputLock,
) -> Summary:
    """Find the mix and write it, from the finished checkpoint ``base``."""
    recipe = run.recipe
    assert recipe.accuracy_target is not None
    reader = CheckpointReader(base, quantised=True)
    weights = StoredWeights(reader)
    search = PolicySearch(
        run.reader,
        weights,
        run.plan.schemes,
        run.held_out,
        run.device,
        progress,
        reader,
        recipe.keep_sensitive,
    )
    say(f"policy: comparing {len(LEVELS)} mixes on {len(run.held_out)} held-out samples")
    outcome = search.search(recipe.accuracy_target, best_effort)
    say(describe(outcome))
    overrides = (*recipe.overrides, *outcome.overrides)
    found = recipe.model_copy(update={**_NO_SEARCH, "overrides": overrides})
    result = SearchResult(
        load_record(base),
        {name: harm.inputs + harm.weights for harm in search.harms for name in harm.names},
        [_mix_record(mix, outcome) for mix in search.compared],
        recipe.accuracy_target,
        recipe.digest(),
    )
    summary = Run(found, options, reader, result).execute(progress, complete, lock)
    return dataclasses.replace(summary, errors=_with_output_errors(summary, result.record))


def _with_output_errors(summary: Summary, record: CalibrationRecord) -> dict[str, dict[str, Any]]:
    """The metrics of a run's steps with the output errors that the stage before measured."""
    measured = {
        linear.name: {"output_error": linear.output_error}
        for linear in record.linears
        if linear.output_error is not None
    }
    return {name: {**measured.get(name, {}), **metrics} for name, metrics in summary.errors.items()}


def _mix_record(mix: Outcome, chosen: Outcome) -> MixRecord:
    return MixRecord(
        inputs_share=mix.inputs_share,
        weights_share=mix.weights_share,
        factor=mix.factor,
        chosen=mix is chosen,
    )


def describe(outcome: Outcome) -> str:
    """One line about a mix."""
    return (
        f"policy: {outcome.inputs_share:.0%} of the linears' weights with 16-bit inputs, "
        f"{outcome.weights_share:.0%} in bf16: estimated perplexity factor {outcome.factor:.4f}"
    )


def _check_stage(stage: Path, plain: Recipe, run: Run) -> None:
    """Raise CheckpointError unless a stage was made as this run would make it."""
    if other := _made_otherwise(stage, plain, run):
        raise CheckpointError(
            f"--fp8-stage={str(stage)!r}: exists, but was made {other}; expected a new folder or "
            f"that of a run with the same settings"
        )


def _made_otherwise(folder: Path, recipe: Recipe, run: Run) -> str | None:
    """In what way a finished checkpoint differs from what ``run`` would make of ``recipe``."""
    record = load_record(folder) if (folder / RECORD).is_file() else None
    if record is None or record.requested != recipe.digest():
        return "by another recipe"
    if record.source != run.source:
        return f"from other weights than those of MODEL={str(run.options.model)!r}"
    if record.data != run.data():
        return "with other calibration samples than --dataset and the tokenizer give now"
    if record.base != run.base_digest:
        return f"with another checkpoint than --base={run.recipe.base!r}"
    return None


def _make_base(
    run: Run, plain: Recipe, options: RunOptions, base: Path, progress: Progress
) -> None:
    """The checkpoint with every chosen linear in FP8."""
    base_run = Run(plain, _base_options(options, base))
    base_run.samples = run.samples
    base_run.execute(progress)


def _base_options(options: RunOptions, base: Path) -> RunOptions:
    # safe to replace: only this run makes a folder of this name
    own = options.stage is None
    return dataclasses.replace(options, output=base, overwrite=own, stage=None)

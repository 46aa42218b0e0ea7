# SPDX-License-Identifier: MIT
"""Hardware counters of kernels from Nsight Compute's CSV, and the bottlenecks that they show.

Source of names and meanings: NVIDIA, Nsight Compute, "Kernel Profiling Guide", metrics reference.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from oss_fused.errors import BackendUnavailableError, SchemeError

# name here -> name in ncu; shares are percent
METRICS = {
    "registers_per_thread": "launch__registers_per_thread",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "occupancy_by_registers": "launch__occupancy_limit_registers",
    "occupancy_by_blocks": "launch__occupancy_limit_blocks",
    "local_loads": "smsp__inst_executed_op_local_ld.sum",
    "local_stores": "smsp__inst_executed_op_local_st.sum",
    "bytes_used_per_sector": "smsp__sass_average_data_bytes_per_sector_mem_global.pct",
    "l2_hit_rate": "lts__t_sector_hit_rate.pct",
    "l2_throughput": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "dram_throughput": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes_per_second": "dram__bytes.sum.per_second",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "tensor_active": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "issue_active": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "math_throttle": "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio",
}
_NAMES = {full: name for name, full in METRICS.items()}
# percent, unless said otherwise
_POOR_SECTORS, _POOR_OCCUPANCY, _BUSY, _POOR_HITS, _ISSUES = 50.0, 25.0, 80.0, 30.0, 50.0
_CONFLICT_SHARE = 0.25
# stalled warps per issued instruction
_THROTTLED = 1.0


class CounterBottleneck(Enum):
    """What counters say holds a kernel up."""

    UNCOALESCED = "uncoalesced access"
    REGISTERS = "registers"
    L2 = "L2 cache"
    BANK_CONFLICT = "shared memory bank conflicts"
    PIPELINE = "arithmetic pipeline"


REMEDIES: dict[CounterBottleneck, str] = {
    CounterBottleneck.UNCOALESCED: "let neighbouring threads read neighbouring elements",
    CounterBottleneck.REGISTERS: "smaller tiles, or more warps for a tile",
    CounterBottleneck.L2: "group tiles that share operands (GROUP_M), or larger tiles",
    CounterBottleneck.BANK_CONFLICT: "pad or swizzle rows in shared memory",
    CounterBottleneck.PIPELINE: "a faster instruction (FP8), or fewer instructions around it",
}


@dataclass(frozen=True)
class KernelCounters:
    """One launch: its kernel's name and what was counted, by the names of ``METRICS``."""

    kernel: str
    values: dict[str, float]

    def bottlenecks(self) -> list[CounterBottleneck]:
        """Classes whose counters are beyond their limits; what was not counted accuses nothing."""
        v = self.values
        found = []
        if v.get("bytes_used_per_sector", 100.0) < _POOR_SECTORS:
            found.append(CounterBottleneck.UNCOALESCED)
        limited = v.get("occupancy_by_registers", 1.0) < v.get("occupancy_by_blocks", 0.0)
        low = v.get("occupancy", 100.0) < _POOR_OCCUPANCY
        # few warps that keep a unit busy are enough: large tiles are meant to take registers
        units = ("tensor_active", "dram_throughput", "l2_throughput")
        idle = all(v.get(unit, 0.0) <= _BUSY for unit in units)
        spills = v.get("local_loads", 0.0) + v.get("local_stores", 0.0) > 0
        if spills or (limited and low and idle):
            found.append(CounterBottleneck.REGISTERS)
        missed = v.get("l2_hit_rate", 100.0) < _POOR_HITS and v.get("dram_throughput", 0.0) > _BUSY
        if v.get("l2_throughput", 0.0) > _BUSY or missed:
            found.append(CounterBottleneck.L2)
        wavefronts = v.get("shared_wavefronts", 0.0)
        if wavefronts and v.get("bank_conflicts", 0.0) / wavefronts > _CONFLICT_SHARE:
            found.append(CounterBottleneck.BANK_CONFLICT)
        # where little is issued, a throttled warp is a short burst between waits
        throttled = v.get("math_throttle", 0.0) > _THROTTLED and v.get("issue_active", 0) > _ISSUES
        if v.get("tensor_active", 0.0) > _BUSY or throttled:
            found.append(CounterBottleneck.PIPELINE)
        return found


def parse_ncu_csv(text: str) -> list[KernelCounters]:
    """Launches in the output of ``ncu --csv --print-units base --metrics ...``.

    Lines before the table, such as ncu's own and the program's, are left out; so are metrics that
    ``METRICS`` does not name, and values that are no number ("n/a" where a chip cannot count).

    Raises:
        SchemeError: there is no such table, or it ends inside a line.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise SchemeError('text: expected a CSV table of ncu, whose header begins with "ID"')
    launches: dict[str, KernelCounters] = {}
    for row in csv.DictReader(lines[start:]):
        if row["Metric Value"] is None:
            raise SchemeError(f"text: the line of launch {row['ID']!r} is not complete")
        one = launches.setdefault(row["ID"], KernelCounters(row["Kernel Name"], {}))
        name = _NAMES.get(row["Metric Name"])
        value = row["Metric Value"].replace(",", "")
        if name and _is_number(value):
            one.values[name] = float(value)
    return list(launches.values())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def count(command: Sequence[str], kernel: str = "", timeout: float = 600.0) -> list[KernelCounters]:
    """Run ``command`` under ncu and return the counters of its launches.

    Args:
        command: a program and its arguments.
        kernel: regular expression of the kernels' names; empty takes all.
        timeout: seconds.

    Raises:
        BackendUnavailableError: no ncu here, or it may not count; with what it said.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise BackendUnavailableError("ncu: not found; it comes with the CUDA toolkit")
    options = ["--csv", "--print-units", "base", "--metrics", ",".join(METRICS.values())]
    options += ["--kernel-name", f"regex:{kernel}"] if kernel else []
    done = subprocess.run(
        [ncu, *options, *command], capture_output=True, text=True, timeout=timeout, check=False
    )
    try:
        return parse_ncu_csv(done.stdout)
    except SchemeError as error:
        said = (done.stdout + done.stderr)[-1000:]
        raise BackendUnavailableError(f"ncu: counted nothing ({error}): {said}") from error

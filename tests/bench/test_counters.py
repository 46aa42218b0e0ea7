# SPDX-License-Identifier: MIT
"""Hardware counters: ncu's CSV in the form of a hand-written sample, classes, a missing ncu."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from oss_fused.bench import counters
from oss_fused.bench.counters import CounterBottleneck, KernelCounters, parse_ncu_csv
from oss_fused.errors import BackendUnavailableError, SchemeError

SAMPLE = (Path(__file__).parents[1] / "data" / "ncu_sample.csv").read_text()


def test_launches_and_units_of_the_sample():
    copy, gemm = parse_ncu_csv(SAMPLE)
    assert (copy.kernel, gemm.kernel) == ("_strided_copy_kernel", "_gemm_kernel, wide")
    assert copy.values["dram_bytes_per_second"] == 3.1045e12
    assert copy.values["registers_per_thread"] == 32
    assert "l2_throughput" not in gemm.values, "n/a is no number"
    assert copy.bottlenecks() == [CounterBottleneck.UNCOALESCED]
    assert gemm.bottlenecks() == [
        CounterBottleneck.BANK_CONFLICT,
        CounterBottleneck.PIPELINE,
    ]
    assert counters.REMEDIES.keys() == set(CounterBottleneck)


REGISTERS = {"occupancy": 10.0, "occupancy_by_registers": 1, "occupancy_by_blocks": 32}


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, []),
        ({"bytes_used_per_sector": 49.0}, ["UNCOALESCED"]),
        ({"bytes_used_per_sector": 51.0}, []),
        ({"local_loads": 0.0, "local_stores": 1.0}, ["REGISTERS"]),
        ({**REGISTERS, "tensor_active": 30.0}, ["REGISTERS"]),
        ({**REGISTERS, "tensor_active": 93.0}, ["PIPELINE"]),
        ({**REGISTERS, "dram_throughput": 90.0}, []),
        ({"occupancy": 10.0}, []),
        ({"occupancy": 90.0, "occupancy_by_registers": 1, "occupancy_by_blocks": 32}, []),
        ({"l2_throughput": 85.0}, ["L2"]),
        ({"l2_hit_rate": 10.0, "dram_throughput": 90.0}, ["L2"]),
        ({"l2_hit_rate": 10.0, "dram_throughput": 20.0}, []),
        ({"bank_conflicts": 1.0, "shared_wavefronts": 10.0}, []),
        ({"math_throttle": 1.5, "issue_active": 60.0}, ["PIPELINE"]),
        ({"math_throttle": 2.25, "issue_active": 30.0}, []),
        ({"math_throttle": 2.25}, []),
    ],
)
def test_classes(values, found):
    assert [one.name for one in KernelCounters("k", values).bottlenecks()] == found


def test_kernels_of_known_kind_that_an_h200_counted():
    """A read with a stride, a norm, products of one row and of 4096."""
    path = Path(__file__).parents[2] / "docs/results/h200/counters.json"
    launches = json.loads(path.read_text())["launches"]
    found = {
        one["kernel"]: KernelCounters(one["kernel"], one["counters"]).bottlenecks()
        for one in launches
    }
    assert [[kind.value for kind in kinds] for kinds in found.values()] == [
        one["bottlenecks"] for one in launches
    ]
    assert found["_strided_read_kernel"] == [CounterBottleneck.UNCOALESCED]
    assert found["_gemm_persistent_kernel"] == [CounterBottleneck.PIPELINE]
    assert CounterBottleneck.UNCOALESCED not in found["_rmsnorm_rope_kernel"]


def test_what_is_no_table_is_refused():
    with pytest.raises(SchemeError, match='begins with "ID"'):
        parse_ncu_csv("==ERROR== No kernels were profiled")
    with pytest.raises(SchemeError, match="launch '0'"):
        parse_ncu_csv('"ID","Kernel Name","Metric Name","Metric Value"\n"0","k"')


def test_without_ncu_or_without_its_counters(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailableError, match="ncu: not found"):
        counters.count(["true"])
    ncu = tmp_path / "ncu"
    ncu.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM'\n")
    ncu.chmod(stat.S_IRWXU)
    with pytest.raises(BackendUnavailableError, match="ERR_NVGPUCTRPERM"):
        counters.count(["true"])
    ncu.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/arguments\ncat <<'X'\n{SAMPLE}X\n"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert len(counters.count(["python", "x.py"], kernel="_gemm.*")) == 2
    given = (tmp_path / "arguments").read_text().split()
    assert given[-2:] == ["python", "x.py"] and "regex:_gemm.*" in given
    assert set(counters.METRICS.values()) == set(given[given.index("--metrics") + 1].split(","))

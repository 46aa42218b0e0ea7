# SPDX-License-Identifier: MIT
"""Roofline arithmetic, bottleneck classes, measured ceilings."""

from __future__ import annotations

import contextlib

import pytest
import torch

from oss_fused.bench import roofline
from oss_fused.bench.roofline import REMEDIES, Bottleneck, Ceilings, analyse, measure_ceilings

# ridge at 10 FLOP per byte
CEILINGS = Ceilings("test", 1000.0, {"bfloat16": 10.0, "float8_e4m3fn": 20.0})


@pytest.mark.parametrize(
    ("latency_ms", "flops", "num_bytes", "kind", "share"),
    [
        (1.25, 10**9, 10**9, Bottleneck.MEMORY, 0.8),
        (1.25, 10**10, 10**8, Bottleneck.COMPUTE, 0.8),
        (10.0, 10**9, 10**9, Bottleneck.LATENCY, 0.1),
        (0.004, 10**5, 10**5, Bottleneck.LAUNCH, 0.025),
    ],
)
def test_place_under_the_roof(latency_ms, flops, num_bytes, kind, share):
    point = analyse("k", latency_ms, flops, num_bytes, "bfloat16", CEILINGS)
    assert point.bottleneck is kind
    assert point.share_of_roof == pytest.approx(share)
    assert point.intensity == flops / num_bytes
    assert point.remedies == REMEDIES[kind]


def test_the_dtype_picks_the_roof():
    slow = analyse("k", 1.25, 10**10, 10**8, "bfloat16", CEILINGS)
    fast = analyse("k", 1.25, 10**10, 10**8, "float8_e4m3fn", CEILINGS)
    assert (slow.roof_tflops, fast.roof_tflops) == (10.0, 20.0)


def test_every_class_has_two_verifiable_remedies():
    for kind in Bottleneck:
        assert len(set(REMEDIES[kind])) == 2
        assert all("verify by" in text for text in REMEDIES[kind])


def test_bad_figures_are_named():
    with pytest.raises(ValueError, match="latency_ms=0"):
        analyse("k", 0, 1, 1, "bfloat16", CEILINGS)
    with pytest.raises(ValueError, match=r"ceilings\.tflops=0"):
        analyse("k", 1, 1, 1, "bfloat16", Ceilings("x", 1.0))


def test_measured_ceilings_are_plausible():
    found = measure_ceilings("cpu", (torch.float32, torch.float8_e4m3fn))
    assert 0.5 < found.bandwidth_gbps < 5000
    assert found.tflops.keys() == {"float32"} and 1e-4 < found.tflops["float32"] < 100


def test_bandwidth_is_that_of_the_named_device(monkeypatch):
    current = [0]

    @contextlib.contextmanager
    def device(chosen):
        current.append(torch.device(chosen).index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda chosen: str(chosen))
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda: (1 + current[-1]) * 1e12)
    assert measure_ceilings("cuda:3", ()) == Ceilings("cuda:3", 4000.0)
    assert current == [0]

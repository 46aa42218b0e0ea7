# SPDX-License-Identifier: MIT
"""What makes two kernels one for the tuner's cache."""

from __future__ import annotations

import functools

import torch

from oss_fused.tuning.identity import kernel_identity


def test_identity_follows_what_a_kernel_uses(monkeypatch):
    def helper(x):
        return x + 1

    def other(x):
        return x + 2

    def kernel(x, BLOCK):
        return used_by_kernel(x)  # noqa: F821

    found = []
    for value in (helper, other, helper):
        monkeypatch.setitem(kernel.__globals__, "used_by_kernel", value)
        found.append(kernel_identity(kernel))
    assert found[0] == found[2] != found[1]
    assert f"{kernel.__module__}.test_identity_follows" in found[0]


def test_identity_of_what_python_did_not_define():
    def calling(value):
        return lambda x: value(x)

    @functools.cache
    def doubled(x):
        return 2 * x

    @functools.cache
    def tripled(x):
        return 3 * x

    values = (len, sum, torch.exp, torch.log, doubled, tripled, [].append, dict.get, {1}.__len__)
    assert len({kernel_identity(calling(value)) for value in values}) == len(values)
    assert kernel_identity(calling(doubled)) == kernel_identity(calling(doubled))
    assert kernel_identity(functools.partial(max, 1)) != kernel_identity(functools.partial(min, 1))

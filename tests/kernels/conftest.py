# SPDX-License-Identifier: MIT
"""Helpers of the kernel tests."""

import pytest
import torch


def _check_op(op, args):
    """opcheck less its schema test, which cannot compare FP8; aliases are looked for here."""
    tests = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op, args, test_utils=tests)
    before = [t.clone() if isinstance(t, torch.Tensor) else t for t in args]
    results = op(*args)
    results = (results,) if isinstance(results, torch.Tensor) else results
    storages = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
    for result in results:
        if result.numel():
            assert result.untyped_storage().data_ptr() not in storages
    for old, new in zip(before, args, strict=True):
        if isinstance(old, torch.Tensor):
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


@pytest.fixture
def check_op():
    return _check_op

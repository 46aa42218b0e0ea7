# SPDX-License-Identifier: MIT
"""``pytest tests/test_fp8_gemm.py``: every test of the FP8 GEMM, from the files they live in.

Collected only when named, so that no test runs twice; see ``collect_ignore`` in conftest.py.
"""

from __future__ import annotations

from tests import test_properties
from tests.kernels import test_gemm
from tests.kernels.conftest import check_op  # noqa: F401  a fixture
from tests.selection import selected

globals().update(selected(test_gemm, "test_"))
globals().update(selected(test_properties, "test_4_", "test_5_", "test_6_"))

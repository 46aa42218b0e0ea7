# SPDX-License-Identifier: MIT
"""``pytest tests/test_rmsnorm_rope.py``: every test of RMSNorm+RoPE, from the files they live in.

Collected only when named, so that no test runs twice; see ``collect_ignore`` in conftest.py.
"""

from __future__ import annotations

from tests import test_properties
from tests.kernels import test_rope
from tests.kernels.conftest import check_op  # noqa: F401  a fixture
from tests.selection import selected

globals().update(selected(test_rope, "rmsnorm_rope", "opcheck"))
globals().update(selected(test_properties, "test_1_", "test_3_"))

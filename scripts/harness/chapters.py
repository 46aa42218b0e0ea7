# SPDX-License-Identifier: MIT
"""The tutorial's chapters as modules, for scripts that measure their kernels.

docs/tutorial is no package, and "06-matmul" no name of Python: its own loader is used.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs" / "tutorial"))

from book import chapter, exercises

# what has rows for bench_operators
MEASURED = ("05-elementwise-and-reduction", "09-attention", "12-epilogue-patterns")

__all__ = ["MEASURED", "chapter", "exercises"]

# SPDX-License-Identifier: MIT
"""Backend "triton": one file per operation: docstring, jit kernel, launcher."""

# operation -> module of this package that holds the function of that name
OPERATIONS: dict[str, str] = {}

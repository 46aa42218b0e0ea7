# SPDX-License-Identifier: MIT
"""Backend "torch": the fp32-math twin of every operation. Ground truth, and the CPU path."""

# operation -> module of this package that holds the function of that name
OPERATIONS: dict[str, str] = {}

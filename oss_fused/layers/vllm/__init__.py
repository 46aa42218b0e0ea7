# SPDX-License-Identifier: MIT
"""The layers that serve: vLLM's interfaces, implemented with this package's kernels."""

# SPDX-License-Identifier: MIT
"""Analysis: memory access and layouts of tensors; compute, memory and communication of a model."""

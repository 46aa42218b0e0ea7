# SPDX-License-Identifier: MIT
"""The vLLM plugin: the one part of the package that imports vLLM."""

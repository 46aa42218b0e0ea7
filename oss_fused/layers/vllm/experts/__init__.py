# SPDX-License-Identifier: MIT
"""Mixture-of-experts layers of vLLM: choice of kernels, weight formats, loading."""

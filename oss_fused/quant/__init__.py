# SPDX-License-Identifier: MIT
"""Quantisation without vLLM: formats, schemes, checkpoint reader and writer, calibration."""

# SPDX-License-Identifier: MIT
"""Kernels: functions from tensors to tensors, one package per backend, found by the registry."""

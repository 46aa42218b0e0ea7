# SPDX-License-Identifier: MIT
"""Measuring: test models, kernel timing, servers under load, quality."""

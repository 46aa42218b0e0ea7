# SPDX-License-Identifier: MIT
"""Auto-tuning: config spaces, device descriptions, the search, and a cache that outlives it."""

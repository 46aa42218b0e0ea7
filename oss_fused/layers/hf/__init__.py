# SPDX-License-Identifier: MIT
"""torch.nn modules, and the patcher that puts them into a transformers model."""

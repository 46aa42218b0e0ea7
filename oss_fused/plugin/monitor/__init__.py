# SPDX-License-Identifier: MIT
"""The monitor: samples activations while serving, reports them on /metrics, writes a policy."""

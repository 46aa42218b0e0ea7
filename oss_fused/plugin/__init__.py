# SPDX-License-Identifier: MIT
"""The vLLM plugin: what integrates with vLLM and is no layer; those are in layers/vllm."""

# SPDX-License-Identifier: MIT
"""The launchers' integer arithmetic is Triton's."""

import triton

from oss_fused.kernels.integers import cdiv, next_power_of_2


def test_as_triton():
    for n in range(1, 3000):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        assert [cdiv(n - 1, d) for d in (1, 3, 16, 128)] == [
            triton.cdiv(n - 1, d) for d in (1, 3, 16, 128)
        ]

# SPDX-License-Identifier: MIT
# %% [markdown]
# # 4. Triton's model
#
# **Goal.** Go from `program_id` to an address without error: index, mask, types, `constexpr`.
#
# In CUDA you write what one thread does. In Triton you write what one *program* does, on blocks of
# values. The compiler decides which thread holds which value. You decide four things: which block a
# program takes, how it loads it, what it computes, and how large blocks are.

# %%
import book
import torch
import triton
import triton.language as tl

from oss_fused.kernels.integers import cdiv, next_power_of_2

# %% [markdown]
# ## From program_id to index
#
# `tl.program_id(0)` is the program's number on the first axis of the grid. `tl.arange(0, BLOCK)`
# is a block of numbers. Their sum is the block's place: `pid * BLOCK + arange`.
#
# The kernel writes, at each place, which program was there. With two axes the same holds per axis,
# and `[:, None]` and `[None, :]` make a tile of two blocks.


# %%
@triton.jit
def _who_kernel(out, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (r[:, None] < rows) & (c[None, :] < columns)
    number = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(out + r[:, None] * columns + c[None, :], number, mask=mask)


def who(rows: int, columns: int, block_r: int = 2, block_c: int = 4) -> torch.Tensor:
    """[rows, columns] int32: the number of the program that wrote each element."""
    out = torch.full((rows, columns), -1, dtype=torch.int32, device=book.DEVICE)
    grid = (cdiv(rows, block_r), cdiv(columns, block_c))
    _who_kernel[grid](out, rows, columns, BLOCK_R=block_r, BLOCK_C=block_c)
    return out


if __name__ == "__main__":
    picture = [" ".join(f"{n:2d}" for n in row) for row in who(5, 10).tolist()]
    book.show("\n".join(["```", *picture, "```"]))

# %% [markdown]
# Five rows in blocks of two, ten columns in blocks of four: nine programs. The last ones of each
# axis are cut by the mask.
#
# ## What a mask prevents
#
# Without a mask, the last block writes beyond the end. No error is raised. It overwrites whatever
# lies there. The buffer below has guard values behind its N elements, so that we can count the
# damage.


# %%
@triton.jit
def _fill_kernel(out, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(out + offsets, 1.0, mask=offsets < n)
    else:
        tl.store(out + offsets, 1.0)


def overwritten(n: int, block: int, masked: bool) -> int:
    """Guard values behind n elements that the kernel destroyed."""
    guard = cdiv(n, block) * block - n
    buffer = torch.full((n + guard,), -7.0, device=book.DEVICE)
    _fill_kernel[(cdiv(n, block),)](buffer, n, BLOCK=block, MASKED=masked)
    assert bool((buffer[:n] == 1.0).all())
    return int((buffer[n:] != -7.0).sum())


def masks(block: int = 64, sizes: tuple[int, ...] = (64, 100, 129)) -> list[dict]:
    """Lanes that work beyond N, and values destroyed with and without a mask."""
    return [
        {
            "N": n,
            "programs": cdiv(n, block),
            "idle lanes": book.percent(1 - n / (cdiv(n, block) * block)),
            "destroyed, masked": overwritten(n, block, True),
            "destroyed, no mask": overwritten(n, block, False),
        }
        for n in sizes
    ]


if __name__ == "__main__":
    book.show(book.table(masks(), book.here("blocks of 64 float32")))

# %% [markdown]
# N = 64 shows no damage: test a kernel with sizes that no block divides.
#
# ## int32 is not enough
#
# Block numbers and sizes are int32. Their product wraps beyond 2^31. The offset is then negative,
# and the kernel reads memory in front of the tensor. Convert the block number first.


# %%
@triton.jit
def _offset_kernel(out, index, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    # loaded, because an int argument of a launch has the type that its value needs
    pid = tl.load(index)
    if WIDE:
        place = pid.to(tl.int64) * BLOCK
    else:
        place = pid * BLOCK
    tl.store(out, place.to(tl.int64))


def offset_of(pid: int, block: int, wide: bool) -> int:
    """Offset of block ``pid`` as a kernel computes it, in int64 or in int32."""
    out = torch.zeros(1, dtype=torch.int64, device=book.DEVICE)
    index = torch.tensor(pid, dtype=torch.int32, device=book.DEVICE)
    _offset_kernel[(1,)](out, index, BLOCK=block, WIDE=wide)
    return int(out)


if __name__ == "__main__":
    book.show(
        book.table(
            [
                {
                    "block": pid,
                    "block size": 1024,
                    "int32 offset": offset_of(pid, 1024, False),
                    "int64 offset": offset_of(pid, 1024, True),
                }
                for pid in (1, 2_000_000, 2_100_000)
            ]
        )
    )

# %% [markdown]
# ## constexpr
#
# A `tl.constexpr` argument is part of the compiled code. Block sizes must be constant, because
# registers are laid out by them. An `if` on a constant keeps one branch only: an option that is
# off costs nothing. Each new value compiles again. So a size that changes with every request must
# not be a `constexpr`; a size of the model may.
#
# Triton also specialises on integer arguments that are 1 or divisible by 16, because then loads
# can be wide. `do_not_specialize` turns that off for a count that varies.


# %%
def variants(lengths: tuple[int, ...] = (1, 16, 17, 100, 160)) -> list[dict]:
    """How many binaries a length makes: as constexpr, as a power of two, as a plain argument."""
    kinds = {"1" if n == 1 else "16 k" if n % 16 == 0 else "other" for n in lengths}
    return [
        {"length is": "constexpr", "binaries": len(set(lengths))},
        {
            "length is": "next power of two, constexpr",
            "binaries": len({next_power_of_2(n) for n in lengths}),
        },
        {"length is": "plain argument", "binaries": len(kinds)},
        {"length is": "plain, do_not_specialize", "binaries": 1},
    ]


if __name__ == "__main__":
    book.show(book.table(variants(), "Lengths 1, 16, 17, 100 and 160."))


# %% [markdown]
# ## The production version
#
# The rules of this chapter are rules of the package: int64 addressing, a mask on every ragged
# dimension, and block sizes from a table or a rule, so that nothing compiles while a request
# waits. The softmax that serves pads a row to the next power of two, and takes the number of rows
# as a plain argument.


# %%
def padding(lengths: tuple[int, ...] = (3, 100, 129)) -> list[dict]:
    """Padded lanes of a row, and the sum of the package's softmax, which must be 1."""
    from oss_fused import softmax

    return [
        {
            "row length": n,
            "block": next_power_of_2(n),
            "sum of softmax": float(softmax(torch.ones(1, n, device=book.DEVICE)).sum()),
        }
        for n in lengths
    ]


if __name__ == "__main__":
    book.show(book.table(padding(), book.here("rows of float32")))


# %%
def acceptance() -> list[book.Bar]:
    """Correctness has no number here."""
    return []


# %% [markdown]
# ## Acceptance numbers
#
# None on a GPU. The tests of this chapter count destroyed guard values, which must be 0.
#
# ## Questions
#
# **Which thread holds which value?** The compiler chooses a layout. You see it in the dump of
# `TRITON_KERNEL_DUMP=1`. [Gluon](../gemm.md) lets you choose it.
#
# **Can programs talk to each other?** Not in a launch, except by atomics on memory. Split the work
# so that they need not, or launch twice.
#
# **Why must `arange` be a power of two?** Values are spread over threads and registers by bits of
# their index.
#
# ## Exercises
#
# 1. Write a kernel that transposes a matrix by tiles, with masks on both axes.
# 2. For which N from 1 to 200 does a block of 64 leave more than half of its lanes idle?
#
# Answers: [answers/04-triton-model.py](answers/04-triton-model.py).
#
# Next: [elementwise kernels and reductions](05-elementwise-and-reduction.py).

# SPDX-License-Identifier: MIT
# %% [markdown]
# # 1. Goals
#
# **Goal.** Know what this tutorial teaches, what each chapter must prove, and where its figures
# come from.
#
# The tutorial begins with the addition of two vectors and ends with a language model that is
# served in FP8. Every chapter is a program. Run it alone:
#
# ```
# python docs/tutorial/05-elementwise-and-reduction.py     # one chapter
# make tutorial                                            # all, a line each
# make docs                                                # this site, with what the chapters print
# ```
#
# You need Python, PyTorch and Triton, and no GPU: there, Triton's interpreter runs the kernels on
# the CPU. Then results are real and times are not. With a GPU the same chapters compile their
# kernels.
#
# ## What you should know
#
# Python, and what a matrix product is. You need no CUDA. A word that you do not know is in the
# [glossary](appendix-glossary.md).
#
# ## How a chapter is made
#
# 1. Its goal.
# 2. Kernels with the reason for each line that is not obvious.
# 3. A table of this run: the error against float64 first, then times.
# 4. The same on one H200. These figures are read from JSON files in
#    [docs/results/h200](../results/h200), which a script wrote when it measured. Where a file or a
#    figure is missing, the table says "not measured".
# 5. The version that serves, imported from the package and compared.
# 6. Acceptance numbers, questions, and exercises with answers that tests run.

# %%
import book

# %% [markdown]
# ## The way
#
# The titles are read from the files.


# %%
def titles() -> list[dict]:
    """Number, title and number of exercises of every chapter."""
    rows = []
    for name in book.chapters():
        text = (book.FOLDER / f"{name}.py").read_text()
        title = next(line for line in text.splitlines() if line.startswith("# # "))
        rows.append(
            {"chapter": f"[{title[4:]}]({name}.py)", "exercises": len(book.exercises(name))}
        )
    return rows


if __name__ == "__main__":
    book.show(book.table(titles()))

# %% [markdown]
# Read in order the first time: a chapter imports kernels of those before. Chapters 2 to 4 prepare;
# 5 to 9 are kernels; 10 to 14 make them fast, on this chip and the next; 15 and 16 keep them so and
# publish; 17 puts all of it under a served model.
#
# ## Acceptance numbers of the whole tutorial
#
# A chapter states numbers that its subject must reach on a GPU. The table asks each chapter. "met"
# and "NOT met" come from the JSON files. "not measured" means that no run on an H200 has written
# the figure yet, and nothing is claimed.


# %%
def all_bars() -> list[book.Bar]:
    """The acceptance numbers of all chapters, in order."""
    found = []
    for name in book.chapters():
        if name != "01-goals":
            found += book.chapter(name).acceptance()
    return found


if __name__ == "__main__":
    book.show(book.bars(all_bars()))


# %% [markdown]
# One limit holds for all of them: a kernel that is bound by memory bandwidth cannot, on a device
# with 30 % less bandwidth, exceed 70 % of its speed. No tuning changes that. So a bar for such a
# kernel is a share of that device's own copy bandwidth, and [chapter 14](14-adapting-to-a-chip.py)
# does so.


# %%
def acceptance() -> list[book.Bar]:
    """This chapter has none of its own."""
    return []


# %% [markdown]
# ## Questions
#
# **Why does the tutorial not trust the datasheet?** No kernel reaches it. A copy of a large
# tensor, and the vendor's matrix product, are roofs that something has reached on the same device.
#
# **Can I compare my times with those of the H200?** Only on an H200, with the versions that the
# source line names. The way to compare is in [chapter 15](15-regression-control.py).
#
# ## Exercises
#
# 1. Count the acceptance numbers by verdict: met, not met, not measured.
# 2. Find the JSON file under `docs/results/h200` that most of them are read from.
#
# Answers: [answers/01-goals.py](answers/01-goals.py).
#
# Next: [set-up and tools](02-setup-and-tools.py).

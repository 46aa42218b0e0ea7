# SPDX-License-Identifier: MIT
# %% [markdown]
# # Answers to chapter 1

# %%
from collections import Counter

import book

goals = book.chapter("01-goals")


# %%
def exercise_1(found: list[book.Bar] | None = None) -> Counter[str]:
    """The acceptance numbers by verdict."""
    count = Counter(bar.verdict for bar in found or goals.all_bars())
    assert set(count) <= {"met", "NOT met", book.NOT_MEASURED}
    return count


# %%
def exercise_2(found: list[book.Bar] | None = None) -> str:
    """The file that most acceptance numbers are read from."""
    return Counter(bar.file for bar in found or goals.all_bars()).most_common(1)[0][0]


if __name__ == "__main__":
    book.show(f"By verdict: {dict(exercise_1())}. Most are read from {exercise_2()}.")

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.tasks.addition import ALPHABET, problems, work

numbers = st.integers(0, 10**7)


@given(numbers, numbers)
def test_worked_steps_add_up(first, second):
    *steps, answer = work(first, second).split(" ")
    assert answer == f"#{first + second}"
    carry, digits = 0, ""
    for place, step in enumerate(steps):
        pair, total = step.split(":")
        assert pair == f"{first // 10**place % 10}{second // 10**place % 10}"
        assert int(total) == int(pair[0]) + int(pair[1]) + carry
        carry, digits = divmod(int(total), 10)[0], str(int(total) % 10) + digits
    assert int(f"{carry or ''}{digits}") == first + second


@pytest.mark.parametrize("split", ["train", "cold_start", "held_out"])
def test_rows_hold_what_training_needs(split):
    rows = problems(300, seed=1, split=split)
    assert len(rows) == 300
    for row in rows:
        first, second = row["prompt"].removesuffix("=").split("+")
        assert int(first) + int(second) == int(row["answer"])
        assert row["worked"] == work(int(first), int(second))
        assert min(len(first), len(second)) >= 2
        assert max(len(first), len(second)) <= 6
        assert set(row["prompt"] + row["worked"]) <= set(ALPHABET)


def test_splits_never_share_a_problem_whatever_the_seed():
    seen = {
        split: {
            row["prompt"]
            for seed in range(3)
            for row in problems(1500, seed=seed, split=split, min_digits=2, max_digits=2)
        }
        for split in ("train", "cold_start", "held_out")
    }
    assert not seen["train"] & seen["cold_start"]
    assert not seen["train"] & seen["held_out"]
    assert not seen["cold_start"] & seen["held_out"]
    assert len(set.union(*seen.values())) > 5500  # of 8,100 that exist


def test_rows_are_keyed_by_seed():
    assert problems(20, seed=4) == problems(20, seed=4)
    assert problems(20, seed=4) != problems(20, seed=5)

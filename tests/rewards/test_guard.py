from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from gspo.rewards.calls import Arguments, LostCallError, RewardError
from gspo.rewards.guard import MAX_LOST, Failure, score_guarded


class Scripted:
    """Fails a call as its worst completion says."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def call(self, arguments: Arguments, seconds: float) -> list[float | None]:
        completions = list(arguments["completions"])
        assert list(arguments["answer"]) == [text.upper() for text in completions]
        self.calls.append(completions)
        for text, error in (("hang", LostCallError), ("raise", RewardError)):
            if text in completions:
                raise error(f"{text} {seconds}")
        return [float("nan") if text == "nan" else None if text == "none" else 1.0 for text in completions]

    def close(self) -> None:
        raise AssertionError("the runner closes callers, not the guard")


ALONE = {"good": 1.0, "none": None, "raise": Failure("raise 9.0"), "hang": Failure("hang 9.0")}


@given(texts=st.lists(st.sampled_from(["good", "none", "raise", "hang", "nan"]), max_size=20), together=st.booleans())
@example(texts=["hang"] * (MAX_LOST - 1) + ["good", "hang"] * 2 + ["raise", "good"], together=False)
def test_each_rollout_gets_what_it_would_get_alone(texts: list[str], together: bool) -> None:
    caller = Scripted()
    arguments = {"completions": texts, "answer": [text.upper() for text in texts]}
    outcomes = score_guarded(caller, arguments, 9.0, together=together)
    assert len(outcomes) == len(texts)
    in_a_row = 0
    for text, outcome in zip(texts, outcomes, strict=True):
        if in_a_row == MAX_LOST:
            assert outcome == Failure(f"not called: {MAX_LOST} calls in a row before hung or crashed")
        elif text == "nan":
            assert outcome == Failure("returned nan; rewards must be finite")
            in_a_row = 0
        else:
            assert outcome == ALONE[text]
            in_a_row = in_a_row + 1 if text == "hang" else 0
    # A second call for a rollout happens only after one for all of them failed.
    for index, call in enumerate(caller.calls):
        assert len(call) == 1 or (together and index == 0 and call == texts)
    assert len(caller.calls) <= len(texts) + together

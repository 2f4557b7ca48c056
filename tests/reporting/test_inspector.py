"""What a model wrote is shown, and does nothing."""

import dataclasses
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.reporting.inspector import LONGEST, chosen_steps, inspect_step, spread, visible
from gspo.reporting.journal import write_rollouts
from gspo.reporting.run_records import read_runs
from gspo.types import Prompt
from tests.reporting.rollouts import make_rollout
from tests.reporting.run_folders import make_run

HOSTILE = '</pre></details><script>alert(1)</script><img src=x onerror="alert(2)"> &lt;b&gt; \x1b[2J \u202e'
KNOWN_TAGS = {"details", "summary", "pre", "p", "span"}


class Reader(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, attrs))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def inspected(tmp_path: Path, rollouts, most: int = 32) -> str:
    (run,) = read_runs([make_run(tmp_path / "r", [{}], rollouts={1: rollouts})])
    return inspect_step(run, 1, most)


def summaries(page: str) -> list[str]:
    return [Reader(part.partition("</summary>")[0]).text for part in page.split("<summary>")[1:]]


def test_hostile_text_is_text_wherever_it_stands(tmp_path: Path) -> None:
    message = {"role": HOSTILE, "content": HOSTILE}
    rollout = dataclasses.replace(
        make_rollout(),
        prompt=Prompt(HOSTILE, [message], (1,)),
        text=HOSTILE,
        messages=(message, {"role": "assistant", "content": None, HOSTILE: HOSTILE}),
        rewards={HOSTILE: 1.0},
    )
    dropped = dataclasses.replace(rollout, sample=1, reward=None, dropped=HOSTILE)
    page = Reader(inspected(tmp_path, [rollout, dropped]))
    assert {tag for tag, _ in page.tags} <= KNOWN_TAGS
    assert {name for _, attributes in page.tags for name, _ in attributes} <= {"class", "open"}
    assert page.open == []
    shown = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert page.text.count(shown) >= 5
    assert "\x1b" not in page.text


@given(st.text(st.characters(codec=None), max_size=30))
def test_visible_text_reads_back(text: str) -> None:
    page = visible(text)
    page.encode()
    reader = Reader(page)
    assert {tag for tag, _ in reader.tags} <= {"span"}
    assert reader.text == "".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in text)


def test_a_spelled_out_character_is_told_from_its_spelling() -> None:
    assert visible("\\x1b") == "\\x1b"
    assert visible("\x1b\x07!") == '<span class="unprintable">\\x1b\\x07</span>!'


def test_of_a_long_text_beginning_and_end_are_shown() -> None:
    page = visible("a" * LONGEST + "<" * LONGEST)
    assert page.startswith("a" * (LONGEST // 2) + "<span")
    assert f" [{LONGEST} characters left out] " in page
    assert page.endswith("&lt;" * (LONGEST // 2))
    assert visible("a" * LONGEST) == "a" * LONGEST


def test_best_responses_first_dropped_ones_last(tmp_path: Path) -> None:
    rewards = [0.25, 1.0, None, 0.5]
    page = inspected(tmp_path, [make_rollout(sample=i, reward=r) for i, r in enumerate(rewards)])
    step, group, *responses = summaries(page)
    assert step == "Step 1: 1 groups, 4 rollouts (stop 4)"
    assert group == "prompt 0; rewards 0.25 to 1, mean 0.583; 4 responses; 1 dropped: 2+2="
    assert [text.split(";")[0] for text in responses] == ["reward 1", "reward 0.5", "reward 0.25", "dropped"]
    assert "dropped: the reward function raised" in page


def test_a_response_has_its_figures(tmp_path: Path) -> None:
    rollout = dataclasses.replace(make_rollout(), trainable=(True, True, False), rewards={"exact": 1.0, "style": None})
    page = inspected(tmp_path, [rollout])
    assert summaries(page)[-1] == (
        "reward 1; advantage none; 3 tokens, 2 trainable; stop; policy version 3; sampler log-prob -0.15 a token"
    )
    assert "by function: exact 1, style does not apply" in page
    assert "ids: 0 1 2<" in page


def test_advantages_and_rewards_by_turn_and_by_token(tmp_path: Path) -> None:
    by_turn = dataclasses.replace(
        make_rollout(), turns=(0, -1, 1), trainable=(True, False, True), turn_rewards=(0.5, 0.5)
    )
    folder = make_run(tmp_path / "r", [{}])
    advantages = [[0.5, 0.0, -1.5], [0.1, 0.2, 0.3]]
    write_rollouts(folder / "rollouts" / "step-000001.jsonl.zst", [by_turn, make_rollout(sample=1)], advantages)
    (run,) = read_runs([folder])
    page = inspect_step(run, 1, 4)
    first, second = summaries(page)[2:]
    assert "advantage +0.5, -1.5 by turn;" in first
    assert "by function: exact 1; by turn: 0.5, 0.5<" in page
    assert "advantage +0.1 to +0.3 by token;" in second


def test_groups_with_most_signal_come_first_and_some_of_many_are_shown(tmp_path: Path) -> None:
    """Group k has rewards 0 and k: deviation k / 2. Six rollouts are three groups: the first, the last, one between."""
    rollouts = [make_rollout(slot, sample, reward=float(slot * sample)) for slot in range(9) for sample in range(2)]
    page = inspected(tmp_path, rollouts, most=6)
    lines = summaries(page)
    assert lines[0].endswith("; 3 groups shown")
    assert [line.split(";")[0] for line in lines if line.startswith("prompt")] == ["prompt 8", "prompt 4", "prompt 0"]


def test_of_a_large_group_some_are_shown(tmp_path: Path) -> None:
    page = inspected(tmp_path, [make_rollout(0, i, reward=float(i)) for i in range(10)], most=2)
    _, group, *responses = summaries(page)
    assert "2 of 10 responses shown" in group
    assert [text.split(";")[0] for text in responses] == ["reward 9", "reward 0"]


def test_a_group_of_dropped_rollouts_and_an_empty_response(tmp_path: Path) -> None:
    rollout = dataclasses.replace(make_rollout(length=0, reward=None), text="")
    page = inspected(tmp_path, [rollout])
    assert summaries(page)[1] == "prompt 0; 1 responses; 1 dropped: 2+2="
    assert "(empty)" in page


def test_a_damaged_file_does_not_hide_the_rest(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", [{}], rollouts={1: [make_rollout()]})
    (folder / "rollouts" / "step-000001.jsonl.zst").write_bytes(b"no")
    (run,) = read_runs([folder])
    assert "cannot be read" in inspect_step(run, 1, 4)


@pytest.mark.parametrize(
    ("count", "wanted"), [(1, [0]), (2, [0, 9]), (4, [0, 3, 6, 9]), (10, list(range(10))), (99, list(range(10)))]
)
def test_a_spread_has_both_ends(count: int, wanted: list[int]) -> None:
    assert spread(list(range(10)), count) == wanted


def test_steps_are_chosen_or_spread(tmp_path: Path) -> None:
    batch = [make_rollout()]
    (run,) = read_runs([make_run(tmp_path / "r", [{}], rollouts=dict.fromkeys([1, 2, 3, 4, 9], batch))])
    assert chosen_steps(run, [], 3) == [1, 3, 9]
    assert chosen_steps(run, [9, 2, 7, 2], 3) == [2, 9]

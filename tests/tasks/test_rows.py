from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.config import FunctionTask, JsonlTask, ReasoningGymTask
from gspo.errors import BadInputError
from gspo.tasks.rows import load_rows
from gspo.tasks.wording import normalise


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    return path


def jsonl(path: Path, **settings: Any) -> JsonlTask:
    return JsonlTask(kind="jsonl", path=path, **{"held_out": 0, **settings})


def test_rows_keep_text_and_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": "2+2=", "answer": "4", "level": 1}, {"prompt": "1+1="}])
    rows = load_rows(jsonl(path), seed=0)
    assert [row.content for row in rows.train] == ["2+2=", "1+1="]
    assert rows.train[0].columns == {"answer": "4", "level": 1}
    assert [row.where for row in rows.train] == [f"{path}:1", f"{path}:2"]
    assert rows.held_out == ()
    assert rows.default_reward is None


def test_template_takes_any_column_and_leaves_braces_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"q": "Is {x} a {set}?", "unit": "cm"}])
    config = jsonl(path, prompt_column="q", template="{prompt} In {unit}; answer as \\boxed{} or {{unit}}, {q}")
    (row,) = load_rows(config, seed=0).train
    assert row.content == "Is {x} a {set}? In cm; answer as \\boxed{} or {unit}, Is {x} a {set}?"


@pytest.mark.parametrize(
    ("template", "message"),
    [("{promt}", "task.template: {promt} is no column"), ("Answer.", "no column stands in it")],
)
def test_template_that_cannot_work(tmp_path: Path, template: str, message: str) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": "a", "answer": 1}])
    with pytest.raises(BadInputError, match=message):
        load_rows(jsonl(path, template=template), seed=0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', r"data.jsonl:3: not valid JSON"),
        ("[1]", r"data.jsonl:3: found a JSON list"),
        ('{"question": "a", "answer": 1}', r"data.jsonl:3: no column 'prompt'; the columns are question, answer"),
        ('{"prompt": "  "}', r"data.jsonl:3: the prompt is empty"),
        ('{"prompt": 7}', r"data.jsonl:3: the prompt is of type int"),
        ('{"prompt": null}', r"data.jsonl:3: the prompt is of type NoneType"),
        ('{"prompt": [{"role": "user"}]}', r"data.jsonl:3: message 0 of the prompt"),
        ('{"prompt": [{"role": "assistant", "content": "4"}]}', r"data.jsonl:3: the prompt ends with an assistant"),
        ("[" * 100_000, r"data.jsonl:3: not valid JSON"),
        ('{"prompt": "\xff"}', r"data.jsonl:3: not UTF-8"),
        ('{"prompt": "3+\\uD83D="}', r"data.jsonl:3: half a surrogate pair"),
        ('{"prompt": "3+3=", "answer": ["\\udead"]}', r"data.jsonl:3: half a surrogate pair"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(BadInputError, match=message) as caught:
        load_rows(jsonl(path), seed=0)
    assert "\n" not in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"task\.path: .*none\.jsonl: no such file"):
        load_rows(jsonl(tmp_path / "none.jsonl"), seed=0)
    with pytest.raises(BadInputError, match=r"task\.path: .*cannot be read"):
        load_rows(jsonl(tmp_path), seed=0)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BadInputError, match=r"task\.path: .*empty\.jsonl has no rows"):
        load_rows(jsonl(tmp_path / "empty.jsonl"), seed=0)


def test_byte_order_mark_and_line_separators_inside_text(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "a\u2028b"}\r\n'.encode())
    assert load_rows(jsonl(path), seed=0).train[0].content == "a\u2028b"


def test_repeats_are_told_by_normalised_text(tmp_path: Path) -> None:
    texts = ["What is 2+2?", " what  is\n2+2? ", "What is ２+2?", "What is 2+3?", "Straße", "STRASSE"]
    path = write(tmp_path / "data.jsonl", [{"prompt": text, "n": i} for i, text in enumerate(texts)])
    rows = load_rows(jsonl(path), seed=0)
    assert [row.columns["n"] for row in rows.train] == [0, 3, 4]
    assert rows.duplicates == 3


def test_the_same_question_with_another_context_is_another_question(tmp_path: Path) -> None:
    data = [{"prompt": "Who?", "context": "Ann"}, {"prompt": "Who?", "context": "Bob"}]
    path = write(tmp_path / "data.jsonl", data)
    assert len(load_rows(jsonl(path, template="{context}: {prompt}"), seed=0).train) == 2
    assert len(load_rows(jsonl(path), seed=0).train) == 1


def test_rewording_the_template_keeps_the_split(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": f"q{i}"} for i in range(30)])
    plain = load_rows(jsonl(path, held_out=9), seed=1)
    reworded = load_rows(jsonl(path, held_out=9, template="{prompt} Answer briefly."), seed=1)
    assert [row.key for row in plain.held_out] == [row.key for row in reworded.held_out]


def test_held_out_depends_on_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": f"q{i}"} for i in range(100)])
    first, again, other = (load_rows(jsonl(path, held_out=50), seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert {row.key for row in first.held_out} != {row.key for row in other.held_out}


words = st.text(alphabet="ab \tA\u00c5\u212b2２", min_size=1, max_size=4).filter(str.strip)


@given(texts=st.lists(words, min_size=1, max_size=20), more=st.lists(words, max_size=10), data=st.data())
@settings(deadline=None, max_examples=60)
def test_split_never_overlaps_and_is_stable(texts: list[str], more: list[str], data: st.DataObject) -> None:
    held_out, seed = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 3))
    shuffled = data.draw(st.permutations(texts))

    def split(rows: list[str]) -> tuple[set[str], set[str]] | None:
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder) / "data.jsonl", [{"prompt": row} for row in rows])
            if held_out >= len({normalise(row) for row in rows}):
                with pytest.raises(BadInputError, match=f"task.held_out = {held_out}: there are only"):
                    load_rows(jsonl(path, held_out=held_out), seed=seed)
                return None
            found = load_rows(jsonl(path, held_out=held_out), seed=seed)
        assert len(found.held_out) == held_out
        assert len(found.train) + len(found.held_out) + found.duplicates == len(rows)
        return {row.question for row in found.train}, {row.question for row in found.held_out}

    before = split(texts)
    assert split(shuffled) == before
    after = split(texts + more)
    if before is not None:
        assert not before[0] & before[1]
        # New rows never move a question that was trained on into the evaluation.
        assert after is not None
        assert not before[0] & after[1]


def test_held_out_file_is_taken_out_of_training(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [{"prompt": "A"}, {"prompt": "B"}, {"prompt": "b "}, {"prompt": "C"}])
    test = write(tmp_path / "test.jsonl", [{"prompt": "b"}, {"prompt": "D"}, {"prompt": "d"}])
    rows = load_rows(jsonl(train, held_out_path=test), seed=0)
    assert [row.content for row in rows.train] == ["A", "C"]
    assert [row.content for row in rows.held_out] == ["b", "D"]
    assert (rows.duplicates, rows.overlapping) == (2, 1)
    assert rows.notes() == [
        "task: 2 rows repeat a question and are left out; 4 questions remain",
        "task: 1 training questions are held out as well and are not trained on",
    ]
    assert load_rows(jsonl(test, held_out=1), seed=0).notes()[1:] == []
    with pytest.raises(BadInputError, match="no question is left to train on"):
        load_rows(jsonl(test, held_out_path=test), seed=0)


def test_chat_prompts(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "2+2="}]
    path = write(tmp_path / "data.jsonl", [{"prompt": messages, "answer": "4"}])
    assert load_rows(jsonl(path), seed=0).train[0].content == messages
    with_system = load_rows(jsonl(path, system_prompt="Be brief."), seed=0).train[0]
    assert with_system.content == [{"role": "system", "content": "Be brief."}, *messages]
    # The system prompt is not part of the question.
    assert with_system.key == load_rows(jsonl(path), seed=0).train[0].key
    with pytest.raises(BadInputError, match=r"task\.template"):
        load_rows(jsonl(path, template="{prompt}!"), seed=0)
    with pytest.raises(BadInputError, match=r"task\.chat_template is false"):
        load_rows(jsonl(path, chat_template=False), seed=0)
    twice = write(tmp_path / "twice.jsonl", [{"prompt": [{"role": "system", "content": "x"}, *messages]}])
    with pytest.raises(BadInputError, match=r"task\.system_prompt is set as well"):
        load_rows(jsonl(twice, system_prompt="Be brief."), seed=0)


def test_function_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rows.py").write_text(
        "def rows(count):\n    for i in range(count):\n        yield {'prompt': f'q{i}', 'answer': i}\n"
        "def wrong():\n    return ['text']\n"
        "number = 3\n"
    )
    (tmp_path / "broken_rows.py").write_text("import no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(function: str, **parameters: Any) -> Any:
        task = FunctionTask(kind="function", function=function, parameters=parameters, held_out=1)
        return load_rows(task, seed=0)

    assert len(load("my_rows:rows", count=4).train) == 3
    for function, message in [
        ("my_rows:rows", r"task\.function = 'my_rows:rows' failed \(TypeError: .*count"),
        ("my_rows:wrong", "my_rows:wrong row 0: found a str"),
        ("my_rows:missing", "my_rows has no function 'missing'"),
        ("my_rows:number", "my_rows has no function 'number'"),
        ("nowhere_rows:rows", "importing nowhere_rows failed"),
        ("broken_rows:rows", r"no_such_module.* at broken_rows\.py:1"),
    ]:
        with pytest.raises(BadInputError, match=message):
            load(function)


def reasoning_gym(**settings: Any) -> ReasoningGymTask:
    parameters = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    values = {"name": "chain_sum", "parameters": parameters, "size": 40, "held_out": 5, **settings}
    return ReasoningGymTask(kind="reasoning_gym", **values)


def test_reasoning_gym_rows() -> None:
    rows = load_rows(reasoning_gym(), seed=3)
    assert len(rows.train) + 5 + rows.duplicates == 40
    row = rows.train[0]
    assert set(row.columns) == {"question", "answer", "metadata"}
    assert row.content == row.columns["question"]
    left, sign, right = row.columns["metadata"]["expression"].split()
    assert int(row.columns["answer"]) == int(left) + (1 if sign == "+" else -1) * int(right)
    assert rows == load_rows(reasoning_gym(), seed=3)
    assert {r.key for r in rows.held_out} != {r.key for r in load_rows(reasoning_gym(), seed=4).held_out}
    assert rows.default_reward is not None
    assert rows.default_reward.function == "reasoning_gym"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "chain_sums"}, r"task\.name = 'chain_sums': .*did you mean chain_sum\?"),
        ({"parameters": {"terms": 3}}, r"task\.parameters: refused .*terms"),
        ({"parameters": {"min_terms": 0}}, r"task\.parameters: refused .*min_terms must be positive"),
        ({"parameters": {"size": 3}}, r"task\.parameters\.size"),
        ({"held_out": 40}, r"task\.held_out = 40: there are only \d+ distinct questions"),
    ],
)
def test_reasoning_gym_bad_input(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        load_rows(reasoning_gym(**settings), seed=0)


def test_rows_load_without_torch(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": "a"}])
    code = (
        "import sys; from gspo.config import JsonlTask; from gspo.tasks.rows import load_rows;"
        f"load_rows(JsonlTask(kind='jsonl', path={str(path)!r}, held_out=0), seed=0);"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

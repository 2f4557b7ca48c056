"""`gspo eval`: the figures of a run are those that its training recorded; nothing loads for a bad setting."""

import json
from pathlib import Path

import pytest

import gspo
from gspo.cli import main
from gspo.config import build_config
from gspo.errors import BadInputError
from gspo.reporting.files import read_lines
from gspo.reporting.run_folder import RunFolder
from gspo.training.evaluation_config import evaluation_config
from tests.policy.tiny import save_tiny

TASK = {"kind": "function", "function": "tests.training.tiny_task:rows", "held_out": 6}
REWARD = {"functions": [{"function": "tests.training.tiny_task:early_words"}], "correct_at": 0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), scale=2.0)


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = build_config(
        {
            "model": {"path": str(model)},
            "task": TASK,
            "reward": REWARD,
            "run": {"dir": str(tmp_path_factory.mktemp("runs")), "name": "r", "seed": 3},
            "rollout": {"prompts": 2, "group_size": 2, "max_tokens": 5, "temperature": 0.9},
            "training": {"steps": 2, "minibatches": 2},
            "optimizer": {"learning_rate": 1e-3},
        }
    )
    return gspo.train(config).run


def test_the_evaluation_of_a_run_agrees_with_what_training_recorded(run: Path) -> None:
    report = gspo.evaluate(run, samples=4)
    last = read_lines(run / "evaluations.jsonl")[-1]
    recorded = {row["key"]: (row["correct"], row["scored"]) for row in last["prompts"]}
    greedy = report.greedy
    assert dict(zip(greedy.keys, zip(greedy.correct, greedy.scored, strict=True), strict=True)) == recorded
    assert greedy.accuracy.value == last["accuracy"]["value"]
    assert report.sampled.sampling.temperature == 0.9
    assert report.sampled.scored == (4,) * 6
    assert list(report.estimates()) == ["greedy", "pass@1", "pass@2", "pass@4"]
    assert gspo.evaluate(run, samples=4) == report  # the same noise every time


def test_a_model_is_evaluated_on_a_table_or_a_file_or_flags_alike(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "task.toml"
    task = '[task]\nkind = "function"\nfunction = "tests.training.tiny_task:rows"\nheld_out = 6\n'
    reward = '[reward]\ncorrect_at = 0.5\n[[reward.functions]]\nfunction = "tests.training.tiny_task:early_words"\n'
    file.write_text(f'[model]\npath = "another"\n{task}{reward}[rollout]\nmax_tokens = 5\n')
    assert main(["eval", str(model), "--task", str(file), "--samples", "2", "--json"]) == 0
    from_file = json.loads(capsys.readouterr().out)
    assert [len(from_file[part]["prompts"]) for part in ("greedy", "sampled")] == [6, 6]
    flags = {
        "task.kind": "function",
        "task.function": TASK["function"],
        "task.held_out": "6",
        "rollout.max_tokens": "5",
    }
    flags |= {"reward.functions": '[{ function = "tests.training.tiny_task:early_words" }]', "reward.correct_at": "0.5"}
    words = [word for name, text in flags.items() for word in (f"--{name}", text)]
    assert main(["eval", str(model), "--samples=2", *words]) == 0
    table = capsys.readouterr().out
    assert f"{from_file['greedy']['accuracy']['value']:.3f}" in table
    settings = {"rollout.max_tokens": "5", "reward.correct_at": "0.5"}
    settings |= {"reward.functions": flags["reward.functions"]}
    assert gspo.evaluate(model, TASK, samples=2, settings=settings).as_record() == from_file


def test_settings_of_an_evaluation(run: Path, tmp_path: Path) -> None:
    config = evaluation_config(run, samples=3, overrides={"task.held_out": "4"})
    assert config.model.path == str(run)
    assert (config.evaluation.samples, config.evaluation.temperature) == (3, 0.9)
    assert (config.task.held_out, config.run.seed, config.rollout.max_tokens) == (4, 3, 5)
    assert evaluation_config(run, samples=3, temperature=0.2).evaluation.temperature == 0.2
    other = tmp_path / "other.toml"
    other.write_text('[task]\nkind = "jsonl"\npath = "x.jsonl"\n')
    replaced = evaluation_config(run, other, samples=1)
    assert (replaced.task.kind, replaced.rollout.max_tokens, replaced.run.seed) == ("jsonl", 256, 0)
    other.write_text("[task]\n")
    with pytest.raises(BadInputError, match=r"other\.toml: task\.kind: missing"):
        evaluation_config(run, other, samples=1)


def test_what_cannot_be_evaluated_is_one_line(run: Path, model: Path) -> None:
    with pytest.raises(BadInputError, match=r"--task: missing, and .* is not the folder of a run"):
        gspo.evaluate(model)
    with pytest.raises(BadInputError, match=r"task\.held_out = 0: there is nothing to evaluate on"):
        gspo.evaluate(run, settings={"task.held_out": "0"})
    folder = RunFolder.create(RunFolder.open(run).read_config({"run.name": "empty"}))
    with pytest.raises(BadInputError, match="no checkpoint"):
        gspo.evaluate(folder.path)


def test_a_run_can_be_the_start_of_another(run: Path) -> None:
    config = RunFolder.open(run).read_config({"model.path": str(run), "run.name": "second", "training.steps": "1"})
    assert gspo.train(config).checkpoint.name == "step-000001"


def test_an_adapters_run_is_evaluated_though_it_and_its_model_have_moved(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", scale=2.0)
    trained = gspo.train(
        build_config(
            {
                "model": {"path": str(model), "lora": {"rank": 2}},
                "task": TASK,
                "reward": REWARD,
                "run": {"dir": str(tmp_path / "runs"), "name": "r"},
                "rollout": {"prompts": 2, "group_size": 2, "max_tokens": 5},
                "training": {"steps": 1, "minibatches": 1},
                "evaluation": {"every": 0},
            }
        )
    ).run
    before = gspo.evaluate(trained, samples=1)
    moved = model.rename(tmp_path / "elsewhere")
    run = trained.rename(tmp_path / "moved")
    with pytest.raises(BadInputError, match=r"belongs to .*model', which does not exist; say where it is now"):
        gspo.evaluate(run, samples=1)
    assert gspo.evaluate(run, samples=1, settings={"model.path": str(moved)}) == before
    resumed = RunFolder.open(run).read_config({"model.path": str(moved), "training.steps": "2"})
    assert gspo.train(resumed, resume=run).checkpoint.name == "step-000002"
    assert len(gspo.evaluate(run, samples=1).greedy.keys) == 6  # the resumed run has written the new place down

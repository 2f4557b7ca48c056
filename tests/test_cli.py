"""The command: quick where it can be, one line per problem, the right exit status."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gspo
from gspo.cli import main
from gspo.config.flags import split_overrides
from gspo.errors import BadInputError, GspoError

CONFIG = """
[model]
path = "no-such-model"
[task]
kind = "jsonl"
path = "rows.jsonl"
held_out = 1
[[reward.functions]]
function = "exact"
[rollout]
prompts = 4
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}=", "answer": "{2 * i}"}}\n' for i in range(6)))
    Path("a.toml").write_text(CONFIG)
    return Path("a.toml")


def complaints(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 2) -> list[str]:
    assert main(argv) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


LIGHT = """
import sys
from gspo.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as stop:
    status = stop.code or 0
heavy = sorted({"torch", "transformers", "numpy", "rich"} & set(sys.modules))
print(status, heavy, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["train", "--help"], 0),
        (["train", "no.toml"], 2),
        (["train", "a.toml", "--training.stps", "3"], 2),
        (["train", "a.toml", "--tracking.trackers", '["wandb"]'], 2),
        (["train", "--resume", "no-run"], 2),
        (["eval", "no-model"], 2),
        (["eval", "no-model", "--task", "a.toml", "--rollout.max_tokens", "0"], 2),
    ],
)
def test_help_and_wrong_settings_load_nothing_heavy(config: Path, argv: list[str], status: int) -> None:
    del config
    source = Path(gspo.__file__).parents[1]
    program = f"import sys; sys.path.insert(0, {str(source)!r}); sys.modules['wandb'] = None\n{LIGHT}"
    done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == f"{status} []", done.stderr


def test_importing_the_package_is_light_and_its_names_are_there() -> None:
    source = Path(gspo.__file__).parents[1]
    program = f"import sys; sys.path.insert(0, {str(source)!r}); import gspo; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert all(callable(getattr(gspo, name)) for name in gspo.__all__)
    assert set(dir(gspo)) == set(gspo.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        gspo.trian  # noqa: B018


def test_version_and_python_m(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"gspo {gspo.__version__}\n"


def test_help_lists_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in (
        (["--help"], ["train", "eval", "serve-command"]),
        (["eval", "-h"], ["--samples", "--task", "MODEL_OR_RUN"]),
    ):
        with pytest.raises(SystemExit):
            main(argv)
        shown = capsys.readouterr().out
        assert all(word in shown for word in words)


def test_serve_command_prints_a_line_for_each_server(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    for name in ("config.json", "model.safetensors"):
        Path("model", name).write_text("{}")
    addresses = '["http://10.0.0.5:8000", "http://10.0.0.6:8000"]'
    flags = [
        "--model.path",
        "model",
        "--model.device",
        "cpu",
        "--model.dtype",
        "float32",
        "--rollout.servers",
        addresses,
    ]
    assert main(["serve-command", str(config), *flags]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "--host 10.0.0.5" in first
    assert "--host 10.0.0.6" in second
    assert "--dtype float32" in first
    assert main(["serve-command", str(config), "--model.path", "model"]) == 0
    assert "--host 127.0.0.1 --port 8000" in capsys.readouterr().out


def test_overrides_are_told_from_flags_wherever_they_stand() -> None:
    argv = ["train", "--a.b", "1", "c.toml", "--d.e=x=y", "--dry-run", "--a.b", "-2"]
    assert split_overrides(argv) == (["train", "c.toml", "--dry-run"], {"a.b": "-2", "d.e": "x=y"})
    for argv in (["--a.b"], ["--a.b", "--c.d", "1"]):
        with pytest.raises(BadInputError, match=r"^--a\.b: needs a value"):
            split_overrides(argv)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["train"], "CONFIG.toml: missing; give a config file, or a run to go on with: --resume RUN"),
        (["train", "no.toml"], "no.toml: no such file; give the path of a TOML config"),
        (["train", "a.toml", "--steps", "3"], "--steps: unknown flag; did you mean --training.steps?"),
        (
            ["train", "a.toml", "--learning-rate=1"],
            "--learning-rate=1: unknown flag; did you mean --optimizer.learning_rate?",
        ),
        (["train", "a.toml", "--xyzzy"], "--xyzzy: unknown flag; see gspo --help"),
        (["train", "a.toml", "b.toml"], "b.toml: unexpected; see gspo --help"),
        (["train", "a.toml", "--training.steps"], "--training.steps: needs a value, as in --training.steps VALUE"),
        (["train", "a.toml", "--training.steps", "x"], "--training.steps: found 'x', should be a whole number"),
        (["train", "--resume", "x"], "x: not the folder of a run (no config.json of one and checkpoints/ in it)"),
        (
            ["train", "a.toml", "--resume", "x"],
            "a.toml: --resume goes on under the run's own config; leave the file out",
        ),
        (["eval", "m", "--samples", "0"], "--samples: found 0, should be 1 or more"),
        (["eval", "m", "--temperature", "-1"], "--temperature: found -1.0, should be 0 (greedy) or more"),
        (["eval", "m", "--temperature", "nan"], "--temperature: found nan, should be 0 (greedy) or more"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    config: Path, capsys: pytest.CaptureFixture[str], argv: list[str], line: str
) -> None:
    del config
    assert complaints(capsys, *argv) == [f"gspo: {line}"]


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = complaints(capsys, "trian")
    assert "invalid choice: 'trian'" in line


def test_each_wrong_setting_has_a_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = complaints(capsys, "train", str(config), "--training.stps", "3", "--rollout.group_size", "1")
    assert sorted(lines) == [
        "gspo: --rollout.group_size: found 1, should be greater than or equal to 2",
        "gspo: --training.stps: unknown setting; did you mean training.steps?",
    ]


def test_a_taken_name_is_known_before_anything_loads(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/x").mkdir(parents=True)
    (line,) = complaints(capsys, "train", str(config), "--run.name", "x")
    assert line == "gspo: run.name: runs/x exists; choose another name, or go on with --resume runs/x"


class FakeTraining:
    """Stands in for `train`: what it was called with, and what it does to the run folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: BaseException | None = None, begins: bool = True):
        self.calls: list[tuple[Any, Any]] = []
        self.fails = fails
        self.begins = begins
        monkeypatch.setattr("gspo.training.loop.train", self)

    def __call__(self, config: Any, *, resume: Path | None) -> None:
        from gspo.reporting.run_folder import RunFolder

        self.calls.append((config, resume))
        if self.fails is not None and not self.begins:
            raise self.fails
        run = RunFolder.create(config) if resume is None else RunFolder.open(resume)
        lines = [
            {"step": step, "accuracy": {"value": v, "low": v - 0.05, "high": v + 0.05, "n": 50}}
            for step, v in ((0, 0.1), (4, 0.5))
        ]
        run.evaluations_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if self.fails is not None:
            raise self.fails


def test_a_finished_run_shows_before_and_after_and_where_it_lies(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = FakeTraining(monkeypatch)
    assert main(["train", str(config), "--training.steps", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ((used, _),) = training.calls
    assert used.training.steps == 4
    assert used.run.name.startswith("a-2")  # the config file's name and the time
    assert "held-out accuracy (greedy)" in lines[0]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells == [["before", "0.100", "0.050 to 0.150", "50"], ["after step 4", "0.500", "0.450 to 0.550", "50"]]
    assert lines[-1] == f"run: runs/{used.run.name}"


def test_resuming_takes_the_runs_config_and_flags(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = FakeTraining(monkeypatch)
    assert main(["train", str(config), "--run.name", "x", "--training.epochs", "3"]) == 0
    assert main(["train", "--resume", "runs/x", "--training.steps", "7"]) == 0
    _, second = training.calls
    assert second[1] == Path("runs/x")
    assert (second[0].training.steps, second[0].training.epochs) == (7, 3)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("begun", "line"),
    [
        (True, "gspo: interrupted; go on with: gspo train --resume runs/x"),
        (False, "gspo: interrupted; nothing was begun; start again"),
    ],
)
def test_ctrl_c_says_how_to_go_on(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, begun: bool, line: str
) -> None:
    FakeTraining(monkeypatch, fails=KeyboardInterrupt(), begins=begun)
    assert complaints(capsys, "train", str(config), "--run.name", "x", status=130) == [line]


def test_sigterm_says_how_to_go_on(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = FakeTraining(monkeypatch)

    def terminated(config: Any, *, resume: Path | None) -> None:
        training(config, resume=resume)
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal did not end the run")

    monkeypatch.setattr("gspo.training.loop.train", terminated)
    before = signal.getsignal(signal.SIGTERM)
    (line,) = complaints(capsys, "train", str(config), "--run.name", "x", status=143)
    assert line == "gspo: terminated; go on with: gspo train --resume runs/x"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_cannot_go_on_is_status_1(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeTraining(monkeypatch, fails=GspoError("step 3: too many rollouts dropped"))
    assert complaints(capsys, "train", str(config), status=1) == ["gspo: step 3: too many rollouts dropped"]


def test_a_missing_model_is_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = complaints(capsys, "train", str(config), "--model.path", "./no-such-model")
    assert line == "gspo: model.path: './no-such-model' does not exist; give a folder or a hub id such as org/name"
    (line,) = complaints(capsys, "eval", "./no-such-model", "--task", str(config))
    assert line.startswith("gspo: model.path: './no-such-model' does not exist")


def test_a_missing_data_file_is_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = complaints(capsys, "train", str(config), "--task.path", "no.jsonl")
    assert "no.jsonl" in line


def test_export_merges_an_adapter_into_one_whole_model(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    from gspo.config import LoraConfig
    from gspo.policy.export import named_tensors, save_policy
    from gspo.policy.load import load_policy
    from tests.policy.tiny import save_tiny

    policy = load_policy(save_tiny(tmp_path / "base"), lora=LoraConfig(rank=2))
    with torch.no_grad():
        for _, parameter in policy.trainable_parameters():
            parameter.add_(0.1)
    save_policy(policy, tmp_path / "adapter")
    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "whole")]) == 0
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32).state_dict()
    expected = dict(named_tensors(policy))
    base = load_policy(tmp_path / "base").model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(weights["model.layers.0.mlp.up_proj.weight"], base["model.layers.0.mlp.up_proj.weight"])
    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "whole")]) == 2
    (tmp_path / "base").rename(tmp_path / "moved")
    export = ["export", str(tmp_path / "adapter"), str(tmp_path / "again")]
    assert main(export) == main([*export, "--training.steps", "3"]) == 2
    assert main([*export, "--model.path", str(tmp_path / "moved")]) == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32).state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in again.items())

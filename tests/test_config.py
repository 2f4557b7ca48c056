"""Settings: defaults < file < flags, and one clear line for each that cannot work."""

import copy
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo.config import Config, build_config, load_config
from gspo.config.checks import BY_RESPONSE
from gspo.config.fields import setting_fields, setting_names, takes_text
from gspo.errors import BadInputError
from gspo.objectives import LOSSES

ROOT = Path(__file__).parents[1]
HELD_OUT_APART = {"kind": "jsonl", "path": "a.jsonl", "held_out_path": "test.jsonl", "held_out": 5}
BASE: dict[str, Any] = {"model": {"path": "m"}, "task": {"kind": "reasoning_gym", "name": "chain_sum"}}


def settings(**tables: Any) -> dict[str, Any]:
    """The least that a config needs, with `tables` put over it."""
    merged = copy.deepcopy(BASE)
    if tables.get("task", {}).get("kind") == "jsonl":
        del merged["task"]
    for name, table in tables.items():
        merged[name] = merged.get(name, {}) | table if isinstance(table, dict) else table
    return merged


def complaints(data: dict[str, Any], overrides: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(BadInputError) as caught:
        build_config(data, overrides, source="a.toml")
    return str(caught.value).splitlines()


def test_defaults_then_file_then_flags(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(
        '[model]\npath = "m"\n[task]\nkind = "reasoning_gym"\nname = "x"\n[training]\nsteps = 7\nepochs = 2\n'
    )
    config = load_config(path, {"training.epochs": "3", "task.parameters.max_terms": "4"})
    assert (config.training.minibatches, config.training.steps, config.training.epochs) == (4, 7, 3)
    assert config.task.kind == "reasoning_gym"
    assert config.task.parameters == {"max_terms": 4}


def test_the_papers_numbers_are_the_defaults() -> None:
    config = build_config(BASE)
    assert config.training.minibatches == 4
    assert config.objective.name == "gspo"
    assert config.objective.clip_low is None  # the objective's own, see gspo.objectives.CLIP_RANGES
    assert config.objective.kl_weight == 0


CONVERSATIONS = {"kind": "multi_turn", "environment": "a:B"}


@pytest.mark.parametrize(
    ("objective", "task", "reason"),
    [
        ({"credit": "turn"}, CONVERSATIONS, 'objective.credit = "turn" needs an advantage per token'),
        ({"name": "gmpo", "credit": "token"}, None, 'objective.credit = "token" needs an advantage per token'),
        ({"ratio_span": "turn"}, CONVERSATIONS, 'only objective.name = "gspo_token" takes a ratio per turn'),
        (
            {"name": "gspo_token", "credit": "turn"},
            None,
            'objective.credit = "turn": task.kind = "reasoning_gym" has one',
        ),
        (
            {"name": "gspo_token", "ratio_span": "turn"},
            None,
            'objective.ratio_span = "turn": task.kind = "reasoning_gym"',
        ),
        ({"name": "gspo_token", "credit": "token"}, CONVERSATIONS, "an environment rewards turns, not tokens"),
        ({}, {**CONVERSATIONS, "template": "Q: {prompt}"}, "task.template: the environment words its own messages"),
        (
            {},
            {**CONVERSATIONS, "path": "a.jsonl", "row_parameters": {"n": 1}},
            "task.row_parameters: the rows come from",
        ),
    ],
)
def test_credit_that_cannot_work_is_refused(
    objective: dict[str, Any], task: dict[str, Any] | None, reason: str
) -> None:
    data = {"model": {"path": "m"}, "task": task or BASE["task"], "objective": objective}
    assert any(reason in line for line in complaints(data))


def test_which_objectives_take_one_advantage_per_response_only() -> None:
    ones, rows = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    for name, loss in LOSSES.items():
        if name in BY_RESPONSE:
            with pytest.raises((ValueError, TypeError), match="advantages"):
                loss(-ones, -ones, ones, rows)
        else:
            loss(-ones, -ones, ones, rows)


def test_credit_by_turn_needs_no_warning_that_it_is_gspo() -> None:
    data = {"model": {"path": "m"}, "task": CONVERSATIONS, "objective": {"name": "gspo_token", "credit": "turn"}}
    assert not any("section 4.3" in line for line in build_config(data).warnings())
    data["objective"] = {"discount": 0.5}
    assert any("objective.discount has no effect" in line for line in build_config(data).warnings())


def test_every_objective_of_the_config_exists_and_the_other_way_round() -> None:
    (annotation,) = (field.annotation for name, field, _ in setting_fields() if name == "objective.name")
    assert set(annotation.__args__) == set(LOSSES)  # type: ignore[union-attr]


def test_json_out_reads_back_equal() -> None:
    data = settings(model={"lora": {"targets": ["q_proj"]}}, optimizer={"betas": [0.8, 0.9]}, run={"dir": "/x"})
    config = build_config(data)
    assert build_config(json.loads(config.model_dump_json())) == config


def test_the_least_that_is_needed_is_named() -> None:
    assert complaints({}) == [
        "a.toml: model.path: missing; give it in the file or as --model.path VALUE",
        "a.toml: task.kind: missing; give one of jsonl, datasets, reasoning_gym, function, multi_turn in the "
        "file or as --task.kind VALUE",
    ]


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"training": {"stps": 3}}, "training.stps: unknown setting; did you mean training.steps?"),
        ({"steps": 3}, "steps: unknown setting; did you mean training.steps?"),
        ({"trainig": {"steps": 3}}, "trainig: unknown setting; did you mean training?"),
        ({"xyzzy": {}}, "xyzzy: unknown setting; docs/settings.md lists all"),
        ({"task": {"nme": "x"}}, "task.nme: unknown setting; did you mean task.name?"),
        ({"model": {"lora": {"rnk": 8}}}, "model.lora.rnk: unknown setting; did you mean model.lora.rank?"),
        (
            {"reward": {"functions": [{"function": "exact", "wieght": 2}]}},
            "reward.functions[0].wieght: unknown setting; did you mean reward.functions.weight?",
        ),
        ({"training": {"steps": "8"}}, "training.steps: found '8', should be a whole number"),
        ({"training": {"steps": True}}, "training.steps: found True, should be a whole number"),
        ({"training": {"steps": 2.0}}, "training.steps: found 2.0, should be a whole number"),
        ({"model": {"path": 3}}, "model.path: found 3, should be text"),
        ({"model": {"trust_remote_code": 1}}, "model.trust_remote_code: found 1, should be true or false"),
        ({"rollout": {"stop": "x"}}, "rollout.stop: found 'x', should be a list"),
        (
            {"reward": {"functions": {"function": "math"}}},
            "reward.functions: found {'function': 'math'}, should be a list: [[reward.functions]] in the file, "
            """or as a flag '[{function = "package.module:function"}]'""",
        ),
        ({"rollout": {"stop": [""]}}, "rollout.stop[0]: found '', should have at least 1 character"),
        ({"model": {"lora": {"targets": 5}}}, "model.lora.targets: found 5, should be text, or be a list"),
        ({"rollout": 5}, "rollout: found 5, should be a table of settings"),
        ({"rollout": {"temperature": 0.0}}, "rollout.temperature: found 0.0, should be greater than 0"),
        (
            {"rollout": {"servers": ["10.0.0.5:8000"]}},
            "rollout.servers[0]: found '10.0.0.5:8000', should be http://HOST:PORT",
        ),
        ({"rollout": {"engine": "tgi"}}, "rollout.engine: found 'tgi', should be 'transformers', 'vllm' or 'server'"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size: found 1, should be greater than or equal to 2"),
        ({"objective": {"clip_low": 1.5}}, "objective.clip_low: found 1.5, should be less than or equal to 1"),
        (
            {"objective": {"clip_low": 1.0}},
            "objective.clip_low = 1: no ratio is below 0, so that gspo would never clip on the low side; give a value "
            "below 1",
        ),
        ({"objective": {"name": "sapo", "dual_clip": 3.0}}, "objective.dual_clip: sapo has no dual clip; leave it out"),
        (
            {"optimizer": {"learning_rate": float("inf")}},
            "optimizer.learning_rate: found inf, should be a finite number",
        ),
        (
            {"optimizer": {"learning_rate": float("nan")}},
            "optimizer.learning_rate: found nan, should be a finite number",
        ),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas[1]: found 1.0, should be less than 1"),
        (
            {"tracking": {"trackers": ["wand"]}},
            "tracking.trackers[0]: found 'wand', should be 'tensorboard', 'wandb' or 'trackio'; did you mean 'wandb'?",
        ),
        (
            {"task": {"kind": "reasoning-gym"}},
            "task.kind: found 'reasoning-gym', should be one of jsonl, datasets, reasoning_gym, function, "
            "multi_turn; did you mean 'reasoning_gym'?",
        ),
        (
            {"run": {"name": "../x"}},
            "run.name: found '../x', should be letters, digits, _, . and -, the first neither . nor -",
        ),
        (
            {"reward": {"functions": [{"function": "mth"}]}},
            "reward.functions[0].function: found 'mth', should be environment, exact, last_number, math, "
            "reasoning_gym, regex or package.module:function; did you mean 'math'?",
        ),
        (
            {"task": {"kind": "function", "function": "rows", "name": "x"}},
            "task.function: found 'rows', should be package.module:function",
        ),
    ],
)
def test_a_wrong_setting_is_one_line(tables: dict[str, Any], line: str) -> None:
    assert f"a.toml: {line}" in complaints(settings(**tables))


def test_a_setting_of_another_kind_of_task_says_what_this_one_has() -> None:
    (line,) = complaints(settings(task={"path": "rows.jsonl"}))
    assert line.startswith('a.toml: task.path: not a setting of task.kind = "reasoning_gym", which has ')
    assert "parameters" in line


def test_each_wrong_setting_has_its_line_and_flags_are_named_as_flags() -> None:
    lines = complaints(settings(training={"epochs": 0}), {"training.steps": "many", "rollout.promts": "4"})
    assert sorted(lines) == [
        "--rollout.promts: unknown setting; did you mean rollout.prompts?",
        "--training.steps: found 'many', should be a whole number",
        "a.toml: training.epochs: found 0, should be greater than or equal to 1",
    ]


def test_impossible_combinations_are_all_named() -> None:
    lines = complaints(
        settings(
            rollout={"prompts": 6, "top_k": 1},
            routing={"replay": "old"},
            likelihoods={"old": "sampler"},
            task={"kind": "jsonl", "path": "x", "name": None},
        )
    )
    assert len(lines) == 1  # a task of the wrong form hides them: combinations are of settings that are right alone
    data = settings(
        rollout={"prompts": 6, "top_k": 1},
        routing={"replay": "old"},
        likelihoods={"old": "sampler"},
        reward={"functions": [{"function": "reasoning_gym", "weight": 0.0}]},
    )
    data["task"] = {"kind": "jsonl", "path": "x"}
    lines = complaints(data)
    assert [re.sub(r"[ :].*", "", line.removeprefix("a.toml: ")) for line in lines] == [
        "training.minibatches",
        "routing.replay",
        "rollout.top_k",
        "reward.functions",
        "reward.functions",
    ]


@pytest.mark.parametrize("engine", ["vllm", "server"])
def test_vllm_reports_what_it_kept_only_under_top_k(engine: str) -> None:
    rollout = {"engine": engine, "servers": ["http://a:1"], "top_p": 0.9}
    evaluation = {"temperature": 0.6}
    first, second = complaints(settings(rollout=rollout, evaluation=evaluation))
    assert first.startswith("a.toml: rollout.top_k = 0 with rollout.top_p or rollout.min_p: vLLM reports")
    assert second.startswith("a.toml: evaluation.top_k = 0: a vLLM that reports")
    build_config(settings(rollout=rollout | {"top_k": 1000}))
    build_config(settings(rollout=rollout | {"top_k": 1000}, evaluation=evaluation | {"top_k": 1000}))
    build_config(settings(rollout=rollout | {"engine": "transformers", "servers": []}, evaluation=evaluation))


@pytest.mark.parametrize("replay", ["old", "sampler"])
def test_compiled_layers_and_replay_refuse_each_other_by_name(replay: str) -> None:
    tables = settings(model={"compile": True}, routing={"replay": replay})
    (line,) = complaints(tables)
    assert line == (
        f'a.toml: model.compile = true cannot be with routing.replay = "{replay}": compiled layers do not hand the '
        "choice of experts over; set model.compile = false"
    )
    tables["routing"] = {"replay": "off"}
    assert build_config(tables | {"model": tables["model"] | {"activation_checkpointing": True}}).model.compile


def test_servers_are_needed_by_their_engine_alone() -> None:
    (line,) = complaints(settings(rollout={"engine": "server"}))
    assert "rollout.servers: found none" in line
    for url in ("http://10.0.0.5:8000", "https://inference.example/a"):
        assert build_config(settings(rollout={"engine": "server", "servers": [url]})).warnings() == []


@pytest.mark.parametrize(
    ("tables", "start"),
    [
        (
            {"rollout": {"servers": ["http://h:1"]}},
            'rollout.servers has no effect with rollout.engine = "transformers"',
        ),
        ({"training": {"minibatches": 1}}, "training.minibatches = 1 and training.epochs = 1: every ratio is 1"),
        (
            {"reward": {"truncated_penalty": 0.2}},
            'reward.truncated_penalty has no effect with reward.truncated = "keep"',
        ),
        (
            {"distributed": {"reshard_after_forward": False}},
            'distributed.reshard_after_forward has no effect with distributed.shard = "none"',
        ),
        ({"evaluation": {"samples": 4}}, "evaluation.samples > 1 with evaluation.temperature = 0"),
        ({"evaluation": {"top_p": 0.9}}, "evaluation.top_p, top_k and min_p have no effect"),
        ({"evaluation": {"every": 100}}, "evaluation.every = 100 with training.steps = 100"),
        ({"evaluation": {"every": 100, "temperature": 1.0}}, "evaluation.every = 100 with training.steps = 100"),
        ({"optimizer": {"warmup_updates": 400}}, "optimizer.warmup_updates = 400: the run makes 400 updates"),
        ({"objective": {"name": "gspo_token"}}, 'objective.name = "gspo_token"'),
        ({"task": {"held_out": 0}}, "task.held_out = 0"),
        ({"task": HELD_OUT_APART}, "task.held_out has no effect: all questions of test.jsonl are held out"),
        (
            {"reward": {"functions": [{"function": "exact", "weight": 0.0}, {"function": "math"}]}},
            "reward.functions: exact",
        ),
    ],
)
def test_a_setting_without_effect_warns(tables: dict[str, Any], start: str) -> None:
    config = build_config(settings(**tables))
    assert [w for w in config.warnings() if w.startswith(start)]
    assert build_config(json.loads(config.model_dump_json())).warnings() == config.warnings()


def test_usual_settings_warn_of_nothing() -> None:
    assert build_config(settings(reward={"truncated": "penalize", "truncated_penalty": 0.2})).warnings() == []
    assert build_config(settings(training={"minibatches": 1, "epochs": 2})).warnings() == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("run.name", "123", "123"),
        ("model.path", "true", "true"),
        ("model.path", '"quoted"', "quoted"),
        ("rollout.stop", '["\\n", "x"]', ["\n", "x"]),
        ("model.lora.targets", '["q_proj"]', ["q_proj"]),
        ("model.lora.rank", "4", 4),
        ("optimizer.learning_rate", "1", 1.0),
        ("model.trust_remote_code", "true", True),
        ("run.name", "a\nx = 2", None),
    ],
)
def test_a_flag_is_read_as_its_setting_wants_it(name: str, text: str, found: object) -> None:
    if found is None:
        assert complaints(BASE, {name: text})[0].startswith(f"--{name}: found 'a\\nx = 2'")
        return
    value: Any = build_config(BASE, {name: text})
    for part in name.split("."):
        value = getattr(value, part)
    assert value == found


def test_a_flag_below_a_value_is_refused() -> None:
    assert complaints(BASE, {"model.path.x": "1"}) == [
        "--model.path.x: path is not a table of settings; set path as a whole"
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file; give the path of a TOML config"),
        (b"[model\n", "not valid TOML: "),
        (b"\xff\xfe", "cannot be read ("),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "a.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInputError, match=re.escape(f"{path}: {message}")):
        load_config(path)
    with pytest.raises(BadInputError, match=re.escape(f"{tmp_path}: cannot be read")):
        load_config(tmp_path)


def test_a_file_from_windows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    text = '[model]\npath = "m"\n[task]\nkind = "jsonl"\npath = "rows.jsonl"\n'
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load_config(path).model.path == load_config(str(path)).model.path == "m"


def test_names_of_settings() -> None:
    assert "reward.functions.weight" in setting_names()
    assert "task.path" in setting_names("jsonl")
    assert "task.path" not in setting_names("reasoning_gym")
    assert takes_text("run.dir")
    assert not takes_text("task.parameters")
    assert not takes_text("no.such")
    assert [name for name, field, _ in setting_fields() if not field.description] == ["task.kind"] * 5


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_the_recipes_are_valid_and_warn_of_nothing(path: Path) -> None:
    config = load_config(path)
    assert isinstance(config, Config)
    assert config.warnings() == []


@pytest.mark.parametrize("name", ["settings.md", "metrics.md"])
def test_generated_pages_are_current(name: str) -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == pages[name](), "run: python docs/generate.py"

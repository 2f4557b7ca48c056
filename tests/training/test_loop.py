"""`train` from a config to a run folder, on a tiny model."""

import inspect
import json
import logging

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import gspo.reporting.recorder as recorder
import gspo.rollout.transformers_engine as transformers_engine
import gspo.training.loop as loop
from gspo.config import build_config
from gspo.errors import BadInputError, GspoError
from gspo.reporting.journal import read_rollouts
from gspo.reporting.run_folder import RunFolder
from gspo.reporting.run_lock import held
from gspo.rollout.transformers_engine import TransformersEngine
from gspo.training.checkpoint import OPTIMIZER, STATE
from gspo.training.optimizer_files import save_optimizer
from tests.policy.tiny import save_tiny
from tests.training.tiny_task import early_words

BASE = {
    "task": {"kind": "function", "function": "tests.training.tiny_task:rows", "held_out": 6},
    "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 6},
    "optimizer": {"learning_rate": 1e-3},
    "training": {"steps": 4, "minibatches": 2},
    "checkpoint": {"every": 2, "keep": 2},
    "objective": {"clip_low": 0.05, "clip_high": 0.05},
    "reward": {"correct_at": 0.5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), scale=2.0)


def settings(folder, tmp_path, name="run", **sections):
    data = {**BASE, "model": {"path": str(folder)}, "run": {"dir": str(tmp_path), "name": name}}
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values}
    return build_config(data)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(checkpoint):
    return load_file(checkpoint / "model.safetensors")


def test_a_run_learns_records_and_saves(folder, tmp_path):
    seen = []
    config = settings(folder, tmp_path, training={"steps": 12}, optimizer={"learning_rate": 5e-3})
    result = loop.train(config, reward=early_words, callbacks=[seen.append])
    metrics = lines(result.run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [s.step for s in seen] == list(range(1, 13))
    first, last = (sum(m["reward/mean"] for m in part) / 3 for part in (metrics[:3], metrics[-3:]))
    assert last > first + 0.1
    assert metrics[0]["sums"]["reward/mean"][1] == 16
    assert max(m["mismatch/token_max"] for m in metrics) < 1e-4

    rollouts = read_rollouts(result.run / "rollouts" / "step-000003.jsonl.zst")
    assert [(r.slot, r.sample) for r in rollouts] == [(p, g) for p in range(4) for g in range(4)]
    assert {r.policy_version[0].version for r in rollouts} == {4}

    assert [e["step"] for e in lines(result.run / "evaluations.jsonl")] == [0, 12]
    assert result.before.accuracy.n == result.after.accuracy.n == 6
    kept = sorted(p.name for p in (result.run / "checkpoints").glob("step-*"))
    assert kept[-2:] == ["step-000010", "step-000012"]
    model = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    saved = weights(result.checkpoint)
    assert all(torch.equal(saved[k], v) for k, v in model.state_dict().items() if k in saved)


def test_resumed_run_ends_at_the_same_bits(folder, tmp_path):
    whole = loop.train(settings(folder, tmp_path, "whole"), reward=early_words)

    class Stop(Exception):  # noqa: N818
        pass

    def stop_after_three(result):
        if result.step == 3:
            raise Stop

    config = settings(folder, tmp_path, "cut")
    with pytest.raises(Stop):
        loop.train(config, reward=early_words, callbacks=[stop_after_three])
    resumed = loop.train(config, reward=early_words, resume=tmp_path / "cut")
    assert (resumed.run / "metrics.jsonl").read_text() == (whole.run / "metrics.jsonl").read_text()
    a, b = weights(whole.checkpoint), weights(resumed.checkpoint)
    assert all(torch.equal(a[k], b[k]) for k in a)
    a, b = (load_file(r.checkpoint / "trainer_optimizer.safetensors") for r in (whole, resumed))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_warnings_are_kept_once_and_over_a_resume(folder, tmp_path, capsys, monkeypatch):
    """From the settings, from the library's own log while it samples, and from two steps that teach nothing."""
    choose = transformers_engine.choose_decoder

    def complain(model):
        logging.getLogger("gspo.rollout.decoder_choice").warning("no cache")
        return choose(model)

    def same_for_all(completions, **_):
        return [1.0] * len(completions)

    monkeypatch.setattr(transformers_engine, "choose_decoder", complain)
    config = settings(folder, tmp_path, reward={"truncated_penalty": 0.2})
    with pytest.raises(CutError):
        loop.train(config, reward=same_for_all, callbacks=[cut_after(2)])
    kept = lines(tmp_path / "run" / "warnings.jsonl")
    assert [(w["step"], w["what"]) for w in kept] == [(0, "settings"), (0, "rollout"), (1, "no signal")]
    assert kept[0]["text"].startswith("reward.truncated_penalty has no effect")
    assert kept[2]["text"].startswith("step 1 taught nothing: in every group all rewards are equal")
    shown = capsys.readouterr().out
    assert [shown.count(f"warning: {w['text']}") for w in kept] == [1, 1, 1]
    loop.train(config, reward=same_for_all, resume=tmp_path / "run")
    assert lines(tmp_path / "run" / "warnings.jsonl") == kept
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(f"<li>{place}" in page for place in ("at the start: no cache", "step 1: step 1 taught nothing"))


def test_ctrl_c_leaves_a_report_of_the_finished_steps(folder, tmp_path):
    def interrupt(result):
        if result.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.train(settings(folder, tmp_path), reward=early_words, callbacks=[interrupt])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "2 of 4, last written" in page
    assert "Step 2: 4 groups, 16 rollouts" in page


class CutError(Exception):
    """Stands for a kill between two steps."""


def cut_after(step):
    def stop(result):
        if result.step == step:
            raise CutError

    return stop


def test_a_run_without_a_checkpoint_starts_again_and_samples_nothing_twice(folder, tmp_path, monkeypatch):
    rare = {"checkpoint": {"every": 0}}
    whole = loop.train(settings(folder, tmp_path, "whole", **rare), reward=early_words)
    config = settings(folder, tmp_path, "cut", **rare)
    with pytest.raises(CutError):
        loop.train(config, reward=early_words, callbacks=[cut_after(3)])

    generate, steps = TransformersEngine.generate, set()

    def remember(engine, requests, sampling):
        steps.update(request.step for request in requests)
        return generate(engine, requests, sampling)

    monkeypatch.setattr(TransformersEngine, "generate", remember)
    resumed = loop.train(config, reward=early_words, resume=tmp_path / "cut")
    assert steps == {0, 4}  # 0: evaluations
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert (resumed.run / name).read_text() == (whole.run / name).read_text()
    a, b = weights(whole.checkpoint), weights(resumed.checkpoint)
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_resuming_under_other_settings_samples_the_later_steps_again(folder, tmp_path):
    with pytest.raises(CutError):
        loop.train(settings(folder, tmp_path, "cut"), reward=early_words, callbacks=[cut_after(3)])
    before = read_rollouts(tmp_path / "cut" / "rollouts" / "step-000003.jsonl.zst")
    changed = settings(folder, tmp_path, "cut", rollout={"max_tokens": 3})
    run = loop.train(changed, reward=early_words, resume=tmp_path / "cut").run
    assert max(len(r.response_ids) for r in before) > 3
    assert max(len(r.response_ids) for r in read_rollouts(run / "rollouts" / "step-000003.jsonl.zst")) == 3
    assert RunFolder.open(run).read_config().rollout.max_tokens == 3


def test_grpo_runs_by_the_same_code(folder, tmp_path):
    config = settings(folder, tmp_path, objective={"name": "grpo", "clip_low": None, "clip_high": None})
    metrics = lines(loop.train(config, reward=early_words).run / "metrics.jsonl")
    tokens = sum(m["sums"]["response/length"][0] for m in metrics)
    trained = sum(m["sums"]["clip/token_outside"][1] for m in metrics)
    assert 0 < trained <= tokens


def test_dynamic_sampling_replaces_groups_without_signal(folder, tmp_path):
    def all_or_nothing(prompts, completions, **_):
        return [float("w3" in p or "w7" in c) for p, c in zip(prompts, completions, strict=True)]

    config = settings(folder, tmp_path, rollout={"resample_without_signal": 3}, training={"steps": 2})
    metrics = lines(loop.train(config, reward=all_or_nothing).run / "metrics.jsonl")
    assert sum(m["group/resampled"] for m in metrics) > 0
    for m in metrics:
        assert m["sums"]["group/without_signal"][1] == 4 + m["group/resampled"]


def test_a_step_without_signal_says_that_it_taught_nothing(folder, tmp_path, capsys):
    def same_for_all(completions, **_):
        return [1.0] * len(completions)

    config = settings(folder, tmp_path, training={"steps": 1}, task={"held_out": 0})
    loop.train(config, reward=same_for_all)
    assert "step 1 taught nothing: in every group all rewards are equal, or were dropped" in capsys.readouterr().out
    loop.train(settings(folder, tmp_path, "other", training={"steps": 1}, task={"held_out": 0}), reward=early_words)
    assert "taught nothing" not in capsys.readouterr().out


def test_a_failing_reward_costs_its_rollout_alone_until_too_many_fail(folder, tmp_path):
    def fails_on_w9(completions, **_):
        if any("w9" in c for c in completions):
            raise RuntimeError("cannot read w9")
        return [float(len(c)) for c in completions]

    config = settings(folder, tmp_path, training={"steps": 2})
    metrics = lines(loop.train(config, reward=fails_on_w9).run / "metrics.jsonl")
    assert all(m["reward/dropped"] < 0.5 for m in metrics)

    def always_fails(**_):
        raise RuntimeError("no verifier")

    with pytest.raises(GspoError, match=r"reward\.max_dropped"):
        loop.train(settings(folder, tmp_path, "failing"), reward=always_fails)


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"task": {"parameters": {"count": 8}}}, r"rollout\.prompts = 4: the task has only 2"),
        (
            {"objective": {"dual_clip": 1.04}},
            r"objective\.dual_clip = 1\.04: .* must exceed .* 1\.05",
        ),
        (
            {"rollout": {"max_tokens": 128}},
            r"rollout\.max_tokens = 128: the model's context of 128 tokens",
        ),
        ({"task": {"system_prompt": "Be brief."}}, r"task\.system_prompt: needs a chat template"),
        ({"run": {"dir": __file__}}, r"run\.dir: .*test_loop\.py is no folder"),
    ],
)
def test_what_needs_no_model_is_said_before_one_loads(folder, tmp_path, monkeypatch, sections, line):
    monkeypatch.setattr("gspo.training.run.load_policy", None)
    with pytest.raises(BadInputError, match=line):
        loop.train(settings(folder, tmp_path, **sections), reward=early_words)


def test_a_callback_without_its_list_is_said_before_anything_loads(folder, tmp_path):
    with pytest.raises(BadInputError, match=r"^callbacks: found a function, should be a list"):
        inspect.unwrap(loop.train)(settings(folder, tmp_path), reward=early_words, callbacks=print)
    assert not (tmp_path / "run").exists()


def test_a_resume_keeps_changed_settings_once_they_work(folder, tmp_path):
    run = loop.train(settings(folder, tmp_path, training={"steps": 1}), reward=early_words).run
    before = (run / "config.json").read_bytes()
    with pytest.raises(BadInputError, match=r"rollout\.prompts = 40"):
        loop.train(settings(folder, tmp_path, rollout={"prompts": 40}), reward=early_words, resume=run)
    assert (run / "config.json").read_bytes() == before
    changed = settings(folder, tmp_path, training={"steps": 2})
    loop.train(changed, reward=early_words, resume=run)
    assert RunFolder.open(run).read_config() == changed


def test_the_report_is_written_after_the_engine_ends_and_before_another_may_train(folder, tmp_path, monkeypatch):
    order = []

    def write(run):
        with pytest.raises(BadInputError, match="another process is training in it"), held(run.path):
            pass
        order.append("page")

    monkeypatch.setattr(recorder, "write_page", write)
    monkeypatch.setattr(TransformersEngine, "close", lambda _: order.append("engine"))
    run = loop.train(settings(folder, tmp_path, training={"steps": 1}), reward=early_words).run
    assert order == ["engine", "page"]
    loop.train(settings(folder, tmp_path, training={"steps": 2}), reward=early_words, resume=run)
    assert order == ["engine", "page"] * 2


def test_a_resume_does_not_take_another_model(folder, tmp_path):
    run = loop.train(settings(folder, tmp_path, training={"steps": 1}), reward=early_words).run
    other = settings(folder, tmp_path, training={"steps": 2}, model={"path": "elsewhere"})
    with pytest.raises(BadInputError, match=r"model\.path = 'elsewhere': a resumed run goes on from its checkpoint"):
        loop.train(other, reward=early_words, resume=run)


@pytest.mark.parametrize("name", [STATE, OPTIMIZER])
@pytest.mark.parametrize("content", [None, b"{"])
def test_a_damaged_checkpoint_is_one_line(folder, tmp_path, name, content):
    config = settings(folder, tmp_path, training={"steps": 1})
    file = loop.train(config, reward=early_words).checkpoint / name
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadInputError) as caught:
        loop.train(config, reward=early_words, resume=tmp_path / "run")
    assert str(caught.value).startswith(f"{file}: cannot be read (")
    assert "\n" not in str(caught.value)


def test_nobody_else_trains_in_the_folder_meanwhile(folder, tmp_path):
    refused = []

    def intrude(_result):
        with pytest.raises(BadInputError, match="another process is training in it") as found:
            loop.train(config, reward=early_words, resume=tmp_path / "run")
        refused.append(str(found.value))

    config = settings(folder, tmp_path, training={"steps": 1})
    loop.train(config, reward=early_words, callbacks=[intrude])
    further = settings(folder, tmp_path, training={"steps": 2})
    loop.train(further, reward=early_words, callbacks=[intrude], resume=tmp_path / "run")
    assert len(refused) == 2


def test_a_full_disk_is_one_line_and_costs_no_work(folder, tmp_path, monkeypatch):
    config = settings(folder, tmp_path, training={"steps": 2}, checkpoint={"every": 1})
    whole = loop.train(settings(folder, tmp_path, "whole", training={"steps": 2}), reward=early_words)
    written = []

    def full(*arguments):
        if written:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        written.append(save_optimizer(*arguments))

    with monkeypatch.context() as patched:
        patched.setattr("gspo.training.checkpoint.save_optimizer", full)
        with pytest.raises(
            GspoError, match=r"step-000002: cannot be written .*No space left.*--resume .*run$"
        ) as found:
            loop.train(config, reward=early_words)
    assert "\n" not in str(found.value)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*step*")] == ["step-000001"]
    resumed = loop.train(config, reward=early_words, resume=str(tmp_path / "run"))
    assert all(torch.equal(weights(resumed.checkpoint)[name], w) for name, w in weights(whole.checkpoint).items())


def test_a_checkpoint_without_its_model_says_how_to_go_back(folder, tmp_path):
    config = settings(folder, tmp_path, training={"steps": 2}, checkpoint={"every": 1})
    last = loop.train(config, reward=early_words).checkpoint
    (last / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(BadInputError, match=r"cannot be loaded: .*; remove .*step-000002 to go on from the checkpoint"):
        loop.train(config, reward=early_words, resume=tmp_path / "run")

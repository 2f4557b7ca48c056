"""`gspo audit` on a tiny model: a run's own rollouts, fresh ones, and noise of a known size put into the record."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from gspo.audit.audit import audit, contenders, examine
from gspo.audit.gradient import compare, gradient_change
from gspo.audit.measure import Contender
from gspo.audit.page import page
from gspo.audit.subject import final_groups, recorded
from gspo.audit.verdict import judge
from gspo.cli import main
from gspo.config import Config, build_config
from gspo.errors import BadInputError
from gspo.reporting.journal import read_rollouts, write_rollouts
from gspo.reporting.run_folder import RunFolder
from gspo.training.credit import make_batch
from gspo.training.loop import train
from tests.policy.tiny import gradients, make_rollout, plain_scores, save_tiny, worst
from tests.training.test_learner import derived_gradient, make_learner
from tests.training.test_multi_turn import conversation, save_words
from tests.training.test_multi_turn import settings as conversation_settings

SETTINGS = {
    "task": {"kind": "function", "function": "tests.training.tiny_task:rows", "held_out": 0},
    "reward": {"functions": [{"function": "tests.training.tiny_task:early_words"}]},
    "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 6, "temperature": 0.9},
    "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 1e9},
    "training": {"steps": 3, "minibatches": 2},
    "objective": {"clip_low": 0.02, "clip_high": 0.03},
    "checkpoint": {"every": 1, "keep": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), scale=2.0)


@pytest.fixture(scope="module")
def config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    run = {"dir": str(tmp_path_factory.mktemp("runs")), "name": "r"}
    return build_config({**SETTINGS, "model": {"path": str(model)}, "run": run})


@pytest.fixture(scope="module")
def run(config: Config) -> Path:
    return train(config).run


def test_a_runs_rollouts_are_scored_at_the_weights_that_sampled_them(config, run):
    found = audit(config, run=run)
    assert "step 3" in found.source
    assert "checkpoint step-000002" in found.source
    assert found.responses == 16
    assert found.differences.tokens.max < 1e-4  # at any other weights it would be some .01
    configured, paper, grpo = found.outcomes
    assert (configured.outside, configured.decisions.flipped, paper.outside, grpo.outside) == (0, 0, 0, 0)
    assert configured.decisions.units > 0
    assert configured.gradient.cosine == pytest.approx(1.0, abs=1e-6)
    assert configured.verdict.choice == "sampler"
    assert found.costs.rollout > 0
    json.dumps(found.as_record(), allow_nan=False)


def test_known_noise_in_the_record_is_found_and_judged(config, run, tmp_path):
    """Every sampler log-prob of a response is lowered by the same .1: log s is .1 for all, far outside 2-3 %."""
    folder = RunFolder(run)
    path = folder.rollout_file(3)
    honest = read_rollouts(path)
    biased = [dataclasses.replace(r, sampler_logprobs=tuple(p - 0.1 for p in r.sampler_logprobs)) for r in honest]
    write_rollouts(path, biased)
    try:
        html, figures = tmp_path / "a.html", tmp_path / "a.json"
        assert main(["audit", str(run), "--json", str(figures), "--html", str(html)]) == 0
        found = audit(config, run=run)
    finally:
        write_rollouts(path, honest)
    assert found.differences.tokens.bias == pytest.approx(0.1, abs=1e-4)
    assert found.differences.responses.mean == pytest.approx(0.1, abs=1e-4)
    assert found.differences.noise.token_std < 1e-4
    configured = found.outcomes[0]
    assert (configured.outside, configured.units) == (16, 16)
    assert configured.verdict.choice == "widen"
    assert configured.verdict.suggested.clip_high == pytest.approx(math.expm1(0.1), abs=1e-3)
    # After an update that moves log s by less than .07, every positive response is clipped with the engine's
    # log-probs, as exp(.1 - .07) > 1.03, and none of the negative ones.
    with_engine = configured.decisions.removed_engine
    assert with_engine >= configured.decisions.units // 4
    grpo = found.outcomes[2]  # its range is wide enough that nothing is clipped: every weight grows by exp(.1)
    assert grpo.decisions.removed_engine == 0
    assert grpo.gradient.norm_ratio == pytest.approx(math.exp(0.1), rel=1e-3)
    assert grpo.gradient.cosine == pytest.approx(1.0, abs=1e-6)
    record = json.loads(figures.read_text())
    assert record["outcomes"][0]["decisions"] == dataclasses.asdict(configured.decisions)
    assert html.read_text().count("<svg") == 3


def test_gradients_are_those_of_a_derivation_that_shares_no_code(config, run):
    """One response per forward pass, plain logits, eq. 10; old log-probs of one engine and of the other."""
    subject = recorded(config, run)
    model = subject.learner.policy.model
    (minibatch, *_) = subject.learner.cut(make_batch(subject.groups, config))
    rollouts = [r for group in subject.groups[:2] for r in group]
    with torch.no_grad():
        training, _ = plain_scores(model, rollouts, 0.9)
    noise = 0.05 * torch.randn(training.shape, generator=torch.Generator().manual_seed(1))
    order = {(r.slot, r.sample): i for i, r in enumerate(rollouts)}
    for micro in minibatch.micro_batches:
        rows = [order[r.slot, r.sample] for r in micro.batch.rollouts]
        width = micro.batch.mask.shape[1]
        micro.batch.old_logprobs = training[rows, :width]
        micro.batch.sampler_logprobs = (training + noise)[rows, :width]
    found = gradient_change(subject.learner.policy, minibatch, Contender("gspo", 0.02, 0.03), temperature=0.9)
    advantages = torch.zeros(8)
    for micro in minibatch.micro_batches:
        for row, rollout in enumerate(micro.batch.rollouts):
            advantages[order[rollout.slot, rollout.sample]] = micro.batch.advantages[row]
    g, _ = derived_gradient(model, training, rollouts, advantages.tolist(), config)
    h, _ = derived_gradient(model, training + noise, rollouts, advantages.tolist(), config)
    assert worst(g, h) > 0.1  # the noise does clip
    expected = compare(list(g.values()), list(h.values()))
    for name in ("norm_ratio", "cosine", "relative"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-4)
    assert not gradients(model)


def test_rounded_weights_show_as_noise_that_grows_with_the_rounding(config):
    exact, coarse = (audit(config, engine_weights=weights) for weights in ("float32", "int8"))
    assert exact.differences.tokens.mean < 1e-5 < 1e-4 < coarse.differences.tokens.mean
    assert "weights int8" in coarse.source
    assert coarse.outcomes[1].outside > exact.outcomes[1].outside


def test_a_run_without_matching_weights_falls_back_to_its_first_step(config, run):
    folder = RunFolder(run)
    hidden = folder.rollout_file(3)
    hidden.rename(hidden.with_suffix(".away"))
    try:
        found = audit(config, run=run)
    finally:
        hidden.with_suffix(".away").rename(hidden)
    assert "step 1" in found.source
    assert found.differences.tokens.max < 1e-4


def test_what_cannot_be_audited_is_one_line(run, tmp_path, capsys):
    assert main(["audit", str(tmp_path)]) == 2
    assert main(["audit", str(tmp_path / "no.toml")]) == 2
    assert main(["audit", str(run), "--engine-weights", "int3"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "not the folder of a run" in lines[0]
    assert "no such file" in lines[1]
    assert "invalid choice: 'int3'" in lines[2]
    empty = RunFolder.create(RunFolder.open(run).read_config({"run.name": "empty"}))
    with pytest.raises(BadInputError, match="no recorded rollouts whose weights are still there"):
        audit(empty.read_config(), run=empty.path)


def test_conversations_with_a_ratio_per_turn_are_audited_by_turn(tmp_path):
    """Of fresh rollouts every turn counts once; with engines that agree nothing is outside and nothing changes."""
    config = conversation_settings(save_words(tmp_path / "model", "llama"), tmp_path, rollout={"temperature": 0.9})
    found = audit(config)
    gspo, paper, grpo = found.outcomes
    assert [o.contender.unit for o in found.outcomes] == ["turn", "turn", "token"]
    assert found.responses < gspo.units == paper.units < grpo.units == found.differences.tokens.count
    assert gspo.outside == gspo.decisions.flipped == 0 < gspo.decisions.units
    assert gspo.gradient.relative < 1e-3
    assert f"of {gspo.units} turn ratios" in gspo.verdict.text
    assert "gspo by turn 0.1 / 0.1" in page(found)


def test_gradients_by_turn_are_those_of_a_derivation_that_shares_no_code(tmp_path):
    """-(1/B) sum_i (1/|y_i|) sum_t A_i s_i,turn(t) grad log pi(y_t), clipped turn by turn; each turn has its noise."""
    config = conversation_settings(
        save_words(tmp_path / "model", "llama"),
        tmp_path,
        objective={"credit": "response", "advantage_scale": "none"},
        rollout={"prompts": 1, "group_size": 3, "temperature": 1.0},
        training={"minibatches": 1},
    )
    rollouts = [conversation(0, sample) for sample in range(3)]
    learner = make_learner(tmp_path / "model", config)
    (minibatch,) = learner.cut(make_batch([rollouts], config))
    with torch.no_grad():
        training, _ = plain_scores(learner.policy.model, rollouts, 1.0)
    gaps = torch.tensor([[0.3, 0.05], [-0.06, 0.4], [-0.3, 0.02]])  # of each response, by turn; the range is .1 / .1
    engine = training.clone()
    for i, rollout in enumerate(rollouts):
        for t, turn in enumerate(rollout.turns):
            engine[i, t] -= gaps[i, turn] if turn >= 0 else 7.0
    for micro in minibatch.micro_batches:
        rows, width = [r.sample for r in micro.batch.rollouts], micro.batch.mask.shape[1]
        micro.batch.old_logprobs, micro.batch.sampler_logprobs = training[rows, :width], engine[rows, :width]
    contender = Contender("gspo", 0.1, 0.1, by_turn=True)
    found = gradient_change(learner.policy, minibatch, contender, temperature=1.0)

    def derived(weights):
        logprobs, _ = plain_scores(learner.policy.model, rollouts, 1.0)
        rewards = torch.tensor([r.reward for r in rollouts])
        total = 0.0
        for i, rollout in enumerate(rollouts):
            turns = torch.tensor(rollout.turns)
            for turn in (0, 1):
                s, a = weights[i][turn], float(rewards[i] - rewards.mean())
                clipped = (a > 0 and s > 1.1) or (a < 0 and s < 0.9)
                mine = logprobs[i, : len(turns)][turns == turn].sum()
                total = total - (0.0 if clipped else a * s) * mine / (turns >= 0).sum() / 3
        total.backward()
        return list(gradients(learner.policy.model).values())

    expected = compare(derived([[1.0, 1.0]] * 3), derived(gaps.exp().tolist()))
    for name in ("norm_ratio", "cosine", "relative"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-4)
    assert expected.relative > 0.1


def test_rewards_without_signal_leave_the_noise_and_no_decisions(config, run):
    subject = recorded(config, run)
    subject.groups = [[dataclasses.replace(r, reward=1.0) for r in group] for group in subject.groups]
    found = examine(subject, config)
    assert found.differences.tokens.count > 16
    assert [(o.decisions.units, o.gradient) for o in found.outcomes] == [(0, None)] * 3
    assert found.costs.update is None
    assert "cannot be compared" in found.outcomes[0].verdict.text


def test_the_last_replacement_of_a_group_is_what_was_trained_on():
    rollouts = [make_rollout(slot, sample, (5,), (6,)) for slot in (0, 1, 2, 3, 5, 9) for sample in (0, 1)]
    groups = final_groups(rollouts, 4)
    assert [[(r.slot, r.sample) for r in group] for group in groups] == [
        [(slot, 0), (slot, 1)] for slot in (0, 9, 2, 3)
    ]


def test_contenders_are_the_configs_range_and_the_papers(config):
    assert contenders(config) == [
        Contender("gspo", 0.02, 0.03),
        Contender("gspo", 3e-4, 4e-4),
        Contender("grpo", 0.2, 0.27),
    ]
    default = config.model_copy(update={"objective": config.objective.model_copy(update={"name": "dapo"})})
    assert [c.objective for c in contenders(default)] == ["gspo", "grpo"]


def test_bitwise_agreement_is_said_and_text_is_escaped(config, run):
    found = audit(config, run=run)
    tokens = dataclasses.replace(found.differences.tokens, max=0.0)
    same = dataclasses.replace(found.differences, tokens=tokens)
    outcome = found.outcomes[0]
    verdict = judge(outcome.contender, same, 0, outcome.units, outcome.decisions, outcome.gradient, 1.0)
    assert verdict.text == "use the engine's likelihoods: both engines agree to the last bit"
    hostile = dataclasses.replace(found, source="<script>alert(1)</script>")
    text = page(hostile)
    assert "<script" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize("weights", [None, "float32"])
def test_truncated_sampling_is_audited_over_what_it_kept(config, tmp_path, weights):
    """A run's own rollouts and fresh ones: without the support every token would differ by what was cut off."""
    rollout = config.rollout.model_copy(update={"top_p": 0.8, "temperature": 1.2})
    place = config.run.model_copy(update={"dir": tmp_path})
    truncated = config.model_copy(update={"rollout": rollout, "run": place})
    found = audit(truncated, run=train(truncated).run, engine_weights=weights)
    assert found.differences.tokens.max < 1e-4
    configured, *_ = found.outcomes
    assert (configured.outside, configured.decisions.flipped) == (0, 0)
    assert configured.gradient.cosine == pytest.approx(1.0, abs=1e-6)

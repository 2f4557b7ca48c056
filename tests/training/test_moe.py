"""Routing Replay, its figures and the balance of experts in whole runs of a tiny Mixture-of-Experts policy."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import gspo
from gspo.config import build_config
from gspo.distributed.world import World
from gspo.errors import BadInputError, GspoError
from gspo.policy.load import load_policy
from gspo.policy.moe import moe_layers
from gspo.training.credit import make_batch
from gspo.training.learner import Learner
from gspo.training.routing_metrics import RoutingMetrics
from gspo.training.update_metrics import UpdateMetrics
from tests.policy.tiny import cut_routes, gradients, plain_scores, random_rollouts, save_tiny, worst
from tests.training.tiny_task import early_words

EXPERTS, CHOSEN = 6, 2
GROUPS = [(9, (6, 1, 10)), (3, (4, 12, 0))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("moe"), "qwen3_moe", scale=2.0)


def settings(folder, tmp_path, **sections):
    data = {
        "model": {"path": str(folder)},
        "run": {"dir": str(tmp_path), "name": "run"},
        "task": {"kind": "function", "function": "tests.training.tiny_task:rows", "held_out": 0},
        "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 6},
        "objective": {"name": "grpo"},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"steps": 1, "minibatches": 2},
        "routing": {"replay": "old", "figures_every": 0},
    }
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values}
    return build_config(data)


def figures(result):
    return [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]


def disturb_routers(model, size=1e-2):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in moe_layers(model).values():
            layer.block.gate.weight.add_(size * torch.randn(layer.block.gate.weight.shape, generator=generator))


def before_updates(monkeypatch, change):
    """Has `change(learner, minibatches)` happen between scoring and updating."""
    update = Learner.update

    def changed(self, step, minibatches, metrics):
        change(self, minibatches)
        return update(self, step, minibatches, metrics)

    monkeypatch.setattr(Learner, "update", changed)


def watch_updates(monkeypatch, seen):
    """Appends (micro-batch, routes it came with, experts that ran by layer, native experts) per update with routes."""
    apply = Learner._apply

    def watched(self, minibatch, *rest):
        (micro,) = minibatch.micro_batches
        if micro.routes is None:
            return apply(self, minibatch, *rest)
        native = self.policy.score(micro.layout, temperature=1.0, record=True).routes
        ran = {name: [] for name in micro.routes}
        hooks = [
            layer.experts.register_forward_pre_hook(lambda _, args, name=name: ran[name].append(args[1].clone()))
            for name, layer in moe_layers(self.policy.model).items()
        ]
        routes = dict(micro.routes)
        apply(self, minibatch, *rest)
        for hook in hooks:
            hook.remove()
        seen.append((micro, routes, ran, native))
        return None

    monkeypatch.setattr(Learner, "_apply", watched)


@pytest.mark.parametrize(
    ("replay", "layout", "checkpointing"),
    [
        ("old", "packed", False),
        ("old", "shared", True),
        ("old", "padded", False),
        ("sampler", "shared", False),
        ("sampler", "padded", True),
    ],
)
def test_the_recorded_experts_run_whatever_became_of_the_routers(
    folder, tmp_path, monkeypatch, replay, layout, checkpointing
):
    seen, finished = [], []
    before_updates(monkeypatch, lambda learner, _: disturb_routers(learner.policy.model))
    watch_updates(monkeypatch, seen)
    config = settings(
        folder,
        tmp_path,
        model={"layout": layout, "activation_checkpointing": checkpointing},
        rollout={"stop": ["w1", "w2"]},
        routing={"replay": replay},
    )
    result = gspo.train(config, reward=early_words, callbacks=[lambda step: finished.extend(step.rollouts)])
    assert {r.truncated for r in finished} == {True, False}
    # Of the old policy's replay, the first mini-batch is recorded in its own update.
    assert len(seen) == (1 if replay == "old" else 2)
    for micro, routes, ran, native in seen:
        assert micro.layout.kind == layout
        fed = micro.layout.attention_mask.flatten()
        assert fed.all() == (layout != "padded")
        assert len(ran) == 2
        changed = []
        for name, indices in routes.items():
            assert len(ran[name]) == 1 + checkpointing
            assert all(torch.equal(x[fed], indices[fed].long()) for x in ran[name])
            changed.append((native[name].long().sort(1).values != indices.long().sort(1).values).any(1)[fed])
        assert torch.cat(changed).float().mean() > 0.01
        if replay == "sampler":
            for name, indices in routes.items():
                cut = cut_routes(micro.layout, indices.numpy().astype(np.int16))
                for found, rollout in zip(cut, micro.batch.rollouts, strict=True):
                    assert np.array_equal(found, rollout.routes[name])
    (line,) = figures(result)
    assert 0.4 < line["routing/agreement_min"] <= line["routing/agreement"] < 1


@pytest.mark.parametrize("replay", ["old", "sampler"])
def test_undisturbed_replay_leaves_every_ratio_at_one(folder, tmp_path, replay):
    config = settings(folder, tmp_path, routing={"replay": replay}, optimizer={"learning_rate": 1e-30})
    (line,) = figures(gspo.train(config, reward=early_words))
    assert max(abs(line["ratio/log_min"]), abs(line["ratio/log_max"])) <= 1e-5
    assert line["routing/agreement"] > 0.99


@pytest.mark.parametrize("replay", ["old", "sampler"])
def test_routes_of_other_tokens_stop_the_run(folder, tmp_path, monkeypatch, replay):
    def shift(_, minibatches):
        for micro in minibatches[-1].micro_batches:
            micro.routes = {name: indices.roll(1, 0) for name, indices in micro.routes.items()}

    before_updates(monkeypatch, shift)
    with pytest.raises(GspoError, match="belong to other tokens or to another layer"):
        gspo.train(settings(folder, tmp_path, routing={"replay": replay}), reward=early_words)


@pytest.mark.parametrize(("objective", "replay"), [("grpo", "old"), ("grpo", "off"), ("gspo", "off")])
def test_whole_runs_with_and_without_replay(folder, tmp_path, objective, replay):
    config = settings(
        folder,
        tmp_path,
        objective={"name": objective},
        routing={"replay": replay, "figures_every": 2},
        training={"steps": 3},
    )
    result = gspo.train(config, reward=early_words)
    lines = figures(result)
    assert sum(line["optimizer/updates"] for line in lines) == 6
    assert ["routing/changed_last" in line for line in lines] == [True, False, True]
    assert all(("routing/agreement" in line) == (replay == "old") for line in lines)
    for line in lines[::2]:
        assert 0 < line["routing/entropy"] <= math.log(EXPERTS)
        assert line["routing/changed_last/model.layers.1.mlp"] >= 0
        token, sequence = (line[f"routing/{unit}_log_ratio_std_native_last"] for unit in ("token", "sequence"))
        assert token > sequence > 0
    start, end = load_file(folder / "model.safetensors"), load_file(result.checkpoint / "model.safetensors")
    assert not torch.equal(start["model.layers.0.mlp.gate.weight"], end["model.layers.0.mlp.gate.weight"])


@pytest.mark.parametrize("routing", [{"replay": "old"}, {"replay": "sampler"}, {"load_balancing_weight": 0.1}])
def test_a_dense_model_is_refused_at_once(tmp_path, routing):
    dense = save_tiny(tmp_path / "dense", "llama")
    (name,) = routing
    with pytest.raises(BadInputError, match=rf"^routing\.{name}.*LlamaForCausalLM.* no Mixture-of-Experts layer"):
        gspo.train(settings(dense, tmp_path, routing={"replay": "off", **routing}), reward=early_words)


def learner_of(folder, tmp_path, layout="packed", tokens=10_000, **routing):
    config = settings(
        folder,
        tmp_path,
        rollout={"prompts": 2, "group_size": 3},
        training={"minibatches": 1, "micro_batch_tokens": tokens},
        optimizer={"learning_rate": 1e-3, "max_grad_norm": 1e9},
        routing={"replay": "off", **routing},
    )
    return Learner(load_policy(folder, layout=layout), config, world=World())


def rewarded(rewards):
    rollouts = [dataclasses.replace(r, reward=v) for r, v in zip(random_rollouts(GROUPS, seed=3), rewards, strict=True)]
    return [rollouts[:3], rollouts[3:]]


def plain_routing(model, rollouts):
    """By layer the router logits [M, E] where a trainable token is predicted, one forward per rollout."""
    logits = {name: [] for name in moe_layers(model)}
    for rollout in rollouts:
        taken = {}
        hooks = [
            layer.block.gate.register_forward_hook(lambda _m, _a, out, name=name, to=taken: to.update({name: out[0]}))
            for name, layer in moe_layers(model).items()
        ]
        model(input_ids=torch.tensor([[*rollout.prompt.ids, *rollout.response_ids]]), use_cache=False)
        for hook in hooks:
            hook.remove()
        first = len(rollout.prompt.ids) - 1
        rows = [first + t for t, trainable in enumerate(rollout.trainable) if trainable]
        for name, values in taken.items():
            logits[name].append(values[rows])
    return {name: torch.cat(parts) for name, parts in logits.items()}


@pytest.mark.parametrize(
    ("layout", "tokens", "replay"),
    [("padded", 10_000, "off"), ("packed", 30, "off"), ("shared", 30, "off"), ("shared", 30, "old")],
)
def test_the_balance_of_experts_is_exact_however_the_minibatch_is_cut(folder, tmp_path, layout, tokens, replay):
    """Without signal the whole gradient is that of E * sum_e f_e P_e (Switch Transformer, eq. 4), mean over layers."""
    learner = learner_of(folder, tmp_path, layout, tokens, replay=replay, load_balancing_weight=0.5)
    groups = rewarded([1.0] * 6)
    metrics = UpdateMetrics()
    minibatches = learner.prepare(make_batch(groups, learner.config), metrics)
    assert len(minibatches[0].micro_batches) == 1 or tokens == 30
    learner.update(1, minibatches, metrics)
    found, lines = gradients(learner.policy.model), metrics.as_metrics()

    model = load_policy(folder).model
    rollouts = [rollout for group in groups for rollout in group]
    parts = []
    for logits in plain_routing(model, rollouts).values():
        probabilities = logits.softmax(-1)
        chosen = torch.zeros_like(logits).scatter(1, logits.topk(CHOSEN, -1).indices, 1.0)
        parts.append(EXPERTS * (chosen.mean(0) * probabilities.mean(0)).sum())
    expected = torch.stack(parts).mean()
    unused = model(input_ids=torch.tensor([[3, 4]]), use_cache=False).logits.sum()
    (0.5 * expected + 0 * unused).backward()
    assert lines["routing/load_balancing"].value == pytest.approx(expected.item(), rel=1e-5)
    assert lines["objective/loss"].value == pytest.approx(0.5 * expected.item(), rel=1e-5)
    assert worst(found, gradients(model)) < 2e-5


def test_the_routing_figures_are_those_of_plain_forwards(folder, tmp_path):
    learner = learner_of(folder, tmp_path, "shared", 30)
    policy, groups = learner.policy, rewarded([1.0, 0.0, 0.5, 0.0, 1.0, 1.0])
    rollouts = [rollout for group in groups for rollout in group]
    (minibatch,) = learner.prepare(make_batch(groups, learner.config), UpdateMetrics())
    watch = RoutingMetrics(policy, 1.0, minibatch, World())
    with torch.no_grad():
        old, (before, _) = plain_routing(policy.model, rollouts), plain_scores(policy.model, rollouts, 1.0)
        disturb_routers(policy.model)
        watch.after("first")
        watch.after("last")
        new, (now, _) = plain_routing(policy.model, rollouts), plain_scores(policy.model, rollouts, 1.0)
    found = watch.as_metrics()

    shares = {name: [] for name in old}
    for name, logits in old.items():
        for a, b in zip(logits.topk(CHOSEN).indices.tolist(), new[name].topk(CHOSEN).indices.tolist(), strict=True):
            shares[name].append(1 - len(set(a) & set(b)) / CHOSEN)
    everything = [share for layer in shares.values() for share in layer]
    assert sum(everything) > 0
    for moment in ("first", "last"):
        assert found[f"routing/changed_{moment}"].value == pytest.approx(np.mean(everything))
        for name, layer in shares.items():
            assert found[f"routing/changed_{moment}/{name}"].value == pytest.approx(np.mean(layer))

    for name, logits in old.items():
        counts = np.bincount(logits.topk(CHOSEN).indices.flatten().numpy(), minlength=EXPERTS)
        assert found[f"routing/load_max/{name}"] == pytest.approx(counts.max() / counts.mean())
        entropy = torch.distributions.Categorical(logits=logits).entropy().mean().item()
        assert found[f"routing/entropy/{name}"].value == pytest.approx(entropy, rel=1e-5)

    per_rollout = [
        (n - o)[: len(r.trainable)][torch.tensor(r.trainable)].numpy()
        for n, o, r in zip(now, before, rollouts, strict=True)
        if r.trainable
    ]
    assert found["routing/token_log_ratio_std_native_last"] == pytest.approx(
        np.std(np.concatenate(per_rollout)), rel=1e-3
    )
    means = [np.mean(x) for x in per_rollout]
    assert found["routing/sequence_log_ratio_std_native_last"] == pytest.approx(np.std(means), rel=1e-3)
    assert found["routing/token_log_ratio_std_native_first"] == found["routing/token_log_ratio_std_native_last"]
    assert 0 < found["routing/token_log_ratio_std_replayed_first"] < found["routing/token_log_ratio_std_native_first"]

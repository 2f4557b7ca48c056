import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gspo.errors import BadInputError
from gspo.policy.compiling import CompiledLayers
from gspo.policy.load import load_policy
from tests.policy.tiny import random_rollouts, save_tiny, tiny_model

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["llama+inductor+checkpointing", "llama+lora", "llama+autocast"])
def test_compiled_layers_give_the_same_scores_and_gradients_at_every_length(case):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.policy.compile_check", case],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert f"{case}: compiled as eager" in found.stdout


def pretend(function, *, dynamic=False):  # noqa: ARG001 - torch.compile's argument
    return lambda *args, **kwargs: function(*args, **kwargs)


def test_layers_are_replaced_inside_the_context_alone(monkeypatch):
    monkeypatch.setattr(torch, "compile", pretend)
    model = tiny_model("llama")
    layers = CompiledLayers(model)
    own = [layer.forward for layer in model.model.layers]
    with layers.active():
        assert all(layer.forward != forward for layer, forward in zip(model.model.layers, own, strict=True))
    assert [layer.forward for layer in model.model.layers] == own
    assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_a_loaded_policy_and_its_reference_are_compiled_where_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", pretend)
    folder = save_tiny(tmp_path / "model")
    policy = load_policy(folder, device="cpu", dtype="float32", compile=True, reference=True)
    assert policy.scorer.compiled is not None
    assert policy.frozen is not None
    assert policy.frozen.compiled not in (None, policy.scorer.compiled)
    assert load_policy(folder, device="cpu").scorer.compiled is None
    layout = policy.layout(random_rollouts())
    scored = policy.score(layout, temperature=1.0).logprobs
    assert torch.equal(scored, policy.reference(layout, temperature=1.0).logprobs)


def test_what_cannot_be_compiled_is_refused_by_name(monkeypatch):
    with pytest.raises(BadInputError, match=r"^model.compile: Qwen3MoeForCausalLM is a Mixture-of-Experts model"):
        CompiledLayers(tiny_model("qwen3_moe"))
    with pytest.raises(BadInputError, match=r"^model.compile: Linear has no layers to compile; set it to false$"):
        CompiledLayers(torch.nn.Linear(2, 2))

    def missing(*_, **__):
        raise RuntimeError("No working C++ compiler found\nin g++")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: missing)
    with pytest.raises(BadInputError) as caught:
        CompiledLayers(tiny_model("llama"))
    assert str(caught.value) == (
        "model.compile: nothing can be compiled for cpu here (No working C++ compiler found in g++); install a C++ "
        "compiler, or set it to false"
    )

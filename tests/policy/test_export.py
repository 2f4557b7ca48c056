import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo.config import LoraConfig
from gspo.errors import BadInputError
from gspo.policy.export import named_tensors, save_merged, save_policy
from gspo.policy.load import load_policy
from tests.policy.tiny import random_rollouts, save_tiny, tiny_model

EXPORTED = ["llama", "llama_tied", "gemma3", "qwen3_moe", "gpt_oss", "gpt2", "phi3"]


def logprobs(policy):
    return policy.score(policy.layout(random_rollouts()), temperature=1.0).logprobs


def step_adapter(policy, seed=0) -> None:
    """What an update does to an adapter: its second factor, which starts at 0, is not 0 any more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in policy.trainable_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("family", EXPORTED)
def test_names_and_bits_are_those_that_transformers_saves(family, tmp_path):
    policy = load_policy(save_tiny(tmp_path / "model", family), device="cpu")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    tensors = dict(named_tensors(policy))
    assert tensors.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in tensors.items())


def test_experts_have_names_of_their_own(tmp_path):
    policy = load_policy(save_tiny(tmp_path / "model", "qwen3_moe"), device="cpu")
    names = [name for name, _ in named_tensors(policy) if ".experts." in name]
    assert "model.layers.1.mlp.experts.5.down_proj.weight" in names
    assert len(names) == 2 * 6 * 3


@pytest.mark.parametrize("family", EXPORTED)
def test_a_saved_policy_reloads_to_the_same_bits(family, tmp_path):
    policy = load_policy(save_tiny(tmp_path / "model", family), device="cpu")
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.01)
    save_policy(policy, tmp_path / "saved")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    expected = policy.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in reloaded.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token_id == 1
    assert torch.equal(logprobs(load_policy(tmp_path / "saved", device="cpu")), logprobs(policy))


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3_moe"])
def test_an_adapter_is_merged_on_the_way_out_and_stays_in_the_model(family, tmp_path):
    start = save_tiny(tmp_path / "model", family)
    plain = dict(named_tensors(load_policy(start, device="cpu")))
    policy = load_policy(start, device="cpu", lora=LoraConfig(rank=2))
    step_adapter(policy)
    with_adapter = logprobs(policy)
    merged = dict(named_tensors(policy))
    assert merged.keys() == plain.keys()
    changed = {name for name in plain if not torch.equal(merged[name], plain[name])}
    assert changed == {f"model.layers.{n}.{name}.weight" for n in (0, 1) for name in adapted(family)}
    assert torch.equal(logprobs(policy), with_adapter)
    save_merged(policy, tmp_path / "merged")
    torch.testing.assert_close(
        logprobs(load_policy(tmp_path / "merged", device="cpu")), with_adapter, rtol=1e-5, atol=1e-5
    )


def adapted(family: str) -> list[str]:
    """Every linear layer but the head; with experts, their stacked weights and the router too."""
    attention, projections = [f"self_attn.{name}_proj" for name in "qkvo"], ("gate", "up", "down")
    if family == "qwen3_moe":
        return [*attention, "mlp.gate"] + [
            f"mlp.experts.{expert}.{name}_proj" for expert in range(6) for name in projections
        ]
    return attention + [f"mlp.{name}_proj" for name in projections]


def test_with_lora_a_checkpoint_is_the_adapter_and_stands_for_the_merged_model(tmp_path):
    start = save_tiny(tmp_path / "model")
    policy = load_policy(start, device="cpu", lora=LoraConfig(rank=2))
    step_adapter(policy)
    save_policy(policy, tmp_path / "checkpoints" / "step-000001")
    assert not (tmp_path / "checkpoints" / "step-000001" / "model.safetensors").exists()
    loaded = load_policy(tmp_path, device="cpu")
    assert loaded.adapter is None
    assert len(loaded.trainable_parameters()) == len(list(loaded.model.parameters()))
    torch.testing.assert_close(logprobs(loaded), logprobs(policy), rtol=1e-5, atol=1e-5)


def test_a_resumed_adapter_has_the_same_bits_and_the_reference_is_still_the_start(tmp_path):
    start = save_tiny(tmp_path / "model")
    policy = load_policy(start, device="cpu", lora=LoraConfig(rank=2), seed=1)
    step_adapter(policy)
    save_policy(policy, tmp_path / "checkpoint")
    resumed = load_policy(start, resume=tmp_path / "checkpoint", device="cpu", lora=LoraConfig(rank=2), reference=True)
    for (name, expected), (same, found) in zip(
        policy.trainable_parameters(), resumed.trainable_parameters(), strict=True
    ):
        assert name == same
        assert torch.equal(found, expected)
    layout = resumed.layout(random_rollouts())
    assert torch.equal(resumed.reference(layout, temperature=1.0).logprobs, logprobs(load_policy(start, device="cpu")))


def test_a_resumed_model_keeps_the_start_as_its_reference(tmp_path):
    start = save_tiny(tmp_path / "model")
    policy = load_policy(start, device="cpu")
    before = logprobs(policy)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.05)
    save_policy(policy, tmp_path / "checkpoint")
    resumed = load_policy(start, resume=tmp_path / "checkpoint", device="cpu", reference=True)
    assert torch.equal(logprobs(resumed), logprobs(policy))
    assert torch.equal(resumed.reference(resumed.layout(random_rollouts()), temperature=1.0).logprobs, before)


def test_an_adapter_on_top_of_an_adapter_keeps_both(tmp_path):
    first = load_policy(save_tiny(tmp_path / "model"), device="cpu", lora=LoraConfig(rank=2))
    step_adapter(first, seed=1)
    save_policy(first, tmp_path / "first")
    second = load_policy(tmp_path / "first", device="cpu", lora=LoraConfig(rank=3))
    torch.testing.assert_close(logprobs(second), logprobs(first), rtol=1e-5, atol=1e-5)
    step_adapter(second, seed=2)
    save_policy(second, tmp_path / "second")
    torch.testing.assert_close(
        logprobs(load_policy(tmp_path / "second", device="cpu")), logprobs(second), rtol=1e-5, atol=2e-5
    )


def moved_run(tmp_path, model_path):
    """A run's folder with an adapter's checkpoint, moved together with the model, whose place it names, to `new`."""
    start = save_tiny(tmp_path / "old" / "model")
    policy = load_policy(start, device="cpu", lora=LoraConfig(rank=2))
    step_adapter(policy)
    save_policy(policy, tmp_path / "old" / "run" / "checkpoints" / "step-000001")
    (tmp_path / "old" / "run" / "config.json").write_text(json.dumps({"model": {"path": model_path}}))
    (tmp_path / "old").rename(tmp_path / "new")
    return policy, tmp_path / "new"


def test_a_moved_run_finds_the_model_that_its_config_names(tmp_path, monkeypatch):
    policy, moved = moved_run(tmp_path, "model")
    monkeypatch.chdir(moved)
    found = load_policy("run", device="cpu")
    torch.testing.assert_close(logprobs(found), logprobs(policy), rtol=1e-5, atol=1e-5)
    from_peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained("model"), str(moved / "run" / "checkpoints" / "step-000001")
    )
    assert sum("lora_A" in name for name, _ in from_peft.named_parameters()) == 14


def test_a_model_that_is_not_found_is_named_with_the_flag_that_finds_it(tmp_path):
    policy, moved = moved_run(tmp_path, "nowhere/model")
    (moved / "model").rename(moved / "renamed")
    old = tmp_path / "old" / "model"
    with pytest.raises(BadInputError) as error:
        load_policy(moved / "run", device="cpu")
    (line,) = str(error.value).splitlines()
    assert line == (
        f"model.path: the adapter {str(moved / 'run' / 'checkpoints' / 'step-000001')!r} belongs to {str(old)!r}, "
        "which does not exist, and neither does 'nowhere/model', from which its run began; say where it is now (gspo "
        "eval and gspo export: --model.path FOLDER), or in adapter_config.json, base_model_name_or_path"
    )
    found = load_policy(moved / "run", base=str(moved / "renamed"), device="cpu")
    torch.testing.assert_close(logprobs(found), logprobs(policy), rtol=1e-5, atol=1e-5)
    with pytest.raises(BadInputError, match="is a whole model and belongs to no other; leave it out"):
        load_policy(moved / "renamed", base="x", device="cpu")


def test_an_adapter_of_another_rank_is_not_resumed(tmp_path):
    start = save_tiny(tmp_path / "model")
    save_policy(load_policy(start, device="cpu", lora=LoraConfig(rank=2)), tmp_path / "checkpoint")
    with pytest.raises(BadInputError, match=r"model\.lora: .* another rank or other targets"):
        load_policy(start, resume=tmp_path / "checkpoint", device="cpu", lora=LoraConfig(rank=4))


def test_a_new_adapter_depends_on_its_seed_alone_and_changes_nothing_at_first(tmp_path):
    start = save_tiny(tmp_path / "model")
    policies = [load_policy(start, device="cpu", lora=LoraConfig(rank=2), seed=seed) for seed in (3, 3, 4)]
    first, same, other = ([p.detach() for _, p in policy.trainable_parameters()] for policy in policies)
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert torch.equal(logprobs(policies[0]), logprobs(load_policy(start, device="cpu")))


def test_targets_that_no_module_has_get_one_line():
    from gspo.policy.adapters import add_lora

    with pytest.raises(BadInputError, match=r"model\.lora\.targets: \['nothing'\] cannot be adapted"):
        add_lora(tiny_model("llama"), LoraConfig(targets=["nothing"]))

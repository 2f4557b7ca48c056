import json
import shutil

import pytest
import torch
from transformers import AutoConfig

from gspo.errors import BadInputError
from gspo.policy.devices import choose_autocast, choose_device
from gspo.policy.load import enable_activation_checkpointing, load_policy
from gspo.policy.sources import resolve_path
from tests.policy.tiny import random_rollouts, save_tiny, tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def test_a_folder_gives_the_weights_in_float32_with_everything_around_them(saved):
    policy = load_policy(saved, device="cpu")
    original = tiny_model("llama").state_dict()
    assert all(torch.equal(tensor, original[name]) for name, tensor in policy.model.state_dict().items())
    assert (policy.eos_ids, policy.pad_id, policy.context_length) == ((1,), 0, 128)
    assert policy.notes == ()
    assert policy.scorer.exact_head
    assert len(policy.trainable_parameters()) == len(list(policy.model.parameters()))


def test_tied_embeddings_have_one_dense_gradient(tmp_path):
    model = load_policy(save_tiny(tmp_path / "tied", "llama_tied"), device="cpu").model
    assert model.get_input_embeddings().sparse
    model(input_ids=torch.tensor([[3, 4, 3]]), use_cache=False).logits.logsumexp(-1).sum().backward()
    assert model.get_input_embeddings().weight.grad.layout == torch.strided


def test_bfloat16_weights_become_float32_masters(copy):
    tiny_model("llama").to(torch.bfloat16).save_pretrained(copy)
    assert {p.dtype for p in load_policy(copy, device="cpu").model.parameters()} == {torch.float32}


def test_every_eos_id_counts_once(copy):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1, 9]}))
    assert load_policy(copy, device="cpu").eos_ids == (7, 1, 9)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_policy(copy, device="cpu").eos_ids == (7, 9, 1), "the tokenizer's own ends a response too"


def test_dropout_is_off_in_training_mode_too(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    policy = load_policy(copy, device="cpu", activation_checkpointing=True)
    assert policy.model.training
    layout = policy.layout(random_rollouts())
    first, second = (policy.score(layout, temperature=1.0).logprobs for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, load_policy(saved_without(copy), device="cpu").score(layout, temperature=1.0).logprobs)


def saved_without(folder):
    """The same folder with its dropout set to 0 in the config."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}))
    return folder


def test_a_runs_folder_means_its_last_checkpoint(saved, tmp_path):
    for step in (2, 10, 9):
        shutil.copytree(saved, tmp_path / "checkpoints" / f"step-{step}")
    assert resolve_path(str(tmp_path)).endswith("step-10")


def test_a_misspelt_local_folder_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "models" / "SmolLM2-135M").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInputError, match=r"'models/SmolLM-135M' does not exist; did you mean 'models/SmolLM2-135M'"):
        resolve_path("models/SmolLM-135M")
    assert resolve_path("org/name") == "org/name"


def test_a_frozen_copy_scores_as_the_start_after_an_update(saved):
    policy = load_policy(saved, device="cpu", reference=True)
    layout = policy.layout(random_rollouts())
    before = policy.score(layout, temperature=1.0).logprobs
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    assert torch.equal(policy.reference(layout, temperature=1.0).logprobs, before)
    assert not torch.allclose(policy.score(layout, temperature=1.0).logprobs, before)


def test_a_reference_that_was_not_loaded_is_an_error(saved):
    policy = load_policy(saved, device="cpu")
    with pytest.raises(ValueError, match="no reference"):
        policy.reference(policy.layout(random_rollouts()), temperature=1.0)


def break_nothing(folder):
    shutil.rmtree(folder)


def break_config(folder):
    (folder / "config.json").unlink()


def break_weights(folder):
    (folder / "model.safetensors").unlink()


def break_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def break_a_tensor(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_nothing, "does not exist"),
        (break_config, "no config.json and no checkpoints"),
        (break_weights, "no weights"),
        (break_tokenizer, "no usable tokenizer"),
        (cut_weights, "cannot be loaded: .*incomplete"),
        (break_a_tensor, "lacks weights .*: model.norm.weight"),
    ],
)
def test_a_bad_folder_gets_one_line(copy, damage, message):
    damage(copy)
    with pytest.raises(BadInputError, match=message) as caught:
        load_policy(copy, device="cpu")
    assert str(caught.value).startswith("model.path: ")
    assert "\n" not in str(caught.value)


def test_what_is_neither_folder_nor_hub_model_is_said_to_be_neither(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no connection")

    monkeypatch.chdir(tmp_path)  # where no folder `models` makes it a path
    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(BadInputError, match=r"'models/none' is no folder here and cannot be loaded as a hub id"):
        load_policy("models/none", device="cpu")


def test_a_model_that_cannot_recompute_its_layers_is_refused_by_name():
    model = tiny_model("llama")
    model.supports_gradient_checkpointing = False
    line = r"^model.activation_checkpointing: LlamaForCausalLM does not support it; set it to false$"
    with pytest.raises(BadInputError, match=line):
        enable_activation_checkpointing(model)


def test_a_device_that_is_not_there_gets_one_line():
    with pytest.raises(BadInputError, match=r"model.device: 'cuda:99' cannot be used here"):
        choose_device("cuda:99")


def test_a_cpu_autocasts_only_where_it_pays(monkeypatch):
    cpu = torch.device("cpu")
    assert choose_autocast("float32", cpu) is None
    assert choose_autocast("bfloat16", cpu) is torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    assert choose_autocast("auto", cpu) is torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert choose_autocast("auto", cpu) is None

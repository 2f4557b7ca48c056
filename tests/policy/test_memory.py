import pytest
import torch

from gspo.config import LoraConfig
from gspo.distributed.world import World
from gspo.errors import BadInputError
from gspo.policy import load, memory
from gspo.policy.load import load_policy, memory_of
from gspo.policy.memory import MemoryEstimate, check_fits
from tests.policy.tiny import FAMILIES, random_rollouts, save_tiny, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimate_counts_every_parameter_once_without_making_one(family):
    model = tiny_model(family)
    count = sum(p.numel() for p in model.parameters())
    estimate = memory_of(model.config)
    assert estimate.parameters == count
    assert (estimate.weights, estimate.gradients, estimate.optimizer) == (4 * count, 4 * count, 8 * count)
    assert estimate.reference == estimate.activations == 0


def test_an_adapter_needs_optimizer_state_for_itself_alone_and_no_reference():
    config = tiny_model("llama").config
    # Rank 2 on q, k, v, o (32 to 32, 16, 16, 32 wide) and gate, up, down (32 to 48 and back), two layers.
    adapter = 2 * 2 * (64 + 48 + 48 + 64 + 80 + 80 + 80)
    estimate = memory_of(config, lora=LoraConfig(rank=2), reference=True)
    assert estimate.gradients == 4 * adapter
    assert estimate.optimizer == 8 * adapter
    assert estimate.parameters == memory_of(config).parameters + adapter
    assert estimate.weights == 4 * estimate.parameters
    assert estimate.reference == 0


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_of_a_loaded_adapter_every_byte_is_estimated_once(family, tmp_path):
    policy = load_policy(save_tiny(tmp_path, family), device="cpu", lora=LoraConfig(rank=3))
    parameters = list(policy.model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    assert policy.memory.weights == sum(p.nbytes for p in parameters)
    assert policy.memory.gradients == sum(p.nbytes for p in trained) > 0


def test_evaluation_needs_the_weights_alone_and_a_reference_is_a_second_copy():
    config = tiny_model("llama").config
    assert memory_of(config, train=False, tokens=100).total == memory_of(config).weights
    assert memory_of(config, reference=True).reference == memory_of(config).weights


@pytest.mark.parametrize(("checkpointing", "autocast"), [(False, False), (True, False), (False, True)])
def test_activations_are_of_the_size_that_a_forward_pass_leaves_behind(checkpointing, autocast):
    model = tiny_model("llama")
    if checkpointing:
        load.enable_activation_checkpointing(model)
    rollouts = random_rollouts([(20, (20, 20))])
    tokens = sum(20 + len(r.response_ids) for r in rollouts)
    held: dict[int, int] = {}
    weights = {p.data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(3, 60, (1, tokens))
    precision = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    with precision, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    estimate = memory_of(
        model.config, tokens=tokens, activation_checkpointing=checkpointing, autocast=autocast
    ).activations
    if checkpointing:  # the estimate allows for the one layer, of two, that is computed again in the backward pass
        estimate -= memory_of(model.config, tokens=tokens).activations // 2
    assert kept.requires_grad
    assert 0.4 * sum(held.values()) < estimate < 2.5 * sum(held.values())


def test_autocast_adds_a_copy_of_the_layers_matrices_and_halves_the_feed_forward():
    config = tiny_model("llama").config
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48  # q, k, v, o and gate, up, down
    plain, cast = (memory_of(config, tokens=10, autocast=autocast).activations for autocast in (False, True))
    assert plain - cast == 10 * 2 * (4 * 48 * 2) - 2 * 2 * layer
    assert memory_of(config, autocast=True).activations == 0


def test_a_model_that_cannot_fit_is_refused_with_what_to_try():
    estimate = MemoryEstimate(0, 20 * 10**9, 6 * 10**9, 5 * 10**9, 0, 0)
    with pytest.raises(BadInputError) as caught:
        check_fits("org/name", estimate, 24 * 10**9, lora=False)
    assert str(caught.value) == (
        "model.path: org/name needs about 31.0 GB (weights 20.0, gradients 6.0, optimizer 5.0), 24.0 GB are free: "
        "try model.lora (trains an adapter only), or a smaller model"
    )
    assert check_fits("org/name", estimate, 32 * 10**9, lora=False) == ()
    assert check_fits("org/name", estimate, None, lora=False) == ()


def test_activations_are_a_rough_figure_and_only_warned_of():
    estimate = MemoryEstimate(0, 10**9, 0, 0, 0, 9 * 10**9)
    (note,) = check_fits("m", estimate, 2 * 10**9, lora=True)
    assert "about 10.0 GB (weights 1.0, activations 9.0), 2.0 GB are free" in note
    assert "training.micro_batch_tokens" in note


def test_loading_stops_before_the_weights_are_read(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "model")
    monkeypatch.setattr(load, "free_memory", lambda device: 1000)  # noqa: ARG005
    monkeypatch.setattr(load, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(BadInputError, match=r"needs about .* are free"):
        load_policy(folder, device="cpu")


def test_a_containers_limit_counts_less_its_cache(tmp_path):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 100\nfile 1500\n")
    assert memory._cgroup_room(tmp_path) == 2500
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup_room(tmp_path) is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:      7 kB\n")
    assert memory._available(tmp_path / "meminfo") == 7 * 1024


def test_processes_divide_the_weights_and_gather_a_few_layers():
    model = tiny_model("llama")
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    alone = memory_of(model.config, reference=True)
    root = alone.parameters - sum(layers)
    shared = memory_of(model.config, reference=True, processes=4)
    for name in ("weights", "gradients", "optimizer", "reference"):
        assert getattr(shared, name) == getattr(alone, name) // 4
    assert alone.gathered == 0
    assert shared.gathered == 4 * (root + 2 * layers[0] + max(root, layers[0]))  # and the gradients of one piece
    assert "gathered" in str(shared)
    kept = memory_of(model.config, train=False, processes=4, reshard_after_forward=False)
    assert kept.gathered == alone.weights
    model.config.num_hidden_layers = 9
    deep, sampled = (memory_of(model.config, processes=4, samples=samples) for samples in (False, True))
    assert deep.gathered < sampled.gathered == 4 * deep.parameters


def test_processes_of_one_machine_share_what_is_free(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "model")
    needed = memory_of(tiny_model("llama").config).total
    monkeypatch.setattr(load, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setattr(load, "free_memory", lambda _: needed)
    with pytest.raises(BadInputError, match=r"model\.path: .* needs about"):
        load_policy(folder, device="cpu", world=World(0, 2))

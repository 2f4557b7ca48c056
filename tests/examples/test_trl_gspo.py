"""The TRL example trains, and its loss is TRL's own sequence-level loss where the two mean the same."""

from __future__ import annotations

import importlib.util
import string
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="TRL is an extra of the benchmarks")
pytestmark = pytest.mark.filterwarnings("ignore")

PATH = Path(__file__).parents[2] / "examples" / "trl_gspo.py"


def load(monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("trl_gspo", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "trl_gspo", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A random Llama with a character tokenizer, in `from_pretrained` form."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(["<eos>", "<pad>", *string.printable[:95]])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, eos_token_id=0, pad_token_id=1, bos_token_id=None,
    )  # fmt: skip
    path = tmp_path / "model"
    LlamaForCausalLM(config).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(path)
    return path


def trainer(module, model: Path, tmp_path: Path, **options):
    config = module.GRPOConfig(
        output_dir=str(tmp_path / "run"), max_steps=2, beta=0.0, epsilon=3e-4, epsilon_high=4e-4,
        per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=2, steps_per_generation=4,
        max_completion_length=8, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, bf16=False,
        learning_rate=1e-2, importance_sampling_level="sequence", loss_type="grpo", seed=0, **options,
    )  # fmt: skip
    rows = module.Dataset.from_list([{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)])

    def reward(completions, **_):
        return [float(sum(map(str.isdigit, text))) for text in completions]

    return module.GSPOTrainer(str(model), reward, args=config, train_dataset=rows)


@pytest.mark.slow
def test_two_steps_with_the_value_that_trl_computes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(monkeypatch)
    run = trainer(module, tiny_model, tmp_path)
    before = [p.detach().clone() for p in run.model.parameters()]
    ours = module.GSPOTrainer._compute_loss
    pairs = []

    def both(self, model, inputs):
        loss = ours(self, model, inputs)
        theirs = module.GRPOTrainer._compute_loss(self, model, inputs)
        names = [p for p in model.parameters() if p.requires_grad]
        gradients = [torch.autograd.grad(value, names, retain_graph=True) for value in (loss, theirs)]
        pairs.append((loss.detach(), theirs.detach(), *gradients))
        return loss

    monkeypatch.setattr(module.GSPOTrainer, "_compute_loss", both)
    run.train()
    assert run.state.global_step == 2
    assert len(pairs) == 4
    for loss, theirs, gradient, their_gradient in pairs:
        torch.testing.assert_close(loss, theirs, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(gradient, their_gradient, rtol=1e-3, atol=1e-6)
    assert any(not torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    logged = [entry for entry in run.state.log_history if "gspo/sequence_removed" in entry]
    assert len(logged) == 2
    assert logged[1]["gspo/sequence_outside"] > 0


def test_the_reward_reads_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = load(monkeypatch).last_number_is_right
    assert reward(["it is 7", "7 or 8", ""], answer=["7", "7", "7"]) == [1.0, 0.0, 0.0]
    assert reward([[{"role": "assistant", "content": "so 9"}]], answer=["9"]) == [1.0]

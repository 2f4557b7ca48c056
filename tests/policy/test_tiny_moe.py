import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo.errors import GspoError
from gspo.policy.moe import moe_layers
from gspo.policy.tiny_moe import Recipe, main, make_model, make_tokenizer, prepare, supervised_loss
from gspo.tasks.addition import problems

QUICK = Recipe(layers=1, hidden=16, heads=2, experts=4, expert_width=8, batch=4, check_every=1, target=0.0, max_steps=1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GSPO_CACHE", str(tmp_path))
    return tmp_path


def test_the_folder_loads_like_any_other_model():
    folder = prepare(seed=3, recipe=QUICK)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert list(moe_layers(model)) == ["model.layers.0.mlp"]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    text = problems(1)[0]["prompt"] + problems(1)[0]["worked"]
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert len(tokenizer) == model.config.vocab_size == 17
    assert tokenizer.chat_template is None


def test_a_folder_is_made_once_and_depends_on_seed_alone(tmp_path):
    state = torch.random.get_rng_state()
    first = prepare(seed=3, recipe=QUICK)
    assert torch.equal(torch.random.get_rng_state(), state)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert prepare(seed=3, recipe=QUICK) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    weights = (first / "model.safetensors").read_bytes()
    first.rename(tmp_path / "elsewhere")
    torch.manual_seed(77)
    assert (prepare(seed=3, recipe=QUICK) / "model.safetensors").read_bytes() == weights
    other = prepare(seed=4, recipe=QUICK)
    assert other != first
    assert (other / "model.safetensors").read_bytes() != weights


def test_a_cold_start_that_misses_its_target_leaves_no_folder(cache, capsys):
    with pytest.raises(GspoError, match=r"sampled accuracy 0\.00 after 1 supervised steps, 0\.5 is needed"):
        prepare(recipe=Recipe(layers=1, hidden=16, heads=2, experts=4, batch=4, check_every=1, target=0.5, max_steps=1))
    assert not list((cache / "models").iterdir())
    assert "step 1: loss" in capsys.readouterr().err


def test_the_supervised_loss_is_over_response_tokens_alone():
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = make_model(QUICK, tokenizer).eval()
    rows = problems(5, seed=2)
    total, count = 0.0, 0
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        response = [*tokenizer(row["worked"])["input_ids"], tokenizer.eos_token_id]
        logprobs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        for place, token in enumerate(response, start=len(prompt) - 1):
            total -= logprobs[place, token].item()
        count += len(response)
    assert supervised_loss(model, tokenizer, rows).item() == pytest.approx(total / count, rel=1e-5)


def test_the_command_prints_the_folder(cache, monkeypatch, capsys):
    folder = cache / "made"
    monkeypatch.setattr("gspo.policy.tiny_moe.prepare", lambda seed: folder / str(seed))
    (folder / "5").mkdir(parents=True)
    assert main([str(cache / "link"), "--seed", "5"]) == 0
    assert (cache / "link").resolve() == (folder / "5").resolve()
    assert capsys.readouterr().out == f"{cache / 'link'}\n"

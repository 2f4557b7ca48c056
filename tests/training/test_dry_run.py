"""A dry run says what a run would meet, and reads no weight."""

from pathlib import Path

import pytest
import torch

from gspo.cli import main
from gspo.config import Config, build_config
from gspo.distributed.world import World
from gspo.errors import BadInputError
from gspo.reporting.run_folder import RunFolder
from gspo.training.dry_run import dry_run
from tests.policy.tiny import save_tiny
from tests.training.tiny_task import early_words


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = save_tiny(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"never read")
    return folder


def config(model: Path, /, **tables: object) -> Config:
    task = {"kind": "function", "function": "tests.training.tiny_task:rows", "held_out": 6}
    rollout = {"prompts": 4, "max_tokens": 8}
    return build_config({"model": {"path": str(model)}, "task": task, "rollout": rollout} | tables)


def test_it_tells_warnings_memory_task_and_rewards(model: Path) -> None:
    lines = dry_run(config(model, evaluation={"samples": 2}), [early_words])
    assert lines[0].startswith("warning: evaluation.samples > 1 with evaluation.temperature = 0")
    assert lines[1].startswith("memory: about ")
    assert "GB are free" in lines[1]
    assert lines[2] == "task: 18 training prompts, 6 held out, none in both; longest prompt: 1 token(s)"
    assert lines[3] == "rewards: early_words"


def test_repeated_questions_are_told(model: Path) -> None:
    task = {"kind": "function", "function": "tests.training.tiny_task:rows", "parameters": {"count": 60}, "held_out": 6}
    (line, *_) = dry_run(config(model, task=task), [early_words])
    assert line.startswith("warning: task: 10 rows repeat a question and are left out")


def test_a_resume_that_cannot_be_stops_it(model: Path, tmp_path: Path) -> None:
    run = RunFolder.create(config(model, run={"dir": str(tmp_path), "name": "run"}))
    other = config(model, run={"dir": str(tmp_path), "name": "other"})
    with pytest.raises(BadInputError, match=r"^run\.name = 'other': a resumed run stays in its folder"):
        dry_run(other, [early_words], resume=run.path)
    assert dry_run(run.read_config(), [early_words], resume=run.path)
    with pytest.raises(BadInputError, match=r"^run\.name: .*run exists"):
        dry_run(run.read_config(), [early_words])


def test_generating_ahead_by_several_processes_is_refused(model: Path) -> None:
    ahead = {"prompts": 4, "max_tokens": 8, "lag": 1, "engine": "server", "servers": ["http://127.0.0.1:8000"]}
    lagging = config(model, rollout=ahead, likelihoods={"old": "sampler"})
    with pytest.raises(BadInputError, match=r"^rollout\.lag = 1 with 2 processes"):
        dry_run(lagging, [early_words], World(rank=0, size=2))


def test_too_little_memory_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.policy.load.free_memory", lambda _: 1000)
    assert "0.0 GB are free (too little)" in dry_run(config(model), [early_words])[0]


def test_what_would_stop_the_run_stops_the_dry_run(model: Path) -> None:
    with pytest.raises(BadInputError, match=r"reward\.functions: none given"):
        dry_run(config(model))
    with pytest.raises(BadInputError, match=r"rollout\.prompts = 20: the task has only 18 distinct"):
        dry_run(config(model, rollout={"prompts": 20, "max_tokens": 8}), [early_words])
    with pytest.raises(BadInputError, match="leaves no room for a prompt"):
        dry_run(config(model, rollout={"prompts": 4, "max_tokens": 128}), [early_words])


@pytest.mark.parametrize("routing", [{"replay": "old"}, {"replay": "sampler"}, {"load_balancing_weight": 0.1}])
def test_experts_that_are_to_be_replayed_or_balanced_must_be_there(tmp_path: Path, routing: dict[str, object]) -> None:
    (name,) = routing
    for family, dense in (("llama", True), ("qwen3_moe", False)):
        folder = save_tiny(tmp_path / family, family)
        (folder / "model.safetensors").write_bytes(b"never read")
        if dense:
            with pytest.raises(
                BadInputError, match=rf"^routing\.{name}.*LlamaForCausalLM.* no Mixture-of-Experts layer"
            ):
                dry_run(config(folder, routing=routing), [early_words])
        else:
            assert dry_run(config(folder, routing=routing), [early_words])


def test_experts_that_vllm_cannot_report_on_a_cpu_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.policy.load.choose_device", lambda _: torch.device("cpu"))
    folder = save_tiny(tmp_path / "model", "qwen3_moe")
    rollout = {"prompts": 4, "max_tokens": 8, "engine": "vllm"}
    with pytest.raises(BadInputError, match="vLLM on a CPU does not report experts"):
        dry_run(config(folder, rollout=rollout, routing={"replay": "sampler"}), [early_words])
    assert dry_run(config(folder, rollout=rollout), [early_words])


def test_the_command_prints_the_resolved_config_and_makes_no_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "w{i} w4 w5", "answer": "w9"}}\n' for i in range(3, 30)))
    Path("a.toml").write_text(
        f'[model]\npath = "{model}"\n[task]\nkind = "jsonl"\npath = "rows.jsonl"\nheld_out = 5\n'
        '[[reward.functions]]\nfunction = "exact"\n[rollout]\nmax_tokens = 8\n'
    )
    assert main(["train", "a.toml", "--dry-run", "--training.steps", "3"]) == 0
    shown = capsys.readouterr().out
    assert '"steps": 3' in shown
    assert "task: 22 training prompts, 5 held out" in shown
    assert not Path("runs").exists()


def test_truncated_sampling_by_vllm_on_a_cpu_is_refused_by_name(model: Path) -> None:
    truncated = {"top_p": 0.9, "top_k": 50}
    with pytest.raises(BadInputError, match=r"^rollout\.top_p, rollout\.top_k, rollout\.min_p: vLLM on a CPU does not"):
        dry_run(config(model, rollout={**truncated, "engine": "vllm", "prompts": 4, "max_tokens": 8}), [early_words])
    assert dry_run(config(model, rollout={**truncated, "prompts": 4, "max_tokens": 8}), [early_words])


def test_of_several_processes_it_says_what_one_needs_and_what_none_can_have(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo.policy.load.free_memory", lambda _: 40_000_000_000)
    two = World(rank=0, size=2)
    assert "gathered" in dry_run(config(model, distributed={"shard": "full"}), [early_words], two)[0]
    whole = dry_run(config(model), [early_words], two)[0]
    assert "gathered" not in whole
    assert "20.0 GB are free" in whole, "they share the machine"
    with pytest.raises(BadInputError, match=r'^rollout\.engine = "vllm" with 2 processes'):
        dry_run(config(model, rollout={"prompts": 4, "max_tokens": 8, "engine": "vllm"}), [early_words], two)
    with pytest.raises(BadInputError, match=r"^model\.compile = true with distributed\.shard"):
        dry_run(
            config(model, model={"path": str(model), "compile": True}, distributed={"shard": "full"}),
            [early_words],
            two,
        )

"""A Mixture-of-Experts policy from scratch, for studies and tests: Qwen3-MoE, 1.3 million parameters.

It is initialised at random and taught addition with worked answers (`gspo.tasks.addition`) by supervised
steps until it solves about a third of fresh problems, which leaves reinforcement something to do. It is
kept in the user's cache as an ordinary `from_pretrained` folder with a character tokenizer.

    python -m gspo.policy.tiny_moe                      prints the folder, making it on the first call
    python -m gspo.policy.tiny_moe models/tiny-moe      also points a symbolic link at it
    python -m gspo.policy.tiny_moe --seed 1             another one
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gspo.errors import GspoError
from gspo.policy.smollm2 import cache_folder, point
from gspo.tasks.addition import ALPHABET, problems

PAD, EOS = "<pad>", "<eos>"
CONTEXT = 256


@dataclass(frozen=True, slots=True)
class Recipe:
    """Shape of the model and its cold start."""

    layers: int = 6
    hidden: int = 64
    heads: int = 4
    experts: int = 16
    expert_width: int = 64
    experts_per_token: int = 2
    batch: int = 128
    learning_rate: float = 2e-3
    warmup: int = 20
    check_every: int = 25
    target: float = 0.3
    max_steps: int = 400


def prepare(seed: int = 0, recipe: Recipe | None = None) -> Path:
    """Returns the folder of the policy that `seed` and `recipe` make, making it first if the cache lacks it.

    The folder appears whole or not at all. Raises GspoError if the cold start misses its target.
    """
    recipe = recipe or Recipe()
    mark = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_folder() / "models" / f"tiny-moe-{mark}-seed{seed}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as scratch:
        made = Path(scratch) / "model"
        tokenizer = make_tokenizer()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = make_model(recipe, tokenizer)
            cold_start(model, tokenizer, recipe, seed)
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have been first
                raise
    return folder


def make_tokenizer() -> Any:
    """One token per character of the task, and `<pad>` and `<eos>`: 17 in all."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([PAD, EOS, *ALPHABET])}
    characters = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def make_model(recipe: Recipe, tokenizer: Any) -> Any:
    """The policy with random weights, float32, on the CPU."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.expert_width,
        moe_intermediate_size=recipe.expert_width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.hidden // recipe.heads,
        num_experts=recipe.experts,
        num_experts_per_tok=recipe.experts_per_token,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3MoeForCausalLM(config)


def cold_start(model: Any, tokenizer: Any, recipe: Recipe, seed: int) -> float:
    """Supervised steps on worked answers until the sampled accuracy reaches the target; returns it.

    Raises GspoError after `max_steps` without reaching it.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    rows = problems(recipe.batch * recipe.max_steps, seed, "cold_start")
    accuracy = 0.0
    for step in range(1, recipe.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, step / recipe.warmup)
        loss = supervised_loss(model, tokenizer, rows[(step - 1) * recipe.batch : step * recipe.batch])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % recipe.check_every == 0:
            accuracy = sampled_accuracy(model, tokenizer, problems(recipe.batch, seed + step, "cold_start"))
            print(f"step {step}: loss {loss.item():.3f}, sampled accuracy {accuracy:.2f}", file=sys.stderr, flush=True)
            if accuracy >= recipe.target:
                return accuracy
    raise GspoError(
        f"tiny MoE, seed {seed}: sampled accuracy {accuracy:.2f} after {recipe.max_steps} supervised steps, "
        f"{recipe.target} is needed; try another seed"
    )


def supervised_loss(model: Any, tokenizer: Any, rows: Sequence[dict[str, str]]) -> Tensor:
    """Mean cross-entropy of the worked responses' tokens, EOS included, given their prompts."""
    end = tokenizer.eos_token
    batch = tokenizer([row["prompt"] + row["worked"] + end for row in rows], padding=True, return_tensors="pt")
    ids, attended = batch["input_ids"], batch["attention_mask"]
    responses = torch.tensor([len(row["worked"]) + 1 for row in rows])
    # Padding is on the left, so that responses end together and are the last tokens of each row.
    from_end = torch.arange(ids.shape[1], 0, -1)
    targets = torch.where(from_end[None, :] <= responses[:, None], ids, -100)
    logits = model(input_ids=ids, attention_mask=attended, position_ids=_positions(attended), use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


@torch.no_grad()
def sampled_accuracy(model: Any, tokenizer: Any, rows: Sequence[dict[str, str]]) -> float:
    """The share of problems whose response, sampled at temperature 1, ends in the right answer."""
    batch = tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt")
    output = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=max(len(row["worked"]) for row in rows) + 1,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right: int = sum(text.rpartition("#")[2] == row["answer"] for text, row in zip(texts, rows, strict=True))
    return right / len(rows)


def _positions(attended: Tensor) -> Tensor:
    return (attended.cumsum(-1) - 1).clamp(min=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: prints the folder; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gspo.policy.tiny_moe", description="Make a tiny MoE policy.")
    parser.add_argument("link", nargs="?", type=Path, help="symbolic link to point at the model's folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
    options = parser.parse_args(arguments)
    try:
        folder = prepare(options.seed)
        if options.link is not None:
            point(options.link, folder)
    except GspoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(options.link or folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Which Mixture-of-Experts models of the installed transformers can be recorded and replayed.

Every model class with experts is built at random from a tiny configuration and put through the proof: its
own experts replayed change nothing, other experts forced are the ones that run. The result is the table of
docs/moe_support.md.

    python scripts/moe_support.py            writes docs/moe_support.md
    python scripts/moe_support.py mixtral    prints the rows of one family
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from gspo.errors import BadInputError, GspoError
from gspo.policy.moe import moe_layers
from gspo.policy.routing import RoutingError, record_routing, replay_routing

DOCUMENT = Path(__file__).parents[1] / "docs" / "moe_support.md"
EXPERTS, CHOSEN = 8, 2

# Whatever of these a configuration knows is set; the rest keeps its default.
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "d_model": 32,
    "intermediate_size": 32,
    "ffn_hidden_size": 32,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "expert_intermediate_size": 16,
    "intermediate_size_mlp": 32,
    "dense_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_layers": 4,
    "n_layers": 4,
    "num_attention_heads": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 8,
    "max_position_embeddings": 64,
    "n_group": 2,
    "topk_group": 1,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "num_experts_per_token": CHOSEN,
    "moe_k": CHOSEN,
    "moe_topk": CHOSEN,
    "moe_top_k": CHOSEN,
    "top_k_experts": CHOSEN,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}

# What a family needs beyond TINY to be built or run.
SPECIAL: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": EXPERTS, "moe_top_k": CHOSEN},
    },
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "diffusion_gemma": {"hidden_size_per_layer_input": 0},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [16, 16], "head_dim": 128},
    "gemma4": {"enable_moe_block": True, "hidden_size_per_layer_input": 0},
    "glm4v_moe": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
    "glm5_next": {"index_topk": 16, "qk_rope_head_dim": 0},
    "granitemoehybrid": {"mamba_n_heads": 4},
    "jamba": {"attn_layer_offset": 0, "attn_layer_period": 2},
    "lfm2_moe": {"layer_types": ["full_attention"] * 4},
    "mimo_v2_flash": {"layer_types": ["full_attention"] * 4},
    "mistral4": {"head_dim": 16},
    "qwen4_exp": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 1,
    },
    "step3p7": {"sliding_window": 16},
    "zaya": {"num_experts_per_tok": 1},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    family: str
    model: str
    block: str
    result: str


def families() -> Iterator[tuple[str, list[type]]]:
    """Each family whose modelling code has experts, with the model class to test first."""
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        if "Experts" not in path.read_text(encoding="utf-8"):
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        found = [
            kind
            for kind in vars(module).values()
            if inspect.isclass(kind)
            and issubclass(kind, transformers.PreTrainedModel)
            and kind.__module__ == module.__name__
            and kind.config_class is not None
        ]
        for ending in ("ForCausalLM", "TextModel", "ForConditionalGeneration", "Model"):
            chosen = [kind for kind in found if kind.__name__.endswith(ending) and "PreTrained" not in kind.__name__]
            if chosen:
                yield path.parent.name, chosen
                break


def build(family: str, kind: Any) -> Any:
    """A tiny random model."""
    default = kind.config_class()
    known = {name for name in TINY if name in inspect.signature(kind.config_class).parameters or name in vars(default)}
    known |= set(getattr(kind.config_class, "attribute_map", {})) & TINY.keys()
    settings = {name: TINY[name] for name in known} | SPECIAL.get(family, {})
    config = kind.config_class(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # a table of experts by token id, all zero in a random model
            buffer.copy_(torch.rand(buffer.shape[0], EXPERTS).argsort(-1)[:, :CHOSEN])
    return model


@torch.no_grad()
def forward(model: Any, ids: Tensor) -> Tensor:
    settings = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    output = model(input_ids=ids, use_cache=False, **settings)
    value: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return value


def prove(model: Any) -> None:
    """Raise unless own experts change nothing and other experts run when they are forced."""
    ids = torch.randint(3, 64, (2, 12))
    with record_routing(model) as routes:
        native = forward(model, ids)
    with replay_routing(model, routes, min_agreement=0.99):
        if not torch.equal(forward(model, ids), native):
            raise GspoError("its own experts replayed change the output")
    layers = moe_layers(model)
    others = {
        name: indices if layers[name].fixed else (indices.long() + 1) % layers[name].num_experts
        for name, indices in routes.items()
    }
    with replay_routing(model, others, min_agreement=None), record_routing(model) as executed:
        changed = forward(model, ids)
    if any(not torch.equal(executed[name].long(), indices.long()) for name, indices in others.items()):
        raise GspoError("other experts ran than those forced")
    if torch.equal(changed, native):
        raise GspoError("forcing other experts does not change the output")


def examine(family: str, kind: Any) -> Row:
    """The row of one model class."""
    block = "-"
    try:
        model = build(family, kind)
    except Exception as error:  # noqa: BLE001 (configurations raise what they like)
        return Row(family, kind.__name__, block, f"not built: {short(error)}")
    try:
        layers = moe_layers(model)
        if layers:
            block = type(next(iter(layers.values())).block).__name__
        prove(model)
    except BadInputError as error:
        return Row(family, kind.__name__, block, f"refused: {str(error).split('replayed: ')[1].split(';')[0]}")
    except RoutingError as error:
        return Row(family, kind.__name__, block, f"refused: {str(error).removeprefix('routing: ').split(',')[0]}")
    except Exception as error:  # noqa: BLE001 (models raise what they like)
        return Row(family, kind.__name__, block, f"not run: {short(error)}")
    return Row(family, kind.__name__, block, "exact")


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:120].replace("|", "/")


INTRODUCTION = """# Routing Replay: which models

Written by `python scripts/moe_support.py` with transformers {version}: {exact} of {all} model classes can be recorded
and replayed exactly. Each class of the installed transformers whose code has experts was built at random from a
tiny configuration. "exact" means: its own experts replayed give bitwise the same output, and other experts, forced,
are those that run in every layer. A model that is refused stops with its class's name when `routing.replay` is not
`"off"`; it is never replayed in part.

"""


def document(rows: list[Row]) -> str:
    """The page: the table of all rows."""
    exact = sum(row.result == "exact" for row in rows)
    lines = [f"| {row.family} | `{row.model}` | `{row.block}` | {row.result} |" for row in rows]
    head = ["| family | model | MoE block | Routing Replay |", "| --- | --- | --- | --- |"]
    text = INTRODUCTION.format(version=transformers.__version__, exact=exact, all=len(rows))
    return text + "\n".join([*head, *lines]) + "\n"


def main(only: list[str]) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    rows = [examine(family, kind) for family, kinds in families() if not only or family in only for kind in kinds]
    text = document(rows)
    if only:
        print(text)
    else:
        DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

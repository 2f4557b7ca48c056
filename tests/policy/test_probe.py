import logging

import pytest
import torch
from transformers import AttentionInterface

from gspo.policy.attention import NAME, layout_attention
from gspo.policy.probe import probe
from tests.policy.tiny import FAMILIES, HYBRIDS, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_shares_prompts_and_has_its_head_understood(family):
    findings = probe(tiny_model(family), "shared")
    assert findings.layout == "shared"
    assert findings.layout_attention
    assert findings.exact_head
    assert findings.notes == ()


@pytest.mark.parametrize("family", HYBRIDS)
def test_models_that_carry_a_state_along_the_row_fall_back_to_padded_and_say_so_once(family, caplog):
    with caplog.at_level(logging.WARNING, logger="gspo"):
        findings = probe(tiny_model(family), "shared")
    assert findings.layout == "padded"
    assert findings.exact_head
    assert [record.message for record in caplog.records if record.name == "gspo.policy.probe"] == list(findings.notes)
    assert "shared rollouts are not exact for this model; using padded" in findings.notes[0]


def test_a_layout_that_is_asked_for_is_kept():
    model = tiny_model("llama")
    assert probe(model, "packed").layout == "packed"
    assert probe(model, "padded").layout == "padded"


def test_a_head_with_something_unknown_in_it_falls_back_to_logits_with_a_warning(caplog):
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda *seen: seen[-1] + torch.arange(seen[-1].shape[-1]))
    with caplog.at_level(logging.WARNING, logger="gspo"):
        findings = probe(model, "shared")
    assert not findings.exact_head
    assert "output head is not understood" in findings.notes[0]
    assert [record.message for record in caplog.records if record.name == "gspo.policy.probe"] == list(findings.notes)


def test_a_window_that_the_layers_do_not_ask_for_is_not_trusted(monkeypatch):
    # The window is longer than the probe's sequences, so that the numbers alone would not tell.
    model = tiny_model("mistral")
    model.config.sliding_window = 64
    assert probe(model, "shared").layout_attention

    def forgetful(*args, **kwargs):
        return layout_attention(*args, **{**kwargs, "sliding_window": None})

    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, forgetful)
    findings = probe(model, "shared")
    assert (findings.layout, findings.layout_attention) == ("packed", False)

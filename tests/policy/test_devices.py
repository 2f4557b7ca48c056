import pytest
import torch

from gspo.policy import devices


@pytest.mark.parametrize(("known", "notes"), [({"avx2": True}, 1), ({"avx512_bf16": True}, 0), ({"amx_bf16": True}, 0)])
def test_a_cpu_without_bfloat16_instructions_is_told(monkeypatch, known, notes):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    cpu = torch.device("cpu")
    found = devices.slow_autocast(devices.choose_autocast("bfloat16", cpu), cpu)
    assert len(found) == notes
    assert all(note.startswith('model.dtype = "bfloat16": this CPU has no matrix instructions') for note in found)
    assert devices.slow_autocast(devices.choose_autocast("auto", cpu), cpu) == ()

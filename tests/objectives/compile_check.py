"""Compiled objectives against eager ones; run as a program, where annotations are not checked at run time.

The checking wrappers are no graph, so a process that checks annotations cannot compile what it checks.
"""

from __future__ import annotations

import pytest
import torch

from gspo.objectives import LOSSES, Totals, group_advantages
from tests.objectives.cases import random_case, run


def main() -> None:
    case = random_case(0, spread=0.3)
    case.mask[2] = False
    for name, loss in LOSSES.items():
        compiled = torch.compile(loss, fullgraph=True, backend="inductor" if name == "gspo" else "aot_eager")
        for options in ({}, {"totals": Totals(9, 77)}) if name == "gspo" else ({},):
            expected, expected_gradient = run(loss, case, **options)
            found, gradient = run(compiled, case, **options)
            torch.testing.assert_close(found.loss, expected.loss)
            torch.testing.assert_close(gradient, expected_gradient)
            torch.testing.assert_close(found.log_ratios, expected.log_ratios)
            assert found.stats.as_floats() == pytest.approx(expected.stats.as_floats(), rel=1e-5), name
    spans = torch.randint(0, 3, case.mask.shape, generator=torch.Generator().manual_seed(0))
    token = LOSSES["gspo_token"]
    compiled = torch.compile(token, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, case, spans=spans)[1], run(token, case, spans=spans)[1])
    ids = torch.tensor([3, 3, 1, 1, 3, 1])
    compiled = torch.compile(group_advantages, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(case.advantages, ids), group_advantages(case.advantages, ids))
    print("compiled as eager")


if __name__ == "__main__":
    main()

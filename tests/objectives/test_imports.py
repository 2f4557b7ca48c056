"""The objectives can be imported into anybody's trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_objectives_import_nothing_else_of_the_project() -> None:
    code = (
        "import sys, gspo\n"
        "before = set(sys.modules)\n"
        "import gspo.objectives\n"
        "ours = {m for m in set(sys.modules) - before if m.split('.')[0] == 'gspo'}\n"
        "print(sorted(m for m in ours if not m.startswith('gspo.objectives')))\n"
        "print(sorted({'transformers', 'pydantic', 'rich'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["[]", "[]"]

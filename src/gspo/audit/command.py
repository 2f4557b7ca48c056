"""What `gspo audit` does once its settings are known to be right."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from gspo.audit.audit import audit
from gspo.audit.page import page
from gspo.audit.report import print_audit
from gspo.audit.weights import EngineWeights
from gspo.config import Config
from gspo.reporting.files import write_atomically


def run_audit(
    config: Config,
    *,
    run: Path | None,
    engine_weights: EngineWeights | None,
    json_file: Path | None,
    html: Path | None,
) -> None:
    """Audits, shows the tables, and writes the files that are asked for."""
    found = audit(config, run=run, engine_weights=engine_weights)
    print_audit(Console(), found)
    if json_file is not None:
        write_atomically(json_file, json.dumps(found.as_record(), indent=2).encode() + b"\n")
    if html is not None:
        write_atomically(html, page(found).encode())

"""The studies are scripts that import their neighbours."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "studies"
sys.path.insert(0, str(FOLDER))

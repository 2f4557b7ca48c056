"""`python -m gspo` is the `gspo` command."""

import sys

from gspo.cli import main

sys.exit(main())

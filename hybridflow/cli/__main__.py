"""`python -m hybridflow.cli`: the command."""

from __future__ import annotations

import sys

from hybridflow.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

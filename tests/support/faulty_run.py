"""A run with a role replaced by one of `faulty_roles`: `python -m tests.support.faulty_run ROLE NAME ARGUMENTS...`."""

from __future__ import annotations

import sys

from hybridflow.roles import policy, rollout
from tests.support import faulty_roles

if __name__ == "__main__":
    role, name = sys.argv[1:3]
    home = {"PolicyWorker": policy, "RolloutWorker": rollout}[role]
    setattr(home, role, getattr(faulty_roles, name))
    # Only now: whoever imports the role after this has the faulty one.
    from hybridflow.cli.main import main

    sys.exit(main(sys.argv[3:]))

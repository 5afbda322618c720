"""A run with a role replaced by one of `faulty_roles`: `python -m tests.support.faulty_run ROLE NAME ARGUMENTS...`."""

from __future__ import annotations

import sys

from hybridflow.cli.main import main
from hybridflow.trainer.startup import role_specs
from tests.support import faulty_roles

if __name__ == "__main__":
    role, name = sys.argv[1:3]
    sound, faulty = getattr(role_specs, role), getattr(faulty_roles, name)
    setattr(role_specs, role, faulty)
    role_specs._LANGUAGE_MODELS = {
        model: (group, faulty if worker is sound else worker)
        for model, (group, worker) in role_specs._LANGUAGE_MODELS.items()
    }
    sys.exit(main(sys.argv[3:]))

"""The command of a launch that `launch.py` measures: it says when it was started, and fails when it is told to.

    python -P benchmarks/launch_command.py EVENTS fail|lost IDLE_S

EVENTS gets a line with a name and the time for each thing that happens. "fail" ends it after IDLE_S seconds, "lost"
when a host is lost.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybridflow.cluster.driver_link import driver_link


def main() -> int:
    """Run it; 1, as it always fails."""
    events, what, idle_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    link = driver_link()
    assert link is not None

    def note(name: str) -> None:
        with events.open("a") as file:
            file.write(f"{name} {time.time()}\n")

    note("started")
    if what == "fail":
        time.sleep(idle_s)
    else:
        while link.lost is None:
            time.sleep(0.001)
    note("failed")
    return 1


if __name__ == "__main__":
    sys.exit(main())

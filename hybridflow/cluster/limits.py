"""Limits of a run's waits: `limits:` in a recipe."""

from __future__ import annotations

from pydantic import Field

from engine3d.settings import Settings


class LimitsConfig(Settings):
    """Limits of a run's waits, in seconds. Each limit ends the run with a line that says who was waited for.

    What belongs to one part has its limits there: `train.timeout_s` (a collective operation), `train.start_timeout_s`,
    `rollout.engine.start_timeout_s` and `request_timeout_s`, `rollout.weights.timeout_s`, and `timeout_s` of a reward
    function.
    """

    quiet_s: float = Field(30.0, gt=0)
    """Without an answer, after which a line reports the progress of a call; again after twice as long. Where nothing
    moves, it says who is waited for and since when, and the run's processes write their stacks beside their logs. A
    call that takes less than twice as long as one before is not reported. It ends nothing."""
    progress_s: float | None = Field(40.0, gt=0)
    """Without progress of any rank that is waited for, after which the run ends and names the rank that keeps the
    others waiting: one whose process is stopped, that gives no heartbeat, or that has done the fewest parts of an
    update, a forward pass or a rollout. Three times as long as such a call has paused before, if that is more. None:
    never."""
    compile_s: float = Field(900.0, gt=0)
    """Limit in place of `progress_s` in the first call of a kind, in which kernels are compiled and graphs captured."""
    call_s: float = Field(1800.0, gt=0)
    """Limit of a call on the ranks of a role: an update, a rollout, a transfer of weights. Also how long a process of
    Ray may be stopped."""
    save_s: float = Field(3600.0, gt=0)
    """Limit of writing the rest of a checkpoint when the run waits for it."""
    ray_start_s: float = Field(180.0, gt=0)
    """Limit of the start of Ray on a host; it is started again where it gives up by itself before."""
    host_s: float = Field(30.0, gt=0)
    """Without a sign of life of a host, after which it is lost."""
    gather_s: float = Field(600.0, gt=0)
    """Until all hosts of a launch are there."""
    spare_s: float = Field(0.0, ge=0)
    """Wait for a host that takes the place of a lost one, where a run that is started again (`--max-restarts`) does not
    fit on the hosts that are left."""
    placement_s: float = Field(60.0, gt=0)
    """Until Ray finds the devices of the run free."""
    stop_s: float = Field(10.0, gt=0)
    """Limit of an orderly end after SIGINT or SIGTERM, and of the interpreter's at the very end; what is left is killed
    then."""

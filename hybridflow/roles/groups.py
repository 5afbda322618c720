"""Every role's ranks as one group, with the methods of its worker class.

Apart from the workers, since only the driver has groups: a rank imports nothing of this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridflow.cluster.devices.device_map import Device
from hybridflow.roles.judge import JudgeWorker
from hybridflow.roles.model import ModelWorker
from hybridflow.roles.policy import PolicyWorker
from hybridflow.roles.reward import FunctionRewardWorker
from hybridflow.roles.rollout import RolloutWorker
from hybridflow.roles.teacher import TeacherEngineWorker, TeacherWorker
from hybridflow.roles.value import ValueWorker
from hybridflow.workers.methods import Caller
from hybridflow.workers.worker_group import SomeRanks, WorkerGroup


class ModelGroup(WorkerGroup):
    """The ranks of a Megatron-Core model."""

    start = ModelWorker.start
    apply = ModelWorker.apply
    trace_next_update = ModelWorker.trace_next_update
    reset_optimizer = ModelWorker.reset_optimizer
    load = ModelWorker.load
    restart_schedule = ModelWorker.restart_schedule
    begin_checkpoint = ModelWorker.begin_checkpoint
    checkpoint_written = ModelWorker.checkpoint_written
    finish_checkpoint = ModelWorker.finish_checkpoint
    abandon_checkpoint = ModelWorker.abandon_checkpoint
    weights_digest = ModelWorker.weights_digest
    export = ModelWorker.export
    offload = ModelWorker.offload
    onload = ModelWorker.onload
    take_offload_stats = ModelWorker.take_offload_stats


class PolicyGroup(ModelGroup):
    """The ranks of an actor or a reference policy."""

    logprobs = PolicyWorker.logprobs
    base_logprobs = PolicyWorker.base_logprobs
    actor_logprobs = PolicyWorker.actor_logprobs
    top_tokens = PolicyWorker.top_tokens
    update = PolicyWorker.update
    supervise = PolicyWorker.supervise
    share_weights = PolicyWorker.share_weights
    connect_weights = PolicyWorker.connect_weights
    send_weights = PolicyWorker.send_weights


class TeacherGroup(ModelGroup):
    """The ranks of a teacher on Megatron-Core."""

    teacher_logprobs = TeacherWorker.teacher_logprobs


class TeacherEngineGroup(WorkerGroup):
    """Engines that serve a teacher."""

    start = TeacherEngineWorker.start
    teacher_logprobs = TeacherEngineWorker.teacher_logprobs


class ValueGroup(ModelGroup):
    """The ranks of a critic, a reward model or a cost model."""

    values = ValueWorker.values
    score = ValueWorker.score
    update_values = ValueWorker.update_values


class _TransferCalls(Caller):
    """Calls of engines in a weight transfer."""

    share_weights = RolloutWorker.share_weights
    connect_weights = RolloutWorker.connect_weights
    begin_weights = RolloutWorker.begin_weights
    receive_weights = RolloutWorker.receive_weights
    seal_weights = RolloutWorker.seal_weights
    verify_weights = RolloutWorker.verify_weights
    commit_weights = RolloutWorker.commit_weights
    recommit_weights = RolloutWorker.recommit_weights


class RolloutGroup(_TransferCalls, WorkerGroup):
    """Rollout engines."""

    start = RolloutWorker.start
    restart = RolloutWorker.restart
    trace = RolloutWorker.trace
    offload = RolloutWorker.offload
    onload = RolloutWorker.onload
    take_turn = RolloutWorker.take_turn
    check_part = RolloutWorker.check_part
    take_offload_stats = RolloutWorker.take_offload_stats

    def engines(self, numbers: Sequence[int]) -> EngineCalls:
        """Return some of the engines, by their numbers in order."""
        hosts = self.layout.tp
        return EngineCalls(self, [hosts * number + host for number in numbers for host in range(hosts)])


class EngineCalls(_TransferCalls, SomeRanks):
    """Some of the engines of a group."""

    restart = RolloutWorker.restart


class JudgeGroup(WorkerGroup):
    """Servers of a judge model."""

    start = JudgeWorker.start
    check = JudgeWorker.check


class FunctionRewardGroup(WorkerGroup):
    """The ranks that call reward and cost functions."""

    start = FunctionRewardWorker.start
    score = FunctionRewardWorker.score
    score_set = FunctionRewardWorker.score_set


type Offloaded = ModelGroup | RolloutGroup
"""A group that can leave its devices."""


def begin_in_turn(offloaded: Sequence[str], devices: Mapping[str, Sequence[Device]]) -> tuple[str, ...]:
    """Return the roles that start one after the other, in order; all others start at the same time.

    A model that is offloaded is on its device while it is built, and has left it before the next one is built and
    before an engine there takes what is free for its KV cache: no start needs more than a step.
    """
    taken = {device for role in offloaded for device in devices[role]}
    return (*offloaded, "rollout") if not taken.isdisjoint(devices.get("rollout", ())) else tuple(offloaded)


def offloaded_groups(
    models: Mapping[str, ModelGroup], offloaded: Sequence[str], engines: RolloutGroup | None, *, release_weights: bool
) -> dict[str, Offloaded]:
    """Return the offloaded groups by role. Other groups release only caches.

    Args:
        models: next to the actor, by role.
        offloaded: roles of models that are offloaded.
        engines: of the run; None without any.
        release_weights: True if the engines release their weights.
    """
    groups: dict[str, Offloaded] = {role: models[role] for role in offloaded}
    return groups | ({"rollout": engines} if engines is not None and release_weights else {})


def offload_metrics(groups: Mapping[str, Offloaded]) -> dict[str, float]:
    """Compute the moves of roles since the last call, by metric name: the slowest rank's time, and bytes of all ranks.

    Args:
        groups: by role.
    """
    pending = {role: group.take_offload_stats() for role, group in groups.items()}
    values: dict[str, float] = {}
    for role, future in pending.items():
        ranks = future.result()
        values[f"memory/{role}_offload_ms"] = 1000 * max(rank.offload_s for rank in ranks)
        values[f"memory/{role}_onload_ms"] = 1000 * max(rank.onload_s for rank in ranks)
        values[f"memory/{role}_offloaded_bytes"] = sum(rank.nbytes for rank in ranks)
    return values

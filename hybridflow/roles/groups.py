"""Every role's ranks as one group, with the methods of its worker class.

Apart from the workers, since only the driver has groups: a rank imports nothing of this.
"""

from __future__ import annotations

from collections.abc import Sequence

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

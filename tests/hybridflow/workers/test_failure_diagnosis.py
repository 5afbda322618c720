"""Diagnosis of the cause in scripted situations: no Ray, no processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.errors.rank_failure import Failure
from hybridflow.workers.failure_diagnosis import (
    DIED_WITHOUT_A_WORD,
    ENDED_FOR_MEMORY,
    INPUT_LOST,
    CallState,
    Kind,
    RankError,
    RankUserError,
    diagnose,
    error_of,
    kind_of,
    most_telling_error,
)

LOGS = Path("/logs")
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"
NCCL = "DistBackendError: NCCL communicator was aborted on rank 0"
ENGINE = "EngineError: rollout engine died during generate: its process ended with -9 after: gloo: socket closed"
FULL = "GPU out of memory: tried to allocate 1.95 GiB with 1.58 GiB of 139.81 GiB free"


def failed(rank: int, error: str, at: float = 0.0, *, of: str = "actor.update", user_error: bool = False) -> Failure:
    role, method = of.split(".")
    return Failure(role, rank, method, error, user_error, at, stack="")


def state(
    of: str,
    *failures: Failure,
    silent: tuple[int, ...] = (),
    inputs: tuple[CallState, ...] = (),
    earlier: tuple[CallState, ...] = (),
) -> CallState:
    role, method = of.split(".")
    return CallState(role, method, failures, silent, inputs, earlier, LOGS)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("ValueError: sample 17 has no response tokens", Kind.RAISED),
        (FULL, Kind.RAISED),
        (DIED_WITHOUT_A_WORD, Kind.DIED),
        (ENDED_FOR_MEMORY, Kind.DIED),
        (ENGINE, Kind.DIED),
        (INPUT_LOST, Kind.LOST),
        (GLOO, Kind.LOST),
        (NCCL, Kind.LOST),
        ("RuntimeError: timed out waiting for 2 of 4 ranks", Kind.LOST),
        ("EngineError: rank 1 of the actor is gone", Kind.LOST),
        ("EngineError: rank 1 did not answer within 30 s", Kind.LOST),
    ],
)
def test_what_a_failure_says_of_the_cause(error: str, kind: Kind) -> None:
    assert kind_of(failed(0, error)) == kind


def test_what_the_user_can_put_right_is_a_cause_whatever_its_words() -> None:
    line = "reward.py: connection refused by the judge at localhost:80"
    assert kind_of(failed(0, line, user_error=True)) == Kind.RAISED
    assert kind_of(failed(0, line)) == Kind.LOST


SITUATIONS = {
    "a rank raises, then its neighbours lose their connection": (
        state("actor.update", failed(0, GLOO, 1.0), failed(1, "ValueError: no loss", 1.5), failed(2, NCCL, 0.5)),
        "actor rank 1, update: ValueError: no loss (log: /logs/actor-1.log)",
    ),
    "two ranks raise: the first in time": (
        state("actor.update", failed(0, "ValueError: later", 2.0), failed(3, "ValueError: first", 1.0)),
        "actor rank 3, update: ValueError: first (log: /logs/actor-3.log)",
    ),
    "at the same time: the lower rank": (
        state("actor.update", failed(3, "ValueError: loss"), failed(1, "ValueError: loss")),
        "actor rank 1, update: ValueError: loss (log: /logs/actor-1.log)",
    ),
    "a rank is killed by a signal, which its neighbours know of before Ray": (
        state("actor.update", failed(0, GLOO, 1.0), failed(1, DIED_WITHOUT_A_WORD, 2.0)),
        f"actor rank 1, update: {DIED_WITHOUT_A_WORD} (log: /logs/actor-1.log)",
    ),
    "the machine runs out of memory": (
        state("actor.update", failed(0, GLOO, 1.0), failed(1, ENDED_FOR_MEMORY, 2.0)),
        f"actor rank 1, update: {ENDED_FOR_MEMORY} (log: /logs/actor-1.log)",
    ),
    "a rank that raised outranks one that Ray says died before it": (
        state("actor.update", failed(0, DIED_WITHOUT_A_WORD, 1.0), failed(1, "ValueError: no loss", 2.0)),
        "actor rank 1, update: ValueError: no loss (log: /logs/actor-1.log)",
    ),
    "only lost neighbours: the first of them": (
        state("actor.update", failed(1, GLOO, 2.0), failed(0, NCCL, 1.0), silent=(2,)),
        f"actor rank 0, update: {NCCL} (log: /logs/actor-0.log)",
    ),
    "an engine dies": (
        state("rollout.generate", failed(0, ENGINE, of="rollout.generate")),
        f"rollout rank 0, generate: {ENGINE} (log: /logs/rollout-0.log)",
    ),
    "what a user can put right has no log, and outranks a lost neighbour": (
        state("critic.values", failed(0, GLOO, of="critic.values"), failed(1, "no score", 9.0, user_error=True)),
        "actor rank 1, update: no score",
    ),
    "a rank does not answer": (
        state("actor.update", silent=(1,)),
        "actor rank 1, update: no answer within 30 s; the stacks of its threads are in /logs/actor-1.stacks",
    ),
    "some ranks do not": (
        state("actor.update", silent=(1, 3)),
        "actor ranks 1, 3, update: no answer within 30 s; the stacks of its threads are in /logs/actor-1.stacks",
    ),
    "an input failed, and was passed on": (
        state(
            "actor.update",
            failed(0, "ValueError: no number", of="critic.values"),
            inputs=(state("critic.values", failed(1, "ValueError: no number", of="critic.values")),),
        ),
        "critic rank 1, values: ValueError: no number (log: /logs/critic-1.log)",
    ),
    "a process that was to make an input died": (
        state(
            "actor.update",
            failed(0, INPUT_LOST),
            inputs=(
                state("reference.logprobs", silent=(0, 1)),
                state("critic.values", failed(0, DIED_WITHOUT_A_WORD, of="critic.values")),
            ),
        ),
        f"critic rank 0, values: {DIED_WITHOUT_A_WORD} (log: /logs/critic-0.log)",
    ),
    "an input of an input failed": (
        state(
            "actor.update",
            silent=(0,),
            inputs=(
                state(
                    "critic.values",
                    silent=(0,),
                    inputs=(state("rollout.generate", failed(0, "ValueError: no prompt", of="rollout.generate")),),
                ),
            ),
        ),
        "rollout rank 0, generate: ValueError: no prompt (log: /logs/rollout-0.log)",
    ),
    "an input has not answered either": (
        state("actor.update", silent=(0, 1), inputs=(state("critic.values", silent=(1,)),)),
        "critic rank 1, values: no answer within 30 s; the stacks of its threads are in /logs/critic-1.stacks",
    ),
    "an earlier call on its devices failed": (
        state("actor.update", silent=(0,), earlier=(state("critic.values", failed(0, FULL, of="critic.values")),)),
        f'critic rank 0, values: {FULL}; see "hybridflow check RECIPE --memory"; to need less: ',
    ),
    "an earlier call on its devices is slow": (
        state(
            "actor.update",
            silent=(0, 1),
            earlier=(state("critic.values"), state("reference.logprobs", silent=(2,)), state("a.b", silent=(0,))),
        ),
        "actor ranks 0, 1, update: no turn within 30 s, since reference rank 2, logprobs has not ended; "
        "the stacks of its threads are in /logs/reference-2.stacks",
    ),
    "its turn does not come, nor that of what it is to have of its group before": (
        state(
            "actor.update",
            silent=(0,),
            inputs=(state("actor.onload", silent=(0,)),),
            earlier=(state("critic.values", silent=(0,)),),
        ),
        "actor rank 0, update: no turn within 30 s, since critic rank 0, values has not ended; "
        "the stacks of its threads are in /logs/critic-0.stacks",
    ),
    "a call that failed itself does not wait for a slow one": (
        state(
            "actor.update",
            failed(0, "ValueError: no loss"),
            silent=(1,),
            earlier=(state("critic.values", silent=(0,)),),
        ),
        "actor rank 0, update: ValueError: no loss (log: /logs/actor-0.log)",
    ),
}


@pytest.mark.parametrize(("call", "line"), SITUATIONS.values(), ids=SITUATIONS)
def test_the_cause(call: CallState, line: str) -> None:
    error = diagnose(call, 30.0)[-1].error
    assert str(error).startswith(line) and (str(error) == line or line.endswith(": "))
    assert "\n" not in str(error)


def test_each_group_on_the_way_ends_with_its_own_error() -> None:
    made = state("critic.values", failed(1, DIED_WITHOUT_A_WORD, of="critic.values"))
    call = state("actor.update", failed(0, INPUT_LOST), inputs=(made,))
    symptom, cause = diagnose(call, 30.0)
    assert (symptom.call, cause.call) == (call, made)
    assert str(symptom.error).startswith(f"actor rank 0, update: {INPUT_LOST}")


def test_the_group_of_an_earlier_call_does_not_end_for_it() -> None:
    late = state("actor.update", silent=(1,), earlier=(state("critic.values", silent=(0,)),))
    assert [entry.call for entry in diagnose(late, 30.0)] == [late]  # the other may only be slow


def test_a_user_error_stays_one() -> None:
    [result] = diagnose(state("actor.update", failed(0, "prompt 3 is too long", user_error=True)), 30.0)
    assert isinstance(result.error, RankUserError) and result.error.failure.error == "prompt 3 is too long"


def test_of_several_groups_one_that_reported_something_is_the_cause() -> None:
    lost, raised = error_of(failed(0, GLOO, 1.0), None), error_of(failed(0, "ValueError: no loss", 2.0), None)
    died = error_of(failed(0, DIED_WITHOUT_A_WORD, 0.0), None)
    late = RankError("actor rank 1, update: no answer within 30 s")
    assert most_telling_error([late, lost, raised, died]) is raised
    assert most_telling_error([late, lost, died]) is died
    assert most_telling_error([late, lost]) is lost
    assert most_telling_error([late]) is late


def test_what_to_change_where_memory_is_full_depends_on_the_role() -> None:
    line = str(error_of(failed(0, f"EngineError: {FULL}", of="rollout.generate"), None))
    assert line.endswith(
        "to need less: a smaller rollout.engine.mem_fraction_static, max_total_tokens or max_running_requests"
    )
    training = str(error_of(failed(0, FULL), None))
    assert "train.micro_batch_tokens" in training and "more of tp, pp, cp and ep in train.layout" in training

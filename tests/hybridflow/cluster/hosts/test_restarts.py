"""Decisions when a run of a launch's command has ended."""

from __future__ import annotations

from hybridflow.cluster.hosts.description import Host, HostRole
from hybridflow.cluster.hosts.restarts import CommandOutcome, differences, first_attempt, fits, next_attempt, why_over


def host(index: int, role: HostRole | None = None, gpus: int = 0, slots: int = 4) -> Host:
    return Host(index, f"host-{index}", f"10.0.0.{index}", role=role, gpus=gpus, cpu_slots=slots)


def test_the_last_hosts_stand_by() -> None:
    attempt = first_attempt([host(0), host(1), host(2)], 1)
    assert attempt.numbers == (0, 1)
    assert attempt.hosts == (host(0), host(1))
    assert attempt.is_whole


def test_without_a_loss_the_hosts_are_the_same() -> None:
    hosts = [host(0), host(1), host(2)]
    last = first_attempt(hosts, 1)
    following = next_attempt(last, hosts, hosts)
    assert following == last
    assert differences(last, following) == []


def test_a_spare_takes_index_role_and_slots_of_the_lost_host() -> None:
    hosts = [host(0, "train"), host(1, "rollout"), host(2, "rollout"), host(3, slots=8)]
    last = first_attempt(hosts, 1)
    left = [hosts[0], hosts[2], hosts[3]]
    following = next_attempt(last, left, left)
    assert following.numbers == (0, 3, 2)
    taken = following.hosts[1]
    assert (taken.index, taken.name, taken.role, taken.cpu_slots) == (1, "host-3", "rollout", 4)
    assert [item.index for item in following.hosts] == [0, 1, 2]
    assert differences(last, following) == ["host-3 (10.0.0.3) takes the place of host-1 (10.0.0.1)"]


def test_a_spare_of_another_role_or_with_other_devices_takes_no_place() -> None:
    at_ = host(1, "rollout", gpus=8)
    assert fits(host(5, "rollout", gpus=8), at_)
    assert fits(host(5, gpus=8, slots=9), at_)
    assert not fits(host(5, "train", gpus=8), at_)
    assert not fits(host(5, gpus=4), at_)
    assert not fits(host(5, gpus=8, slots=3), at_)
    assert not fits(host(5, "rollout"), host(1))


def test_a_spare_for_the_role_comes_before_one_for_anything() -> None:
    hosts = [host(0), host(1, "rollout"), host(2), host(3, "rollout")]
    last = first_attempt(hosts, 2)
    left = [hosts[0], hosts[2], hosts[3]]
    assert next_attempt(last, left, left).numbers == (0, 3)


def test_without_a_spare_the_hosts_that_are_left_are_counted_anew() -> None:
    hosts = [host(0, "train"), host(1, "rollout"), host(2, "rollout")]
    last = first_attempt(hosts, 0)
    left = [hosts[0], hosts[2]]
    following = next_attempt(last, left, left)
    assert following.numbers == (0, 2)
    assert not following.is_whole
    assert [(item.index, item.name, item.role) for item in following.hosts] == [
        (0, "host-0", "train"),
        (1, "host-2", "rollout"),
    ]
    assert differences(last, following) == [
        "no host takes the place of host-1 (10.0.0.1)",
        "the run goes on with 2 of 3 hosts",
    ]
    # It comes back, and fills the place that is still free.
    back = host(1, "rollout", slots=5)
    complete = next_attempt(following, left, [*left, back])
    assert complete.numbers == (0, 1, 2) and complete.is_whole
    assert differences(following, complete) == ["host-1 (10.0.0.1) takes the place of host-1 (10.0.0.1)"]


def test_one_that_has_stood_by_comes_before_one_that_was_started_anew() -> None:
    hosts = [host(0), host(1), host(2)]
    last = first_attempt(hosts, 1)
    assert next_attempt(last, [hosts[0], hosts[2]], hosts).numbers == (0, 2)
    assert next_attempt(last, [hosts[0]], hosts[:2]).numbers == (0, 1)
    assert next_attempt(last, [hosts[0], hosts[2]], [hosts[0], hosts[2]]).numbers == (0, 2)


def test_it_ends_when_nothing_is_to_be_tried() -> None:
    failed = CommandOutcome(1, "step 3", "actor rank 1: no memory at 4711")
    assert why_over([CommandOutcome(0)], 9) == ""
    assert why_over([CommandOutcome(75)], 9) == ""
    assert why_over([CommandOutcome(2)], 9) == ""
    assert why_over([failed], 0) == ""
    assert why_over([failed], 1) is None
    assert why_over([failed, CommandOutcome(1, "step 4", "x")], 1) == ""


def test_the_same_failure_in_the_same_step_ends_it() -> None:
    failed = CommandOutcome(1, "step 3", "actor rank 1: no memory at 4711")
    again = CommandOutcome(1, "step 3", "actor rank 1: no memory at 815")
    assert why_over([failed, again], 9) == "the same failure in step 3 again; the run is not started any more"
    assert why_over([failed, CommandOutcome(1, "step 4", failed.line)], 9) is None
    assert why_over([failed, CommandOutcome(1, "step 3", "another")], 9) is None
    assert why_over([CommandOutcome(137), CommandOutcome(137)], 9) is None  # nobody knows where


def test_a_lost_host_counts_by_what_it_is_and_not_by_its_name() -> None:
    first = CommandOutcome(1, "step 3", "host-1 (10.0.0.1): no sign of life since 12:04:31", lost=True)
    second = CommandOutcome(1, "step 3", "host-b (10.0.0.7): its agent is gone", lost=True)
    assert why_over([first, second], 9) == "the same failure in step 3 again; the run is not started any more"
    assert why_over([first, CommandOutcome(1, "step 5", first.line, lost=True)], 9) is None

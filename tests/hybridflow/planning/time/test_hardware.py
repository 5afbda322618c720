"""Hardware profiles: each number has an origin, and what is none is one line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from engine3d.errors import UserError
from hybridflow.planning.time.hardware import PROFILES, Hardware, link_rate, load_profile, shipped_profiles


def test_shipped_profiles_say_where_each_number_comes_from() -> None:
    assert {"h100", "h200"} <= {*shipped_profiles()}
    root = PROFILES.parents[3]
    for name in shipped_profiles():
        profile = load_profile(name)
        assert profile.name == name and profile.origins.keys() == {field.name for field in fields(Hardware)}
        for rate, origin in profile.origins.items():
            assert origin.startswith(("measured", "datasheet", "assumed")), rate
            for word in origin.split():
                if word.startswith("benchmarks/results/"):
                    path = word.strip(",:;()").removesuffix(".")
                    assert any(root.glob(f"{path}*")), f"{name}: {rate}: {path}"


def test_links_are_bits_or_bytes_a_second() -> None:
    assert link_rate("400Gb") == pytest.approx(45e9) and link_rate("50 GB/s") == pytest.approx(45e9)
    with pytest.raises(UserError, match=r"^--link fast: expected such as 400Gb"):
        link_rate("fast")
    assert load_profile("h200").with_cluster(4, "200Gb").hardware.network_rate == pytest.approx(22.5e9)


def test_slots_of_a_machine_share_its_memory() -> None:
    two, four = (load_profile("cpu").with_cluster(slots).hardware.memory for slots in (2, 4))
    assert two == pytest.approx(2 * four)
    assert len({load_profile("h200").with_cluster(gpus).hardware.memory for gpus in (2, 4)}) == 1


def test_what_is_no_profile_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^profile: b300; expected one of cpu, h100, h200, or a file of this form$"):
        load_profile("b300")
    text = (PROFILES / "h200.yaml").read_text()
    for old, new, message in (
        ("  flops:\n", "  flop:\n", r"rates\.flops is missing"),
        ("value: 989.0e12", "value: fast", r"rates\.flops: expected value, a number"),
        ("value: 989.0e12", "value: .inf", r"rates\.flops: expected value, a number"),
        ("value: 989.0e12", "value: 0", r"rates\.flops: expected a value above 0$"),
        ("rollout: ", "roll: ", "interval: expected update, scoring, rollout, transfer"),
        ("rollout: ", "rollout: wide, other: ", "interval: expected update, scoring, rollout, transfer"),
        ("\nmeasured: [", "\nmachine: here\nmeasured: [", "machine: expected keys and values"),
    ):
        path = tmp_path / "other.yaml"
        path.write_text(text.replace(old, new))
        with pytest.raises(UserError, match=message) as refused:
            load_profile(str(path))
        assert str(refused.value).startswith(f"{path}: ") and "\n" not in str(refused.value)

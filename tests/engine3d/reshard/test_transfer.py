"""Whole transfers: Megatron-Core's ranks on every layout, into SGLang engines of several layouts at the same time."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine3d.errors import EngineError, UserError
from engine3d.reshard.plan.pieces import Link
from engine3d.rollout import RolloutEngine, SamplingConfig
from tests.support.tiny_rollout import TINY_ROLLOUT
from tests.support.trainer_ranks import trainer_ranks
from tests.support.transfers import connect, differences, places, started

pytestmark = pytest.mark.processes

LAYOUTS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"ep": 2}, {"tp": 2}, {"pp": 2}, {}],
    4: [{"tp": 2, "pp": 2}, {"tp": 2, "ep": 2}, {"pp": 2, "ep": 2}, {"ep": 4}, {"tp": 4}, {"tp": 2, "ep": 2, "etp": 2}],
}
ENGINES = ({"tp": 1, "ep": 1}, {"tp": 2, "ep": 1}, {"tp": 2, "ep": 2})
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=12)


@pytest.fixture(scope="module")
def engines(tiny_model_dirs: tuple[Path, Path]) -> Iterator[list[RolloutEngine]]:
    """One engine of each layout, all with other weights than the trainer's."""
    with started(
        [RolloutEngine(tiny_model_dirs[1], TINY_ROLLOUT.model_copy(update=sizes)) for sizes in ENGINES]
    ) as engines:
        yield engines


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_engines_hold_bit_for_bit_what_sglang_loads_of_an_export(
    world_size: int, engines: list[RolloutEngine], tiny_model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    """One engine on the trainer's devices, one beside them on the node, one on another node."""
    with trainer_ranks(tiny_model_dirs[0], world_size, tmp_path) as trainer:
        for number, sizes in enumerate(LAYOUTS[world_size]):
            sources = trainer.call("build", places("here", *range(world_size)), sizes=sizes)
            # Devices of the trainer's, of the trainer's node, and of another.
            engine_places = [places("here", 0), places("here", 8, 9), places("there", 0, 1)]
            connected = connect(trainer, engines, sources, engine_places, tiny_model_dirs[0])
            plan = connected.orders.plan
            assert plan.bytes_moved == plan.bytes_needed > 0
            assert {transfer.link for transfer in plan.transfers} == {Link.DEVICE, Link.NODE, Link.NETWORK}
            for seed in (1, 2):
                trainer.call("change", seed=seed)
                export = tmp_path / f"export-{number}-{seed}"
                trainer.call("export", directory=export)
                assert differences(engines, export)
                connected.transfer(10 * number + seed)
                assert differences(engines, export) == [], sizes
            generations = [engine.generate(PROMPTS, GREEDY) for engine in engines]
            assert {g.weight_version for each in generations for group in each for g in group} == {10 * number + 2}
            tokens = [[group[0].token_ids for group in each] for each in generations]
            assert tokens[0] == tokens[1] == tokens[2]


def _changed(before: list[dict[str, str]], after: list[dict[str, str]]) -> list[set[str]]:
    """For each rank, the parameters whose checksums differ."""
    return [{name for name in old if old[name] != new[name]} for old, new in zip(before, after, strict=True)]


def test_a_running_engine_is_bound_to_the_trainers_memory_and_freed(
    engines: list[RolloutEngine], tiny_model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    other, _, bound = engines
    with trainer_ranks(tiny_model_dirs[0], 2, tmp_path) as trainer:
        sources = trainer.call("build", places("here", 0, 1), sizes={"ep": 2})
        names = bound.bind_weights(sources)
        assert bound.is_stale
        with pytest.raises(EngineError, match="not whole, transfer or load them again: they are the trainer's"):
            bound.generate(PROMPTS, GREEDY)
        with pytest.raises(UserError, match="load_weights would write into the trainer's memory"):
            bound.load_weights(tiny_model_dirs[1], version=1)

        # What the trainer writes is there at once, in what is bound and nowhere else.
        before = bound.weight_checksums()
        trainer.call("change", seed=3)
        assert _changed(before, bound.weight_checksums()) == [set(rank) for rank in names]
        # All but matrices cut by columns, and routers, whose rows are in the order of the trainer's experts.
        unbound = re.compile(r"model\.layers\.\d\.(self_attn\.o_proj|mlp\.gate)\.weight")
        for own, bound_names in zip(before, names, strict=True):
            assert own.keys() - set(bound_names) == {name for name in own if unbound.fullmatch(name)}
        export = tmp_path / "export"
        trainer.call("export", directory=export)
        assert differences([bound], export)

        for version, transport in ((1, "auto"), (2, "collective")):
            connected = connect(
                trainer,
                [other, bound],
                sources,
                [places("here", 0), places("here", 0, 1)],
                tiny_model_dirs[0],
                transport=transport,
            )
            plan, tp = connected.orders.plan, bound.config.tp
            to_bound = sum(transfer.nbytes for transfer in plan.transfers if transfer.target >= len(plan.aliases) - tp)
            assert 0 < to_bound < plan.bytes_aliased / 8
            assert [len(aliases) for aliases in plan.aliases[-tp:]] == [len(rank) for rank in names]
            trainer.call("change", seed=version)
            export = tmp_path / f"export-{version}"
            trainer.call("export", directory=export)
            assert differences([bound], export)
            sent = connected.transfer(version)
            assert sum(each.nbytes for rank in sent for each in rank.values()) == plan.bytes_moved
            assert differences([other, bound], export) == []
            results = [engine.generate(PROMPTS, GREEDY) for engine in (other, bound)]
            assert [group[0].token_ids for group in results[0]] == [group[0].token_ids for group in results[1]]
            assert {group[0].weight_version for each in results for group in each} == {version}

        assert bound.bind_weights([sources[0], None])[1] == ()
        bound.begin_weights(3)
        with pytest.raises(EngineError, match=r"seal of weights version 3 failed: .*share them, and plan anew"):
            bound.seal_weights(3)
        with pytest.raises(UserError, match="version 3 was not sealed"):
            bound.commit_weights(3)
        bound.unbind_weights()
        before = bound.weight_checksums()
        trainer.call("change", seed=4)
        assert _changed(before, bound.weight_checksums()) == [set(), set()]
        bound.load_weights(tiny_model_dirs[0], version=4)
        assert differences([bound], tiny_model_dirs[0]) == []
        assert bound.generate(PROMPTS, GREEDY)[0][0].weight_version == 4


def test_a_trainers_rank_that_is_killed_leaves_no_engine_serving_until_another_trainer_has_sent(
    engines: list[RolloutEngine], tiny_model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    some = engines[:2]
    engine_places = [places("there", 0), places("there", 1, 2)]
    with trainer_ranks(tiny_model_dirs[0], 2, tmp_path, may_die=[1]) as trainer, ThreadPoolExecutor() as pool:
        sources = trainer.call("build", places("here", 0, 1), sizes={"tp": 2})
        connected = connect(trainer, some, sources, engine_places, tiny_model_dirs[0])
        connected.transfer(1)
        for engine in some:
            engine.begin_weights(2)
        receiving = [pool.submit(engine.call_ranks, "receive", "receive", version=2) for engine in some]
        trainer.ask("try_send", version=2, hold_in_round=3)
        trainer.await_hold()
        killed = time.monotonic()
        trainer.kill(1)
        trainer.release()
        (left,) = trainer.answers()
        errors = [str(each.exception()) for each in receiving]
        assert time.monotonic() - killed < 15
        for number, error in enumerate(errors):
            named = rf"engine {number} rank 0: weights of version 2, round \d of \d+, \S+\.weight: actor rank 1 is gone"
            assert re.match(rf"rollout engine: receive failed: rank 0: {named}", error), error
            assert "\n" not in error
        assert re.match(r"actor rank 0: weights of version 2, round \d of \d+, \S+\.weight: engine \d", left), left
        for engine in some:
            with pytest.raises(EngineError, match="the transfer of version 2 was not committed"):
                engine.generate(PROMPTS, GREEDY)
            with pytest.raises(UserError, match="version 2 was not sealed"):
                engine.commit_weights(2)
    with trainer_ranks(tiny_model_dirs[0], 1, tmp_path) as trainer:
        sources = trainer.call("build", places("here", 0), sizes={})
        trainer.call("change", seed=5)
        trainer.call("export", directory=tmp_path / "export")
        connect(trainer, some, sources, engine_places, tiny_model_dirs[0]).transfer(3)
    assert differences(some, tmp_path / "export") == []
    for engine in some:
        assert engine.generate(PROMPTS, GREEDY)[0][0].weight_version == 3

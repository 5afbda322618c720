"""An engine that is bound to the trainer's memory from its start, one that starts from an export, and one that dies."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine3d.errors import EngineError
from engine3d.rollout import RolloutEngine, SamplingConfig
from tests.support.engine_processes import processes_of
from tests.support.engine_responses import responses_of, versions_of
from tests.support.tiny_rollout import TINY_ROLLOUT
from tests.support.trainer_ranks import trainer_ranks
from tests.support.transfers import connect, differences, locations, started

pytestmark = pytest.mark.processes

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12], [3, 4, 5] * 6]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=16)
# Not the trainer's memory: matrices cut by columns, and routers, whose rows are in the order of the trainer's experts.
MOVED = {f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in ("self_attn.o_proj", "mlp.gate")}


def scheduler(engine: RolloutEngine, rank: int) -> int:
    for process in processes_of(engine):
        if f"sglang::scheduler_TP{rank}".encode() in Path(f"/proc/{process}/cmdline").read_bytes():
            return process
    raise AssertionError(f"no scheduler of rank {rank}")


@pytest.mark.long
def test_an_engine_bound_at_its_start_generates_as_one_started_from_the_export_and_survives_its_death(
    tiny_model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    config = TINY_ROLLOUT.model_copy(update={"tp": 2, "ep": 2})
    published = [tmp_path / "run" / f"actor-{rank}" for rank in range(2)]
    export = tmp_path / "export"
    # Of other weights, so that what is neither bound nor sent shows.
    bound = RolloutEngine(tiny_model_dirs[1], config, weight_sources=published)
    with trainer_ranks(tiny_model_dirs[0], 2, tmp_path) as trainer, ThreadPoolExecutor() as pool:
        starting = pool.submit(bound.start)
        sources = trainer.call("build", locations("here", 0, 1), sizes={"ep": 2})
        trainer.call("change", seed=7)
        trainer.call("export", directory=export)
        with started([RolloutEngine(export, config)], afresh=True) as (fresh,):
            assert not starting.done()
            trainer.call("publish", published)
            starting.result()
            try:
                with pytest.raises(EngineError, match="not whole, transfer them again: they are the trainer's"):
                    responses_of(bound, PROMPTS, GREEDY)
                connected = connect(trainer, [bound], sources, [locations("here", 0, 1)], tiny_model_dirs[0])
                plan = connected.orders.plan
                assert 0 < plan.bytes_moved < plan.bytes_aliased / 8
                # The trainer's weights are there already, in all parameters that are its memory.
                for rank in bound.verify_weights(export):
                    assert {difference.buffer for difference in rank} == MOVED
                connected.transfer(1)
                assert differences([bound], export) == []
                expected = [group[0] for group in responses_of(fresh, PROMPTS, GREEDY)]
                assert len({tuple(response.token_ids) for response in expected}) == len(PROMPTS)
                for actual, right in zip(responses_of(bound, PROMPTS, GREEDY), expected, strict=True):
                    assert actual[0].token_ids == right.token_ids
                    assert actual[0].logprobs == pytest.approx(right.logprobs, abs=1e-5)

                both = [bound, fresh]
                engine_places = [locations("here", 0, 1), locations("there", 0, 1)]
                for version, transport in ((2, "auto"), (3, "collective")):
                    connected = connect(trainer, both, sources, engine_places, tiny_model_dirs[0], transport=transport)
                    trainer.call("change", seed=version)
                    trainer.call("export", directory=tmp_path / transport)
                    assert all(
                        {difference.buffer for difference in rank} == MOVED
                        for rank in bound.verify_weights(tmp_path / transport)
                    )
                    sent = connected.transfer(version)
                    assert (
                        sum(transport.nbytes for rank in sent for transport in rank.values())
                        == connected.orders.plan.bytes_moved
                    )
                    assert differences(both, tmp_path / transport) == []
                    results = [responses_of(engine, PROMPTS, GREEDY) for engine in both]
                    assert [group[0].token_ids for group in results[0]] == [group[0].token_ids for group in results[1]]
                    assert [versions_of(groups) for groups in results] == [{version}] * len(both)

                connected = connect(trainer, both, sources, engine_places, tiny_model_dirs[0])
                trainer.call("change", seed=8)
                for engine in both:
                    engine.begin_weights(4)
                receiving = [pool.submit(engine.receive_weights, 4) for engine in both]
                trainer.ask("try_send", version=4, hold_in_round=2)
                trainer.await_hold()
                os.kill(scheduler(fresh, 1), signal.SIGKILL)
                trainer.release()
                errors = trainer.answers()
                assert any(
                    "weights of version 4, round" in error and "engine 1 rank 1 is gone" in error for error in errors
                )
                assert receiving[0].result() == [{}, {}]  # neither rank read anything itself
                with pytest.raises(
                    EngineError, match="engine died during transfer of weights version 4: its process was killed"
                ) as death:
                    receiving[1].result()
                assert "\n" not in str(death.value) and "scheduler_1" in str(death.value)
                assert not fresh.is_alive()
                for engine, reason in ((bound, "version 4 was not committed"), (fresh, "is not running")):
                    with pytest.raises(EngineError, match=reason):
                        responses_of(engine, PROMPTS, GREEDY)

                connected = connect(trainer, [bound], sources, [locations("here", 0, 1)], tiny_model_dirs[0])
                trainer.call("export", directory=tmp_path / "healed")
                connected.transfer(5)
                assert differences([bound], tmp_path / "healed") == []
                assert set(responses_of(bound, PROMPTS, GREEDY)[0][0].versions) == {5}
            finally:
                bound.shutdown()

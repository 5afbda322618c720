"""An engine that gives its weights' memory back: nothing is served before the next version is there, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine3d.errors import EngineError, UserError
from engine3d.reshard.plan.transfers import Link
from engine3d.rollout import RolloutConfig, RolloutEngine, SamplingConfig
from tests.support.engine_responses import responses_of, versions_of
from tests.support.tiny_rollout import TINY_ROLLOUT
from tests.support.trainer_ranks import trainer_ranks
from tests.support.transfers import connect, differences, locations
from tests.support.warm import warm_starts

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=12)
RELEASES = {"memory_saver": True, "release_weights": True}


def test_weights_are_released_only_with_the_memory_saver_and_never_the_trainers(
    tiny_model_dirs: tuple[Path, Path],
) -> None:
    with pytest.raises(ValueError, match="release_weights=true needs memory_saver=true"):
        RolloutConfig(release_weights=True)
    config = TINY_ROLLOUT.model_copy(update=RELEASES)
    with pytest.raises(UserError, match="the trainer's memory cannot be released"):
        RolloutEngine(tiny_model_dirs[0], config, weight_sources=[Path("somewhere")])


@pytest.fixture(scope="module")
def engine(tiny_model_dirs: tuple[Path, Path]) -> Iterator[RolloutEngine]:
    with warm_starts(), RolloutEngine(tiny_model_dirs[1], TINY_ROLLOUT.model_copy(update=RELEASES)) as engine:
        yield engine


@pytest.mark.processes
def test_released_weights_come_back_by_the_next_transfer(
    engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Two pipeline stages, on whose first device the engine is: no parameter could be shared."""
    with trainer_ranks(tiny_model_dirs[0], 2, tmp_path) as trainer:
        sources = trainer.call("build", locations("here", 0, 1), sizes={"pp": 2})
        connected = connect(trainer, [engine], sources, [locations("here", 0)], tiny_model_dirs[0])
        assert {transfer.link for transfer in connected.orders.plan.transfers} == {Link.DEVICE, Link.NODE}
        generated = []
        for version, seed in ((1, 1), (2, 2), (3, 1)):
            trainer.call("change", seed=seed)
            export = tmp_path / f"export-{version}"
            trainer.call("export", directory=export)
            assert differences([engine], export)
            assert not any(connected.transfer(version))  # the trainer's ranks write nothing
            assert differences([engine], export) == []
            generated.append(responses_of(engine, PROMPTS, GREEDY))
            assert versions_of(generated[-1]) == {version}

            engine.release_memory()
            for refused in (
                lambda: responses_of(engine, PROMPTS, GREEDY),
                lambda: engine.begin_weights(9),
                lambda: engine.verify_weights(tiny_model_dirs[0]),
            ):
                with pytest.raises(EngineError, match="released"):
                    refused()
            engine.restore_memory()
            assert differences([engine], export)  # nothing is left of them
            with pytest.raises(EngineError, match="not whole, transfer them again: their memory was released"):
                responses_of(engine, PROMPTS, GREEDY)
        tokens = [
            [(response.token_ids, response.logprobs) for group in groups for response in group] for groups in generated
        ]
        assert tokens[0] == tokens[2] != tokens[1]

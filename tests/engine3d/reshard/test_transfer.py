"""Whole transfers: Megatron-Core's ranks on every layout, into SGLang engines of several layouts at the same time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from engine3d.errors import EngineError, UserError
from engine3d.reshard.plan.transfers import Link
from engine3d.rollout import RolloutEngine, SamplingConfig
from tests.engine3d.rollout.test_engine import reference_logprobs
from tests.support.checkpoint_sender import transfer
from tests.support.engine_responses import responses_of, versions_of
from tests.support.proves import proves, runs_of
from tests.support.tiny_rollout import TINY_ROLLOUT
from tests.support.trainer_ranks import trainer_ranks
from tests.support.transfers import connect, differences, locations, started

pytestmark = pytest.mark.processes

LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{"ep": 2}, {"tp": 2}, {"pp": 2}, {}],
    4: [{"tp": 2, "pp": 2}, {"tp": 2, "ep": 2, "etp": 2}],
}
"""Layouts of the trainer, by the number of its ranks."""
MORE_LAYOUTS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    4: [{"tp": 2, "ep": 2}, {"pp": 2, "ep": 2}, {"ep": 4}, {"tp": 4}],
}
ENGINES: tuple[dict[str, Any], ...] = (
    {"tp": 1, "ep": 1},
    {"tp": 2, "ep": 1},
    {"tp": 2, "ep": 2, "fused_sampling": True, "server_args": {"chunked_prefill_size": 64}},
)
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=12)


@pytest.fixture(scope="module")
def engines(tiny_model_dirs: tuple[Path, Path]) -> Iterator[list[RolloutEngine]]:
    """One engine of each layout, all with other weights than the trainer's."""
    with started(
        [RolloutEngine(tiny_model_dirs[1], TINY_ROLLOUT.model_copy(update=sizes)) for sizes in ENGINES]
    ) as engines:
        yield engines


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        pytest.param(size, of_size, marks=[proves("qwen3_moe", *runs_of({size: of_size}, "resharding")), *marks])
        for layouts, marks in ((LAYOUTS, []), (MORE_LAYOUTS, [pytest.mark.release]))
        for size, of_size in layouts.items()
    ],
)
def test_engines_hold_bit_for_bit_what_sglang_loads_of_an_export(
    world_size: int,
    layouts: list[dict[str, int]],
    engines: list[RolloutEngine],
    tiny_model_dirs: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    """One engine on the trainer's devices, one beside them on the node, one on another node."""
    with trainer_ranks(tiny_model_dirs[0], world_size, tmp_path) as trainer:
        for number, sizes in enumerate(layouts):
            sources = trainer.call("build", locations("here", *range(world_size)), sizes=sizes)
            # Devices of the trainer's, of the trainer's node, and of another.
            engine_places = [locations("here", 0), locations("here", 8, 9), locations("there", 0, 1)]
            connected = connect(trainer, engines, sources, engine_places, tiny_model_dirs[0])
            plan = connected.orders.plan
            assert plan.bytes_moved == plan.bytes_needed > 0
            assert {of_link.link for of_link in plan.transfers} == {Link.DEVICE, Link.NODE, Link.NETWORK}
            seeds = (number + 2,) if number else (1, 2)  # the second over the same connections
            for seed in seeds:
                trainer.call("change", seed=seed)
                export = tmp_path / f"export-{number}-{seed}"
                trainer.call("export", directory=export)
                assert differences(engines, export)
                connected.transfer(10 * number + seed)
                assert differences(engines, export) == [], sizes
            generations = [responses_of(engine, PROMPTS, GREEDY) for engine in engines]
            assert all(versions_of(groups) == {10 * number + seeds[-1]} for groups in generations)
            tokens = [[group[0].token_ids for group in groups] for groups in generations]
            assert tokens[0] == tokens[1] == tokens[2]


def test_all_ranks_of_an_engine_draw_the_same_tokens_and_compute_a_prompt_once(
    engines: list[RolloutEngine], tiny_model_dirs: tuple[Path, Path]
) -> None:
    engine = engines[2]
    transfer(engine, tiny_model_dirs[0], version=1000)
    log = engine.log_path
    assert log is not None

    # A prompt is computed once, not for each of its samples.
    before, length, count = log.stat().st_size, 24, 12
    prompts = [[3 + number, *range(40, 39 + length)] for number in range(count)]
    responses_of(engine, prompts, SamplingConfig(max_new_tokens=4), samples_per_prompt=4)
    computed = sum(map(int, re.findall(r"TP0.*#new-token: (\d+)", log.read_text()[before:])))
    assert length * count <= computed < 2 * length * count

    # Drawn apart, what a rank computes next would be of other tokens.
    assert log.read_text().count("drawn in one pass over the logits") == 2
    for sampling in (
        SamplingConfig(temperature=0.7, max_new_tokens=12),
        SamplingConfig(top_k=20, max_new_tokens=12),  # drawn by SGLang
        GREEDY,
    ):
        drawn = responses_of(engine, PROMPTS, sampling, samples_per_prompt=4)
        assert len({tuple(response.token_ids) for response in drawn[0]}) == (1 if sampling is GREEDY else 4)
        for prompt, group in zip(PROMPTS, drawn, strict=True):
            for response in group:
                of_all = reference_logprobs(
                    tiny_model_dirs[0], prompt, response.token_ids, 1.0 if sampling is GREEDY else sampling.temperature
                )
                if sampling is GREEDY:
                    assert response.token_ids == of_all.argmax(-1).tolist()
                chosen = of_all.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
                assert response.logprobs == pytest.approx(chosen.tolist(), abs=1e-3)


def test_a_trainers_rank_that_is_killed_leaves_no_engine_serving_until_another_trainer_has_sent(
    engines: list[RolloutEngine], tiny_model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    some = engines[:2]
    engine_places = [locations("there", 0), locations("there", 1, 2)]
    with trainer_ranks(tiny_model_dirs[0], 2, tmp_path, may_die=[1]) as trainer, ThreadPoolExecutor() as pool:
        sources = trainer.call("build", locations("here", 0, 1), sizes={"tp": 2})
        connected = connect(trainer, some, sources, engine_places, tiny_model_dirs[0])
        connected.transfer(1)
        for engine in some:
            engine.begin_weights(2)
        receiving = [pool.submit(engine.receive_weights, 2) for engine in some]
        trainer.ask("try_send", version=2, hold_in_round=3)
        trainer.await_hold()
        trainer.kill(1)
        trainer.release()
        (left,) = trainer.answers()
        errors = [str(future.exception()) for future in receiving]
        for number, error in enumerate(errors):
            named = rf"engine {number} rank 0: weights of version 2, round \d of \d+, \S+\.weight: actor rank 1 is gone"
            assert re.match(rf"rollout engine: transfer of weights version 2 failed: rank 0: {named}", error), error
            assert "\n" not in error
        assert re.match(r"actor rank 0: weights of version 2, round \d of \d+, \S+\.weight: engine \d", left), left
        for engine in some:
            with pytest.raises(EngineError, match="the transfer of version 2 was not committed"):
                responses_of(engine, PROMPTS, GREEDY)
            with pytest.raises(UserError, match="version 2 was not sealed"):
                engine.commit_weights(2)
    with trainer_ranks(tiny_model_dirs[0], 1, tmp_path) as trainer:
        sources = trainer.call("build", locations("here", 0), sizes={})
        trainer.call("change", seed=5)
        trainer.call("export", directory=tmp_path / "export")
        connect(trainer, some, sources, engine_places, tiny_model_dirs[0]).transfer(3)
    assert differences(some, tmp_path / "export") == []
    for engine in some:
        assert set(responses_of(engine, PROMPTS, GREEDY)[0][0].versions) == {3}

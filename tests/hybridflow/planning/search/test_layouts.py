"""Layouts that are proposed: they fit, the fastest comes first, and long sequences are split."""

from __future__ import annotations

import pytest

from benchmarks.reshard_plan import named_model
from engine3d.errors import UserError
from engine3d.training.config import OptimizerConfig, TrainConfig
from hybridflow.planning.search.layout_memory import USED_SHARE
from hybridflow.planning.search.layouts import LayoutSearch
from hybridflow.planning.time.hardware import load_profile
from hybridflow.planning.time.training import Batch

HARDWARE = load_profile("h200").hardware
CONFIG = TrainConfig(optimizer=OptimizerConfig(precision_aware=True, offload=True), logits_tokens=4096)
SEARCH = LayoutSearch(named_model("qwen3-30b-a3b"), CONFIG, HARDWARE)


def test_what_is_proposed_is_the_fastest_of_what_fits() -> None:
    """Memory next to others varies, and memory of a layout is predicted once."""
    batch = Batch(sequences=64, tokens=8192)
    front = SEARCH.front(8, batch, lambda layout: layout.tp == layout.cp == layout.vpp == 1)
    every = [
        (SEARCH.costs.update(layout, config, chosen).seconds, SEARCH.memory.heaviest(layout, config, chosen))
        for layout, config, chosen in SEARCH._candidates(8, batch)
        if layout.tp == layout.cp == layout.vpp == 1
    ]
    for beside in (40, *range(0, 120, 3)):
        limit = SEARCH.memory.limit(beside * 10**9)
        seconds = min((seconds for seconds, heaviest in every if heaviest.total <= limit), default=None)
        proposal = front.fastest(limit)
        assert (seconds is None) == (proposal is None)
        if proposal is not None:
            assert proposal.layout.world_size == 8 and proposal.heaviest.total <= limit
            assert proposal.cost.seconds == pytest.approx(seconds)
            tokens = proposal.config.micro_batch_tokens // batch.tokens
            assert max(1, tokens) == proposal.batch.together  # a recipe of the plan has these micro-batches


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("sequences", "tokens"), [(6, 4096), (48, 24), (1024, 600)])
def test_bounds_leave_the_order_of_all_candidates(sequences: int, tokens: int, *, trained: bool) -> None:
    """Layouts are costed late, and yet come in the order of their seconds: few micro-batches, short and long ones."""
    search = LayoutSearch(named_model("qwen3-30b-a3b"), CONFIG, HARDWARE, trained=trained, expert_tensor_parallel=True)
    batch = Batch(sequences, tokens)
    ranked = list(search._ranked(12, batch, lambda layout: True))
    every = [candidate for layout in search._layouts(12) for candidate in search._costed(layout, batch)]
    assert len(every) > 50 and ranked == sorted(every, key=lambda candidate: candidate.seconds)


@pytest.mark.slow
def test_a_sequence_that_no_rank_can_keep_is_split() -> None:
    short = SEARCH.best(16, Batch(sequences=512, tokens=4096))
    long = SEARCH.best(16, Batch(sequences=16, tokens=131072))
    assert short.layout.cp == 1 and long.layout.cp > 1
    unsplit = [
        SEARCH.memory.heaviest(layout, config, batch).total
        for layout, config, batch in SEARCH._candidates(16, Batch(16, 131072))
        if layout.cp == layout.tp == 1 and config.recompute == "selective"
    ]
    assert min(unsplit) > USED_SHARE * 141e9


@pytest.mark.slow
def test_a_pipeline_of_few_micro_batches_has_virtual_stages() -> None:
    search = LayoutSearch(named_model("qwen3-235b-a22b"), CONFIG, HARDWARE)
    proposal = search.best(1024, Batch(sequences=256, tokens=131072))
    assert proposal.layout.pp > 1 and proposal.layout.vpp > 1


def test_what_does_not_fit_is_one_line() -> None:
    with pytest.raises(UserError) as refused:
        SEARCH.best(1, Batch(sequences=8, tokens=131072))
    line = str(refused.value)
    assert line.startswith("1 GPUs of 141.0 GB: no layout fits 8 sequences of 131,072 tokens (the least is ")
    assert line.endswith("; expected more or larger GPUs, or shorter sequences") and "\n" not in line
    with pytest.raises(UserError, match=r"no layout fits 0 sequences of 1,024 tokens \("):
        LayoutSearch(SEARCH.spec, CONFIG, HARDWARE).best(2**14, Batch(sequences=0, tokens=1024))

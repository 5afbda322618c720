"""Values, scores and updates of models with a value head: those of transformers, on every layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import load_model_spec
from engine3d.training.config import LayoutConfig, OptimizerConfig, TrainConfig
from engine3d.training.passes.sequences import Sequences
from tests.support import tiny_families
from tests.support.distributed import run_distributed
from tests.support.proves import proves

pytestmark = pytest.mark.processes

SETTINGS = OptimizerConfig(lr=1e-2, min_lr=1e-3, schedule="cosine", warmup_steps=2, decay_steps=8, clip_grad=0.5)
KINDS: dict[str, Any] = {"sequences": AutoModelForSequenceClassification, "tokens": AutoModelForTokenClassification}
UPDATES = 4
UPDATES_AGAIN = 2
"""Updates once the schedule has begun again."""


@dataclass(frozen=True)
class Case:
    """A model, and how it is cut over two ranks."""

    model: str
    sizes: dict[str, Any]
    packing: bool = True

    @property
    def updates(self) -> int:
        """Updates before the schedule begins again."""
        return UPDATES if self.model == "sequences" else 2


CASES = [
    Case("sequences", {"tp": 2}),
    Case("sequences", {"pp": 2, "vpp": 2}),
    Case("sequences", {}, packing=False),
    Case("tokens", {"tp": 2}),
    Case("language", {"ep": 2}),
]


@dataclass(frozen=True)
class Seen:
    """Outputs of one rank in a case; None where its stage has no outputs of tokens."""

    mine: list[int]
    values: list[list[Tensor] | None]
    scores: list[Tensor | None]
    norms: list[float]
    rates: list[float]
    moments_stayed: bool
    steps: int


def samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = [1, *torch.randint(2, 20, (9,), generator=generator).tolist()]
    return [torch.randint(0, 60, (length,), generator=generator).tolist() for length in lengths]


def loss_of(values: Tensor, scores: Tensor) -> Tensor:
    """Any that sees each value and each score; those of all samples add up."""
    return ((values - 1.0) ** 2).sum() / 100 + ((scores + 0.5) ** 2).sum() / 10


def export_of(root: Path, case: Case) -> Path:
    return root / f"export-{case.model}-{case.sizes}"


def run_case(root: Path, case: Case) -> Seen:
    """Values and scores; updates with a schedule that begins again half way; values, scores and an export."""
    from engine3d.checkpoint.state import optimizer_step, parameter_shards
    from engine3d.training.engine import TrainEngine
    from engine3d.training.passes.forward import TokenOutputs

    config = TrainConfig(
        layout=LayoutConfig(**case.sizes),
        dtype="float32",
        micro_batch_tokens=40,
        packing=case.packing,
        optimizer=SETTINGS,
    )
    layout = Layout.of_world(2, **case.sizes)
    engine = TrainEngine(root / case.model, config, layout, value_head=True)
    mine = list(range(engine.coordinates.dp, len(samples()), layout.dp))
    chosen = [samples()[index] for index in mine]
    counted = torch.tensor([position > 0 for sample in chosen for position in range(len(sample))])
    sequences = Sequences.of(chosen, counted=counted)

    def loss(outputs: TokenOutputs, columns: dict[str, Tensor]) -> tuple[Tensor, None]:
        assert outputs.values is not None and outputs.scores is not None
        return loss_of(outputs.values[columns["counted"]], outputs.scores), None

    def moments() -> list[Tensor]:
        shards = parameter_shards(engine)
        return [
            moment.clone() for shard in shards for name, moment in shard.moments.items() if name.startswith("exp_avg")
        ]

    outputs = [engine.values(sequences)]
    results = [engine.update(sequences, loss) for _ in range(case.updates)]
    before = moments()
    engine.restart_schedule()
    after = moments()
    results += [engine.update(sequences, loss) for _ in range(UPDATES_AGAIN)]
    outputs.append(engine.values(sequences))
    engine.export(export_of(root, case))
    seen = Seen(
        mine,
        [
            None
            if output is None or output.values is None
            else list(output.values.split([len(sample) for sample in chosen]))
            for output in outputs
        ],
        [None if output is None else output.scores for output in outputs],
        [result.grad_norm for result in results],
        [result.learning_rate for result in results],
        len(before) > 0 and all(torch.equal(old, new) for old, new in zip(before, after, strict=True)),
        optimizer_step(engine),
    )
    engine.close()
    return seen


def run_all(root: Path) -> tuple[list[Seen], str]:
    """All cases, and what is said of a frozen model without a head."""
    from engine3d.training.engine import TrainEngine
    from engine3d.training.megatron import parallel

    with pytest.raises(UserError) as error:
        TrainEngine(root / "language", TrainConfig(dtype="float32"), Layout(pp=2), value_head=True, trainable=False)
    parallel.release()
    return [run_case(root, case) for case in CASES], str(error.value)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("values")
    tiny_families.make("qwen3-tied", root / "sequences", value_head=True)
    tiny_families.make("qwen3_moe", root / "language")
    model = AutoModelForTokenClassification.from_pretrained(root / "sequences")
    torch.nn.init.constant_(model.score.bias, 0.7)
    model.save_pretrained(root / "tokens")
    return root


@pytest.fixture(scope="module")
def outcomes(root: Path) -> list[tuple[list[Seen], str]]:
    """Outputs of each rank."""
    return run_distributed(run_all, 2, root, timeout_s=300)


def by_transformers(kind: str, directory: Path) -> tuple[list[Tensor], Tensor, float]:
    """Values of each sample, scores, and the norm of the loss's gradient.

    The head is applied to each sample alone, and the value of a token is what it says at the token before it.
    """
    model = KINDS[kind].from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    values, scores = [], []
    for sample in samples():
        tokens = torch.tensor([sample])
        if kind == "sequences":
            scores.append(model(tokens).logits[0, 0])
            said = model.score(model.model(tokens).last_hidden_state)[0, :, 0]
        else:
            said = model(tokens).logits[0, :, 0]
            scores.append(said[-1])
        values.append(said[:-1])
    loss_of(torch.cat(values), torch.stack(scores)).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    return [value.detach() for value in values], torch.stack(scores).detach(), float(norm)


def check_outputs(ranks: list[Seen], number: int, values: list[Tensor], scores: Tensor, atol: float) -> None:
    """Every sample is with some rank, and what is said of it is what is expected."""
    covered: set[int] = set()
    for rank in ranks:
        rank_values, found_scores = rank.values[number], rank.scores[number]
        if rank_values is None or found_scores is None:
            continue
        covered |= set(rank.mine)
        torch.testing.assert_close(found_scores, scores[rank.mine], atol=atol, rtol=1e-3)
        for index, column in zip(rank.mine, rank_values, strict=True):
            assert column[0] == 0
            torch.testing.assert_close(column[1:], values[index], atol=atol, rtol=1e-3)
    assert covered == set(range(len(samples())))


def test_values_scores_and_gradients_are_those_of_transformers(
    root: Path, outcomes: list[tuple[list[Seen], str]]
) -> None:
    expected = {kind: by_transformers(kind, root / kind) for kind in KINDS}
    assert expected["sequences"][1].std() > 0.1
    for number, case in enumerate(CASES):
        ranks = [seen[number] for seen, _ in outcomes]
        if case.model == "language":  # a new head says 0
            check_outputs(
                ranks, 0, [torch.zeros(len(sample) - 1) for sample in samples()], torch.zeros(len(samples())), 0
            )
            continue
        values, scores, norm = expected[case.model]
        check_outputs(ranks, 0, values, scores, atol=1e-4)
        assert [rank.norms[0] for rank in ranks] == pytest.approx([norm] * 2, rel=1e-4), case


@proves("qwen3", "tp packing critic", "pp vpp packing critic", "dp padding critic")
@proves("qwen3_moe", "ep dp packing critic")
def test_updates_are_alike_on_every_layout_and_exported(root: Path, outcomes: list[tuple[list[Seen], str]]) -> None:
    first = outcomes[0][0][0]
    for number, case in enumerate(CASES):
        ranks = [seen[number] for seen, _ in outcomes]
        kind = "tokens" if case.model == "tokens" else "sequences"
        values, scores, _ = by_transformers(kind, export_of(root, case))
        assert scores.std() > 0.01
        assert load_model_spec(export_of(root, case), value_head=True).value_bias == (kind == "tokens")
        check_outputs(ranks, 1, values, scores, atol=1e-3)
        if case.model == "sequences":
            assert [rank.norms for rank in ranks] == [pytest.approx(first.norms, rel=1e-3)] * 2, case


def test_a_schedule_begins_again_and_the_moments_stay(outcomes: list[tuple[list[Seen], str]]) -> None:
    for seen, _ in outcomes:
        for case, rank in zip(CASES, seen, strict=True):
            first, again = rank.rates[: case.updates], rank.rates[case.updates :]
            assert first[:3] == pytest.approx([0.0, 0.005, 0.01][: case.updates])
            assert all(0.001 < rate < 0.01 for rate in first[3:])
            assert again == first[:UPDATES_AGAIN] and len(again) == UPDATES_AGAIN
            assert rank.moments_stayed and rank.steps == case.updates + UPDATES_AGAIN


def test_a_model_that_is_not_trained_needs_a_head(root: Path, outcomes: list[tuple[list[Seen], str]]) -> None:
    for _, message in outcomes:  # also of the rank that would not hold the head
        assert message == (
            f"{root / 'language'}: no tensor score.weight, expected a model with a value head "
            "(Qwen3MoeForSequenceClassification), because it is not trained and would score everything 0"
        )

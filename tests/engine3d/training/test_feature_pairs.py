"""Families, layouts and features together: updates are those of one rank without any of the features."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from engine3d.layout import Layout
from engine3d.models.lora.config import LoraConfig
from engine3d.models.precision import NOTHING_LEFT_OUT, Fp8Settings
from engine3d.training.config import LayoutConfig, OptimizerConfig, TrainConfig
from engine3d.training.passes.sequences import Sequences
from tests.support import tiny_families
from tests.support.distributed import run_distributed
from tests.support.proves import proves, run_of

pytestmark = pytest.mark.processes

SETTINGS = OptimizerConfig(lr=2e-3, min_lr=1e-4, schedule="cosine", warmup_steps=1, decay_steps=8, clip_grad=0.5)
LORA = LoraConfig(rank=4, alpha=16)
UPDATES = 3
LAST_LAYER = Fp8Settings(num_layers_at_end_in_bf16=1)
SHARED = Fp8Settings(shared_experts_in_bf16=True)
_BARE = str.maketrans({"(": None, ")": None, " ": None, ",": "+"})


@dataclass(frozen=True)
class Case:
    """A model on some ranks, with recomputation, checkpoints, and offloaded model and optimizer.

    Args:
        ranks: that it is on.
        model: of `tiny_families`.
        sizes: of the layout.
        packing: True for packed rows, False for padded ones.
        critic: True for a model with a scalar head.
        adapters: True to train low-rank adapters alone.
        left_out: matrices that stay in float32 where the model trains in fp8.
        mark: of the suite unless that is `make test`: "release" where cases on fewer ranks or with more features show
            the same, "long" also for more than two ranks.

    A model of `BLOCK_CONFIGS` trains in fp8.
    """

    ranks: int
    model: str
    sizes: dict[str, Any]
    packing: bool
    critic: bool = False
    adapters: bool = False
    left_out: Fp8Settings = NOTHING_LEFT_OUT
    mark: Literal["", "long", "release"] = ""

    @property
    def precision(self) -> Literal["fp8"] | None:
        """Precision of the GEMMs."""
        return "fp8" if self.model in tiny_families.BLOCK_CONFIGS else None

    @property
    def layout(self) -> Layout:
        """Layout of the ranks."""
        return Layout.of_world(self.ranks, **self.sizes)

    @property
    def name(self) -> str:
        """Name of the case, and of the folder of its checkpoint."""
        sizes = [f"{name}{size}".translate(_BARE) for name, size in self.sizes.items()]
        return "-".join(
            [self.model, *sizes, *(["critic"] * self.critic), *(["lora"] * self.adapters), *self.left_out.given]
        )

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Marks of a test that runs the case."""
        features = ["packing" if self.packing else "padding", "recomputation offload optimizer_offload checkpoints"]
        features += ["critic"] * self.critic + ["fp8_training"] * (self.precision is not None)
        features += ["fp8_exceptions"] * bool(self.left_out.given)
        features += ["lora"] * self.adapters
        proof = proves(tiny_families.family_of(self.model), run_of(self.layout, " ".join(features)))
        mark = self.mark or ("long" if self.ranks > 2 else "")
        return [proof, getattr(pytest.mark, mark)] if mark else [proof]


CASES = (
    Case(2, "llama", {"pp": 2, "vpp": 2}, packing=True, mark="release"),
    Case(2, "deepseek_v3-queries", {"tp": 2, "etp": 2}, packing=False, mark="release"),
    Case(2, "qwen3_moe-biases", {"pp": 2, "stages": (1, 3)}, packing=True, critic=True, mark="long"),
    Case(2, "qwen2-tied", {"tp": 2}, packing=True, mark="long"),
    Case(2, "llama", {"pp": 2, "vpp": 2}, packing=True, adapters=True, mark="long"),
    Case(2, "deepseek_v3", {"tp": 2, "etp": 2}, packing=False, adapters=True),
    Case(2, "qwen3_moe", {"pp": 2, "stages": (1, 3)}, packing=False, adapters=True, mark="release"),
    Case(2, "qwen3-biases", {"tp": 2}, packing=True, adapters=True, mark="release"),
    Case(2, "qwen2-tied", {"pp": 2}, packing=False, adapters=True, mark="release"),
    Case(4, "llama", {"tp": 2, "pp": 2}, packing=True),
    Case(4, "qwen3-tied", {"pp": 2}, packing=False),
    Case(4, "qwen3_moe", {"tp": 2, "ep": 2, "etp": 2}, packing=True),
    Case(4, "deepseek_v3", {"pp": 2, "ep": 2}, packing=False),
    Case(4, "llama", {"tp": 2}, packing=False, critic=True),
    Case(4, "qwen3-biases", {"tp": 2, "pp": 2}, packing=True, critic=True),
    Case(4, "qwen3_moe-biases", {"pp": 2, "ep": 2}, packing=False, critic=True),
    Case(4, "deepseek_v3-queries", {"tp": 2, "ep": 2, "etp": 2}, packing=True, critic=True),
    Case(4, "qwen2-tied", {"pp": 2, "stages": (1, 3)}, packing=False, critic=True),
    Case(4, "mistral", {"tp": 2, "pp": 2}, packing=True),
    Case(4, "mistral", {"pp": 2, "vpp": 2}, packing=False, critic=True),
    Case(4, "qwen2_moe", {"tp": 2, "ep": 2, "etp": 2}, packing=True),
    Case(4, "qwen2_moe", {"pp": 2, "vpp": 2, "stages": (1, 1, 1, 1), "ep": 2}, packing=False, critic=True),
    Case(4, "glm4_moe", {"tp": 2, "ep": 2, "etp": 2}, packing=True),
    Case(4, "glm4_moe", {"pp": 2, "stages": (1, 3), "ep": 2}, packing=False, critic=True),
    Case(4, "mixtral", {"tp": 2, "ep": 2}, packing=False),
    Case(4, "mixtral", {"pp": 2, "vpp": 2, "stages": (1, 1, 1, 1), "ep": 2}, packing=True, critic=True),
    Case(2, "qwen3_moe-blocks", {"tp": 2, "ep": 2}, packing=True, mark="long"),
    Case(2, "qwen3_moe-blocks", {"pp": 2}, packing=True, left_out=LAST_LAYER),
    Case(2, "qwen2_moe-blocks", {"tp": 2, "ep": 2}, packing=False, left_out=SHARED, mark="release"),
    Case(4, "qwen3_moe-blocks", {"tp": 2, "ep": 2, "etp": 2}, packing=False, left_out=LAST_LAYER),
    Case(2, "qwen3_moe-blocks", {"cp": 2}, packing=True, left_out=LAST_LAYER, mark="release"),
    Case(
        2, "qwen3-biases-blocks", {"pp": 2, "vpp": 2}, packing=False, critic=True, left_out=LAST_LAYER, mark="release"
    ),
    Case(4, "qwen3_moe-blocks", {"cp": 2, "ep": 2}, packing=True),
    Case(4, "qwen3_moe-blocks", {"pp": 2, "ep": 2}, packing=False, critic=True),
    Case(4, "qwen3-biases-blocks", {"tp": 2, "pp": 2, "vpp": 2}, packing=True),
    Case(4, "llama-blocks", {"tp": 2}, packing=False, critic=True),
    Case(4, "qwen2-tied-blocks", {"pp": 2, "stages": (1, 1)}, packing=False),
    Case(4, "mistral-blocks", {"tp": 2, "pp": 2}, packing=True),
    Case(4, "qwen2_moe-blocks", {"tp": 2, "ep": 2, "etp": 2}, packing=True),
    Case(4, "mixtral-blocks", {"tp": 2, "ep": 2}, packing=False),
    Case(4, "glm4_moe-blocks", {"tp": 2, "ep": 2, "etp": 2}, packing=True),
    Case(4, "minimax_m2", {"tp": 2, "ep": 2, "etp": 2}, packing=True),
    Case(4, "minimax_m2", {"pp": 2, "stages": (1, 3), "ep": 2}, packing=False, critic=True),
    Case(4, "gpt_oss", {"tp": 2, "ep": 2}, packing=True),
    Case(4, "gpt_oss", {"pp": 2, "stages": (1, 3), "ep": 2}, packing=False, critic=True),
    Case(2, "qwen3_next", {"tp": 2, "ep": 2}, packing=True),
    Case(2, "qwen3_5_moe", {"tp": 2, "ep": 2}, packing=True, mark="long"),
    Case(4, "qwen3_5-tied", {"tp": 2}, packing=True),
)


@dataclass(frozen=True)
class Outcome:
    """Losses and gradient norms of the updates, and columns of the samples of a rank; None where it has none."""

    losses: list[float]
    norms: list[float]
    columns: dict[int, torch.Tensor] | None


def _samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 20, (9,), generator=generator).tolist()
    return [torch.randint(0, 60, (length,), generator=generator).tolist() for length in lengths]


def _loss(outputs: Any, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    per_token = -outputs.logprobs if outputs.values is None else (outputs.values - 1.0) ** 2
    loss = (per_token * columns["weights"]).sum()
    return loss, loss.detach()


def train(model: Path, layout: Layout, config: TrainConfig, *, critic: bool, checkpoint: Path | None) -> Outcome:
    """Update a model three times. Returns losses, norms, and log-probs or values afterwards.

    Args:
        model: directory of the model.
        layout: of the ranks.
        config: of training.
        critic: True for a model with a scalar head.
        checkpoint: directory. The model leaves its device between all calls, and a new one is loaded from a checkpoint
            after the first update. None does neither.
    """
    from engine3d.checkpoint.writing.save import EngineCheckpoint
    from engine3d.training.engine import TrainEngine

    def built(*, load: bool) -> Any:
        offload = checkpoint is not None
        # With another seed adapters begin with other weights than those of the checkpoint.
        seed = 1 if load else 2
        return TrainEngine(model, config, layout, seed=seed, load=load, value_head=critic, offload=offload)

    engine, samples = built(load=True), _samples()
    mine = list(range(engine.coordinates.dp, len(samples), layout.dp))
    count = sum(len(sample) - 1 for sample in samples)
    weights = [weight for index in mine for weight in [0.0] + [1 / count] * (len(samples[index]) - 1)]
    sequences = Sequences.of([samples[index] for index in mine], weights=torch.tensor(weights))
    losses, norms = [], []
    for number in range(UPDATES):
        if checkpoint is not None:
            engine.offload()
        result = engine.update(sequences, _loss)
        loss = torch.stack([torch.zeros((), device=engine.device), *result.loss_outputs]).sum()
        dist.all_reduce(loss)
        losses.append(float(loss) / (layout.tp * layout.cp))
        norms.append(result.grad_norm)
        if checkpoint is not None and number == 0:
            engine = _resumed(engine, checkpoint, built, EngineCheckpoint)
    outputs = engine.values(sequences) if critic else engine.logprobs(sequences)
    column = None if outputs is None else outputs.values if critic else outputs.logprobs
    columns = None
    if column is not None:
        columns = dict(zip(mine, column.split([len(samples[index]) for index in mine]), strict=True))
    engine.close()
    return Outcome(losses, norms, columns)


def _resumed(engine: Any, directory: Path, built: Any, checkpoint: Any) -> Any:
    """A new engine with the state of this one, by a checkpoint that is saved while the model is offloaded."""
    from engine3d.checkpoint.digests.digest import weights_digest

    digest = weights_digest(engine)
    engine.offload()
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()
    saved = checkpoint(engine)
    saved.begin(directory, background=False)
    saved.finish()
    engine.close()
    engine = built(load=False)
    assert weights_digest(engine) != digest
    checkpoint(engine).load(directory)
    assert weights_digest(engine) == digest
    return engine


def _plain(root: Path, cases: list[Case]) -> list[Outcome]:
    outcomes = []
    for case in cases:
        config = TrainConfig(
            dtype="float32",
            micro_batch_tokens=10_000,
            precision=case.precision,
            fp8=case.left_out,
            packing=False,
            optimizer=SETTINGS,
            lora=LORA if case.adapters else None,
        )
        outcomes.append(train(root / case.model, Layout(), config, critic=case.critic, checkpoint=None))
    return outcomes


def _together(root: Path, cases: list[Case]) -> list[Outcome]:
    outcomes = []
    for case in cases:
        config = TrainConfig(
            layout=LayoutConfig(**case.sizes),
            dtype="float32",
            micro_batch_tokens=48,
            precision=case.precision,
            fp8=case.left_out,
            packing=case.packing,
            recompute="full",
            lora=LORA if case.adapters else None,
            optimizer=SETTINGS.model_copy(update={"offload": True}),
        )
        checkpoint = root / "checkpoints" / case.name
        outcomes.append(train(root / case.model, case.layout, config, critic=case.critic, checkpoint=checkpoint))
    return outcomes


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the models and checkpoints."""
    return tmp_path_factory.mktemp("pairs")


@cache
def outcomes(root: Path, ranks: int, mark: str) -> dict[str, tuple[Outcome, list[Outcome]]]:
    """Outcomes of one rank, with padded rows in one micro-batch, and of each of several, by the name of the case."""
    cases = [case for case in CASES if case.ranks == ranks and case.mark == mark]
    for case in cases:
        if not (root / case.model).exists():
            tiny_families.make(case.model, root / case.model, value_head=case.critic)
    [plain] = run_distributed(_plain, 1, root, cases, timeout_s=60 * len(cases))
    by_rank = run_distributed(_together, ranks, root, cases, timeout_s=120 * len(cases))
    together = [[rank[number] for rank in by_rank] for number in range(len(cases))]
    return {case.name: pair for case, pair in zip(cases, zip(plain, together, strict=True), strict=True)}


@pytest.mark.parametrize("case", [pytest.param(case, marks=case.marks, id=case.name) for case in CASES])
def test_all_together_update_as_one_rank_without(root: Path, case: Case) -> None:
    expected, together = outcomes(root, case.ranks, case.mark)[case.name]
    columns: dict[int, torch.Tensor] = {}
    assert abs(expected.losses[2] / expected.losses[0] - 1) > 1e-3 and expected.columns is not None
    # An input between two values of fp8 may round to the other one, by the last bit of a sum. Weights change in the
    # second update for the first time.
    in_fp8 = case.precision is not None
    looser = [1, 1, 250 if in_fp8 else 1]
    for outcome in together:
        for number in range(UPDATES):
            assert outcome.losses[number] == pytest.approx(expected.losses[number], rel=2e-5 * looser[number])
            assert outcome.norms[number] == pytest.approx(expected.norms[number], rel=2e-4 * looser[number])
        columns |= outcome.columns or {}
    assert columns.keys() == expected.columns.keys()
    if in_fp8:  # by which a token may also have another expert
        distances = [columns[index] - column for index, column in expected.columns.items()]
        assert torch.cat(distances).abs().mean() < 0.2
        return
    for index, column in expected.columns.items():
        torch.testing.assert_close(columns[index], column, atol=2e-4, rtol=1e-3)

"""What only a GPU shows: Transformer Engine's layers hold the same model, and learn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.random_engine import random_engine, random_sequences, train_on
from engine3d.checkpoint.digest import weights_digest
from engine3d.layout import Layout
from engine3d.platform import platform
from engine3d.training.config import OptimizerConfig, TrainConfig
from tests.engine3d.training.test_engine import LAYOUTS, SETTINGS, _train, _weighted
from tests.support import tiny_families
from tests.support.distributed import run_distributed

if TYPE_CHECKING:
    from engine3d.training.engine import TrainEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not platform.has_transformer_engine, reason="needs a GPU and Transformer Engine"),
]


def _samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 60, (24,), generator=generator).tolist()
    return [torch.randint(0, 90, (length,), generator=generator).tolist() for length in lengths]


def _loss(outputs: Any, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    loss = -(outputs.logprobs * columns["weights"]).sum()
    return loss, loss.detach()


def _logprobs_and_losses(directory: Path, packing: bool) -> tuple[torch.Tensor, list[float]]:
    from engine3d.training.engine import TrainEngine

    config = TrainConfig(dtype="bfloat16", packing=packing, micro_batch_tokens=512, optimizer=OptimizerConfig(lr=1e-3))
    engine = TrainEngine(directory, config, Layout())
    samples = _samples()
    sequences = _weighted(samples, list(range(len(samples))))
    outputs = engine.logprobs(sequences)
    assert outputs is not None and outputs.logprobs is not None
    losses = [float(sum(engine.update(sequences, _loss).facts)) for _ in range(4)]
    engine.export(directory.with_name(f"exported-{packing}"))
    engine.close()
    return outputs.logprobs, losses


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3-tied", "llama", "deepseek_v3", "deepseek_v3-queries"])
def test_transformer_engine_holds_the_same_model(name: str, tmp_path: Path) -> None:
    model = tiny_families.make(name, tmp_path / "model").to("cuda")
    expected = []
    for sample in _samples():
        tokens = torch.tensor([sample], device="cuda")
        with torch.no_grad():
            every = model(tokens).logits.float().log_softmax(dim=-1)
        expected.append(torch.cat([torch.zeros(1), every[0, :-1].gather(1, tokens[0, 1:, None])[:, 0].cpu()]))
    reference = torch.cat(expected)
    for packing in (True, False):
        [(logprobs, losses)] = run_distributed(_logprobs_and_losses, 1, tmp_path / "model", packing, timeout_s=180)
        difference = (logprobs - reference).abs()
        assert difference.mean() < 0.05, f"packing={packing}: mean {difference.mean():.4f}, max {difference.max():.4f}"
        assert losses[-1] < losses[0]


def _ways_to_need_less(directory: Path) -> list[dict[str, Any]]:
    """Updates that keep everything where it is made, and others that do not."""
    os.environ |= platform.training_environment(1, deterministic=True)
    aware = SETTINGS.model_copy(update={"precision_aware": True})
    ways: list[dict[str, Any]] = [
        {"optimizer": aware},
        {"optimizer": aware.model_copy(update={"offload": True})},
        {"optimizer": aware.model_copy(update={"offload": True, "overlap_offload": True})},
        {"optimizer": aware, "recompute": "selective"},
        {"optimizer": aware, "recompute": "full", "recompute_layers": 1},
        {"optimizer": aware, "recompute": "full"},
    ]
    return [_train(directory, {}, 1, dtype="bfloat16", deterministic=True, **way) for way in ways]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_what_needs_less_memory_learns_the_same(name: str, tmp_path: Path) -> None:
    tiny_families.make(name, tmp_path / "model")
    [[kept, *others]] = run_distributed(_ways_to_need_less, 1, tmp_path / "model", timeout_s=300)
    for other in others:
        assert other["losses"] == kept["losses"] and other["norms"] == kept["norms"]
        assert torch.equal(other["after"], kept["after"])


def _wide_engine(**settings: bool) -> TrainEngine:
    """With an embedding whose part of the optimizer's state is larger than any piece of a micro-batch's memory."""
    config = tiny_families.CONFIGS["llama"] | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "vocab_size": 65536,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    optimizer = OptimizerConfig(precision_aware=True, offload=True, **settings)
    return random_engine(config, Layout(), dtype="bfloat16", optimizer=optimizer, micro_batch_tokens=4096)


def _memory_of_updates() -> list[dict[str, int]]:
    engine = _wide_engine()
    sequences = random_sequences(engine, 3 * 4096, 1024)
    found = []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        train_on(engine, sequences)
        most = {"peak": torch.cuda.max_memory_allocated(), "peak reserved": torch.cuda.max_memory_reserved()}
        # With what the update has taken in, but for the first one, and then by reading all.
        assert weights_digest(engine) == weights_digest(engine)
        engine.give_back()
        found.append(most | {"kept": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()})
    return found


def _state_on_its_way() -> tuple[list[str], int, int]:
    """Digests after an update, and bytes of the device that are free when the state is in host memory again."""
    engine = _wide_engine(overlap_offload=True)
    sequences = random_sequences(engine, 3 * 4096, 1024)
    for _ in range(2):
        train_on(engine, sequences)
        weights_digest(engine)
    train_on(engine, sequences)
    found = [weights_digest(engine), weights_digest(engine)]  # with what the update has taken in, and by reading all
    engine.give_back()
    found.append(weights_digest(engine))
    going = torch.cuda.memory_allocated()
    engine.take_back()
    assert engine.host_state is not None
    return [*found, weights_digest(engine)], going - torch.cuda.memory_allocated(), engine.host_state.nbytes


def test_a_state_on_its_way_to_host_memory_is_there_to_be_read() -> None:
    [(digests, freed, nbytes)] = run_distributed(_state_on_its_way, 1, timeout_s=180)
    assert len(set(digests)) == 1 and freed >= nbytes > 10**8


def test_an_updates_memory_is_not_left_in_pieces() -> None:
    [[_, *updates]] = run_distributed(_memory_of_updates, 1, timeout_s=180)
    for update in updates:
        assert update["reserved"] - update["kept"] < 64 << 20, update
        assert update["peak reserved"] < 1.15 * update["peak"], update


def _with_experts_of_each_kind(directory: Path) -> list[dict[str, Any]]:
    """In one step, with a product for all experts at once, and as Transformer Engine has them."""
    from engine3d.models import transformer_engine_modules as modules
    from engine3d.models.experts import moe_layer

    where = {"routed_experts": moe_layer, "grouped_product": modules}
    calls = dict.fromkeys(where, 0)

    def counted(name: str) -> Any:
        function = getattr(where[name], name)

        def call(*arguments: Any, **named: Any) -> torch.Tensor:
            calls[name] += 1
            result: torch.Tensor = function(*arguments, **named)
            return result

        return call

    found = []
    for one_step, may in ((True, True), (False, True), (False, False)):
        with pytest.MonkeyPatch.context() as patch:
            for name in calls:
                calls[name] = 0
                patch.setattr(where[name], name, counted(name))
            if not may:
                patch.setattr(modules._Grouped, "_may_group", lambda *_: False)
            trained = _train(directory, {}, 1, dtype="bfloat16", one_step_experts=one_step)
            found.append(trained | {"calls": [count > 0 for count in calls.values()]})
    return found


def test_experts_at_once_are_transformer_engines(tmp_path: Path) -> None:
    tiny_families.make("qwen3_moe", tmp_path / "model")
    [[one_step, at_once, other]] = run_distributed(_with_experts_of_each_kind, 1, tmp_path / "model", timeout_s=300)
    assert [each["calls"] for each in (one_step, at_once, other)] == [[True, False], [False, True], [False, False]]
    for one in (one_step, at_once):
        assert one["losses"] == pytest.approx(other["losses"], rel=2e-3)
        assert one["norms"] == pytest.approx(other["norms"], rel=0.02)
        assert (one["before"] - other["before"]).abs().mean() < 0.01
        assert (one["after"] - other["after"]).abs().mean() < 0.03


def _train_all(directory: Path, world_size: int) -> list[dict[str, Any]]:
    return [_train(directory, sizes, world_size, dtype="bfloat16") for sizes in LAYOUTS[world_size]]


@pytest.mark.skipif(platform.gpus < 2, reason="needs two GPUs")
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_layout_learns_alike_over_nccl(world_size: int, tmp_path: Path) -> None:
    if platform.gpus < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    tiny_families.make("qwen3_moe", tmp_path / "model")
    [[alone]] = run_distributed(_train_all, 1, tmp_path / "model", 1, timeout_s=180)
    ranks = run_distributed(_train_all, world_size, tmp_path / "model", world_size, timeout_s=300)
    for number, sizes in enumerate(LAYOUTS[world_size]):
        for rank in ranks:
            assert rank[number]["losses"] == pytest.approx(alone["losses"], rel=0.01), sizes
            assert rank[number]["norms"] == pytest.approx(alone["norms"], rel=0.1), sizes


def _train_with_copies(directory: Path) -> list[dict[str, Any]]:
    from engine3d.models.experts import room

    gathering, again = {"moe_token_dispatcher_type": "allgather"}, [0]
    waiting = room.RowsAhead.waiting

    def counted(ahead: room.RowsAhead) -> Any:
        again[0] += 1
        return waiting(ahead)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "LEAST_TOKENS", 16)
        patch.setattr(room, "LEAST_PIECES", 1)
        patch.setattr(room, "MOST_OF_EVEN", 100.0)
        patch.setattr(room.RowsAhead, "waiting", counted)
        for copies, recompute, slack in (
            (False, "none", None),
            (True, "none", None),
            (True, "full", None),
            (False, "none", room.SLACK),
            (True, "none", 1.0),
            (True, "full", 1.0),
            (True, "none", -0.5),  # all but the first pass is computed again
        ):
            again[0] = 0
            patch.setattr(room, "SLACK", slack)
            settings = {"expert_copies": copies, "recompute": recompute, "expert_rows_ahead": slack is not None}
            trained = _train(directory, {"ep": 2}, 2, dtype="bfloat16", megatron=gathering, **settings)
            found.append(trained | {"again": again[0]})
    return found


@pytest.mark.skipif(platform.gpus < 2, reason="needs two GPUs")
def test_copies_of_experts_tokens_are_collective_operations(tmp_path: Path) -> None:
    tiny_families.make("qwen3_moe", tmp_path / "model")
    for without, *others in run_distributed(_train_with_copies, 2, tmp_path / "model", timeout_s=300):
        assert [found["again"] > 0 for found in others[-3:]] == [False, False, True]
        for found in others:
            assert found["losses"] == pytest.approx(without["losses"], rel=2e-3)
            assert found["norms"] == pytest.approx(without["norms"], rel=0.02)
            assert (found["before"] - without["before"]).abs().mean() < 0.01


def _with_attention(directory: Path, backend: str) -> dict[str, Any]:
    """Updates on sequences shorter and longer than a kernel's tiles, and which attention Transformer Engine took."""
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends as chosen

    from engine3d.training.engine import TrainEngine

    options = {"optimizer": SETTINGS, "fused_query_key": True, "megatron": {"attention_backend": backend}}
    engine = TrainEngine(directory, TrainConfig(dtype="bfloat16", micro_batch_tokens=2048, **options), Layout())
    generator = torch.Generator().manual_seed(0)
    lengths = [2, 3, 127, 128, 129, *torch.randint(2, 900, (9,), generator=generator).tolist()]
    samples = [torch.randint(0, 90, (length,), generator=generator).tolist() for length in lengths]
    sequences = _weighted(samples, list(range(len(samples))))
    before = engine.logprobs(sequences)
    updates = [engine.update(sequences, _loss) for _ in range(3)]
    after = engine.logprobs(sequences)
    assert before is not None and after is not None
    engine.close()
    return {
        "before": before.logprobs,
        "after": after.logprobs,
        "losses": [float(sum(update.facts)) for update in updates],
        "norms": [update.grad_norm for update in updates],
        "flash": chosen["use_flash_attention"] and str(chosen["flash_attention_backend"])[0],
    }


@pytest.mark.parametrize("head_dim", [64, 128])
def test_flash_attention_is_the_other_attention(head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny_families.CONFIGS, "wide", tiny_families.MOE | {"head_dim": head_dim})
    tiny_families.make("wide", tmp_path / "model")
    auto, flash = (
        run_distributed(_with_attention, 1, tmp_path / "model", backend, timeout_s=180)[0]
        for backend in ("auto", "flash")
    )
    assert not auto["flash"] and flash["flash"] == "4"
    assert flash["losses"] == pytest.approx(auto["losses"], rel=2e-3)
    assert flash["norms"] == pytest.approx(auto["norms"], rel=0.02)
    assert (flash["before"] - auto["before"]).abs().mean() < 0.01
    assert (flash["after"] - auto["after"]).abs().mean() < 0.03

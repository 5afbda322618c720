"""The memory ledger: what it foresees for whole runs, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import pytest

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.memory.overhead import CALL_PARSER_BYTES
from engine3d.models import ModelSpec
from engine3d.models.precision import scale_shape
from hybridflow.cli.main import main
from hybridflow.cli.plan import PlannedLengths, named_cluster, nodes_of, planned
from hybridflow.cluster.devices.device_map import Device, Node
from hybridflow.cluster.hosts.checks.facts import machine_bytes
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.planning.checks.placement import planned_devices
from hybridflow.planning.checks.prompt import encoded_prompts
from hybridflow.planning.memory import estimate as memory_estimate
from hybridflow.planning.memory.estimate import _parsing_nodes, recipe_ledger, recipe_specs
from hybridflow.planning.memory.ledger import GpuMemory, MemoryLedger
from hybridflow.planning.memory.samples import Lengths, SetLengths, cache_tokens, route_bytes_by_node
from hybridflow.planning.search.recipe_work import plan_overrides
from tests.support.ledgers import equal_engines_once

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[4] / "launch" / "recipes"
FOUR = [Node("node 0", gpus=4, cpu_slots=0)]

# Qwen3-30B-A3B: hidden, layers, vocabulary, heads, groups, elements of a head, experts and their width.
H, L, V, HEADS, GROUPS, D, E, F = 2048, 48, 151936, 32, 4, 128, 128, 768
EXPERTS = L * E * 3 * H * F
DENSE = L * ((2 * HEADS + 2 * GROUPS) * D * H + E * H + 2 * H + 2 * D) + 2 * V * H + H


@pytest.fixture(autouse=True, scope="module")
def _quick_ledgers() -> Iterator[None]:
    with equal_engines_once():
        yield


def _recipe(name: str, *overrides: str) -> Recipe:
    """Load a recipe with few prompts: encoding thousands takes longer than the ledger."""
    recipe = load_recipe(RECIPES / name, overrides)
    if recipe.data.arithmetic is None:
        return recipe
    few = recipe.data.arithmetic.model_copy(update={"train_size": 200, "sft_size": 50, "eval_size": 50})
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"arithmetic": few})})


def _actor(name: str) -> ModelSpec:
    recipe = _recipe(name)
    return recipe_specs(recipe)["actor"]


def _ledger(name: str, *overrides: str, nodes: Sequence[Node] = FOUR, gpu_gb: float = 150.0) -> MemoryLedger:
    return recipe_ledger(_recipe(name, *overrides), nodes, gpu_gb)


def test_the_large_recipe_fits_its_gpus() -> None:
    ledger = _ledger("qwen3-30b-a3b-4xh200.yaml", gpu_gb=150.7)
    ledger.check()
    [gpu] = ledger.gpus
    assert max(map(gpu.total, gpu.phases)) < 0.9 * 150.7e9, "the ledger may be 7 % wrong"


def test_the_recipe_of_long_sequences_fits_eight_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    name = "qwen3-235b-a22b-128k-64xh200.yaml"
    assert main(["check", str(RECIPES / name), "--gpu-gb", "141", "--host-gb", "2000"]) == 0
    assert capsys.readouterr().out.endswith("nothing wrong found\n")
    ledger = _ledger(name, nodes=[Node(f"node {number}", gpus=8, cpu_slots=0) for number in range(8)], gpu_gb=141.0)
    ledger.check()
    assert list(dict.fromkeys(gpu.stages["actor"] for gpu in ledger.gpus)) == [(8, (stage,)) for stage in range(8)]
    layers = [len(chunk) for stage in range(8) for chunk in _actor(name).rules.rank_layers(Layout(pp=8), stage)]
    for gpu in ledger.gpus:
        _, [stage] = gpu.stages["actor"]
        kept = {phase.name: phase for phase in gpu.phases}["update of actor"].items["activations"]
        # Of each micro-batch in flight the input of every layer, for an eighth of its tokens.
        assert kept == (8 - stage) * layers[stage] * 132096 // 8 * 4096 * 2
        assert max(map(gpu.total, gpu.phases)) < 0.93 * 141e9


def test_memory_into_which_other_ranks_copy_is_there_for_good() -> None:
    recipe = "qwen3-30b-a3b-4xh200.yaml"
    [without], [with_copies] = (
        _ledger(recipe, f"train.copy_engine_dispatcher={copied}").gpus for copied in ("false", "true")
    )
    name = "actor copies of experts' tokens"
    assert name not in without.always
    assert with_copies.always[name] == 3 * 4 * 11275 * H * 2  # three halves of four ranks' tokens in bf16
    assert with_copies.always == {**without.always, name: with_copies.always[name]}


# The large recipe with what takes the least memory in training, and the optimizer's state on the GPU.
LEAST = (
    "train.recompute=full",
    "train.micro_batch_tokens=16384",
    "train.optimizer.offload=false",
    "train.copy_engine_dispatcher=false",
    "train.fused_query_key=false",
)
# With engines whose ranks share the attention of all requests, and read prompts and see them as SGLang does.
TOGETHER = (
    "rollout.engine.attention_dp=1",
    "rollout.engine.peer_collectives=false",
    "rollout.engine.cascade_attention=false",
    "rollout.engine.server_args={}",
)


def test_the_large_recipe_holds_what_can_be_counted_by_hand() -> None:
    ledger = _ledger("qwen3-30b-a3b-4xh200.yaml", *LEAST, *TOGETHER)
    (gpu,) = ledger.gpus
    assert len(gpu.devices) == 4
    mine = EXPERTS / 4 + DENSE
    assert gpu.always["actor weights"] == pytest.approx(2 * mine, rel=1e-4)
    # Remainder and two moments, in two bytes each; those of dense parameters are split over the four ranks.
    assert gpu.always["actor optimizer"] == pytest.approx(6 * (EXPERTS + DENSE) / 4, rel=1e-4)
    # Attention's output, which the engine's ranks cut by columns. (Each has the keys of one group.)
    assert gpu.always["engine weights"] == 2 * L * H * (HEADS * D / 4)
    phases = {phase.name: phase for phase in gpu.phases}
    assert phases["update of actor"].items["gradients"] == pytest.approx(2 * mine, rel=1e-4)
    assert "gradients" not in phases["infer of actor"].items
    # Of 8,192 tokens of prompts what experts make of them: eight, each one's width three times and what it gives.
    prompts = 8192 * 2 * (2 * H + 8 * (3 * F + H))
    assert phases["rollout"].items == {"KV cache": 2101248 * L * 2 * D * 2, "prompts": prompts}
    assert "KV cache" not in phases["update of actor"].items
    kept = phases["update of actor"].items["activations"]
    assert kept == 16384 * L * H * 2  # the input of every layer
    ledger.check()


def test_a_group_with_attention_of_its_own_has_the_cache_of_its_requests() -> None:
    def rollout_of(*overrides: str) -> tuple[GpuMemory, Mapping[str, int]]:
        (gpu,) = _ledger("qwen3-30b-a3b-4xh200.yaml", *LEAST, *TOGETHER, *overrides).gpus
        return gpu, {phase.name: phase for phase in gpu.phases}["rollout"].items

    (cut, cut_items), (separate, own_items) = rollout_of(), rollout_of("rollout.engine.attention_dp=4")
    # A quarter of the tokens, with the keys of all four groups of heads.
    assert own_items == cut_items
    assert separate.cache_tokens == cut.cache_tokens
    # Queries and keys of all groups of heads, which the trainer has group by group; else the trainer's memory.
    assert separate.always["engine weights"] == 2 * L * H * (HEADS + 2 * GROUPS) * D
    assert separate.always["engine workspace"] < cut.always["engine workspace"] - 2 * V * 4 * 700  # of fewer logits


def test_tables_of_what_requests_share_are_counted() -> None:
    plain, tables = (
        _ledger("qwen3-30b-a3b-4xh200.yaml", *TOGETHER, f"rollout.engine.cascade_attention={on}")
        .gpus[0]
        .always["engine workspace"]
        for on in ("false", "true")
    )
    # Of one request more (see SPARE_REQUESTS), and of half as many groups: a number for each token.
    assert tables - plain == 1025 * 4096 * 4 * 3 // 2


def test_a_cache_that_holds_few_of_the_requests_is_told() -> None:
    ledger = _ledger("qwen3-30b-a3b-4xh200.yaml", "rollout.engine.max_total_tokens=524288")
    fitting = 524288 // ledger.sequence_tokens
    assert 1024 < ledger.sequence_tokens < 1100  # a short prompt, and the longest response
    assert f"KV cache of 524,288 tokens: {fitting} of 1024 requests at once" in ledger.lines()[0]
    few = _ledger(
        "qwen3-30b-a3b-4xh200.yaml",
        f"rollout.engine.max_running_requests={fitting}",
        "rollout.engine.max_total_tokens=524288",
    )
    assert few.lines()[0].endswith("KV cache of 524,288 tokens")


def test_as_many_graphs_are_counted_as_an_engine_captures() -> None:
    """It is told to run one request more (see SPARE_REQUESTS), and a batch of 9 has a graph beside that of 8."""
    eight, nine = (
        _ledger("qwen3-30b-a3b-4xh200.yaml", *TOGETHER, f"rollout.engine.max_running_requests={most}", *overrides)
        for most, overrides in ((8, []), (9, ["rollout.engine.server_args.cuda_graph_max_bs_decode=9"]))
    )
    assert eight.gpus[0].always["engine workspace"] == nine.gpus[0].always["engine workspace"]


def test_what_cannot_fit_is_refused_with_the_phase_and_what_to_change() -> None:
    ledger = _ledger("qwen3-30b-a3b-4xh200.yaml", *LEAST, "train.recompute=none", gpu_gb=141.0)
    with pytest.raises(UserError) as refused:
        ledger.check()
    line = str(refused.value)
    assert re.match(
        r"GPU 0 of node 0 and 3 like it: \d+\.\d GB in phase update of actor on a GPU of 141\.0 GB \(", line
    )
    assert "actor optimizer" in line and "activations" in line
    assert "train.recompute=full" in line and "memory_saver" not in line and "\n" not in line


def test_the_more_is_computed_again_the_less_is_kept() -> None:
    ways = ("none", "selective", "full train.recompute_layers=1", "full train.recompute_layers=24", "full")
    ledgers = [
        _ledger("qwen3-30b-a3b-4xh200.yaml", *LEAST, "train.micro_batch_tokens=4096", *f"train.recompute={way}".split())
        for way in ways
    ]
    none, selective, one, half, full = (ledger.gpus[0].phases[-1].items["activations"] for ledger in ledgers)
    assert none > one > selective > half > full
    assert (none - one) * 48 == pytest.approx(none - full)  # layers are alike
    assert "more of train.recompute_layers" in ledgers[3].gpus[0].phases[-1].less
    assert "recompute" not in ledgers[4].gpus[0].phases[-1].less


def test_of_an_optimizer_in_host_memory_an_update_takes_a_few_parts_to_the_gpu() -> None:
    small = (*LEAST, "train.micro_batch_tokens=2048")
    on_gpu = _ledger("qwen3-30b-a3b-4xh200.yaml", *small)
    in_host = _ledger("qwen3-30b-a3b-4xh200.yaml", *small, "train.optimizer.offload=true")
    [before], [after] = on_gpu.gpus, in_host.gpus
    state = before.always["actor optimizer"]
    assert "actor optimizer" not in after.always
    rollout, _, update = after.phases
    assert before.total(before.phases[0]) - after.total(rollout) == state
    # A rank's share of what is not experts, which is less than three parts with the state of the embedding.
    assert update.items["optimizer"] == pytest.approx(6 * DENSE / 4, rel=1e-3) and "activations" not in update.items
    assert [host.items for host in (*in_host.hosts, *on_gpu.hosts)] == [{"actor optimizer": 4 * state}, {}]
    assert in_host.lines()[-1] == (
        f"node 0: {4 * state / 1e9:.1f} GB of host memory, page-locked: actor optimizer {4 * state / 1e9:.1f}"
    )
    large = _ledger("qwen3-30b-a3b-4xh200.yaml")
    assert "activations" in large.gpus[0].phases[-1].items and "optimizer" not in large.gpus[0].phases[-1].items
    assert "train.optimizer.offload" in before.phases[-1].less
    assert "train.optimizer.offload" not in large.gpus[0].phases[-1].less


def test_a_state_that_returns_beside_a_rollout_is_on_the_gpu_until_then(capsys: pytest.CaptureFixture[str]) -> None:
    overlap = "train.optimizer.overlap_offload=true"
    [waits], [overlaps] = (_ledger("qwen3-30b-a3b-4xh200.yaml", *overrides).gpus for overrides in ((), (overlap,)))
    state = sum(_ledger("qwen3-30b-a3b-4xh200.yaml").hosts[0].items.values()) // 4
    for before, after in zip(waits.phases, overlaps.phases, strict=True):
        more = {"actor optimizer on its way": state} if after.name == "rollout" else {}
        assert after.items == {**before.items, **more}
    assert "train.optimizer.overlap_offload=false" in overlaps.phases[0].less and "overlap" not in waits.phases[0].less
    small = ("train.recompute=full", "train.micro_batch_tokens=2048")  # all of the state is there at once
    assert _ledger("qwen3-30b-a3b-4xh200.yaml", overlap, *small).gpus[0].phases[-1].items["optimizer"] == state
    # The critic's update meets the actor's state, and neither its own.
    alike = ("train.optimizer.offload=true", overlap, "critic.train.optimizer.offload=true")
    phases = _ledger("h200-1gpu-ppo.yaml", *alike).gpus[0].phases
    of_phases = {phase.name: phase.items for phase in phases}
    assert ["overlap_offload=false" in phase.less for phase in phases] == [
        "actor optimizer on its way" in phase.items for phase in phases
    ]
    met = {name for name, items in of_phases.items() if "actor optimizer on its way" in items}
    assert met == set(of_phases) - {"infer of actor", "update of actor"}
    assert not any("critic optimizer on its way" in items for items in of_phases.values())


def test_what_does_not_fit_a_node_is_refused_with_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES / "qwen3-30b-a3b-2xh200.yaml")
    node = ["--nodes", "1", "--gpus-per-node", "2", "--gpu-gb", "150.7"]
    refused = "node 0: 183.2 GB of host memory, page-locked, on a node of 128.0 GB (actor optimizer 183.2); to need"
    assert main(["check", recipe, *node, "--host-gb", "256"]) == 0
    for shown in ([], ["--memory"]):
        assert main(["check", recipe, *node, *shown, "--host-gb", "128"]) == 2
        assert refused in capsys.readouterr().err
    assert main(["check", recipe, *node[:4], "--host-gb", "256"]) == 0  # GPUs of unknown size
    assert main(["check", recipe, *node[:4], "--host-gb", "128"]) == 2
    assert refused in capsys.readouterr().err
    assert main(["check", recipe, *node, "--host-gb", "128", "train.optimizer.offload=false"]) == 2
    assert "phase update of actor" in capsys.readouterr().err


def test_routes_are_in_the_memory_of_their_node() -> None:
    """A byte for each of a token's experts of each layer, on the ranks that send responses."""
    for attention_dp in (1, 4):
        overrides = (*LEAST, *TOGETHER, f"rollout.engine.attention_dp={attention_dp}", "rollout.engine.routes=true")
        ledger = _ledger("qwen3-30b-a3b-4xh200.yaml", *overrides)
        assert len(ledger.gpus) == 1
        [host] = ledger.hosts
        items = dict(host.items)
        of_samples = items.pop("routes of samples")
        assert items == {"routes": ledger.gpus[0].cache_tokens * L * 8}
        # One node, which has all samples once. Each of its ranks reads its positions of a micro-batch, in one stage.
        recipe = _recipe("qwen3-30b-a3b-4xh200.yaml", *overrides)
        layout, sequence_tokens = recipe.train.layout.layout(4), ledger.sequence_tokens
        read = 4 * 2 * max(recipe.train.micro_batch_tokens, sequence_tokens) // (layout.tp * layout.cp)
        assert of_samples == (recipe.samples_per_step * sequence_tokens + read) * L * 8
        less = "fewer trainer." if of_samples > items["routes"] else "a smaller rollout.engine."
        assert not host.page_locked and host.less.startswith(less)
        assert "routes 0.8" in "\n".join(ledger.lines())


def test_nodes_have_the_routes_of_their_engines_and_ranks() -> None:
    layout = Layout(pp=2, cp=2, dp=2, stages=(30, 18))
    devices = [Device(rank // 4, "cuda", rank % 4) for rank in range(8)]
    of_nodes = partial(
        route_bytes_by_node,
        _actor("qwen3-30b-a3b-4xh200.yaml"),
        layout,
        devices,
        step_tokens=1000,
        micro_batch_tokens=100,
    )
    # A stage and both replicas on each node. Its ranks read half of a micro-batch's positions.
    stages = [4 * 2 * 50 * 8 * layers for layers in (30, 18)]
    assert of_nodes(devices[:4]) == {0: stages[0] + 2 * 1000 * 8 * 48, 1: stages[1] + 1000 * 8 * 48}
    # Recorded by the last stage, in the processes of two ranks, once with its own layers alone.
    gathered = 2 * 500 * 8 * (2 * 48 + 18)
    assert of_nodes([]) == {0: stages[0] + 1000 * 8 * 48, 1: stages[1] + gathered + 1000 * 8 * 48}


@pytest.mark.parametrize(
    ("overrides", "less"),
    [
        (["train.optimizer.offload=true"], "train.optimizer.offload=false"),
        (["critic.train.optimizer.offload=true"], "critic.train.optimizer.offload=false"),
        # A checkpoint of both, of which only the critic's moments are beside it.
        (["critic.train.optimizer.offload=true", "checkpoint.save_interval=1"], "checkpoint.async_save=false"),
    ],
)
def test_what_takes_the_most_of_a_nodes_memory_is_to_be_less(overrides: list[str], less: str) -> None:
    ledger = recipe_ledger(_recipe("h200-1gpu-ppo.yaml", *overrides), FOUR, 150.0, host_gb=1.0)
    with pytest.raises(UserError) as refused:
        ledger.check()
    assert str(refused.value).endswith(f"; to need less: {less}, or more nodes")


@pytest.mark.parametrize(
    ("name", "no_limit"), [("memory.max", "max"), ("memory/memory.limit_in_bytes", "9223372036854771712")]
)
def test_a_container_has_what_its_control_group_may_take(name: str, no_limit: str, tmp_path: Path) -> None:
    limit = tmp_path / name
    limit.parent.mkdir(exist_ok=True)
    machine = machine_bytes(tmp_path)
    limit.write_text(f"{no_limit}\n")
    assert machine_bytes(tmp_path) == machine > 10**9
    limit.write_text("1000000\n")
    assert machine_bytes(tmp_path) == 10**6


@pytest.mark.parametrize("name", ["qwen3-30b-a3b-4xh200.yaml", "h200-1gpu.yaml", "h200-1gpu-ppo.yaml"])
def test_without_engines_all_is_as_with_them_but_for_what_is_theirs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, with_engines = _recipe(name), _ledger(name)
    monkeypatch.setattr(memory_estimate, "serving_by_rank", lambda *_: pytest.fail("an engine was asked"))
    devices = planned_devices(recipe.device_maps, recipe.placement, FOUR)
    assert devices is not None
    tokens = encoded_prompts(recipe, (specs := recipe_specs(recipe))["actor"]).lengths.sequence
    models = memory_estimate.foresee(
        recipe, devices, specs, gpu_bytes=with_engines.gpu_bytes, sequence_tokens=tokens, with_engines=False
    )
    theirs = {"engine weights", "KV cache", "prompts", "engine workspace", "communicators", "driver", "libraries"}
    for gpu, less in zip(with_engines.gpus, models.gpus, strict=True):
        assert less.always == {name: size for name, size in gpu.always.items() if name not in theirs}
        for phase, left in zip(gpu.phases, less.phases, strict=True):
            items = {name: size for name, size in left.items.items() if size}
            assert items == {name: size for name, size in phase.items.items() if name not in theirs}


def test_what_a_setting_saves(tmp_path: Path) -> None:
    # A cache of all that is free.
    judges = (
        "placement.critic=cuda:1",
        "placement.reference=cuda:1",
        "rollout.engine.max_total_tokens=100000000",
    )
    kept = _ledger("h200-1gpu-ppo.yaml", "rollout.engine.memory_saver=false", *judges, "checkpoint.save_interval=1")
    saved = _ledger("h200-1gpu-ppo.yaml", *judges, "train.optimizer.precision_aware=true")
    first, second = kept.gpus
    assert [phase.name for phase in first.phases] == ["rollout", "infer of actor", "update of actor"]
    assert [phase.name for phase in second.phases] == ["infer of reference", "infer of critic", "update of critic"]
    assert first.worst.name == "update of actor" and "KV cache" in first.worst.items
    assert saved.gpus[0].worst.name == "rollout"
    assert "rollout.engine.memory_saver=true" in first.worst.less
    assert second.always["reference weights"] > 0 and "gradients" not in second.phases[0].items
    # Float32 gradients, masters and moments, against bf16 ones and what bf16 lacks to float32.
    assert first.always["actor optimizer"] == 2 * saved.gpus[0].always["actor optimizer"]
    gradients = [gpu.phases[2].items["gradients"] for gpu in (first, saved.gpus[0])]
    assert gradients[0] == 2 * gradients[1]
    # A copy of the actor's and the critic's float32 weights and moments.
    state = first.always["actor optimizer"] + second.always["critic optimizer"]
    assert [host.total for host in kept.hosts] == [pytest.approx(state, rel=1e-3)]
    assert [host.items for host in saved.hosts] == [{}]


def test_the_command_shows_the_ledger_and_ends_with_2_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    recipe, nodes = str(RECIPES / "h200-1gpu.yaml"), ["--nodes", "1", "--gpus-per-node", "1"]
    assert main(["check", recipe, "--memory", *nodes, "--gpu-gb", "141"]) == 0
    shown = capsys.readouterr().out
    assert "GPU 0 of node 0: at most" in shown and "update of actor" in shown
    assert main(["check", recipe, "placement.reward=cpu:1", *nodes]) == 0  # nodes have the CPU slots that are named
    assert main(["check", recipe, "--memory", *nodes, "--gpu-gb", "20"]) == 2
    assert "in phase" in capsys.readouterr().err


def test_cpu_slots_and_their_host_are_shown_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = str(RECIPES / "demo.yaml")
    apart = f"run_dir={tmp_path}"  # from a demo that somebody has run here
    large = ["rollout.engine.max_total_tokens=10000000", apart, "--host-gb", "64"]
    assert main(["check", demo, "--memory", "rollout.engine.max_total_tokens=null", apart]) == 0
    shown = capsys.readouterr().out.splitlines()
    # All held-out prompts, four samples each, of at most 6 tokens and 4 more, and not what the machine has room for.
    lengths = Lengths(prompt=6, response=4, sets=(SetLengths(prompts=256, samples=4, sequence=10),))
    recipe = _recipe("demo.yaml", "rollout.engine.max_total_tokens=null")
    tokens = cache_tokens(recipe.rollout, recipe.groups_in_flight, lengths, 1, "cpu")
    assert re.match(rf"CPU slot 0 of node 0: at most \d\.\d GB in .*, KV cache of {tokens:,} tokens$", shown[0])
    assert any(line.startswith("CPU slot 1 of node 0: at most 0.") for line in shown)
    assert re.match(r"node 0: \d\.\d GB of host memory: processes", shown[-2])
    assert main(["check", demo, "--memory", *large]) == 0
    of_a_token = 2 * 2 * 24 * 2 * 4  # keys and values of two heads of 24 elements in two layers, in float32
    assert f"KV cache {1e7 * of_a_token / 1e9:.1f}" in capsys.readouterr().out
    for words in ([*large[:2], "--host-gb", "6"], [apart, "--host-gb", "1"]):
        assert main(["check", demo, "--memory", *words]) == 2
        assert re.search(r"node 0: \d\.\d GB of host memory, on a node of \d\.0 GB", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "h200-1gpu.yaml", "--memory", "--nodes", "1"], "expected --gpu-gb"),
        (["check", "h200-1gpu.yaml", "--memory", "--nodes", "0"], "--nodes 0: expected a whole number"),
        (["check", "qwen3-30b-a3b-4xh200.yaml", "--nodes", "1", "--gpus-per-node", "2"], "there is no cuda:2"),
        (["check", "h200-1gpu.yaml", "--memory", "--nodes", "1", "--host-gb", "100"], "expected --gpu-gb"),
    ],
)
def test_bad_options_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    words[1] = str(RECIPES / words[1])
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-5", "much"])
def test_a_size_is_a_number_above_0(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", str(RECIPES / "h200-1gpu.yaml"), f"--host-gb={size}"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"--host-gb: expected a number above 0 and at most 1e+09, found {size}" in error and error.count("\n") == 1


def test_weights_in_fp8_take_a_byte_in_the_engine_and_next_to_the_actors() -> None:
    (before,) = _ledger("h200-1gpu.yaml", "rollout.weights.share=false").gpus
    (after,) = _ledger("h200-1gpu.yaml", "rollout.weights.share=false", "rollout.engine.precision=fp8").gpus
    spec = _actor("h200-1gpu.yaml")
    tensors = [tensor.shape for tensor in spec.hf_tensors.values() if tensor.fp8]
    values = sum(map(prod, tensors))
    quantised = values + 4 * sum(prod(scale_shape(shape)) for shape in tensors)
    assert after.always["actor weights in fp8"] == quantised < 1.001 * values
    assert before.always["engine weights"] - after.always["engine weights"] == 2 * values - quantised
    same = {name: size for name, size in before.always.items() if name != "engine weights"}
    assert same.items() <= after.always.items() and len(after.always) == len(before.always) + 1


def test_layers_left_out_of_fp8_take_two_bytes_in_the_engine_and_none_next_to_the_actors() -> None:
    settings = ("rollout.weights.share=false", "rollout.engine.precision=fp8")
    (before,) = _ledger("h200-1gpu.yaml", *settings).gpus
    last = "train.fp8.num_layers_at_end_in_bf16=2"
    (after,) = _ledger("h200-1gpu.yaml", *settings, last).gpus
    spec = _actor("h200-1gpu.yaml")
    of_last = [
        tensor.shape
        for name, tensor in spec.hf_tensors.items()
        if tensor.fp8 and int(name.split(".")[2]) >= spec.sizes.layers - 2
    ]
    values, scales = sum(map(prod, of_last)), 4 * sum(prod(scale_shape(shape)) for shape in of_last)
    item = "actor weights in fp8"
    assert before.always[item] - after.always[item] == values + scales
    assert after.always["engine weights"] - before.always["engine weights"] == values - scales
    (trained,) = _ledger("h200-1gpu.yaml", "train.precision=fp8", last).gpus
    assert trained.always["actor operands in fp8"] == 2 * after.always[item]


def test_training_in_fp8_keeps_quantised_weights_and_a_cache_in_fp8_has_half_the_bytes() -> None:
    (before,) = _ledger("h200-1gpu.yaml", "train.fused_experts=false").gpus
    (trained,) = _ledger("h200-1gpu.yaml", "train.precision=fp8").gpus
    spec = _actor("h200-1gpu.yaml")
    tensors = [tensor.shape for tensor in spec.hf_tensors.values() if tensor.fp8]
    quantised = sum(prod(shape) + 4 * prod(scale_shape(shape)) for shape in tensors)
    assert dict(trained.always) == {**before.always, "actor operands in fp8": 2 * quantised}
    (cached,) = _ledger("h200-1gpu.yaml", "train.fused_experts=false", "rollout.engine.kv_cache_dtype=fp8_e5m2").gpus
    tokens, caches = (
        [gpu.cache_tokens for gpu in (before, cached)],
        [gpu.always.get("KV cache") or gpu.phases[0].items["KV cache"] for gpu in (before, cached)],
    )
    assert caches[0] * tokens[1] == 2 * caches[1] * tokens[0]


def test_a_model_that_is_offloaded_is_there_in_its_own_phases_only() -> None:
    stays = _ledger("h200-1gpu-ppo.yaml")
    released = ("rollout.engine.release_weights=true", "rollout.weights.share=false")
    leaves = _ledger("h200-1gpu-ppo.yaml", "reference.offload=true", "critic.offload=true", *released)
    (there,), (away,) = stays.gpus, leaves.gpus
    moved = ("reference weights", "critic weights", "critic optimizer")
    assert {
        name: size for name, size in there.always.items() if name not in moved and name != "engine weights"
    } == dict(away.always)
    # What it shared with the actor it has for itself now, in its own phase.
    weights = [phase.items.get("engine weights", 0) for phase in away.phases]
    assert weights[0] > there.always.get("engine weights", 0) and not any(weights[1:])
    for phase in away.phases:
        [role] = [role for role in ("actor", "critic", "reference", "rollout") if role in phase.name]
        sizes = {name: size for name, size in phase.items.items() if name in moved}
        assert sizes == {name: size for name, size in there.always.items() if name in moved and role in name}
    assert leaves.hosts[0].items == {
        "reference between its turns": there.always["reference weights"],
        "critic between its turns": there.always["critic weights"] + there.always["critic optimizer"],
    }
    assert "critic.offload=true" in there.worst.less and "offload" not in away.worst.less.split("optimizer")[0]
    with pytest.raises(UserError, match=r"to need less: critic\.offload=false, or more nodes"):
        replace(leaves, host_bytes=10**9).check()
    # What the models have left is the engine's, where it may take more than is free.
    most = "rollout.engine.max_total_tokens=100000000"
    more = _ledger("h200-1gpu-ppo.yaml", "reference.offload=true", "critic.offload=true", most).gpus[0].cache_tokens
    assert more > _ledger("h200-1gpu-ppo.yaml", most).gpus[0].cache_tokens


def test_samples_that_are_kept_are_on_the_drivers_host() -> None:
    algorithm = "algorithm={name: pf_ppo, replay_buffer_size: 100000}"
    several = [Node(f"node {number}", gpus=1, cpu_slots=0) for number in range(2)]
    placement = [f"placement.{role}=cuda:0-1" for role in ("actor", "rollout")]
    offloaded = "train.optimizer.offload=true"
    ledger = _ledger("h200-1gpu.yaml", algorithm, *placement, offloaded, nodes=several)
    first, second = ledger.hosts
    assert "replay buffer" not in second.items
    assert first.items["replay buffer"] == 3 * 100_000 * (13 * ledger.sequence_tokens + 64)
    assert not first.page_locked and second.page_locked


def test_samples_that_are_trained_on_again_are_in_an_update() -> None:
    few = ("trainer.prompts_per_step=1", "trainer.mini_batches=1", "rollout.samples_per_prompt=4")

    def update(replayed: int) -> int:
        algorithm = f"algorithm={{name: pf_ppo, replay_ratio: 1, replay_buffer_size: {replayed}}}"
        recipe = _recipe("h200-1gpu.yaml", algorithm, *few, "train.micro_batch_tokens=1000000")
        devices = planned_devices(recipe.device_maps, recipe.placement, FOUR)
        assert devices is not None
        specs = recipe_specs(recipe)
        ledger = memory_estimate.foresee(
            recipe, devices, specs, gpu_bytes=None, sequence_tokens=1000, with_engines=False
        )
        gpu = ledger.gpus[0]
        return next(gpu.total(phase) for phase in gpu.phases if phase.name == "update of actor")

    assert update(1) < update(4) == update(100)


def a_judge(directory: Path, **config: object) -> list[str]:
    """The settings of one that two GPUs serve beside those of the large recipe."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "intermediate_size": 4096, "vocab_size": 32000}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096}
    family = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16"}
    rest = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**family, **sizes, **heads, **rest, **config}))
    asks = {"name": "quality", "path": "judge", "arguments": {"rubric": "{{ response }}", "score_range": [0, 1]}}
    served = {"path": str(directory), "engine": {"tp": 2, "max_running_requests": 7, "mem_fraction_static": 0.9}}
    return [f"reward.functions={json.dumps([asks])}", f"judge={json.dumps(served)}", "placement.judge=cuda:4-5"]


def test_a_judge_has_its_devices_to_itself(tmp_path: Path) -> None:
    given = a_judge(tmp_path / "judge")
    nodes = [Node("node 0", gpus=6, cpu_slots=0)]
    plain, judged = (_ledger("qwen3-30b-a3b-4xh200.yaml", *more, nodes=nodes, gpu_gb=150.7) for more in ([], given))
    assert judged.gpus[:-1] == plain.gpus
    gpu = judged.gpus[-1]
    assert [device.index for device in gpu.devices] == [4, 5]
    [phase] = gpu.phases
    assert phase.name == "judge"
    # So many sequences and one more, a page of 64 longer each, of keys and values of two groups on each device.
    assert gpu.total(phase) > 8 * (4096 + 64) * 2 * 2 * 64 * 2 * 4 + gpu.always["engine weights"]
    small = [*given, "judge.engine.max_total_tokens=4096"]
    smaller = _ledger("qwen3-30b-a3b-4xh200.yaml", *small, nodes=nodes, gpu_gb=150.7).gpus[-1]
    assert smaller.total(smaller.phases[0]) < gpu.total(phase)
    assert phase.less == "a smaller judge.engine.mem_fraction_static or max_total_tokens"


def test_nothing_is_foreseen_of_a_quantized_judge(tmp_path: Path) -> None:
    """Refuse to predict memory of quantized weights, whose size depends on a method that is not known here."""
    stored = a_judge(tmp_path / "stored", quantization_config={"quant_method": "fp8"})
    plain = a_judge(tmp_path / "plain")
    arguments = ("quantization: fp8", "kv_cache_dtype: fp8_e5m2")
    for given in (stored, *([*plain, f"judge.engine.server_args={{{argument}}}"] for argument in arguments)):
        judge = _recipe("qwen3-30b-a3b-4xh200.yaml", *given).judge
        assert judge is not None and memory_estimate._served_judge(judge) is None
    judge = _recipe("qwen3-30b-a3b-4xh200.yaml", *plain).judge
    assert judge is not None and memory_estimate._served_judge(judge) is not None


def test_ranks_that_read_calls_of_tools_have_memory_for_their_parsers() -> None:
    nodes = [Node("node 0", gpus=0, cpu_slots=4)]
    [host] = _ledger("tools.yaml", "placement.reward=cpu:0-1", nodes=nodes).hosts
    assert host.items["parsers of tool calls"] == 2 * CALL_PARSER_BYTES
    slot = Device(0, "cpu", 0)
    assert [
        len(_parsing_nodes(_recipe(name).environment, {"rollout": [slot]})) for name in ("tools.yaml", "game.yaml")
    ] == [1, 0]
    assert _parsing_nodes(_recipe("tools.yaml").environment, {"actor": [slot]}) == []


@pytest.mark.parametrize(
    ("name", "gpus", "overrides"),
    [
        ("qwen3-30b-a3b-4xh200.yaml", "h200:4", ()),
        pytest.param(
            "qwen3-30b-a3b-4xh200.yaml",
            "h100:8",
            ("rollout.engine.mem_fraction_static=0.1",),
            marks=pytest.mark.release,
        ),
        ("qwen3-30b-a3b-lora-1xh200.yaml", "h200:1", ()),
        ("h200-1gpu-ppo.yaml", "h200:2", ()),
        ("h200-1gpu.yaml", "h200:1", ("rollout.engine.precision=fp8", "rollout.weights.share=false")),
        ("demo.yaml", "h200:2", ()),
        ("ppo.yaml", "cpu:2", ()),
    ],
)
def test_a_plan_has_the_memory_that_the_ledger_of_its_recipe_has(
    name: str, gpus: str, overrides: tuple[str, ...]
) -> None:
    recipe, cluster = _recipe(name, *overrides), named_cluster(gpus, 1, None)
    plan = planned(recipe, cluster, PlannedLengths(6, None, 0.0), count=1)[0][0]
    kind = "cpu" if cluster.profile.gpu == "cpu" else "cuda"
    written = _recipe(name, *overrides, *plan_overrides(recipe.placement, recipe.rollout.engine, plan, kind=kind))
    ledger = recipe_ledger(written, nodes_of(cluster), cluster.profile.hardware.memory / 1e9)
    for phase in plan.memory:
        totals = [gpu.total(of) for gpu in ledger.gpus for of in gpu.phases if of.name == phase.phase]
        assert phase.total == pytest.approx(max(totals), rel=0.01, abs=2e8), phase.phase
    if plan.engines is not None:
        assert {gpu.cache_tokens for gpu in ledger.gpus if gpu.cache_tokens} == {plan.engines.cache_tokens}

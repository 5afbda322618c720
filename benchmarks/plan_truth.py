"""Predicted against measured seconds of every run under `results/` that has a recipe and metrics.

    python benchmarks/plan_truth.py

prints the table of `results/plan/README.md` and writes it. Predictions take the recipe, the mean tokens of prompts and
the lengths of responses, the profile of the GPU, and nothing else of the run. Measured is the median of the steps after
the first; of a stream, whose steps wait or not, the mean of those while its engines are full.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import plan_layouts
from engine3d.models import model_spec
from engine3d.training.config import LayoutConfig, OptimizerConfig, TrainConfig
from hybridflow.planning.time.generation import EngineShape
from hybridflow.planning.time.hardware import load_profile
from hybridflow.planning.time.phases import RoleLayout, phase_costs
from hybridflow.planning.time.step import step_seconds
from hybridflow.planning.time.workload import RoleWork, Workload

RESULTS = Path(__file__).parent / "results"
README = RESULTS / "plan" / "README.md"
METRICS = {
    "rollout": "rollout/time_ms",
    "scoring": "inference/time_ms",
    "update": "train/update_time_ms",
    "step": "train/step_time_ms",
}
CALIBRATED = {
    "cute-norms": "sparse_layer_s",
    "h100-1and1-stream": "EngineShape.recomputes",
    "h100-judge-and-evaluation/eval-beside": "decode_host_s, update_s, scoring_s",
    "h200-1and1-one-step-apart/run": "transfer_share",
    "h200-4gpu-30b/five-steps-run": "transfer_s",
    "memory/deepseek-like": "_LATENT_PASSES",
    "memory/llama-4-layers": "linear",
    "memory/ppo": "unfused_layer_s",
}
"""Runs from which a rate of a profile comes."""
LAYOUTS = "layouts of the demo"
"""Entry of `plan_layouts` among the published errors."""

_LEAST_S = 0.2
"""Phases that are shorter are not compared: they are calls and launches."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run with what was measured.

    Args:
        name: its path under `results/`.
        recipe: as it was written then.
        steps: metrics of its steps.
    """

    name: str
    recipe: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def gpu(self) -> str:
        gpu = "h100" if "h100" in self.name or self.name.startswith("cute-norms") else "h200"
        return "h200" if self.name.startswith("cute-norms") else gpu

    @property
    def on_earlier_code(self) -> bool:
        """True if the code had no fused experts yet: the recipe does not have the setting."""
        return "fused_experts" not in self.recipe["train"]

    @property
    def calibrates(self) -> str | None:
        """Rate that comes from this run."""
        return next((rate for name, rate in CALIBRATED.items() if self.name.startswith(name)), None)

    def measured(self) -> dict[str, float]:
        """Seconds of each phase that was measured: medians of the later steps; in a stream means, as steps differ."""
        centre = statistics.mean if self.is_stream else statistics.median
        centres = {}
        for phase, name in METRICS.items():
            values = [step[name] for step in self.later if name in step]
            if values and centre(values) / 1e3 >= _LEAST_S:
                centres[phase] = centre(values) / 1e3
        return centres

    @property
    def is_stream(self) -> bool:
        return self.recipe["rollout"].get("stream") is not None

    @property
    def later(self) -> list[dict[str, Any]]:
        """Steps after the first; in a stream complete cycles while batches are drawn, after its engines are full.

        A trainer that may be s steps ahead waits for the oldest responses and then makes the steps of what has come
        meanwhile: slow and quick steps alternate, s + 1 in a cycle.
        """
        if not self.is_stream:
            return self.steps[1:] or self.steps
        staleness = self.recipe["trainer"]["max_staleness"]
        full = max(0, len(self.steps) - 3 * staleness)
        cycles = full // (staleness + 1) * (staleness + 1)
        return self.steps[2 * staleness : 2 * staleness + cycles] or self.steps[1:]

    def lengths(self) -> tuple[float, ...]:
        """Tokens of responses: the recipe's kinds where it has some, with the mean that was measured; else the mean."""
        centre = statistics.mean if self.is_stream else statistics.median
        mean = centre(step["rollout/response_length_mean"] for step in self.later)
        kinds = [kind["max_new_tokens"] for kind in self.recipe["rollout"].get("adaptive_sampling") or ()]
        return tuple(mean * kind * len(kinds) / sum(kinds) for kind in kinds) or (mean,)


def measured_runs() -> Iterator[MeasuredRun]:
    """Yield the runs on GPUs that have a recipe and metrics, in order of their names."""
    for path in sorted(RESULTS.rglob("recipe.yaml")):
        for metrics in sorted(path.parent.glob("*metrics.jsonl")):
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
            steps = [row for row in rows if row.get("phase") == "train"]
            suffix = metrics.name.removesuffix("metrics.jsonl").rstrip("-")
            name = "/".join(name for name in (path.parent.relative_to(RESULTS).as_posix(), suffix) if name)
            yield MeasuredRun(name, yaml.safe_load(path.read_text()), steps)


def predicted(run: MeasuredRun) -> dict[str, float]:
    """Predict the seconds of each phase of a run, and of a step."""
    recipe, hardware = run.recipe, load_profile(run.gpu).hardware
    config = _train_config(recipe["train"])
    ranks = _devices(recipe["placement"]["actor"])
    layout = LayoutConfig(**recipe["train"]["layout"]).layout(ranks)
    work = _workload(run, config, ranks)
    engines = _engines(recipe, _devices(recipe["placement"]["rollout"]))
    colocated = recipe["placement"]["actor"] == recipe["placement"]["rollout"]
    roles = {role.role: RoleLayout(layout, config) for role in work.roles}
    shared = recipe["rollout"].get("weights", {}).get("share", True)
    costs = phase_costs(work, hardware, roles, engines, colocated=colocated, shared=shared)
    groups = [frozenset(roles) | ({"rollout"} if colocated else set())]
    staleness = recipe["trainer"].get("max_staleness") or 0
    stream = recipe["rollout"].get("stream") is not None
    seconds = step_seconds(costs.seconds, groups, staleness=0 if colocated else staleness, stream=stream)
    return {**seconds.phases, "step": seconds.step}


def _devices(text: str) -> int:
    first, _, last = text.partition(":")[2].partition("-")
    return int(last or first) - int(first) + 1


def _train_config(train: dict[str, Any]) -> TrainConfig:
    known = {name: value for name, value in train.items() if name in TrainConfig.model_fields and name != "megatron"}
    optimizer = known.pop("optimizer")
    known["optimizer"] = OptimizerConfig(
        **{name: optimizer[name] for name in ("precision_aware", "offload", "overlap_offload") if name in optimizer}
    )
    return TrainConfig(**known | {"fused_experts": train.get("fused_experts", False)}, megatron=train["megatron"])


def _workload(run: MeasuredRun, config: TrainConfig, ranks: int) -> Workload:
    recipe, trainer = run.recipe, run.recipe["trainer"]
    spec = model_spec(recipe["model"]["create"]["config"])
    samples, prompts = recipe["rollout"]["samples_per_prompt"], trainer["prompts_per_step"]
    lengths = run.lengths()
    trained = 2 if recipe["algorithm"]["name"] == "ppo" else 1
    kinds = recipe["rollout"].get("adaptive_sampling") or ()
    prompt = statistics.median(_prompt_tokens(step, trained * prompts * samples, ranks) for step in run.later)
    if kinds:
        prompt = statistics.mean(kind["prompt_tokens"] for kind in kinds)
    longest = recipe["rollout"]["sampling"]["max_new_tokens"]
    mini_batches, epochs = trainer["mini_batches"], trainer.get("epochs", 1)
    roles = [RoleWork("actor", spec, config, trained=True, passes=int(mini_batches * epochs > 1))]
    if recipe["algorithm"]["name"] == "ppo":
        roles.append(RoleWork("critic", replace(spec, value_head=True), config, trained=True, passes=1))
        if recipe["algorithm"].get("kl_coef", 0.0) > 0:
            roles.append(RoleWork("reference", spec, config, trained=False, passes=1))
    return Workload(
        tuple(roles),
        prompts,
        samples,
        prompt,
        round(prompt),
        lengths,
        longest,
        mini_batches=mini_batches,
        epochs=epochs,
    )


def _prompt_tokens(step: dict[str, Any], sequences: int, ranks: int) -> float:
    """Mean tokens of a prompt, from the tokens of a step's updates of so many sequences."""
    name = "train/device_tokens_per_sec"
    response: float = step["rollout/response_length_mean"]
    if name not in step:
        return max(8.0, response / 8)
    return float(step[name] * step["train/update_time_ms"] / 1e3 * ranks / sequences - response)


def _engines(recipe: dict[str, Any], ranks: int) -> EngineShape:
    engine = recipe["rollout"]["engine"]
    return EngineShape(
        tp=engine["tp"],
        ep=engine["ep"],
        attention_dp=engine.get("attention_dp") or 1,
        engines=ranks // engine["tp"],
        requests=engine["max_running_requests"],
        cascade=bool(engine.get("cascade_attention")),
        peers=bool(engine.get("peer_collectives")),
        fused_sampling=bool(engine.get("fused_sampling")),
        local_experts_only=bool(engine.get("local_experts_only")),
        graphs=engine["cuda_graph"],
        dtype=engine["dtype"],
        recomputes=(recipe["rollout"].get("stream") or {}).get("on_new_weights") == "recompute",
    )


def comparisons() -> list[tuple[MeasuredRun, dict[str, tuple[float, float]]]]:
    """Predicted and measured seconds of each phase of each run."""
    compared = []
    for run in measured_runs():
        if not run.steps or run.recipe["train"]["dtype"] == "float32":
            continue
        measured, foreseen = run.measured(), predicted(run)
        compared.append((run, {phase: (foreseen[phase], seconds) for phase, seconds in measured.items()}))
    return compared


def reason(run: MeasuredRun) -> str:
    """Return why a run's prediction is known to miss, as its recipe says; "" for none."""
    create, sizes = run.recipe["model"]["create"], model_spec(run.recipe["model"]["create"]["config"]).sizes
    if run.on_earlier_code:
        return "earlier code, before fused experts"
    if run.name.endswith("restart-only-engine"):
        return "its engine is killed and starts again meanwhile"
    if run.recipe["placement"].get("judge"):
        return "a judge, whose time no model predicts"
    if sizes.layers >= 24 and create.get("embedding_std") is None and run.recipe["rollout"]["engine"]["tp"] > 2:
        return "random weights without `embedding_std`: few experts have most tokens"
    return ""


def summary(compared: list[tuple[MeasuredRun, dict[str, tuple[float, float]]]]) -> dict[str, dict[str, float]]:
    """Errors of each phase as shares, median and largest.

    They are of the runs without a known reason, of those of them from which no rate of a profile comes, and of all.
    """
    errors: dict[str, list[float]] = {}
    for run, phases in compared:
        for phase, (foreseen, seconds) in phases.items():
            names = [f"{phase}, all runs"]
            if not reason(run):
                names += [phase] if run.calibrates else [phase, f"{phase}, held out"]
            for name in names:
                errors.setdefault(name, []).append(abs(foreseen / seconds - 1))
    return {
        name: {
            "runs": len(values),
            "median": round(statistics.median(values), 3),
            "worst": round(max(values), 3),
            "within_20": round(sum(value <= 0.2 for value in values) / len(values), 3),
        }
        for name, values in sorted(errors.items())
    }


def page(compared: list[tuple[MeasuredRun, dict[str, tuple[float, float]]]]) -> str:
    """The page of predicted against measured seconds."""
    lines = [
        "# Predicted against measured seconds of a step",
        "",
        "    python benchmarks/plan_truth.py",
        "",
        "Every run under `benchmarks/results` on GPUs that has a recipe and metrics, predicted from its recipe, the",
        "mean tokens of its prompts and responses, and the profile of its GPU (`hybridflow/planning/time/profiles`).",
        "Measured is the median of the steps after the first, in seconds; of a stream, whose steps wait for a batch or",
        f"not, the mean of whole cycles of staleness + 1 steps while its engines are full. Phases below {_LEAST_S} s",
        "are left out.",
        "",
        "| phase | runs | median error | largest error | within 20 % |",
        "|---|---|---|---|---|",
    ]
    for name, values in summary(compared).items():
        row = (values["median"], values["worst"], values["within_20"])
        lines.append(f"| {name} | {values['runs']:.0f} | " + " | ".join(f"{value:.1%}" for value in row) + " |")
    lines += [
        "",
        "But for all runs these leave out those with a reason in the last column. Held out are runs from which no rate",
        "of a profile comes. Most rates come from single steps (`../train`, `../rollout`), which are not runs.",
        "",
        "Predicted / measured:",
        "",
        "| run | GPU | rollout | scoring | update | step | | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run, phases in compared:
        cells = [
            "{:.2f} / {:.2f}, {:+.0%}".format(*phases[phase], phases[phase][0] / phases[phase][1] - 1)
            if phase in phases
            else ""
            for phase in METRICS
        ]
        rate = f"gives `{run.calibrates}`" if run.calibrates else ""
        lines.append(f"| {run.name} | {run.gpu} | " + " | ".join([*cells, rate, reason(run)]) + " |")
    lines += ["", *_MISSES]
    if layouts := list(plan_layouts.section(plan_layouts.measured_cases())):
        lines += ["", *layouts]
    return "\n".join(lines) + "\n"


_MISSES = (
    "## Misses",
    "",
    "- `second-tiny-stream4`: a model of 4 layers with a staleness of 4, bounded by the engine's scheduler. Its steps",
    "  take 0.4 s, or 3 to 8 s where the trainer waits for the oldest responses: their median is 0.6 s. While it",
    "  waits no prompts are drawn, and a mean of 323 of 512 requests run. The model has the engines full at all",
    "  times. With the tail of each cycle this run would be right, and its twin a third too slow. New weights come",
    "  every step, and all 512 requests read their tokens again, counted with the seconds of their start. That term,",
    "  and the wait for the longest response of a batch, were added after this run and its twin were compared.",
    "- `one-gpu-8-layers`: 11.6 ms a decoding step, where its twin of one GPU (`deepseek-like`) has 7. Not explained.",
    "- `two-gpus-30b`, `1and1-one-step-apart`: experts in Megatron-Core's own operations, whose launches bound the",
    "  first and not the second. One rate stands for both.",
    "- `beside-verl/fixed`, `beside-verl/second`, `h200-1gpu-30b`: the GPU waits for the scheduler of 512 or 1,024",
    "  requests, whose processor has half its speed in some rollouts (`../beside-verl`). Predictions have a scheduler",
    "  at full speed, as in `beside-verl/third` and `beside-verl/long-tail`. Since the second round it also does less.",
    "- Nothing was measured over the network, with pp above 2, with cp, vpp or etp above 1, or in fp8. Intervals are",
    "  wider there.",
)


def main() -> int:
    """Print the page and write it."""
    compared = comparisons()
    text = page(compared)
    README.parent.mkdir(parents=True, exist_ok=True)
    README.write_text(text)
    published: dict[str, Any] = dict(summary(compared))
    if cases := plan_layouts.measured_cases():
        published[LAYOUTS] = {"cases": len(cases), "rank_correlation": round(plan_layouts.correlation_of(cases), 3)}
    (README.parent / "truth.json").write_text(json.dumps(published, indent=2) + "\n")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

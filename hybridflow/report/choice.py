"""Which plots a run gets: those whose figures it has logged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hybridflow.metrics import names as metrics
from hybridflow.report.evaluations import EVALUATIONS
from hybridflow.report.over_time import device_plots, timeline_plots
from hybridflow.report.plots import Band, Line, LinePlot, Plot, spans_decades
from hybridflow.report.run_data import Floats, RunData, Series, finite
from hybridflow.report.set_plots import set_plots
from hybridflow.report.step_times import step_time_plots
from hybridflow.report.thinning import bucketed, is_long

_APART = 8.0
"""Where one figure is so many times another, that one would be a flat line beside it."""
_FLAT = 1e-9
"""Share of the size of values: those that differ by less are the same but for rounding."""
_VISIBLE = 0.004
"""Of the height of a plot: a line is as wide."""


@dataclass(frozen=True)
class _Wanted:
    """A plot of figures over the steps of a phase.

    Args:
        figures: regular expressions; each stands for all figures whose whole name it matches.
        mean: whether there is a band of one standard deviation around the figure `<group>/mean`.
        may_be_logarithmic: if the figures span decades.
        apart: whether figures of another scale get plots of their own, where they would lie flat on the axis.
    """

    name: str
    title: str
    y_label: str
    figures: tuple[str, ...]
    phase: str = "train"
    mean: bool = False
    may_be_logarithmic: bool = False
    from_zero: bool = False
    apart: bool = False


_LEARNING = (
    _Wanted("rewards", "Rewards", "reward", (metrics.REWARD_MEAN, "reward/[^/]+/mean"), mean=True),
    _Wanted("rewards-by-source", "Mean reward by source of the prompts", "reward", ("data/[^/]+/reward_mean",)),
    _Wanted("pass-at-k", "Sets of k responses with a right one", "share", (metrics.REWARD_PASS_AT_K,), from_zero=True),
    _Wanted("valid", "Samples of groups that differ", "share", (metrics.REWARD_VALID_FRACTION,), from_zero=True),
    *(
        _Wanted(name, evaluation.title, evaluation.y_label, (evaluation.metric,), phase="eval")
        for name, evaluation in EVALUATIONS.items()
    ),
    _Wanted("preferences", "Preferences that became likelier", "share", (metrics.PREFERENCE_ACCURACY,), from_zero=True),
    _Wanted(
        "implicit-rewards",
        "Log-ratio to the reference, times beta",
        "nats per response",
        (r"preference/(?:chosen|rejected)_reward", metrics.PREFERENCE_MARGIN),
    ),
    _Wanted(
        "preferred-responses",
        "Log-probs of responses",
        "nats per response",
        (r"preference/(?:chosen|rejected)_logprob",),
    ),
    _Wanted(
        "undecided", "Groups without a difference", "groups", (metrics.PREFERENCE_WITHOUT_DIFFERENCE,), from_zero=True
    ),
    _Wanted("costs", "Costs", "cost", ("cost/mean", "cost/[^/]+/mean"), mean=True),
    _Wanted("cost-multiplier", "Weight of the costs", "multiplier", (metrics.COST_MULTIPLIER,)),
    _Wanted("warmup-loss", "Loss of the warm-up", "nats per token", (metrics.SFT_LOSS,), phase="sft"),
)
_OPTIMISATION = (
    _Wanted("losses", "Loss of the actor", "loss", (metrics.TRAIN_LOSS, metrics.TRAIN_POLICY_LOSS), apart=True),
    _Wanted("clip-fraction", "Clipped tokens", "share", (r"train/clip_fraction_\w+",), from_zero=True),
    _Wanted(
        "approximate-kl",
        "KL from the policy before the step, estimated",
        "nats per token",
        (r"train/approx_kl_\w+",),
        apart=True,
    ),
    _Wanted("value-losses", "Loss of the critic", "loss", (metrics.CRITIC.value_loss,)),
    _Wanted("cost-value-losses", "Loss of the cost critic", "loss", (metrics.COST_CRITIC.value_loss,)),
    _Wanted("explained-variance", "Explained variance of the returns", "share", (r"\w+/explained_variance",)),
    _Wanted("reference-kl", "KL from the reference", "nats per token", (metrics.TRAIN_REFERENCE_KL,)),
    _Wanted(
        "kto-divergence", "KTO's z0: KL from the reference, at least 0", "nats per response", (metrics.PREFERENCE_Z0,)
    ),
    _Wanted(
        "teacher-kl",
        "Divergence from the teacher",
        "nats per token",
        (r"distillation/kl_\w+", metrics.DISTILLATION_DIVERGENCE),
        apart=True,
    ),
    _Wanted(
        "teacher-agreement", "Tokens that the teacher finds most likely", "share", (metrics.DISTILLATION_AGREEMENT,)
    ),
    _Wanted("kl-coefficient", "Coefficient of the KL penalty", "coefficient", (metrics.TRAIN_KL_COEF,)),
    _Wanted("entropy-coefficient", "Coefficient of the entropy bonus", "coefficient", (metrics.TRAIN_ENTROPY_COEF,)),
    _Wanted("selected", "Tokens that the loss treats otherwise", "share", (metrics.TRAIN_SELECTED_FRACTION,)),
    _Wanted("entropy", "Entropy of the policy", "nats per token", (metrics.TRAIN_ENTROPY,), from_zero=True),
    _Wanted(
        "gradient-norm",
        "Norm of the gradient",
        "norm",
        (metrics.TRAIN_GRADIENT_NORM, r"\w+/gradient_norm"),
        may_be_logarithmic=True,
        from_zero=True,
    ),
    _Wanted(
        "expert-load",
        "Load of the most and the least loaded expert",
        "of the mean of its layer",
        (r"\w+/expert_load_max", r"\w+/expert_load_max_mean", r"\w+/expert_load_min"),
        from_zero=True,
    ),
    _Wanted("balance-losses", "Balance losses of routers", "loss", (r"\w+/(sequence|update)_balance_loss",)),
    _Wanted("router-z-loss", "z-loss of routers", "loss", (r"\w+/router_z_loss",)),
    _Wanted(
        "learning-rate",
        "Learning rate",
        "learning rate",
        (metrics.TRAIN_LEARNING_RATE, r"\w+/learning_rate"),
        apart=True,
    ),
)
_GENERATION = (
    _Wanted(
        "mismatch",
        "Log-probs of SGLang against Megatron's",
        "absolute difference in nats",
        (metrics.MISMATCH_LOGPROB_MEAN, metrics.MISMATCH_LOGPROB_MAX),
        may_be_logarithmic=True,
        from_zero=True,
    ),
    _Wanted(
        "correction-divergence",
        "Divergence of the trainer's policy from the engines'",
        "nats; variance of ratios",
        (r"correction/(?:kl_k[13]|chi_square_\w+)",),
        may_be_logarithmic=True,
    ),
    _Wanted(
        "correction-weights",
        "Weights of the correction: effective share, shares truncated and left out",
        "share",
        (r"correction/effective_\w+", r"correction/\w+_fraction", metrics.CORRECTION_LOST_SAMPLES),
        from_zero=True,
    ),
    _Wanted("response-length", "Length of the responses", "tokens", (r"rollout/response_length_\w+",), from_zero=True),
    _Wanted("truncated", "Truncated responses", "share", (metrics.ROLLOUT_TRUNCATED,), from_zero=True),
    _Wanted("prompts", "What became of a step's prompts", "prompts", (r"sampling/\w+_prompts",), from_zero=True),
    _Wanted(
        "equal-groups",
        "Prompts whose responses have equal rewards",
        "share",
        (metrics.SAMPLING_ALL_RIGHT, metrics.SAMPLING_ALL_WRONG),
        from_zero=True,
    ),
    _Wanted("replay-size", "Samples in the replay buffer", "samples", (metrics.REPLAY_SIZE,), from_zero=True),
    _Wanted("replay-age", "Age of replayed samples", "versions", (metrics.REPLAY_AGE,), from_zero=True),
    _Wanted("staleness", "Staleness of the policy", "versions", (r".*staleness.*",), from_zero=True),
    _Wanted("sample-age", "From a response's end to the step", "s", (r"stream/sample_age_\w+",), from_zero=True),
    _Wanted(
        "stream-requests",
        "Requests in flight, at most at each engine, and queued",
        "requests",
        (
            metrics.STREAM_REQUESTS_IN_FLIGHT,
            metrics.STREAM_REQUEST_LIMIT,
            metrics.STREAM_WAITING_REQUESTS,
            metrics.STREAM_QUEUED_REQUESTS,
        ),
        from_zero=True,
    ),
    _Wanted(
        "engines",
        "Engines at work, their KV caches in use, and prompt tokens found there",
        "share",
        (metrics.STREAM_BUSY, r"stream/cache_use_\w+", metrics.STREAM_PREFIX_HITS, metrics.STREAM_WAIT_SHARE),
        from_zero=True,
    ),
    _Wanted(
        "stream-groups",
        "Groups evicted, dropped, carried, lost; requests retracted",
        "number",
        (r"stream/(?:evicted|dropped|carried|lost)_groups", metrics.STREAM_RETRACTED),
        from_zero=True,
    ),
)
_SPEED = (
    _Wanted("throughput", "Throughput of the rollout", "tokens/s", (metrics.ROLLOUT_THROUGHPUT,), from_zero=True),
    _Wanted(
        "device-throughput",
        "Throughput of a device",
        "tokens/s and device",
        (r"\w+/device_tokens_per_sec",),
        from_zero=True,
    ),
    _Wanted("mfu", "Model FLOP/s of what the devices can do", "share", (r"\w+/mfu",), from_zero=True),
    _Wanted("memory", "Peak memory by role", "MiB", (r"memory/\w+_(?:gpu|host)_mem_mb",), from_zero=True),
)


@dataclass(frozen=True)
class Section:
    """Plots under one heading."""

    title: str
    plots: tuple[Plot, ...]


@dataclass(frozen=True)
class Unplotted:
    """A metric that would be a flat line, a point, or nothing.

    Args:
        name: of the metric.
        value: the only finite one; None where there is none.
        steps: that have it.
    """

    name: str
    value: float | None
    steps: int


def unplotted(run: RunData) -> list[Unplotted]:
    """The metrics that have a place on the page, and whose lines would say nothing."""
    found: dict[str, Unplotted] = {}
    for wanted in (*_LEARNING, *_OPTIMISATION, *_GENERATION, *_SPEED):
        matching = _matching(run, wanted)
        kept = _telling(matching)
        for name, series in matching.items():
            if name not in kept:
                values = finite(series.values)
                found.setdefault(name, Unplotted(name, float(values[-1]) if len(values) else None, len(series.values)))
    return list(found.values())


def _telling(found: dict[str, Series]) -> dict[str, Series]:
    """The lines of a plot without those that are 0 throughout or never finite; none where no line varies."""
    if not any(_varies(series.values) for series in found.values()):
        return {}
    return {name: series for name, series in found.items() if finite(series.values).any()}


def _varies(values: Floats) -> bool:
    """True if a line through the values is more than a point, and not flat."""
    kept = finite(values)
    return len(kept) > 1 and float(np.ptp(kept)) > _FLAT * float(np.abs(kept).max())


def _shows_something(plot: Plot) -> bool:
    return not isinstance(plot, LinePlot) or any(_varies(line.y) for line in plot.lines)


def sections(run: RunData) -> tuple[Section, ...]:
    """Every plot of a run that shows something, under headings."""
    every: dict[str, Iterable[Plot]] = {
        "Learning": _plots(run, _LEARNING),
        "Held-out sets": set_plots(run),
        "Optimisation": _plots(run, _OPTIMISATION),
        "Generation": _plots(run, _GENERATION),
        "Speed and memory": (*step_time_plots(run), *_plots(run, _SPEED)),
        "Devices": device_plots(run.samples),
        "Timeline": timeline_plots(run.spans),
    }
    found = ((title, tuple(filter(_shows_something, plots))) for title, plots in every.items())
    return tuple(Section(title, plots) for title, plots in found if plots)


def _plots(run: RunData, table: Iterable[_Wanted]) -> Iterator[Plot]:
    for wanted in table:
        found = _telling(_matching(run, wanted))
        found, equal = (found, {}) if wanted.mean else _without_equals(found)
        for number, group in enumerate(_by_scale(found) if wanted.apart else [found] if found else []):
            plot = _line_plot(run, wanted, group)
            note = " ".join(filter(None, [plot.note, *(equal[name] for name in group if name in equal)]))
            if number:
                plot = replace(plot, name=f"{plot.name}-{number + 1}", title=f"{plot.title}: {', '.join(group)}")
            yield replace(plot, note=note)


def _matching(run: RunData, wanted: _Wanted) -> dict[str, Series]:
    """The figures in the order of the expressions, each once."""
    logged = run.phases[wanted.phase].series if wanted.phase in run.phases else {}
    names = [name for pattern in wanted.figures for name in logged if re.fullmatch(pattern, name)]
    # Older runs on CPUs called their hosts' memory that of a GPU.
    return {name: logged[name] for name in dict.fromkeys(names) if not (run.on_cpus and "_gpu_" in name)}


def _without_equals(found: dict[str, Series]) -> tuple[dict[str, Series], dict[str, str]]:
    """The figures without those that another would hide, and by its name the note that says so."""
    kept: dict[str, Series] = {}
    notes: dict[str, str] = {}
    for name, series in found.items():
        twin = next((other for other, shown in kept.items() if _is_equal(shown, series)), None)
        if twin is None:
            kept[name] = series
        else:
            notes[twin] = " ".join(filter(None, [notes.get(twin), f"{name} is nearly the same."]))
    return kept, notes


def _is_equal(one: Series, other: Series) -> bool:
    """Whether nobody could tell their lines apart."""
    if not np.array_equal(one.steps, other.steps):
        return False
    both = finite(np.concatenate([one.values, other.values]))
    visible = _VISIBLE * float(np.ptp(both)) if len(both) else 0.0
    return bool(np.allclose(one.values, other.values, rtol=1e-5, atol=visible, equal_nan=True))


def _by_scale(found: dict[str, Series]) -> list[dict[str, Series]]:
    """The figures in groups whose values are of one order of magnitude, each where the first of them stands."""
    groups: list[dict[str, Series]] = []
    for name, series in found.items():
        size = _size(series)
        for group in groups:
            least, most = (choose([size, *map(_size, group.values())]) for choose in (min, max))
            if most <= _APART * least:
                group[name] = series
                break
        else:
            groups.append({name: series})
    return groups


def _size(series: Series) -> float:
    """Of the usual values; those of a first step may be far from all others."""
    values = np.abs(finite(series.values))
    return float(np.quantile(values, 0.9)) if len(values) else 0.0


def _line_plot(run: RunData, wanted: _Wanted, found: dict[str, Series]) -> LinePlot:
    parts = [name for name in found if name.count("/") > 1]
    if len(parts) == 1 and len(found) > 1:
        del found[parts[0]]  # the sum of one
    lines = tuple(Line.of(name, series.steps, series.values) for name, series in found.items())
    return LinePlot(
        name=wanted.name,
        title=wanted.title,
        y_label=wanted.y_label,
        x_label="step of the warm-up" if wanted.phase == "sft" else "step",
        note=" ".join(filter(None, (_thinned(lines), _gaps(found.values())))),
        lines=lines,
        band=_band(run, next(iter(found))) if wanted.mean else None,
        logarithmic=wanted.may_be_logarithmic and spans_decades(lines),
        from_zero=wanted.from_zero,
    )


def _band(run: RunData, mean: str) -> Band | None:
    """One standard deviation around `<group>/mean`, where both were logged at the same steps."""
    values, deviation = run.series(mean), run.series(mean.removesuffix("mean") + "std")
    if values is None or deviation is None or not np.array_equal(values.steps, deviation.steps):
        return None
    steps, low, high = values.steps, values.values - deviation.values, values.values + deviation.values
    if is_long(steps):
        lows, highs = bucketed(steps, low), bucketed(steps, high)
        steps, low, high = lows.x, lows.mean, highs.mean
    return Band("mean ± standard deviation of the samples", steps, low, high)


def _thinned(lines: Iterable[Line]) -> str:
    some = any(line.low is not None for line in lines)
    return "A line is the mean of neighbouring steps, between the lowest and the highest of them." if some else ""


def _gaps(found: Iterable[Series]) -> str:
    missing = sum(int((~np.isfinite(series.values)).sum()) for series in found)
    return f"{missing:,} {'value is' if missing == 1 else 'values are'} not finite and not shown." if missing else ""

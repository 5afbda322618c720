"""`hybridflow samples`: the samples that a run has learned from, as texts with their rewards."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine3d.errors import UserError, shortened, visible
from hybridflow.report.stored_texts import TextOf
from hybridflow.rundir.actor_runs import runs_in
from hybridflow.rundir.file_names import SAMPLE_STORE
from hybridflow.rundir.samples.store import (
    SampleFilter,
    SampleLocation,
    StepFile,
    StoredSample,
    newest_first,
    store_of,
)
from hybridflow.rundir.status.watching import checked_run

_LIMIT = 10
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
_MOST_WORDS = 4000
"""Most words of either text: comparing takes the square of it."""

Part = tuple[str, str]
"""Some text and the style that `rich` is to show it in."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hybridflow samples`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, such as runs/demo")
    parser.add_argument("--step", type=int, metavar="N", help="only of this step")
    parser.add_argument("--reward-below", type=_number, metavar="X", help="only with a reward below X")
    parser.add_argument("--reward-above", type=_number, metavar="X", help="only with a reward above X")
    parser.add_argument("--group", type=int, metavar="G", help="only of this group: the samples of one drawn prompt")
    parser.add_argument("--row", metavar="ROW", help="only of this row of the data, such as gsm8k:17")
    parser.add_argument("--sample", type=int, metavar="S", help="only the sample of this id")
    parser.add_argument(
        "--limit", type=int, default=_LIMIT, metavar="N", help=f"most samples, or groups with --diff ({_LIMIT})"
    )
    parser.add_argument(
        "--diff", action="store_true", help="the responses of each group beside the best one, with what differs marked"
    )
    parser.add_argument(
        "--routes",
        action="store_true",
        help="check the experts of all tokens against the model, and show how many are missing; all steps, or --step",
    )


def run(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: it is no run's directory, it has no such samples, or something in it cannot be read.
    """
    sample_filter = SampleFilter(parsed.reward_below, parsed.reward_above, parsed.group, parsed.sample, parsed.row)
    _check(parsed)
    if len(runs := runs_in(parsed.run)) > 1:
        raise UserError(f"{parsed.run} holds the runs of several actors, expected one: {', '.join(map(str, runs))}")
    directory = checked_run(parsed.run)
    if parsed.routes:
        return _check_routes(directory, store_of(directory), parsed, sample_filter)
    files = _chosen(store_of(directory), parsed, sample_filter, directory)
    shown, text_of = 0, None
    for step, file in newest_first(files):
        groups = (
            _groups(file, sample_filter, parsed.limit - shown)
            if parsed.diff
            else _samples(file, sample_filter, parsed, shown)
        )
        if groups and text_of is None:
            text_of = TextOf.of_run(directory)
            if text_of.tokenizer is None:
                print(f"hybridflow: {text_of.reason}; tokens are shown by their ids", file=sys.stderr)
        for group in groups:
            assert text_of is not None
            if shown:
                print()
            _show_group(group, text_of) if parsed.diff else _show(group[0], text_of)
            shown += 1
        if groups and sample_filter.is_any and not parsed.diff and len(groups) < len(file):
            print(f"\n{len(groups)} of the {len(file)} samples of step {step}; --limit {len(file)} shows all")
        if shown >= parsed.limit:
            return 0
    if not shown:
        raise UserError(_nothing(files, sample_filter, directory))
    return 0


def _check(parsed: argparse.Namespace) -> None:
    """Raises UserError for options that nothing can fit."""
    if parsed.limit < 1:
        raise UserError(f"--limit {parsed.limit}: expected at least 1")
    below, above = parsed.reward_below, parsed.reward_above
    if below is not None and above is not None and above >= below:
        raise UserError(f"--reward-above {above:g} with --reward-below {below:g}: no reward is both")


def _check_routes(
    directory: Path, files: Mapping[int, Path], parsed: argparse.Namespace, sample_filter: SampleFilter
) -> int:
    """Check the routes of one step, or of all. Raises UserError for the first that are wrong."""
    from hybridflow.report.stored_routes import checked_routes, route_format  # with torch, which nothing else needs

    if parsed.diff or not sample_filter.is_any:
        raise UserError("--routes is of all samples of a step, expected no other option but --step")
    format = route_format(directory)
    chosen = files if parsed.step is None else _chosen(files, parsed, sample_filter, directory)
    for step, path in sorted(chosen.items()):
        print(checked_routes(path, step, format))
    return 0


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, found {shortened(text)}")
    return value


def _chosen(
    files: Mapping[int, Path], parsed: argparse.Namespace, sample_filter: SampleFilter, directory: Path
) -> Mapping[int, Path]:
    """The steps to look through: the one that was asked for, all for what is looked for, or else the newest.

    Raises:
        UserError: the step is not there.
    """
    steps = list(files)
    if parsed.step is not None:
        if parsed.step not in files:
            there = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
            raise UserError(
                f"no samples of step {parsed.step} in {directory / SAMPLE_STORE}; there are those of {there}"
            )
        return {parsed.step: files[parsed.step]}
    return {steps[-1]: files[steps[-1]]} if sample_filter.is_any else files


def _samples(
    file: StepFile, sample_filter: SampleFilter, parsed: argparse.Namespace, shown: int
) -> list[list[StoredSample]]:
    """Return the samples that may still be shown, each alone."""
    locations = [location for location, _ in file.find(sample_filter)][: parsed.limit - shown]
    return [[sample] for sample in file.with_tokens(locations)]


def _groups(file: StepFile, sample_filter: SampleFilter, most: int) -> list[list[StoredSample]]:
    """Whole groups of what is looked for, the best sample of each first, the others as they stand in the file."""
    ids = list(dict.fromkeys(sample.group for _, sample in file.find(sample_filter)))[:most]
    if not ids:
        return []
    locations: dict[int, list[SampleLocation]] = {group: [] for group in ids}
    for location, sample in file.find(SampleFilter()):
        if sample.group in locations:
            locations[sample.group].append(location)
    return [_best_first(file.with_tokens(of_group)) for of_group in locations.values()]


def _best_first(samples: Sequence[StoredSample]) -> list[StoredSample]:
    def reward(number: int) -> float:
        value = samples[number].reward
        return -math.inf if value is None or math.isnan(value) else value

    best = max(range(len(samples)), key=reward)
    return [samples[best], *samples[:best], *samples[best + 1 :]]


def _nothing(files: Mapping[int, Path], sample_filter: SampleFilter, directory: Path) -> str:
    """Return the line that no sample matches, and what the store has."""
    steps = list(files)
    where = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    if sample_filter.is_any:
        return f"no file of {where} in {directory / SAMPLE_STORE} can be read"
    line = f"no sample with {sample_filter} among those of {where} in {directory / SAMPLE_STORE}"
    if sample_filter.group is None and sample_filter.sample is None:
        rewards = [reward for _, file in newest_first(files) for reward in file.rewards()]
        line += f"; rewards are from {min(rewards):g} to {max(rewards):g}" if rewards else "; none has a reward"
    return line


def _show(sample: StoredSample, text_of: TextOf) -> None:
    print(_head(sample))
    _block("prompt", text_of(sample.prompt_tokens))
    if all(sample.response_mask):
        _block("response", text_of(sample.response_tokens))
    else:
        for sequence in sample.sequences:
            if sequence.parent is not None:
                print(f"{'  ' * sequence.depth}{sequence.title}")
            for drawn, tokens in sequence.spans:
                _block("policy" if drawn else "observed", text_of(tokens))
    if sample.answer is not None:
        _block("answer", sample.answer)


def _head(sample: StoredSample) -> str:
    fields = [f"step {sample.step}", f"group {sample.group}", f"sample {sample.sample}", _rewards(sample)]
    fields += [f"advantage {sample.advantage:.4g}"] if sample.advantage is not None else []
    tokens = len(sample.response_tokens)
    others = tokens - sum(sample.response_mask)
    fields.append(f"{tokens} tokens" + (f", {others} of them not the policy's" if others else ""))
    fields += [sample.finish_reason, f"version {sample.version}"]
    fields += [f"row {sample.data_row}"] if sample.data_row is not None else []
    fields += [f"engine {sample.engine}"] if sample.engine is not None else []
    fields += [f"{sample.seconds:.2f} s"] if sample.seconds is not None else []
    return visible("  ".join(fields))


def _rewards(sample: StoredSample) -> str:
    """Sums, and what functions and models have given behind each."""
    said = []
    for what, value in (("reward", sample.reward), ("cost", sample.cost)):
        prefix = f"{what}/"
        names = {
            name.removeprefix(prefix): value_of_name
            for name, value_of_name in sample.scores.items()
            if name.startswith(prefix)
        }
        of = ", ".join(_score(name, given, sample.verdicts(f"{what}/{name}")) for name, given in names.items())
        if value is not None:
            said.append(f"{what} {value:.4g}" + (f" ({of})" if of else ""))
    return "  ".join(said) or "no reward"


def _score(name: str, value: float, verdicts: Mapping[str, float]) -> str:
    """A function's score, and its metrics and counts that are not 0."""
    more = ", ".join(f"{key} {number:.4g}" for key, number in verdicts.items())
    return f"{name} {value:.4g}" + (f": {more}" if more else "")


def _block(name: str, text: str) -> None:
    """A text under its name, each line after a bar, so that it is seen where it ends."""
    for number, line in enumerate(visible(text).split("\n")):
        print(f"{name if not number else '':<8} | {line}")


def _show_group(samples: Sequence[StoredSample], text_of: TextOf) -> None:
    """The responses of a group, each beside the best one."""
    best, *others = samples
    _block("prompt", text_of(best.prompt_tokens))
    print(f"best      {_head(best)}")
    response = text_of(best.response_tokens)
    if not others:
        _block("response", response)
        return
    table = Table("best", "other", show_lines=True, expand=True)
    for other in others:
        print(f"other     {_head(other)}")
        sides = marked(response, text_of(other.response_tokens))
        table.add_row(*(_cell(sample, side) for sample, side in zip((best, other), sides, strict=True)))
    Console(highlight=False).print(table)


def _cell(sample: StoredSample, spans: Sequence[Part]) -> Text:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.4g}"
    of_parts = ((visible(text), style) for text, style in spans)
    return Text.assemble((f"sample {sample.sample}, {reward}\n", "dim"), *of_parts)


def marked(expected: str, actual: str) -> tuple[list[Part], list[Part]]:
    """Two texts word by word: words of the first alone in `[-...-]`, those of the second alone in `{+...+}`.

    Texts of very many words are compared line by line.
    """
    one, other = _WORDS.findall(expected), _WORDS.findall(actual)
    if max(len(one), len(other)) > _MOST_WORDS:
        one, other = expected.splitlines(keepends=True), actual.splitlines(keepends=True)
    before: list[Part] = []
    after: list[Part] = []
    for kind, first, last, start, end in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if kind == "equal":
            before.append(("".join(one[first:last]), ""))
            after.append(("".join(other[start:end]), ""))
            continue
        before += _mark(one[first:last], "[-{}-]", "red")
        after += _mark(other[start:end], "{{+{}+}}", "green")
    return before, after


def _mark(words: Sequence[str], form: str, style: str) -> list[Part]:
    return [(form.format("".join(words)), style)] if words else []

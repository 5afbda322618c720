"""Check that reward functions can be imported and get what they need: fields, reference answers, special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from engine3d.errors import UserError, shortened
from hybridflow.config.evaluation import PlannedSet
from hybridflow.data.answers import AnswerCounts, is_missing
from hybridflow.data.prompts import Prompts
from hybridflow.environments.config import TOOLS_REWARD
from hybridflow.planning.checks.prompt import EncodedPrompts
from hybridflow.remote.endpoint import silent_urls
from hybridflow.rewards.builtin import check_text_answers
from hybridflow.rewards.code.cases import CasesError, cases_of
from hybridflow.rewards.config import RewardConfig, RewardFunctionConfig
from hybridflow.rewards.functions import RewardFunctions

OUTPUT_LINES = 10
"""Lines of each worker's output that `check` prints."""
_MOST_REMARKS = 5
_MOST_ROWS = 1000
"""Rows of a phase whose test cases are read."""
_MOST_ANSWERS = 200
"""Rows of a phase whose answers are read as mathematics, which takes milliseconds each."""
_OF_ANSWER = "the right answer "
"""Begin of the reasons of `math` that are about a reference answer."""


def check_answers(functions: RewardFunctions, phases: Mapping[str, Prompts]) -> list[str]:
    """Check the reference answers of some prompts.

    Args:
        functions: loaded, that score responses to all of them.
        phases: the prompts, by the name of their phase in messages.

    Returns:
        A line for missing answers that `on_failure` provides for, and for texts such as "proof" or "nan".

    Raises:
        UserError: naming the function, the number of rows without an answer, and the first of them; or an answer that
            the function cannot compare with.
    """
    notes: list[str] = []
    needing = functions.needing_answers()
    for phase, prompts in phases.items() if needing else ():
        counts = [counts for counts, _ in prompts.answer_counts()]
        rows, missing = sum(count.rows for count in counts), sum(count.missing for count in counts)
        lacking, first = next(
            ((count, location) for count, location in prompts.answer_counts() if count.missing), (None, "")
        )
        for function in needing:
            if lacking is None:
                break
            line = (
                f"reward {function.name!r} needs a reference answer, and {missing:,} of {rows:,} {phase} rows have "
                f"none (null, NaN, blank or empty); the first is {first}"
            )
            if function.on_failure == "stop" or function.builtin or missing == rows:
                raise UserError(f"{line}; {_way_to_drop(lacking, '{present: true}')}")
            notes.append(f"{line}; {_treatment(function)}; {_way_to_drop(lacking, '{present: true}')}")
        if any(function.path == "arithmetic" for function in needing):
            check_text_answers(list(prompts.answers()))
        for function in needing:
            notes += _lacking_cases(function, phase, prompts) if function.path == "code" else []
            notes += _unreadable_answers(functions, function, phase, prompts) if function.path == "math" else []
        notes += [_remarks_line(count, phase, needing[0].name) for count in counts if count.remarks]
    return notes


def _lacking_cases(function: RewardFunctionConfig, phase: str, prompts: Prompts) -> list[str]:
    """A line on the first rows whose answers hold no test cases, if there are such rows.

    Raises:
        UserError: `on_failure` does not provide for them, or all are so.
    """
    rows = min(len(prompts), _MOST_ROWS)
    malformed = []
    for index in range(rows):
        example = prompts.examples[index]
        try:
            if not is_missing(example.answer):
                cases_of(example.answer)
        except CasesError as error:
            malformed.append(f"{example.location or f'prompt {index:,}'}: {error}")
    if not malformed:
        return []
    line = (
        f"reward {function.name!r} needs test cases, and {len(malformed):,} of the first {rows:,} {phase} rows have "
        f"none; the first is {malformed[0]}"
    )
    return _provided_for(function, line, complete=len(malformed) == rows)


def _unreadable_answers(
    functions: RewardFunctions, function: RewardFunctionConfig, phase: str, prompts: Prompts
) -> list[str]:
    """A line on the first rows whose answers `math` cannot read, if there are such rows. Errors as `_lacking_cases`."""
    examples = [prompts.examples[index] for index in range(min(len(prompts), _MOST_ANSWERS))]
    given = [number for number, example in enumerate(examples) if not is_missing(example.answer)]
    reasons = functions.without_reward(function.name, [examples[number].answer for number in given])
    unreadable = [
        f"{examples[given[index]].location or f'prompt {given[index]:,}'}: {reason.partition(': ')[2]}"
        for index, reason in reasons.items()
        if _OF_ANSWER in reason  # else it took too long
    ]
    if not unreadable:
        return []
    line = (
        f"reward {function.name!r} cannot read the answers of {len(unreadable):,} of the first {len(examples):,} "
        f"{phase} rows; the first is {unreadable[0]}"
    )
    return _provided_for(function, line, complete=len(unreadable) == len(examples))


def _provided_for(function: RewardFunctionConfig, line: str, *, complete: bool) -> list[str]:
    """The line with the treatment of its rows. Raises UserError if there is none, or all rows are so."""
    if function.on_failure == "stop" or complete:
        raise UserError(line)
    return [f"{line}; {_treatment(function)}"]


def _treatment(function: RewardFunctionConfig) -> str:
    of_tools = function.name == TOOLS_REWARD
    return "their episodes are dropped" if of_tools else f"on_failure is {function.on_failure}"


def check_special_tokens(config: RewardConfig, special_tokens: Sequence[str]) -> None:
    """Check that no function looks for a special token in texts without special tokens.

    Args:
        config: of the functions.
        special_tokens: of the tokenizer.

    Raises:
        UserError: naming the function and the token.
    """
    for function in config.functions:
        token = function.token_looked_for(special_tokens)
        if token is not None and function.special_tokens == "remove":
            raise UserError(
                f"reward {function.name!r} looks for {token!r}, which is a special token of the tokenizer and removed "
                "from the texts of responses; expected special_tokens: keep"
            )


def _remarks_line(counts: AnswerCounts, phase: str, reward: str) -> str:
    common = sorted(counts.remarks, key=lambda text: -counts.remarks[text])[:_MOST_REMARKS]
    listed = ", ".join(f"{counts.remarks[text]:,} {shortened(repr(text), 40)}" for text in common)
    condition = f"{{none_of: {json.dumps(common)}}}"
    return (
        f"data: among the answers of {counts.rows:,} {phase} rows are {listed}, which reward {reward!r} takes as "
        f"answers like any other; {_way_to_drop(counts, condition)}"
    )


def _way_to_drop(counts: AnswerCounts, condition: str) -> str:
    if counts.column is None:
        return "expected the column of the answers as answer of the source"
    if not counts.column:
        return "expected one in every row; where, of sources in data.files and of evaluation.NAME.data, drops others"
    return f"where: {{{counts.column}: {condition}}} of the source drops them"


def check_rewards(
    rewards: Mapping[str, RewardConfig], planned: Mapping[str, PlannedSet], encoded: EncodedPrompts | None
) -> list[str]:
    """Import every function of rewards and costs, each in a process of its own that ends with the check.

    Args:
        rewards: the functions of rewards and costs, and that of tools.
        planned: the sets of a recipe.
        encoded: the prompts, whose fields functions may ask for; None where they are not known.

    Returns:
        Lines on reference answers, see `check_answers`, and on servers that do not accept connections.

    Raises:
        UserError: naming the reward that cannot be imported, that asks for what the data have not, that needs answers
            which they lack, or cannot compare with their answers.
    """
    notes: list[str] = []
    phases: dict[str, Prompts] = {}
    if encoded is not None:
        alike = {
            f"evaluation.{name}": encoded.sets[name]
            for name, planned in planned.items()
            if scored_like_training(planned)
        }
        phases = {"training": encoded.train, **alike}
    fields = tuple(dict.fromkeys(field for phase in phases.values() for field in phase.fields()))
    for config in rewards.values():
        with RewardFunctions(config, fields if phases else None, output_lines=OUTPUT_LINES) as functions:
            functions.load()
            if encoded is not None:
                check_special_tokens(config, encoded.special_tokens)
                notes += check_answers(functions, {name: prompts for name, prompts in phases.items() if len(prompts)})
            notes += _silent_servers(config)
    return notes


def _silent_servers(config: RewardConfig) -> list[str]:
    """A line on each server of a function that does not accept connections."""
    return [
        f"reward {function.name!r}: nothing accepts connections at {url} ({reason}), as seen from this host; expected "
        "a server there before the first responses are scored"
        for function in config.functions
        for url, reason in silent_urls(function.urls).items()
    ]


def check_set_rewards(
    planned: Mapping[str, PlannedSet], sets: Mapping[str, Prompts], special_tokens: Sequence[str]
) -> list[str]:
    """Import the functions that score each other set, each in a process of its own that ends with the check.

    Args:
        planned: the sets of a recipe.
        sets: their prompts.
        special_tokens: of the tokenizer.

    Returns:
        Lines as of `check_rewards`.

    Raises:
        UserError: naming the set, and the reward that cannot be imported, that asks for what its rows have not, that
            needs answers which they lack, or cannot compare with their answers.
    """
    notes: list[str] = []
    for name, planned_set in planned.items():
        environment = planned_set.environment
        reward = planned_set.reward if environment is None else environment.tools_reward
        if reward is None or scored_like_training(planned_set):
            continue
        try:
            with RewardFunctions(reward, sets[name].fields(), output_lines=OUTPUT_LINES) as functions:
                functions.load()
                check_special_tokens(reward, special_tokens)
                if planned_set.settings.reward is not None:  # others have the run's
                    notes += _silent_servers(reward)
                notes += check_answers(functions, {f"evaluation.{name}": sets[name]})
        except UserError as error:
            raise UserError(f"evaluation.{name}: {error}") from None
    return notes


def scored_like_training(planned: PlannedSet) -> bool:
    """True if the run's functions score prompts of the run's data, so that `check_rewards` sees to them."""
    return planned.settings.reward is None and planned.settings.data is None

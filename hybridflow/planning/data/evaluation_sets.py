"""The prompts of the held-out sets of a recipe, as tokens, and whether the set can be measured on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from engine3d.errors import UserError
from engine3d.layout import Layout
from hybridflow.checkpoint.set_results import learned_from
from hybridflow.config.evaluation import PlannedSet
from hybridflow.config.recipe import Recipe
from hybridflow.data.config import DataConfig, OverlongPolicy
from hybridflow.data.files.config import FilesConfig, FileSource
from hybridflow.data.files.encoding import encode_files
from hybridflow.data.files.prompts import FilePrompts
from hybridflow.data.given_responses import pair_notes
from hybridflow.data.pairs import load_held_out_pairs
from hybridflow.data.prompts import Prompts
from hybridflow.data.remarks import lines
from hybridflow.data.tasks import load_held_out
from hybridflow.data.tokenizer import fit_prompts
from hybridflow.planning.checks.environment import with_tools
from hybridflow.planning.data.prompts import context_tokens, encode_given, memory_notes, overlong_notes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_sets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> dict[str, Prompts]:
    """Encode the prompts of each set, by its name; as `GivenResponses` where no engines run.

    Args:
        recipe: with the sets.
        tokenizer: of the model.

    Raises:
        UserError: naming the set, and what of its prompts cannot serve.
    """
    encoded, data = {}, recipe.data
    if data.files is not None and recipe.sets:
        data = data.model_copy(update={"files": with_tools(data.files, recipe.environment)})
    context = context_tokens(recipe.rollout.engine, recipe.model)
    for name, planned in recipe.sets.items():
        try:
            limit = _prompt_limit(context, planned)
            encoded[name] = _encoded(data, planned, tokenizer, limit, unpaired=recipe.algorithm.unpaired)
        except UserError as error:
            raise UserError(f"evaluation.{name}: {error}") from None
    return encoded


def _encoded(
    data: DataConfig, planned: PlannedSet, tokenizer: PreTrainedTokenizerBase, limit: int, *, unpaired: bool
) -> Prompts:
    count = planned.settings.prompts
    if planned.pairs:
        pairs = load_held_out_pairs(data, unpaired=unpaired)[:count]
        return encode_given(data, tokenizer, pairs, "held-out", limit, unpaired=unpaired)
    if limit < 1:
        raise UserError(
            f"max_new_tokens={planned.sampling.max_new_tokens} leaves no room for a prompt in a context of "
            f"{limit + planned.sampling.max_new_tokens} tokens"
        )
    policy, source = data.overlong_prompts, planned.settings.data
    if source is None:
        examples = load_held_out(data)[:count]
        prompts = Prompts(*fit_prompts(tokenizer, examples, max_tokens=limit, policy=policy))
    else:
        prompts = encode_files((source,), _files(data.files, source), tokenizer, max_tokens=limit, policy=policy)
    if not len(prompts):
        where = ", ".join(source.path) if source is not None else "data"
        raise UserError(f"no prompt of {where} is left, expected at least one")
    if count is None or count >= len(prompts):
        return prompts
    return Prompts([prompts.examples[row] for row in range(count)], [prompts.tokens[row] for row in range(count)])


def _prompt_limit(context: int, planned: PlannedSet) -> int:
    """Most tokens of a prompt of a set; the responses of pairs share them."""
    return context if planned.pairs else context - planned.sampling.max_new_tokens


def _files(files: FilesConfig | None, source: FileSource) -> FilesConfig:
    """Settings by which the files of a set are read: by the chat template of the training files where there are some.

    Limits of training prompts are not those of a set: what is measured does not depend on what is learned from.
    """
    if files is None:
        return FilesConfig(train=(source,))
    return FilesConfig(train=(source,), chat=files.chat, cache=files.cache)


def set_notes(
    planned: Mapping[str, PlannedSet],
    policy: OverlongPolicy,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    sets: Mapping[str, Prompts],
    learned: Sequence[Prompts],
) -> list[str]:
    """A line for each set of which rows are left out, prompts are learned from, or texts stand beside a chat template.

    Args:
        planned: the sets of a recipe.
        policy: `data.overlong_prompts`.
        tokenizer: of the model.
        context: most tokens of a prompt with its response.
        sets: their prompts.
        learned: the prompts of every phase that learns.
    """
    notes = []
    for name, prompts in sets.items():
        planned_set = planned[name]
        if again := learned_from(prompts, learned):
            notes.append(f"evaluation.{name}: the model learns from {again:,} of its {len(prompts):,} prompts too")
        if not isinstance(prompts, FilePrompts):
            phases = {f"evaluation.{name}": prompts}
            limits = {f"evaluation.{name}": _prompt_limit(context, planned_set)}
            notes += overlong_notes(policy, phases, limits, given=planned_set.pairs)
            notes += [*pair_notes(phases, tokenizer), *memory_notes(tokenizer, phases)]
            continue
        dropped = {reason: count for span in prompts.spans for reason, count in span.dropped.items()}
        if dropped:
            why = ", ".join(f"{count:,} with {reason}" for reason, count in dropped.items())
            notes.append(f"evaluation.{name}: {sum(dropped.values()):,} rows are dropped: {why}")
        for span in prompts.spans:
            notes += lines(span.remarks, tokenizer, f"rows of evaluation.{name}")
        if prompts.raw and tokenizer.chat_template is not None:
            notes.append(
                f"evaluation.{name}: {prompts.raw:,} prompts are texts and go to the model as they are, without the "
                "tokenizer's chat template (data.files.chat.texts=raw)"
            )
    return notes


def check_sets(planned: Mapping[str, PlannedSet], sets: Mapping[str, Prompts], layouts: Mapping[str, Layout]) -> None:
    """Every set has enough prompts for those who share them.

    Args:
        planned: the sets of a recipe.
        sets: their prompts.
        layouts: of each model, and of the engines, where there are any, as "rollout".

    Raises:
        UserError: naming the set, and who would have none.
    """
    for name, planned_set in planned.items():
        prompts = len(sets[name])
        if planned_set.pairs:
            if prompts < (ranks := layouts["actor"].dp):
                raise UserError(
                    f"evaluation.{name}: {prompts} prompts, expected at least {ranks}: one for each data-parallel rank"
                )
            continue
        if prompts < (engines := layouts["rollout"].dp):
            raise UserError(
                f"evaluation.{name}: {prompts} prompts, expected at least {engines}: a prompt for each rollout engine"
            )
        samples = prompts * planned_set.settings.samples
        if planned_set.reward is None and samples < (ranks := layouts["reward_model"].dp):
            raise UserError(
                f"evaluation.{name}: {prompts} prompts with samples={planned_set.settings.samples}, expected at least "
                f"{ranks} responses: one for each data-parallel rank of the reward model"
            )

"""Sampling by the length of the prompt: the table, refused tables, and other settings that follow it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine3d.errors import UserError
from engine3d.rollout import SamplingConfig
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.data.prompts import Prompts
from hybridflow.data.tasks import Example
from hybridflow.planning.data.prompts import prompt_limit, training_limit
from hybridflow.planning.memory.samples import Lengths
from hybridflow.rollout.adaptive_sampling import PromptSampling, SamplingTable

DEMO = Path(__file__).parents[3] / "launch" / "recipes" / "demo.yaml"
REST = SamplingConfig(max_new_tokens=128, temperature=0.9, stop=("\n",))


def _recipe(table: str, *overrides: str) -> Recipe:
    return load_recipe(DEMO, [f"rollout.adaptive_sampling={table}", *overrides])


def _table(*rows: tuple[int | None, int]) -> SamplingTable:
    return SamplingTable.of([PromptSampling(prompt_tokens=bound, max_new_tokens=most) for bound, most in rows], REST)


def test_the_first_row_holds_that_a_prompt_is_not_longer_than() -> None:
    table = _table((64, 32), (256, 512))
    limits = [table.for_prompt(tokens).max_new_tokens for tokens in (1, 64, 65, 256, 257)]
    assert limits == [32, 32, 512, 512, 128]
    assert (table.longest_response, table.shortest_limit) == (512, 32)
    assert table.sequence_tokens(64) == 96
    assert {sampling.temperature for sampling in table.used} == {0.9}
    assert {sampling.stop for sampling in table.used} == {("\n",)}
    assert {sampling.temperature for sampling in table.greedy().used} == {0.0}
    assert table.greedy().for_prompt(3).max_new_tokens == 32


def test_a_last_row_of_all_prompts_leaves_nothing_to_the_default() -> None:
    table = _table((64, 32), (None, 64))
    assert table.for_prompt(100_000).max_new_tokens == 64
    assert (table.longest_response, table.shortest_limit) == (64, 32)
    assert _table().used == (REST,)


def test_other_parameters_than_the_length_may_differ_that_change_no_log_prob() -> None:
    row = PromptSampling(prompt_tokens=8, stop_token_ids=(5,), stop=("END",), ignore_eos=True)
    sampling = SamplingTable.of([row], REST).for_prompt(8)
    assert (sampling.stop_token_ids, sampling.stop, sampling.ignore_eos, sampling.max_new_tokens) == (
        (5,),
        ("END",),
        True,
        128,
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "[{prompt_tokens: 64, temperature: 0.5}]",
            "temperature by the length of .* expected rollout.sampling.temperature",
        ),
        ("[{top_p: 0.9}]", "its tokens would be of another distribution than the policy's"),
        ("[{repetition_penalty: 1.1}]", "its tokens would be of another distribution than the policy's"),
        ("[{prompt_tokens: 64}, {prompt_tokens: 64}]", "prompt_tokens=64 before 64, expected rising"),
        ("[{max_new_tokens: 3}, {prompt_tokens: 64}]", "prompt_tokens=null before 64, expected rising"),
        ("[{max_new_tokens: 0}]", "adaptive_sampling.*max_new_tokens"),
    ],
)
def test_parameters_that_would_change_log_probs_are_refused_by_name(table: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        _recipe(table)


def test_prompts_and_responses_share_the_context_row_by_row() -> None:
    assert _table((64, 512), (400, 128)).prompt_limit(576) == 448
    assert _table((64, 32), (None, 64)).prompt_limit(576) == 512
    with pytest.raises(UserError, match=r"512 of prompts of up to 100 tokens leaves room for 64 of them.*576"):
        _table((100, 512)).prompt_limit(576)
    with pytest.raises(UserError, match="max_new_tokens=512 of prompts of more than 64 tokens leaves no room"):
        _table((64, 32), (None, 512)).prompt_limit(576)
    with pytest.raises(UserError, match="max_new_tokens=600 leaves no room for a prompt"):
        _table((64, 600)).prompt_limit(576)


def test_training_prompts_may_be_longer_than_those_of_an_evaluation() -> None:
    table = "[{prompt_tokens: 8, max_new_tokens: 12}, {max_new_tokens: 2}]"
    recipe = _recipe(table, "rollout.engine.context_length=20")
    assert prompt_limit(recipe.rollout, recipe.model, given=False) == 16  # for rollout.sampling.max_new_tokens=4
    assert training_limit(recipe.rollout, 16) == 18
    held_out = Prompts([Example("9", "1")], [[1] * 9])
    lengths = Lengths.of(recipe.rollout, recipe.sets, [[1] * 8, [1] * 15], {"eval": held_out})
    assert (lengths.response, lengths.sequence, lengths.sets[0].sequence) == (12, 20, 13)


def test_a_penalty_of_length_needs_room_in_each_row() -> None:
    dapo = ["algorithm={name: dapo, overlong_buffer: 3}", "trainer.mini_batches=2"]
    assert _recipe("[{prompt_tokens: 8, max_new_tokens: 3}]", *dapo).rollout.sampling_table.shortest_limit == 3
    with pytest.raises(SettingsError, match="adaptive_sampling and its max_new_tokens=2, before which it lies"):
        _recipe("[{prompt_tokens: 8, max_new_tokens: 2}]", *dapo)

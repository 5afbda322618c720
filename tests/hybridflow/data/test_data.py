"""Tasks, prompt order and tokenizers."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from engine3d.errors import UserError
from engine3d.models import FAMILIES
from hybridflow.data.config import ArithmeticConfig, DataConfig, OverlongPolicy
from hybridflow.data.sampler import PromptSampler
from hybridflow.data.tasks import (
    ARITHMETIC_CHARACTERS,
    Example,
    arithmetic_held_out,
    arithmetic_splits,
    field_names,
    load_held_out,
    load_splits,
    read_jsonl,
)
from hybridflow.data.tokenizer import (
    encode_answers,
    encode_prompts,
    fit_prompts,
    load_tokenizer,
    make_character_tokenizer,
)

# The arithmetic task


def test_every_arithmetic_answer_is_right_and_within_the_settings() -> None:
    sizes = {"train_size": 500, "sft_size": 300, "eval_size": 200}
    config = ArithmeticConfig(operators=("+", "-", "*"), smallest_operand=5, largest_operand=30, seed=3, **sizes)
    splits = arithmetic_splits(config)
    seen = set()
    for example in itertools.chain(splits.sft, splits.train, arithmetic_held_out(config)):
        expression = example.prompt.removesuffix("=")
        operator = next(symbol for symbol in "+-*" if symbol in expression)
        left, right = map(int, expression.split(operator))
        assert 5 <= left <= 30
        assert 5 <= right <= 30
        assert str(eval(expression)) == example.answer
        assert set(example.prompt + example.answer) <= set(ARITHMETIC_CHARACTERS)
        seen.add(operator)
    assert seen == {"+", "-", "*"}


def test_splits_are_disjoint_and_take_the_whole_space_when_asked_to() -> None:
    config = ArithmeticConfig(operators=("+", "*"), largest_operand=9, eval_size=50, sft_size=50, train_size=100)
    assert config.problems == 200
    splits = arithmetic_splits(config)
    prompts = [example.prompt for example in itertools.chain(splits.sft, splits.train, arithmetic_held_out(config))]
    assert len(prompts) == len(set(prompts)) == 200


def test_splits_depend_on_the_seed_and_eval_problems_on_nothing_else() -> None:
    config = ArithmeticConfig(eval_size=40, sft_size=30, train_size=50)
    splits = arithmetic_splits(config)
    assert arithmetic_splits(config) == splits
    held_out = arithmetic_held_out(config)
    more = config.model_copy(update={"train_size": 500})
    assert arithmetic_held_out(more) == held_out
    larger = arithmetic_splits(more)
    assert larger.sft == splits.sft
    assert larger.train[:50] == splits.train
    assert arithmetic_held_out(config.model_copy(update={"sft_size": 60})) == held_out
    assert arithmetic_held_out(config.model_copy(update={"seed": 1})) != held_out


def test_problems_are_drawn_from_all_over_the_space() -> None:
    lefts = [int(example.prompt.split("+")[0]) for example in arithmetic_splits(ArithmeticConfig()).train]
    assert 45 < sum(lefts) / len(lefts) < 54
    assert len(set(lefts)) == 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"largest_operand": 3, "eval_size": 10, "sft_size": 5, "train_size": 5}, "is 20, expected at most the 16"),
        ({"smallest_operand": 10, "largest_operand": 3}, "largest_operand is 3, expected at least 10"),
        ({"operators": []}, "expected at least one"),
        ({"operators": ["/"]}, "operators"),
    ],
)
def test_arithmetic_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArithmeticConfig.model_validate(settings)


# JSON lines


def test_jsonl_examples_in_order_with_the_named_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "eins\\u2028", "a": "1", "x": []}\n\n{"q": "zw\u00f6lf", "a": 12}\n', encoding="utf-8")
    assert read_jsonl(path, prompt_field="q", answer_field="a") == [
        Example("eins\u2028", "1", {"q": "eins\u2028", "a": "1", "x": []}),
        Example("zw\u00f6lf", "12", {"q": "zw\u00f6lf", "a": 12}),
    ]
    assert read_jsonl(path, prompt_field="q", answer_field=None)[1].answer == ""
    assert field_names(read_jsonl(path, prompt_field="q", answer_field="a")) == ("q", "a", "x")


@pytest.mark.parametrize("answer", ["0.5", "[1, 2.5]", '{"unit": "m"}', "true", "null"])
def test_an_answer_is_anything_that_json_has_but_one_to_train_on_is_text(tmp_path: Path, answer: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": {answer}}}\n')
    [example] = read_jsonl(path)
    assert example.answer == example.fields["answer"] == json.loads(answer)
    with pytest.raises(UserError, match=r":1: field 'answer' is .*, expected a string or an integer to train on"):
        read_jsonl(path, text_answers=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "answer"', ":3: not JSON"),
        ('["a", "b"]', ":3: a list, expected an object with field 'prompt'"),
        ('{"prompt": "a", "reply": "b"}', ":3: no field 'answer', only 'prompt', 'reply'"),
        ('{"prompt": "", "answer": "b"}', ":3: field 'prompt' is '', expected a non-empty string"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n\n' + line + "\n")
    with pytest.raises(UserError) as error:
        read_jsonl(path)
    assert str(error.value).startswith(f"{path}{message}")
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_serve_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no\.jsonl: no such file"):
        read_jsonl(tmp_path / "no.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"empty\.jsonl holds no prompts"):
        read_jsonl(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.jsonl:1: not text in UTF-8; `iconv"):
        read_jsonl(tmp_path / "binary.jsonl")


def test_load_splits_from_either_source(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    config = DataConfig.model_validate(
        {"source": "jsonl", "jsonl": {"train_path": str(path), "eval_path": str(path), "sft_path": None}}
    )
    splits = load_splits(config)
    example = Example("a", "b", {"prompt": "a", "answer": "b"})
    assert (splits.train, load_held_out(config), splits.sft) == ([example], [example], [])
    assert len(load_held_out(DataConfig())) == 256
    with pytest.raises(ValueError, match="jsonl is missing with source 'jsonl'"):
        DataConfig.model_validate({"source": "jsonl"})


# The order of prompts


def test_every_prompt_exactly_once_an_epoch_across_batch_boundaries() -> None:
    sampler = PromptSampler(10, seed=5)
    drawn = list(itertools.chain(*(sampler.next(size) for size in (3, 4, 7, 1, 15, 10))))
    assert sampler.position == 40
    assert sampler.epoch == 4
    epochs = [drawn[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert drawn == PromptSampler(10, seed=5).next(40)
    assert drawn != PromptSampler(10, seed=6).next(40)


def test_a_resumed_sampler_goes_on_exactly(tmp_path: Path) -> None:
    uninterrupted = PromptSampler(13, seed=2).next(100)
    for position in range(0, 60, 7):
        before = PromptSampler(13, seed=2)
        assert before.next(position) == uninterrupted[:position]
        (tmp_path / "state.json").write_text(json.dumps(before.state_dict()))
        after = PromptSampler(13, seed=2)
        after.next(random.Random(position).randrange(50))
        after.load_state_dict(json.loads((tmp_path / "state.json").read_text()))
        assert after.next(100 - position) == uninterrupted[position:]


def test_a_state_of_other_data_is_refused() -> None:
    state = PromptSampler(13, seed=2).state_dict()
    with pytest.raises(UserError, match="has count 13, this run's data 14"):
        PromptSampler(14, seed=2).load_state_dict(state)
    with pytest.raises(UserError, match="has seed 2, this run's data 3"):
        PromptSampler(13, seed=3).load_state_dict(state)


# Tokenizers


@pytest.mark.processes
def test_the_character_tokenizer_is_a_huggingface_directory(tmp_path: Path) -> None:
    make_character_tokenizer(ARITHMETIC_CHARACTERS + " \n", tmp_path)
    program = (
        "import sys; from transformers import AutoTokenizer\n"
        "t = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "ids = t.encode('17+25= \\n4')\n"
        "print(ids, [t.pad_token_id, t.bos_token_id, t.eos_token_id], len(t))\n"
        "assert t.decode(ids + [t.eos_token_id, t.pad_token_id], skip_special_tokens=True) == '17+25= \\n4'\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={"PATH": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert answer.stdout.strip() == "[4, 10, 13, 5, 8, 16, 17, 18, 7] [0, 1, 2] 19"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [None, *(family.name for family in FAMILIES)])
@pytest.mark.parametrize("name", ["TokenizersBackend", "PreTrainedTokenizerFast"])
def test_a_tokenizer_is_the_one_that_transformers_finds(name: str, model_type: str | None, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_character_tokenizer(ARITHMETIC_CHARACTERS, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded, expected = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is type(expected) and loaded.get_vocab() == expected.get_vocab()
    assert loaded.encode("17+25=") == expected.encode("17+25=") == [4, 10, 13, 5, 8, 16]


def test_encoding_prompts_and_answers(tmp_path: Path) -> None:
    tokenizer = make_character_tokenizer(ARITHMETIC_CHARACTERS, tmp_path)
    examples = [Example("1+2=", "3"), Example("10+2=", "12")]
    assert encode_prompts(tokenizer, examples, max_tokens=5) == [[4, 13, 5, 16], [4, 3, 13, 5, 16]]
    assert encode_answers(tokenizer, examples, max_tokens=3) == [[6, 2], [4, 5, 2]]
    with pytest.raises(UserError, match=r"prompt 1 \('10\+2='\) has 5 tokens, expected 1 to 4"):
        encode_prompts(tokenizer, examples, max_tokens=4)
    with pytest.raises(UserError, match=r"answer 1 \('12'\) has 3 tokens, expected at most 2"):
        encode_answers(tokenizer, examples, max_tokens=2)
    with pytest.raises(UserError, match=r"prompt 0 \('1x2='\) cannot be encoded"):
        encode_prompts(tokenizer, [Example("1x2=", "2")], max_tokens=9)


@pytest.mark.parametrize(
    ("policy", "kept", "tokens"),
    [
        ("drop", [0], [[4, 13, 5, 16]]),
        ("cut_left", [0, 1], [[4, 13, 5, 16], [3, 13, 5, 16]]),
        ("cut_right", [0, 1], [[4, 13, 5, 16], [4, 3, 13, 5]]),
    ],
)
def test_prompts_that_are_too_long_by_policy(
    tmp_path: Path, policy: OverlongPolicy, kept: list[int], tokens: list[list[int]]
) -> None:
    tokenizer = make_character_tokenizer(ARITHMETIC_CHARACTERS, tmp_path)
    examples = [Example("1+2=", "3"), Example("10+2=", "12")]
    fitted = fit_prompts(tokenizer, examples, max_tokens=4, policy=policy)
    assert fitted == ([examples[index] for index in kept], tokens, 1)
    with pytest.raises(UserError, match=r"prompt 1 \('10\+2='\) has 5 tokens, expected 1 to 4"):
        fit_prompts(tokenizer, examples, max_tokens=4, policy="refuse")


def test_a_prompt_that_is_cut_keeps_the_token_before_it(tmp_path: Path) -> None:
    tokenizer = make_character_tokenizer(ARITHMETIC_CHARACTERS, tmp_path)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    for policy, tokens in (("cut_left", [1, 5, 16]), ("cut_right", [1, 4, 3])):
        _, [cut], _ = fit_prompts(tokenizer, [Example("10+2=", "12")], max_tokens=3, policy=policy)  # type: ignore[arg-type]
        assert cut == tokens
    assert tokenizer.truncation_side == "right"
    assert encode_prompts(tokenizer, [Example("10+2=", "")], max_tokens=9) == [[1, 4, 3, 13, 5, 16]]


def test_tokenizers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="character '1' is given more than once"):
        make_character_tokenizer("121", tmp_path)
    with pytest.raises(UserError, match=r"no tokenizer in .*: expected tokenizer_config\.json"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path)


def test_a_share_of_the_supervised_answers_is_wrong_and_no_other() -> None:
    right = arithmetic_splits(ArithmeticConfig(sft_size=1000, train_size=100))
    some = arithmetic_splits(ArithmeticConfig(sft_size=1000, train_size=100, sft_wrong=0.3))
    assert some.train == right.train
    assert [example.prompt for example in some.sft] == [example.prompt for example in right.sft]
    errors = [int(a.answer) - int(b.answer) for a, b in zip(some.sft, right.sft, strict=True)]
    assert set(errors) == {-10, -1, 0, 1, 10}
    assert 0.25 < sum(error != 0 for error in errors) / 1000 < 0.35

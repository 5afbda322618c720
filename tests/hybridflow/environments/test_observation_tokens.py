"""Observations as tokens after a turn that is never encoded again."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine3d.errors import UserError
from hybridflow.data.files.config import ChatConfig
from hybridflow.data.tokenizer import make_character_tokenizer, make_chat_tokenizer
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.environments.observation_tokens import ObservationTokens, observation_template

TRIMS = (
    "{%- for message in messages -%}<|{{ message.role }}|>"
    "{%- if message.role == 'assistant' and not loop.last %}{{ message.content.split('=')[-1] }}"
    "{%- else %}{{ message.content | trim }}{%- endif %}<|end|>{{ '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""A template that cuts earlier turns of the assistant, as those of reasoning models do, and adds line feeds."""


def _tokens(directory: Path, role: str | None, template: str | None = None) -> tuple[ObservationTokens, object]:
    tokenizer = make_chat_tokenizer(directory / "tokenizer")
    config = EnvironmentConfig(path="a:B", role=role)  # type: ignore[arg-type]
    chat = ChatConfig()
    if template is not None:
        (directory / "template").write_text(template)
        chat = ChatConfig(template=directory / "template")
    given = observation_template(config, chat, tokenizer)
    return ObservationTokens(tokenizer, given, config.role), tokenizer


@pytest.mark.parametrize(
    ("role", "template", "turn", "following"),
    [
        (None, None, "4<|end|>", "+"),
        ("user", None, "4<|end|>", "<|user|>+<|end|><|assistant|>"),
        ("tool", None, "4<|end|>", "<|tool|>+<|end|><|assistant|>"),
        ("user", None, "4", "<|end|><|user|>+<|end|><|assistant|>"),  # it had no tokens left for its end
        ("user", TRIMS, "1=4<|end|>", "\n<|user|>+<|end|>\n<|assistant|>"),
    ],
)
def test_an_observation_follows_the_turn_as_it_was_drawn(
    role: str | None, template: str | None, turn: str, following: str, tmp_path: Path
) -> None:
    tokens, tokenizer = _tokens(tmp_path, role, template)
    assert tokens.after(tokenizer.encode(turn), "+") == tokenizer.encode(following)  # type: ignore[attr-defined]
    empty = following.replace("+", "")  # a message all the same, with the header of the next turn
    assert tokens.after(tokenizer.encode(turn), "") == tokenizer.encode(empty)  # type: ignore[attr-defined]
    assert tokens.after([], "") == []
    assert tokens.text_of(tokenizer.encode(turn)) == turn.removesuffix("<|end|>")  # type: ignore[attr-defined]


def test_the_tokens_of_a_conversation_are_those_of_its_template(tmp_path: Path) -> None:
    tokens, tokenizer = _tokens(tmp_path, "user")
    messages = [{"role": "user", "content": "1-7"}]
    growing = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]  # type: ignore[attr-defined]
    for guess, answer in (("4", "+"), ("6", "-")):
        turn = tokenizer.encode(f"{guess}<|end|>")  # type: ignore[attr-defined]
        growing += turn + tokens.after(turn, answer)
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": answer}]
    assert growing == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]  # type: ignore[attr-defined]


def test_a_turn_whose_text_stands_for_other_tokens_is_ambiguous(tmp_path: Path) -> None:
    tokens, tokenizer = _tokens(tmp_path, None)
    assert not tokens.is_ambiguous(tokenizer.encode("4+<|end|>"))  # type: ignore[attr-defined]
    assert tokens.is_ambiguous(tokenizer.encode("<|end|>"[0]) + tokenizer.encode("|end|>"))  # type: ignore[attr-defined]


def test_a_role_that_nothing_renders_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"environment\.role=tool: the chat template leaves out a message of role tool"):
        _tokens(
            tmp_path,
            "tool",
            TRIMS.replace("<|{{", "{% if message.role != 'tool' %}<|{{").replace("{{ '\\n' }}", "{% endif %}"),
        )
    escapes = TRIMS.replace("message.content | trim", "message.content | tojson if message.role == 'tool' else 'x'")
    with pytest.raises(UserError, match=r"environment\.role=tool: the chat template escapes quotes and line feeds"):
        _tokens(tmp_path, "tool", escapes)
    with pytest.raises(UserError, match=r"environment\.role=user, and the tokenizer has no chat template; expected"):
        observation_template(
            EnvironmentConfig(path="a:B", role="user"), None, make_character_tokenizer("ab", tmp_path / "characters")
        )

"""The files that `hybridflow init` writes, as texts."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.rundir.yaml_reader import parse_yaml

if TYPE_CHECKING:
    from hybridflow.data.files.formats.column_guess import GuessedColumns


_NEW_TOKENS = 512


@dataclass(frozen=True)
class Model:
    """A model of one's own.

    Args:
        directory: absolute.
        has_template: its tokenizer has a chat template.
        context: positions that it has; None where its config does not say.
    """

    directory: Path
    has_template: bool
    context: int | None = None

    @property
    def most_new_tokens(self) -> int:
        """Tokens of a response that leave a prompt half of the context."""
        return _NEW_TOKENS if self.context is None else max(1, min(_NEW_TOKENS, self.context // 2))


@dataclass(frozen=True)
class Data:
    """A data file of one's own.

    Args:
        path: absolute, or with wildcards or an address.
        columns: that are read.
        beyond_ascii: a character that the tiny model cannot read; empty if there is none.
    """

    path: str
    columns: GuessedColumns
    beyond_ascii: str


_RECIPE = """\
# GRPO with a model, data and a reward of one's own, written by `hybridflow init`. Every setting of
# docs/configuration.md can stand here, or on the command line: hybridflow train {recipe} trainer.steps=10
# Paths are absolute, so that the command runs in any directory; the run's own directory is runs/{name} where it does.
name: {quoted_name}
seed: 1

{model}
data:
  source: files
  overlong_prompts: drop # prompts that leave no room for the longest response
  files:
    chat: {{texts: {texts}}} # {texts_meaning}
    train:
      - {{path: {train}, {columns}}}
{supervised}
reward:
  functions:
    - {{name: own, path: {reward}, timeout_s: 30}}

algorithm: {{name: grpo}}

rollout:
  samples_per_prompt: 8
  sampling: {{temperature: 1.0, max_new_tokens: {tokens}}}

train:
  optimizer: {{lr: {lr}}}
{warmup}
trainer:
  steps: {steps}
  prompts_per_step: {prompts}

# {evaluation_meaning}
evaluation:
  {set}:
    data: {{path: {held_out}, {columns}{rows}}}
    interval: 10

checkpoint: {{save_interval: 10, keep_last_k: 2}}

# Left out, all GPUs of the machine train and generate, or one CPU slot where there is none.
# placement: {{actor: "cuda:0-3", rollout: "cuda:0-3"}}
# For a model that one GPU cannot hold: `train: {{layout: {{tp: 2}}}}` and `rollout: {{engine: {{tp: 2}}}}`;
# `hybridflow check --memory` says what fits.
"""

_TINY = """\
# A tiny model with random weights, made when the run starts: for trying everything out. One of one's own is
# model: {path: DIRECTORY}
model:
  create:
    tokenizer: chat # a token for each character of ASCII
    config:
      architectures: [Qwen3ForCausalLM]
      model_type: qwen3
      vocab_size: 103
      hidden_size: 128
      intermediate_size: 256
      num_hidden_layers: 2
      num_attention_heads: 2
      num_key_value_heads: 1
      head_dim: 64
      hidden_act: silu
      rms_norm_eps: 1.0e-6
      rope_theta: 10000.0
      max_position_embeddings: 1024
      initializer_range: 0.05
      tie_word_embeddings: false
      attention_bias: false
      bos_token_id: 1
      eos_token_id: 2
"""

_OWN = """\
model: {{path: {path}}}
"""

_SUPERVISED = """\
    sft: # for `warmup`: the answers are learned
      - {{path: {train}, {columns}}}
"""

_WARMUP = """
# A supervised phase, since a model with random weights has nothing right that could be rewarded.
warmup:
  steps: 150
  batch_size: 64
  optimizer: {lr: 3.0e-3, warmup_steps: 5}
"""

_WITH_ANSWERS = '''\
"""The reward of {name}: change `reward`, and try it with `python reward.py`."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

_NUMBER = re.compile(r"-?\\d+(?:\\.\\d+)?")


def score(generated_texts, answers):
    """One number for each response. A parameter with the name of any other column gets that column's values."""
    rights = (answer if isinstance(answer, list) else [answer] for answer in answers)  # of a list any is right
    pairs = zip(generated_texts, rights, strict=True)
    return [max(reward(text, str(answer)) for answer in right) for text, right in pairs]


def reward(text: str, answer: str) -> float:
    """1 for the right answer, and at most 0.1 for one that looks like it, so that there is a first step to take."""
    answer = answer.rpartition("####")[2].strip()  # as in GSM8K, where the solution stands before it
    if _NUMBER.fullmatch(answer.replace(",", "")):
        numbers = _NUMBER.findall(text.replace(",", ""))
        right = bool(numbers) and float(numbers[-1]) == float(answer.replace(",", ""))
    else:
        right = text.strip().lower() == answer.lower()
    return 1.0 if right else 0.1 * SequenceMatcher(None, text[-200:], answer[-200:]).ratio()


if __name__ == "__main__":
    print(score(["It is 12.", "It is 13."], ["12", "12"]))
'''

_WITHOUT_ANSWERS = '''\
"""The reward of {name}: change `reward`, and try it with `python reward.py`."""

from __future__ import annotations


def score(generated_texts):
    """One number for each response. A parameter with the name of any column of the data gets that column's values."""
    return [reward(text) for text in generated_texts]


def reward(text: str) -> float:
    """More for words, up to 50 of them: a stand-in for what is wanted."""
    return min(len(text.split()), 50) / 50


if __name__ == "__main__":
    print(score(["One two three.", ""]))
'''

_README = """\
# {name}

Written by `hybridflow init`. `recipe.yaml` says what is trained on what, `reward.py` what is rewarded.

    hybridflow data {recipe}      the prompts as the model reads them
    hybridflow check {recipe}     what is wrong with it, without starting anything
    hybridflow train {recipe}     the run, in runs/{name}

Changes are tried quickest with `trainer.steps=2 name=try overwrite=true` behind the recipe. While it runs, and after:

    hybridflow status runs/{name}       step, phase, reward
    hybridflow samples runs/{name}      responses with their rewards
    hybridflow report runs/{name}       the whole run as one page
    hybridflow resume runs/{name}       continue after the newest checkpoint

The trained model is in `runs/{name}/model`, a HuggingFace directory.
"""


def files_of_run(directory: Path, model: Model | None, data: Data | None) -> dict[str, str]:
    """The text of each file, by its name.

    Args:
        directory: of the files, absolute.
        model: None for a tiny one with random weights.
        data: None for sums, which are written too.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", directory.name).strip("-._")[:100] or "mine"
    files = {}
    if data is None:
        sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(20)]
        held_out = sums[3::7]
        for file, rows in (
            ("train.jsonl", [problem for problem in sums if problem not in held_out]),
            ("held_out.jsonl", held_out),
        ):
            files[file] = "".join(f"{json.dumps(row)}\n" for row in rows)
    has_answers = data is None or data.columns.answer is not None
    reward = _WITH_ANSWERS if has_answers else _WITHOUT_ANSWERS
    recipe = _recipe(directory, name, model, data)
    readme = _README.format(name=name, recipe=shlex.quote(str(directory / "recipe.yaml")))
    return {"recipe.yaml": recipe, "reward.py": reward.replace("{name}", name), "README.md": readme, **files}


def _recipe(directory: Path, name: str, model: Model | None, data: Data | None) -> str:
    train = _quoted(data.path if data is not None else str(directory / "train.jsonl"))
    prompt = data.columns.prompt if data is not None else "prompt"
    answer = data.columns.answer if data is not None else "answer"
    columns = f"prompt: {_quoted(prompt)}, answer: {_quoted(answer) if answer is not None else 'null'}"
    if data is not None and answer is not None:
        columns += f", where: {{{_quoted(answer)}: {{present: true}}}}"  # rows without an answer are left out
    templated = model is None or model.has_template
    learns_answers = model is None and (data is None or data.columns.has_text_answers)
    meaning = "a prompt that is a text is one message of the user" if templated else "the model has no chat template"
    return _RECIPE.format(
        recipe=shlex.quote(str(directory / "recipe.yaml")),
        name=name,
        quoted_name=name if parse_yaml(name)[0] == name else _quoted(name),
        model=_TINY if model is None else _OWN.format(path=_quoted(str(model.directory))),
        texts="user" if templated else "raw",
        texts_meaning=meaning,
        train=train,
        columns=columns,
        supervised=_SUPERVISED.format(train=train, columns=columns) if learns_answers else "",
        reward=_quoted(f"{directory / 'reward.py'}:score"),
        tokens=(8 if data is None else 32) if model is None else model.most_new_tokens,
        lr="3.0e-4" if model is None else "1.0e-6",
        warmup=_WARMUP if learns_answers else "",
        steps=40 if model is None else 100,
        prompts=64 if model is None else 16,
        evaluation_meaning="Measured before the first step, every ten steps, and after the last."
        if data is None
        else "Its first rows, which are trained on too: put held-out rows of your own in their place.",
        set="held_out" if data is None else "trained_on",
        held_out=_quoted(str(directory / "held_out.jsonl")) if data is None else train,
        rows="" if data is None else ", rows: 64",
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

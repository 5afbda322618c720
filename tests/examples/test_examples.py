"""The scripts and recipes in examples/ run."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from shutil import which

import pytest

from engine3d.checkpoint.manifest import find_checkpoints
from hybridflow.config.recipe import load_recipe
from hybridflow.data.tokenizer import make_chat_tokenizer
from hybridflow.environments.agents.host import AgentHost, agent_template
from hybridflow.environments.environment import Task
from hybridflow.environments.episode import EpisodeStart, EpisodeTurn
from hybridflow.environments.episode_host import EpisodeHost
from hybridflow.environments.observation_tokens import ObservationTokens, observation_template
from hybridflow.rewards.functions import RewardFunctions
from tests.support.scripted_server import completion, serving
from tests.support.warm import warm_python

ROOT = Path(__file__).parents[2]


def test_every_example_is_in_the_list() -> None:
    listed = set(re.findall(r"\]\((\w+\.\w+)\)", (ROOT / "examples/README.md").read_text()))
    assert listed == {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".yaml")}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(
            ["{root}/examples/dataflow.py"],
            r"^\[\{'total': \[0, 90\]\}, \{'total': \[2, 380\]\}\]$",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["{root}/examples/ppo_trainer_loop.py"],
            r"^step 2: reward -?\d\.\d{3}, \d+ long responses$",
            marks=pytest.mark.release,
        ),
        pytest.param(
            [
                *("-m", "hybridflow", "train", "{root}/examples/own_reward.yaml", "warmup.steps=1"),
                *("trainer.steps=1", "trainer.prompts_per_step=8", "evaluation.eval.before_train=false"),
                *("evaluation.eval.prompts=16", "trainer.export=false", "placement.actor=cpu:0", "train.layout.ep=1"),
            ],
            r"^train 1/1 ",
            marks=pytest.mark.release,
        ),
        pytest.param(
            [
                *("-m", "hybridflow", "train", "{root}/examples/mathematics.yaml", "warmup.steps=1"),
                *("trainer.steps=1", "trainer.prompts_per_step=8", "evaluation.eval.before_train=false"),
                *("evaluation.eval.prompts=16", "trainer.export=false", "placement.actor=cpu:0", "train.layout.ep=1"),
            ],
            r"^train 1/1 ",
            marks=pytest.mark.release,
        ),
        pytest.param(
            [
                *("-m", "hybridflow", "train", "{root}/launch/recipes/demo.yaml", "warmup.steps=1"),
                "algorithm={{name: examples/own_algorithm.py:ALGORITHM, shift: 0.1}}",
                *("trainer.steps=1", "trainer.prompts_per_step=8", "evaluation.eval.before_train=false"),
                *("evaluation.eval.prompts=16", "trainer.export=false", "placement.actor=cpu:0", "train.layout.ep=1"),
            ],
            r"^own_algorithm.py:ALGORITHM: 1 steps? of 8 prompts[\s\S]*^train 1/1 ",
            marks=pytest.mark.long,
        ),
        pytest.param(
            [
                *("-m", "hybridflow", "train", "{root}/launch/recipes/code.yaml", "warmup.steps=1"),
                *("trainer.steps=1", "trainer.prompts_per_step=4", "evaluation.code.before_train=false"),
                *("evaluation.code.prompts=4", "trainer.export=false", "placement.actor=cpu:0", "train.layout.ep=1"),
            ],
            r"^train 1/1 [\s\S]*^eval 1  code mean@4 ",
            marks=[pytest.mark.release, pytest.mark.skipif(not which("bwrap"), reason="no bubblewrap")],
        ),
        pytest.param(
            [
                *("-m", "hybridflow", "train", "{root}/launch/recipes/tools.yaml", "warmup.steps=1"),
                *("trainer.steps=1", "trainer.prompts_per_step=8", "trainer.export=false"),
                *("placement.actor=cpu:0", "placement.rollout=cpu:1", "train.layout.ep=1"),
            ],
            r"^train 1/1 ",
            marks=pytest.mark.release,
        ),
    ],
    ids=["dataflow", "ppo_trainer_loop", "own_reward", "mathematics", "own_algorithm", "code", "tools"],
)
def test_an_example_runs(words: list[str], said: str, tmp_path: Path) -> None:
    for name in ("examples", "launch"):  # where the recipes' paths of functions and data start
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [warm_python(), *(word.format(root=ROOT) for word in words)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(said, done.stdout, re.MULTILINE), done.stdout
    for log in tmp_path.glob("runs/*/logs/*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()
    for checkpoints in tmp_path.glob("runs/*/checkpoints"):  # an update's save is waited for
        assert find_checkpoints(checkpoints)[0]


@pytest.mark.processes
def test_the_function_of_the_example_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with RewardFunctions(load_recipe(ROOT / "examples/own_reward.yaml").functions["reward"]) as rewards:
        result = rewards.evaluate([" 42 ", "24"], ["12+30=", "12+30="], ["42", "42"])
    assert result.total.tolist() == pytest.approx([1 - 0.05 * 4, -0.05 * 2])


@pytest.mark.processes
def test_the_functions_of_the_example_with_a_judge_score(tmp_path: Path) -> None:
    with serving(lambda _: completion(json.dumps({"score": 5}))) as server:
        recipe = (ROOT / "examples/judge.yaml").read_text().replace("http://127.0.0.1:30000", server.url)
        (tmp_path / "judge.yaml").write_text(recipe.replace("../launch", f"{ROOT}/launch"))
        config = load_recipe(tmp_path / "judge.yaml").functions["reward"]
        with RewardFunctions(config) as rewards:
            result = rewards.evaluate(["42", "24"], ["12+30=", "12+30="], ["42", "42"])
        prompts = {request.content["messages"][0]["content"] for request in server.requests}
    assert {prompt.partition("How near")[0] for prompt in prompts} == {
        f"Problem: 12+30=\nRight answer: 42\nResponse: {response}\n" for response in ("42", "24")
    }
    assert result.total.tolist() == [1 + 0.5 * 0.5, 0.5 * 0.5]


@pytest.mark.processes
@pytest.mark.release
def test_the_example_with_a_judge_runs(tmp_path: Path) -> None:
    with serving(lambda _: completion(json.dumps({"score": 5}), tokens=(40, 6))) as server:
        recipe = (ROOT / "examples/judge.yaml").read_text()
        url = "http://127.0.0.1:30000/v1"
        assert url in recipe
        base = f"base: {ROOT}/launch/recipes/demo.yaml"
        (tmp_path / "judge.yaml").write_text(
            recipe.replace(url, f"{server.url}/v1").replace("base: ../launch/recipes/demo.yaml", base)
        )
        words = [
            *("-m", "hybridflow", "train", "judge.yaml", "warmup.steps=1"),
            *("trainer.steps=1", "trainer.prompts_per_step=8", "evaluation.eval.before_train=false"),
            *("evaluation.eval.prompts=16", "trainer.export=false", "placement.actor=cpu:0", "train.layout.ep=1"),
        ]
        done = subprocess.run(
            [warm_python(), *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    logged = [json.loads(line) for line in (tmp_path / "runs/judge/metrics.jsonl").read_text().splitlines()]
    [step] = [line for line in logged if "reward/quality/mean" in line]
    assert step["reward/quality/mean"] == 0.5 and step["reward/quality/failed"] == 0
    scored, hits = step["reward/quality/requests"] - step["reward/quality/retries"], step["reward/quality/cache_hits"]
    assert (
        scored > 0 and step["reward/quality/input_tokens"] == 40 * scored and step["reward/quality/latency_s_p95"] > 0
    )
    assert step["reward/quality/cost"] == pytest.approx(scored * (40 * 0.1 + 6 * 0.4) / 1e6)
    assert scored + hits == round(scored + hits) and (scored + hits) % 8 == 0  # one of both for each sample


@pytest.mark.slow
def test_the_agent_of_the_example_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/agents.md").read_text()
    assert (ROOT / "examples/own_agent.py").read_text().partition("annotations\n\n")[2] in page
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(ROOT / "examples/own_agent.yaml")
    assert recipe.environment is not None
    tokenizer = make_chat_tokenizer(tmp_path)
    host = AgentHost(recipe.environment, tokenizer, agent_template(None, tokenizer), {})
    try:
        host.start()
        task = Task("1-7", "6", {"messages": [{"role": "user", "content": "1-7"}]})
        host.send([EpisodeStart(0, task, most_tokens=100)])
        texts = []
        for guess in ("4", "7", "6"):
            (answer,) = host.take_answers(60)
            texts.append(tokenizer.decode(list(answer.tokens)))
            host.send([EpisodeTurn(0, tokenizer.encode(f"{guess}<|end|>"), complete=True)])
        (end,) = host.take_answers(60)
        assert texts == [f"<|user|>{said}<|end|><|assistant|>" for said in ("1-7", "+", "-")]
        assert (end.failure, end.reward, end.done) == (None, 1.0, True)
    finally:
        host.close()


def test_the_environment_of_the_example_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/environments.md").read_text()
    for name in ("own_environment.py", "own_tools.py"):
        assert (ROOT / "examples" / name).read_text().partition("\n\n")[2] in page
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(ROOT / "examples/own_environment.yaml")
    assert recipe.environment is not None and recipe.data.files is not None
    tokenizer = make_chat_tokenizer(tmp_path)
    template = observation_template(recipe.environment, recipe.data.files.chat, tokenizer)
    host = EpisodeHost(recipe.environment, ObservationTokens(tokenizer, template, recipe.environment.role))
    try:
        host.start()
        host.send([EpisodeStart(0, Task("1-7"))])
        assert host.take_answers(60)[0].tokens == []
        rewards, tokens = [], 0
        for guess in ("3", "1", "1"):
            turn = tokenizer.encode(f"{guess}<|end|>")
            host.send([EpisodeTurn(0, turn, complete=True)])
            (answer,) = host.take_answers(60)
            rewards.append(answer.reward)
            tokens += len(turn) + (0 if answer.done else len(answer.tokens))
        assert rewards == [1.0, 0.0, 1.0] and answer.done
        assert tokens <= recipe.rollout.sampling.max_new_tokens
    finally:
        host.close()

"""A run whose samples are played by an agent with OpenAI's client and two tools, and which loses driver and engine."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from benchmarks import logprobs
from benchmarks.kill_harness import Kill, KilledRun
from engine3d.rollout.requests import BEGINS, GIVEN
from hybridflow.data.tokenizer import load_tokenizer
from tests.support.runs import ROOT, records, stored_samples
from tests.support.warm import warm_python

pytestmark = pytest.mark.processes

STEPS, GROUPS, SAMPLES = 4, 6, 4
RAISES_IN = 14
"""Draw in which the agent raises, once it has had answers."""
AGENT = f"""
import json
from openai import AsyncOpenAI
from examples.own_tools import price

def stock(article):
    return str(ord(article[0]) % 10)

TOOLS = [
    {{"type": "function", "function": {{"name": function.__name__, "description": "", "parameters": {{
        "type": "object", "properties": {{"article": {{"type": "string"}}}}
    }}}}}}
    for function in (price, stock)
]

def call(function):
    try:
        return {{"price": price, "stock": stock}}[function.name](**json.loads(function.arguments))
    except Exception:
        return "?"

async def converse(client, messages):
    for _ in range(2):
        completion = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        answer = completion.choices[0].message
        messages.append(answer)
        for made in answer.tool_calls or ():
            messages.append({{"role": "tool", "tool_call_id": made.id, "content": call(made.function)}})
        if not answer.tool_calls:
            break
    return answer.content

async def play(task, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        article = [{{"role": "user", "content": task.fields["messages"][0]["content"]}}]
        first = await converse(client, list(article))
        if task.seed == {RAISES_IN}:
            raise ValueError("not today")
        again = await converse(client, list(article)) if task.seed % 2 else first  # from the same context
    return float(first == task.answer) + 0.1 * len(set(first or "") & set("0123456789")) + float(again == task.answer)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> KilledRun:
    directory = tmp_path_factory.mktemp("agents")
    (directory / "agent.py").write_text(AGENT)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {"article": {"type": "string"}}}}}
        for name in ("price", "stock")
    ]
    recipe = [
        str(ROOT / "launch/recipes/tools.yaml"),
        "name=agents",
        "environment.tools=null",
        f"environment.agent={directory}/agent.py:play",
        "environment.tool_parser=pythonic",
        "environment.max_turns=4",
        "environment.tool_timeout_s=120",
        f"data.files.chat.tools={json.dumps(tools)}",
        f"data.files.cache={directory}/cache",
        "model.create.config.max_position_embeddings=256",
        "warmup.steps=60",
        f"trainer.steps={STEPS}",
        f"trainer.prompts_per_step={GROUPS}",
        f"rollout.samples_per_prompt={SAMPLES}",
        "rollout.sampling.max_new_tokens=150",
        "rollout.engine.max_running_requests=8",
        "rollout.stream={engine_restarts: 1, dynamic_batching: true}",
        "evaluation.prices={data: {path: launch/recipes/data/tools-train.parquet, prompt: messages, answer: answer},"
        " prompts: 4, samples: 2, temperature: 1.0}",
        "placement.rollout=cpu:2-3",
        "trainer.max_staleness=0",
        "trainer.export=false",
        "checkpoint.save_interval=1",
    ]
    run = KilledRun(directory / "run", recipe, interpreter=warm_python())
    outcome = run.run(Kill("driver", "rollout", 2, 0.1))
    assert outcome.killed and not outcome.left_over, run.output
    outcome = run.run(Kill("engine", "rollout", 2, 0.0), limit_s=400.0)
    assert outcome.killed and outcome.exit_code == 0 and not outcome.left_over, run.output
    assert "is lost and is started again" in run.output
    return run


@pytest.fixture(scope="module")
def rows(run: KilledRun) -> list[dict[str, Any]]:
    """Every sample that was trained on."""
    tables = stored_samples(run.run_directory)
    return [dict(zip(table, values, strict=True)) for table in tables for values in zip(*table.values(), strict=True)]


@pytest.mark.long
def test_every_session_is_trained_on_once_but_for_those_whose_agent_failed(
    run: KilledRun, rows: list[dict[str, Any]]
) -> None:
    counts = Counter(row["group_id"] for row in rows)
    assert counts == {group: SAMPLES for group in range(STEPS * GROUPS) if group != RAISES_IN}
    train = records(run.run_directory, "train")
    assert [record["step"] for record in train] == list(range(1, STEPS + 1))
    assert sum(record["reward/dropped"] for record in train) == SAMPLES
    assert sum(record.get("reward/environment/failed_raised", 0) for record in train) == SAMPLES
    assert sum(record["reward/environment/calls_price"] for record in train) > 0
    assert all(record["stream/request_limit_mean"] <= 8 for record in train)
    # Each request but the first of a session begins with tokens that its engine has drawn.
    assert max(record.get("stream/prefix_hit_share", 0.0) for record in train) > 0.3


@pytest.mark.long
def test_an_evaluation_is_played_by_the_agent(run: KilledRun) -> None:
    first, last = records(run.run_directory, "eval")
    assert (first["step"], last["step"]) == (0, STEPS)
    for record in (first, last):
        assert (record["eval/prices/prompts"], record["eval/prices/samples"]) == (4, 8)
        assert record["eval/prices/reward/environment/requests"] >= 8


@pytest.mark.long
def test_a_session_is_a_sample_of_the_sequences_of_its_tree(run: KilledRun, rows: list[dict[str, Any]]) -> None:
    tokenizer = load_tokenizer(run.run_directory / "initial")
    begin = "<|system|>price(article)<|end|><|system|>stock(article)<|end|><|user|>"
    called = 0
    for row in rows:
        tokens, versions = row["response_tokens"], row["token_versions"]
        assert row["response_mask"] == [version >= 0 for version in versions]
        assert all(logprob == 0.0 for logprob, version in zip(row["logprobs"], versions, strict=True) if version < 0)
        begins = [index for index, version in enumerate(versions) if version == BEGINS]
        assert len(begins) == row["group_id"] % 2
        first = [*row["prompt_tokens"], *tokens]
        ends = [0, *(len(row["prompt_tokens"]) + index for index in begins), len(first)]
        for start, end in pairwise(ends):
            text = str(tokenizer.decode(first[start:end]))
            assert text.startswith(begin) and text.count(begin) == 1
            called += text.count("<|tool|>")
        given = [version == GIVEN for version in versions]
        assert not given[0] and not given[-1]
    assert called


@pytest.mark.long
def test_each_token_of_a_session_was_drawn_with_the_weights_of_its_version(
    run: KilledRun, rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert logprobs.main([str(run.run_directory), "--samples", "1000"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    distances = result["distances"]
    drawn = sum(sum(row["response_mask"]) for row in rows)
    assert distances[logprobs.FIRST]["tokens"] == drawn and result["left_out"] == 0
    assert distances[logprobs.FIRST]["most"] < 1e-4, result
    # The trainer computes each sequence by itself as well.
    train = records(run.run_directory, "train")
    assert max(record["mismatch/logprob_abs_diff_max"] for record in train) < 1e-4


@pytest.mark.long
def test_a_step_of_sessions_is_replayed_bit_for_bit(run: KilledRun) -> None:
    done = subprocess.run(
        [warm_python(), "-m", "hybridflow", "replay", str(run.run_directory), "--step", "3"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

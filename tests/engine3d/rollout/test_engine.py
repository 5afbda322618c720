"""A real SGLang engine against transformers on the same weights."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine3d.errors import EngineError, UserError
from engine3d.rollout import Request, Response, RolloutEngine, SamplingConfig
from engine3d.rollout.host import process as process_module
from tests.support.checkpoint_sender import CheckpointSender
from tests.support.engine_processes import cpu_s, processes_of
from tests.support.engine_responses import begun, responses_of, versions_of
from tests.support.engine_traces import traced_steps
from tests.support.reference_routes import reference_model
from tests.support.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.processes

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
SAMPLED = SamplingConfig(max_new_tokens=12)
GREEDY = SamplingConfig(temperature=0, max_new_tokens=12)


def reference_logprobs(directory: Path, prompt: list[int], response: list[int], temperature: float = 1) -> torch.Tensor:
    """Log-softmax of transformers' logits at each response position: (response length, vocabulary)."""
    model = reference_model(directory)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)


def assert_greedy_of(directory: Path, prompt: list[int], generation: Response) -> None:
    logprobs = reference_logprobs(directory, prompt, generation.token_ids)
    assert generation.token_ids == logprobs.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(
    engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path], temperature: float
) -> None:
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=12)
    results = responses_of(engine, PROMPTS, sampling, samples_per_prompt=3)
    assert [len(group) for group in results] == [3, 3, 3]
    for prompt, group in zip(PROMPTS, results, strict=True):
        for generation in group:
            assert len(generation.logprobs) == len(generation.token_ids) > 0
            reference = reference_logprobs(tiny_model_dirs[0], prompt, generation.token_ids, temperature)
            expected = reference.gather(1, torch.tensor(generation.token_ids).unsqueeze(1)).squeeze(1)
            assert (torch.tensor(generation.logprobs) - expected).abs().max() < 1e-3


def test_samples_of_a_prompt_differ_and_greedy_does_not(
    engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path]
) -> None:
    (sampled,) = responses_of(engine, PROMPTS[:1], SAMPLED, samples_per_prompt=4)
    assert len({tuple(generation.token_ids) for generation in sampled}) == 4
    greedy = responses_of(engine, PROMPTS, GREEDY, samples_per_prompt=2)
    for prompt, (first, second) in zip(PROMPTS, greedy, strict=True):
        assert first.token_ids == second.token_ids
        assert_greedy_of(tiny_model_dirs[0], prompt, first)


def test_a_response_ends_at_a_stop_token_or_at_its_length(engine: RolloutEngine) -> None:
    ignoring = GREEDY.model_copy(update={"ignore_eos": True})
    ((complete,),) = responses_of(engine, PROMPTS[:1], ignoring)
    assert (complete.finish_reason, len(complete.token_ids)) == ("length", 12)
    stop = complete.token_ids[4]
    stopping = ignoring.model_copy(update={"stop_token_ids": (stop,), "ignore_eos": False})
    ((stopped,),) = responses_of(engine, PROMPTS[:1], stopping)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == complete.token_ids[: complete.token_ids.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_a_response_whose_last_allowed_token_ends_it_is_not_cut(engine: RolloutEngine) -> None:
    ((complete,),) = responses_of(engine, PROMPTS[:1], GREEDY.model_copy(update={"ignore_eos": True}))
    stop = complete.token_ids[4]
    ends = complete.token_ids.index(stop) + 1
    sampling = GREEDY.model_copy(update={"stop_token_ids": (stop,)})
    for longest, reason in ((ends + 1, "stop"), (ends, "stop"), (ends - 1, "length")):
        limited = sampling.model_copy(update={"max_new_tokens": longest})
        ((at_once,),) = responses_of(engine, PROMPTS[:1], limited)
        engine.submit([Request(0, PROMPTS[0], limited)])
        ended = engine.take_ended(60)[0]
        for response in (at_once, ended):
            assert response.finish_reason == reason
            assert response.token_ids == complete.token_ids[: min(longest, ends)]


def test_a_response_may_fill_the_context(engine: RolloutEngine) -> None:
    sampling = SamplingConfig(max_new_tokens=4, ignore_eos=True)
    ((generation,),) = responses_of(engine, [[5] * (engine.context_length - 4)], sampling)
    assert (generation.finish_reason, len(generation.token_ids)) == ("length", 4)


def test_a_cache_of_the_size_that_is_needed_lets_all_requests_run_at_once(engine: RolloutEngine) -> None:
    assert engine.log_path is not None and engine.config.max_total_tokens is None
    before, most = engine.log_path.stat().st_size, engine.config.max_running_requests
    prompts = [[3 + number, 5, 7, 9] for number in range(most)]
    sampling = SamplingConfig(max_new_tokens=engine.context_length - 4, ignore_eos=True)
    assert len(responses_of(engine, prompts, sampling)) == most
    said = engine.log_path.read_text()[before:]
    running = [
        (int(match[1]), int(match[2]))
        for match in re.finditer(r"Decode batch.*#running-req: (\d+).*#queue-req: (\d+)", said)
    ]
    assert (most, 0) in running
    assert "retract" not in said.lower()


def test_transferred_weights_are_used_and_named(
    engine: RolloutEngine, checkpoints: CheckpointSender, tiny_model_dirs: tuple[Path, Path]
) -> None:
    before = responses_of(engine, PROMPTS, GREEDY)
    checkpoints.transfer(tiny_model_dirs[1], version=7)
    after = responses_of(engine, PROMPTS, GREEDY)
    assert [group[0].token_ids for group in before] != [group[0].token_ids for group in after]
    for prompt, (generation,) in zip(PROMPTS, after, strict=True):
        assert_greedy_of(tiny_model_dirs[1], prompt, generation)
    assert versions_of(before) == {0}
    assert versions_of(after) == {7}
    checkpoints.transfer(tiny_model_dirs[0], version=8)
    assert responses_of(engine, PROMPTS, GREEDY)[0][0].token_ids == before[0][0].token_ids


@contextmanager
def standstill(engine: RolloutEngine) -> Iterator[None]:
    """Generations stand still until the block ends, as in a transfer that the client knows nothing of."""
    assert engine._host is not None
    engine._host.call("test", "begin_weights", 60, responses=0, in_flight="continue")
    yield
    engine._host.call("test", "commit_weights", 60, version=0)


@pytest.fixture
def wait_of_the_client(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the clock of the engine's client forward, by fractions of its limit of responses without progress."""
    limit_s, passed_s = 300, 0.0
    monkeypatch.setattr(engine, "config", engine.config.model_copy(update={"request_timeout_s": limit_s}))
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + passed_s,
        **{name: getattr(time, name) for name in ("time", "strftime", "localtime")},
    )
    monkeypatch.setattr(process_module, "time", clock)

    def wait(limits: float) -> None:
        nonlocal passed_s
        passed_s += limits * limit_s

    return wait


def test_a_batch_may_take_longer_than_the_limit_as_long_as_it_comes_further(
    engine: RolloutEngine, wait_of_the_client: Callable[[float], None]
) -> None:
    results, host = begun(engine, 200, complete=1), engine._host
    assert host is not None
    for _ in range(2):
        with standstill(engine):
            wait_of_the_client(0.7)
            time.sleep(2.5)  # in which the client looks at the time
        reported = host._progress_at
        while host._progress_at == reported:
            assert not results.done()
            time.sleep(0.02)
    assert [len(group[0].token_ids) for group in results.result(300)] == [60] * 200


def test_a_batch_that_comes_no_further_is_given_up(
    engine: RolloutEngine, wait_of_the_client: Callable[[float], None]
) -> None:
    results = begun(engine, 200, complete=1)
    with standstill(engine):
        before = cpu_s(*processes_of(engine))
        time.sleep(2)
        assert cpu_s(*processes_of(engine)) - before < 1  # a scheduler that polls takes all of a core
        wait_of_the_client(1.1)
        with pytest.raises(EngineError) as error:
            results.result(300)
    match = re.match(
        r"rollout engine: responses came no further within 300 s: no token since \d\d:\d\d:\d\d, (\d+) of 200 "
        r"responses are done; log: ",
        str(error.value),
    )
    assert match and 0 < int(match[1]) < 200
    assert len(responses_of(engine, PROMPTS, GREEDY)) == 3


@pytest.mark.parametrize(
    "settings", [{"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 5, "temperature": 0.8}]
)
def test_what_is_cut_off_stays_in_the_logprobs(
    engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path], settings: dict[str, float]
) -> None:
    """Check that log-probs are the trainer's, yet of another distribution than the tokens were drawn from."""
    sampling = SamplingConfig(max_new_tokens=12, ignore_eos=True, **settings)
    (group,) = responses_of(engine, PROMPTS[1:2], sampling, samples_per_prompt=8)
    for generation in group:
        reference = reference_logprobs(
            tiny_model_dirs[0], PROMPTS[1], generation.token_ids, settings.get("temperature", 1)
        )
        drawn = torch.tensor(generation.token_ids).unsqueeze(1)
        expected = reference.gather(1, drawn).squeeze(1)
        assert (torch.tensor(generation.logprobs) - expected).abs().max() < 1e-3
        rank = (reference > expected.unsqueeze(1) + 1e-4).sum(1)
        assert rank.max() < settings.get("top_k", VOCAB_SIZE)
        before = reference.exp().where(reference > expected.unsqueeze(1) + 1e-4, 0.0).sum(1)
        assert before.max() <= settings.get("top_p", 1) + 1e-3
        least = settings.get("min_p", 0.0) * reference.exp().max(1).values
        assert (expected.exp() >= least - 1e-4).all()


@pytest.mark.parametrize(
    "penalties", [{"repetition_penalty": 1.7}, {"presence_penalty": 0.9, "frequency_penalty": 0.4}]
)
def test_penalties_are_in_the_logprobs(
    engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path], penalties: dict[str, float]
) -> None:
    sampling = SamplingConfig(max_new_tokens=20, ignore_eos=True, temperature=0.5, **penalties)
    model = reference_model(tiny_model_dirs[0])
    (group,) = responses_of(engine, PROMPTS[:1], sampling, samples_per_prompt=3)
    changed_by = []
    for generation in group:
        with torch.no_grad():
            logits = model(torch.tensor([PROMPTS[0] + generation.token_ids])).logits[0, len(PROMPTS[0]) - 1 : -1]
        tokens = torch.tensor(generation.token_ids)
        for position, (token, logprob) in enumerate(zip(generation.token_ids, generation.logprobs, strict=True)):
            counts = torch.bincount(tokens[:position], minlength=VOCAB_SIZE)
            scale = torch.where(counts > 0, sampling.repetition_penalty, 1.0)
            changed = torch.where(logits[position] < 0, logits[position] * scale, logits[position] / scale)
            changed = changed - sampling.presence_penalty * (counts > 0) - sampling.frequency_penalty * counts
            assert abs(logprob - float(torch.log_softmax(changed / 0.5, -1)[token])) < 5e-3
            changed_by.append(abs(logprob - float(torch.log_softmax(logits[position] / 0.5, -1)[token])))
    assert max(changed_by) > 0.1, "a trainer's log-probs are others: recipes refuse these settings"


def test_log_probs_of_given_tokens_and_of_the_most_likely_ones(
    engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path]
) -> None:
    model = reference_model(tiny_model_dirs[0])
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, VOCAB_SIZE, (6,), generator=generator).tolist()
    # Two that begin alike, so that one is in the other's cache; the whole of one but its first token; its last one.
    sequences = [
        prompt + torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (5, 9, 1, 12)
    ]
    firsts = [6, 6, 1, 17]
    for top in (1, 5):
        for sequence, first, given in zip(sequences, firsts, engine.logprobs(sequences, firsts, top), strict=True):
            with torch.no_grad():
                every = model(torch.tensor([sequence])).logits[0, first - 1 : -1].double().log_softmax(dim=-1)
            expected = every.gather(1, torch.tensor(sequence[first:])[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(given.logprobs).double(), expected, atol=2e-5, rtol=1e-4)
            best = every.topk(top, dim=1)
            assert given.top_tokens == best.indices.tolist()
            tops = torch.tensor(given.top_logprobs).double()
            torch.testing.assert_close(tops, best.values, atol=2e-5, rtol=1e-4)
    assert engine.logprobs([], []) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (([[3, 4]], [0]), "sequence 0 has 2 tokens and the first that is asked for is 0; expected at most the"),
        (([[3, 4]], [2]), "the first that is asked for is 2"),
        (([[3] * 65], [1]), "sequence 0 has 65 tokens"),
        (([[3, VOCAB_SIZE]], [1]), "sequence 0 has token id 128; the vocabulary is 0 to 127"),
        (([[3, 4]], [1, 1]), "2 first tokens for 1 sequences"),
        (([[3, 4]], [1], 0), "top is 0, expected 1 to 128, the vocabulary"),
    ],
)
def test_log_probs_of_impossible_tokens_are_refused(engine: RolloutEngine, arguments: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        engine.logprobs(*arguments)


def test_a_response_ends_with_the_token_that_completes_a_text(
    engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path]
) -> None:
    """Stops of several tokens, and of parts of tokens, at the first place where the response's text has one."""
    whole_text = SamplingConfig(max_new_tokens=40, ignore_eos=True, stop=("never",))
    with pytest.raises(UserError, match=r"stop is \['never'\]: .* has no tokenizer_config\.json"):
        responses_of(engine, PROMPTS, whole_text)
    directory = tiny_model_dirs[0]
    texts = [f"<{number}é" for number in range(VOCAB_SIZE)]
    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(texts)}))
    tokenizer.decoder = decoders.Fuse()
    try:
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
        greedy = whole_text.model_copy(update={"temperature": 0.0})
        ((complete,),) = responses_of(engine, PROMPTS[:1], greedy)
        assert (len(complete.token_ids), complete.finish_reason) == (40, "length")
        text = "".join(texts[token] for token in complete.token_ids)
        for start, length in ((20, 9), (30, 3), (50, 17)):
            stop = text[start : start + length]
            ends = next(
                count for count in range(1, 41) if stop in "".join(texts[token] for token in complete.token_ids[:count])
            )
            ((stopped,),) = responses_of(engine, PROMPTS[:1], greedy.model_copy(update={"stop": ("never", stop)}))
            assert stopped.finish_reason == "stop"
            assert stopped.token_ids == complete.token_ids[:ends]
            assert stopped.logprobs == pytest.approx(complete.logprobs[:ends], abs=1e-4)
            # With its last token it is whole, without it it is cut.
            for longest, reason in ((ends, "stop"), (ends - 1, "length")):
                stopping = greedy.model_copy(update={"stop": ("never", stop), "max_new_tokens": longest})
                assert responses_of(engine, PROMPTS[:1], stopping)[0][0].finish_reason == reason
            # Of a stream, where the response goes on in the middle of its stop.
            begun = Response(complete.token_ids[: ends - 1], complete.logprobs[: ends - 1], [0] * (ends - 1))
            sampling = greedy.model_copy(update={"stop": ("never", stop)})
            engine.submit([Request(0, PROMPTS[0], sampling, prefix=begun)])
            ended = engine.take_ended(60)[0]
            assert (ended.token_ids, ended.finish_reason) == (complete.token_ids[:ends], "stop")
    finally:
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            (directory / name).unlink(missing_ok=True)


def test_a_trace_has_the_next_steps_and_no_others(engine: RolloutEngine, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a trace of 0 steps of a rollout engine; expected at least 1"):
        engine.trace(tmp_path, 0)
    engine.trace(tmp_path / "traces", 4)
    assert not list(tmp_path.rglob("*.gz"))
    worker = threading.Thread(
        target=responses_of, args=(engine, PROMPTS, SamplingConfig(max_new_tokens=40, ignore_eos=True))
    )
    worker.start()
    worker.join(120)
    [trace] = (tmp_path / "traces").iterdir()
    assert trace.name == "engine-TP-0.trace.json.gz"
    steps = traced_steps(trace)
    assert len(steps) == 4 and steps[0].startswith("step[EXTEND") and steps[-1] == "step[DECODE bs=3]"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[3], []], "prompt 1 is empty"),
        ([[3], [4, VOCAB_SIZE]], "prompt 1 has token id 128; the vocabulary is 0 to 127"),
        ([[-1]], "prompt 0 has token id -1"),
        (
            [[3], [4], [5] * 53],
            "prompt 2 has 53 tokens; at most 52 leave room for max_new_tokens 12 in a context of 64",
        ),
    ],
)
def test_bad_prompts_are_refused(engine: RolloutEngine, prompts: list[list[int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        responses_of(engine, prompts, GREEDY)

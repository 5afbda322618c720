"""Responses of a stream beside a tokenizer manager that does what it is told; a real one is in `test_stream.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from engine3d.rollout import Request, SamplingConfig
from engine3d.rollout.host.messages import EndedResponses
from engine3d.rollout.host.progress import SchedulerState
from engine3d.rollout.host.stream import ResponseStream

SAMPLING = SamplingConfig(max_new_tokens=4)
NO_BATCHES: Any = None


class Manager:
    """Ends each request only when it is aborted, and aborts as SGLang does: all whose name begins so."""

    def __init__(self) -> None:
        self.is_pause_cond, self.is_pause = asyncio.Condition(), False
        self.in_flight: dict[str, asyncio.Event] = {}

    async def generate_request(self, request: Any) -> AsyncIterator[dict[str, Any]]:
        aborted = self.in_flight[request.rid] = asyncio.Event()
        await aborted.wait()
        del self.in_flight[request.rid]
        yield {"meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": []}}

    def abort_request(self, name: str) -> None:
        for other, aborted in self.in_flight.items():
            if other.startswith(name):
                aborted.set()


async def _of(samples: int) -> tuple[ResponseStream, Manager, list[Any]]:
    manager, messages = Manager(), list[Any]()
    stream = ResponseStream(manager, NO_BATCHES, messages.append, lambda: SchedulerState(), 64, None)
    stream.submit(1, [Request(sample, [3], SAMPLING) for sample in range(samples)], together=False)
    return stream, manager, messages


async def until_ended(messages: list[Any], *samples: int) -> None:
    """Wait for what is told of them, and a moment for what else is. The first of a process imports SGLang."""
    async with asyncio.timeout(60):
        while not ended(messages).keys() >= set(samples):
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)


def ended(messages: list[Any]) -> dict[int, str]:
    assert all(isinstance(message, EndedResponses) for message in messages)
    return {sample: response.finish_reason for message in messages for sample, response in message.responses.items()}


def test_what_is_given_up_before_it_begins_has_ended() -> None:
    async def main() -> tuple[dict[int, str], int]:
        stream, manager, messages = await _of(2)
        stream.abort([0])
        await until_ended(messages, 0)
        assert len(manager.in_flight) == 1
        return ended(messages), len(stream)

    assert asyncio.run(main()) == ({0: "abort"}, 1)


def test_what_is_held_back_is_given_up_at_once() -> None:
    async def main() -> dict[int, str]:
        stream, manager, messages = await _of(0)
        manager.is_pause = True
        stream.submit(2, [Request(7, [3], SAMPLING)], together=False)
        await asyncio.sleep(0.05)
        stream.abort([7])
        await until_ended(messages, 7)
        return ended(messages)

    assert asyncio.run(main()) == {7: "abort"}


def test_requests_together_that_are_held_back_are_aborted_once_all_are() -> None:
    async def main() -> dict[int, str]:
        stream, manager, messages = await _of(0)
        manager.is_pause = True
        stream.submit(2, [Request(sample, [3], SAMPLING) for sample in (7, 8)], together=True)
        await asyncio.sleep(0.05)
        stream.abort([7])
        await asyncio.sleep(0.05)
        assert not messages and len(stream) == 2
        stream.abort([8])
        await until_ended(messages, 7, 8)
        assert len(messages) == 1 and len(stream) == 0
        return ended(messages)

    assert asyncio.run(main()) == {7: "abort", 8: "abort"}


def test_no_other_is_aborted_whose_number_begins_alike() -> None:
    async def main() -> dict[int, str]:
        stream, manager, messages = await _of(30)
        while len(manager.in_flight) < 30:
            await asyncio.sleep(0.01)
        stream.abort([1, 2])
        await until_ended(messages, 1, 2)
        return ended(messages)

    assert asyncio.run(main()) == {1: "abort", 2: "abort"}

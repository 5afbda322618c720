"""Server of sessions."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any, cast

import pytest
from aiohttp import ClientSession, web

from engine3d.serving.openai_requests import ServedSampling
from hybridflow.endpoint.conversation import SessionTokens
from hybridflow.endpoint.server import SessionServer, connected
from hybridflow.endpoint.session import DrawnTokens, RefusedError, Session, SessionLimits


@pytest.mark.parametrize("content", [{"reward": 10**400}, {"reward": float("inf")}, {"reward": float("nan")}, {}, [1]])
def test_what_is_no_reward_is_refused(content: Any) -> None:
    async def report() -> None:
        session = Session(cast(SessionTokens, None), SessionLimits(1, 1), lambda *_: asyncio.Future[DrawnTokens]())
        with pytest.raises(RefusedError, match="a finite number"):
            session.report(content)
        assert not session.rewards and session.counts["refused"] == 1

    asyncio.run(report())


def test_a_body_that_cannot_be_read_is_refused() -> None:
    async def main() -> int:
        server = SessionServer(ServedSampling({}))
        await server.start()
        session = Session(cast(SessionTokens, None), SessionLimits(1, 1), lambda *_: asyncio.Future[DrawnTokens]())
        server.sessions[0] = session
        headers = {"Authorization": f"Bearer {session.key}", "Content-Encoding": "gzip"}
        async with (
            ClientSession() as client,
            client.post(f"{server.base_url(0)}/chat/completions", data=b"x", headers=headers) as response,
        ):
            status = response.status
        await server.stop()
        return status

    assert asyncio.run(main()) == 400


def test_no_body_of_a_request_is_kept_with_its_answer() -> None:
    requests: list[weakref.ref[web.Request]] = []
    waits = []

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        requests.append(weakref.ref(request))
        waits.append(connected(request))
        return web.Response(text=str(waits[-1]()))

    async def main() -> None:
        application = web.Application()
        application.router.add_post("/", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with ClientSession() as client:
            for _ in range(2):
                async with client.post(f"http://127.0.0.1:{runner.addresses[0][1]}/", data=bytes(1000)) as response:
                    assert await response.text() == "True"
        gc.collect()
        assert requests[0]() is None
        await runner.cleanup()
        assert [wait() for wait in waits] == [False, False]

    asyncio.run(main())

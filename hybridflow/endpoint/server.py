"""HTTP server of sessions: OpenAI's endpoints at `/sessions/ID/v1`, and `/sessions/ID/reward`."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from engine3d.serving.openai_requests import BadRequestError, CompletionOrder, ServedSampling, chat_order, text_order
from hybridflow.endpoint.conversation import Drawn
from hybridflow.endpoint.session import Answering, RefusedError, Session

if TYPE_CHECKING:
    from aiohttp import web

_MOST_BYTES = 1 << 24
"""Largest size of a request."""
_RETRY, _IDEMPOTENCY = "X-Stainless-Retry-Count", "Idempotency-Key"
"""Headers by which a client says that it sends a request again."""
_CLOSE_S = 5.0


class SessionServer:
    """Serves sessions at an address of this host alone. All calls are of one event loop.

    Args:
        sampling: distribution of the policy.
    """

    def __init__(self, sampling: ServedSampling) -> None:
        self._sampling = sampling
        self.sessions: dict[int, Session] = {}
        """Sessions by their id. Requests for others are refused."""
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        """Begin to listen."""
        from aiohttp import web

        application = web.Application(client_max_size=_MOST_BYTES, middlewares=[web.middleware(_errors)])
        application.add_routes(
            [
                web.post("/sessions/{id}/v1/chat/completions", self._chat),
                web.post("/sessions/{id}/v1/completions", self._text),
                web.get("/sessions/{id}/v1/models", self._models),
                web.post("/sessions/{id}/reward", self._reward),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=_CLOSE_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    def base_url(self, session: int) -> str:
        """Base URL of a session, as clients of OpenAI take it."""
        return f"http://127.0.0.1:{self._port}/sessions/{session}/v1"

    def _session(self, request: web.Request) -> Session:
        number = request.match_info["id"]
        session = self.sessions.get(int(number)) if number.isdecimal() and len(number) < 20 else None
        authorization = request.headers.get("Authorization", "").encode()
        if session is None or not hmac.compare_digest(authorization, f"Bearer {session.key}".encode()):
            raise RefusedError("no such session, or another key than its own", 401, "invalid_api_key")
        return session

    async def _models(self, request: web.Request) -> web.Response:
        from aiohttp import web

        self._session(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "hybridflow"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        from aiohttp import web

        session = self._session(request)
        session.report(await _body(request, session))
        return web.json_response({"rewards": len(session.rewards)})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, messages=True)

    async def _text(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, messages=False)

    async def _complete(self, request: web.Request, *, messages: bool) -> web.StreamResponse:
        session = self._session(request)
        body = await _body(request, session)
        try:
            order = (chat_order if messages else text_order)(body, self._sampling)
        except BadRequestError as error:
            raise session.refused(RefusedError(str(error), param=error.param)) from None
        exchange = self._exchange(request, session, body, order, messages=messages)
        drawn = await asyncio.shield(exchange.answering)
        try:
            response = await _send(request, order, drawn, messages=messages)
        except ConnectionError:
            raise RefusedError("the client is gone", 499) from None
        session.delivered += not exchange.delivered
        exchange.delivered = True
        return response

    def _exchange(
        self, request: web.Request, session: Session, body: Any, order: CompletionOrder, *, messages: bool
    ) -> Answering:
        """The exchange of a request: a new one, or the one that it repeats."""
        sent_again = request.headers.get(_IDEMPOTENCY, "")
        content = json.dumps([messages, sent_again, body], sort_keys=True)
        digest = hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()
        exchange = session.exchanges.get(digest)
        retry = bool(sent_again) or request.headers.get(_RETRY, "0") != "0"
        if exchange is not None and exchange.joined_by(retry=retry):
            session.counts["retries"] += 1
            exchange.is_waited_for = connected(request)
            return exchange
        answering = asyncio.create_task(session.complete(order, messages=messages))
        exchange = session.exchanges[digest] = Answering(answering, connected(request))
        answering.add_done_callback(lambda task: _forget_failed(session, digest, task))
        return exchange


def _forget_failed(session: Session, digest: str, task: asyncio.Task[Drawn]) -> None:
    """Leave no refusal to be repeated."""
    last = session.exchanges.get(digest)
    if last is not None and last.answering is task and (task.cancelled() or task.exception() is not None):
        del session.exchanges[digest]


def connected(request: web.Request) -> Callable[[], bool]:
    """Function that is True while the client is connected. It does not keep the request, which has its body."""
    transport = request.transport
    return lambda: transport is not None and not transport.is_closing()


async def _body(request: web.Request, session: Session) -> Any:
    from aiohttp import web

    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError, web.RequestPayloadError):
        body = None
    if not isinstance(body, dict):
        raise session.refused(RefusedError("the body is no JSON object"))
    return body


async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer refusals in OpenAI's format."""
    from aiohttp import web

    try:
        response: web.StreamResponse = await handler(request)
    except RefusedError as error:
        status, message, code, param = error.status, str(error), error.code, error.param
    except web.HTTPException as error:
        status, message, code, param = error.status, error.reason, None, None
    else:
        return response
    kind = "invalid_request_error" if status < 500 else "server_error"
    content = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return web.json_response(content, status=status)


async def _send(request: web.Request, order: CompletionOrder, drawn: Drawn, *, messages: bool) -> web.StreamResponse:
    """Send an answer, complete or in events."""
    from aiohttp import web

    number = f"{'chatcmpl' if messages else 'cmpl'}-{uuid.uuid4().hex}"
    common: dict[str, Any] = {"id": number, "created": int(time.time()), "model": order.model}
    if not order.stream:
        response = web.json_response(common | _complete_answer(drawn, messages=messages))
        await response.prepare(request)
        await response.write_eof()
        return response
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    for event in _events(drawn, messages=messages, with_usage=order.with_usage):
        await stream.write(f"data: {json.dumps(common | event)}\n\n".encode())
    await stream.write(b"data: [DONE]\n\n")
    await stream.write_eof()
    return stream


def _usage(drawn: Drawn) -> dict[str, int]:
    return {
        "prompt_tokens": drawn.context_tokens,
        "completion_tokens": drawn.tokens,
        "total_tokens": drawn.context_tokens + drawn.tokens,
    }


def _complete_answer(drawn: Drawn, *, messages: bool) -> dict[str, Any]:
    content = {"message": drawn.message} if messages else {"text": drawn.content or ""}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": drawn.finish_reason}
    kind = "chat.completion" if messages else "text_completion"
    return {"object": kind, "choices": [choice], "usage": _usage(drawn)}


def _events(drawn: Drawn, *, messages: bool, with_usage: bool) -> Iterator[dict[str, Any]]:
    """The events of an answer: its text, its calls, its end."""
    kind = "chat.completion.chunk" if messages else "text_completion"

    def event(content: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        field = {"delta": content} if messages else content
        choice = {"index": 0, **field, "logprobs": None, "finish_reason": finish_reason}
        return {"object": kind, "choices": [choice]}

    if not messages:
        yield event({"text": drawn.content or ""})
        yield event({"text": ""}, drawn.finish_reason)
    else:
        yield event({"role": "assistant", "content": drawn.content})
        for number, call in enumerate(drawn.tool_calls):
            yield event({"tool_calls": [{"index": number, **call}]})
        yield event({}, drawn.finish_reason)
    if with_usage:
        yield {"object": kind, "choices": [], "usage": _usage(drawn)}

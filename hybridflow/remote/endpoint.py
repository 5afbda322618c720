"""URLs of one service that JSON is posted to: limits of time, size and requests in flight, and retries.

Failures that may pass are retried: no connection, a lost one, no answer in time, 429 and 5xx. The waits double, each
randomly down to half of it, and are at least as long as the server asks for (Retry-After). Any other status means that
the request is wrong, and is a failure at once.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator

from engine3d.errors import shortened
from engine3d.settings import LONGEST_S, Settings

if TYPE_CHECKING:
    import httpx

_SHOWN = 200
"""Characters of a server's answer in a message."""
_IDLE_S = 20.0
"""Seconds that a connection without requests is kept. Servers close theirs after a minute or so."""


class RequestError(Exception):
    """No answer that can be used. The message is one line, which names the URL."""


class _PassingError(Exception):
    """A failure that may pass. `wait_s`: least wait before a retry, in seconds, if the server sets one."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class EndpointSettings(Settings):
    """Arguments of everything that asks a server."""

    url: str | tuple[str, ...]
    """URL to post to, with its scheme. Several serve the same, and a request goes to the one with the fewest in flight.
    """
    api_key_variable: str | None = Field(default=None, min_length=1)
    """The environment variable that holds the key, which is sent as `Authorization: Bearer ...`; `environment` of the
    function has to name it. The key itself stands nowhere."""
    in_flight: int = Field(default=16, ge=1, le=4096)
    """Most requests at a time, of each worker."""
    request_timeout_s: float = Field(default=60.0, gt=0, le=LONGEST_S)
    """Limit of each request, in seconds."""
    retries: int = Field(default=4, ge=0, le=100)
    """Retries of a request."""
    backoff_s: float = Field(default=0.5, gt=0, le=LONGEST_S)
    """Wait before the first retry, in seconds; twice as long before each further one."""
    longest_wait_s: float = Field(default=30.0, gt=0, le=LONGEST_S)
    """Longest wait, in seconds. A request whose server asks for a longer one fails."""

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the settings, as a tuple."""
        return (self.url,) if isinstance(self.url, str) else tuple(self.url or ())

    @field_validator("url")
    @classmethod
    def _check_urls(cls, given: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        urls = (given,) if isinstance(given, str) else given or ()
        if given is not None and (not urls or len(set(urls)) != len(urls)):
            raise ValueError(f"{list(urls)}, expected at least one, each once")
        for url in urls:
            cls._check_url(url)
        return given

    @staticmethod
    def _check_url(url: str) -> None:
        try:
            split = urlsplit(url)
            complete = split.scheme in ("http", "https") and split.hostname and split.port != 0
        except ValueError as error:
            raise ValueError(f"{url!r}: {error}, expected http://HOST/... or https://HOST/...") from None
        if not complete or any(character.isspace() for character in url):
            raise ValueError(f"{url!r}, expected http://HOST/... or https://HOST/...")
        if "@" in split.netloc or split.query or split.fragment:
            raise ValueError("has a user, a query or a fragment, expected none: a key is named by api_key_variable")


def silent_urls(urls: Sequence[str], within_s: float = 3.0) -> dict[str, str]:
    """URLs at whose host and port nothing accepts a connection from this host, and the reason for each.

    Args:
        urls: as `EndpointSettings` takes them.
        within_s: limit of each connection, in seconds. All are tried at the same time.
    """
    reasons: dict[str, str] = {}

    def connect(url: str) -> None:
        split = urlsplit(url)
        assert split.hostname is not None
        port = split.port or (443 if split.scheme == "https" else 80)
        try:
            socket.create_connection((split.hostname, port), timeout=within_s).close()
            del reasons[url]
        except OSError as error:
            reasons[url] = error.strerror or str(error)

    threads = [threading.Thread(target=connect, args=(url,), daemon=True) for url in urls]
    reasons |= dict.fromkeys(urls, f"no answer within {within_s:g} s")
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + within_s
    for thread in threads:  # the name of a host may be looked up for longer
        thread.join(max(0.0, deadline - time.monotonic()))
    return {url: reasons[url] for url in urls if url in reasons}


def settings_of[Kind: Settings](kind: type[Kind], arguments: dict[str, Any]) -> Kind:
    """The settings that arguments make. Raises ValueError with one line, without values, which might be keys."""
    try:
        return kind.model_validate(arguments)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        reason = str(first.get("ctx", {}).get("error") or first["msg"])
        if first["type"] == "extra_forbidden":
            reason = f"no such argument, expected of {', '.join(kind.model_fields)}"
        raise ValueError(" ".join(f"{name}: {reason}".removeprefix(": ").split())) from None


@dataclass
class RequestCounts:
    """Requests that a sample has cost so far, failed or not."""

    requests: int = 0
    retries: int = 0


class Endpoint:
    """The URL. Its methods are for the event loop that it is opened in.

    Args:
        settings: of requests.
        path: that stands behind the URL of the settings.
    """

    def __init__(self, settings: EndpointSettings, path: str = "") -> None:
        self._urls = [url.rstrip("/") + path if path else url for url in settings.urls]
        self.url = " or ".join(self._urls)
        """As messages name it."""
        self._busy = dict.fromkeys(self._urls, 0)
        self._shunned = dict.fromkeys(self._urls, 0.0)
        """Time until which a URL that has just failed is avoided if there is another."""
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.in_flight)
        self._client: httpx.AsyncClient | None = None
        self._key = ""

    def read_key(self) -> None:
        """Read the key from the environment. Raises ValueError if the variable is not set."""
        name = self._settings.api_key_variable
        if name is not None:
            self._key = os.environ.get(name, "").strip()
            if not self._key:
                raise ValueError(f"the environment variable {name} (api_key_variable) is not set")
            if not self._key.isascii() or not self._key.isprintable():
                raise ValueError(f"the environment variable {name} (api_key_variable) holds what is no key")

    @property
    def slots(self) -> asyncio.Semaphore:
        """Slots of requests in flight. A caller of `post` holds one."""
        return self._slots

    async def post(self, content: dict[str, Any], tally: RequestCounts, most_bytes: int) -> Any:
        """Post JSON, and return the JSON of the server's answer.

        Args:
            content: to be posted.
            tally: counts requests and retries.
            most_bytes: of an answer.

        Raises:
            RequestError: no answer, after all retries, or one that is no JSON.
        """
        body = json.dumps(content).encode()
        limit = self._settings
        for number in range(limit.retries + 1):
            tally.requests += 1
            url = self._next_url()
            self._busy[url] += 1
            try:
                return await self._once(url, body, most_bytes)
            except _PassingError as error:
                tries = f", {number + 1} times" if number else ""
                self._shunned[url] = time.monotonic() + limit.longest_wait_s
                if number == limit.retries:
                    raise RequestError(f"{url} {error}{tries}") from None
                if error.wait_s > limit.longest_wait_s:
                    wait = f"asks to wait {error.wait_s:g} s, longer than longest_wait_s={limit.longest_wait_s:g}"
                    raise RequestError(f"{url} {error}{tries}, and {wait}") from None
                longest_s = min(limit.backoff_s * 2.0**number, limit.longest_wait_s)
                tally.retries += 1
                wait_s = max(error.wait_s, longest_s * random.uniform(0.5, 1.0))
            finally:
                self._busy[url] -= 1
            await asyncio.sleep(wait_s)
        raise AssertionError

    async def close(self) -> None:
        """Close its connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def _next_url(self) -> str:
        """URL with the fewest requests in flight, of those that have not just failed."""
        now = time.monotonic()
        return min(self._urls, key=lambda url: (self._shunned[url] > now, self._busy[url]))

    async def _once(self, url: str, body: bytes, most_bytes: int) -> Any:
        import httpx

        if self._client is None:
            self._client = self._open()
        limit_s = self._settings.request_timeout_s
        try:
            async with (
                asyncio.timeout(limit_s),
                self._client.stream("POST", url, content=body, headers=self._headers()) as response,
            ):
                answer = await self._read(url, response, most_bytes)
        except TimeoutError:
            raise _PassingError(f"did not answer within {limit_s:g} s (request_timeout_s)") from None
        except httpx.TransportError as error:
            raise _PassingError(f"could not be reached: {type(error).__name__}: {self._shown(str(error))}") from None
        except httpx.HTTPError as error:
            raise RequestError(f"{url}: {type(error).__name__}: {self._shown(str(error))}") from None
        status = response.status_code
        said = f"answered with status {status}: {self._shown(answer.decode(errors='replace'))}"
        if status == 429 or status >= 500:
            raise _PassingError(said, _retry_after_s(response.headers.get("retry-after", "")))
        if not 200 <= status < 300:
            raise RequestError(f"{url} {said}")
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            raise RequestError(f"{url} {said}, expected JSON") from None

    async def _read(self, url: str, response: httpx.Response, most_bytes: int) -> bytes:
        body = bytearray()
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > most_bytes:
                raise RequestError(f"{url} answered with more than {most_bytes} bytes")
        return bytes(body)

    def _open(self) -> httpx.AsyncClient:
        import httpx

        most = self._settings.in_flight
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=most, keepalive_expiry=_IDLE_S)
        # Certificates are loaded only for https, since that takes a while. Redirects are not followed.
        checked = any(urlsplit(url).scheme == "https" for url in self._urls)
        return httpx.AsyncClient(timeout=self._settings.request_timeout_s, limits=limits, verify=checked)

    def _headers(self) -> dict[str, str]:
        json_type = {"Content-Type": "application/json"}
        return json_type | ({"Authorization": f"Bearer {self._key}"} if self._key else {})

    def _shown(self, text: str) -> str:
        """A server's words in a message: one line of them, and never the key."""
        if self._key:
            text = text.replace(self._key, "<key>")
        return shortened(" ".join(text.split()), _SHOWN) or "nothing"


def _retry_after_s(value: str) -> float:
    """Seconds of a header Retry-After, in seconds or as a date; 0 for what is neither."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return 0.0
        seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp()
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


class Deadline:
    """End of a call, a little before its limit, so that finished values are not lost with it."""

    _SHARE = 0.95

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._at = time.monotonic() + limit_s * self._SHARE

    @property
    def left_s(self) -> float:
        """Seconds left. Negative past the deadline."""
        return self._at - time.monotonic()

    def __str__(self) -> str:
        return f"{self._limit_s:g} s (timeout_s)"

"""Texts at which a response ends, in an engine that works in token ids.

SGLang looks for its own stop strings only where it has a tokenizer, in a window as long as the tokens into which the
tokenizer would cut the string: it misses one that was drawn in more of them. Here a response ends with the first token
by which its text contains a stop, whatever the tokens; that token and its log-prob are the response's last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

PARAMETER = "engine3d_stop"
"""The stops of a request, in SGLang's `SamplingParams.custom_params`."""

BEFORE = "engine3d_before"
"""Key of the last tokens of a continued response, with which a stop may begin; there, too."""

_MARGIN_TOKENS = 4
"""Before the tokens that a stop may consist of: decoders treat the first token of a text in ways of their own."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def window(stops: Sequence[str]) -> int:
    """Tokens at the end of a response within which a stop that is complete there begins."""
    return max(len(stop.encode()) for stop in stops) + _MARGIN_TOKENS


class TextStops:
    """Finds stops in responses.

    Args:
        decode: the text of some tokens, special ones included.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._text_of = lru_cache(maxsize=1 << 18)(lambda token: decode([token]))

    def completed_stop(self, tokens: Sequence[int], stops: Sequence[str]) -> str | None:
        """The stop that the last of a response's tokens has completed, if it has."""
        candidates = [stop for stop in stops if self._may_complete(tokens[-1], stop)]
        if not candidates:
            return None
        text = self._decode(list(tokens[-window(candidates) :]))
        return next((stop for stop in candidates if stop in text), None)

    def _may_complete(self, token: int, stop: str) -> bool:
        """True if a token may end in a stop's last character: most do not, and no text need be made of them."""
        text = self._text_of(token)
        return stop[-1].isspace() or stop[-1] in text or _INCOMPLETE in text


@cache
def text_stops(directory: Path) -> TextStops:
    """Text stops with the tokenizer of a model directory."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    return TextStops(
        lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    )


def check_text_stops(result: None, request: Any, *args: Any, **kwargs: Any) -> None:
    """After SGLang's `Req.__init__`: check a request that has text stops for them in each step.

    Others keep SGLang's own check. It runs for every request in every step, and a hook around it took 0.5 us each time.
    """
    if (request.sampling_params.custom_params or {}).get(PARAMETER):
        request.__class__ = _request_with_stops()


@cache
def _request_with_stops() -> type:
    from sglang.srt.managers.schedule_batch import Req

    class RequestWithStops(Req):
        def _check_str_based_finish(self, *args: Any, **kwargs: Any) -> bool:
            return bool(super()._check_str_based_finish(*args, **kwargs)) or _end_at_text(self)

    return RequestWithStops


def _end_at_text(request: Any) -> bool:
    """End a request at its text stops; True if it has ended."""
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR
    from sglang.srt.runtime_context import get_server_args

    before = request.sampling_params.custom_params.get(BEFORE)
    tokens = [*before, *request.output_ids] if before else request.output_ids
    stops = request.sampling_params.custom_params[PARAMETER]
    stop = text_stops(Path(get_server_args().model_path)).completed_stop(tokens, stops)
    if stop is None:
        return False
    request.finished_reason = FINISH_MATCHED_STR(matched=stop)
    request.finished_len = len(request.output_ids)
    return True


def check_last_tokens(*_: Any, **__: Any) -> None:
    """After SGLang's `Scheduler.__init__`: cut or abort a request only if its last token does not end it.

    SGLang looks at the length first: a response whose end comes with the last token that `max_new_tokens` allows would
    be reported as cut. It also looks whether the response is to be aborted: one that has just ended would be sent
    again with its end in it, and continue behind that.
    """
    from sglang.srt.managers.schedule_batch import Req

    Req.update_finish_state = updated_with_last_token(Req.update_finish_state)


def updated_with_last_token(update: Callable[[Any, int], None]) -> Callable[..., None]:
    """Return SGLang's `Req.update_finish_state` with the last token's end before length and abortion.

    A function of its own in place of a hook: it runs for every request in every step.
    """

    def update_finish_state(request: Any, new_accepted_len: int = 1) -> None:
        if request.finished_reason is not None:
            return
        if new_accepted_len > 1:
            _end_within_pass(update, request, new_accepted_len)
            return
        update(request, new_accepted_len)
        if request.finished_reason is not None:
            _end_at_last_token(request)

    return update_finish_state


def _end_within_pass(update: Callable[[Any, int], None], request: Any, drawn: int) -> None:
    """Look at each of the `drawn` tokens of one forward pass: the first that ends the request is its last."""
    tokens = request.output_ids
    for count in range(len(tokens) - drawn + 1, len(tokens) + 1):
        request.output_ids = tokens[:count]
        update(request, 1)
        if request.finished_reason is not None:
            _end_at_last_token(request)
            request.finished_len = count
            break
    request.output_ids = tokens


def _end_at_last_token(request: Any) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH

    reason = request.finished_reason
    if isinstance(reason, FINISH_ABORT) and reason.status_code is None and request.output_ids:
        request.finished_reason = None
        if not (request._check_str_based_finish() or request._check_token_based_finish(request.output_ids[-1:])):
            request.finished_reason = reason
        return
    if not isinstance(reason, FINISH_LENGTH):
        return
    longest = request.finished_len
    if request._check_str_based_finish() or request._check_token_based_finish(
        request.output_ids[longest - 1 : longest]
    ):
        request.finished_len = longest

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


def end_at_text(check: Callable[..., bool], request: Any, *args: Any, **kwargs: Any) -> bool:
    """Around SGLang's `Req._check_str_based_finish`: end a request at its text stops."""
    if check(request, *args, **kwargs):
        return True
    stops = (request.sampling_params.custom_params or {}).get(PARAMETER)
    if not stops:
        return False
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR
    from sglang.srt.runtime_context import get_server_args

    before = request.sampling_params.custom_params.get(BEFORE)
    tokens = [*before, *request.output_ids] if before else request.output_ids
    stop = text_stops(Path(get_server_args().model_path)).completed_stop(tokens, stops)
    if stop is None:
        return False
    request.finished_reason = FINISH_MATCHED_STR(matched=stop)
    request.finished_len = len(request.output_ids)
    return True


def end_at_last_token(update: Callable[..., None], request: Any, drawn: int = 1) -> None:
    """Around SGLang's `Req.update_finish_state`: a request is cut or aborted only if its last token does not end it.

    Of several tokens of one forward pass the first that ends the request is its last.

    SGLang looks at the length first: a response whose end comes with the last token that `max_new_tokens` allows would
    be reported as cut. It also looks whether the response is to be aborted: one that has just ended would be sent
    again with its end in it, and continue behind that.
    """
    if drawn == 1:
        _end_at_last_token(update, request)
        return
    tokens = request.output_ids
    for count in range(len(tokens) - drawn + 1, len(tokens) + 1):
        request.output_ids = tokens[:count]
        _end_at_last_token(update, request)
        if request.finished():
            request.finished_len = count
            break
    request.output_ids = tokens


def _end_at_last_token(update: Callable[..., None], request: Any) -> None:
    if request.finished():
        return
    update(request)
    aborted = request.finished_reason
    if aborted is None:  # nearly always; this is asked of every request in every step
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH

    if isinstance(aborted, FINISH_ABORT) and aborted.status_code is None and request.output_ids:
        request.finished_reason = None
        if not (request._check_str_based_finish() or request._check_token_based_finish(request.output_ids[-1:])):
            request.finished_reason = aborted
        return
    if not isinstance(request.finished_reason, FINISH_LENGTH):
        return
    longest = request.finished_len
    if request._check_str_based_finish() or request._check_token_based_finish(
        request.output_ids[longest - 1 : longest]
    ):
        request.finished_len = longest

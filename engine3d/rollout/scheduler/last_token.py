"""A token that ends a response, where SGLang does not look whether it does.

It looks at the length first: a response whose end comes with the last token that `max_new_tokens` allows would be told
as one that was cut. And it looks whether the response is to be aborted: one that has just ended would be sent again
with its end in it, and continue behind that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def end_at_last_token(update: Callable[..., None], request: Any, *args: Any, **kwargs: Any) -> None:
    """Around SGLang's `Req.update_finish_state`: it is cut or aborted only if its last token does not end it."""
    if request.finished():
        return
    update(request, *args, **kwargs)
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

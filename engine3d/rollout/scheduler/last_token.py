"""The last token that a response may have, where that token ends it.

SGLang looks at the length first: a response whose end comes with the last token that `max_new_tokens` allows would be
told as one that was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def end_at_last_token(update: Callable[..., None], request: Any, *args: Any, **kwargs: Any) -> None:
    """Around SGLang's `Req.update_finish_state`: a response is cut only if its last token does not end it."""
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    if request.finished():
        return
    update(request, *args, **kwargs)
    if not isinstance(request.finished_reason, FINISH_LENGTH):
        return
    longest = request.finished_len
    if request._check_str_based_finish() or request._check_token_based_finish(
        request.output_ids[longest - 1 : longest]
    ):
        request.finished_len = longest

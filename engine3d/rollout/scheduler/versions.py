"""Version of the weights that drew each token, noted by the forward pass that drew it.

SGLang passes on, with each token, what a forward pass leaves in `customized_info` of its output. The version is noted
when the pass is launched: a token whose result is read after weights have changed is of the weights that made it.
"""

from __future__ import annotations

from typing import Any

VERSIONS_VARIABLE = "ENGINE3D_ROLLOUT_TOKEN_VERSIONS"
"""Environment variable that is set where tokens have versions."""
VERSIONS = "engine3d_versions"
"""Key of a response's versions in its `meta_info`: one for each token."""


def note_version(result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """After SGLang's `Scheduler.run_batch`: every token that the pass draws is of the version that is served."""
    output = getattr(result, "logits_output", None)
    if output is not None:
        version = scheduler.tp_worker.model_runner.engine3d_rank.version
        output.customized_info = {**(output.customized_info or {}), VERSIONS: [version] * len(batch.reqs)}

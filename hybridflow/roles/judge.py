"""Judge model served by SGLang, which reward functions call over HTTP from any host."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from engine3d.errors import EngineError
from engine3d.serving import CompletionServer, ServerConfig
from hybridflow.rundir.status.watching import JUDGE_SERVERS
from hybridflow.workers.context import WorkerContext
from hybridflow.workers.protocols import ONE_TO_ALL, register

KEY_VARIABLE = "HYBRIDFLOW_JUDGE_KEY"
"""Environment variable with the servers' key, for the functions that call them."""
_LOOK_EVERY_S = 1.0


class JudgeWorker:
    """One server of a judge model. The ranks of its group are several servers. One that dies is restarted.

    Args:
        directory: HuggingFace directory of the judge.
        config: of every server.
        key: of requests.
        restarts: most restarts.
    """

    def __init__(
        self, context: WorkerContext, directory: Path, config: ServerConfig, *, key: str, restarts: int
    ) -> None:
        import ray.util

        path = context.log_path
        self._server = CompletionServer(
            directory,
            config,
            key=key,
            address=ray.util.get_node_ip_address(),
            devices=context.devices,
            log_path=path.with_name(f"{JUDGE_SERVERS}-{context.rank}.log") if path is not None else None,
        )
        self._restarts_left, self._restarts = restarts, 0
        self._failure: EngineError | None = None
        self._ending = threading.Event()
        self._watch = threading.Thread(target=self._keep_up, name="judge", daemon=True)

    @register(ONE_TO_ALL)
    def start(self) -> str:
        """Start the server and wait until it generates. Return its URL, before `/chat/completions`."""
        self._server.start()
        self._watch.start()
        return self._server.url

    @register(ONE_TO_ALL)
    def check(self) -> int:
        """Return how often the server was restarted. Raises EngineError once it has died more often than it may."""
        if self._failure is not None:
            raise self._failure
        return self._restarts

    def _keep_up(self) -> None:
        try:
            self._start_again()
        except Exception as error:  # nobody else would hear of it
            self._failure = EngineError(f"judge: {type(error).__name__}: {' '.join(str(error).split())}")

    def _start_again(self) -> None:
        """Restart the server whenever it has died, as often as it may, until `shutdown`."""
        while not self._ending.wait(_LOOK_EVERY_S):
            if self._server.is_alive:
                continue
            try:
                self._server.check()
            except EngineError as error:
                if self._ending.is_set():
                    return
                if not self._restarts_left:
                    self._failure = EngineError(
                        f"{error}; it was started again {self._restarts} times (judge.restarts)"
                    )
                    return
                print(f"{error}; starting it again", file=sys.stderr)
            self._restarts_left -= 1
            self._restarts += 1
            try:
                self._server.start()
            except (EngineError, OSError) as error:  # a full disk, no memory: the next look counts it as a death
                print(error, file=sys.stderr)

    def shutdown(self) -> None:
        """End the server's processes."""
        self._ending.set()
        self._server.shutdown()
        if self._watch.is_alive():
            self._watch.join(_LOOK_EVERY_S)
            self._server.shutdown()  # the thread may have restarted it meanwhile

"""The client of an SGLang server: start it, see whether it is there, start it again, end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from engine3d.errors import EngineError, UserError
from engine3d.platform import platform
from engine3d.rollout.cache import PAGE_TOKENS, tokens_needed
from engine3d.rollout.host.log import describe_death, temporary_log
from engine3d.rollout.host.process import run_environment
from engine3d.rollout.launch import server_environment
from engine3d.rollout.scheduler.plugin import ALONE_VARIABLE
from engine3d.run_files import make_run_directory, remove_run_files
from engine3d.serving.config import ServerConfig
from engine3d.serving.model import ServedModel

_ASK_EVERY_S = 0.5
_ANSWER_S = 30.0


class CompletionServer:
    """An SGLang server of OpenAI's endpoints in processes of its own, which end with this one.

    Methods may be called from several threads.

    Args:
        model_dir: HuggingFace directory of the model, with its tokenizer.
        config: of the server.
        key: that every request has to bring, as `Authorization: Bearer ...`.
        address: where it listens: an address of this host.
        devices: to use on this host, by index among those that this process sees; empty for all of them.
        log_path: where all that its processes print goes; a temporary file, kept when they die, if None.

    Raises:
        UserError: the directory is not one of a model with a tokenizer, or the devices are not `config.tp`.
    """

    def __init__(
        self,
        model_dir: str | Path,
        config: ServerConfig,
        *,
        key: str,
        address: str = "127.0.0.1",
        devices: Sequence[int] = (),
        log_path: str | Path | None = None,
    ) -> None:
        self._model = ServedModel.of(Path(model_dir).resolve(), config)
        if devices and len(devices) != config.tp:
            raise UserError(f"{len(devices)} devices for a server of tp {config.tp}")
        self.config = config
        self._key, self._address, self._devices = key, address, tuple(devices)
        self._log_path = Path(log_path) if log_path is not None else None
        self._port = 0
        self._reserved_port: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._run_directory: tuple[Path, IO[bytes]] | None = None
        self._turn = threading.Lock()

    @property
    def url(self) -> str:
        """Before `/chat/completions`; the same after a restart."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"http://{host}:{self._port}/v1"

    @property
    def log_path(self) -> Path | None:
        """Log file of the server's processes; None before `start` where no path was given."""
        return self._log_path

    def start(self) -> Self:
        """Start it, and wait until it generates; again after it has died, at the same address.

        Raises:
            EngineError: it died, or did not generate within `start_timeout_s`. Nothing is left of it but its port,
                which it keeps for another start until `shutdown`.
        """
        with self._turn:
            if self.is_alive:
                raise UserError("the server was started already")
            self._bury()
            if self._reserved_port is None:
                self._reserved_port = _reserve_port(self._address)
                self._port = self._reserved_port.getsockname()[1]
            if self._log_path is None:
                self._log_path = temporary_log("server")
            process = self._process = self._launch(self._log_path)
        try:
            self._wait_until_up(process)
        except BaseException:
            self.kill()
            raise
        return self

    def _launch(self, log_path: Path) -> subprocess.Popen[bytes]:
        directory, _ = self._run_directory = make_run_directory()
        environment = server_environment(self.config.tp, self._model.architectures, self._devices)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine3d.serving.program"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment | run_environment(directory, log_path) | {ALONE_VARIABLE: "1"},
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end says why
            process.stdin.write(json.dumps({"client": os.getpid(), "arguments": self._arguments()}).encode() + b"\n")
            process.stdin.flush()
        return process

    def _arguments(self) -> dict[str, Any]:
        """Arguments of `ServerArgs`: ours, then what the platform needs, then what the user gave for SGLang."""
        config, model = self.config, self._model
        arguments: dict[str, Any] = {
            "model_path": str(model.directory),
            "host": self._address,
            "port": self._port,
            "api_key": self._key,
            "tp_size": config.tp,
            "ep_size": config.ep,
            "dtype": config.dtype,
            "mem_fraction_static": config.mem_fraction_static,
            "max_running_requests": config.max_running_requests,
            "disable_cuda_graph": not config.cuda_graph,
            "skip_server_warmup": True,
            "log_level": "info",
        }
        if model.context_length is not None:
            arguments["context_length"] = model.context_length
            arguments["max_total_tokens"] = config.max_total_tokens or tokens_needed(
                requests=config.max_running_requests,
                sequence_tokens=model.context_length,
                page_tokens=PAGE_TOKENS[platform.device_type],
            )
        elif config.max_total_tokens is not None:
            arguments["max_total_tokens"] = config.max_total_tokens
        arguments |= platform.rollout_server_arguments(config.max_running_requests)
        arguments |= platform.grammar_arguments()
        if model.overrides:
            arguments["json_model_override_args"] = json.dumps(model.overrides)
        return arguments | config.server_args

    def _wait_until_up(self, process: subprocess.Popen[bytes]) -> None:
        limit_s = self.config.start_timeout_s
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if not self.is_alive:
                self.kill()
                raise EngineError(f"SGLang server died during start: {self._death()}")
            if self._answers():
                return
            time.sleep(_ASK_EVERY_S)
        raise EngineError(f"SGLang server did not generate within {limit_s:g} s; log: {self._log_path}")

    def _answers(self) -> bool:
        """True if it has just generated a token, or is generating."""
        url = f"{self.url.removesuffix('/v1')}/health_generate"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=_ANSWER_S) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    @property
    def is_alive(self) -> bool:
        """True while its process runs, even if it is busy or stuck."""
        if self._process is None or self._process.returncode is not None:
            return False
        try:  # it is not reaped here, so that its process group stays its own
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
        except ChildProcessError:
            return False

    def check(self) -> None:
        """Raise EngineError, in one line, if it is not there."""
        if not self.is_alive:
            self.kill()
            raise EngineError(f"SGLang server died: {self._death()}")

    def _death(self) -> str:
        if self._process is None or self._log_path is None:
            return "it was not started"
        return describe_death(self._process.returncode or 0, self._log_path)

    def shutdown(self) -> None:
        """End it and everything that it started, by force after `shutdown_timeout_s`. Idempotent."""
        deadline = time.monotonic() + self.config.shutdown_timeout_s
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # by which it ends itself
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._turn:
            self._bury()
            if self._reserved_port is not None:
                self._reserved_port.close()
                self._reserved_port = None

    def kill(self) -> None:
        """Kill it with all of its group, and remove its temporary files. Idempotent."""
        with self._turn:
            self._bury()

    def _bury(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # before it is reaped the group's id is its own
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
        if self._run_directory is not None:
            directory, lock = self._run_directory
            remove_run_files(directory)
            lock.close()
            self._run_directory = None

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.shutdown()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()


def _reserve_port(address: str) -> socket.socket:
    """Bind a socket to a free port, so that no process that asks for any port gets it, between two starts either.

    SGLang's own socket may be bound to it: both have SO_REUSEADDR, and this one does not listen.
    """
    port_socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    port_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port_socket.bind((address, 0))
    port_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # which a port of network.ports is bound without
    return port_socket

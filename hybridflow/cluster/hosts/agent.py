"""One host's side of a launch: joins the supervisor, starts Ray's servers here when it says so, and ends with the run.

The agent of host 0 is the supervisor too. An agent ends all that it has started when the run is over, when the
supervisor is lost, or when it is killed itself, by the watchdog of what it has started.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from engine3d.errors import EngineError, UserError, first_line
from hybridflow.cluster.devices.nvml import visible_gpus
from hybridflow.cluster.hosts.channel import Channel, ChannelError, Message, WrongTokenError, connect
from hybridflow.cluster.hosts.checks.facts import software_digest
from hybridflow.cluster.hosts.description import Host, HostRole
from hybridflow.cluster.hosts.launch_plan import LaunchPlan
from hybridflow.cluster.hosts.network.interfaces import Interface, interface_with
from hybridflow.cluster.hosts.network.network_settings import PORTS_OF_A_HOST, settings_in_force
from hybridflow.cluster.hosts.run_token import derived
from hybridflow.cluster.hosts.supervisor import BEAT_S, Supervisor, say
from hybridflow.cluster.processes.termination import SAVE
from hybridflow.cluster.ray.ray_host import RayHost, check_authentication, set_ray_defaults
from hybridflow.errors.log import log

_ATTEMPT_S = 5.0
_SHORT_HASH = 8
_AGAIN_S = 0.5
_SAY_EVERY_S = 10.0
# A scheduler and the script that it runs may both pass on the same signal, which is not impatience.
_SAME_SIGNAL_S = 3.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, SAVE)
_RAY = "ray"
"""The use of the run's token that Ray's is derived for."""


@dataclass(frozen=True)
class Assignment:
    """A host of a launch as its launcher describes it.

    Args:
        index: of this host, from 0.
        head: host name or address of host 0, as the others reach it.
        port: at which host 0 listens; 0 for any, where the launcher can tell the others.
        address: of this host in the cluster's network; None for the one that routes to `head`.
        interface: network interface that has the address; None if nobody has named it.
        role: of this host; None for any.
        cpu_slots: of this host; None for one a core.
    """

    index: int
    head: str
    port: int
    address: str | None = None
    interface: str | None = None
    role: HostRole | None = None
    cpu_slots: int | None = None


class Agent:
    """The agent of this host.

    Args:
        assignment: of this host in the launch.
        plan: of the launch, the same on every host.
        token: of the run.
    """

    def __init__(self, assignment: Assignment, plan: LaunchPlan, token: str) -> None:
        self._assignment, self._plan, self._token = assignment, plan, token
        self._limits = plan.limits
        self._channel: Channel | None = None
        self._supervisor: Supervisor | None = None
        self._ray: RayHost | None = None
        self._changing = ThreadPoolExecutor(1, "ray")
        """Starts and stops Ray, one after the other."""
        self._signal: int | None = None
        self._signals: dict[int, float] = {}

    def run(self, announce: Callable[[int], object] | None = None) -> int:
        """Take part in the launch until it is over; the exit code, which no signal changes from then on.

        Args:
            announce: is called with the port at which host 0 listens, on host 0.

        Raises:
            UserError: this host cannot take part.
        """
        try:
            return asyncio.run(self._run(announce))
        finally:
            # The event loop has put the defaults back: a signal that comes late would be this process's exit code.
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    async def _run(self, announce: Callable[[int], object] | None) -> int:
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)
        code = await self.participate(announce)
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until they are ignored
        return code

    async def participate(self, announce: Callable[[int], object] | None = None) -> int:
        """Take part as `run`, in an event loop that other agents may share: signals are ignored."""
        self._loop = asyncio.get_running_loop()
        port, supervising = self._assignment.port, None
        if self._assignment.index == 0:
            listening = _listening(self._assignment.address or self._assignment.head, self._assignment.port)
            port = listening.getsockname()[1]
            self._supervisor = Supervisor(self._plan, self._token)
            supervising = asyncio.create_task(self._supervisor.run(listening))
            if announce is not None:
                await asyncio.to_thread(announce, port)
        try:
            code = await self._take_part(port)
        finally:
            await self._loop.run_in_executor(self._changing, self.stop_ray)
            if self._channel is not None:
                await self._channel.close()
        return code if supervising is None else await supervising

    async def _take_part(self, port: int) -> int:
        try:
            self._channel = channel = await self._connected(port)
        except EngineError as error:
            return _said(1 if self._signal is None else 128 + self._signal, str(error))
        channel.send("hello", **await asyncio.to_thread(self._hello, channel.address))
        beating = asyncio.create_task(self._beat(channel))
        try:
            while True:
                async with asyncio.timeout(self._limits.host_s):
                    message = await channel.receive()
                if message["kind"] == "end":
                    # Host 0 has said it as the supervisor.
                    return _said(message["code"], None if self._supervisor is not None else message["lines"])
                if message["kind"] == "ray":
                    self._changing.submit(self._change_ray, message["cpus"], message["gcs_address"])
        except ChannelError as error:
            return _said(1, f"host 0 ({self._assignment.head}) is gone: {error}")
        except TimeoutError:
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - self._limits.host_s))
            limit = f"limits.host_s={self._limits.host_s:g}"
            return _said(1, f"host 0 ({self._assignment.head}) gives no sign of life since {since} ({limit})")
        finally:
            beating.cancel()

    async def _connected(self, port: int) -> Channel:
        begin = said = time.monotonic()
        local = (self._assignment.address, 0) if self._assignment.address and self._assignment.index else None
        where = f"host 0 at {self._assignment.head}:{port}"
        while True:
            try:
                return await connect(self._assignment.head, port, self._token, _ATTEMPT_S, local)
            except WrongTokenError:
                raise UserError(f"{where} has another token than this host; expected the same on every host") from None
            except socket.gaierror as error:
                why = f"{self._assignment.head} does not resolve on this host ({error.strerror})"
            except (ChannelError, OSError) as error:
                why = getattr(error, "strerror", None) or str(error)
            if self._signal is not None:
                raise EngineError(f"{signal.Signals(self._signal).name} while waiting for {where}")
            now = time.monotonic()
            if now - begin > self._limits.gather_s:
                through = "" if local is None else f" from {self._assignment.address} ({self._assignment.interface})"
                raise EngineError(f"{where} was not reached{through} within {self._limits.gather_s:g} s: {why}")
            if now - said > _SAY_EVERY_S:
                said = now
                log.info(f"waiting for {where}, for {now - begin:.0f} s: {why}")
            await asyncio.sleep(_AGAIN_S)

    def _hello(self, address: str) -> Message:
        """Description of this host for the supervisor."""
        assignment, plan = self._assignment, self._plan
        host = Host(
            index=assignment.index,
            name=socket.gethostname(),
            address=address,
            interface=assignment.interface or interface_with(address),
            role=assignment.role,
            gpus=len(visible_gpus()),
            cpu_slots=assignment.cpu_slots or os.cpu_count() or 1,
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )
        interface = None if host.interface is None else Interface(host.interface, address)
        settings = settings_in_force(plan.network, interface, os.environ)
        ports = plan.network.port_range
        return {
            "host": asdict(host),
            "words": plan.shown_words,
            "words_digest": plan.words_digest(self._token),
            "software": software_digest(),
            "must_agree": {
                "recipe": (plan.recipe or "")[:_SHORT_HASH],
                "ray": version("ray"),
                "CPython": ".".join(platform.python_version_tuple()[:2]),
            },
            "free_ports": None if ports is None else ports.free(address, PORTS_OF_A_HOST),
            "settings": [asdict(setting) for setting in settings],
        }

    async def _beat(self, channel: Channel) -> None:
        while True:
            channel.send("beat")
            await asyncio.sleep(BEAT_S)

    def _change_ray(self, cpus: int | None, gcs_address: str | None) -> None:
        """Start Ray on this host, or end it if `cpus` is None. The supervisor is told how that went."""
        answer: Message = {}
        try:
            if cpus is None:
                self.stop_ray()
            else:
                answer = self.start_ray(cpus, gcs_address)
        except Exception as error:
            self._send("lost", line=first_line(error))
        self._send("answer", ray=answer)

    def start_ray(self, cpus: int, gcs_address: str | None = None) -> Message:
        """Start this host's node of the run's Ray, or its head."""
        self.stop_ray()
        assert self._channel is not None
        check_authentication()
        limits = self._limits
        set_ray_defaults(limits.ray_start_s)
        token, ports = derived(self._token, _RAY), self._plan.network.port_environment
        where: dict[str, Any] = {"cpus": cpus, "gcs_address": gcs_address}
        ray = self._ray = RayHost.with_servers(self._channel.address, token, ports, limits.ray_start_s, **where)
        ray.watch_servers(lambda line: self._send("lost", line=line), limits)
        return {
            "gcs_address": ray.gcs_address,
            "ray_variables": ray.driver_variables,
            "ray_directory": str(ray.directory),
        }

    def stop_ray(self) -> None:
        """End it, and all that it has started here. Idempotent."""
        ray, self._ray = self._ray, None
        if ray is not None:
            ray.stop()

    def _send(self, kind: str, **fields: Any) -> None:
        """Send the supervisor a message, from another thread."""

        def send() -> None:
            if self._channel is not None:
                self._channel.send(kind, **fields)

        self._loop.call_soon_threadsafe(send)

    def _signalled(self, number: int) -> None:
        """Host 0 decides; where it does not answer, this host ends by itself."""
        now = time.monotonic()
        last, self._signals[number] = self._signals.get(number, -_SAME_SIGNAL_S), now
        if now - last < _SAME_SIGNAL_S:
            return
        if number != SAVE:
            self._signal = number
        if self._supervisor is not None:
            self._supervisor.signalled(number)
        elif self._channel is not None:
            self._channel.send("signal", signal=number)


def _said(code: int, lines: str | None) -> int:
    if lines is not None:
        say(lines)
    return code


def _listening(host: str, port: int) -> socket.socket:
    """A socket at one address of this host.

    Raises:
        UserError: it is none of this host's, or the port is taken.
    """
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(resolved[4][:2], family=resolved[0], backlog=socket.SOMAXCONN)
    except OSError as error:
        raise UserError(f"host 0 cannot listen at {host}:{port}: {error.strerror or error}") from None

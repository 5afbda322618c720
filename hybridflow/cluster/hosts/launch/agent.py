"""One host's side of a launch: joins the supervisor, does for the run what it asks, and ends with the run.

The agent of host 0 is the supervisor too. An agent ends all that it has started when the run is over, when the
supervisor is lost, or when it is killed itself, by the watchdog of what it has started.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass

from engine3d.cleaning import cleaning
from engine3d.errors import EngineError, UserError, first_line
from hybridflow.cluster.hosts.channel import Channel, ChannelError, Message, WrongTokenError, connect
from hybridflow.cluster.hosts.checks.preflight import HostPreflight
from hybridflow.cluster.hosts.description import Host, HostRole
from hybridflow.cluster.hosts.launch.attempts import RAY
from hybridflow.cluster.hosts.launch.launch_plan import LaunchPlan
from hybridflow.cluster.hosts.launch.supervisor import BEAT_S, Supervisor, say
from hybridflow.cluster.hosts.logs.log_stream import LogStream
from hybridflow.cluster.hosts.network.interfaces import interface_with
from hybridflow.cluster.hosts.network.own_address import OwnAddress, needs_library, prepare
from hybridflow.cluster.hosts.run_token import derived
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.processes.rank_look import RankPlace, look_here, looks_as_json, write_stacks_here
from hybridflow.cluster.processes.termination import SAVE
from hybridflow.cluster.runtime.ray_host import RayHost, set_ray_defaults
from hybridflow.cluster.runtime.ray_watch import RayWatch
from hybridflow.errors.log import log

_ATTEMPT_S = 5.0
_AGAIN_S = 0.5
_SAY_EVERY_S = 10.0
# A scheduler and the script that it runs may both pass on the same signal, which is not impatience.
_SAME_SIGNAL_S = 3.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, SAVE)
_PARTS = {"raylet": "Ray's raylet"}
Actions = dict[str, Callable[..., Awaitable[Message | None]]]


@dataclass(frozen=True)
class Place:
    """Where an agent belongs in a launch.

    Args:
        index: of this host.
        head: host name or address of host 0, as the others reach it.
        port: at which host 0 listens; 0 for any, on host 0 alone.
        address: of this host in the cluster's network; None for the one that routes to `head`.
        interface: that has the address; None if nobody has named it.
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
        place: of this host in the launch.
        plan: of the launch, the same on every host.
        token: of the run.
        limits: of the run.
    """

    def __init__(self, place: Place, plan: LaunchPlan, token: str, limits: LimitsConfig | None = None) -> None:
        self._preflight: HostPreflight | None = None
        self._place, self._plan, self._token = place, plan, token
        self._limits = limits or LimitsConfig()
        self._channel: Channel | None = None
        self._logs: LogStream | None = None
        self._supervisor: Supervisor | None = None
        self._ray: RayHost | None = None
        self._ray_watch: RayWatch | None = None
        self._heard = time.monotonic()
        self._own_address: OwnAddress | None = None
        self._preparing = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
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
        """As `run`, in an event loop that other agents may share: no signal is looked at."""
        self._loop = asyncio.get_running_loop()
        port, supervising = self._place.port, None
        if self._place.index == 0:
            listening = _listening(self._place.address or self._place.head, self._place.port)
            port = listening.getsockname()[1]
            self._supervisor = Supervisor(self._plan, self._token)
            supervising = asyncio.create_task(self._supervisor.run(listening))
            if announce is not None:
                await asyncio.to_thread(announce, port)
        try:
            code = await self._take_part(port)
        finally:
            await asyncio.to_thread(self._stop_ray)
            if self._preflight is not None:
                await self._preflight.close()
            if self._logs is not None:
                await self._logs.close()
            if self._channel is not None:
                await self._channel.close()
        return code if supervising is None else await supervising

    async def _take_part(self, port: int) -> int:
        try:
            self._channel = channel = await self._connected(port)
        except EngineError as error:
            return _said(1, str(error))
        host = self._host(channel)
        self._preflight = preflight = HostPreflight(
            self._plan.preflight, host, self._place.head, self._token, self._confined
        )
        if self._supervisor is not None:
            self._supervisor.confined = self._confined
        settings = [asdict(each) for each in preflight.settings]
        channel.send("hello", host=asdict(host), words=list(self._plan.words), settings=settings)
        self._logs = logs = LogStream(channel.send)
        beating = asyncio.create_task(self._beat(channel))
        try:
            while True:
                async with asyncio.timeout(self._limits.host_s):
                    message = await channel.receive()
                if message["kind"] == "end":
                    # Host 0 has said it as the supervisor.
                    return _said(message["code"], None if self._supervisor is not None else message["line"])
                if message["kind"] == "begins":
                    await preflight.close()
                elif message["kind"] == "logs_kept":
                    logs.kept(message["number"])
                elif message["kind"] != "beat":
                    self._do(channel, {**preflight.actions, **logs.actions}, message)
        except ChannelError as error:
            return _said(1, f"host 0 ({self._place.head}) is gone: {error}")
        except TimeoutError:
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - self._limits.host_s))
            limit = f"limits.host_s={self._limits.host_s:g}"
            return _said(1, f"host 0 ({self._place.head}) gives no sign of life since {since} ({limit})")
        finally:
            beating.cancel()

    async def _connected(self, port: int) -> Channel:
        begin = said = time.monotonic()
        local = (self._place.address, 0) if self._place.address and self._place.index else None
        where = f"host 0 at {self._place.head}:{port}"
        while True:
            try:
                return await connect(self._place.head, port, self._token, _ATTEMPT_S, local)
            except WrongTokenError:
                raise UserError(f"{where} has another token than this host; expected the same on every host") from None
            except socket.gaierror as error:
                why = f"{self._place.head} does not resolve on this host ({error.strerror})"
            except (ChannelError, OSError) as error:
                why = getattr(error, "strerror", None) or str(error)
            if self._signal is not None:
                raise EngineError(f"{signal.Signals(self._signal).name} while waiting for {where}")
            now = time.monotonic()
            if now - begin > self._plan.gather_s:
                through = "" if local is None else f" from {self._place.address} ({self._place.interface})"
                raise EngineError(f"{where} was not reached{through} within {self._plan.gather_s:g} s: {why}")
            if now - said > _SAY_EVERY_S:
                said = now
                log.info(f"waiting for {where}, for {now - begin:.0f} s: {why}")
            await asyncio.sleep(_AGAIN_S)

    def _host(self, channel: Channel) -> Host:
        place = self._place
        return Host(
            index=place.index,
            name=socket.gethostname(),
            address=channel.own,
            interface=place.interface or interface_with(channel.own),
            role=place.role,
            gpus=_gpus(),
            cpu_slots=place.cpu_slots or os.cpu_count() or 1,
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )

    def _confined(self) -> dict[str, str]:
        """Environment in which what this host starts listens at its address in the cluster, and at no other.

        Raises:
            UserError: there is no C compiler on this host.
        """
        assert self._channel is not None
        if not needs_library(self._channel.own):
            return {}
        with self._preparing:
            if self._own_address is None:
                self._own_address = prepare(self._channel.own, self._plan.preflight.network.port_range)
        return self._own_address.environment(os.environ)

    async def _beat(self, channel: Channel) -> None:
        while True:
            channel.send("beat")
            await asyncio.sleep(BEAT_S)

    def _do(self, channel: Channel, others: Actions, message: Message) -> None:
        """Begin what the supervisor asks for; it gets the answer when it is done."""
        actions: Actions = {
            "start_ray": lambda **fields: asyncio.to_thread(self._start_ray, **fields),
            "stop_ray": lambda: asyncio.to_thread(self._stop_ray),
            "look": self._look,
            "write_stacks": self._write_stacks,
            **others,
        }
        action = actions.get(message["kind"])
        if action is None:
            return

        async def do() -> None:
            number, fields = message.pop("number"), {name: each for name, each in message.items() if name != "kind"}
            try:
                answer = await action(**fields)
            except Exception as error:
                answer = {"error": first_line(error)}
            channel.send("answer", number=number, **(answer or {}))

        task = asyncio.create_task(do())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start_ray(self, gcs_address: str, start_s: float, cpus: int) -> None:
        """This host's node of the run's Ray."""
        self._stop_ray()
        set_ray_defaults()
        assert self._channel is not None
        self._ray = ray = RayHost(self._channel.own, derived(self._token, RAY), self._confined())
        started = ray.start_servers(time.monotonic() + start_s, cpus=cpus, gcs_address=gcs_address)
        parts = {_PARTS[name]: pid for name, pid in started["processes"].items() if name in _PARTS}
        self._ray_watch = RayWatch(
            parts,
            self._lost,
            quiet_s=self._limits.quiet_s,
            limit_s=self._limits.call_s,
            how=ray.how_ended,
        )

    async def _look(self, places: Sequence[Message]) -> Message:
        """At the ranks of the run on this host."""
        return {"looks": looks_as_json(await asyncio.to_thread(look_here, self._here(places)))}

    async def _write_stacks(self, places: Sequence[Message], wake: bool) -> None:
        await asyncio.to_thread(write_stacks_here, self._here(places), wake)

    def _here(self, places: Sequence[Message]) -> list[RankPlace]:
        assert self._channel is not None
        return [RankPlace(**place) for place in places if place["address"] == self._channel.own]

    def _stop_ray(self) -> None:
        """End it, and all that it has started here. Idempotent."""
        watch, self._ray_watch = self._ray_watch, None
        if watch is not None:
            watch.close()
        ray, self._ray = self._ray, None
        if ray is not None:
            with cleaning("hybridflow: Ray"):
                ray.end()
            ray.close()

    def _lost(self, line: str) -> None:
        """A part of this host is gone, as another thread has found."""

        def tell() -> None:
            if self._channel is not None:
                self._channel.send("lost", line=line)

        self._loop.call_soon_threadsafe(tell)

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
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(found[4][:2], family=found[0], backlog=socket.SOMAXCONN)
    except OSError as error:
        raise UserError(f"host 0 cannot listen at {host}:{port}: {error.strerror or error}") from None


def _gpus() -> int:
    """GPUs that a run may use on this host."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # no driver, or no library: no GPU
        return 0

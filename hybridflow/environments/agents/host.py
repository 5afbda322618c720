"""Agents of a rank: their processes, and the server of their sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from engine3d.errors import UserError
from engine3d.rollout.tool_calls import find_parser
from engine3d.serving.openai_requests import ServedSampling, load_protocol
from hybridflow.data.files.config import ChatConfig
from hybridflow.data.files.conversations.chat import ChatTemplate
from hybridflow.endpoint.conversation import SessionTokens
from hybridflow.endpoint.server import SessionServer
from hybridflow.endpoint.session import DrawnTokens, RefusedError, Session, SessionLimits
from hybridflow.endpoint.token_tree import Branch
from hybridflow.environments.call_server import AMBIGUOUS, RENDERED_OTHERWISE
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.environments.episode import EpisodeAnswer, EpisodeClose, EpisodeMessage, EpisodeStart
from hybridflow.environments.episode_host import EpisodeHost
from hybridflow.environments.observation_tokens import ObservationTokens
from hybridflow.environments.process_handle import EnvironmentProcess, FailedEnvironmentError
from hybridflow.rewards.processes.supervised_process import in_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST_S = 7 * 24 * 3600.0
"""Limit of a whole episode, in seconds. That of each wait for a request is shorter."""
_MOST_AT_A_TIME = 1 << 20
"""Episodes that functions of a process play at a time."""


def agent_template(chat: ChatConfig | None, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | None:
    """The chat template of agents' conversations, without the system prompt and tools of the data; None without one."""
    config = (chat or ChatConfig()).model_copy(update={"system": None, "tools": (), "texts": "complete"})
    template = ChatTemplate(config, tokenizer)
    return template if template.source is not None else None


def agent_parser(
    config: EnvironmentConfig, template: ChatTemplate | None, tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """The name of the parser of calls; None if agents have no tools. Raises UserError for one that SGLang has not."""
    if template is None:
        return None
    try:
        return find_parser(config.tool_parser, template.tool_source, tokenizer, "environment.tool_parser")
    except UserError:
        if config.tool_parser is not None:
            raise
        return None


class AgentHost(EpisodeHost):
    """Agents in processes, each of which plays an episode through a session of the server.

    Args:
        config: of the agents.
        tokenizer: of the policy.
        template: of conversations; None for text completions alone.
        sampling: distribution of the policy.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate | None,
        sampling: Mapping[str, float],
    ) -> None:
        super().__init__(config, ObservationTokens(tokenizer))
        self._config, self._tokenizer, self._template = config, tokenizer, template
        self._parser = agent_parser(config, template, tokenizer)
        self._server = SessionServer(ServedSampling(sampling, config.ignored_options))
        self._drawing: dict[int, asyncio.Future[DrawnTokens]] = {}
        self._playing: dict[int, EnvironmentProcess] = {}
        # A command is a process, and has others of its own.
        at_a_time = max(config.limits.processes // 2, 1) if isinstance(config.agent, tuple) else _MOST_AT_A_TIME
        self._slots = {process: asyncio.Semaphore(at_a_time) for process in self._processes}

    def start(self) -> None:
        """Start every process, and the server. Raises UserError where the function cannot be loaded."""
        load_protocol()  # no request waits for it
        super().start()
        self._wait_for(self._server.start())

    async def _stop(self) -> None:
        await super()._stop()
        await self._server.stop()

    def _begin(self, messages: Sequence[EpisodeMessage]) -> None:
        for message in messages:
            if isinstance(message, EpisodeStart):  # an end among these messages finds it
                process = self._playing[message.sample] = self._next_process()
                process.episodes.add(message.sample)
                self._start_task(self._play(message, process))
            elif isinstance(message, EpisodeClose):
                self._end(message.sample)
            elif (drawing := self._drawing.pop(message.sample, None)) is not None and not drawing.done():
                drawing.set_result(DrawnTokens(message.tokens, message.complete))

    def _end(self, sample: int) -> None:
        """End an episode that needs no answer any more."""
        if (session := self._server.sessions.pop(sample, None)) is not None:
            session.abandon("the episode is over")
        if (drawing := self._drawing.pop(sample, None)) is not None and not drawing.done():
            drawing.set_exception(RefusedError("the episode is over", 410, "session_over"))
            drawing.exception()  # its request may have gone
        if (process := self._playing.pop(sample, None)) is not None:
            process.close_episode(sample)

    async def _play(self, start: EpisodeStart, process: EnvironmentProcess) -> None:
        """Play an episode, and answer its begin with its end."""
        sample = start.sample
        async with self._slots[process]:
            if self._playing.get(sample) is process:
                await self._played(start, process)

    async def _played(self, start: EpisodeStart, process: EnvironmentProcess) -> None:
        sample, began = start.sample, time.monotonic()
        limits = SessionLimits(start.most_tokens, self._config.max_turns, self._config.max_turn_tokens)

        drawing_s, credited = 0.0, 0

        async def draw(branch: Branch, most: int) -> DrawnTokens:
            nonlocal drawing_s, credited
            begins = time.monotonic()
            drawing = self._drawing[sample] = asyncio.get_running_loop().create_future()
            turn, reward = EpisodeAnswer(sample, branch.tokens, sequence=branch.sequence, limit=most), 0.0
            if session.counts["requests"]:  # what was reported since is of the last answer
                reward, credited = sum(session.rewards[credited:]), len(session.rewards)
            self._answers.put(replace(turn, reward=reward))
            if session.conversation.difference is not None and not session.counts[RENDERED_OTHERWISE]:
                session.counts[RENDERED_OTHERWISE] = 1
                self._log_difference(sample, session.counts["requests"], session.conversation.difference)
            drawn: DrawnTokens = await drawing
            drawing_s += time.monotonic() - begins
            session.counts[AMBIGUOUS] += self._tokens.is_ambiguous(drawn.tokens)
            return drawn

        session = Session(SessionTokens(self._tokenizer, self._template, self._parser), limits, draw)
        self._server.sessions[sample] = session
        try:
            reply = await self._watched(start, session, process)
            answer = self._outcome(session, reply, credited)
        except FailedEnvironmentError as error:
            answer = {"failure": error.kind, "reason": error.reason}
            if error.kind == "raised" and session.truncated:  # it may not expect that
                answer = self._outcome(session, {"done": True, "reward": 0.0}, credited)
        except Exception as error:  # without an answer, the step would wait for ever
            answer = {"failure": "died", "reason": in_words(f"cannot be called: {type(error).__name__}: {error}")}
        if self._playing.get(sample) is process:
            await session.end("the episode is over")  # a request that is drawn has its answer first
            if "failure" not in answer:
                answer["counts"] = session.totals()
        seconds = time.monotonic() - began - drawing_s
        self._answers.put(EpisodeAnswer(sample, seconds=seconds, **answer))

    async def _watched(self, start: EpisodeStart, session: Session, process: EnvironmentProcess) -> dict[str, Any]:
        """Call the agent. Returns the fields of its answer.

        Raises:
            FailedEnvironmentError: it failed, floods, or sent no request for too long.
        """
        sample, limit_s = start.sample, self._config.tool_timeout_s
        clock = asyncio.get_running_loop().time
        try:
            await process.start()
        except UserError as error:  # it could be loaded before
            raise FailedEnvironmentError("died", in_words(error)) from None
        if self._playing.get(sample) is not process:
            raise FailedEnvironmentError("died", "was closed")
        session.last_answer = clock()
        access = {"base_url": self._server.base_url(sample), "api_key": session.key}
        call = process.call(sample, "play", limit_s=_LONGEST_S, **asdict(start.task), **access)
        playing = asyncio.create_task(call)
        try:
            while not playing.done():
                left_s = limit_s if session.waiting else session.last_answer + limit_s - clock()
                if session.flooded.done():
                    raise FailedEnvironmentError("flooded", session.flooded.result())
                if left_s <= 0:
                    await process.look(sample)
                    raise FailedEnvironmentError("timeout", f"sent no request for {limit_s:g} s")
                waited_for: set[asyncio.Future[Any]] = {playing, session.flooded}
                await asyncio.wait(waited_for, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            return playing.result()
        finally:
            playing.cancel()

    def _outcome(self, session: Session, reply: Mapping[str, Any], credited: int) -> dict[str, Any]:
        """Fields of the answer for an agent that has ended. `credited`: rewards that are of earlier turns."""
        rewards = [*session.rewards, *([reply["reward"]] if reply["done"] else [])]
        if not session.counts["requests"]:
            return {"failure": "nonsense", "reason": "ended without an answer of the policy"}
        if not rewards:
            return {"failure": "nonsense", "reason": "ended without a reward, expected one returned or posted"}
        return {"done": True, "reward": sum(rewards[credited:]), "truncated": session.truncated}

"""One call on its way through the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from fastdraft.config import SamplingParams
from fastdraft.results import Chunk, Completion, FinishReason, SourceStats, Stats, TokenLogprob
from fastdraft.round import FORCED
from fastdraft.trace import Trace, TracedRound

if TYPE_CHECKING:
    from fastdraft.constraints.trail import Trail
    from fastdraft.constraints.types import Spec
    from fastdraft.control.course import Course
    from fastdraft.kv.table import Table
    from fastdraft.sampling.probs import Warp
    from fastdraft.text import TextStream

__all__ = ["Event", "Request", "Tally"]

Event: TypeAlias = "Chunk | Completion[Any] | BaseException"


@dataclass(slots=True)
class Tally:
    """A request's statistics while they grow; `freeze` gives the public `Stats`."""

    arrived: float
    admitted: bool = False
    started: float | None = None
    first_token: float | None = None
    first_count: int = 0
    last_token: float | None = None
    rounds: int = 0
    per_position: list[int] = field(default_factory=list)
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    prefix_tokens: int = 0
    gammas: list[int] = field(default_factory=list)
    alphas: list[float] = field(default_factory=list)
    distortion: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    constraint_seconds: float = 0.0

    def add(self, sources: tuple[str, ...], kept: int, alpha: float, distortion: float) -> None:
        """Adds a round: the source of each drafted token, and how many of them stand in the output."""
        self.rounds += 1
        self.gammas.append(len(sources))
        self.alphas.append(alpha)
        self.distortion += distortion
        self.per_position += [0] * (len(sources) - len(self.per_position))
        for i, source in enumerate(sources):
            self.drafted[source] = self.drafted.get(source, 0) + 1
            if i < kept:
                self.per_position[i] += 1
                self.accepted[source] = self.accepted.get(source, 0) + 1

    def arrive(self, tokens: int, now: float) -> tuple[bool, float]:
        """Notes when tokens were committed; those that come with the first don't count towards the decode rate.

        Returns:
            Whether they are the first, and the seconds since those before them, or since the call came.
        """
        first = self.last_token is None
        before = self.arrived if self.last_token is None else self.last_token
        if first:
            self.first_token, self.first_count = now, tokens
        self.last_token = now
        return first, now - before

    def freeze(self, tokens: int, speculation: str) -> Stats:
        """The public statistics.

        Args:
            tokens: Tokens of the output.
            speculation: ``"on"`` or ``"off: <why>"``.
        """
        rate = None
        if tokens > self.first_count and self.first_token is not None and self.last_token is not None:
            rate = (tokens - self.first_count) / max(self.last_token - self.first_token, 1e-9)
        return Stats(
            rounds=self.rounds,
            draft_tokens=sum(self.drafted.values()),
            accepted_tokens=sum(self.accepted.values()),
            accepted_per_position=tuple(self.per_position),
            by_source={name: SourceStats(n, self.accepted.get(name, 0)) for name, n in self.drafted.items()},
            prefix_tokens=self.prefix_tokens,
            gammas=tuple(self.gammas),
            alphas=tuple(self.alphas),
            distortion=self.distortion,
            completion_tokens=tokens,
            queue_seconds=(self.started or time.perf_counter()) - self.arrived,
            time_to_first_token=None if self.first_token is None else self.first_token - self.arrived,
            tokens_per_second=rate,
            draft_seconds=self.draft_seconds,
            target_seconds=self.target_seconds,
            constraint_seconds=self.constraint_seconds,
            forced_tokens=self.accepted.get(FORCED, 0),
            speculation=speculation,
        )


@dataclass(slots=True, eq=False)
class Request:
    """A call's tokens, settings, table and statistics.

    Attributes:
        id: The call's name; two calls may share one, so what belongs to a call is keyed by the request itself.
        prompt: Prompt tokens.
        tokens: Prompt and committed tokens; only `fastdraft.commit` appends.
        params: Resolved parameters.
        warp: How its distribution is shaped.
        seed: 64-bit; drawn where the call gave none.
        limit: Tokens of prompt and output at most.
        ends: Token ids that end it.
        text: Its detokeniser.
        decode: Text of one token, for log-probabilities.
        emit: Hands chunks and the outcome to whoever waits; called on the worker's thread.
        deadline: ``time.perf_counter()`` after which it ends with ``timeout``.
        priority: How much sooner than others that came with it it runs.
        table: Its target blocks while it runs.
        course: What control knows of it, from the moment the engine has it.
        cancelled: Set by any thread; honoured before the next round.
        rounds: Traced rounds where a trace was asked for.
        trail: Its grammar, at the committed tokens; only `fastdraft.commit` moves it for good.
        spec: What its output must be; whoever waits for it parses its text by that.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    warp: Warp
    seed: int
    limit: int
    ends: frozenset[int]
    text: TextStream
    decode: Callable[[int], str]
    emit: Callable[[Event], None]
    speculation: str
    model: str
    tally: Tally
    deadline: float | None = None
    priority: int = 0
    logprobs: list[TokenLogprob] | None = None
    rounds: list[TracedRound] | None = None
    trail: Trail | None = None
    spec: Spec | None = None
    table: Table | None = None
    course: Course | None = None
    cancelled: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        """Committed tokens after the prompt."""
        return self.tokens[len(self.prompt) :]

    @property
    def left(self) -> int:
        """Tokens it may still generate."""
        return self.limit - len(self.tokens)

    @property
    def is_whole(self) -> bool:
        """Whether its text may end where it does, by its grammar."""
        return self.trail is None or self.trail.whole

    def completion(self) -> Completion[None]:
        """What it gives back; it has ended."""
        assert self.finish_reason is not None
        speculation = self.speculation
        if speculation == "on" and self.course is not None and self.course.off:
            speculation = "off: drafts cost more than they gain"
        elif speculation == "on" and not self.tally.drafted:
            speculation = "off: no source had a draft"
        if self.trail is not None:
            self.tally.constraint_seconds = self.trail.seconds
        stats = self.tally.freeze(len(self.tokens) - len(self.prompt), speculation)
        return Completion(
            text=self.text.text,
            token_ids=tuple(self.generated),
            parsed=None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.tokens) - len(self.prompt),
            logprobs=self.logprobs,
            stats=stats,
            lossless=self.params.exact or not stats.draft_tokens,
            params=self.params,
            model=self.model,
            request_id=self.id,
            trace=None if self.rounds is None else Trace(tuple(self.rounds)),
        )

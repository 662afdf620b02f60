"""What a call gives back: chunks, completions, their statistics. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeAlias, TypeVar

from fastdraft.config import SamplingParams
from fastdraft.errors import GeneratorClosedError

if TYPE_CHECKING:
    from fastdraft.trace import Trace

__all__ = ["Chunk", "Completion", "FinishReason", "Pin", "SourceStats", "Stats", "TokenLogprob", "ToolCall"]

T_co = TypeVar("T_co", covariant=True)

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "timeout", "cancelled"]

TARGET = "target"  # the origin of a token that no draft proposed


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One generated token under the target's own log-softmax, before penalties, masks and temperature.

    Attributes:
        token_id: The token.
        text: The token decoded by itself; may hold U+FFFD where it is part of a character.
        logprob: Natural logarithm of its probability.
        top: The likeliest tokens, best first, as ``(token_id, text, logprob)``; as many as were asked for.
    """

    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added to a stream.

    Attributes:
        text: New text; incomplete characters and possible starts of a stop string are held back.
        token_ids: New tokens, one or several; their text may come with a later chunk.
        origins: For each token ``"target"`` or the name of the source whose draft was accepted.
        logprobs: One for each token where asked for.
        finish_reason: Set on the last chunk.
        partial: The value so far where an output type was given, else None.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    origins: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    partial: Any = None


@dataclass(frozen=True, slots=True)
class SourceStats:
    """Drafted and accepted tokens of one source."""

    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """What a call cost and what speculation gave.

    Attributes:
        rounds: Target forwards that verified (prefill chunks that end before the prompt does are not counted).
        draft_tokens: Tokens proposed.
        accepted_tokens: Of these, tokens kept in the output.
        accepted_per_position: How often the draft's 1st, 2nd, ... token was kept.
        by_source: The same by the name of the source.
        forced_tokens: Of the output, tokens that a grammar proposed because they spell what must come; nothing drafted
            them.
        prefix_tokens: Prompt tokens whose KV was reused.
        gammas: Draft length of each round.
        alphas: Acceptance leniency of each round.
        completion_tokens: Tokens of the output.
        distortion: Sum over reached drafted positions of the total variation between what was emitted and the
            target's distribution; 0 where alpha is 1.
        queue_seconds: From arrival to the first forward.
        time_to_first_token: Seconds from arrival.
        tokens_per_second: Decode rate: tokens after the first round's over the time after it; None where all came
            with the first round.
        draft_seconds: Time in draft sources during this call's rounds (shared by the batch).
        target_seconds: Time in target forwards during this call's rounds (shared by the batch).
        constraint_seconds: Time in grammar work.
        speculation: ``"on"`` or ``"off: <why>"``.
    """

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    by_source: Mapping[str, SourceStats] = field(default_factory=dict)
    forced_tokens: int = 0
    prefix_tokens: int = 0
    gammas: tuple[int, ...] = ()
    alphas: tuple[float, ...] = ()
    distortion: float = 0.0
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    time_to_first_token: float | None = None
    tokens_per_second: float | None = None
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    constraint_seconds: float = 0.0
    speculation: str = "off: no draft source"

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens a round: 1 + accepted / rounds; None when nothing was drafted."""
        return 1 + self.accepted_tokens / self.rounds if self.draft_tokens else None

    @property
    def distortion_per_token(self) -> float:
        """`distortion` over the tokens of the output."""
        return self.distortion / self.completion_tokens if self.completion_tokens else 0.0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        id: Made up, for the answer to refer to.
        name: Of the tool.
        arguments: As JSON reads them, valid against the tool's parameters.
        parsed: The arguments as the tool's type, where the tool was given as a pydantic model; else the same.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    parsed: Any


@dataclass(frozen=True, slots=True)
class Completion(Generic[T_co]):
    """The finished answer.

    Attributes:
        text: The answer without stop string, end-of-sequence and stop tokens.
        token_ids: All generated tokens; they end with the end-of-sequence or stop token that ended the call. A text to
            which its grammar lets nothing be added ends by itself, without one.
        parsed: The validated value where an output type was given, else None.
        tool_calls: Calls of the tools given, which stand in ``text`` too; empty without tools.
        finish_reason: ``stop``, ``length``, ``tool_calls``, ``timeout`` or ``cancelled``.
        stop_reason: The stop string or stop token id that ended the call, else None.
        lossless: What the settings promise: alpha 1 under lenience, or nothing was drafted.
        params: The parameters as resolved.
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Tokens of the output.
        logprobs: One a token where asked for.
        stats: What the call cost and what speculation gave.
        model: The target's id or path, ``@revision`` after it where one was given.
        request_id: The call's name, yours or made up.
        trace: Every round, where asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    parsed: T_co
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_tokens: int
    completion_tokens: int
    logprobs: list[TokenLogprob] | None
    stats: Stats
    lossless: bool
    params: SamplingParams
    model: str
    request_id: str
    trace: Trace | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class Pin:
    """A prefix that `Generator.pin` keeps in KV, until it is released or the generator is closed.

    Args:
        tokens: Tokens that calls which begin with it need not compute: its full blocks.
        release: Lets go of it.
    """

    def __init__(self, tokens: int, release: Callable[[], None]) -> None:
        self.tokens = tokens
        self._release = release

    def release(self) -> None:
        """Lets go of the prefix: it may be reused until its place is needed. Idempotent, from any thread."""
        with suppress(GeneratorClosedError):
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

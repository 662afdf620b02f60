"""What a generator has done so far: counted by the engine, read as one snapshot. Torch-free."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fastdraft.results import SourceStats

__all__ = ["Meter", "Metrics", "Spread"]

_WINDOW = 4096  # latest times that percentiles are taken of
_KEEP = 0.9  # weight of the calls before in how soon one ends
_SOON, _LATE = 0.05, 60.0  # seconds that a caller is sent away for


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of the latest times, in seconds; None where there were none.

    Attributes:
        p50: Half were no longer.
        p95: 95 % were no longer.
        p99: 99 % were no longer.
    """

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread:
        """The percentiles of some times."""
        ordered = sorted(seconds)
        if not ordered:
            return cls()
        return cls(*(ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99)))


@dataclass(frozen=True, slots=True)
class Metrics:
    """A snapshot of the generator; counts are since it was built.

    Attributes:
        running: Requests in the batch.
        queued: Requests that wait.
        free_blocks: Target KV blocks that can be taken at once, reusable prefixes included.
        total_blocks: All target KV blocks.
        draft_free_blocks: The same for draft models, all together.
        draft_total_blocks: The same for draft models, all together.
        prefix_hit_tokens: Prompt tokens served from reused KV.
        prompt_tokens: Prompt tokens admitted.
        finished: Calls that ended, however they did.
        rounds: Rounds of the batch.
        tokens: Tokens generated.
        by_source: Drafted and accepted tokens of each source.
        draft_seconds: Spent in draft sources.
        target_seconds: Spent in the target's forwards.
        constraint_seconds: Spent in grammars, most of it while the target's forwards ran.
        preempted: Times that a request gave its KV back and waited again, because there were too few blocks.
        draft_failures: Times that a draft source raised.
        split_rounds: Rounds whose forward raised, and was tried again over halves of its batch.
        time_to_first_token: Of the latest calls, waiting included.
        inter_token: Time between the chunks of a call; a chunk may hold several tokens.
    """

    running: int = 0
    queued: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    draft_free_blocks: int = 0
    draft_total_blocks: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    finished: int = 0
    rounds: int = 0
    tokens: int = 0
    by_source: Mapping[str, SourceStats] = field(default_factory=dict)
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    constraint_seconds: float = 0.0
    preempted: int = 0
    draft_failures: int = 0
    split_rounds: int = 0
    time_to_first_token: Spread = field(default_factory=Spread)
    inter_token: Spread = field(default_factory=Spread)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens that were served from reused KV."""
        return self.prefix_hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Meter:
    """Counts; used by the engine's thread.

    Attributes:
        finished: Calls that ended.
        rounds: Rounds.
        split_rounds: Rounds that were tried again in halves.
        tokens: Tokens generated.
        draft_seconds: Spent in draft sources.
        target_seconds: Spent in the target's forwards.
        constraint_seconds: Spent in grammars.
    """

    def __init__(self) -> None:
        self.finished = self.rounds = self.split_rounds = self.tokens = 0
        self.draft_seconds = self.target_seconds = self.constraint_seconds = 0.0
        self._drafted: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._first: deque[float] = deque(maxlen=_WINDOW)
        self._between: deque[float] = deque(maxlen=_WINDOW)
        self._ended: float | None = None
        self._gap: float | None = None

    def arrive(self, tokens: int, seconds: float, *, first: bool) -> None:
        """Counts a chunk of a call, and how long the call waited for it."""
        self.tokens += tokens
        (self._first if first else self._between).append(seconds)

    def finish(self, drafted: Mapping[str, int], accepted: Mapping[str, int], grammar: float, now: float) -> None:
        """Counts a call that ended.

        Args:
            drafted: Tokens by source.
            accepted: Of these, in the output.
            grammar: Seconds spent in its grammar.
            now: Seconds of any clock.
        """
        self.finished += 1
        self._drafted.update(drafted)
        self._accepted.update(accepted)
        self.constraint_seconds += grammar
        if self._ended is not None:
            gap = now - self._ended
            self._gap = gap if self._gap is None else _KEEP * self._gap + (1 - _KEEP) * gap
        self._ended = now

    def rest(self) -> None:
        """Tells that nothing was left to do: the time until the next call ends says nothing of how busy it is."""
        self._ended = None

    @property
    def retry_after(self) -> float:
        """Seconds until a call is likely to end and make room."""
        return 1.0 if self._gap is None else min(_LATE, max(_SOON, self._gap))

    @property
    def by_source(self) -> dict[str, SourceStats]:
        """Drafted and accepted tokens of each source."""
        return {name: SourceStats(count, self._accepted[name]) for name, count in self._drafted.items()}

    @property
    def time_to_first_token(self) -> Spread:
        """Of the latest calls."""
        return Spread.of(self._first)

    @property
    def inter_token(self) -> Spread:
        """Between the chunks of the latest calls."""
        return Spread.of(self._between)

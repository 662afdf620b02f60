"""One call as control sees it: what was asked, how its drafts do, and what they have cost. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastdraft.config import DynamicAlpha, SamplingParams
from fastdraft.control.alpha import Leniency
from fastdraft.control.gamma import Lean
from fastdraft.round import Plan

__all__ = ["Course", "Key", "Offer", "Played", "Turn"]

_TEMPERATURES = (0.0, 0.5, 0.9, 1.2)  # upper ends of the buckets in which acceptance is taken to be alike
_STEADY = 0.8  # weight of the past in whether a call is taken to draft or not


class Key(NamedTuple):
    """What an acceptance estimate belongs to; calls that share it are taken to be alike.

    Attributes:
        source: The source's name.
        found: What the source says of this place, such as the length of its match.
        temperature: Bucket.
        kind: How drafts are verified.
        alpha: Leniency, rounded; -1 where it changes.
        constraint: Of the output; None where it is free.
    """

    source: str
    found: str
    temperature: int
    kind: str
    alpha: float
    constraint: str | None = None


class Offer(NamedTuple):
    """What a source could draft for one request now.

    Attributes:
        name: The source's name.
        most: Tokens at most; 0 is no draft.
        model: Whether it runs a model, so that drafting costs time whatever is accepted.
        lag: Committed tokens that its KV lacks; 1 where it is up to date.
        key: What distinguishes this draft from others of the source.
    """

    name: str
    most: int
    model: bool = False
    lag: int = 1
    key: str = ""


class Course:
    """One call's control state; made by `Controller.start`, kept by the request.

    Attributes:
        params: The call's.
        kind: How its drafts are verified: ``greedy``, ``rejection`` or ``invariant``.
        leniency: Its alpha, where it changes.
        asked: What its last plan was an instance of; None for plain decoding.
        probing: Whether its last plan was a probe.
        elapsed: Seconds of its rounds so far, its share of those in which others took part.
        lost: Of these, seconds that drafts have cost and not earned back; negative where they have earned more.
        tokens: Tokens so far.
        constraint: What kind of grammar it has; None where its output is free.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.constraint: str | None = None
        greedy = params.temperature == 0
        self.kind = "greedy" if greedy else "invariant" if params.invariant else "rejection"
        self.leniency = Leniency(params.alpha) if isinstance(params.alpha, DynamicAlpha) else None
        self.asked: Key | None = None
        self.probing = False
        self.elapsed = self.lost = 0.0
        self.tokens = 0
        temperature = params.temperature if params.temperature is not None else 1.0
        self._bucket = sum(temperature > end for end in _TEMPERATURES)
        self._alpha = round(params.alpha, 1) if isinstance(params.alpha, float) else -1.0
        self._leans: dict[str, Lean] = {}
        self._drafting = 1.0

    @property
    def alpha(self) -> float:
        """Leniency of the next round."""
        if self.leniency is not None:
            return self.leniency.alpha
        assert isinstance(self.params.alpha, float)
        return self.params.alpha

    @property
    def off(self) -> bool:
        """Whether drafts were offered of late and turned down, because they cost more than they gain."""
        return self._drafting < 0.5

    def decide(self, drafts: bool) -> None:
        """Notes a choice between drafting and not."""
        self._drafting = _STEADY * self._drafting + (1 - _STEADY) * drafts

    def key(self, source: str, found: str) -> Key:
        """What the acceptance of a source's draft belongs to."""
        return Key(source, found, self._bucket, self.kind, self._alpha, self.constraint)

    def lean(self, source: str) -> Lean:
        """How this call's acceptance of a source differs from other calls'."""
        if source not in self._leans:
            self._leans[source] = Lean()
        return self._leans[source]


class Turn(NamedTuple):
    """One request before a round.

    Attributes:
        course: Its state.
        offers: What its sources could draft.
        left: Tokens it may still generate.
        context: Its committed tokens.
        fresh: Whether this is its first round.
        lead: Tokens that its grammar forces, and that lead every draft.
    """

    course: Course
    offers: Sequence[Offer]
    left: int
    context: int
    fresh: bool
    lead: int = 0


class Played(NamedTuple):
    """What came of a round for one request.

    Attributes:
        course: Its state.
        plan: What was planned.
        drafted: Tokens that the source drafted.
        accepted: Of these, accepted.
        chances: How likely each reached position was to be accepted, from the first.
        levels: How sure the source was of each position; see `fastdraft.control.gamma.Acceptance.observe`.
        tokens: Tokens the round gave.
        done: Whether the call ended with it.
        forced: Tokens that a grammar proposed.
        forced_kept: Of these, accepted.
    """

    course: Course
    plan: Plan
    drafted: int
    accepted: int
    chances: Sequence[float]
    levels: Sequence[int]
    tokens: int
    done: bool
    forced: int = 0
    forced_kept: int = 0

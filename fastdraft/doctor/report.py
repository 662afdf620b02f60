"""What a doctor's examination found: plain values, printable and JSON-able."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from fastdraft.control.costs import Measured
from fastdraft.doctor.verdict import Verdict, judge
from fastdraft.forecast import Overhead, Rate
from fastdraft.models.pairing import Pairing

__all__ = ["Acceptance", "DayCost", "Estimate", "Guess", "Live", "Position", "Report"]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How drafts do over the target's own outputs at one temperature, were drafting to begin at every token.

    Attributes:
        temperature: Of the outputs; 0 is greedy.
        rate: Mean chance that the first drafted token is accepted. None where the source drafts nowhere.
        drafted: Share of the tokens at which the source has a draft; a draft model always has one.
        kept: Mean chance that the first, the first two, ... drafted tokens are all accepted; over drafts that long.
    """

    temperature: float
    rate: float | None
    drafted: float
    kept: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Live:
    """A draft length that was really run.

    Attributes:
        gamma: Drafted tokens a round; 0 is plain decoding.
        forecast: Decode rate expected, tokens a second.
        measured: Decode rate found; the geometric mean over prompts of medians, weighted by tokens.
        time_to_first_token: Seconds, the mean over prompts of medians.
    """

    gamma: int
    forecast: float
    measured: float
    time_to_first_token: float

    @property
    def error(self) -> float:
        """Forecast over measured, less 1."""
        return self.forecast / self.measured - 1


@dataclass(frozen=True, slots=True)
class DayCost:
    """One way of decoding, for a day's requests one after the other.

    Attributes:
        seconds_per_request: To the first token, and on to the last.
        hours: Machine hours a day; above 24 it takes several machines.
        cost: Of these hours, in the currency of the price.
    """

    seconds_per_request: float
    hours: float
    cost: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a day costs.

    Attributes:
        requests_per_day: As given.
        tokens_per_request: As given.
        price_per_hour: As given.
        plain: Without a draft.
        speculative: With the draft length that ran.
    """

    requests_per_day: float
    tokens_per_request: float
    price_per_hour: float
    plain: DayCost
    speculative: DayCost

    @property
    def saved(self) -> float:
        """A day, in the currency of the price; negative where speculation costs more."""
        return self.plain.cost - self.speculative.cost


@dataclass(frozen=True, slots=True)
class Guess:
    """A token that a model holds likely.

    Attributes:
        token_id: The token.
        text: Decoded by itself.
        probability: At temperature 1; 1 for what a source without a model proposes.
    """

    token_id: int
    text: str
    probability: float


@dataclass(frozen=True, slots=True)
class Position:
    """One token of the target's greedy output, and what both models held likely there.

    Attributes:
        text: The token, decoded by itself.
        target: The target's five likeliest, best first.
        draft: The draft's, or the one token that a source without a model proposes; empty where it proposes none.
        accepted: Whether the draft's first choice is the output's token.
    """

    text: str
    target: tuple[Guess, ...]
    draft: tuple[Guess, ...]
    accepted: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What an examination found.

    Attributes:
        target: ``id@revision``.
        draft: ``id@revision`` of the draft model, or the source's name.
        prompts: Names of the prompts.
        tokens: New tokens of each output at most.
        pairing: Vocabulary, rope and context, compared; None for a source without a model.
        vocabulary: Tokens a draft model may propose, where its vocabulary is restricted; else None.
        speed_ratio: Seconds of a draft step over seconds of a target step; 0 for a source without a model.
        jaccard: Mean similarity of both models' five likeliest tokens over the greedy outputs: those in both over those
            in either. None for a source without a model.
        total_variation: Mean distance between both models' distributions there, at temperature 1, from 0 to 1. None for
            a source without a model.
        rollback: What a round costs whose first drafted token is rejected, beyond a plain step, in target steps; at the
            draft length of ``live``.
        acceptance: By temperature.
        target_costs: Seconds by rows of the target's forward.
        draft_costs: The draft model's; None for a source without a model.
        overhead: Seconds beyond the forwards: of a round, from plain decoding, and of a drafted token, from one call.
        forecast: Decode rate of each draft length from 0 on.
        best: The draft length with the highest forecast; 0 is plain decoding.
        live: Plain decoding, and the best draft length above 0, as they ran.
        ngram: The best forecast for `NGram` over the same outputs, which needs no model; None where it is the source.
        estimate: What a day costs, where price and requests were given.
        positions: The first prompt's greedy output, token by token.
    """

    target: str
    draft: str
    prompts: tuple[str, ...]
    tokens: int
    pairing: Pairing | None
    vocabulary: int | None
    speed_ratio: float
    jaccard: float | None
    total_variation: float | None
    rollback: float
    acceptance: tuple[Acceptance, ...]
    target_costs: Measured
    draft_costs: Measured | None
    overhead: Overhead
    forecast: tuple[Rate, ...]
    best: int
    live: tuple[Live, Live]
    ngram: Rate | None
    estimate: Estimate | None
    positions: tuple[Position, ...]

    @property
    def speedup(self) -> float:
        """Measured decode rate with the draft over without."""
        return self.live[1].measured / self.live[0].measured

    @property
    def verdict(self) -> Verdict:
        """Whether to use the pair, and what to do."""
        return judge(self)

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON, with what the properties compute."""
        found: dict[str, Any] = to_jsonable_python(self)
        found["live"] = [one | {"error": live.error} for one, live in zip(found["live"], self.live, strict=True)]
        if self.estimate is not None:
            found["estimate"]["saved"] = self.estimate.saved
        return found | {"speedup": self.speedup, "verdict": to_jsonable_python(self.verdict)}

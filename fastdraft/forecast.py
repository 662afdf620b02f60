"""Tokens a second before they are run: rounds replayed over measured costs. Torch-free.

An output's own tokens are replayed, not a formula with one acceptance rate: rejections come in clusters, and a draft
that is right nineteen times in a row and then lost is not one that is right 95 % of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fastdraft.control.costs import Costs
from fastdraft.control.gamma import MOST

__all__ = ["Chances", "Overhead", "Rate", "Rounds", "Text", "forecast", "mean_rate", "replay", "round_seconds"]

Chances: TypeAlias = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Text:
    """One output, as a source would have drafted it.

    Attributes:
        prompt: Tokens before it.
        chances: For each token of the output: were drafting to begin there, the chance that the first, second, ...
            drafted token is accepted, given that those before it are. As many as the source would draft, at most 16.
    """

    prompt: int
    chances: Chances


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds beyond the forwards; learnt from real rounds.

    Attributes:
        round: Of every round.
        token: Of every drafted token, for what draft and target do with its logits.
    """

    round: float = 0.0
    token: float = 0.0


NONE = Overhead()


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds that one output takes, expected.

    Attributes:
        tokens: Tokens after those of the first round.
        seconds: Of the rounds after the first.
        rounds: All, the first included.
    """

    tokens: float
    seconds: float
    rounds: float


@dataclass(frozen=True, slots=True)
class Rate:
    """What one draft length is expected to give.

    Attributes:
        gamma: Drafted tokens a round; 0 is plain decoding.
        tokens_per_second: Decode rate; the geometric mean over outputs, weighted by their tokens.
        tokens_per_round: Tokens a target call, over all outputs.
    """

    gamma: int
    tokens_per_second: float
    tokens_per_round: float


def replay(text: Text, costs: Costs, gamma: int, *, source: str, overhead: Overhead = NONE) -> Rounds:
    """Replays one output with a fixed draft length, over every way its rounds may go.

    The first round is not timed: a decode rate counts from the first token, and a fixed length drafts from the first
    round. A draft model's first step of a round feeds one token, or two where its whole last draft was accepted.

    Args:
        text: At least one token.
        costs: Of target and draft.
        gamma: Drafted tokens a round, fewer where the source has fewer or the end is near.
        source: The draft's name in ``costs``; one without a model costs nothing.
        overhead: What a round takes beyond its forwards.
    """
    end = len(text.chances)
    # Expected seconds and rounds from a number of tokens to the end, with one or two tokens that the draft lacks.
    seconds = [[0.0, 0.0] for _ in range(end + 1)]
    rounds = [[0.0, 0.0] for _ in range(end + 1)]
    tokens = first_seconds = 0.0
    for n in range(end - 1, -1, -1):
        chances = text.chances[n][: max(0, min(gamma, end - n - 1))]
        context = text.prompt + n
        ends = _ends(chances)
        later, more = (
            sum(chance * table[n + kept + 1][kept == len(chances) > 0] for kept, chance in enumerate(ends))
            for table in (seconds, rounds)
        )
        for lag in (1, 2):
            seconds[n][lag - 1] = later + round_seconds(costs, source, len(chances), context, lag, overhead)
            rounds[n][lag - 1] = more + 1
        tokens, first_seconds = end - sum((kept + 1) * chance for kept, chance in enumerate(ends)), later
    return Rounds(tokens, first_seconds, rounds[0][0])


def round_seconds(
    costs: Costs, source: str, drafted: int, context: int, lag: int = 1, overhead: Overhead = NONE
) -> float:
    """What one round takes.

    Args:
        costs: Of target and draft.
        source: The draft's name in ``costs``.
        drafted: Tokens drafted; with none, the draft costs nothing.
        context: Tokens before them.
        lag: Tokens the draft model feeds in its first step.
        overhead: What it takes beyond its forwards.
    """
    seconds = costs.verify(drafted + 1, context) + overhead.round
    if drafted:
        seconds += (costs.step(source, 1, context) + overhead.token) * drafted + costs.catch_up(source, lag)
    return seconds


def _ends(chances: Sequence[float]) -> list[float]:
    """The chance that exactly 0, 1, ... drafted tokens are accepted."""
    ends, reach = [], 1.0
    for chance in chances:
        ends.append(reach * (1 - chance))
        reach *= chance
    return [*ends, reach]


def forecast(
    texts: Sequence[Text], costs: Costs, *, source: str, overhead: Overhead = NONE, most: int = MOST
) -> tuple[Rate, ...]:
    """The decode rate of each draft length from 0 to ``most``.

    Args:
        texts: Outputs of at least two tokens.
        costs: Of target and draft.
        source: The draft's name in ``costs``.
        overhead: What a round takes beyond its forwards.
        most: The longest draft.
    """
    rates = []
    for gamma in range(most + 1):
        found = [replay(text, costs, gamma, source=source, overhead=overhead) for text in texts]
        lengths = [len(text.chances) for text in texts]
        # An output that fits into the first round has no rate.
        each = [one.tokens / one.seconds if one.seconds > 0 else None for one in found]
        per_round = sum(lengths) / sum(one.rounds for one in found)
        rates.append(Rate(gamma, mean_rate(each, lengths) or 0.0, per_round))
    return tuple(rates)


def mean_rate(rates: Sequence[float | None], lengths: Sequence[int]) -> float | None:
    """The geometric mean of outputs' decode rates, weighted by their tokens; None where no output has one."""
    known = [(math.log(rate), n) for rate, n in zip(rates, lengths, strict=True) if rate]
    return math.exp(sum(log * n for log, n in known) / sum(n for _, n in known)) if known else None

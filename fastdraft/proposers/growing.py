"""One request's draft while a draft model makes it.

Shapes: V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastdraft.round import Stop

__all__ = ["Growing"]


@dataclass(slots=True)
class Growing:
    """Its tokens so far, and what the model has seen of them.

    Attributes:
        lead: Tokens that were drafted before it in this round.
        tokens: Its own, a tensor each.
        sources: The source of each.
        sampled: Which of them were drawn.
        q: The distribution of each that was drawn.
        levels: How sure the draft was of each that no grammar forced, and of the position at which it stopped.
        fed: Of lead and own tokens, those the model has seen.
        row: Of the last forward's logits, those of the next position; None where that has not been fed up to there.
        guessed: Tokens that were fed behind its own, and may turn out to be its next ones.
        match: How long a match said so.
        trials: For each guess put to the test, the length of its match and whether it was right.
        reach: Estimated probability that all tokens so far are accepted.
    """

    lead: list[int]
    tokens: list[Tensor] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    levels: list[Tensor] = field(default_factory=list)
    fed: int = 0
    row: int | None = None
    guessed: list[int] = field(default_factory=list)
    match: int = 0
    trials: list[tuple[int, bool]] = field(default_factory=list)
    reach: float = 1.0

    @property
    def offset(self) -> int:
        """Drafted tokens of the round before the next one."""
        return len(self.lead) + len(self.tokens)

    def unfed(self) -> Tensor:
        """Own tokens that the model has not seen; marks them as seen."""
        fresh = self.tokens[self.fed - len(self.lead) :]
        self.fed = self.offset
        return torch.cat(fresh)

    def add(self, token: Tensor, source: str, q_1V: Tensor | None) -> None:
        """Appends a token and, where it was drawn, its distribution."""
        if q_1V is not None:
            self.sampled.append(len(self.tokens))
            self.q.append(q_1V)
        self.tokens.append(token)
        self.sources.append(source)
        right = False
        if self.guessed:
            right = int(token) == self.guessed.pop(0)
            self.trials.append((self.match, right))
        if right and self.row is not None:
            self.row += 1
            self.fed += 1
        else:
            self.row, self.guessed = None, []

    def goes_on(self, stop: Stop | None) -> bool:
        """Whether a further step is worth its forward, if it needs one."""
        return self.row is not None or stop is None or self.reach >= stop.step[len(self.tokens)]

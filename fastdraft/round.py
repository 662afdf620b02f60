"""The words of one round: what is planned, drafted, computed and decided.

Shapes: G drafted tokens, S sampled positions of a draft, L positions whose confidence is known, R rows of logits,
B requests, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FORCED", "PLAIN", "Draft", "Plan", "Rows", "Stop", "Verdict"]

FORCED = "forced"  # the source of tokens that a grammar proposes, because they spell what must come


class Stop(NamedTuple):
    """When a draft ends before its planned length: its reach is multiplied by what each token is expected to survive.

    Decisions rest on how sure the draft is of a position, never on the token drawn for it.

    Attributes:
        accept: Conditional acceptance by the draft's level of confidence.
        row: The (i + 1)-th token is drawn only if its reach is at least ``row[i]``.
        step: After i tokens the draft goes on to a further one only if its reach is at least ``step[i]``.
    """

    accept: tuple[float, ...]
    row: tuple[float, ...]
    step: tuple[float, ...]


class Plan(NamedTuple):
    """At most ``gamma`` tokens from ``source``, behind at most ``lead`` forced ones; none of both is plain decoding."""

    source: str
    gamma: int
    stop: Stop | None = None
    lead: int = 0


PLAIN = Plan("", 0)


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposal for one request.

    Attributes:
        tokens_G: int64 on the model's device.
        sources: The source of each token.
        q_SV: The exact distribution each sampled token was drawn from; None when all tokens are point masses.
        sampled: Positions (0 .. G-1, ascending) that the rows of ``q_SV`` belong to; the rest are point masses.
        levels_L: How sure the source was of each position that no grammar forced, int64 on the model's device, as
            `fastdraft.control.gamma` divides it; one more where drafting stopped short. None where it doesn't say.
    """

    tokens_G: Tensor
    sources: tuple[str, ...] = ()
    q_SV: Tensor | None = None
    sampled: tuple[int, ...] = ()
    levels_L: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sources)

    def cut(self, n: int) -> Draft:
        """The first ``n`` tokens."""
        if n >= len(self):
            return self
        sampled = tuple(i for i in self.sampled if i < n)
        q_SV = self.q_SV[: len(sampled)] if self.q_SV is not None and sampled else None
        levels_L = None if self.levels_L is None else self.levels_L[: n - self.sources[:n].count(FORCED)]
        return Draft(self.tokens_G[:n], self.sources[:n], q_SV, sampled, levels_L)


class Rows(NamedTuple):
    """What a forward returns: the last ``keep[b]`` rows of every request, packed in order.

    Attributes:
        logits_RV: On the model's device, in its dtype, cut to the shared vocabulary.
    """

    logits_RV: Tensor


class Verdict(NamedTuple):
    """What the verify decided, on the model's device.

    Attributes:
        accepted_B: Drafted tokens accepted, from the first.
        next_B: The target's own token after them.
        distortion_BG: Total variation of the emitted law from the target's at each reached drafted position, else 0.
        chance_BG: How likely each drafted position was to be accepted, before its random number was known; 0 beyond
            the draft.
    """

    accepted_B: Tensor
    next_B: Tensor
    distortion_BG: Tensor
    chance_BG: Tensor

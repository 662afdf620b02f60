"""What an audit found, as plain values, and what they mean. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pydantic_core import to_json, to_jsonable_python

from fastdraft.config import SamplingParams

__all__ = ["AuditReport", "Difference", "Greedy", "Sampled", "Verdict"]

Verdict: TypeAlias = Literal["no_evidence", "lossy", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What sampled tokens say.

    Attributes:
        z: (found - expected) / sqrt(variance); positive where the output leans to the draft. None without variance.
        z_p_value: Two-sided chance of a z as far from 0, after ``rounding_z`` is taken from it.
        found: Tokens in S_t.
        expected: Sum of p_t(S_t).
        variance: Sum of p_t(S_t) (1 - p_t(S_t)).
        draft_z: The z to expect if every token came from the draft alone; None without variance.
        detectable: Share of the output that would have to come from the draft alone for z to show it; over 1 is more
            than all of it. None without variance.
        rounding_z: About how far z would move if all rounding went one way.
        uniformity: Largest distance between the transformed tokens' distribution and the even one.
        uniformity_p_value: Chance of a distance as large (Kolmogorov and Smirnov).
        outside: Tokens to which the audit's p gives no chance: beyond top_k, top_p or min_p.
        impossible: Of these, tokens that rounding does not explain.
    """

    z: float | None
    z_p_value: float
    found: int
    expected: float
    variance: float
    draft_z: float | None
    detectable: float | None
    rounding_z: float
    uniformity: float
    uniformity_p_value: float
    outside: int
    impossible: int

    @property
    def weakness(self) -> str:
        """Why z could show nothing; empty where it could."""
        if self.detectable is None or self.detectable > 1:
            return "too few tokens, or a draft too much like the target, for z to show anything"
        return ""

    def describe(self, tokens: int) -> str:
        """The two statistics in words."""
        return f"{self._z}; {self._even}"

    def faults(self, level: float) -> list[str]:
        """What speaks against losslessness; each statistic gets half of the level."""
        found = []
        if self.z_p_value < level / 2:
            found.append(self._z)
        if self.uniformity_p_value < level / 2:
            found.append(self._even)
        if self.impossible:
            found.append(f"{self.impossible} tokens have no chance under these settings")
        return found

    @property
    def _z(self) -> str:
        z = "-" if self.z is None else f"{self.z:.2f}"
        return f"z = {z}, p = {self.z_p_value:.2g}"

    @property
    def _even(self) -> str:
        return f"uniformity p = {self.uniformity_p_value:.2g}"


@dataclass(frozen=True, slots=True)
class Difference:
    """A greedy token that is not the likeliest one of the dense forward.

    Attributes:
        text: Which text, from 0.
        position: Place in its output, from 0.
        token: What came out.
        expected: The likeliest token.
        gap: Logit of the likeliest less that of the token.
        ulps: The gap in units in the last place of the larger logit, in the model's dtype.
        near_tie: Rounding explains it.
    """

    text: int
    position: int
    token: int
    expected: int
    gap: float
    ulps: float
    near_tie: bool


@dataclass(frozen=True, slots=True)
class Greedy:
    """What tokens at temperature 0 say.

    Attributes:
        differences: Tokens that are not the likeliest ones; largest gap first.
    """

    differences: tuple[Difference, ...]

    weakness = ""

    @property
    def wrong(self) -> int:
        """Differences that are no near-ties."""
        return sum(not difference.near_tie for difference in self.differences)

    def describe(self, tokens: int) -> str:
        """The comparison in words."""
        said = f"all {tokens} tokens are the target's likeliest"
        return f"{said}, {len(self.differences)} of them by a near-tie" if self.differences else said

    def faults(self, level: float) -> list[str]:
        """What speaks against losslessness."""
        return [f"{self.wrong} tokens are not the target's likeliest"] if self.wrong else []


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found.

    Attributes:
        target: ``id@revision``.
        draft: The sources: the model of each, or its name.
        dtype: The target's.
        params: As resolved. Each text had a seed of its own, made from this one.
        level: Chance of calling a lossless pair lossy.
        texts: Texts generated.
        tokens: Tokens judged.
        draft_tokens: Tokens drafted.
        accepted_tokens: Of these, tokens in the output.
        rounding: Root mean square, over the output, of the engine's own log-probability of a token less that of the
            dense forward.
        rounding_limit: As much as another order of the same sums explains in this dtype.
        evidence: What was measured.
    """

    target: str
    draft: tuple[str, ...]
    dtype: str
    params: SamplingParams
    level: float
    texts: int
    tokens: int
    draft_tokens: int
    accepted_tokens: int
    rounding: float
    rounding_limit: float
    evidence: Sampled | Greedy

    @property
    def verdict(self) -> Verdict:
        """``no_evidence`` against losslessness; ``lossy``: the output is not the target's distribution;
        ``inconclusive``: this audit could not have seen it."""
        if self._against():
            return "lossy"
        return "inconclusive" if self._weakness() else "no_evidence"

    @property
    def summary(self) -> str:
        """The verdict in a sentence."""
        match self.verdict:
            case "lossy":
                return f"the output is NOT the target's distribution ({'; '.join(self._against())})"
            case "inconclusive":
                return f"inconclusive: {self._weakness()}"
            case "no_evidence":
                note = "" if self.params.exact else "; these settings are lossy all the same, as more tokens would show"
                return f"no evidence against losslessness ({self.evidence.describe(self.tokens)}){note}"

    def _against(self) -> list[str]:
        """What speaks against losslessness."""
        reasons = self.evidence.faults(self.level)
        if not self.rounding <= self.rounding_limit:
            reasons.append(
                f"the engine's log-probabilities are {self.rounding:.2g} off, where rounding explains "
                f"{self.rounding_limit:g}"
            )
        return reasons

    def _weakness(self) -> str:
        """Why no evidence would mean nothing; empty where it means something."""
        if not self.draft_tokens:
            return "nothing was drafted; an integer gamma drafts wherever a source has something to draft"
        return self.evidence.weakness

    def to_json(self) -> str:
        """The report as JSON, indented."""
        judged = {"verdict": self.verdict, "summary": self.summary}
        return to_json(judged | to_jsonable_python(self), indent=2).decode()

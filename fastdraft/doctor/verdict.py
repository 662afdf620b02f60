"""From figures to words: whether to speculate, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from fastdraft.doctor.report import Report

__all__ = ["WANTED", "Verdict", "Wanted", "judge"]

Outcome: TypeAlias = Literal["speculate", "little", "no"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a pair should reach.

    Attributes:
        speed_ratio: At most.
        jaccard: At least.
        rollback: At most, in target steps.
        agreement: At least: the chance that the first drafted token of a draft model is accepted, greedy.
        coverage: At least: the share of tokens at which a source without a model has a draft.
        pays: Speed-up from which speculation is worth having.
        gains: Speed-up from which it is not noise.
        better: What another source must be ahead by to be advised.
        error: Of a forecast against what was measured, at most.
    """

    speed_ratio: float = 0.3
    jaccard: float = 0.45
    rollback: float = 1.5
    agreement: float = 0.6
    coverage: float = 0.3
    pays: float = 1.2
    gains: float = 1.03
    better: float = 1.1
    error: float = 0.15


WANTED = Wanted()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer.

    Attributes:
        outcome: ``speculate``: it pays; ``little``: it pays a little; ``no``: decode without this draft.
        summary: The outcome in a sentence.
        advice: What to do, the most useful first.
    """

    outcome: Outcome
    summary: str
    advice: tuple[str, ...]


def judge(report: Report) -> Verdict:
    """The verdict on a pair."""
    outcome: Outcome = "no"
    if report.speedup >= WANTED.pays:
        outcome = "speculate"
    elif report.speedup >= WANTED.gains:
        outcome = "little"
    ran = f"{report.speedup:.2f} times plain decoding with {report.live[1].gamma} drafted tokens a round"
    summary = {
        "speculate": f"It pays: {ran}.",
        "little": f"It pays a little: {ran}.",
        "no": f"It does not pay: {ran}.",
    }[outcome]
    advice = _of_model(report) if report.draft_costs is not None else _of_lookup(report)
    if outcome == "no":
        advice.append("Decode without this draft: draft=None, or gamma=0 for a call.")
    elif not advice:
        advice.append("Keep it as it is; gamma='auto' finds the length by itself.")
    if abs(report.live[1].error) > WANTED.error:
        advice.append(
            f"The forecast is {report.live[1].error:+.0%} off what ran: the machine may be busy. Examine again."
        )
    return Verdict(outcome, summary, tuple(advice))


def _of_model(report: Report) -> list[str]:
    notes = () if report.pairing is None else report.pairing.notes
    agreement, overlap = report.acceptance[0].rate or 0.0, report.jaccard or 0.0
    advice = [f"Choose a draft whose settings are the target's: {note}." for note in notes if "rope" in note]
    own = max(rate.tokens_per_second for rate in report.forecast)
    if report.ngram is not None and report.ngram.gamma and report.ngram.tokens_per_second > own * WANTED.better:
        advice.append(
            f"Use NGram() instead, or beside it: {report.ngram.tokens_per_second:.1f} tokens per second are expected "
            f"of it on these prompts, {own:.1f} of this draft."
        )
    if report.speed_ratio > WANTED.speed_ratio:
        advice.append(
            f"Make the draft cheaper: a step takes {report.speed_ratio:.2f} of a target step, at most "
            f"{WANTED.speed_ratio:g} is wanted. Quantise it, restrict its vocabulary, or take a smaller one."
        )
    if agreement < WANTED.agreement or overlap < WANTED.jaccard:
        advice.append(
            f"Take a draft that is closer to the target, or train it on the target's own outputs: its first choice is "
            f"the target's {agreement:.0%} of the time ({WANTED.agreement:.0%} is wanted), its five likeliest tokens "
            f"overlap by {overlap:.2f} ({WANTED.jaccard:g} is wanted)."
        )
    if report.rollback > WANTED.rollback:
        advice.append(
            f"Mind rejections: a draft that is rejected at once costs {report.rollback:.1f} target steps, "
            f"{WANTED.rollback:g} are wanted at most. gamma='auto' drafts less where text is hard."
        )
    return advice


def _of_lookup(report: Report) -> list[str]:
    drafted, right = report.acceptance[0].drafted, report.acceptance[0].rate or 0.0
    if drafted >= WANTED.coverage and right >= WANTED.agreement:
        return []
    return [
        f"Add a draft model for text that copies nothing: at {drafted:.0%} of the tokens there was something to copy, "
        f"and the first copied token was right {right:.0%} of the time."
    ]

"""Which requests' scores can be gone on with, and what the others end with.

Shapes: R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastdraft.errors import ConstraintDeadEndError, FastDraftError, NumericalError
from fastdraft.outcome import Part
from fastdraft.request import Request

__all__ = ["Divided", "dead_end", "divide"]


class Divided(NamedTuple):
    """A round's requests.

    Attributes:
        good: Those that go on.
        rows: Their rows of scores.
        sound: How many rows of each may be reached, from the first.
        bad: The others, and what they end with.
    """

    good: list[Part]
    rows: list[int]
    sound: list[int]
    bad: list[tuple[Request, FastDraftError]]


def divide(rounds: Sequence[Part], logits_RV: Tensor, scores_RV: Tensor) -> Divided:
    """Finds requests whose logits are not finite, or whose next token has no finite score.

    A drafted token's logits count too: where they are not finite those before it are not either, as attention
    reads, with weight 0, what stands behind them. A draft that leads where a grammar and bans leave nothing counts
    only if it is followed.
    """
    fine = torch.isfinite(scores_RV.amax(-1)).tolist()
    good: list[Part] = []
    bad: list[tuple[Request, FastDraftError]] = []
    rows: list[int] = []
    sound: list[int] = []
    first = 0
    for one in rounds:
        mine = range(first, first + len(one.draft) + 1)
        first = mine.stop
        count = next((i for i, row in enumerate(mine) if not fine[row]), len(mine))
        broken = count < len(mine) and not bool(torch.isfinite(logits_RV[mine.start : mine.stop].amax(-1)).all())
        if broken or not count:
            bad.append((one.request, _broken(one.request) if broken else dead_end(one.request)))
            continue
        good.append(one)
        rows += mine
        sound.append(count)
    return Divided(good, rows, sound, bad)


def _broken(request: Request) -> FastDraftError:
    return NumericalError(
        f"{request.model} returned nan or infinite logits after {len(request.tokens)} tokens.",
        hint="Try another dtype, such as float32; float16 overflows on many models.",
    )


def dead_end(request: Request) -> FastDraftError:
    """Why nothing may follow a request's tokens."""
    if request.trail is not None and (failure := request.trail.error) is not None:
        if isinstance(failure, FastDraftError):
            return failure
        wrapped = ConstraintDeadEndError(
            f"the grammar cannot go on after {len(request.generated)} tokens: {type(failure).__name__}: {failure}.",
            hint="Simplify the output type.",
        )
        wrapped.__cause__ = failure
        return wrapped
    if request.trail is not None:
        return ConstraintDeadEndError(
            f"after {len(request.generated)} tokens the grammar, logit_bias, min_tokens and stop ids together leave no "
            "token that may follow.",
            hint="Ban fewer tokens, or lower min_tokens.",
        )
    return NumericalError(
        "logit_bias, penalties, min_tokens and stop ids leave no token with a finite score.",
        hint="Ban fewer tokens, or use smaller biases and penalties.",
    )

"""Where two greedy outputs part, and how near the tie was there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position at which two outputs differ; None where they are equal."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def gap_in_ulps(model: Any, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> float | None:
    """How far apart the two tokens' logits are where the outputs part, in units of the last place of bf16.

    Args:
        model: The bf16 model that made ``plain``; its logits are computed anew, for the whole text in one forward.
        prompt: Token ids.
        plain: Its greedy output.
        other: What is compared with it.

    Returns:
        |logit of plain's token - logit of the other's| over the spacing of bf16 numbers at the larger of them; None
        where the outputs are equal, or where one only ends earlier.
    """
    at = first_difference(plain, other)
    if at is None or at >= min(len(plain), len(other)):
        return None
    with torch.no_grad():
        logits_V = model(torch.tensor([[*prompt, *plain[:at]]]), logits_to_keep=1).logits[0, -1].float()
    left, right = float(logits_V[plain[at]]), float(logits_V[other[at]])
    return abs(left - right) / 2.0 ** (math.floor(math.log2(max(abs(left), abs(right)))) - 7)

"""A model's own logits over a finished text, read by itself: no engine, no paging.

Shapes: T tokens of an output, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastdraft.models.support import context_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["dense_logits"]


@torch.inference_mode()
def dense_logits(
    model: PreTrainedModel,
    prompt: Sequence[int],
    tokens: Sequence[int],
    vocabulary: int,
    kept: Sequence[int] | None = None,
) -> Tensor:
    """Logits where each token of an output was drawn, in the model's dtype.

    Args:
        model: In evaluation mode.
        prompt: At least one token.
        tokens: The output.
        vocabulary: Ids wanted.
        kept: Where only these may be proposed, their ids, ascending; the output layer may have been cut to them.

    Returns:
        [T, V]; -inf for ids the model lacks. Fewer rows than tokens where the model's context ends before.
    """
    ids = [*prompt, *tokens[:-1]][: context_of(model.config)]
    rows = max(0, len(ids) - len(prompt) + 1)
    if not rows:
        return torch.zeros(0, vocabulary, dtype=model.dtype, device=model.device)
    narrow = {"logits_to_keep": rows} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    output = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False, **narrow)
    logits_TV = output.logits[0, -rows:]
    every_TV: Tensor = logits_TV.new_full((rows, vocabulary), -torch.inf)
    if kept is None:
        width = min(vocabulary, logits_TV.shape[1])
        every_TV[:, :width] = logits_TV[:, :width]
        return every_TV
    kept_K = torch.tensor(kept, device=model.device)
    cut = logits_TV.shape[1] == len(kept_K)
    return every_TV.index_copy_(1, kept_K, logits_TV if cut else logits_TV[:, kept_K])

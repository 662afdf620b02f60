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
def dense_logits(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], vocabulary: int) -> Tensor:
    """Logits where each token of an output was drawn, in the model's dtype.

    Args:
        model: In evaluation mode.
        prompt: At least one token.
        tokens: The output.
        vocabulary: Ids wanted.

    Returns:
        [T, V]; -inf for ids the model has no row for. Fewer rows than tokens where the model's context ends before.
    """
    ids = [*prompt, *tokens[:-1]][: context_of(model.config)]
    rows = max(0, len(ids) - len(prompt) + 1)
    narrow = {"logits_to_keep": rows} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    if not rows:
        return torch.zeros(0, vocabulary, dtype=model.dtype, device=model.device)
    output = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False, **narrow)
    logits_TV = output.logits[0, -rows:, :vocabulary]
    return torch.nn.functional.pad(logits_TV, (0, vocabulary - logits_TV.shape[1]), value=-torch.inf)

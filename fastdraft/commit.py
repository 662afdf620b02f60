"""The one function that appends tokens to a request and ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastdraft.request import Request
    from fastdraft.results import FinishReason

__all__ = ["commit", "end"]


def commit(request: Request, tokens: Sequence[int]) -> int:
    """Appends tokens in order until one of them ends the request; later ones are dropped.

    Each token is appended, moves the grammar and is detokenised, then checked: end-of-sequence or stop token, stop
    string, a grammar to whose text nothing can be added, length; a stop at the cap is a stop. What comes after
    the first stop was never generated: the caller trims KV, log-probabilities and statistics to what is returned.

    Args:
        request: Running.
        tokens: Accepted tokens and the target's own after them.

    Returns:
        How many of the tokens were kept; at least one.
    """
    for kept, token in enumerate(tokens, 1):
        request.tokens.append(token)
        if token in request.ends:
            end(request, "stop", token if token in request.params.stop_token_ids else None)
            return kept
        if request.trail is not None:
            request.trail.commit(token)
        generated = len(request.tokens) - len(request.prompt)
        found = request.text.push(token, match=generated >= request.params.min_tokens)
        if found is not None:
            end(request, "stop", found)
            return kept
        if request.trail is not None and request.trail.exhausted and generated >= request.params.min_tokens:
            end(request, "stop")
            return kept
        if request.left <= 0:
            end(request, "length")
            return kept
    return len(tokens)


def end(request: Request, reason: FinishReason, stop: str | int | None = None) -> None:
    """Closes a request's text and states why; what was held back is released.

    Args:
        request: Not ended yet.
        reason: Why.
        stop: The stop string or stop token that ended it.
    """
    request.finish_reason, request.stop_reason = reason, stop
    request.text.finish()

"""Whether a target and its draft speak the same tokens, and what else differs between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastdraft.errors import VocabularyMismatchError
from fastdraft.models.support import context_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["Pairing", "pair", "usable_vocabulary"]

# GGUF files pad the tokenizer too, with ordinary tokens of this shape.
_PAD = re.compile(r"\[PAD(\d+)\]")


@dataclass(frozen=True, slots=True)
class Pairing:
    """A target and a draft, compared.

    Attributes:
        vocabulary: ``same``; ``padded`` (the same tokens, output layers or tokenizers of other sizes); ``assumed``
            (the draft came without a tokenizer); ``overlapping`` or ``foreign`` are refused.
        shared_tokens: Ids both can propose: 0 .. shared_tokens - 1.
        overlap: Share of the target's tokens that the draft has under the same id.
        notes: What differs, in words: rope settings, context length.
    """

    vocabulary: Literal["same", "padded", "assumed", "overlapping", "foreign"]
    shared_tokens: int
    overlap: float
    notes: tuple[str, ...] = ()


def usable_vocabulary(tokenizer: Any, width: int) -> int:
    """Ids that stand for real tokens: the tokenizer's, less its padding, and no more than the output layer has.

    Args:
        tokenizer: A transformers tokenizer.
        width: Rows of the output layer.
    """
    by_id = {int(i): token for token, i in tokenizer.get_vocab().items()}
    size = max(by_id, default=-1) + 1
    while size and (pad := _PAD.fullmatch(by_id.get(size - 1, ""))) and int(pad[1]) == size - 1:
        size -= 1
    return min(size, width)


def pair(
    target_config: PretrainedConfig,
    target_tokenizer: Any,
    draft_config: PretrainedConfig,
    draft_tokenizer: Any | None,
    label: str,
) -> Pairing:
    """Compares a target with a draft.

    Args:
        target_config: The target's config.
        target_tokenizer: The target's tokenizer.
        draft_config: The draft's config.
        draft_tokenizer: None where a loaded draft came without one; it is then taken to share the target's.
        label: The draft's name, for errors.

    Raises:
        VocabularyMismatchError: Overlapping or foreign vocabularies; names the overlap.
    """
    target_width = target_config.get_text_config().vocab_size
    draft_width = draft_config.get_text_config().vocab_size
    target_size = usable_vocabulary(target_tokenizer, target_width)
    notes = _notes(target_config, draft_config)
    if draft_tokenizer is None:
        _refuse_narrow(draft_width, target_size, label)
        return Pairing("assumed", target_size, 1.0, notes)
    draft_size = usable_vocabulary(draft_tokenizer, draft_width)
    target_tokens, draft_tokens = _by_id(target_tokenizer, target_size), _by_id(draft_tokenizer, draft_size)
    equal = sum(draft_tokens.get(i) == token for i, token in target_tokens.items())
    clash = sum(i in draft_tokens and draft_tokens[i] != token for i, token in target_tokens.items())
    overlap = equal / max(1, len(target_tokens))
    # A few tokens more at either end are padding of a kind: the draft never proposes what only one side has.
    if not clash and min(target_size, draft_size) >= 0.99 * max(target_size, draft_size):
        _refuse_narrow(draft_width, target_size, label)
        same = target_size == draft_size and target_width == draft_width
        return Pairing("same" if same else "padded", min(target_size, draft_size), overlap, notes)
    shared = len(set(target_tokens.values()) & set(draft_tokens.values())) / max(1, len(target_tokens))
    kind = "overlapping" if shared >= 0.5 else "foreign"
    raise VocabularyMismatchError(
        f"draft {label} has another vocabulary ({kind}): {shared:.1%} of the target's tokens exist in it, "
        f"{overlap:.1%} under the same id ({target_size} target tokens, {draft_size} draft tokens).",
        hint="Use a smaller sibling of the target, or draft=NGram(), which needs no model.",
    )


def _refuse_narrow(draft_width: int, target_size: int, label: str) -> None:
    """The draft reads every token the target commits, so it needs a row for each."""
    if draft_width < target_size:
        raise VocabularyMismatchError(
            f"draft {label} has rows for {draft_width} ids, fewer than the target's {target_size} tokens.",
            hint="Use a draft that shares the target's tokenizer, or draft=NGram().",
        )


def _by_id(tokenizer: Any, size: int) -> Mapping[int, str]:
    return {int(i): token for token, i in tokenizer.get_vocab().items() if i < size}


def _notes(target: PretrainedConfig, draft: PretrainedConfig) -> tuple[str, ...]:
    """Differences that lower acceptance or shorten what can be drafted; none of them is an error."""
    notes = []
    ropes = [getattr(c.get_text_config(), "rope_parameters", None) or {} for c in (target, draft)]
    bases = [rope.get("rope_theta") for rope in ropes]
    kinds = [rope.get("rope_type") for rope in ropes]
    if kinds[0] != kinds[1] and all(kinds):
        notes.append(f"rope types differ: target {kinds[0]}, draft {kinds[1]}")
    if bases[0] != bases[1] and all(bases):
        notes.append(f"rope bases differ: target {bases[0]:g}, draft {bases[1]:g}; a wrong base costs acceptance")
    contexts = context_of(target), context_of(draft)
    if contexts[1] < contexts[0]:
        notes.append(
            f"the draft's context ends at {contexts[1]} of the target's {contexts[0]} tokens; no drafting after it"
        )
    return tuple(notes)

"""From what a user types to models, drafts and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import fastdraft
from fastdraft.models.catalogue import CATALOGUE
from fastdraft.models.store import load_path

if TYPE_CHECKING:
    from fastdraft import DraftModel, NGram

__all__ = ["named_draft", "named_model"]


def named_model(name: str) -> str | Path:
    """A name that ``fastdraft models`` lists becomes its folder, fetched where it is missing; others stay."""
    return load_path(name, progress=True) if name.lower() in CATALOGUE else name


def named_draft(name: str) -> DraftModel | NGram | None:
    """``none``, ``ngram``, or a draft model in the forms of a target."""
    match name:
        case "none":
            return None
        case "ngram":
            return fastdraft.NGram()
        case _:
            return fastdraft.DraftModel(named_model(name))

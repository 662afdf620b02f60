"""What can be read of a JSON text before it is finished."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

__all__ = ["partial"]


def partial(text: str) -> Any | None:
    """The value of an unfinished JSON text, as far as it goes.

    Open strings, arrays and objects are closed; half a word, number or key is left out. None where nothing can be read.
    """
    before = text.rstrip("0123456789.eE+-")
    is_number = text[len(before) : len(before) + 1] in set("-0123456789")
    if is_number and re.sub(r"\\.", "", before).count('"') % 2 == 0:
        text = before  # it may go on, and be another one
    try:
        return from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
    except (TypeError, ValueError):  # the first for a lone surrogate
        return None

"""What is compiled for one tokenizer, by whichever engine; the latest used are kept."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fastdraft.constraints.base import Constraint
from fastdraft.constraints.closing import Closing
from fastdraft.constraints.llguidance import Llguidance
from fastdraft.constraints.outlines import OutlinesCore
from fastdraft.constraints.xgrammar import Xgrammar

if TYPE_CHECKING:
    from fastdraft.constraints.types import Spec

__all__ = ["Grammars"]

_KEPT = 128


class Grammars:
    """Compiled grammars of one tokenizer. Safe from any thread.

    Args:
        tokenizer: The target's.
        vocabulary: Usable ids; padded ones beyond are never legal.
        eos: End-of-sequence ids.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        ends = [token for token in eos if token < vocabulary]
        self._llguidance = Llguidance(tokenizer, vocabulary, ends)
        self._outlines = OutlinesCore(tokenizer, vocabulary, ends, self._llguidance.spellings)
        self._xgrammar = Xgrammar(tokenizer, vocabulary, ends, self._llguidance.spellings)
        self._lock = threading.Lock()  # a matcher that two threads copy at once raises
        self._compiling: dict[str, threading.Lock] = {}
        self._compiled: OrderedDict[str, Callable[[], Constraint]] = OrderedDict()

    def start(self, spec: Spec) -> Constraint:
        """A constraint at the beginning of a text.

        Raises:
            InvalidConstraintError: The grammar cannot be compiled, or accepts nothing.
        """
        if spec.kind == "index":
            return self._outlines.lift(spec)
        key = json.dumps([spec.kind, spec.source, spec.whitespace, spec.after, spec.backend])
        with self._lock:
            mine = self._compiling.setdefault(key, threading.Lock())
        with mine:  # nobody waits while another grammar is compiled, and none is compiled twice
            with self._lock:
                made = self._compiled.get(key)
            if made is None:
                made = self._engine(spec.backend).compile(spec)
        with self._lock:
            self._compiling.pop(key, None)
            self._compiled[key] = made
            self._compiled.move_to_end(key)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return made()

    def _engine(self, backend: str) -> Llguidance | OutlinesCore | Xgrammar:
        match backend:
            case "outlines_core":
                return self._outlines
            case "xgrammar":
                return self._xgrammar
            case _:
                return self._llguidance

    @cached_property
    def key_ends(self) -> dict[bytes, int]:
        """What is likely written behind a key, as one token where there is one."""
        words: dict[str, int] = self._tokenizer.get_vocab()
        return {
            text.encode(): words[text] for text in ('":', '":"') if words.get(text, self._vocabulary) < self._vocabulary
        }

    @cached_property
    def closing(self) -> Closing:
        """The ends of JSON texts in this tokenizer's words."""
        words: dict[str, int] = self._tokenizer.get_vocab()
        return Closing({text: token for text, token in words.items() if token < self._vocabulary})

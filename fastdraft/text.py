"""Tokens to text, one token at a time: characters are released whole, stop strings never."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

__all__ = ["Detokenizer", "StopMatcher", "TextStream", "Vocabulary"]

REPLACEMENT = "\ufffd"
# A window of tokens is decoded again for each new one: enough for the longest character (4 bytes, 4 tokens) and
# a word to its left, which tells SentencePiece decoders that a leading space is a real one.
_KEEP = 6
_WINDOW = 10
# How a byte-level vocabulary spells the three bytes of U+FFFD itself.
_LITERAL_REPLACEMENT = ("\u00ef\u00bf\u00bd", REPLACEMENT)
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Vocabulary(Protocol):
    """What is needed of a tokenizer to turn ids into text; every transformers tokenizer has it."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """The text of ids."""

    def convert_ids_to_tokens(self, ids: list[int], /) -> list[str | None]:
        """The vocabulary's own spelling of ids."""


class Detokenizer:
    """Decodes a growing list of tokens after a prompt, and gives out each character once it is complete.

    Byte-level vocabularies split characters over tokens: the decoded text then ends with one U+FFFD until the
    character is complete, so that one is held back. Byte-fallback vocabularies (``<0xE6>``) turn a whole run
    of bytes into U+FFFD when one is missing or wrong, so their bytes are decoded here.

    Args:
        vocabulary: The tokenizer.
        prompt_ids: The prompt; its last tokens are the context to the left. A character that begins in the
            prompt and ends in the new tokens counts as new.
    """

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._decoded: str | None = ""  # the window's text, None when not known
        self._done = 0  # how much of it was given out
        self._skip_broken = False  # the prompt ends in U+FFFD: if it stays so, it is not our text
        self._start([int(token) for token in prompt_ids[-_WINDOW:]])

    def push(self, token: int) -> str:
        """Appends a token and returns the text that is now certain."""
        byte = self._byte(token)
        if byte is not None:
            self._remember(token, None)
            return self._own(self._bytes.decode(byte))
        if self._decoded is None:  # bytes came before: all of them count as given out
            self._decoded = self._decode(self._window)
            self._done = len(self._decoded)
        decoded = self._decode([*self._window, token])
        if decoded == self._decoded and self._skipped(token):
            return ""
        broken = self._bytes.decode(b"", True)  # a run of bytes that ended in mid-character
        certain = len(decoded) - decoded.endswith(REPLACEMENT)
        new = broken + decoded[self._done : certain]
        self._done = max(self._done, certain)
        self._remember(token, decoded)
        return self._own(new)

    def finish(self) -> str:
        """What is left when nothing more comes. An incomplete or broken character is dropped."""
        if self._decoded is None or not self._ends_literally():
            return ""
        new = self._decoded[self._done :]
        self._done = len(self._decoded)
        return new

    def _start(self, prompt: list[int]) -> None:
        """Reads the prompt's end: its text counts as given out, its incomplete character does not."""
        run = len(prompt)
        while run and self._byte(prompt[run - 1]) is not None:
            run -= 1
        for token in prompt[run:]:
            self._bytes.decode(self._byte(token) or b"")
        self._window = prompt[-_KEEP:]
        if run < len(prompt):
            self._decoded = None
            self._skip_broken = bool(self._bytes.getstate()[0])
            return
        self._decoded = self._decode(self._window)
        self._done = len(self._decoded)
        if self._decoded.endswith(REPLACEMENT):  # half a character, or one that was really written
            self._done -= 1
            self._skip_broken = True

    def _own(self, new: str) -> str:
        """Leaves out the prompt's own broken character."""
        if new and self._skip_broken:
            self._skip_broken = False
            return new.removeprefix(REPLACEMENT)
        return new

    def _remember(self, token: int, decoded: str | None) -> None:
        self._window.append(token)
        self._decoded = decoded
        if len(self._window) > _WINDOW:
            self._window = self._window[-_KEEP:]
            if decoded is not None:
                held = len(decoded) - self._done
                self._decoded = self._decode(self._window)
                self._done = len(self._decoded) - held

    def _byte(self, token: int) -> bytes | None:
        """The byte of a byte-fallback token. In a byte-level vocabulary "<0x41>" may be six characters."""
        piece = self._piece(token)
        if piece is None or not _BYTE_PIECE.fullmatch(piece) or self._decode([token]) == piece:
            return None
        return bytes([int(piece[1:-1], 16)])

    def _skipped(self, token: int) -> bool:
        """Whether a token never shows: a special one, or an id without text. It must not push context out."""
        return self._piece(token) is None or (
            self._decode([token]) == "" and self._decode([token], skip_special_tokens=False) != ""
        )

    def _ends_literally(self) -> bool:
        """Whether a U+FFFD at the end is one that was really written, not half of something else."""
        pieces = self._vocabulary.convert_ids_to_tokens(self._window[-3:])
        return "".join(piece or "" for piece in pieces).endswith(_LITERAL_REPLACEMENT)

    def _piece(self, token: int) -> str | None:
        return self._vocabulary.convert_ids_to_tokens([token])[0]

    def _decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._vocabulary.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


class StopMatcher:
    """Looks for several strings in a text that comes in pieces; linear in the text (Knuth, Morris and Pratt).

    The string that is complete first wins, whatever the pieces; of those complete at the same character the
    longest.

    Args:
        strings: The strings, none of them empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(dict.fromkeys(sorted(strings, key=len, reverse=True)))
        self._tables = [_prefix_table(string) for string in self._strings]
        self._matched = [0] * len(self._strings)  # how much of each string ends the text so far

    @property
    def held(self) -> int:
        """Length of the longest end of the text that may become a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str, *, match: bool = True) -> tuple[int, str] | None:
        """Reads on.

        Args:
            text: The next piece.
            match: Whether a string that completes here counts.

        Returns:
            None, or the number of characters read up to the string's end, and the string.
        """
        if not self._strings:
            return None
        for position, character in enumerate(text, start=1):
            found = None
            for index, string in enumerate(self._strings):
                if self._advance(index, string, character) and found is None:
                    found = string
            if match and found is not None:
                return position, found
        return None

    def _advance(self, index: int, string: str, character: str) -> bool:
        table, matched = self._tables[index], self._matched[index]
        while matched and string[matched] != character:
            matched = table[matched - 1]
        if string[matched] == character:
            matched += 1
        complete = matched == len(string)
        self._matched[index] = table[matched - 1] if complete else matched
        return complete


class TextStream:
    """The text of one call as it grows: whole characters, without the stop string and anything after it.

    Tokens that end a call (end-of-sequence, stop tokens) are not part of its text: do not push them.

    Args:
        tokenizer: A transformers tokenizer.
        prompt_ids: The prompt, for context.
        stop: Strings that end the text. The one complete first wins; of those complete at the same character
            the longest.
    """

    def __init__(self, tokenizer: Vocabulary, prompt_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._stops = StopMatcher(stop)
        self._held = ""  # complete characters that may begin a stop string
        self._released: list[str] = []
        self._taken = 0  # how many of them were taken
        self._stopped: str | None = None
        self._ended = False

    def push(self, token: int, *, match: bool = True) -> str | None:
        """Appends one generated token.

        Args:
            token: Its id.
            match: False lets a stop string that this token completes pass (``min_tokens`` not reached).

        Returns:
            The stop string it completed, else None. After a stop string or `finish` tokens are ignored.
        """
        if self._ended:
            return self._stopped
        new = self._detokenizer.push(token)
        text = self._held + new
        found = self._stops.feed(new, match=match)
        if found is None:
            self._release(text, len(text) - self._stops.held)
            return None
        read, self._stopped = found
        self._release(text, len(self._held) + read - len(self._stopped))
        self._held = ""
        self._ended = True
        return self._stopped

    def take(self) -> str:
        """The text released since the last take."""
        text = "".join(self._released[self._taken :])
        self._taken = len(self._released)
        return text

    def finish(self) -> None:
        """Nothing more comes: a held possible stop string is released, half a character is dropped."""
        if not self._ended:
            self._ended = True
            self._release(self._held + self._detokenizer.finish())

    @property
    def text(self) -> str:
        """Everything released so far."""
        return "".join(self._released)

    def _release(self, text: str, end: int | None = None) -> None:
        end = len(text) if end is None else end
        if end:
            self._released.append(text[:end])
        self._held = text[end:]


def _prefix_table(string: str) -> list[int]:
    """For each end of ``string``, the length of its longest proper prefix that also ends there."""
    table = [0] * len(string)
    matched = 0
    for index in range(1, len(string)):
        while matched and string[index] != string[matched]:
            matched = table[matched - 1]
        matched += string[index] == string[matched]
        table[index] = matched
    return table

"""Control tokens in texts: which they are, where they stand, and how they read as ordinary text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeAlias

__all__ = ["ControlTokens", "Finder", "Spans", "unmark", "unused_characters"]

Spans: TypeAlias = list[tuple[int, int]]

_MARKUP = re.compile(r"<\S+>|\[\S+\]")
# Gemma has tokens for these, but they are ordinary text in a question about a web page.
_HTML = re.compile(
    r"</?(a|b|blockquote|br|caption|code|div|em|h[1-6]|i|img|li|ol|p|pre|s|span|strong|su[bp]|table|tbody|t[dhr]"
    r"|tfoot|thead|u|ul)/?>"
)


class ControlTokens:
    """The control tokens of a tokenizer: special ones, and added ones that look like markup.

    Args:
        tokenizer: A transformers tokenizer; never changed.

    Attributes:
        texts: What each of them says, by id.
        fast: Whether the tokenizer tells where its tokens stand in a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        added = [(id_, t.content, t.special) for id_, t in tokenizer.added_tokens_decoder.items()]
        self.texts = {id_: text for id_, text, special in added if _is_control(text, special)}
        own_words = {text for _, text, special in added if not special and not text.startswith("<|")}
        self.fast = bool(getattr(tokenizer, "is_fast", False)) and self._backend is not None
        self._unknown = getattr(tokenizer, "unk_token_id", None)
        self._finder = Finder(self.texts.values())
        self._strict_finder = Finder(set(self.texts.values()) - own_words)

    @property
    def thread_safe(self) -> bool:
        """A call first undoes truncation and padding: only with nothing to undo may others run beside it."""
        backend: Any = self._backend
        return self.fast and backend.truncation is None and backend.padding is None

    def written_in(self, value: Any) -> list[str]:
        """The control tokens that strings anywhere in a value hold, or form when text parts are joined."""
        finder = self._finder
        return sorted({text[start:end] for text in _strings(value) for start, end in finder.spans(text)})

    def mark(self, value: Any, marks: tuple[str, str], *, own_words: bool = False) -> Any:
        """Puts marks around the control tokens in a value's strings.

        Args:
            value: Messages or options, of dicts, lists and strings.
            marks: Two characters that occur nowhere in it.
            own_words: Leave markup that is not special (``<think>``) alone in assistant messages.
        """

        def marked(item: Any, finder: Finder) -> Any:
            if isinstance(item, str):
                return finder.mark(item, marks)
            if isinstance(item, Mapping):
                if own_words and item.get("role") == "assistant":
                    finder = self._strict_finder
                return {marked(key, finder): marked(element, finder) for key, element in item.items()}
            if isinstance(item, list):
                return [marked(element, finder) for element in self._parted(item, marks[0])]
            return item

        return marked(value, self._finder)

    def _parted(self, items: list[Any], mark: str) -> list[Any]:
        """Text parts, with a lone mark where two of them would form a control token if joined."""
        parts = [_part_text(item) for item in items]
        spans = self._finder.spans("".join(parts)) if len(parts) > 1 else []
        position = 0
        result = []
        for item, part in zip(items, parts, strict=True):
            if part and any(start < position < end for start, end in spans):
                text = item if isinstance(item, str) else item["text"]
                text = text.replace(part, mark + part)  # not before its leading spaces: they may be trimmed
                item = text if isinstance(item, str) else {**item, "text": text}
            result.append(item)
            position += len(part)
        return result

    def is_at(self, token: int, text: str) -> bool:
        """Whether a token may stand for a text: a control token only for its own, with spaces it takes in."""
        own = self.texts.get(token)
        return own is None or text.strip() == own or token == self._unknown

    def as_text(self, text: str) -> list[int]:
        """The ids of a control token's text as ordinary text in the middle of a line."""
        newline = self._plain.encode("\n").ids
        ids = self._plain.encode("\n" + text).ids  # after a newline, or SentencePiece puts a space before it
        ids = ids[len(newline) :] if ids[: len(newline)] == newline else self._plain.encode(text).ids
        if len(text) == 1 or self.texts.keys().isdisjoint(ids):
            return list(ids)
        return self.as_text(text[:1]) + self.as_text(text[1:])  # the model's own vocabulary spells it in one

    @cached_property
    def _plain(self) -> Any:
        """The backend without added tokens; it shares the model, so it is cheap."""
        backend: Any = self._backend
        plain = type(backend)(backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(backend, part) is not None:
                setattr(plain, part, getattr(backend, part))
        return plain


class Finder:
    """Finds given texts in strings: from the left, the longest at each place. There may be thousands of them.

    Args:
        texts: What to look for.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        first = "".join(sorted({re.escape(text[0]) for text in self._texts}))
        self._first = re.compile(f"[{first}]" if first else "(?!)")

    def spans(self, text: str) -> Spans:
        """Where they stand; spans do not overlap."""
        found: Spans = []
        for match in self._first.finditer(text):
            start = match.start()
            if not found or start >= found[-1][1]:
                here = (text[start : start + length] for length in self._lengths)
                if longest := next((piece for piece in here if piece in self._texts), ""):
                    found.append((start, start + len(longest)))
        return found

    def mark(self, text: str, marks: tuple[str, str]) -> str:
        """The text with ``marks`` around each of them."""
        pieces = []
        done = 0
        for start, end in self.spans(text):
            pieces += [text[done:start], marks[0], text[start:end], marks[1]]
            done = end
        return "".join([*pieces, text[done:]])


def unmark(text: str, marks: tuple[str, str]) -> tuple[str, Spans]:
    """Takes the marks out of a text and tells where they stood; a lone mark is an empty span."""
    first, last = map(re.escape, marks)
    pieces: list[str] = []
    spans: Spans = []
    done = length = 0
    for match in re.finditer(f"{first}([^{first}{last}]*){last}|[{first}{last}]", text):
        inside = match[1] or ""
        pieces += [text[done : match.start()], inside]
        start = length + match.start() - done
        length = start + len(inside)
        spans.append((start, length))
        done = match.end()
    return "".join([*pieces, text[done:]]), spans


def unused_characters(value: Any) -> tuple[str, str]:
    """Two private-use characters that no string in a value holds."""
    used = {character for text in _strings(value) for character in text if character >= "\U000f0000"}
    free = (character for character in map(chr, range(0xF0000, 0x10FFFE)) if character not in used)
    return next(free), next(free)


def _is_control(text: str, special: bool) -> bool:
    markup = _MARKUP.fullmatch(text) and not _HTML.fullmatch(text)
    return bool(text.strip()) and (special or bool(markup))


def _strings(value: Any) -> Iterator[str]:
    """Every string in a value, keys too, and what the text parts of a list give when joined."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        if len(value) > 1:
            yield "".join(map(_part_text, value))
        for item in value:
            yield from _strings(item)


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text.strip() if isinstance(text, str) else ""

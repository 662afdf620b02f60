r"""Regular expressions as users write them: what a grammar can follow, and where it cannot.

The dialect is what Python and the grammar engines share. Engines match with automata, so nothing may look around or
refer back; ``^`` and ``$`` may stand at the edges only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Flaw", "disjoint", "find_flaw", "is_bounded", "searched", "whole"]


class Flaw(NamedTuple):
    """What a grammar cannot follow in a pattern, and where it stands."""

    what: str
    position: int


_TOKEN = re.compile(
    r"""\\(?:[1-9][0-9]*|k<[^>]*>|.)            # escapes
    | \[\^?\]?(?:\\.|[^\]\\])*\]                # classes
    | \((?:\?(?:<[=!]|P=\w+|P?<\w+>|P>|[=!>(:\#]|[A-Za-z-]+[:)]))?  # what opens a group
    | (?:[*+?]|\{[0-9]*(?:,[0-9]*)?\})[+?]?     # repetition
    | .""",
    re.VERBOSE | re.DOTALL,
)
_GROUPS = {
    "(?=": "look-ahead",
    "(?!": "look-ahead",
    "(?<=": "look-behind",
    "(?<!": "look-behind",
    "(?P=": "a backreference",
    "(?(": "a condition",
    "(?>": "an atomic group",
    "(?#": "a comment",
}
_UNSHARED = {
    r"\\(?:[1-9][0-9]*|k<.*)": "a backreference",
    r"\\0": "an octal escape",
    r"\\[bB]": "a word boundary",
    r"[*+?{].*\+": "a possessive repetition",
    r"\{,.*": "a repetition without a lower bound",
    r"\(\?[A-Za-z-]*[aLux][A-Za-z-]*[:)]": "a flag other than i, m, s",
}
_START, _END = ("^", "\\A"), ("$", "\\Z", "\\z")


def find_flaw(pattern: str) -> Flaw | None:
    """The first thing in a pattern that no grammar can follow, or that is no pattern at all."""
    tokens = list(_tokens(pattern))
    words = [token for _, token in tokens]
    for index, (position, token) in enumerate(tokens):
        for opening, what in _GROUPS.items():
            if token.startswith(opening):
                return Flaw(what, position)
        for shape, what in _UNSHARED.items():
            if re.fullmatch(shape, token):
                return Flaw(what, position)
        if token in _START and not _at_edge(words[:index][::-1], "("):
            return Flaw(f"{token} after the start", position)
        if token in _END and not _at_edge(words[index + 1 :], ")"):
            return Flaw(f"{token} before the end", position)
    try:
        re.compile(pattern.replace("\\z", "\\Z"))
    except re.error as error:
        return Flaw(error.msg, error.pos or 0)
    return None


def whole(pattern: str) -> str:
    """A pattern for all of a text: without anchors, which say nothing there."""
    return _rewritten(pattern, "", "")


def searched(pattern: str) -> str:
    """A pattern to be found in a text, with the anchors that all engines know."""
    return _rewritten(pattern, "^", "$")


def is_bounded(pattern: str) -> bool:
    """Whether a pattern limits the length of the texts it is found in: both anchors, and no open repetition."""
    tokens = [token for _, token in _tokens(pattern)]
    if not tokens or tokens[0] not in _START or tokens[-1] not in _END or _has_alternatives(tokens):
        return False
    return not any(re.fullmatch(r"[*+].?|\{[0-9]+,\}.?", token) for token in tokens)


def disjoint(first: str, second: str) -> bool:
    """Whether no text has both patterns, as far as the letters they begin with tell."""
    start, other = _beginning(first), _beginning(second)
    return bool(start and other) and not start.startswith(other) and not other.startswith(start)


def _rewritten(pattern: str, start: str, end: str) -> str:
    anchors = dict.fromkeys(_START, start) | dict.fromkeys(_END, end)
    tokens = [anchors.get(token, token) for _, token in _tokens(pattern)]
    return "".join("(" if re.match(r"\(\?P?<\w", token) else token for token in tokens)  # engines read names otherwise


def _tokens(pattern: str) -> Iterator[tuple[int, str]]:
    for match in _TOKEN.finditer(pattern):
        yield match.start(), match.group()


def _at_edge(beyond: Sequence[str], leaving: str) -> bool:
    """Whether nothing that takes a letter lies between an anchor and the edge of the pattern.

    ``beyond`` are the tokens from the anchor outwards; ``leaving`` is the bracket by which that way leaves a group.
    """
    depth, elsewhere = 0, False
    for token in beyond:
        if token[0] in "()" and token[0] != leaving:  # a group beside
            if not elsewhere:
                return False
            depth += 1
        elif token[0] in "()":
            elsewhere = elsewhere and depth > 0
            depth = max(depth - 1, 0)
        elif token == "|" and depth == 0:
            elsewhere = True  # the rest of this group is another alternative
        elif not elsewhere and token not in _START + _END:
            return False
    return True


def _has_alternatives(tokens: Sequence[str]) -> bool:
    depth = 0
    for token in tokens:
        depth += token.startswith("(") - (token[-1] == ")" and token[0] in "()")
        if token == "|" and depth == 0:
            return True
    return False


def _beginning(pattern: str) -> str:
    """The letters that every match of an anchored pattern begins with."""
    tokens = [token for _, token in _tokens(pattern)]
    if not tokens or tokens[0] not in _START or _has_alternatives(tokens):
        return ""
    letters = ""
    for token in tokens[1:]:
        if token[0] in "?*{":
            return letters[:-1]
        plain = token[1:] if re.fullmatch(r"\\\W", token) else token
        if len(plain) > 1 or (plain == token and token in ".^$+()[]{}|\\"):
            break
        letters += plain
    return letters

"""Prompt lookup against a plain reference that searches the whole history each time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastdraft import NGram
from fastdraft.proposers.ngram import NGramProposer
from fastdraft.proposers.spaces import spaceless
from fastdraft.round import Plan


def _reference(tokens: list[int], low: int, high: int, gamma: int) -> list[int]:
    for n in range(min(high, len(tokens) - 1), low - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):  # the latest earlier place
            if tokens[end - n : end] == tokens[-n:]:
                copied = list(tokens)
                for i in range(gamma):
                    copied.append(copied[end + i])
                return copied[len(tokens) :]
    return []


class _Request:
    """All that n-gram drafting reads of a request."""

    def __init__(self, tokens: list[int], trail: object = None) -> None:
        self.tokens = tokens
        self.trail = trail


@given(
    steps=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8),
    low=st.integers(1, 3),
    more=st.integers(0, 4),
    gamma=st.integers(1, 6),
)
def test_the_longest_recent_match_wins(steps: list[list[int]], low: int, more: int, gamma: int) -> None:
    proposer = NGramProposer(NGram(min=low, max=low + more), torch.device("cpu"))
    tokens: list[int] = []
    request = _Request(tokens)
    for step in steps:  # the index grows with the tokens
        tokens += step
        (draft,) = proposer.propose([request], [Plan("ngram", gamma)], [()]).drafts
        assert draft.tokens_G.tolist() == _reference(tokens, low, low + more, gamma)
        assert draft.q_SV is None and set(draft.sources) <= {"ngram"}


@pytest.mark.parametrize("tokens", ([5], [5, 6], [1, 2, 3, 4]))
def test_nothing_to_match_drafts_nothing(tokens: list[int]) -> None:
    proposer = NGramProposer(NGram(min=1), torch.device("cpu"))
    assert len(proposer.propose([_Request(tokens)], [Plan("ngram", 4)], [()]).drafts[0]) == 0


def test_requests_don_t_see_each_other_and_are_forgotten() -> None:
    proposer = NGramProposer(NGram(min=1), torch.device("cpu"))
    first, second = _Request([1, 2, 1]), _Request([2, 3, 1])
    drafts = proposer.propose([first, second], [Plan("ngram", 1)] * 2, [()] * 2).drafts
    assert [d.tokens_G.tolist() for d in drafts] == [[2], []]
    proposer.forget(first)
    proposer.forget(first)
    assert list(proposer._indexes) == [second]


def test_under_a_grammar_a_word_is_found_with_or_without_a_space_before_it() -> None:
    class Anything:
        """A grammar that allows all and forces nothing."""

        exhausted = False

        def allows(self, tokens: list[int]) -> int:
            return len(tokens)

        def walk(self, tokens: list[int]) -> None:
            pass

        def forced(self) -> list[int]:
            return []

    words = {"Graz": 5, "\u0120Graz": 6, "is": 7, "\u0120is": 8, "\u0120far": 9, '":"': 10}
    proposer = NGramProposer(NGram(), torch.device("cpu"), lambda: spaceless(words))
    text = [6, 8, 9, 10, 5]  # " Graz is far" and then, in a string, "Graz"
    found = proposer.propose([_Request(text, Anything())], [Plan("ngram", 2)], [()]).drafts
    assert found[0].tokens_G.tolist() == [8, 9]
    assert len(proposer.propose([_Request(text)], [Plan("ngram", 2)], [()]).drafts[0]) == 0
    longer = NGramProposer(NGram(min=2), torch.device("cpu"), lambda: spaceless(words))  # asked for
    assert len(longer.propose([_Request(text, Anything())], [Plan("ngram", 2)], [()]).drafts[0]) == 0

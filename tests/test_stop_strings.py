"""Stop strings: cut out wherever the tokens end, never seen in a stream, and none held for longer than it must."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from fastdraft.text import TextStream
from tests import vocabularies
from tests.vocabularies import after_dot, encode, stream

KINDS = {
    "byte_level": vocabularies.byte_level(bos=False),
    "gemma_like": vocabularies.gemma_like(bos=False),
    "llama_like": vocabularies.llama_like(bos=False),
}
kinds = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The plainest reading: the stop string whose end comes first, the longest of those that end there."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@kinds
@given(
    text=st.text("abc \u65e5", max_size=30),
    stops=st.lists(st.text("abc \u65e5", min_size=1, max_size=5), max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_stop_strings_against_the_plainest_reading(tokenizer, text, stops):
    chunks, found = stream(tokenizer, encode(tokenizer, "."), after_dot(tokenizer, text), stops)
    expected, stop = cut(text, stops)
    assert ("".join(chunks), found) == (expected, stop)


@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_what_is_held_is_no_more_than_may_become_a_stop_string(text, stops):
    tokenizer = KINDS["byte_level"]
    out = TextStream(tokenizer, [], stops)
    for end, token in enumerate(encode(tokenizer, text), start=1):
        if out.push(token) is not None:
            break
        seen = text[:end]
        held = max(
            (n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])),
            default=0,
        )
        assert out.text == seen[: len(seen) - held]


def test_a_stop_string_across_tokens_is_never_seen():
    tokenizer = KINDS["byte_level"]
    chunks, found = stream(tokenizer, [], encode(tokenizer, "one STOP two"), ["STOP"])
    assert found == "STOP"
    assert "".join(chunks) == "one "
    assert not any("S" in chunk for chunk in chunks)


def test_a_stop_string_in_the_middle_of_a_token_cuts_what_the_token_adds():
    tokenizer = KINDS["byte_level"]
    token = tokenizer.convert_tokens_to_ids("<0x41>")
    assert stream(tokenizer, [], [token], ["0x"]) == (["<", ""], "0x")


def test_a_half_stop_string_at_the_end_is_released():
    tokenizer = KINDS["byte_level"]
    chunks, found = stream(tokenizer, [], encode(tokenizer, " 16 1"), ["16 18"])
    assert found is None
    assert chunks[-1] == "16 1"
    assert "".join(chunks) == " 16 1"


def test_nothing_is_released_after_a_stop_string():
    tokenizer = KINDS["byte_level"]
    out = TextStream(tokenizer, [], ["b"])
    results = [out.push(token) for token in encode(tokenizer, "abab")]
    out.finish()
    assert results[:2] == [None, "b"]
    assert out.text == "a"


def test_a_stop_string_passes_while_it_must_not_match_but_one_that_ends_later_counts():
    tokenizer = KINDS["byte_level"]
    out = TextStream(tokenizer, [], ["ab"])
    a, b = encode(tokenizer, "ab")
    assert [out.push(a, match=False), out.push(b, match=False), out.push(a, match=False)] == [None] * 3
    assert out.text == "ab"  # the third token may begin a stop string
    assert out.push(b) == "ab"
    assert out.text == "ab"


def test_the_end_of_a_stop_string_that_passed_may_begin_the_next():
    tokenizer = KINDS["byte_level"]
    out = TextStream(tokenizer, [], ["aba"])
    *passed, a = encode(tokenizer, "ababa")
    assert [out.push(token, match=False) for token in passed] == [None] * 4
    assert out.text == "ab"
    assert out.push(a) == "aba"


def test_long_stop_strings_cost_no_more_a_token():
    tokenizer = KINDS["byte_level"]
    a = encode(tokenizer, "a")[0]

    def seconds(tokens: int) -> float:
        out = TextStream(tokenizer, [], ["a" * 3000 + "b"])
        start = time.thread_time()
        for _ in range(tokens):
            out.push(a)
        return time.thread_time() - start

    short = min(seconds(2000) for _ in range(2))
    assert seconds(8000) < 12 * short  # four times the tokens


def test_smollm2_stops_in_the_middle_of_counting(smollm2_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    prompt = encode(tokenizer, "1 2 3 4 5 6 7 8 9 10 11 12 13")
    ids = encode(tokenizer, " 14 15 16 17 18 19")
    chunks, found = stream(tokenizer, prompt, ids, [" 17"])
    assert (found, "".join(chunks), len(chunks) - 1) == (" 17", " 14 15 16", 12)
    assert all(" 14 15 16".startswith("".join(chunks[:count])) for count in range(len(chunks)))
    chunks, found = stream(tokenizer, prompt, ids[:9], ["16 18"])
    assert (found, "".join(chunks)) == (None, " 14 15 16")

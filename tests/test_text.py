"""Text from tokens: whole characters only, no stop strings, the same whatever the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from fastdraft.text import TextStream
from tests import vocabularies
from tests.vocabularies import after_dot, decode, encode, stream

KINDS = {
    "byte_level": vocabularies.byte_level(bos=False),
    "gemma_like": vocabularies.gemma_like(bos=False),
    "llama_like": vocabularies.llama_like(bos=False),
}
TEXTS = st.text(
    st.one_of(
        st.sampled_from(" ahel.\u20ac\u65e5\u672c\u00e9\U0001f98a\u200d\ufffd\n"),
        st.characters(exclude_categories=("Cs",)),
    ),
    max_size=40,
)
kinds = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)


def assert_whole(chunks: Sequence[str], text: str) -> None:
    """Chunks hold no half characters: only a U+FFFD that the text has may show."""
    assert "".join(chunks) == text
    for chunk in chunks:
        chunk.encode("utf-8")


@kinds
@given(prompt=TEXTS, text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_chunks_are_the_text_after_the_prompt(tokenizer, prompt, text):
    prompt_ids = encode(tokenizer, "." + prompt)
    ids = encode(tokenizer, "." + prompt + text)
    if ids[: len(prompt_ids)] == prompt_ids:  # else tokens join across the border
        assert_whole(stream(tokenizer, prompt_ids, ids[len(prompt_ids) :])[0], text)


@kinds
@given(text=TEXTS)
@settings(max_examples=50, deadline=None)
def test_without_context_it_is_what_decode_gives(tokenizer, text):
    ids = encode(tokenizer, text)
    assert_whole(stream(tokenizer, [], ids)[0], decode(tokenizer, ids))


@kinds
@given(data=st.data(), text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_tokens_that_split_a_text_in_any_way_give_the_same_text(tokenizer, data, text):
    """A byte a token, some runs of bytes joined: not what the tokenizer would choose itself."""
    ids = []
    for character in text:
        if tokenizer is KINDS["byte_level"] or data.draw(st.booleans()):
            ids += byte_tokens(tokenizer, character.encode())
        else:
            ids += after_dot(tokenizer, character)
    assert_whole(stream(tokenizer, encode(tokenizer, "."), ids)[0], text)


def byte_tokens(tokenizer: Any, data: bytes) -> list[int]:
    if tokenizer is KINDS["byte_level"]:
        characters = vocabularies.byte_characters()
        return [tokenizer.convert_tokens_to_ids(characters[byte]) for byte in data]
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]


@kinds
@given(data=st.binary(max_size=40), tail=st.sampled_from(["", "a", " a"]))
@settings(max_examples=150, deadline=None)
def test_invalid_bytes_are_replaced_and_a_broken_character_at_the_end_may_be_dropped(tokenizer, data, tail):
    ids = byte_tokens(tokenizer, data) + after_dot(tokenizer, tail)
    text = "".join(stream(tokenizer, encode(tokenizer, "."), ids)[0])
    expected = data.decode("utf-8", "replace") + tail
    if text != expected:
        assert text + "\ufffd" == expected
        assert not data.endswith("\ufffd".encode())


@kinds
@pytest.mark.parametrize("length", [1, 2, 3])
def test_half_a_character_at_the_end_is_dropped(tokenizer, length):
    ids = byte_tokens(tokenizer, b"a" + "\U0001f98a".encode()[:length])
    assert "".join(stream(tokenizer, encode(tokenizer, "."), ids)[0]) == "a"


@kinds
def test_a_character_is_held_until_it_is_complete(tokenizer):
    ids = byte_tokens(tokenizer, "\U0001f98a".encode())
    assert stream(tokenizer, encode(tokenizer, "."), ids)[0] == ["", "", "", "\U0001f98a", ""]


@kinds
def test_a_character_begun_in_the_prompt_is_ours_when_it_is_completed(tokenizer):
    first, *rest = byte_tokens(tokenizer, "\u20ac".encode())
    prompt = [*encode(tokenizer, "a"), first]
    assert stream(tokenizer, prompt, rest)[0] == ["", "\u20ac", ""]
    assert "".join(stream(tokenizer, prompt, after_dot(tokenizer, "a"))[0]) == "a"


@kinds
def test_a_replacement_character_in_the_prompt_is_not_ours(tokenizer):
    prompt = encode(tokenizer, "a\ufffd")
    assert "".join(stream(tokenizer, prompt, after_dot(tokenizer, "a"))[0]) == "a"


@kinds
def test_a_replacement_character_that_is_really_written_is_kept(tokenizer):
    ids = after_dot(tokenizer, "a\ufffd")
    assert "".join(stream(tokenizer, encode(tokenizer, "."), ids)[0]) == "a\ufffd"


@kinds
def test_special_tokens_do_not_show_and_do_not_push_context_out(tokenizer):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = encode(tokenizer, "he")
    word = encode(tokenizer, "he a")[len(prompt) :]
    assert "".join(stream(tokenizer, prompt, [end] * 40 + word + [end] + word)[0]) == " a a"


@kinds
def test_a_special_token_between_the_bytes_of_a_character(tokenizer):
    first, *rest = byte_tokens(tokenizer, "\u65e5".encode())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert "".join(stream(tokenizer, encode(tokenizer, "."), [first, end, *rest])[0]) == "\u65e5"


def test_a_piece_that_looks_like_a_byte_is_text_in_a_byte_level_vocabulary():
    tokenizer = KINDS["byte_level"]
    piece = tokenizer.convert_tokens_to_ids("<0x41>")
    assert stream(tokenizer, [], [piece, piece])[0] == ["<0x41>", "<0x41>", ""]


def test_ids_without_a_text_are_passed_over():
    tokenizer = KINDS["byte_level"]
    assert "".join(stream(tokenizer, [], [len(tokenizer) + 5, *encode(tokenizer, "he")])[0]) == "he"


@kinds
def test_a_long_run_of_bad_bytes_neither_holds_nor_slows(tokenizer):
    decoded = []

    class Recorded:
        convert_ids_to_tokens = tokenizer.convert_ids_to_tokens

        def decode(self, ids, **options):
            decoded.append(len(ids))
            return tokenizer.decode(ids, **options)

    text = TextStream(Recorded(), encode(tokenizer, "."))
    bad = byte_tokens(tokenizer, b"\x80")[0]
    for count in range(1, 2000):
        text.push(bad)
        assert len(text.text) >= count - 1
    assert max(decoded) < 20
    assert sum(decoded) < 20 * 2000


# SmolLM2's own vocabulary.


def test_smollm2_cut_anywhere_in_a_text_of_split_characters(smollm2_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    text = "\U0001f98a\U0001f469\u200d\U0001f469\u200d\U0001f467\u65e5\u672c\u8a9e\u00df"
    prompt = encode(tokenizer, "Say it:")
    ids = encode(tokenizer, text)
    assert len(ids) == 23
    for count in range(1, len(ids) + 1):
        chunks, _ = stream(tokenizer, prompt, ids[:count])
        joined = "".join(chunks)
        assert text.startswith(joined)
        assert joined == decode(tokenizer, ids[:count]).removesuffix("\ufffd")
    assert joined == text

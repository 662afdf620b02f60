"""Prompts to ids: as the tokenizer and the chat template give them; what cannot be one is refused by name."""

from __future__ import annotations

import array
import dataclasses
from enum import StrEnum

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from fastdraft.errors import ConfigError
from fastdraft.prompt import PromptEncoder
from tests import vocabularies
from tests.vocabularies import CHATML, PARTS, controls, encoder, plainly, templated, user

NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"

KINDS = vocabularies.with_template(CHATML)
kinds = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)


# Strings and ids.


@kinds
def test_a_string_is_what_the_tokenizer_makes_of_it(tokenizer):
    for text in ("hello", "   ", "a<|im_end|>\n"):
        assert list(encoder(tokenizer).encode(text)) == tokenizer(text)["input_ids"]
    assert "<|im_end|>" in controls(tokenizer, encoder(tokenizer).encode("a<|im_end|>"))


def test_an_empty_string_is_refused_unless_the_tokenizer_begins_with_a_token():
    with pytest.raises(ConfigError, match=r"prompt.*empty"):
        encoder(KINDS["byte_level"]).encode("")
    assert encoder(KINDS["byte_level_bos"]).encode("") == (KINDS["byte_level_bos"].bos_token_id,)


@pytest.mark.parametrize(
    "ids",
    [
        [3, 1, 2],
        (3, 1, 2),
        array.array("i", [3, 1, 2]),
        np.array([3, 1, 2]),
        torch.tensor([3, 1, 2]),
        list(np.array([3, 1, 2])),
    ],
)
def test_ids_are_passed_on_as_plain_ints(ids):
    encoded = encoder(KINDS["byte_level"]).encode(ids)
    assert encoded == (3, 1, 2)
    assert {type(token) for token in encoded} == {int}


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], ("prompt", "messages", "empty")),
        (None, ("NoneType", "string")),
        (7, ("int", "string")),
        (b"hello", ("bytes", "string")),
        ({"role": "user", "content": "hi"}, ("dict", "in a list")),
        ({1, 2}, ("set",)),
        (torch.tensor([[1, 2]]), ("prompt[0]", "list", "batch()")),
        (np.array(3), ("ndarray",)),
        ([1, 100_000], ("prompt[1]", "100000", "0 to 2")),
        ([1, -1], ("prompt[1]", "-1")),
        ([1, True], ("prompt[1]", "bool")),
        ([1, 2.0], ("prompt[1]", "float")),
        (["one", "two"], ("prompt[0]", "str", "batch()")),
        ([1, {"role": "user", "content": "hi"}], ("prompt[1]", "dict")),
        ([{"role": "user", "content": "hi"}, 1], ("messages[1]", "int")),
        ([{"content": "hi"}], ("messages[0]", "'role'")),
        ([{"role": "user"}], ("messages[0]", "'content'")),
        ([{"role": "user", "content": 3}], ("messages[0]", "'content'", "int")),
        ([{"role": 3, "content": "hi"}], ("messages[0]", "'role'")),
        ("ok \ud800 bad", ("surrogate", "index 3", "UTF-8")),
        (user("ok") + user("\udc00"), ("messages[1]", "surrogate", "index 0")),
        (user([{"type": "text", "text": "a\udc00"}]), ("messages[0]", "surrogate", "index 1")),
        (user("hi", name={"\ud800": 1}), ("messages[0]", "surrogate", "key")),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(prompt, words):
    with pytest.raises(ConfigError) as refused:
        encoder(KINDS["byte_level"]).encode(prompt)
    for word in words:
        assert word in str(refused.value)
    assert refused.value.hint
    str(refused.value).encode("utf-8")


def test_text_that_the_model_has_no_ids_for_is_refused():
    tokenizer = KINDS["byte_level"]
    with pytest.raises(ConfigError, match=r"'<think>'.*below"):
        PromptEncoder(tokenizer, tokenizer.convert_tokens_to_ids("<think>")).encode("a <think>")


# Messages.


@kinds
def test_messages_render_as_the_template_does(tokenizer):
    messages = [
        {"role": "system", "content": "he said:"},
        {"role": "user", "content": "  <b>hello</b> & <i>you</i>\n    a "},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "1 < 2 | 3 > [4] \u65e5"},
    ]
    assert list(encoder(tokenizer).encode(messages)) == plainly(tokenizer, messages)
    assert list(encoder(tokenizer).encode(tuple(messages))) == plainly(tokenizer, messages)


def test_options_reach_the_template():
    tokenizer = KINDS["byte_level"]
    messages = [*user("hi"), {"role": "assistant", "content": "he"}]
    encode = encoder(tokenizer).encode
    for options in (
        {"add_generation_prompt": False},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"chat_template": "{{ messages[0].content }}{{ tone }}", "tone": "warm"},
    ):
        assert list(encode(messages, template_options=options)) == plainly(tokenizer, messages, **options)
    assert encode(messages, template_options={"continue_final_message": True}) == encode(
        messages, template_options={"continue_final_message": True, "add_generation_prompt": False}
    )


@pytest.mark.parametrize(
    ("prompt", "options", "word"),
    [
        (user("hi"), {"tokenize": True}, "'tokenize'"),
        (user("hi"), {"return_tensors": "pt"}, "'return_tensors'"),
        ("hi", {"tone": "warm"}, "messages"),
        ([1], {"tone": "warm"}, "messages"),
        (user("hi"), {"tone": "\ud800"}, "surrogate"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(prompt, options, word):
    with pytest.raises(ConfigError, match=word):
        encoder(KINDS["byte_level"]).encode(prompt, template_options=options)


def test_no_chat_template_says_what_to_pass():
    with pytest.raises(ConfigError, match=r"chat template.*chat_template.*string"):
        encoder(templated(None)).encode(user("hi"))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate"),
        ("{{ 'a' + 1 }}", "str"),
        ("{% for %}", "Expected an expression"),
        ("{{ messages[0]['content']['x']['y'] }}", "x"),
    ],
)
def test_a_template_that_fails_is_quoted(template, said):
    with pytest.raises(ConfigError, match=said) as refused:
        encoder(templated(template)).encode(user("hi"))
    assert refused.value.__cause__ is not None
    assert "chat template" in str(refused.value)
    assert "fold_system" not in str(refused.value)


def test_a_template_that_renders_nothing_is_an_empty_prompt():
    with pytest.raises(ConfigError, match=r"prompt.*empty"):
        encoder(templated("{# #}")).encode(user("hi"))


def test_a_template_that_refuses_the_system_role_names_the_way_out():
    tokenizer = templated(NO_SYSTEM + CHATML)
    messages = [{"role": "system", "content": "Be brief."}, *user("hi")]
    with pytest.raises(ConfigError, match=r"chat template.*'system'.*System role not supported.*fold_system=True"):
        encoder(tokenizer).encode(messages)
    folded = encoder(tokenizer).encode(messages, fold_system=True)
    assert folded == encoder(tokenizer).encode(user("Be brief.\n\nhi"))
    assert messages[1]["content"] == "hi"


def test_folding_merges_every_system_message_into_the_first_user_message():
    encode = encoder(templated(PARTS)).encode
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": "hello"},
        *user([{"type": "text", "text": "hi"}]),
        {"role": "system", "content": "two"},
        *user("again"),
    ]
    by_hand = [
        {"role": "assistant", "content": "hello"},
        *user([{"type": "text", "text": "one\n\ntwo\n\n"}, {"type": "text", "text": "hi"}]),
        *user("again"),
    ]
    assert encode(messages, fold_system=True) == encode(by_hand)
    assert encode(by_hand, fold_system=True) == encode(by_hand)
    with pytest.raises(ConfigError, match=r"fold_system=True.*user"):
        encode(messages[:2], fold_system=True)


def test_values_of_other_libraries_inside_messages_are_unpacked():
    class Role(StrEnum):
        USER = "user"

    @dataclasses.dataclass
    class Part:
        type: str
        text: str

    encode = encoder(templated(PARTS)).encode
    assert encode([{"role": Role.USER, "content": [Part("text", "hi")]}]) == encode(user("hi"))


def test_smollm2_blank_and_empty_prompts(smollm2_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    encode = encoder(tokenizer).encode
    assert len(encode("   ")) == 1
    for empty in ("", []):
        with pytest.raises(ConfigError, match="empty"):
            encode(empty)

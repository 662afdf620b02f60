"""Unfinished JSON: what can be read of it so far."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest

from fastdraft.constraints.partial import partial


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("{", {}),
        ('{"a', {}),
        ('{"a":', {}),
        ('{"a":"b', {"a": "b"}),
        ('{"a":"b\\', {"a": "b"}),
        ('{"a":"b\\u00', {"a": "b"}),
        ('{"a":"b\\ud83d', {"a": "b"}),
        ('{"a":"b\\ud83d\\ude00', {"a": "b😀"}),
        ('{"a":tru', {}),
        ('{"a":true', {"a": True}),
        ('{"a":12', {}),
        ('{"a":12,', {"a": 12}),
        ('{"a":-', {}),
        ('{"a":1.5e', {}),
        ('{"a":"x: 12', {"a": "x: 12"}),
        ('{"a":"\\"12', {"a": '"12'}),
        ('{"a":"b", 12', {"a": "b"}),
        ("[1,2", [1]),
        ('[1,[2,{"a":["b', [1, [2, {"a": ["b"]}]]),
        ("12", None),
        ('"日本', "日本"),
        ("nul", None),
        ("null", None),
        ("[1]", [1]),
        ("}", None),
        ("not json", None),
    ],
)
def test_what_can_be_read_so_far(text, value):
    assert partial(text) == value


def test_every_beginning_of_a_text_grows_towards_its_value():
    whole = {"name": 'Zoë "Z" \\ \n', "n": [1, -2.5e3, True, None], "deep": {"a": {"b": ["x", {}]}}, "end": "1"}
    text = json.dumps(whole)
    seen = [partial(text[:end]) for end in range(1, len(text) + 1)]
    assert seen[-1] == whole
    assert all(isinstance(value, dict) for value in seen)
    assert all(len(a) <= len(b) for a, b in pairwise(seen))


def test_long_and_strange_texts_are_no_trouble():
    started = time.perf_counter()
    partial('{"a":"' + "x1 " * 300_000)
    partial("[" * 300_000)
    partial("1" * 300_000)
    partial('{"a":"\ud800')
    assert time.perf_counter() - started < 2

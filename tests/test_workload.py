"""Prompts from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdraft import ConfigError
from fastdraft.workload import QUESTIONS, built_in, read_prompts


def test_built_in_prompts_are_messages_or_text():
    assert built_in(chat=False) == dict(QUESTIONS)
    assert built_in(chat=True)["code"] == [{"role": "user", "content": QUESTIONS["code"]}]


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path):
    path = tmp_path / "prompts.txt"
    path.write_text('one\n\n{"prompt": "two"}\n', "utf-8")
    assert read_prompts(path, chat=False) == {"1": "one", "3": '{"prompt": "two"}'}
    assert read_prompts(path, chat=True)["1"] == [{"role": "user", "content": "one"}]


def test_a_jsonl_file_has_an_object_a_line(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "id": "first"}\n{"prompt": [1, 2]}\n', "utf-8")
    assert read_prompts(path, chat=False) == {"first": "one", "2": [1, 2]}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", " \n", "holds no prompt"),
        ("a.jsonl", "one\n", ":1 is no JSON"),
        ("a.jsonl", '{"text": "one"}\n', ":1 has no prompt"),
        ("a.jsonl", '{"prompt": 3}\n', ":1 has no prompt"),
        ("a.jsonl", '{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n', ":2 is named 'x'"),
    ],
)
def test_what_is_no_prompt_is_told_with_its_line(tmp_path: Path, name: str, text: str, said: str):
    (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=said):
        read_prompts(tmp_path / name, chat=True)


def test_a_missing_file_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt", chat=True)

"""``fastdraft audit``: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fastdraft.cli.app import app
from tests import tiny
from tests.law import brisk


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and a draft on disk."""
    target = tiny.model(context=512)
    folders = []
    for name, model in (("target", target), ("draft", tiny.perturbed(target, 0.2))):
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
        folders.append(str(folder))
    return folders[0], folders[1]


@brisk()
def call(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["audit", *arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_lossless_pair_ends_with_0(folders: tuple[str, str], tmp_path: Path):
    target, draft = folders
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n", "utf-8")
    shown = call(
        *("--target", target, "--draft", draft, "--draft", "ngram", "--prompts", str(prompts), "--raw"),
        *("--tokens", "600", "--temperature", "0.9", "--top-k", "50", "--gamma", "3"),
    )
    assert shown.exit_code == 0, shown.output
    assert "temperature 0.9, top_k 50, gamma 3, seed 0, rejection" in shown.output
    assert f"{draft}, ngram" in shown.output
    assert "no evidence against losslessness (z = " in shown.output


def test_a_lossy_pair_ends_with_1(folders: tuple[str, str]):
    target, draft = folders
    shown = call("--target", target, "--draft", draft, "--tokens", "600", "--gamma", "3", "--alpha", "0.2")
    assert shown.exit_code == 1
    assert "the output is NOT the target's distribution (z = " in shown.output


def test_greedy_differences_are_shown(folders: tuple[str, str]):
    target, draft = folders
    shown = call(
        *("--target", target, "--draft", draft, "--tokens", "600", "--gamma", "3"),
        *("--temperature", "0", "--alpha", "0.2"),
    )
    assert shown.exit_code == 1
    assert shown.output.count("wrong") >= 5
    assert "ulps" in shown.output


def test_a_report_as_json(folders: tuple[str, str]):
    target, draft = folders
    shown = call(
        *("--target", target, "--draft", draft, "--tokens", "100", "--gamma", "3", "--verification", "invariant"),
        *("--dtype", "float64", "--seed", "4", "--json"),
    )
    report = json.loads(shown.stdout)
    assert (report["dtype"], report["params"]["seed"], report["params"]["verification"]) == ("float64", 4, "invariant")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--temperature", "-1"), "temperature"),
        (("--verification", "hope"), "verification"),
        (("--prompts", "/there/is/no/such/file"), "cannot be read"),
        (("--tokens", "0"), "tokens is 0"),
    ],
)
def test_a_value_that_cannot_be_used_ends_with_2(arguments: tuple[str, ...], said: str):
    result = call("--target", "/there/is/no/such/model", *arguments)
    assert result.exit_code == 2
    assert said in result.output

"""The commands that measure: bench and doctor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastdraft.cli.named import named_drafts
from tests import tiny
from tests.cli.test_cli import ESCAPE, call


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a tiny target and of a draft that mostly agrees with it."""
    target = tiny.model(context=512)
    folders = []
    for name, model in (("target", target), ("draft", tiny.perturbed(target, 0.1))):
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
        folders.append(str(folder))
    return folders[0], folders[1]


def test_bench_prints_a_table_and_writes_json_and_a_picture(pair: tuple[str, str], tmp_path: Path):
    pytest.importorskip("matplotlib")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one and two\nthree and four\n", "utf-8")
    models = ("--target", pair[0], "--draft", "ngram", "--draft", pair[1], "--prompts", str(prompts), "--raw")
    settings = ("--tokens", "6", "--gamma", "2", "--gamma", "auto", "--repeats", "1", "--dtype", "float32")
    files = ("--json", str(tmp_path / "rates.json"), "--plot", str(tmp_path / "rates.png"))
    result = call("bench", *models, *settings, *files, env={"COLUMNS": "120"})
    assert result.exit_code == 0
    rows = [line.split("  ")[0].strip() for line in ESCAPE.sub("", result.stdout).splitlines()]
    names = ["plain", "ngram 2", "ngram auto", "draft_model 2", "draft_model auto", "all sources auto"]
    assert [row for row in rows if row in names] == names
    report = json.loads((tmp_path / "rates.json").read_text("utf-8"))
    assert [side["name"] for side in report["sides"]] == names
    assert (report["prompts"], report["tokens"], report["repeats"]) == (["1", "2"], 6, 1)
    assert all(side["equal"] == 2 for side in report["sides"])
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_several_drafts_are_named_by_what_was_typed():
    sources = named_drafts(["ngram", "org/a", "org/b", "ngram", "none", "org/a"])
    assert [source.name for source in sources] == ["ngram", "draft_model", "org/b"]
    assert [source.kind for source in sources] == ["ngram", "draft_model", "draft_model"]
    assert [source.name for source in named_drafts(None)] == ["ngram"]
    assert named_drafts(["none"]) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gamma", "many"), "gamma is 'many'"),
        (("--prompts", "/there/is/no/such/file"), "cannot be read"),
        (("--gamma", "0"), "gammas holds 0"),
        (("--tokens", "0"), "tokens is 0"),
        (("--repeats", "0"), "repeats is 0"),
        (("--json", "/there/is/no/rates.json"), "/there/is/no is no folder"),
        (("--plot", "/there/is/no/rates.png"), "/there/is/no is no folder"),
        (("--plot", "rates.nonsense"), "its ending is none of"),
    ],
)
def test_bench_refuses_before_anything_is_loaded(arguments: tuple[str, ...], said: str):
    if "rates.nonsense" in arguments:
        pytest.importorskip("matplotlib")
    result = call("bench", "--target", "/there/is/no/such/model", *arguments)
    assert result.exit_code == 2
    assert said in ESCAPE.sub("", result.output)


def test_bench_of_a_target_without_a_draft_is_plain_alone(pair: tuple[str, str], tmp_path: Path):
    path = tmp_path / "plain.json"
    result = call(
        *("bench", "--target", pair[0], "--draft", "none", "--tokens", "3", "--repeats", "1", "--json", str(path))
    )
    assert result.exit_code == 0
    assert [side["name"] for side in json.loads(path.read_text("utf-8"))["sides"]] == ["plain"]


def test_doctor_prints_figures_and_a_verdict(pair: tuple[str, str]):
    models = ("--target", pair[0], "--draft", pair[1], "--prompt", "one and two and one", "--raw")
    day = ("--requests-per-day", "1000", "--tokens-per-request", "50", "--price-per-hour", "3")
    settings = ("--tokens", "8", "--repeats", "1", "--temperature", "0.5", "--dtype", "float32")
    result = call("doctor", *models, *day, *settings, env={"COLUMNS": "160"})
    assert result.exit_code == 0
    report = json.loads(call("doctor", *models, *day, *settings, "--json").stdout)
    shown = " ".join(ESCAPE.sub("", result.stdout).split())
    assert f"{report['jaccard']:.2f} >= 0.45" in shown
    assert [one["temperature"] for one in report["acceptance"]] == [0.0, 0.5]
    for one in report["acceptance"]:
        assert f"{one['temperature']:g} 100% {one['kept'][0]:.0%} {one['kept'][1]:.0%}" in shown
    assert report["estimate"]["plain"]["hours"] > 0
    assert "machine hours" in shown
    assert any(words in shown for words in ("It pays", "It does not pay"))
    assert len(report["positions"]) == 8
    for position in report["positions"]:
        guess = position["draft"][0]
        assert f"{guess['text']!r} {guess['probability']:.2f}" in shown


def test_doctor_shows_tokens_side_by_side_only_where_a_prompt_is_given(pair: tuple[str, str], tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one and two and one", "id": "counting"}\n', "utf-8")
    models = ("--target", pair[0], "--prompts", str(prompts), "--raw", "--tokens", "6", "--repeats", "1")
    result = call("doctor", *models, env={"COLUMNS": "160"})
    report = json.loads(call("doctor", *models, "--json").stdout)
    assert report["prompts"] == ["counting"]
    assert report["draft"] == "ngram"
    assert repr(report["positions"][0]["target"][0]["text"]) not in result.stdout
    assert "Jaccard" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--draft", "none"), "nothing to examine"),
        (("--prompt", "a", "--prompts", "b"), "both given"),
        (("--price-per-hour", "2"), "requests_per_day and tokens_per_request"),
        (("--tokens", "1"), "tokens is 1"),
    ],
)
def test_doctor_refuses_before_anything_is_loaded(arguments: tuple[str, ...], said: str):
    result = call("doctor", "--target", "/there/is/no/such/model", *arguments)
    assert result.exit_code == 2
    assert said in ESCAPE.sub("", result.output)

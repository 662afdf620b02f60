"""Every example runs as the documentation says, on SmolLM2 and on a model given by its path."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str | Path) -> str:
    """What an example prints; it has no terminal and no network."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py", *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_example_has_a_test_here():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested


@pytest.mark.usefixtures("smollm2_path")
def test_quickstart():
    printed = run("quickstart")
    assert "Thank you for your order of 24 August." in printed
    assert "lossless: True" in printed
    tokens, calls = map(int, re.search(r"(\d+) tokens from (\d+) target calls", printed).groups())
    assert calls < tokens


def test_streaming(smollm2_path: Path):
    printed = run("streaming", smollm2_path)
    assert "lighthouse" in printed
    sizes = re.search(r"tokens in each chunk: (.*)", printed)[1].split()
    assert max(map(int, sizes)) > 1
    assert "left early: cancelled" in printed


@pytest.mark.usefixtures("smollm2_path")
def test_chat():
    printed = run("chat")
    assert "Paris" in printed
    reused = [int(count) for count in re.findall(r"\[(\d+) of \d+ prompt tokens", printed)]
    assert len(reused) == 3
    assert reused[0] < reused[1] < reused[2]


@pytest.mark.usefixtures("smollm2_path")
def test_batch():
    printed = run("batch")
    for topic in ("the sea", "a winter morning", "an old clock"):
        first, second = re.findall(rf"^{topic}, sample \d .*?: (.*)$", printed, re.MULTILINE)
        assert first != second
    assert "the same seed gave the same answers: True" in printed


@pytest.mark.usefixtures("smollm2_path")
def test_json_extraction():
    printed = run("json_extraction")
    assert "Order(customer=" in printed
    tokens, rounds, forced = map(int, re.search(r"(\d+) tokens in (\d+) rounds; (\d+) left", printed).groups())
    assert rounds < tokens and forced > 10


@pytest.mark.usefixtures("smollm2_path")
def test_pattern():
    printed = run("pattern")
    assert re.search(r"^a date: (19|20)\d\d-\d\d-\d\d$", printed, re.M)
    assert re.search(r"^a mood: (good|bad)$", printed, re.M)


def test_no_example_hides_a_module():
    """A script's folder comes first on the path: an example named regex would be what transformers imports as regex."""
    found = subprocess.run(
        [sys.executable, "-c", "import importlib.util as u, sys; print(*(n for n in sys.argv[1:] if u.find_spec(n)))"]
        + [path.stem for path in EXAMPLES.glob("*.py")],
        cwd=os.sep,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert found.stdout.split() == []


@pytest.mark.usefixtures("smollm2_path")
def test_tools():
    printed = run("tools")
    assert "Weather({" in printed or "convert({" in printed
    assert "left no choice" in printed


def test_async_batch(smollm2_path: Path):
    printed = run("async_batch", smollm2_path)
    kept = int(re.search(r"(\d+) tokens of every prompt are kept", printed)[1])
    reused = [int(count) for count in re.findall(r"\[(\d+) of \d+ prompt tokens reused", printed)]
    assert len(reused) == 4 and min(reused) >= kept >= 16
    calls, rounds, tokens = map(int, re.search(r"(\d+) calls in (\d+) rounds, (\d+) tokens", printed).groups())
    assert calls == 6 and rounds < tokens


def test_threads(smollm2_path: Path):
    printed = run("threads", smollm2_path)
    assert len(re.findall(r"^\w+: .+", printed, re.MULTILINE)) == 8
    assert "8 calls" in printed

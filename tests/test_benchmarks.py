"""What the benchmarks' pages rest on: prompts in two halves, numbers from raw runs, peers in other processes."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.benchmarks import peers, workloads
from tests.benchmarks.demands import DEMANDS
from tests.benchmarks.differences import first_difference, gap_in_ulps
from tests.benchmarks.figures import Figures
from tests.benchmarks.peer import Peer
from tests.benchmarks.sides import BASE, SERVERS, SETS, Side


@pytest.fixture(params=["own", "public"])
def texts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "own":
        monkeypatch.setattr(workloads, "PUBLIC", Path("absent"))
    elif not workloads.PUBLIC.is_dir():
        pytest.skip("the public workloads are not here")
    return str(request.param)


@pytest.mark.parametrize("group", workloads.GROUPS)
def test_halves_share_no_document(texts: str, group: str):
    measured, fitted = (workloads.prompts(group, half) for half in ("measure", "fit"))
    assert measured and fitted
    assert not {prompt.document for prompt in measured} & {prompt.document for prompt in fitted}
    assert not {prompt.text for prompt in measured} & {prompt.text for prompt in fitted}
    assert workloads.prompts(group, "measure") == measured


def test_groups_take_turns(texts: str):
    assert [prompt.group for prompt in workloads.take(7)] == [*workloads.GROUPS, *workloads.GROUPS[:2]]


def test_an_unknown_group_names_those_there_are():
    with pytest.raises(ValueError, match="extraction"):
        workloads.prompts("poems", "fit")


def run(rate: float | None, first: float = 1.0, tokens: int = 10, calls: int = 5) -> dict[str, Any]:
    return {"tokens": tokens, "first": first, "total": 2.0, "rate": rate, "calls": calls, "drafted": 0, "accepted": 0}


def results() -> dict[str, Any]:
    """Two prompts of code and one of qa; ours twice as fast on code, three times on qa."""
    ours = "fastdraft auto"
    prompts = [
        {"group": group, "runs": {BASE: [run(base), run(base * 9), run(base)], ours: [run(fast)]}}
        for group, base, fast in (("code", 2.0, 4.0), ("code", 8.0, 16.0), ("qa", 1.0, 3.0))
    ]
    first = {BASE: [run(None, 8.0)], ours: [run(None, 2.0)]}
    return {"bf16": {"greedy": prompts, "first": first, "sampled": [{"group": "code", "runs": {ours: [run(6.0)]}}]}}


def test_ratios_are_of_medians_by_group_and_then_of_groups():
    figures = Figures(results())
    assert figures.ratio("bf16", "fastdraft auto", BASE, "code") == pytest.approx(2.0)
    assert figures.ratio("bf16", "fastdraft auto", BASE) == pytest.approx(6.0**0.5)
    assert figures.ratio("bf16", "fastdraft auto", BASE, "rag") is None
    assert figures.sooner("bf16", "fastdraft auto", BASE) == pytest.approx(4.0)
    assert figures.sampled_over_greedy("bf16", "fastdraft auto") == pytest.approx(6.0 / 8.0)
    assert figures.tokens_a_call("bf16", BASE) == pytest.approx(2.0)


def test_bars_that_were_not_measured_have_no_value():
    found = {demand.text: demand.value(Figures(results())) for demand in DEMANDS}
    assert found["speculative over transformers plain, code"] == pytest.approx(2.0)
    assert found["hostile text, over our own plain"] is None
    assert all(value is None for text, value in found.items() if "int8" in text)


def test_bars_name_sides_that_exist():
    named = {side for sides in SETS.values() for side in sides}
    everything = {side: [run(1.0)] for side in named}
    whole = {
        name: {"greedy": [{"group": group, "runs": everything} for group in workloads.GROUPS], "first": everything}
        for name in SETS
    }
    whole["bf16"]["sampled"] = [{"group": "code", "runs": everything}]
    whole |= {"quality": {"agreement": 1.0}, "hostile": {"worst": 1.0}, "gamma": {"worst": 1.0}}
    assert [demand.text for demand in DEMANDS if demand.value(Figures(whole)) != pytest.approx(1.0)] == []


def test_where_outputs_part():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_a_gap_is_counted_in_units_of_the_last_place():
    model = tiny.model()
    prompt = [3, 4, 5]
    import torch

    logits = model(torch.tensor([prompt])).logits[0, -1].detach().float()
    order = logits.argsort(descending=True).tolist()
    gaps = [gap_in_ulps(model, prompt, [order[0]], [other]) for other in order[1:4]]
    assert gaps == sorted(gaps) and gaps[0] is not None and gaps[0] >= 0  # type: ignore[type-var]
    assert gap_in_ulps(model, prompt, [order[0]], [order[0]]) is None


SERVER = """
from serve import serve, timed

def load():
    print("noise on stdout")
    def decode(request, deliver):
        for token in request["ids"][: request["tokens"]]:
            deliver([token, token])
            if token in request["stop"]:
                return
    return timed(decode), {"echo": "1"}

serve(load)
"""


@pytest.fixture
def server(tmp_path: Path) -> list[str | Path]:
    (tmp_path / "serve.py").write_text((SERVERS / "serve.py").read_text("utf-8"), "utf-8")
    (tmp_path / "echo.py").write_text(SERVER, "utf-8")
    return [sys.executable, tmp_path / "echo.py"]


def test_a_peer_answers_with_timed_tokens(server: list[str | Path]):
    with Peer(server, threads=1, stop=[7]) as echo:
        assert echo.versions == {"echo": "1"}
        for _ in range(2):
            answer = echo.run([5, 6, 7, 8], 10)
            assert answer.tokens == (5, 5, 6, 6, 7, 7)
            assert answer.rate is not None and answer.rate > 0 and 0 <= answer.first <= answer.total


def test_a_peer_that_cannot_start_says_why(tmp_path: Path):
    (tmp_path / "broken.py").write_text("raise SystemExit('no such model')", "utf-8")
    with pytest.raises(RuntimeError, match="no such model"):
        Peer([sys.executable, tmp_path / "broken.py"], threads=1, stop=[])


def test_a_set_leaves_out_what_does_not_start(server: list[str | Path], monkeypatch: pytest.MonkeyPatch):
    commands = {("here",): server, ("away",): ["/no/such/python"]}
    monkeypatch.setattr(peers, "command", lambda server, folder: commands[server])
    wanted = {BASE: Side(("here",)), "other": Side(("here",)), "absent": Side(("away",))}
    with contextlib.ExitStack() as stack:
        loaded = peers.load(wanted, Path("."), 1, [7], stack)
        assert list(loaded.sides) == [BASE, "other"] and list(loaded.peers) == [("here",)]
        assert "No such file" in loaded.absent["absent"]
        assert loaded.run("other", [7], 4).tokens == (7, 7)


def test_slow_sides_sit_out_later_turns(server: list[str | Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "command", lambda *_: server)
    wanted = {BASE: Side(("here",)), "quick": Side(("here",), slow=False)}
    with contextlib.ExitStack() as stack:
        loaded = peers.load(wanted, Path("."), 1, [], stack)
        args = argparse.Namespace(repeats=3, slow_repeats=1, tokens=4)
        runs = peers.in_turns(loaded, list(wanted), [5, 6], args)
    assert {side: len(got) for side, got in runs.items()} == {BASE: 1, "quick": 3}

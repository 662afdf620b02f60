"""What forwards cost: measured once, kept in the cache, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastdraft import DraftModel, Generator, NGram
from fastdraft.attention.sdpa import SdpaAttention
from fastdraft.control.costs import Measured
from fastdraft.models import calibrate
from fastdraft.models.runner import Runner, own_forward
from tests import tiny
from tests.watch import Forwards


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model(context=1024)


def _runner(model: Any, blocks: int = 64) -> Runner:
    with torch.no_grad():
        layers = own_forward(model, [1, 2])[1]
    return Runner(model, vocabulary=tiny.VOCABULARY, layers=layers, blocks=blocks, backend=SdpaAttention())


def test_one_pass_over_the_row_counts_and_nothing_is_left(model: Any) -> None:
    runner = _runner(model)
    with Forwards(model) as seen:
        found = calibrate.measure(runner, context=1024, patience=0)
    assert [rows for rows, _ in found.points] == [1, 2, 4, 8, 16]
    assert [rows for rows, _ in found.prefill] == [64]
    assert found.per_token >= 0
    sizes = [len(fed) for fed in seen.fed]
    assert sizes == [1, 1, 2, 4, 8, 16, 64, 1, 1, 1, 1]
    assert max(max(at) for at in seen.positions) == 512
    assert runner.pool.free == runner.pool.blocks
    assert runner.table().adopt([0] * 64) == 0


def test_short_passes_are_repeated(model: Any) -> None:
    runner = _runner(model)
    with Forwards(model) as seen:
        calibrate.measure(runner, context=64, patience=1000.0)
    assert [len(fed) for fed in seen.fed] == [1, *[1, 2, 4, 8, 16, 64] * 3]


@pytest.mark.parametrize(("blocks", "context", "rows"), [(1, 1024, 16), (64, 9, 8), (64, 1, 1), (40, 1024, 16)])
def test_what_does_not_fit_is_left_out(model: Any, blocks: int, context: int, rows: int) -> None:
    runner = _runner(model, blocks)
    size = runner.pool.block_size
    with Forwards(model) as seen:
        found = calibrate.measure(runner, context=context)
    assert found.points[-1][0] == rows
    assert max(max(at) for at in seen.positions) < min(context, blocks * size)
    assert runner.pool.free == blocks


def test_measured_once_then_read(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDRAFT_CACHE", str(tmp_path))
    runner = _runner(model)
    first = calibrate.load_or_measure(runner, "a", context=64)
    (path,) = (tmp_path / "costs").iterdir()
    fast = _times(first, 1e-3)
    path.write_text(fast.to_json(), "utf-8")
    with Forwards(model) as seen:
        assert calibrate.load_or_measure(runner, "a", context=64) == fast
        assert [len(fed) for fed in seen.fed] == [1, 1]  # one to warm up, one that shows how fast the machine is now
        calibrate.load_or_measure(runner, "b", context=64)
    assert len(list((tmp_path / "costs").iterdir())) == 2


def test_figures_of_a_busy_machine_are_measured_again(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTDRAFT_CACHE", str(tmp_path))
    runner = _runner(model)
    first = calibrate.load_or_measure(runner, "a", context=64)
    (path,) = (tmp_path / "costs").iterdir()
    slow = _times(first, 1e3)
    # Only one figure that is faster than any can be: it stays.
    points = tuple((rows, 1e-9 if rows == 8 else seconds) for rows, seconds in slow.points)
    path.write_text(Measured(points, slow.prefill).to_json(), "utf-8")
    found = calibrate.load_or_measure(runner, "a", context=64)
    assert [rows for rows, _ in found.points] == [rows for rows, _ in slow.points]
    assert all(seconds < before / 10 for (_, seconds), (_, before) in zip(found.points, slow.points, strict=True))
    assert dict(found.points)[8] == 1e-9
    assert Measured.from_json(path.read_text("utf-8")) == found


def _times(measured: Measured, factor: float) -> Measured:
    points, prefill = (
        tuple((rows, seconds * factor) for rows, seconds in part) for part in (measured.points, measured.prefill)
    )
    return Measured(points, prefill)


@pytest.mark.parametrize("text", ["", "not json", '{"points": [[1, -1]]}'])
def test_a_corrupt_file_is_measured_again(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("FASTDRAFT_CACHE", str(tmp_path))
    runner = _runner(model)
    calibrate.load_or_measure(runner, "a", context=64)
    (path,) = (tmp_path / "costs").iterdir()
    path.write_text(text, "utf-8")
    found = calibrate.load_or_measure(runner, "a", context=64)
    assert Measured.from_json(path.read_text("utf-8")) == found


def test_a_cache_that_cannot_be_written_is_no_error(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way", "utf-8")
    monkeypatch.setenv("FASTDRAFT_CACHE", str(blocked))
    assert calibrate.load_or_measure(_runner(model), "a", context=64).points


def test_models_handed_in_are_measured_each_time_and_only_where_something_drafts(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTDRAFT_CACHE", str(tmp_path))
    counts = {}
    for name, draft in (("none", None), ("ngram", NGram()), ("again", NGram()), ("model", DraftModel(model))):
        with (
            Forwards(model) as seen,
            Generator(model, draft, tokenizer=tiny.tokenizer(), kv_memory="8MiB") as generator,
        ):
            counts[name] = seen.count
            metrics = generator.metrics()
            assert metrics.free_blocks == metrics.total_blocks
            assert metrics.draft_free_blocks == metrics.draft_total_blocks
    assert counts["none"] < min(counts["ngram"], counts["again"])
    assert counts["ngram"] <= counts["none"] + 1 + 3 * 11
    assert counts["model"] > counts["none"] + 2 * 11  # target and draft are one model here
    assert not (tmp_path / "costs").exists()

"""Rounded weights on disk: read when they are there, made when not, and never those of another model."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fastdraft import Generator, Model
from fastdraft.models.rounded import RoundedWeights
from tests import tiny

PROMPT = [(7 * i) % 300 + 3 for i in range(20)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and the folder in it that holds rounded weights."""
    monkeypatch.setenv("FASTDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quantised"


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Any) -> Path:
    return tiny.save(tmp_path / "model", tiny.model(dtype=torch.bfloat16, **tiny.WIDE), tokenizer)


def run(model: Any, **fields: Any) -> tuple[int, ...]:
    """Greedy tokens of a rounded model."""
    spec = model if isinstance(model, Model) else Model(str(model), **({"quantization": "int8"} | fields))
    with Generator(spec, None, tokenizer=tiny.tokenizer()) as generator:
        return generator.generate(PROMPT, temperature=0, max_tokens=16, ignore_eos=True).token_ids


def sets(cache: Path) -> list[Path]:
    return sorted(cache.iterdir()) if cache.is_dir() else []


def layers(kept: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((kept / "index.json").read_text("utf-8"))["layers"]
    return found


def zero_layer(kept: Path, name: str = "lm_head") -> None:
    """Makes one kept layer say nothing, so that whoever reads it can be told."""
    shard = kept / layers(kept)[name]
    save_file({k: v * 0 if k == f"{name}/weight" else v for k, v in load_file(shard).items()}, shard)


def test_the_second_load_reads_what_the_first_wrote(folder: Path, cache: Path) -> None:
    first = run(folder)
    (kept,) = sets(cache)
    assert {path.suffix for path in kept.iterdir()} == {".json", ".safetensors"}
    before = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert run(folder) == first
    assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == before
    zero_layer(kept)
    assert run(folder) == (0,) * 16  # all scores are zero: it was read


def test_each_rounding_is_kept_by_itself(folder: Path, cache: Path) -> None:
    eight, four = run(folder), run(folder, quantization="int4")
    assert eight != four
    assert sorted(kept.name.split("-")[1] for kept in sets(cache)) == ["int4", "int8"]
    assert (run(folder), run(folder, quantization="int4")) == (eight, four)


def test_nothing_is_kept_of_a_model_that_is_not_rounded(folder: Path, cache: Path) -> None:
    run(folder, quantization="none")
    assert not sets(cache)


def test_another_checkpoint_in_the_same_folder_is_rounded_anew(folder: Path, cache: Path) -> None:
    first = run(folder)
    tiny.save(folder, tiny.model(dtype=torch.bfloat16, seed=5, **tiny.WIDE), tiny.tokenizer())
    second = run(folder)
    shutil.rmtree(cache)
    assert run(folder) == second != first


def test_another_dtype_is_rounded_anew(folder: Path, cache: Path) -> None:
    run(folder)
    run(folder, dtype="float32")
    assert len(sets(cache)) == 2


def test_a_model_that_was_changed_in_memory_is_not_taken_for_its_files(folder: Path, cache: Path) -> None:
    first = run(folder)
    changed = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        changed.lm_head.weight.zero_()
    assert run(Model(changed, take=True, quantization="int8")) == (0,) * 16
    assert len(sets(cache)) == 1
    assert run(folder) == first


def test_keywords_that_may_choose_other_weights_keep_nothing(folder: Path, cache: Path) -> None:
    tiny.save(folder / "other", tiny.model(dtype=torch.bfloat16, seed=5, **tiny.WIDE), tiny.tokenizer())
    first = run(folder)
    other = run(folder / "other")
    assert other != first
    assert run(folder, kwargs={"subfolder": "other"}) == other


def _truncated(kept: Path) -> None:
    for shard in kept.glob("*.safetensors"):
        os.truncate(shard, shard.stat().st_size // 2)


def _gone(kept: Path) -> None:
    for shard in kept.glob("*.safetensors"):
        shard.unlink()


def _says(text: str) -> Callable[[Path], None]:
    return lambda kept: (kept / "index.json").write_text(text, "utf-8") and None


BREAKS: dict[str, Callable[[Path], None]] = {
    "a truncated shard": _truncated,
    "a missing shard": _gone,
    "no JSON": _says("{"),
    "another JSON": _says("[]"),
    "no layers": _says("{}"),
    "layers in a list": _says('{"layers": ["lm_head"]}'),
    "a shard that is none": _says('{"layers": {"lm_head": 3}}'),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_set_is_removed_and_made_again(
    broken: str, folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = run(folder)
    (kept,) = sets(cache)
    BREAKS[broken](kept)
    with caplog.at_level(logging.WARNING, logger="fastdraft"):
        assert run(folder) == first
    assert [record.message for record in caplog.records] == ["quantised_cache_broken"]
    assert not kept.exists()
    assert run(folder) == first
    assert sets(cache) == [kept]


def test_an_interrupted_write_is_no_set(folder: Path, cache: Path) -> None:
    first = run(folder)
    (kept,) = sets(cache)
    (kept / "index.json").unlink()
    assert run(folder) == first
    assert layers(kept)


def test_layers_that_a_set_lacks_are_added(folder: Path, cache: Path) -> None:
    first = run(folder)
    (kept,) = sets(cache)
    all_of_them = layers(kept)
    (kept / "index.json").write_text(json.dumps({"layers": {k: v for k, v in all_of_them.items() if k != "lm_head"}}))
    assert run(folder) == first
    assert layers(kept).keys() == all_of_them.keys()
    zero_layer(kept)
    assert run(folder) == (0,) * 16


def test_whoever_comes_second_leaves_the_first_ones_set(cache: Path) -> None:
    made = {"weight": torch.ones(16, 64, dtype=torch.int8), "scale": torch.ones(16)}
    with RoundedWeights("key", "int8").open() as mine:
        mine.put("layer", made)
        with RoundedWeights("key", "int8").open() as theirs:
            theirs.put("layer", made)
        before = sorted(path.name for path in sets(cache)[0].iterdir())
    assert sorted(path.name for path in sets(cache)[0].iterdir()) == before


def test_what_was_not_finished_leaves_no_files(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdraft.models.rounded._SHARD", 1)  # each layer is a shard, written at once
    with pytest.raises(KeyboardInterrupt), RoundedWeights("key", "int8").open() as kept:
        kept.put("layer", {"weight": torch.ones(16, 64, dtype=torch.int8), "scale": torch.ones(16)})
        assert list(sets(cache)[0].iterdir())
        raise KeyboardInterrupt
    assert not list(sets(cache)[0].iterdir())


def test_many_shards_are_one_set(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdraft.models.rounded._SHARD", 1)
    first = run(folder)
    (kept,) = sets(cache)
    assert len(set(layers(kept).values())) == len(layers(kept)) > 2
    assert run(folder) == first


def _no_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.mkdir()
    cache.write_text("a file stands here")


def _no_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastdraft.models.rounded.save_file", full)


@pytest.mark.parametrize("trouble", [_no_folder, _no_room])
@pytest.mark.parametrize("shard", [1, 256 * 10**6], ids=["at once", "at the end"])
def test_a_cache_that_cannot_be_written_costs_nothing_else(
    trouble: Any,
    shard: int,
    folder: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("fastdraft.models.rounded._SHARD", shard)
    first = run(folder)
    shutil.rmtree(cache.parent)
    trouble(cache, monkeypatch)
    with caplog.at_level(logging.INFO, logger="fastdraft.models.rounded"):
        assert run(folder) == first
    assert [record.message for record in caplog.records] == ["quantised_cache_not_written"]
    assert not [path for kept in cache.glob("*") for path in kept.iterdir()]

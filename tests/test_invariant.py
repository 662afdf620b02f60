"""A seeded call gives the same tokens whatever drafts, however many, and whoever shares the batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from fastdraft import DraftModel, Generator, NGram
from tests import tiny
from tests.grid import pairwise, whole

PROMPTS = ([(7 * i) % 300 + 3 for i in range(20)], [(11 * i) % 300 + 3 for i in range(7)], [5, 6, 7, 8] * 5)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {9: 2.0}},
)
SOURCES = ("draft_model", "ngram", "chain")
GAMMAS = (1, 2, 3, 4, 5, 6)
BATCHES = ("single", "batched")
AXES = (range(len(SETTINGS)), SOURCES, GAMMAS, BATCHES)
COMMON = {"max_tokens": 40, "ignore_eos": True, "seed": 11}


@functools.cache
def _target() -> Any:
    # float64, where rounding of differently shaped products can't flip a near-tie.
    return tiny.model("llama", dtype=torch.float64)


@functools.cache
def _generator(source: str) -> Generator:
    draft = DraftModel(tiny.perturbed(_target(), 0.03))
    sources = {"none": None, "draft_model": draft, "ngram": NGram(min=1), "chain": [NGram(min=2), draft]}
    return Generator(_target(), sources[source], tokenizer=tiny.tokenizer(), kv_memory="8MiB")


@functools.cache
def _plain(setting: int, prompt: int) -> tuple[int, ...]:
    return _generator("none").generate(PROMPTS[prompt], **SETTINGS[setting], **COMMON).token_ids


def _check(setting: int, source: str, gamma: int, batch: str) -> Any:
    prompts = PROMPTS if batch == "batched" else PROMPTS[:1]
    outs = _generator(source).batch(prompts, **SETTINGS[setting], **COMMON, gamma=gamma)
    for i, out in enumerate(outs):
        assert out.token_ids == _plain(setting, i)
        assert len(set(out.token_ids)) >= 10
    return outs


@pytest.mark.parametrize(("setting", "source", "gamma", "batch"), pairwise(AXES))
def test_equals_plain_decoding(setting: int, source: str, gamma: int, batch: str) -> None:
    _check(setting, source, gamma, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "source", "gamma", "batch"), whole(AXES))
def test_equals_plain_decoding_on_the_whole_grid(setting: int, source: str, gamma: int, batch: str) -> None:
    _check(setting, source, gamma, batch)


@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_drafts_are_neither_always_right_nor_always_wrong(setting: int) -> None:
    outs = _check(setting, "draft_model", 4, "batched")
    assert 0 < sum(o.stats.accepted_tokens for o in outs) < sum(o.stats.draft_tokens for o in outs)


def test_other_seeds_differ() -> None:
    generator = _generator("draft_model")
    outs = {generator.generate(PROMPTS[0], max_tokens=12, seed=s, temperature=1.0).token_ids for s in range(5)}
    assert len(outs) == 5


def test_samples_of_a_seeded_batch_repeat_and_differ() -> None:
    generator = _generator("chain")
    first = generator.batch([PROMPTS[0]], n=3, max_tokens=12, seed=5, temperature=1.0)
    again = generator.batch([PROMPTS[1], PROMPTS[0]], n=3, max_tokens=12, seed=5, temperature=1.0)
    assert [o.token_ids for o in first] == [o.token_ids for o in again[3:]]
    assert len({o.token_ids for o in first}) == 3
    alone = generator.generate(PROMPTS[0], max_tokens=12, seed=5, temperature=1.0)
    assert alone.token_ids == first[0].token_ids


def test_rejection_repeats_with_an_integer_gamma_and_one_source() -> None:
    generator = _generator("chain")
    options: dict[str, Any] = {"verification": "rejection", "gamma": 3, "source": "draft_model", "seed": 3}
    outs = [generator.generate(PROMPTS[0], max_tokens=24, temperature=1.0, **options) for _ in range(2)]
    assert outs[0].token_ids == outs[1].token_ids
    assert 0 < outs[0].stats.accepted_tokens < outs[0].stats.draft_tokens


def test_two_calls_of_one_name_don_t_mix() -> None:
    generator = _generator("chain")
    alone = [generator.generate(prompt, temperature=0, max_tokens=40, gamma=0).token_ids for prompt in PROMPTS[:2]]
    streams = [
        generator.stream(prompt, temperature=0, max_tokens=40, gamma=4, request_id="same") for prompt in PROMPTS[:2]
    ]
    assert [stream.completion.token_ids for stream in streams] == alone

"""Whatever ends a call, and wherever in a drafted block it falls, the outcome is that of plain decoding."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from fastdraft import Completion, DraftModel, Generator, NGram
from fastdraft.kv.pool import BlockPool
from fastdraft.kv.table import Table
from tests import tiny

PROMPT = [(7 * i) % 300 + 3 for i in range(20)]
TOKENS = 30
GAMMAS = (1, 4, 8)
RELEASED: list[tuple[BlockPool, int]] = []


@pytest.fixture(autouse=True)
def _lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes how many tokens each table held in KV when its request ended."""
    release = Table.release

    def noted(table: Table) -> None:
        RELEASED.append((table.pool, table.length))
        release(table)

    monkeypatch.setattr(Table, "release", noted)


@functools.cache
def _generator(source: str) -> Generator:
    target = tiny.model("llama")
    # The same weights: everything is accepted, so that every offset of a block is met.
    sources = {"self": DraftModel(target), "near": DraftModel(tiny.perturbed(target, 0.03)), "ngram": NGram(min=1)}
    return Generator(target, sources[source], tokenizer=tiny.tokenizer(), kv_memory="8MiB")


@functools.cache
def _tokens() -> tuple[int, ...]:
    return _generator("self").generate(PROMPT, temperature=0, gamma=0, max_tokens=TOKENS, ignore_eos=True).token_ids


def _agree(source: str, gamma: int, **options: Any) -> Completion[Any]:
    generator = _generator(source)
    common = {"temperature": 0, "logprobs": 2, "max_tokens": TOKENS} | options
    plain = generator.generate(PROMPT, gamma=0, **common)
    RELEASED.clear()
    fast = generator.generate(PROMPT, gamma=gamma, **common)
    # The target's KV ends one token before the output does, whatever was drafted beyond it.
    target = generator._worker._engine._runner.pool
    assert [n for pool, n in RELEASED if pool is target] == [len(PROMPT) + len(plain.token_ids) - 1]
    with generator.stream(PROMPT, gamma=gamma, **common) as stream:
        chunks = list(stream)
    for out in (fast, stream.completion):
        assert (out.text, out.token_ids) == (plain.text, plain.token_ids)
        assert (out.finish_reason, out.stop_reason) == (plain.finish_reason, plain.stop_reason)
        assert out.completion_tokens == len(out.token_ids) == len(out.logprobs)
        for ours, theirs in zip(out.logprobs, plain.logprobs, strict=True):
            assert ours.token_id == theirs.token_id and math.isclose(ours.logprob, theirs.logprob, abs_tol=1e-3)
            assert [t for t, _, _ in ours.top] == [t for t, _, _ in theirs.top]
        stats = out.stats
        assert stats.rounds + stats.accepted_tokens - out.completion_tokens in (0, 1)  # a stop may be a drafted token
        assert stats.completion_tokens == out.completion_tokens
    assert "".join(c.text for c in chunks) == plain.text
    assert tuple(t for c in chunks for t in c.token_ids) == plain.token_ids
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [plain.finish_reason]
    metrics = generator.metrics()
    assert metrics.free_blocks == metrics.total_blocks and metrics.draft_free_blocks == metrics.draft_total_blocks
    return fast


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("source", ("self", "near", "ngram"))
def test_max_tokens_at_every_offset(source: str, gamma: int) -> None:
    for limit in range(1, 14):
        out = _agree(source, gamma, max_tokens=limit, ignore_eos=True)
        assert out.token_ids == _tokens()[:limit]
        assert out.finish_reason == "length"


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("source", ("self", "near", "ngram"))
def test_stop_token_at_every_offset(source: str, gamma: int) -> None:
    tokens = _tokens()
    for place in range(12):
        out = _agree(source, gamma, stop_token_ids=[tokens[place]], ignore_eos=True)
        cut = tokens.index(tokens[place]) + 1
        assert out.token_ids == tokens[:cut]
        assert (out.finish_reason, out.stop_reason) == ("stop", tokens[place])


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("source", ("self", "near", "ngram"))
def test_end_of_sequence_at_every_offset(source: str, gamma: int) -> None:
    generator = _generator(source)
    for place in range(10):
        # The bias makes the end-of-sequence token win once min_tokens no longer forbids it.
        out = _agree(source, gamma, logit_bias={generator.tokenizer.eos_token_id: 1e4}, min_tokens=place)
        assert len(out.token_ids) == place + 1
        assert (out.finish_reason, out.stop_reason) == ("stop", None)


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("source", ("self", "near", "ngram"))
def test_stop_string_at_every_offset(source: str, gamma: int) -> None:
    text = _generator(source).generate(PROMPT, temperature=0, gamma=0, max_tokens=TOKENS, ignore_eos=True).text
    for start in range(0, min(20, len(text) - 4), 2):
        for width in (1, 4):
            stop = text[start : start + width]
            out = _agree(source, gamma, stop=[stop, "never seen"], ignore_eos=True)
            assert out.text == text[: text.index(stop)]
            assert (out.finish_reason, out.stop_reason) == ("stop", stop)


def test_a_stop_at_the_cap_is_a_stop() -> None:
    tokens = _tokens()
    cap = next(i for i in range(4, 12) if tokens.index(tokens[i]) == i)
    out = _agree("self", 4, stop_token_ids=[tokens[cap]], max_tokens=cap + 1, ignore_eos=True)
    assert out.finish_reason == "stop" and len(out.token_ids) == cap + 1


@pytest.mark.parametrize("gamma", (0, 4))
def test_min_tokens_holds_back_every_end(gamma: int) -> None:
    tokens = _tokens()
    out = _agree("self", gamma or 1, stop_token_ids=[tokens[2]], min_tokens=10)
    assert len(out.token_ids) >= 10
    assert tokens[2] not in out.token_ids[:9]


def test_context_and_kv_end_a_call_alike() -> None:
    target = tiny.model("llama", context=64)
    for options in ({}, {"kv_memory": 128 * 2 * 2 * 8 * 2 * 4 * 2}):
        with Generator(target, DraftModel(target), tokenizer=tiny.tokenizer(), **options) as generator:
            outs = [
                generator.generate(PROMPT, temperature=0, max_tokens=500, gamma=g, ignore_eos=True) for g in (0, 3, 8)
            ]
            assert {o.finish_reason for o in outs} == {"length"}
            assert len({o.token_ids for o in outs}) == 1
            # The last token is never fed, so it needs no position of its own.
            assert len(PROMPT) + len(outs[0].token_ids) == 65

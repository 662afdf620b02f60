"""KV through the public door: prefixes, copies, windows, rollback, preemption; and the runner's own oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastdraft import DraftModel, Generator, NGram
from fastdraft.attention.sdpa import SdpaAttention
from fastdraft.models.runner import Feed, Runner, own_forward
from tests import tiny

BLOCK = SdpaAttention.block_size
PROMPT = [(7 * i) % 300 + 3 for i in range(70)]
COMMON: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def _free(generator: Generator) -> None:
    metrics = generator.metrics()
    assert metrics.running == metrics.queued == 0
    assert metrics.free_blocks == metrics.total_blocks
    assert metrics.draft_free_blocks == metrics.draft_total_blocks


@pytest.mark.parametrize("length", (1, 15, 16, 17, 31, 32, 33, 48))
def test_a_whole_prompt_prefix_hit_gives_the_same_tokens(length: int, tokenizer: Any) -> None:
    target = tiny.model("qwen2")
    prompt = PROMPT[:length]
    expected = tiny.greedy(target, prompt, 24)
    with Generator(target, DraftModel(tiny.perturbed(target, 0.03)), tokenizer=tokenizer) as generator:
        outs = [generator.generate(prompt, gamma=4, **COMMON) for _ in range(3)]
        assert [list(out.token_ids) for out in outs] == [expected] * 3
        # Full blocks are reused, but one token is always left to feed.
        full = length // BLOCK * BLOCK
        assert [out.stats.prefix_tokens for out in outs] == [0, min(full, length - 1), min(full, length - 1)]
        _free(generator)


def test_prefixes_of_one_another_share_and_never_hold_rejected_drafts(tokenizer: Any) -> None:
    target = tiny.model("llama")
    hostile = tiny.model("llama", seed=9)  # nearly every draft is rejected
    prompts = [[*PROMPT[:50], 5, 6, 7], PROMPT[:50] + PROMPT[3:40] + [5, 6, 7], [*PROMPT[:4], 5, 6, 7]]
    order = [0, 1, 0, 2, 0]
    with Generator(target, DraftModel(hostile), tokenizer=tokenizer) as generator:
        for i, which in enumerate(order):
            out = generator.generate(prompts[which], gamma=5, **COMMON)
            assert list(out.token_ids) == tiny.greedy(target, prompts[which], 24)
            assert out.stats.prefix_tokens == [0, 48, 48, 0, 48][i]
        assert generator.metrics().prefix_hit_tokens == 3 * 48
        _free(generator)


def test_prefixes_are_evicted_when_blocks_run_out(tokenizer: Any) -> None:
    target = tiny.model("llama")
    # Twelve blocks: each prompt of 70 tokens and 24 new ones needs six.
    with Generator(target, None, tokenizer=tokenizer, kv_memory=12 * BLOCK * 2 * 2 * 2 * 8 * 4) as generator:
        assert generator.metrics().total_blocks == 12
        for shift in (0, 1, 2, 3, 0):
            prompt = [(t + shift) % 300 + 3 for t in PROMPT]
            out = generator.generate(prompt, **COMMON)
            assert list(out.token_ids) == tiny.greedy(target, prompt, 24)
        assert out.stats.prefix_tokens == 0  # the first prompt's blocks went to later ones
        _free(generator)


def test_preemption_is_invisible(tokenizer: Any) -> None:
    target = tiny.model("llama")
    prompts = [[(t + shift) % 300 + 3 for t in PROMPT[: 20 + 9 * shift]] for shift in range(5)]
    expected = [tiny.greedy(target, prompt, 60) for prompt in prompts]
    # Fourteen blocks hold two finished requests, not five.
    memory = 14 * BLOCK * 2 * (2 * 2 * 8 * 4)
    for draft in (None, DraftModel(tiny.perturbed(target, 0.03)), NGram(min=1)):
        budget = memory * (2 if isinstance(draft, DraftModel) else 1)
        with Generator(target, draft, tokenizer=tokenizer, kv_memory=budget) as generator:
            assert generator.metrics().total_blocks == 14
            outs = generator.batch(prompts, temperature=0, max_tokens=60, gamma=4, ignore_eos=True)
            assert [list(out.token_ids) for out in outs] == expected
            _free(generator)


@pytest.mark.parametrize("architecture", ("gemma3_text", "qwen2", "mistral"))
@pytest.mark.parametrize("window", (8, 24))
def test_sliding_windows_of_other_sizes_than_a_block(architecture: str, window: int, tokenizer: Any) -> None:
    fields: dict[str, Any] = {"sliding_window": window}
    if architecture == "qwen2":
        fields |= {"use_sliding_window": True, "max_window_layers": 1}
    target = tiny.model(architecture, **fields)
    prompts = [PROMPT, PROMPT[:5], PROMPT[10:40]]
    expected = [tiny.greedy(target, prompt, 40) for prompt in prompts]
    draft = DraftModel(tiny.perturbed(target, 0.03))
    with Generator(target, [NGram(), draft], tokenizer=tokenizer) as generator:
        for _ in range(2):  # the second time from reused prefixes
            outs = generator.batch(prompts, temperature=0, max_tokens=40, gamma=4, ignore_eos=True)
            assert [list(out.token_ids) for out in outs] == expected
        assert 0 < sum(o.stats.accepted_tokens for o in outs) < sum(o.stats.draft_tokens for o in outs)
        # Beyond the window the model really forgets: full attention gives other tokens.
        full = tiny.model(architecture, **(fields | {"sliding_window": 4096}))
        assert tiny.greedy(full, PROMPT, 40) != expected[0]


def test_long_prompts_prefill_in_chunks(tokenizer: Any) -> None:
    target = tiny.model("llama", context=2048)
    prompt = [(7 * i) % 300 + 3 for i in range(1500)]
    fed: list[int] = []
    target.register_forward_pre_hook(lambda m, a, k: fed.append(k["input_ids"].shape[1]), with_kwargs=True)
    with Generator(target, DraftModel(tiny.perturbed(target, 0.03)), tokenizer=tokenizer) as generator:
        fed.clear()
        outs = generator.batch([prompt, PROMPT], gamma=4, **COMMON)
        assert max(fed) <= 512 + 512 // 4 + 8
        assert list(outs[0].token_ids) == tiny.greedy(target, prompt, 24)
        assert list(outs[1].token_ids) == tiny.greedy(target, PROMPT, 24)
        # Chunks that end before the prompt does verify nothing.
        assert outs[0].stats.rounds + outs[0].stats.accepted_tokens == 24


def test_a_draft_that_was_off_catches_up(tokenizer: Any) -> None:
    target = tiny.model("llama", context=2048)
    prompt = [(7 * i) % 300 + 3 for i in range(900)]
    draft = tiny.perturbed(target, 0.02)
    with Generator(target, [NGram(min=1, max=1), DraftModel(draft)], tokenizer=tokenizer) as generator:
        # n-gram drafts win wherever a token came before, so the model's own KV lags by many rounds.
        out = generator.generate(prompt, temperature=0, max_tokens=60, gamma=3, ignore_eos=True)
        assert list(out.token_ids) == tiny.greedy(target, prompt, 60)
        assert {"ngram", "draft_model"} == set(out.stats.by_source)
        model = out.stats.by_source["draft_model"]
        assert 0 < model.accepted_tokens < model.draft_tokens
        _free(generator)


def test_kv_after_rollback_equals_a_fresh_prefill() -> None:
    target = tiny.model("qwen3", dtype=torch.float64)
    vocabulary = target.config.vocab_size
    with torch.inference_mode():
        _, layers = own_forward(target, PROMPT[:3])
    backend = SdpaAttention()
    runner = Runner(target, vocabulary=vocabulary, layers=layers, blocks=16, backend=backend)
    other = Runner(target, vocabulary=vocabulary, layers=layers, blocks=16, backend=backend)
    table, fresh = runner.table(), other.table()
    good, wrong = PROMPT[:40], [9, 9, 9, 9, 9, 9]
    with torch.inference_mode():
        runner.reserve(table, 30 + len(wrong))
        runner.forward([Feed(good[:30])], [table], [0])
        runner.forward([Feed((), torch.tensor(wrong))], [table], [len(wrong)])
        table.truncate(30)
        runner.reserve(table, 40)
        rolled = runner.forward([Feed(good[30:])], [table], [10]).logits_RV
        other.reserve(fresh, 40)
        once = other.forward([Feed(good)], [fresh], [10]).logits_RV
        own = own_forward(target, good)[0][-10:]
    assert torch.allclose(rolled, once, atol=1e-12) and torch.allclose(rolled, own, atol=1e-12)
    for ours, theirs in zip(_contents(runner, table), _contents(other, fresh), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_forks_share_blocks_and_copy_on_write() -> None:
    target = tiny.model("llama", dtype=torch.float64)
    with torch.inference_mode():
        _, layers = own_forward(target, PROMPT[:3])
        runner = Runner(target, vocabulary=320, layers=layers, blocks=24, backend=SdpaAttention())
        trunk = runner.table()
        runner.reserve(trunk, 40)
        runner.forward([Feed(PROMPT[:40])], [trunk], [0])
        branches = [trunk, trunk.fork(), trunk.fork()]
        assert runner.pool.in_use == 3
        tails = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
        for branch in branches:
            runner.reserve(branch, 43)
        assert runner.pool.in_use == 5  # the half-full block was copied for all but its last holder
        rows = runner.forward([Feed(tail) for tail in tails], branches, [1, 1, 1]).logits_RV
        for row, tail in zip(rows, tails, strict=True):
            assert torch.allclose(row, own_forward(target, PROMPT[:40] + tail)[0][-1], atol=1e-12)
    for branch in branches:
        branch.release()
    assert runner.pool.in_use == 0


def test_scattered_blocks_read_as_consecutive_ones_do() -> None:
    target = tiny.model("llama", dtype=torch.float64)
    with torch.inference_mode():
        _, layers = own_forward(target, PROMPT[:3])
        runner = Runner(target, vocabulary=320, layers=layers, blocks=12, backend=SdpaAttention())
        tables = [runner.table(), runner.table()]
        for length in range(BLOCK, 5 * BLOCK + 1, BLOCK):  # grown in turns until they collide
            for table in tables:
                runner.reserve(table, length)
        runner.pool.give(tables[0].blocks.pop(2))
        blocker = runner.pool.take(1)
        runner.reserve(tables[0], 70)
        assert any(b - a != 1 for a, b in zip(tables[0].blocks, tables[0].blocks[1:], strict=False)) or blocker
        tables[0].blocks.reverse()
        rows = runner.forward([Feed(PROMPT), Feed(PROMPT[:33])], tables, [1, 1]).logits_RV
        assert torch.allclose(rows[0], own_forward(target, PROMPT)[0][-1], atol=1e-12)
        assert torch.allclose(rows[1], own_forward(target, PROMPT[:33])[0][-1], atol=1e-12)


def _contents(runner: Runner, table: Any) -> list[torch.Tensor]:
    slots = [table.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(table.length)]
    cache = runner._cache
    return [pool[slots] for pool in (*cache.keys, *cache.values)]


def test_whether_a_request_drafts_does_not_depend_on_its_batch_mates(tokenizer: Any) -> None:
    target = tiny.model("llama", context=1024)
    prompts = [[(t * 7 + shift) % 300 + 3 for t in range(200)] for shift in range(8)]
    options: dict[str, Any] = {"temperature": 1.0, "verification": "rejection", "alpha": 0.5, "gamma": 3, "seed": 5}
    with Generator(target, DraftModel(tiny.perturbed(target, 0.03)), tokenizer=tokenizer) as generator:
        together = generator.batch(prompts, max_tokens=12, ignore_eos=True, **options)
        alone = [generator.generate(prompt, max_tokens=12, ignore_eos=True, **options) for prompt in prompts]
    # 1,600 tokens to catch up with in one round: each still drafts as it does by itself.
    assert [out.stats.gammas[:3] for out in together] == [out.stats.gammas[:3] for out in alone]
    assert all(gamma > 0 for out in together for gamma in out.stats.gammas[:2])

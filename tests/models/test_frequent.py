"""A draft's output layer cut to frequent tokens: which they are, what is counted, and that it stays exact."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdraft import ConfigError, DraftModel, Generator, Model
from fastdraft.models.frequent import Frequencies, cut_head, frequent, structural
from tests import tiny

PROMPT = [(7 * i) % 300 + 3 for i in range(20)]
TEXT = "eat the tea in the sand " * 5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and the folder in it that holds counts."""
    monkeypatch.setenv("FASTDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "frequencies"


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.model()


def vocabulary(caplog: pytest.LogCaptureFixture) -> int:
    """How many tokens the log says a draft can propose."""
    (record,) = [record for record in caplog.records if record.message == "draft_vocabulary"]
    return int(record.tokens)  # type: ignore[attr-defined]


# Which tokens.


def test_the_most_frequent_are_kept_and_the_lowest_ids_fill_up() -> None:
    counts = Counter({200: 9, 150: 7, 100: 5, 250: 1})
    assert frequent(3, counts, (), 300) == (100, 150, 200)
    assert frequent(6, counts, (), 300) == (0, 1, 100, 150, 200, 250)


def test_some_are_always_kept() -> None:
    counts = Counter({200: 9, 150: 7})
    assert frequent(3, counts, (299, 0), 300) == (0, 200, 299)
    assert frequent(1, counts, (299, 0), 300) == (0, 299)
    assert frequent(3, counts, (999,), 300) == (0, 150, 200)  # no id of this vocabulary


def test_ids_beyond_the_vocabulary_are_never_kept() -> None:
    assert frequent(2, Counter({310: 50, 5: 1}), (), 300) == (0, 5)


@pytest.mark.parametrize("wanted", [300, 301, 10**9])
def test_as_many_as_there_are_is_all_of_them(wanted: int) -> None:
    assert frequent(wanted, Counter({5: 1}), (), 300) is None


def test_auto_waits_for_enough() -> None:
    known = Counter({token: 100 for token in range(200)})
    assert known.total() == 20_000
    kept = frequent("auto", known, (), 50_000)
    assert kept is not None and set(range(200)) <= set(kept)
    assert frequent("auto", Counter({token: 99 for token in range(200)}), (), 50_000) is None


def test_auto_waits_until_new_tokens_are_rare() -> None:
    often = Counter({token: 100 for token in range(400)})
    rare = Counter({1000 + token: 1 for token in range(1000)})
    assert frequent("auto", often + rare, (), 50_000) is None


def test_auto_covers_nearly_all_that_was_counted() -> None:
    often = Counter({40_000 + token: 100 for token in range(1000)})
    seldom = Counter({1000 + token: 2 for token in range(2000)})
    counts = often + seldom
    kept = frequent("auto", counts, (), 50_000)
    assert kept is not None and kept == tuple(sorted(set(kept)))
    assert len(kept) % 1024 == 0
    covered = sum(counts[token] for token in kept)
    assert covered >= 0.998 * counts.total()
    assert (
        sum(counts[token] for token in sorted(counts, key=counts.get)[-(len(kept) - 1024) :]) < 0.998 * counts.total()
    )  # type: ignore[arg-type]


# The output layer.


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi"])  # phi has a bias there
def test_a_cut_head_has_the_rows_of_its_tokens(architecture: str) -> None:
    model, whole = tiny.model(architecture), tiny.model(architecture)
    ids = (3, 17, 200, 319)
    cut_head(model, ids)
    x = torch.tensor([PROMPT])
    with torch.no_grad():
        torch.testing.assert_close(model(x).logits, whole(x).logits[..., list(ids)])


def test_a_borrowed_draft_keeps_its_output_layer(target: Any, tokenizer: Any) -> None:
    draft = tiny.perturbed(tiny.model(tie_word_embeddings=True), 0.03)
    head, weight = draft.lm_head, draft.lm_head.weight
    before = weight.clone()
    with Generator(target, DraftModel(draft, vocabulary=40), tokenizer=tokenizer) as generator:
        generator.generate(PROMPT, max_tokens=8, gamma=3, ignore_eos=True)
    assert draft.lm_head is head and draft.lm_head.weight is weight
    assert torch.equal(weight, before)
    with torch.no_grad():
        assert draft(torch.tensor([PROMPT])).logits.shape[-1] == 320


@pytest.mark.parametrize("form", ["borrowed", "taken", "folder"])
def test_only_kept_tokens_are_proposed(form: str, target: Any, tokenizer: Any, tmp_path: Path) -> None:
    # The draft is the target: whatever it can propose is accepted, so that a refused token would be one it lacks.
    forms: dict[str, Any] = {"borrowed": target, "taken": Model(tiny.model(), take=True)}
    if form == "folder":
        forms["folder"] = Model(str(tiny.save(tmp_path / "draft", tiny.model(), tokenizer)), quantization="none")
    plain = tiny.greedy(target, PROMPT, 48)
    ids = tuple(sorted(set(plain))[::2])
    source = DraftModel(forms[form], vocabulary=ids)
    with Generator(target, source, tokenizer=tokenizer) as generator:
        out = generator.generate(PROMPT, temperature=0, max_tokens=48, gamma=1, ignore_eos=True, trace=True)
    assert list(out.token_ids) == plain
    assert 0 < out.stats.accepted_tokens < out.stats.draft_tokens
    assert out.trace is not None
    at = 0
    for round_ in out.trace.rounds:
        assert set(round_.draft) <= set(ids)
        if round_.draft:
            assert (round_.accepted == 1) == (plain[at] in ids), at
        at += len(round_.tokens)


def test_a_call_s_own_tokens_are_proposed_beside_the_frequent_ones(target: Any, tokenizer: Any) -> None:
    # Of a draft that is the target, whatever it can propose is accepted.
    often = list(range(40))  # no text was counted: the lowest ids, beside end-of-sequence and the like
    own = [300, 301, 302, 303]
    bias = {token: 60.0 for token in own}
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "logit_bias": bias, "ignore_eos": True}
    with Generator(target, DraftModel(target, vocabulary=40), tokenizer=tokenizer) as generator:
        with_them = generator.generate([*often[4:8], *own], gamma=3, **options)
        assert with_them.stats.acceptance_rate == 1.0
        # Another prompt beside it, that lacks them, has only what it has said itself.
        alone = [generator.generate(PROMPT, gamma=3, **options), with_them]
        both = generator.batch([PROMPT, [*often[4:8], *own]], gamma=3, **options)
        assert [out.token_ids for out in both] == [out.token_ids for out in alone]
        assert [out.stats.accepted_tokens for out in both] == [out.stats.accepted_tokens for out in alone]
        plain = generator.generate([*often[4:8], *own], gamma=0, **options)
    assert with_them.token_ids == plain.token_ids


def test_structure_is_what_json_is_held_together_by() -> None:
    words = {'":[{"': 1, '\u0120"': 2, "},\u010a": 3, "word": 4, '"word': 5, "\u0120": 6, ",": 7}
    assert structural(words) == (1, 2, 3, 7)


def test_ids_may_come_in_any_order_and_twice(target: Any, tokenizer: Any) -> None:
    outs = []
    for ids in ((5, 9, 100, 200), (200, 5, 100, 9, 5)):
        with Generator(target, DraftModel(tiny.perturbed(target, 0.03), vocabulary=ids), tokenizer=tokenizer) as g:
            outs.append(g.generate(PROMPT, max_tokens=32, gamma=3, seed=4, ignore_eos=True))
    assert outs[0].token_ids == outs[1].token_ids
    assert outs[0].stats.accepted_tokens == outs[1].stats.accepted_tokens


def test_ids_that_target_and_draft_don_t_share_are_refused(target: Any, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"draft_model holds token 320.*320 tokens.*ids under 320"):
        Generator(target, DraftModel(target, vocabulary=(5, 320)), tokenizer=tokenizer)


# What is counted.


def test_a_text_says_what_is_frequent(target: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    counted = Counter(tokenizer(TEXT).input_ids)
    source = DraftModel(target, vocabulary=len(counted) + 3, text=TEXT)  # the three are special
    caplog.set_level(logging.INFO, logger="fastdraft")
    with Generator(target, source, tokenizer=tokenizer) as generator:
        # A bias for what the text holds: the target says nothing else, and the draft lacks none of it.
        bias = {token: 40.0 for token in counted}
        out = generator.generate(PROMPT, max_tokens=32, gamma=4, temperature=0, logit_bias=bias, ignore_eos=True)
    assert vocabulary(caplog) == len(counted) + 3
    assert out.stats.acceptance_rate == 1.0


def test_no_more_than_there_are(target: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fastdraft")
    with Generator(target, DraftModel(target, vocabulary=10**6), tokenizer=tokenizer) as generator:
        out = generator.generate(PROMPT, max_tokens=16, gamma=3, temperature=0, ignore_eos=True)
    assert vocabulary(caplog) == 320
    assert out.stats.acceptance_rate == 1.0


def test_auto_begins_with_all_and_learns_from_call_to_call(
    tokenizer: Any, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastdraft.models.frequent._SAVE_EVERY", 100)
    monkeypatch.setattr("fastdraft.models.frequent._ENOUGH", 150)
    monkeypatch.setattr("fastdraft.models.frequent._STEP", 4)
    caplog.set_level(logging.INFO, logger="fastdraft")
    target = tiny.model()
    bias = {token: 60.0 for token in (40, 50, 60)}

    def call() -> Any:
        caplog.clear()
        with Generator(target, DraftModel(target, vocabulary="auto"), tokenizer=tokenizer) as generator:
            return generator.generate(PROMPT, max_tokens=110, temperature=1.0, logit_bias=bias, seed=1, ignore_eos=True)

    first = call()
    assert vocabulary(caplog) == 320
    call()
    assert vocabulary(caplog) == 320  # 110 tokens are not enough
    third = call()
    assert vocabulary(caplog) == 4
    assert third.token_ids == first.token_ids
    (path,) = cache.iterdir()
    counts = json.loads(path.read_text("utf-8"))
    assert sum(counts.values()) == 330
    assert {int(token) for token in counts} == set(first.token_ids)


def test_counts_are_all_that_is_kept_and_add_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdraft.models.frequent._SAVE_EVERY", 4)
    one, two, other = Frequencies("target"), Frequencies("target"), Frequencies("another")
    one.add([1, 2])
    assert not one.read()
    one.add([2, 3])
    two.add([3, 3, 3, 9])
    other.add([7] * 4)
    assert one.read() == two.read() == Counter({3: 4, 2: 2, 1: 1, 9: 1})
    assert other.read() == Counter({7: 4})
    assert len(list(cache.iterdir())) == 2
    for path in cache.iterdir():
        assert all(token.isdigit() and type(n) is int for token, n in json.loads(path.read_text("utf-8")).items())


@pytest.mark.parametrize("text", ["", "[", "[1]", '{"a": 1}', '{"1": null}', "\x00"])
def test_counts_that_cannot_be_read_are_none(text: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdraft.models.frequent._SAVE_EVERY", 1)
    frequencies = Frequencies("target")
    frequencies.add([1])
    (path,) = cache.iterdir()
    path.write_text(text)
    assert not frequencies.read()
    frequencies.add([1])
    assert frequencies.read() == Counter({1: 1})


def test_counts_that_cannot_be_written_harm_nobody(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, target: Any, tokenizer: Any
) -> None:
    monkeypatch.setattr("fastdraft.models.frequent._SAVE_EVERY", 8)
    cache.parent.mkdir()
    cache.write_text("a file stands here")
    caplog.set_level(logging.INFO, logger="fastdraft")
    with Generator(target, DraftModel(target, vocabulary="auto"), tokenizer=tokenizer) as generator:
        out = generator.generate(PROMPT, max_tokens=16, temperature=0, gamma=2, ignore_eos=True)
        assert len(out.token_ids) == 16
        assert len(generator.generate(PROMPT, max_tokens=4, ignore_eos=True).token_ids) == 4
    assert "frequencies_not_saved" in [record.message for record in caplog.records]

"""Which drafts fit a target, and what the others are told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from fastdraft import DraftModel, Generator, Model, VocabularyMismatchError
from fastdraft.models.pairing import pair, usable_vocabulary
from fastdraft.models.support import context_of
from tests import tiny

PROMPT = [(7 * i) % 300 + 3 for i in range(20)]


def _saved(folder: Path, model: Any, tokenizer: Any) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_same_vocabulary(tokenizer: Any) -> None:
    config = tiny.config("llama")
    found = pair(config, tokenizer, config, tokenizer, "draft")
    assert (found.vocabulary, found.shared_tokens, found.overlap, found.notes) == ("same", 320, 1.0, ())


def test_a_padded_output_layer_is_the_same_vocabulary_and_never_speaks(tokenizer: Any) -> None:
    target, draft = tiny.model("llama", vocabulary=384), tiny.model("llama", vocabulary=352, seed=3)
    found = pair(target.config, tokenizer, draft.config, tokenizer, "draft")
    assert (found.vocabulary, found.shared_tokens) == ("padded", 320)
    with Generator(target, DraftModel(draft), tokenizer=tokenizer) as generator:
        outs = generator.batch([PROMPT] * 8, temperature=5.0, max_tokens=60, gamma=4, ignore_eos=True)
    assert all(0 <= token < 320 for out in outs for token in out.token_ids)
    assert sum(out.stats.draft_tokens for out in outs) > 0


def test_tokenizers_padded_by_gguf_files_are_cut(tokenizer: Any) -> None:
    padded = tiny.tokenizer()
    padded.add_tokens([f"[PAD{i}]" for i in range(320, 336)])
    assert usable_vocabulary(padded, 336) == 320
    assert usable_vocabulary(padded, 330) == 320
    found = pair(tiny.config("llama", vocabulary=336), padded, tiny.config("llama"), tokenizer, "draft")
    assert (found.vocabulary, found.shared_tokens) == ("padded", 320)


def test_a_token_more_on_one_side_is_padding(tokenizer: Any) -> None:
    more = tiny.tokenizer()
    more.add_tokens(["<|tool|>", "<|end_tool|>"])
    found = pair(tiny.config("llama", vocabulary=322), more, tiny.config("llama", vocabulary=336), tokenizer, "draft")
    assert (found.vocabulary, found.shared_tokens) == ("padded", 320)
    target, draft = tiny.model("llama", vocabulary=322), tiny.model("llama", vocabulary=336, seed=3)
    with Generator(target, DraftModel(draft), tokenizer=more) as generator:
        plain = generator.generate(PROMPT, temperature=1.0, seed=4, max_tokens=40, gamma=0, ignore_eos=True)
        fast = generator.generate(PROMPT, temperature=1.0, seed=4, max_tokens=40, gamma=4, ignore_eos=True)
        assert fast.token_ids == plain.token_ids
        assert fast.stats.draft_tokens > 0
    with pytest.raises(VocabularyMismatchError, match="has rows for 320 ids, fewer than the target's 322"):
        Generator(target, DraftModel(tiny.model("llama")), tokenizer=more)


@pytest.mark.parametrize(("shift", "kind"), ((True, "overlapping"), (False, "foreign")))
def test_other_vocabularies_are_refused_and_the_overlap_named(
    shift: bool, kind: str, tokenizer: Any, tmp_path: Path
) -> None:
    other = tiny.letters(8)
    if shift:
        words = {token: i + 5 for token, i in tokenizer.get_vocab().items() if i > 2}
        other = tiny.tokenizer()
        other.get_vocab = lambda: words  # the same tokens under other ids
        with pytest.raises(VocabularyMismatchError, match=kind) as caught:
            pair(tiny.config("llama"), tokenizer, tiny.config("llama", vocabulary=330), other, "org/draft")
    else:
        folder = _saved(tmp_path, tiny.model("llama", vocabulary=8), other)
        with pytest.raises(VocabularyMismatchError, match=kind) as caught:
            Generator(tiny.model("llama"), folder, tokenizer=tokenizer)
    assert "%" in str(caught.value) and "NGram" in str(caught.value)


def test_a_loaded_draft_without_a_tokenizer_is_taken_to_share_it(tokenizer: Any) -> None:
    found = pair(tiny.config("llama"), tokenizer, tiny.config("llama", vocabulary=336), None, "draft")
    assert (found.vocabulary, found.shared_tokens) == ("assumed", 320)
    with pytest.raises(VocabularyMismatchError, match="has rows for 8 ids, fewer than the target's 320"):
        Generator(tiny.model("llama"), tiny.model("llama", vocabulary=8), tokenizer=tokenizer)


def test_rope_and_context_differences_are_reported(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny.model("llama", context=256, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    draft = tiny.model("llama", context=64, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    spec = DraftModel(Model(_saved(tmp_path, draft, tokenizer)), name="small")
    with caplog.at_level(logging.WARNING, "fastdraft"), Generator(target, spec, tokenizer=tokenizer) as generator:
        notes = " / ".join(generator.pairings["small"].notes)
        assert "target 10000, draft 500000" in notes and "ends at 64 of the target's 256" in notes
        assert [r.getMessage() for r in caplog.records].count("draft_differs") == 2
        # Beyond the draft's context there is no drafting, and no position it was not made for.
        seen: list[int] = []
        hook = lambda m, a, k: seen.append(int(k["position_ids"].max()))  # noqa: E731
        generator._worker._engine._chain.sources[0].runner._model.register_forward_pre_hook(hook, with_kwargs=True)
        out = generator.generate(PROMPT, temperature=0, max_tokens=100, gamma=4, ignore_eos=True)
        assert list(out.token_ids) == tiny.greedy(target, PROMPT, 100)
        assert max(seen) <= 63 and out.stats.draft_tokens > 0


def test_longrope_is_capped_at_its_original_context() -> None:
    factors = [1.0] * 4
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 64,
    }
    config = tiny.config("phi3", context=512, rope_parameters=rope, original_max_position_embeddings=64)
    assert context_of(config) == 64

"""The law of constrained outputs through the public `Generator`: the target masked at each token, enumerated."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from outlines.types import Regex

from fastdraft import DraftModel, Generator, NGram
from fastdraft.constraints.grammars import Grammars
from fastdraft.constraints.trail import Trail
from fastdraft.constraints.types import as_constrained, spec_of
from fastdraft.sampling.probs import Warp
from tests import tiny
from tests.grid import whole
from tests.law import FAIL, PASS, SAMPLES, Text, brisk, chi_square, reference
from tests.test_law import SOURCES, VERIFICATIONS, WARPS

EOS = 0
GAMMA = 3
TYPE = Regex("[ate]{1,2}(!|ea)?")


@functools.cache
def _models() -> tuple[Any, Any]:
    target = tiny.model("llama", num_hidden_layers=1, context=64, seed=3, spread=0.4)
    return target, tiny.perturbed(target, 0.3)


@functools.cache
def _prompt() -> tuple[int, ...]:
    return tuple(tiny.tokenizer()("a te ea at!e a t").input_ids)


def _trail(text: Text, grammars: Grammars) -> Trail:
    trail = Trail(lambda: grammars.start(spec_of(as_constrained(TYPE))), tiny.VOCABULARY, [EOS])
    for token in text:
        trail.commit(token)
    return trail


def _laws(options: dict[str, Any]) -> dict[Text, float]:
    """The probability of every whole output, its end included where there could be more."""
    grammars = Grammars(tiny.tokenizer(), tiny.VOCABULARY, [EOS])
    found: dict[Text, float] = {}
    waiting: list[tuple[Text, float]] = [((), 1.0)]
    while waiting:
        text, mass = waiting.pop()
        bits = _trail(text, grammars).mask().view(torch.uint8)
        legal_V = torch.tensor([bool(bits[t >> 3] >> (t & 7) & 1) for t in range(tiny.VOCABULARY)])
        with torch.no_grad():
            logits_V = _models()[0](torch.tensor([[*_prompt(), *text]])).logits[0, -1]
        law_V = reference(logits_V.masked_fill(~legal_V, -torch.inf), Warp(**options), _prompt(), text)
        for token in legal_V.nonzero()[:, 0].tolist():
            reached = mass * float(law_V[token])
            if token == EOS or (reached and _trail((*text, token), grammars).exhausted):
                found[(*text, token)] = reached
            elif reached:
                waiting.append(((*text, token), reached))
    return found


def _sample(source: str, **options: Any) -> Counter[Text]:
    target, draft = _models()
    drafts = {"none": None, "draft_model": DraftModel(draft), "ngram": NGram(min=1)}
    drafts["chain"] = [drafts["ngram"], drafts["draft_model"]]
    with (
        brisk(),
        Generator(
            target, drafts[source], tokenizer=tiny.tokenizer(), max_batch=96, max_queue=SAMPLES, kv_memory="32MiB"
        ) as generator,
    ):
        outs = generator.batch([_prompt()], n=SAMPLES, max_tokens=9, gamma=GAMMA, seed=1, output_type=TYPE, **options)
    if source != "none":
        assert 0 < sum(out.stats.accepted_tokens for out in outs) < sum(out.stats.draft_tokens for out in outs)
    assert all(out.lossless for out in outs)
    return Counter(out.token_ids for out in outs)


def _fits(counts: Counter[Text], laws: dict[Text, float]) -> float:
    if set(counts) - set(laws):
        return 0.0
    order = sorted(laws)
    return chi_square(np.array([counts[text] for text in order]), np.array([laws[text] for text in order]))


def _check(source: str, warp: str, verification: str) -> None:
    laws = _laws(WARPS[warp])
    assert len(laws) > 30 or warp != "T1"
    assert _fits(_sample(source, **WARPS[warp], verification=verification), laws) > PASS


@pytest.mark.parametrize(
    ("source", "warp", "verification"),
    [("draft_model", "T1", "rejection"), ("ngram", "top_p", "rejection"), ("chain", "T0.7", "invariant")],
)
def test_outputs_have_the_masked_targets_law(source: str, warp: str, verification: str) -> None:
    _check(source, warp, verification)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "warp", "verification"), whole((SOURCES, tuple(WARPS), VERIFICATIONS)))
def test_outputs_have_the_masked_targets_law_on_the_whole_grid(source: str, warp: str, verification: str) -> None:
    _check(source, warp, verification)


def test_the_law_is_masked_at_each_token_and_not_that_of_all_valid_texts() -> None:
    """What the documents say of it; and the statistic tells the two apart."""
    laws, options = _laws(WARPS["T1"]), WARPS["T1"]
    counts = _sample("chain", **options, verification="rejection")
    assert _fits(counts, laws) > PASS
    given_valid = {text: _unmasked(text, options) for text in laws}
    total = sum(given_valid.values())
    assert _fits(counts, {text: mass / total for text, mass in given_valid.items()}) < FAIL


def _unmasked(text: Text, options: dict[str, Any]) -> float:
    mass = 1.0
    for i, token in enumerate(text):
        with torch.no_grad():
            logits_V = _models()[0](torch.tensor([[*_prompt(), *text[:i]]])).logits[0, -1]
        mass *= float(reference(logits_V, Warp(**options), _prompt(), text[:i])[token])
    return mass

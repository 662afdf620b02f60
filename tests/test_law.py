"""The law of whole outputs through the public `Generator`, against enumeration from the models' own plain forwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fastdraft import Completion, DraftModel, DynamicAlpha, Generator, NGram
from fastdraft.control.alpha import Leniency
from fastdraft.sampling import noise
from fastdraft.sampling.probs import Warp
from tests import tiny
from tests.grid import whole
from tests.law import FAIL, PASS, SAMPLES, Array, Past, Text, brisk, chi_square, emitted_joint, joint, reference, texts

VOCABULARY, TOKENS = 5, 4
PROMPT = (0, 1, 2, 0)
GAMMA = 3

SOURCES = ("none", "draft_model", "ngram", "chain")
WARPS: dict[str, dict[str, Any]] = {
    "T1": {"temperature": 1.0},
    "T0.7": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
}
PENALTIES: dict[str, dict[str, Any]] = {"no_penalty": {}, "repetition": {"repetition_penalty": 1.4}}
VERIFICATIONS = ("rejection", "invariant")


@functools.cache
def _models() -> tuple[Any, Any]:
    target = tiny.model("llama", vocabulary=VOCABULARY, num_hidden_layers=1, context=64, seed=3)
    return target, tiny.perturbed(target, 0.5)


@functools.cache
def _logits(which: int) -> dict[Text, torch.Tensor]:
    """Logits after every text shorter than an output, from plain forwards."""
    found = {}
    for length in range(TOKENS):
        every = list(texts(VOCABULARY, length))
        with torch.no_grad():
            rows = _models()[which](torch.tensor([PROMPT + text for text in every])).logits[:, -1]
        found |= dict(zip(every, rows, strict=True))
    return found


def _law(which: int, options: dict[str, Any]) -> Any:
    """Distribution of the token after a text, by the target (0) or the draft (1)."""
    return functools.cache(lambda text: reference(_logits(which)[text], Warp(**options), PROMPT, text).numpy())


def _sample(source: str, seed: int = 1, **options: Any) -> tuple[Array, list[Completion[None]]]:
    """Counts of whole outputs, and the outputs."""
    target, draft = _models()
    drafts = {"none": None, "draft_model": DraftModel(draft), "ngram": NGram(min=1)}
    drafts["chain"] = [drafts["ngram"], drafts["draft_model"]]
    with (
        brisk(),
        Generator(
            target,
            drafts[source],
            tokenizer=tiny.letters(VOCABULARY),
            max_batch=96,  # all prompts fit one prefill chunk, so that nobody skips a round's draft
            max_queue=SAMPLES,
            kv_memory="32MiB",
        ) as generator,
    ):
        outs = generator.batch([PROMPT], n=SAMPLES, max_tokens=TOKENS, gamma=GAMMA, seed=seed, **options)
    counts = np.zeros((VOCABULARY,) * TOKENS)
    np.add.at(counts, tuple(np.array([out.token_ids for out in outs]).T), 1)
    return counts, outs


def _assert_sometimes_right(outs: list[Completion[None]]) -> None:
    assert 0 < sum(out.stats.accepted_tokens for out in outs) < sum(out.stats.draft_tokens for out in outs)


def _check(source: str, warp: str, penalty: str, verification: str) -> None:
    options = WARPS[warp] | PENALTIES[penalty]
    counts, outs = _sample(source, **options, verification=verification)
    law = joint(_law(0, options), VOCABULARY, TOKENS)
    if source != "none":
        _assert_sometimes_right(outs)
    assert all(out.lossless for out in outs)
    assert chi_square(counts, law) > PASS
    assert chi_square(counts.sum(0), law.sum(0)) > PASS  # the last three alone
    assert chi_square(counts.sum((2, 3)), law.sum((2, 3))) > PASS


# Every value of every axis once; the pieces are tested in every combination in tests/sampling/test_verify.py.
@pytest.mark.parametrize(
    ("source", "warp", "penalty", "verification"),
    [
        ("none", "T1", "no_penalty", "rejection"),
        ("draft_model", "top_k", "no_penalty", "rejection"),
        ("ngram", "top_p", "repetition", "rejection"),
        ("chain", "T0.7", "no_penalty", "rejection"),
        ("ngram", "min_p", "no_penalty", "invariant"),
    ],
)
def test_outputs_have_the_targets_law(source: str, warp: str, penalty: str, verification: str) -> None:
    _check(source, warp, penalty, verification)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "warp", "penalty", "verification"), whole((SOURCES, tuple(WARPS), tuple(PENALTIES), VERIFICATIONS))
)
def test_outputs_have_the_targets_law_on_the_whole_grid(
    source: str, warp: str, penalty: str, verification: str
) -> None:
    _check(source, warp, penalty, verification)


def _check_lossy(alpha: Any, rule: Any, after: Callable[[Past], float] | None = None, **options: Any) -> None:
    """Compares with the law of an alpha that is constant, or what ``after`` says it is after the rounds so far."""
    counts, outs = _sample("draft_model", **options, alpha=alpha, acceptance_rule=rule)
    # What a lossy setting emits depends on what is drafted where; the first round may be left plain.
    (first,) = {out.stats.gammas[0] for out in outs}
    p, q = _law(0, options), _law(1, options)
    law, distortion = emitted_joint(
        p,
        lambda text, step: q(text),
        lambda number, left: GAMMA if number else first,
        VOCABULARY,
        TOKENS,
        alpha if after is None else after,
        rule,
    )
    _assert_sometimes_right(outs)
    assert not any(out.lossless for out in outs)
    assert chi_square(counts, law) > PASS
    assert chi_square(counts, joint(p, VOCABULARY, TOKENS)) < FAIL, "the setting is meant to be visibly lossy"
    reported = np.array([out.stats.distortion for out in outs])
    assert abs(reported.mean() - distortion) < 4.5 * reported.std() / np.sqrt(len(outs))


def test_lenient_outputs_have_the_enumerated_law_and_report_its_distortion() -> None:
    _check_lossy(0.5, "lenience", temperature=1.0)


def test_an_alpha_that_follows_acceptance_has_the_enumerated_law_too() -> None:
    spec = DynamicAlpha(base=0.35, low=0.3, high=0.8, utilisation=lambda: 0.62)

    def after(past: Past) -> float:
        leniency = Leniency(spec)
        for drafted, accepted in past:
            leniency.load(0.62)
            leniency.observe(drafted, accepted)
        leniency.load(0.62)
        return leniency.alpha

    assert after(()) == 0.33
    assert after(((3, 0),)) == 0.72
    _check_lossy(spec, "lenience", after, temperature=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "rule"), [(0.8, "lenience"), (0.5, "threshold"), (1.0, "threshold")])
def test_other_lossy_outputs_have_the_enumerated_law(alpha: float, rule: str) -> None:
    _check_lossy(alpha, rule, temperature=0.9, top_k=4, repetition_penalty=1.2)


@pytest.mark.slow
def test_accepting_with_the_drafts_noise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "ACCEPT", noise.DRAFT)
    counts, outs = _sample("draft_model", temperature=1.0, verification="rejection")
    _assert_sometimes_right(outs)
    assert chi_square(counts, joint(_law(0, {}), VOCABULARY, TOKENS)) < FAIL

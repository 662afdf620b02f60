"""The audit: what is lossless passes, what is lossy is found, and what cannot be told is not told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastdraft.engine
import fastdraft.outcome
from fastdraft import ConfigError, DraftModel, NGram, SamplingParams
from fastdraft.audit import AuditReport, Greedy, Sampled, audit
from fastdraft.round import Verdict
from fastdraft.sampling import noise
from fastdraft.sampling.probs import Warp, probs
from fastdraft.sampling.verify import Trial, draw, verify
from tests import tiny
from tests.law import brisk

CONTEXT = 512


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.model(context=CONTEXT)


@pytest.fixture(scope="module")
def draft(target: Any) -> Any:
    return tiny.perturbed(target, 0.2)


@pytest.fixture
def examine(target: Any, draft: Any, tokenizer: Any) -> Any:
    @brisk()
    def run(source: Any = draft, *, model: Any = target, tokens: int = 1500, **fields: Any) -> AuditReport:
        params = SamplingParams.model_validate({"gamma": 3, "temperature": 1.0, "ignore_eos": True} | fields)
        return audit(model, source, tokenizer=tokenizer, params=params, tokens=tokens)

    return run


# What is lossless passes.


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"verification": "invariant"},
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.8, "min_p": 0.02},
        {"gamma": 6, "seed": 5},
    ],
    ids=str,
)
def test_a_draft_model_is_lossless(examine: Any, fields: dict[str, Any]):
    report = examine(**fields)
    assert report.verdict == "no_evidence", report.summary
    assert report.summary.startswith("no evidence against losslessness (z = ")
    assert 1500 <= report.tokens < 1600
    assert 0 < report.accepted_tokens < report.draft_tokens
    assert isinstance(report.evidence, Sampled)
    assert report.evidence.detectable < 0.15
    assert report.rounding < 1e-5


def test_a_lookup_is_lossless(examine: Any):
    report = examine(NGram(min=1), temperature=0.3)
    assert report.verdict == "no_evidence", report.summary
    assert report.draft == ("ngram",)
    assert 50 < report.accepted_tokens < report.draft_tokens


def test_greedy_tokens_are_the_target_s_likeliest(examine: Any):
    report = examine(temperature=0)
    assert report.evidence == Greedy(())
    assert report.summary == (
        f"no evidence against losslessness (all {report.tokens} tokens are the target's likeliest)"
    )
    assert 0 < report.accepted_tokens < report.draft_tokens
    assert report.texts == 5


def test_texts_that_end_by_themselves_are_replaced_by_others(examine: Any):
    report = examine(ignore_eos=False, stop_token_ids=tuple(range(100)), tokens=400)
    assert report.verdict == "no_evidence", report.summary
    assert report.tokens >= 400
    assert report.texts > 40


# What is lossy is found.


@pytest.mark.parametrize(
    "fields", [{"alpha": 0.4}, {"acceptance_rule": "threshold"}, {"temperature": 0, "alpha": 0.3}], ids=str
)
def test_lossy_settings_are_found(examine: Any, fields: dict[str, Any]):
    report = examine(**fields)
    assert report.verdict == "lossy"
    assert report.summary.startswith("the output is NOT the target's distribution (")


def test_a_lossy_lookup_is_found(examine: Any):
    report = examine(NGram(min=1), temperature=0.3, alpha=0.3)
    assert report.verdict == "lossy"
    assert report.evidence.z > 5


def test_a_draft_cut_to_some_tokens_is_read_where_it_proposes(
    examine: Any, draft: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FASTDRAFT_CACHE", str(tmp_path / "cache"))
    draft.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    cut = DraftModel(tmp_path, vocabulary=tuple(range(200, 300)))
    assert examine(cut).verdict == "no_evidence"
    assert examine(cut, alpha=0.2).evidence.z > 5


def test_lossy_greedy_tokens_are_listed_by_their_gap(examine: Any):
    gaps = [d.gap for d in examine(temperature=0, alpha=0.3).evidence.differences]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.5


def redraw(p_RV: Tensor, scores_RV: Tensor, trials: Sequence[Trial]) -> Verdict:
    """After a refusal the token is drawn from p, not from what p has more than q."""
    verdict = verify(p_RV, scores_RV, trials)
    sizes = torch.tensor([len(trial.draft) + 1 for trial in trials])
    row_B = sizes.cumsum(0) - sizes + verdict.accepted_B
    u_B = noise.uniform([t.seed for t in trials], [t.length for t in trials], [9] * len(trials), noise.RESIDUAL, "cpu")
    return verdict._replace(next_B=draw(p_RV[row_B], u_B))


def test_a_verify_that_redraws_from_p_is_found(examine: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fastdraft.engine, "verify", redraw)
    report = examine()
    assert report.verdict == "lossy"
    assert report.evidence.z > 5


def warped(**fields: Any) -> Any:
    def mutant(scores_RV: Tensor, warps: Sequence[Warp]) -> Tensor:
        return probs(scores_RV, [replace(warp, **fields) for warp in warps])

    return mutant


def test_a_temperature_that_is_not_the_promised_one_is_found(examine: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fastdraft.engine, "probs", warped(temperature=1.4))
    report = examine()
    assert report.verdict == "lossy"
    assert "uniformity" in report.summary


def test_a_truncation_that_is_not_applied_is_found(examine: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fastdraft.engine, "probs", warped(top_k=0))
    report = examine(top_k=10)
    assert report.verdict == "lossy"
    assert report.evidence.impossible > 20
    assert "have no chance under these settings" in report.summary


def test_an_engine_that_computes_another_model_is_found(examine: Any, monkeypatch: pytest.MonkeyPatch):
    honest = fastdraft.outcome.logprobs

    def off(*arguments: Any) -> Any:
        chosen_R, *rest = honest(*arguments)
        return chosen_R + 0.1, *rest

    monkeypatch.setattr(fastdraft.outcome, "logprobs", off)
    report = examine(tokens=200)
    assert report.verdict == "lossy"
    assert "log-probabilities are 0.1 off" in report.summary


# What cannot be told is not told.


@pytest.mark.parametrize(
    ("source", "fields", "why"),
    [
        (None, {}, "nothing was drafted"),
        ("draft", {"gamma": 0}, "nothing was drafted"),
        ("draft", {"tokens": 3, "max_tokens": 3}, "too few tokens"),
        ("target", {}, "a draft too much like the target"),
    ],
)
def test_an_audit_without_power_is_inconclusive(
    examine: Any, target: Any, draft: Any, source: str | None, fields: dict[str, Any], why: str
):
    models = {None: None, "draft": draft, "target": DraftModel(target)}
    report = examine(models[source], **fields)
    assert report.verdict == "inconclusive"
    assert why in report.summary


# What is asked is done.


def test_a_report_repeats_and_another_seed_gives_other_texts(examine: Any):
    first = examine(tokens=300)
    assert examine(tokens=300) == first
    assert examine(tokens=300, seed=1).evidence != first.evidence


def test_a_report_as_json(examine: Any):
    report = examine(tokens=200)
    read = json.loads(report.to_json())
    assert read["verdict"] == report.verdict
    assert read["summary"] == report.summary
    assert read["evidence"]["z"] == report.evidence.z
    assert read["params"]["verification"] == "rejection"


def test_own_prompts_and_the_models_own_sampling_are_used(target: Any, draft: Any, tokenizer: Any):
    model = tiny.model(context=CONTEXT)
    model.generation_config.temperature = 0.6
    model.generation_config.repetition_penalty = 1.8
    with brisk():
        report = audit(
            model, draft, ["one", [3, 4, 5]], tokenizer=tokenizer, params=SamplingParams(gamma=2), tokens=600
        )
    assert report.verdict == "no_evidence", report.summary
    assert report.params.temperature == 0.6
    assert report.params.repetition_penalty == 1.0


def test_models_from_disk_are_float32_where_they_are_small(tmp_path: Path, tokenizer: Any):
    tiny.model(context=CONTEXT, dtype=torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    params = SamplingParams(gamma=3, temperature=1.0)
    with brisk():
        small = audit(tmp_path, tmp_path, params=params, tokens=100)
        stored = audit(tmp_path, tmp_path, params=params, tokens=100, dtype="bfloat16")
    assert (small.dtype, stored.dtype) == ("float32", "bfloat16")
    assert small.rounding < 1e-5 < stored.rounding < stored.rounding_limit
    assert small.draft == (str(tmp_path),)


def test_bfloat16_rounding_is_no_evidence(examine: Any, tokenizer: Any):
    model = tiny.model(context=CONTEXT, dtype=torch.bfloat16)
    draft = tiny.perturbed(model, 0.2)
    sampled = examine(draft, model=model, top_p=0.9, tokens=400)
    assert sampled.verdict == "no_evidence", sampled.summary
    assert sampled.evidence.rounding_z > 0.01
    greedy = examine(draft, model=model, temperature=0, tokens=200)
    assert greedy.verdict == "no_evidence", greedy.summary


def test_a_loaded_model_is_left_as_it_is(examine: Any, target: Any):
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    examine(tokens=100)
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"tokens": True}, "tokens is True"),
        ({"level": 1.0}, "level is 1.0"),
        ({"prompts": []}, "prompts is not a list"),
        ({"prompts": "once"}, "prompts is not a list"),
        ({"params": {"temperature": 1}}, "params is a dict"),
        ({"params": SamplingParams(repetition_penalty=1.2)}, "repetition_penalty is 1.2"),
        ({"params": SamplingParams(logit_bias={3: 1.0})}, "logit_bias is"),
        ({"params": SamplingParams(min_tokens=4)}, "min_tokens is 4"),
    ],
)
def test_what_cannot_be_audited_is_refused(target: Any, draft: Any, arguments: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        audit(target, draft, **arguments)

"""The verify against exact laws: every draft kind leaves the target's law as it is, and every known mistake is seen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastdraft.round import Draft, Verdict
from fastdraft.sampling import noise
from fastdraft.sampling.probs import Warp, probs, scores
from fastdraft.sampling.verify import Trial, draw, verify
from tests.law import (
    CPU,
    FAIL,
    PASS,
    SAMPLES,
    Game,
    Last,
    Text,
    Toy,
    chi_square,
    emission,
    emitted_joint,
    joint,
    total_variation,
)

TARGET = Toy.random(seed=1)
DRAFT = TARGET.near(seed=2)
VOCABULARY = TARGET.vocabulary

PATTERNS = {"none": "", "point_mass": "pp", "sampled": "ss", "mixed": "sp"}
WARPS = {
    "T1": Warp(),
    "T0.7": Warp(temperature=0.7),
    "top_k": Warp(top_k=3),
    "top_p": Warp(top_p=0.8),
    "min_p": Warp(min_p=0.2),
}
PENALTIES: dict[str, dict[str, Any]] = {"no_penalty": {}, "repetition": {"repetition_penalty": 1.5}}

repeatable = settings(derandomize=True, deadline=None, max_examples=100)


def assert_exact(game: Game, seed: int = 0) -> None:
    """First tokens and whole outputs follow the target's own law, with a draft that is sometimes right."""
    played, law = game.play(seed=seed), game.exact()
    assert not game.pattern or 0 < played.accepted < played.drafted
    assert chi_square(played.counts, law) > PASS
    assert chi_square(played.first, law.sum((1, 2))) > PASS


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("kind", PATTERNS)
def test_rejection_keeps_the_targets_law(kind: str, warp: str, penalty: str) -> None:
    assert_exact(Game(TARGET, DRAFT, replace(WARPS[warp], **PENALTIES[penalty]), PATTERNS[kind]))


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("warp", WARPS)
def test_invariant_keeps_the_targets_law_and_each_output_whatever_was_drafted(warp: str, penalty: str) -> None:
    shaped = replace(WARPS[warp], **PENALTIES[penalty])
    plain = Game(TARGET, DRAFT, shaped, invariant=True)
    assert_exact(plain)
    outputs = plain.play(2000).texts
    for pattern in ("pp", "ss", "sp", "ps"):
        played = Game(TARGET, DRAFT, shaped, pattern, invariant=True).play(2000)
        assert 0 < played.accepted < played.drafted
        assert played.texts == outputs, pattern
    assert Reacting(TARGET, DRAFT, shaped, "ss", invariant=True).play(2000).texts == outputs


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("kind", ["point_mass", "sampled", "mixed"])
def test_invariant_keeps_the_targets_law_with_every_draft(kind: str, warp: str, penalty: str) -> None:
    assert_exact(Game(TARGET, DRAFT, replace(WARPS[warp], **PENALTIES[penalty]), PATTERNS[kind], invariant=True))


def test_a_point_mass_before_a_sampled_token_is_exact() -> None:
    assert_exact(Game(TARGET, DRAFT, Warp(temperature=0.7, repetition_penalty=1.5), "ps"))


class Reacting(Game):
    """Drafts as many tokens as the last round accepted and one more."""

    def gamma(self, last: Last | None) -> int:
        return 1 if last is None else min(last.accepted + 1, len(self.pattern))


class ReactsToDropped(Game):
    """Drafts nothing after a round whose first dropped token was of the upper half; all that is past may count."""

    def gamma(self, last: Last | None) -> int:
        dropped = () if last is None else last.drafted[last.accepted + 1 :]
        return 0 if dropped and dropped[0] >= VOCABULARY // 2 else len(self.pattern)


@pytest.mark.parametrize("pattern", ["ss", "ps"])
@pytest.mark.parametrize("game", [Reacting, ReactsToDropped])
def test_a_draft_length_that_reacts_to_the_round_before_is_exact(game: type[Game], pattern: str) -> None:
    assert_exact(game(TARGET, DRAFT, Warp(repetition_penalty=1.5), pattern))


def test_keys_by_absolute_position_are_seen_where_the_draft_length_reacts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropped draft's random number comes again at its position, and the length has already reacted to it."""
    keyed = noise.uniform

    def by_position(seeds: Any, lengths: Any, offsets: Any, purpose: int, device: Any) -> Tensor:
        places = [length + offset for length, offset in zip(lengths, offsets, strict=True)]
        return keyed(seeds, places, [0] * len(places), purpose, device)

    target = Toy.random(seed=5)
    game = ReactsToDropped(target, target.near(seed=2), Warp(), "ss")
    law = game.exact().sum(2)  # of the first two tokens: the bias lies in the second
    assert chi_square(game.play().counts.sum(2), law) > PASS
    monkeypatch.setattr(noise, "uniform", by_position)
    assert chi_square(game.play().counts.sum(2), law) < FAIL


@pytest.mark.parametrize(
    "draft_warp", [Warp(temperature=2.0), Warp(temperature=0.3), Warp(top_k=1), Warp(top_p=0.5)], ids=str
)
def test_any_q_will_do_as_long_as_it_is_the_one_drawn_from(draft_warp: Warp) -> None:
    assert_exact(Game(TARGET, DRAFT, Warp(top_k=3), "ss", draft_warp=draft_warp))


def test_a_sampled_token_the_target_bans_is_refused_and_the_residual_drawn() -> None:
    assert_exact(Game(TARGET, DRAFT, Warp(bias=((2, -np.inf), (4, -np.inf))), "ss", draft_warp=Warp()))


def test_a_draft_that_is_the_target_is_always_right() -> None:
    played = Game(TARGET, TARGET, Warp(temperature=0.8, top_p=0.9), "ss").play(2000)
    assert played.accepted == played.drafted > 0


# Mistakes that were made elsewhere: each must be seen by the very statistic that passes the real thing.


class ResidualFromTarget(Game):
    """After a rejection the next token comes from p, not from (p - q)+."""

    def judge(self, p_RV: Tensor, scores_RV: Tensor, trials: Sequence[Trial]) -> Verdict:
        verdict = super().judge(p_RV, scores_RV, trials)
        return verdict._replace(next_B=draw(p_RV[last_rows(trials, verdict)], residual_noise(trials)))


class DropsUnlikely(Game):
    """A token that is unlikely under q is dropped, and its position drawn from p."""

    def propose(self, *args: Any) -> list[Draft]:
        drafts = super().propose(*args)
        return [
            draft.cut(next((i for i, q in enumerate(self._drawn(draft)) if q < 0.3), len(draft))) for draft in drafts
        ]

    @staticmethod
    def _drawn(draft: Draft) -> list[float]:
        return [] if draft.q_SV is None else draft.q_SV.gather(1, draft.tokens_G[:, None])[:, 0].tolist()


class DropsIllegal(Game):
    """A sampled token that the target bans is dropped, and its position drawn from p."""

    def propose(self, *args: Any) -> list[Draft]:
        banned = {token for token, _ in self.warp.bias}
        drafts = super().propose(*args)
        return [d.cut(next((i for i, t in enumerate(self.tokens_of(d)) if t in banned), len(d))) for d in drafts]


class ChoosesAfterDrawing(Game):
    """Two sources draw; the draft whose first token the target likes better is used, with its own q."""

    def propose(self, committed: Sequence[Text], gammas: Sequence[int], seeds: Sequence[int]) -> list[Draft]:
        other = Game(self.target, self.target.near(seed=3), self.warp, self.pattern)
        ours = super().propose(committed, gammas, seeds)
        theirs = other.propose(committed, gammas, [noise.derive_seed(seed, 7) for seed in seeds])
        return [
            max(pair, key=lambda draft: self.p(text)[draft.tokens_G[0]]) if len(pair[0]) else pair[0]
            for text, *pair in zip(committed, ours, theirs, strict=True)
        ]


class WarpsAfterTheResidual(Game):
    """The residual is taken from unwarped p, and warped afterwards."""

    def judge(self, p_RV: Tensor, scores_RV: Tensor, trials: Sequence[Trial]) -> Verdict:
        verdict = super().judge(p_RV, scores_RV, trials)
        last = last_rows(trials, verdict)
        rest_BV = scores_RV.softmax(-1)[last]
        for row, (trial, n) in enumerate(zip(trials, verdict.accepted_B.tolist(), strict=True)):
            if n < len(trial.draft):
                assert trial.draft.q_SV is not None
                rest_BV[row] = (rest_BV[row] - trial.draft.q_SV[n]).clamp(min=0)
        warped_BV = probs(rest_BV.log(), [self.warp] * len(trials))
        return verdict._replace(next_B=draw(warped_BV, residual_noise(trials)))


class StalePenalties(Game):
    """Drafted tokens don't count for the penalties of the positions after them."""

    def scores(self, committed: Text, drafted: Text) -> Tensor:
        contexts = [self.prompt + committed + drafted[:i] for i in range(len(drafted) + 1)]
        stale = self.history(self.warp, committed, (), 0, 1)
        return torch.cat([scores(self.target.logits(context)[None], [stale]) for context in contexts])


def last_rows(trials: Sequence[Trial], verdict: Verdict) -> Tensor:
    """The row of p that each next token comes from."""
    sizes = torch.tensor([len(trial.draft) + 1 for trial in trials])
    return sizes.cumsum(0) - sizes + verdict.accepted_B


def residual_noise(trials: Sequence[Trial]) -> Tensor:
    return noise.uniform([t.seed for t in trials], [t.length for t in trials], [0] * len(trials), noise.RESIDUAL, CPU)


def p_values(game: Game) -> tuple[float, float]:
    """Of first tokens and of whole outputs."""
    played, law = game.play(), game.exact()
    assert 0 < played.accepted < played.drafted
    return chi_square(played.first, law.sum((1, 2))), chi_square(played.counts, law)


PENALISED = Warp(repetition_penalty=1.5)
MUTANTS: tuple[tuple[type[Game], dict[str, Any]], ...] = (
    (ResidualFromTarget, {"warp": Warp()}),
    (ResidualFromTarget, {"warp": Warp(temperature=0.7, top_k=3), "pattern": "sp"}),
    (ResidualFromTarget, {"warp": PENALISED, "pattern": "pp"}),
    (DropsUnlikely, {"warp": Warp()}),
    (DropsUnlikely, {"warp": Warp(top_p=0.8)}),
    (DropsIllegal, {"warp": Warp(bias=((1, -np.inf),)), "draft_warp": Warp()}),
    (ChoosesAfterDrawing, {"warp": Warp()}),
    (ChoosesAfterDrawing, {"warp": Warp(min_p=0.2)}),
    (WarpsAfterTheResidual, {"warp": Warp(temperature=0.7)}),
    (WarpsAfterTheResidual, {"warp": Warp(top_k=3)}),
    (StalePenalties, {"warp": PENALISED}),
    (StalePenalties, {"warp": PENALISED, "pattern": "pp"}),
    (StalePenalties, {"warp": PENALISED, "invariant": True}),
)


@pytest.mark.parametrize(("mutant", "options"), MUTANTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_mistake_is_seen_where_the_real_thing_passes(mutant: type[Game], options: dict[str, Any]) -> None:
    options = {"pattern": "ss", **options}
    assert min(p_values(Game(TARGET, DRAFT, **options))) > PASS
    assert min(p_values(mutant(TARGET, DRAFT, **options))) < FAIL


@pytest.mark.parametrize("other", ["DRAFT", "RESIDUAL"])
def test_accepting_with_anothers_noise_is_seen(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    game = Game(TARGET, DRAFT, Warp(), "ss")
    assert min(p_values(game)) > PASS
    monkeypatch.setattr(noise, "ACCEPT", getattr(noise, other))
    assert min(p_values(game)) < FAIL


def test_stale_penalties_of_the_draft_alone_are_harmless() -> None:
    """q may be anything: the exactness rests on p, so what a mutant breaks must be p."""

    class StaleDraft(Game):
        def draft_scores(self, committed: Text, drafted: Text) -> Tensor:
            logits_1V = self.draft.logits(self.prompt + committed + drafted)[None]
            return scores(logits_1V, [self.history(self.warp, committed, (), 0, 1)])

    assert_exact(StaleDraft(TARGET, DRAFT, PENALISED, "ss"))


# Below alpha = 1: lossy, by as much as is said.

LOSSY = [("lenience", 0.6), ("lenience", 0.25), ("threshold", 0.5), ("threshold", 1.0)]


@pytest.mark.parametrize(
    ("rule", "alpha", "pattern", "warp"),
    [
        *((rule, alpha, *drawn) for rule, alpha in LOSSY for drawn in (("ss", "T1"), ("sp", "T0.7"), ("ss", "top_k"))),
        ("lenience", 0.9, "pp", "T1"),
        ("lenience", 0.6, "ps", "top_p"),
        ("threshold", 0.5, "ps", "T0.7"),
    ],
)
def test_lossy_outputs_have_the_enumerated_law(rule: Any, alpha: float, pattern: str, warp: str) -> None:
    game = Game(TARGET, DRAFT, replace(WARPS[warp], repetition_penalty=1.2), pattern, alpha=alpha, rule=rule)
    played, (law, distortion) = game.play(), game.emitted()
    assert 0 < played.accepted < played.drafted
    assert chi_square(played.counts, law) > PASS
    assert chi_square(played.counts, game.exact()) < FAIL, "the setting is meant to be visibly lossy"
    # What each call reports is an unbiased estimate of the expected sum.
    error = played.distortion.std() / np.sqrt(SAMPLES)
    assert abs(played.distortion.mean() - distortion) < 4.5 * error + 1e-6


@pytest.mark.parametrize("pattern", ["ss", "sp", "pp"])
def test_at_alpha_1_lenience_emits_the_targets_law_and_no_distortion(pattern: str) -> None:
    game = Game(TARGET, DRAFT, Warp(top_p=0.8, repetition_penalty=1.3), pattern)
    law, distortion = game.emitted()
    np.testing.assert_allclose(law, game.exact(), atol=1e-12)
    assert distortion < 1e-12
    assert (game.play(500).distortion == 0).all()


@pytest.mark.parametrize("seed", range(6))
def test_the_joint_total_variation_is_at_most_the_expected_distortion(seed: int) -> None:
    target = Toy.random(seed=10 + seed, vocabulary=4)
    for (rule, alpha), pattern in itertools.product(
        [*LOSSY, ("lenience", 0.95), ("threshold", 0.05)], ["ss", "pp", "ps"]
    ):
        game = Game(target, target.near(seed=20 + seed), Warp(), pattern, alpha=alpha, rule=rule)  # type: ignore[arg-type]
        law, distortion = game.emitted()
        assert law.sum() == pytest.approx(1)
        assert total_variation(law, game.exact()) <= distortion + 1e-12


def test_enumeration_of_the_plain_process_is_the_product_of_its_steps() -> None:
    game = Game(TARGET, DRAFT, Warp())
    law, distortion = emitted_joint(game.p, lambda text, step: game.p(text), lambda number, left: 0, VOCABULARY, 3)
    np.testing.assert_allclose(law, joint(game.p, VOCABULARY, 3), atol=1e-15)
    assert distortion == 0


# One position at a time.

LAWS = st.integers(0, 2**31).map(lambda seed: random_laws(seed))
RULES = st.sampled_from(["lenience", "threshold"])
ALPHAS = st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-3, 1e-9])


def random_laws(seed: int) -> tuple[Tensor, Tensor]:
    """p and q on up to 8 tokens, some of them impossible under one of the two or both."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 9))
    laws = rng.dirichlet(np.full(size, 0.7), 2) * (rng.random((2, size)) < 0.8)
    laws[:, rng.integers(size)] += 1e-3
    return tuple(torch.from_numpy(law / law.sum()) for law in laws)  # type: ignore[return-value]


def judge(p_V: Tensor, draft: Draft, *, seeds: Sequence[int] = (0,), length: int = 5, **fields: Any) -> Verdict:
    """The verdict on one draft at several seeds, under the same p at every position."""
    rows = len(seeds) * (len(draft) + 1)
    return verify(p_V.expand(rows, -1), p_V.log().expand(rows, -1), [Trial(draft, s, length, **fields) for s in seeds])


def sampled(token: int, q_V: Tensor) -> Draft:
    return Draft(torch.tensor([token]), ("toy",), q_V[None], (0,))


def point(*tokens: int) -> Draft:
    return Draft(torch.tensor(tokens), ("toy",) * len(tokens))


@repeatable
@given(LAWS, ALPHAS, RULES)
def test_the_reported_distortion_is_the_total_variation_of_what_is_emitted(
    laws: tuple[Tensor, Tensor], alpha: float, rule: Any
) -> None:
    p, q = laws
    for token in range(len(p)):
        one_hot = torch.nn.functional.one_hot(torch.tensor(token), len(p)).double()
        for draft, law in ((sampled(token, q), q), (point(token), one_hot)):
            delta = emission(p.numpy(), law.numpy(), alpha, rule).delta
            reported = judge(p, draft, alpha=alpha, rule=rule).distortion_BG.item()
            assert reported == pytest.approx(delta, abs=1e-6)
            if rule == "lenience":
                assert reported <= 1 - alpha + 1e-12
                assert reported <= total_variation(p.numpy(), law.numpy()) + 1e-12


@repeatable
@given(LAWS, ALPHAS, RULES)
def test_what_the_target_cannot_say_is_never_said(laws: tuple[Tensor, Tensor], alpha: float, rule: Any) -> None:
    p, q = laws
    for token in range(len(p)):
        for draft in (sampled(token, q), point(token)):
            verdict = judge(p, draft, seeds=range(20), alpha=alpha, rule=rule)
            assert (p[verdict.next_B] > 0).all()
            if p[token] == 0:
                assert (verdict.accepted_B == 0).all()


def test_an_impossible_token_is_refused_even_at_the_smallest_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "uniform", lambda seeds, *key: torch.full((len(seeds),), 0.5 * 2.0**-32).double())
    p, q = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    for draft, alpha, rule in itertools.product(
        (sampled(0, q), point(0)), (1.0, 0.5, 5e-324), ("lenience", "threshold")
    ):
        verdict = judge(p, draft, alpha=alpha, rule=rule)
        assert verdict.accepted_B.item() == 0 and verdict.next_B.item() == 1


def test_the_threshold_rule_is_lossy_even_at_1_and_says_so() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    assert judge(p, sampled(2, q), rule="threshold").distortion_BG.item() == pytest.approx(0.2)
    assert judge(p, sampled(2, q), rule="lenience").distortion_BG.item() == 0


@pytest.mark.parametrize("rule", ["lenience", "threshold"])
def test_only_reached_positions_count_as_distortion(rule: Any) -> None:
    p, q = torch.tensor([0.55, 0.15, 0.3]), torch.tensor([0.25, 0.45, 0.3])
    draft = Draft(torch.tensor([0, 1, 1]), ("toy",) * 3, torch.stack([q, q]), (0, 1))
    verdict = judge(p, draft, seeds=range(200), alpha=0.7, rule=rule)
    expected = [emission(p.numpy(), law.numpy(), 0.7, rule).delta for law in (q, q, torch.tensor([0.0, 1.0, 0.0]))]
    assert set(verdict.accepted_B.tolist()) >= {1, 2} if rule == "lenience" else {1}
    for accepted, row in zip(verdict.accepted_B.tolist(), verdict.distortion_BG, strict=True):
        reached = accepted + 1
        np.testing.assert_allclose(row[:reached], expected[:reached], atol=1e-6)
        assert (row[reached:] == 0).all()


def test_where_the_residual_underflows_the_target_is_drawn_from() -> None:
    # q exceeds p by rounding alone and nowhere falls short of it, so (p - q)+ is zero everywhere.
    p = torch.tensor([0.5, 0.3, 0.2])
    q = p.clone()
    q[0] = torch.nextafter(q[0], torch.tensor(1.0))
    verdict = judge(p, sampled(0, q), seeds=range(SAMPLES), rule="threshold")
    assert (verdict.accepted_B == 0).all()
    counts = np.bincount(verdict.next_B.numpy(), minlength=3)
    law = p.double().numpy()
    assert chi_square(counts, law / law.sum()) > PASS


def test_equal_p_and_q_are_always_accepted() -> None:
    p = torch.tensor([0.5, 0.3, 0.2])
    for token, alpha in itertools.product(range(3), (1.0, 0.5)):
        assert (judge(p, sampled(token, p), seeds=range(500), alpha=alpha).accepted_B == 1).all()


# Temperature 0.


def judge_greedily(scores_RV: Tensor, tokens: Sequence[int], alpha: float, rule: Any = "lenience") -> Verdict:
    p_RV = probs(scores_RV, [Warp(temperature=0.0)] * len(scores_RV))
    return verify(p_RV, scores_RV, [Trial(point(*tokens), 0, 5, greedy=True, alpha=alpha, rule=rule)])


@repeatable
@given(st.integers(0, 2**31), st.sampled_from([1.0, 0.9, 0.5, 0.1, 0.01]), RULES)
def test_greedy_accepts_what_comes_near_the_likeliest(seed: int, alpha: float, rule: Any) -> None:
    rng = np.random.default_rng(seed)
    scores_RV = torch.from_numpy(rng.normal(0, 1.5, (4, 6)))
    scores_RV[:, 5] = -torch.inf
    share_RV = scores_RV.softmax(-1) / scores_RV.softmax(-1).amax(-1, keepdim=True)
    tokens = rng.integers(0, 6, 3).tolist()
    kept = list(itertools.takewhile(lambda i: share_RV[i, tokens[i]] >= alpha, range(3)))
    verdict = judge_greedily(scores_RV, tokens, alpha, rule)
    best = scores_RV.argmax(-1).tolist()
    assert verdict.accepted_B.item() == len(kept)
    assert verdict.next_B.item() == best[len(kept)]
    changed = [float(i < len(kept) and tokens[i] != best[i]) for i in range(3)]
    assert verdict.distortion_BG[0].tolist() == (changed if alpha < 1 else [0.0] * 3)


def test_greedy_at_alpha_1_accepts_the_likeliest_alone_however_near_others_come() -> None:
    scores_RV = torch.tensor([[1.0, 1.0 - 1e-6], [0.0, 1.0]])
    assert judge_greedily(scores_RV, [0], 1.0).accepted_B.item() == 1
    assert judge_greedily(scores_RV, [1], 1.0).accepted_B.item() == 0
    assert judge_greedily(scores_RV, [1], 0.99).accepted_B.item() == 1


def test_greedy_ties_go_to_the_first() -> None:
    scores_RV = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    assert judge_greedily(scores_RV, [0], 1.0).accepted_B.item() == 1
    verdict = judge_greedily(scores_RV, [1], 1.0)
    assert verdict.accepted_B.item() == 0 and verdict.next_B.item() == 0


# Batches.


def test_a_ragged_mixed_batch_equals_each_trial_alone() -> None:
    rng = np.random.default_rng(4)
    pieces: list[tuple[Tensor, Trial]] = []
    for number in range(60):
        size = number % 5
        kinds = [i for i in range(size) if rng.random() < 0.6]
        p_RV = torch.from_numpy(rng.dirichlet(np.ones(6), size + 1)).float()
        q_SV = torch.from_numpy(rng.dirichlet(np.ones(6), len(kinds))).float() if kinds else None
        draft = Draft(torch.from_numpy(rng.integers(0, 6, size)), ("toy",) * size, q_SV, tuple(kinds))
        mode = number % 4
        trial = Trial(draft, number, 3 + number, greedy=mode == 1, invariant=mode == 2, alpha=0.5 if mode == 3 else 1.0)
        pieces.append((p_RV, trial))
    together = verify(
        torch.cat([p for p, _ in pieces]), torch.cat([p.log() for p, _ in pieces]), [trial for _, trial in pieces]
    )
    for row, (p_RV, trial) in enumerate(pieces):
        alone = verify(p_RV, p_RV.log(), [trial])
        size = len(trial.draft)
        assert together.accepted_B[row] == alone.accepted_B[0]
        assert together.next_B[row] == alone.next_B[0]
        assert torch.equal(together.distortion_BG[row, :size], alone.distortion_BG[0, :size])
        assert (together.distortion_BG[row, size:] == 0).all()


def test_draw_never_gives_a_token_of_no_weight() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 1e-30, 2.0, 0.0]])
    u = torch.tensor([0.5 * 2.0**-32, 0.1, 1 / 3, 0.5, 1 - 0.5 * 2.0**-32], dtype=torch.float64)
    drawn = draw(weights.expand(5, -1), u)
    assert (weights[0, drawn] > 0).all()
    assert drawn[0] == 1 and drawn[-1] == 4


def test_cutting_a_draft_keeps_each_q_with_its_token() -> None:
    q_SV = torch.eye(5)[:3]
    draft = Draft(torch.tensor([7, 8, 9, 6]), ("a", "b", "a", "b"), q_SV, (0, 2, 3))
    assert draft.cut(4) is draft and draft.cut(9) is draft
    short = draft.cut(2)
    assert short.tokens_G.tolist() == [7, 8] and short.sources == ("a", "b") and short.sampled == (0,)
    assert short.q_SV is not None and torch.equal(short.q_SV, q_SV[:1])
    assert draft.cut(0).q_SV is None and len(draft.cut(0)) == 0

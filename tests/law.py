"""Exact laws of tiny vocabularies, games that sample them, and the statistic that compares the two.

A toy is a language model in a table. A game plays whole outputs of a toy with a draft, through the public pieces the
engine uses, thousands of trials at once; `joint` and `emitted_joint` say, by enumeration, how those outputs should be
distributed. The reference for one distribution is transformers' own processors.

Shapes: V vocabulary, N trials, R packed rows, G drafted tokens.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from transformers.generation import logits_process as theirs

from fastdraft.round import Draft, Verdict
from fastdraft.sampling import noise
from fastdraft.sampling.probs import History, Warp, probs, scores
from fastdraft.sampling.verify import Trial, choose, draw, verify

CPU = torch.device("cpu")
Text: TypeAlias = tuple[int, ...]
Array: TypeAlias = Any  # np.ndarray of float64

# Every statistical test: exact laws stay above PASS, mutants fall below FAIL, with the same number of samples.
SAMPLES = 20_000
PASS, FAIL = 1e-4, 1e-9


@contextlib.contextmanager
def brisk() -> Iterator[None]:
    """One thread and no garbage collection: tiny tensors and tens of thousands of objects go several times faster."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(threads)


def reference(logits_V: Tensor, warp: Warp, prompt: Sequence[int] = (), generated: Sequence[int] = ()) -> Tensor:
    """The distribution of one row in float64: transformers' processors in transformers' order.

    Presence and frequency penalties, bias and bans, which transformers lacks or names otherwise, are spelled out.
    """
    seen = torch.tensor([[*prompt, *generated]], dtype=torch.int64)
    row_1V = logits_V.double()[None].clone()
    if warp.repetition_penalty != 1:
        row_1V = theirs.RepetitionPenaltyLogitsProcessor(warp.repetition_penalty)(seen, row_1V)
    for token in set(generated):
        row_1V[0, token] -= warp.presence_penalty + warp.frequency_penalty * list(generated).count(token)
    for token, value in warp.bias:
        row_1V[0, token] += value
    if len(generated) < warp.min_tokens:
        row_1V[0, list(warp.ends)] = -torch.inf
    if warp.greedy:
        return torch.nn.functional.one_hot(row_1V[0].argmax(), row_1V.shape[1]).double()
    if warp.temperature != 1:
        row_1V = theirs.TemperatureLogitsWarper(float(warp.temperature))(seen, row_1V)
    if warp.top_k:
        row_1V = theirs.TopKLogitsWarper(warp.top_k)(seen, row_1V)
    if warp.top_p < 1:
        row_1V = theirs.TopPLogitsWarper(warp.top_p)(seen, row_1V)
    if warp.min_p > 0:
        row_1V = theirs.MinPLogitsWarper(warp.min_p)(seen, row_1V)
    return row_1V[0].softmax(-1)


def texts(vocabulary: int, length: int) -> Iterator[Text]:
    """Every text of a length."""
    return itertools.product(range(vocabulary), repeat=length)


def joint(law: Callable[[Text], Array], vocabulary: int, tokens: int) -> Array:
    """The law of a plain output: [V] * tokens.

    Args:
        law: Distribution of the token after a text.
        vocabulary: Size.
        tokens: Length of the output.
    """
    mass = np.zeros((vocabulary,) * tokens)
    for text in texts(vocabulary, tokens):
        mass[text] = np.prod([law(text[:i])[token] for i, token in enumerate(text)])
    return mass


def chi_square(counts: Array, law: Array) -> float:
    """p-value of counts under a law; cells expecting under 5 are pooled, an impossible token gives 0."""
    observed, share = counts.ravel(), law.ravel()
    assert abs(share.sum() - 1) < 1e-9, share.sum()
    if observed[share <= 0].sum() > 0:
        return 0.0
    order = np.argsort(share)
    expected = (share * observed.sum())[order]
    observed = observed[order]
    small = int((expected < 5).sum())
    while 0 < small < len(expected) and expected[:small].sum() < 5:
        small += 1
    if small:
        expected = np.concatenate([[expected[:small].sum()], expected[small:]])
        observed = np.concatenate([[observed[:small].sum()], observed[small:]])
    assert len(expected) > 1, "one cell says nothing"
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))


def total_variation(a: Array, b: Array) -> float:
    return 0.5 * float(np.abs(a - b).sum())


class Emission(NamedTuple):
    """What one drafted position emits: kept drafts, what replaces a refused one, and the two together."""

    kept: Array
    rest: Array
    law: Array
    delta: float


def emission(p: Array, q: Array, alpha: float = 1.0, rule: str = "lenience") -> Emission:
    """The law of one drafted position, from the definition of the rules."""
    if rule == "lenience":
        accept = np.where(q > 0, np.minimum(1.0, p / (alpha * np.where(q > 0, q, 1.0))), 0.0)
    else:
        accept = ((p >= alpha * q) & (p > 0)).astype(float)
    kept = q * accept
    rest = np.maximum(p - q, 0)
    rest = rest / rest.sum() if rest.sum() > 0 else p
    law = kept + (1 - kept.sum()) * rest
    return Emission(kept, rest, law, total_variation(law, p))


Past: TypeAlias = tuple[tuple[int, int], ...]  # drafted and accepted tokens of each round


def emitted_joint(
    p: Callable[[Text], Array],
    q: Callable[[Text, int], Array],
    gamma: Callable[[int, int], int],
    vocabulary: int,
    tokens: int,
    alpha: float | Callable[[Past], float] = 1.0,
    rule: str = "lenience",
) -> tuple[Array, float]:
    """The law of a speculative output and its expected distortion, by walking every path of every round.

    Args:
        p: The target's distribution after a text.
        q: What the draft at a text and a position of the round is drawn from; a point mass is one-hot.
        gamma: Drafted tokens of a round, from its number and the tokens left.
        vocabulary: Size.
        tokens: Length of the output.
        alpha: Leniency, or what it is after the rounds so far.
        rule: Acceptance rule.
    """
    mass = np.zeros((vocabulary,) * tokens)
    distortion = 0.0

    def play(text: Text, past: Past, weight: float) -> None:
        if len(text) == tokens:
            mass[text] += weight
        else:
            left = tokens - len(text)
            lenience = alpha if isinstance(alpha, float | int) else alpha(past)
            walk(text, past, 0, min(gamma(len(past), left), left - 1), lenience, weight)

    def walk(text: Text, past: Past, step: int, drafted: int, lenience: float, weight: float) -> None:
        nonlocal distortion
        following = p(text)
        if step < drafted:
            position = emission(following, q(text, step), lenience, rule)
            distortion += weight * position.delta
            for token in np.flatnonzero(position.kept):
                walk((*text, int(token)), past, step + 1, drafted, lenience, weight * position.kept[token])
            following = (1 - position.kept.sum()) * position.rest
        for token in np.flatnonzero(following > 0):
            play((*text, int(token)), (*past, (drafted, step)), weight * following[token])

    play((), (), 1.0)
    return mass, distortion


@dataclass(frozen=True, eq=False)
class Toy:
    """A language model in a table: the logits after every pair of tokens."""

    table_VVV: Tensor

    @classmethod
    def random(cls, seed: int = 0, vocabulary: int = 5, spread: float = 1.2) -> Toy:
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(vocabulary, vocabulary, vocabulary, generator=generator) * spread)

    def near(self, seed: int, distance: float = 0.9) -> Toy:
        """Another toy that often agrees."""
        return Toy(self.table_VVV + Toy.random(seed, self.vocabulary, distance).table_VVV)

    @property
    def vocabulary(self) -> int:
        return self.table_VVV.shape[0]

    def logits(self, context: Sequence[int]) -> Tensor:
        return self.table_VVV[context[-2], context[-1]]


@dataclass
class Played:
    """What came of a game.

    Attributes:
        texts: The output of each trial.
        counts: How often each output came, [V] * tokens.
        distortion: Reported sum of each trial.
    """

    texts: list[Text]
    counts: Array
    drafted: int
    accepted: int
    distortion: Array

    @property
    def first(self) -> Array:
        """Counts of the first token."""
        return self.counts.sum(tuple(range(1, self.counts.ndim)))


class Last(NamedTuple):
    """What a draft length may react to: a round's accepted count and its draft, dropped tokens included."""

    accepted: int
    drafted: Text


@dataclass(frozen=True, eq=False)
class Game:
    """Outputs of ``tokens`` tokens after a prompt, drafted, verified and committed as the engine does it.

    A test changes a game, or breaks it, by overriding one method.

    Attributes:
        pattern: One letter a drafted position: "s" is sampled from the draft, "p" is its likeliest token as a point
            mass; "" is plain decoding.
        draft_warp: Where the draft is warped otherwise than the target.
    """

    target: Toy
    draft: Toy
    warp: Warp = field(default_factory=Warp)
    pattern: str = ""
    invariant: bool = False
    alpha: float = 1.0
    rule: Literal["lenience", "threshold"] = "lenience"
    draft_warp: Warp | None = None
    prompt: Text = (0, 1)
    tokens: int = 3
    # What was computed once, by committed and drafted tokens; the trials of a game meet the same few.
    _rows: dict[tuple[Text, Text], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _q: dict[tuple[Text, Text], Tensor] = field(default_factory=dict)
    _drafts: dict[tuple[Text, Text], Draft] = field(default_factory=dict)

    # What the outputs are distributed as.

    def exact(self) -> Array:
        return joint(self.p, self.target.vocabulary, self.tokens)

    def emitted(self) -> tuple[Array, float]:
        """Law and expected distortion at this alpha."""
        return emitted_joint(
            self.p,
            lambda text, step: self.proposal(text, self.pattern[step]),
            lambda number, left: len(self.pattern),
            self.target.vocabulary,
            self.tokens,
            self.alpha,
            self.rule,
        )

    def p(self, text: Text) -> Array:
        return reference(self.target.logits(self.prompt + text), self.warp, self.prompt, text).numpy()

    def proposal(self, text: Text, letter: str) -> Array:
        """What a draft position is drawn from."""
        q = reference(self.draft.logits(self.prompt + text), self.draft_warp or self.warp, self.prompt, text).numpy()
        return q if letter == "s" else np.eye(len(q))[q.argmax()]

    # How they come about.

    @brisk()
    def play(self, samples: int = SAMPLES, seed: int = 0) -> Played:
        """Plays trials with seeds of their own until each has its tokens."""
        seeds = [noise.derive_seed(seed, i + 1) for i in range(samples)]
        outputs: list[Text] = [()] * samples
        before: list[Last | None] = [None] * samples
        played = Played(outputs, np.zeros((self.target.vocabulary,) * self.tokens), 0, 0, np.zeros(samples))
        active = list(range(samples))
        while active:
            committed = [outputs[i] for i in active]
            gammas = [min(self.gamma(before[i]), self.tokens - len(outputs[i]) - 1) for i in active]
            drafts = self.propose(committed, gammas, [seeds[i] for i in active])
            drafted = [self.tokens_of(d) for d in drafts]
            rows = [self.rows(c, d) for c, d in zip(committed, drafted, strict=True)]
            p_RV, scores_RV = (torch.cat(matrices) for matrices in zip(*rows, strict=True))
            trials = [
                Trial(
                    draft,
                    seeds[i],
                    len(self.prompt) + len(outputs[i]),
                    greedy=self.warp.greedy,
                    invariant=self.invariant,
                    alpha=self.alpha,
                    rule=self.rule,
                )
                for i, draft in zip(active, drafts, strict=True)
            ]
            verdict = self.judge(p_RV, scores_RV, trials)
            accepted, following = verdict.accepted_B.tolist(), verdict.next_B.tolist()
            played.distortion[active] += verdict.distortion_BG.sum(-1).numpy()
            played.drafted += sum(map(len, drafted))
            played.accepted += sum(accepted)
            for row, i in enumerate(active):
                outputs[i] = (*outputs[i], *drafted[row][: accepted[row]], following[row])
                before[i] = Last(accepted[row], drafted[row])
            active = [i for i in active if len(outputs[i]) < self.tokens]
        np.add.at(played.counts, tuple(np.array(outputs).T), 1)
        return played

    def gamma(self, last: Last | None) -> int:
        """Drafted tokens of a round, given the one before it."""
        return len(self.pattern)

    def propose(self, committed: Sequence[Text], gammas: Sequence[int], seeds: Sequence[int]) -> list[Draft]:
        """Drafts step by step, as a draft model and an n-gram lookup do."""
        drafted: list[Text] = [()] * len(committed)
        for step in range(max(gammas)):
            rows = [i for i, gamma in enumerate(gammas) if step < gamma]
            q_BV = torch.stack([self.q(committed[i], drafted[i]) for i in rows])
            mine = [seeds[i] for i in rows]
            lengths = [len(self.prompt) + len(committed[i]) for i in rows]
            if self.pattern[step] == "p":
                token_B = q_BV.argmax(-1)
            elif self.invariant:
                token_B = choose(q_BV, mine, [length + step for length in lengths])
            else:
                token_B = draw(q_BV, noise.uniform(mine, lengths, [step] * len(rows), noise.DRAFT, CPU))
            for i, token in zip(rows, token_B.tolist(), strict=True):
                drafted[i] = (*drafted[i], token)
        return [self.drafting(c, d) for c, d in zip(committed, drafted, strict=True)]

    def judge(self, p_RV: Tensor, scores_RV: Tensor, trials: Sequence[Trial]) -> Verdict:
        return verify(p_RV, scores_RV, trials)

    def rows(self, committed: Text, drafted: Text) -> tuple[Tensor, Tensor]:
        """The target's distributions over a draft and the scores they come from: [G + 1, V] each."""
        key = committed, drafted
        if key not in self._rows:
            scores_RV = self.scores(committed, drafted)
            self._rows[key] = probs(scores_RV, [self.warp] * len(scores_RV)), scores_RV
        return self._rows[key]

    def scores(self, committed: Text, drafted: Text) -> Tensor:
        contexts = [self.prompt + committed + drafted[:i] for i in range(len(drafted) + 1)]
        logits_RV = torch.stack([self.target.logits(context) for context in contexts])
        return scores(logits_RV, [self.history(self.warp, committed, drafted, 0, len(contexts))])

    def q(self, committed: Text, drafted: Text) -> Tensor:
        """The draft's distribution after a drafted prefix."""
        key = committed, drafted
        if key not in self._q:
            self._q[key] = probs(self.draft_scores(committed, drafted), [self.draft_warp or self.warp])[0]
        return self._q[key]

    def draft_scores(self, committed: Text, drafted: Text) -> Tensor:
        logits_1V = self.draft.logits(self.prompt + committed + drafted)[None]
        return scores(logits_1V, [self.history(self.draft_warp or self.warp, committed, drafted, len(drafted), 1)])

    def history(self, warp: Warp, committed: Text, drafted: Text, first: int, rows: int) -> History:
        return History(warp, self.prompt, committed, torch.tensor(drafted, dtype=torch.int64), first, rows)

    def drafting(self, committed: Text, drafted: Text) -> Draft:
        """The draft that proposes these tokens."""
        key = committed, drafted
        if key not in self._drafts:
            sampled = tuple(i for i in range(len(drafted)) if self.pattern[i] == "s")
            q_SV = torch.stack([self.q(committed, drafted[:i]) for i in sampled]) if sampled else None
            tokens_G = torch.tensor(drafted, dtype=torch.int64)
            self._drafts[key] = Draft(tokens_G, ("toy",) * len(drafted), q_SV, sampled)
        return self._drafts[key]

    def tokens_of(self, draft: Draft) -> Text:
        return tuple(draft.tokens_G.tolist())

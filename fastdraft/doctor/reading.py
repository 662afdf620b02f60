"""What a draft would have proposed along a target's own outputs, and how much of it would have been accepted.

Shapes: T tokens of an output, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastdraft.config import NGram
from fastdraft.control.gamma import MOST
from fastdraft.doctor.report import Acceptance, Guess, Position
from fastdraft.forecast import Text
from fastdraft.models.dense import dense_logits
from fastdraft.proposers.ngram import Lookup
from fastdraft.sampling.agreement import acceptance, jaccard, total_variation
from fastdraft.sampling.probs import Warp

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Draft", "Output", "Reading", "compare", "copy", "read", "summarise"]

TOP = 5


class Output(NamedTuple):
    """A prompt and what the target made of it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model.

    Attributes:
        model: As it runs.
        shared: The target's ids that it may propose are under this.
        kept: These alone, where its vocabulary is restricted; else None.
    """

    model: PreTrainedModel
    shared: int
    kept: tuple[int, ...] | None = None

    def logits(self, output: Output, vocabulary: int) -> Tensor:
        """Its logits where each token of an output was drawn: [T, V]; -inf for what it may not propose."""
        logits_TV = dense_logits(self.model, *output, self.shared, self.kept)
        return torch.nn.functional.pad(logits_TV, (0, vocabulary - self.shared), value=-torch.inf)


@dataclass(frozen=True, slots=True)
class Reading:
    """One output as a source would have drafted it.

    Attributes:
        text: To be replayed.
        jaccard: Similarity of both models' likeliest tokens at each token; empty without a draft model.
        total_variation: Of both models' distributions at each token; empty without a draft model.
    """

    text: Text
    jaccard: Sequence[float] = ()
    total_variation: Sequence[float] = ()


@torch.inference_mode()
def read(target: PreTrainedModel, draft: Draft, output: Output, warp: Warp, vocabulary: int) -> Reading:
    """Reads an output with both models' own forwards.

    Args:
        target: The target.
        draft: The draft model.
        output: Of the target.
        warp: How it was sampled.
        vocabulary: Ids of the target.
    """
    target_TV = dense_logits(target, *output, vocabulary)
    draft_TV = draft.logits(output, vocabulary).to(target_TV.device)
    known = len(draft_TV)  # fewer than the output's where the draft's context ends
    if not known:
        return Reading(Text(len(output.prompt), ((),) * len(output.tokens)))
    target_TV, token_T = target_TV[:known], torch.tensor(output.tokens[:known], device=target_TV.device)
    accepted = acceptance(target_TV, draft_TV, token_T, output.prompt, warp)
    chances = tuple(tuple(accepted[n : n + MOST]) for n in range(len(output.tokens)))
    return Reading(
        Text(len(output.prompt), chances), jaccard(target_TV, draft_TV, TOP), total_variation(target_TV, draft_TV)
    )


def copy(spec: NGram, output: Output) -> Reading:
    """Replays prompt lookup at every token: what it would have drafted, and whether that is what came."""
    chances = []
    for n, drafted in enumerate(_copies(spec, output, MOST)):
        came = output.tokens[n : n + len(drafted)]
        right = next((i for i, token in enumerate(drafted) if i >= len(came) or token != came[i]), len(drafted))
        chances.append((1.0,) * right + (0.0,) * (len(drafted) - right))
    return Reading(Text(len(output.prompt), tuple(chances)))


def _copies(spec: NGram, output: Output, gamma: int) -> Iterator[list[int]]:
    lookup, known = Lookup(spec.min, spec.max), list(output.prompt)
    for token in output.tokens:
        yield lookup.draft(known, gamma)
        known.append(token)


@torch.inference_mode()
def compare(
    target: PreTrainedModel,
    draft: Draft | NGram,
    output: Output,
    vocabulary: int,
    decode: Callable[[int], str],
) -> tuple[Position, ...]:
    """What both held likely at each token of an output.

    Args:
        target: The target.
        draft: The draft model, or prompt lookup.
        output: Greedy.
        vocabulary: Ids of the target.
        decode: Text of one token.
    """
    if isinstance(draft, NGram):
        guesses = [tuple(Guess(i, decode(i), 1.0) for i in drafted) for drafted in _copies(draft, output, 1)]
    else:
        guesses = _likeliest(draft.logits(output, vocabulary), decode)
        guesses += [()] * (len(output.tokens) - len(guesses))
    likely = _likeliest(dense_logits(target, *output, vocabulary), decode)
    return tuple(
        Position(decode(token), mine, theirs, bool(theirs) and theirs[0].token_id == token)
        for token, mine, theirs in zip(output.tokens, likely, guesses, strict=True)
    )


def _likeliest(logits_TV: Tensor, decode: Callable[[int], str]) -> list[tuple[Guess, ...]]:
    top = logits_TV.float().softmax(-1).topk(min(TOP, logits_TV.shape[1]), -1)
    return [
        tuple(Guess(token, decode(token), chance) for token, chance in zip(ids, chances, strict=True))
        for ids, chances in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]


def summarise(temperature: float, texts: Sequence[Text]) -> Acceptance:
    """Acceptance over all tokens of all outputs at which there is a draft."""
    places = [chances for text in texts for chances in text.chances]
    drafts = [chances for chances in places if chances]
    reach: list[list[float]] = []  # of each draft, the chance that its first 1, 2, ... tokens are accepted
    for chances in drafts:
        kept, through = [], 1.0
        for chance in chances:
            through *= chance
            kept.append(through)
        reach.append(kept)
    longest = max(map(len, reach), default=0)
    return Acceptance(
        temperature=temperature,
        rate=fmean(chances[0] for chances in drafts) if drafts else None,
        drafted=len(drafts) / len(places),
        kept=tuple(fmean(kept[i] for kept in reach if len(kept) > i) for i in range(longest)),
    )

"""A target and one draft under examination: what can be done with the two."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from fastdraft.config import NGram, Prompt, SamplingParams, Source
from fastdraft.control.costs import Measured
from fastdraft.doctor.reading import Draft, Output, Reading, compare, copy, read
from fastdraft.doctor.report import Position
from fastdraft.generator import Generator
from fastdraft.models.calibrate import measure
from fastdraft.models.loading import Loaded
from fastdraft.models.pairing import Pairing, usable_vocabulary
from fastdraft.models.support import context_of
from fastdraft.precedence import resolve_params
from fastdraft.prompt import PromptEncoder
from fastdraft.sampling.probs import Warp
from fastdraft.timing import Run, interleave, time_call
from fastdraft.trace import Trace

if TYPE_CHECKING:
    from fastdraft.engine import Engine

__all__ = ["Subject"]

T = TypeVar("T")

PASSES = 3  # measurements of costs; medians are kept
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 17)
SEED = 1  # of sampled outputs, so that an examination can be repeated
WARM = 8  # tokens of the first call, which is not counted


@dataclass(frozen=True, slots=True)
class Subject:
    """Two loaded models, or one and a source without a model, and a generator that borrows them.

    Attributes:
        generator: Of both; used by nothing else.
        source: The draft.
        target: The target.
        draft: The draft model; None for a source without one.
    """

    generator: Generator
    source: Source
    target: Loaded
    draft: Loaded | None

    @property
    def vocabulary(self) -> int:
        """Usable ids of the target."""
        return usable_vocabulary(self.generator.tokenizer, self.target.model.config.get_text_config().vocab_size)

    @property
    def pairing(self) -> Pairing | None:
        """How the models fit; None without a draft model."""
        return self.generator.pairings.get(self.source.name)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """A prompt's tokens."""
        return PromptEncoder(self.generator.tokenizer, self.vocabulary).encode(prompt)

    def decode(self, token: int) -> str:
        """Text of one token."""
        return str(self.generator.tokenizer.decode([token]))

    def time(self, prompt: Sequence[int], tokens: int, gamma: int) -> Run:
        """One greedy call from a cold start."""
        return time_call(
            self.generator, list(prompt), max_tokens=tokens, temperature=0, gamma=gamma, source=self.source.name
        )

    def warm_up(self, prompt: Sequence[int]) -> None:
        """Calls that are not counted, plain and with a draft."""
        for gamma in (0, 4):
            self.time(prompt, WARM, gamma)

    def try_out(self, prompt: Sequence[int], tokens: int, gamma: int) -> tuple[Trace, float]:
        """One greedy call's rounds, and the seconds of those after the first."""
        out = self.generator.generate(
            list(prompt), max_tokens=tokens, temperature=0, gamma=gamma, source=self.source.name, trace=True
        )
        assert out.trace is not None
        later = out.completion_tokens - len(out.trace.rounds[0].tokens)
        return out.trace, later / (out.stats.tokens_per_second or math.inf)

    def run(self, prompt: Sequence[int], tokens: int, gammas: Sequence[int], repeats: int) -> list[list[Run]]:
        """Each draft length's runs on a prompt, in turns."""
        sides = {str(gamma): lambda gamma=gamma: self.time(prompt, tokens, gamma) for gamma in gammas}
        return list(interleave(sides, repeats, warm=False).values())

    def sample(self, prompts: Sequence[tuple[int, ...]], tokens: int, temperature: float) -> list[Output]:
        """The target's outputs at a temperature."""
        each = [SamplingParams(max_tokens=tokens, temperature=temperature, seed=SEED + i) for i in range(len(prompts))]
        outs = self.generator.batch([list(prompt) for prompt in prompts], each)
        return [Output(prompt, out.token_ids) for prompt, out in zip(prompts, outs, strict=True)]

    def measure(self) -> tuple[Measured, Measured | None]:
        """What forwards of target and draft model take now."""
        contexts: dict[str | None, int] = {None: context_of(self.target.model.config)}
        if self.draft is not None:
            contexts[self.source.name] = context_of(self.draft.model.config)

        def once(engine: Engine) -> dict[str | None, Measured]:
            return {name: measure(engine.runners[name], context=n, rows=ROWS) for name, n in contexts.items()}

        passes = [self.generator._worker.ask(once) for _ in range(PASSES)]
        found = {name: _middle([one[name] for one in passes]) for name in contexts}
        return found[None], found.get(self.source.name)

    def warp(self, temperature: float) -> Warp:
        """How a call with nothing but a temperature shapes its distributions."""
        asked = SamplingParams(temperature=temperature)
        params = resolve_params(asked, {}, defaults=SamplingParams(), model=self.target.sampling)
        return Warp.compile(params, (), self.vocabulary)

    def read(self, outputs: Sequence[Output], temperature: float) -> list[Reading]:
        """How the draft would have done along outputs."""
        if self.draft is None:
            return [copy(self._lookup, output) for output in outputs]
        model, draft, warp = self.target.model, self._draft, self.warp(temperature)
        return self._compute(lambda: [read(model, draft, output, warp, self.vocabulary) for output in outputs])

    def compare(self, output: Output) -> tuple[Position, ...]:
        """Both models' likeliest tokens along an output."""
        draft = self._lookup if self.draft is None else self._draft
        return self._compute(lambda: compare(self.target.model, draft, output, self.vocabulary, self.decode))

    def _compute(self, question: Callable[[], T]) -> T:
        """Computes on the generator's thread: one that computed beside it would slow all its later kernels down."""
        return self.generator._worker.ask(lambda engine: question())

    @property
    def _lookup(self) -> NGram:
        assert isinstance(self.source, NGram)
        return self.source

    @property
    def kept(self) -> tuple[int, ...] | None:
        """The ids a draft model may propose; None where its vocabulary is not restricted."""
        kept = self.generator._worker.ask(lambda engine: {name: one.kept for name, one in engine.drafts.items()})
        return kept.get(self.source.name)

    @property
    def _draft(self) -> Draft:
        assert self.draft is not None and self.pairing is not None
        return Draft(self.draft.model, self.pairing.shared_tokens, self.kept)


def _middle(passes: Sequence[Measured]) -> Measured:
    """Medians, point by point."""

    def points(name: str) -> tuple[tuple[int, float], ...]:
        each = [getattr(one, name) for one in passes]
        return tuple((same[0][0], median(seconds for _, seconds in same)) for same in zip(*each, strict=True))

    return Measured(points("points"), points("prefill"), median(one.per_token for one in passes))

"""How fast a target and its drafts are on your prompts: plain, each source and draft length, in turns.

Figures are medians over interleaved runs; their ratios are what to read.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tqdm.auto import tqdm

from fastdraft.config import GeneratorConfig, Prompt
from fastdraft.errors import ConfigError, MissingDependencyError
from fastdraft.generator import Generator
from fastdraft.timing import Run, interleave, median, time_call
from fastdraft.workload import built_in, named_prompts

__all__ = ["BenchReport", "Side", "check_plot", "plot", "run"]

Gamma: TypeAlias = "int | Literal['auto']"

PLAIN = "plain"
GAMMAS: tuple[Gamma, ...] = (2, 4, 6, 8, 12, "auto")


@dataclass(frozen=True, slots=True)
class Side:
    """One way to decode the prompts.

    Attributes:
        name: ``plain``, or source and draft length.
        source: The one source that drafts; None for plain decoding and for all sources together.
        gamma: Drafted tokens a round; 0 for plain decoding.
        tokens_per_second: Decode rate, the tokens after the first over the time after the first: the geometric mean
            over prompts of medians over repeats. None where a prompt has no second token.
        ratio: Decode rate over plain's, likewise.
        time_to_first_token: Seconds, the mean over prompts of medians; every prompt is computed from its first token.
        seconds: From call to last token, likewise.
        acceptance_rate: Accepted over drafted tokens; None when nothing was drafted.
        mean_acceptance_length: Tokens a target call: 1 + accepted / rounds; None when nothing was drafted.
        rounds: Target calls that gave tokens, for all prompts once.
        equal: Prompts whose tokens are plain's in every repeat; None where the tokens are free to differ: at a
            temperature without a seed.
        rates: Decode rate of each prompt.
    """

    name: str
    source: str | None
    gamma: Gamma
    tokens_per_second: float | None
    ratio: float | None
    time_to_first_token: float
    seconds: float
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    rounds: int
    equal: int | None
    rates: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What `run` measured.

    Attributes:
        target: The target's id or path.
        prompts: Names of the prompts.
        tokens: New tokens of each generation.
        repeats: Runs of each side on each prompt.
        temperature: Of all sides.
        seed: Of all sides; None where none was given.
        sides: Plain decoding first.
    """

    target: str
    prompts: tuple[str, ...]
    tokens: int
    repeats: int
    temperature: float
    seed: int | None
    sides: tuple[Side, ...]

    @property
    def plain(self) -> Side:
        """Decoding without a draft."""
        return self.sides[0]

    @property
    def best(self) -> Side:
        """The side with the highest decode rate; may be plain."""
        return max(self.sides, key=lambda side: side.tokens_per_second or 0.0)

    def same_tokens(self, side: Side) -> bool | None:
        """Whether a side gave plain's tokens for every prompt; None where they are free to differ."""
        return None if side.equal is None else side.equal == len(self.prompts)


def run(
    generator: Generator | GeneratorConfig,
    prompts: Mapping[str, Prompt] | Sequence[Prompt] | None = None,
    *,
    tokens: int = 96,
    gammas: Sequence[Gamma] = GAMMAS,
    sources: Sequence[str] | None = None,
    repeats: int = 3,
    temperature: float = 0.0,
    seed: int | None = None,
    progress: bool = False,
) -> BenchReport:
    """Measures plain decoding, and each source at each draft length, in turns.

    Every generation has exactly ``tokens`` tokens: end-of-sequence is passed over. Prefixes kept from earlier calls are
    forgotten before each, so that no side gets a prompt for nothing. Each side runs once before, uncounted, to warm up.

    Args:
        generator: Used while nothing else uses it; a config is built, and closed at the end.
        prompts: By name, or in order; None takes `fastdraft.workload.built_in`.
        tokens: New tokens of each generation.
        gammas: Draft lengths to try, ``"auto"`` among them.
        sources: Names of the sources to try; None tries each of the generator's and, where there are several, all
            together with ``"auto"``.
        repeats: Runs of each side on each prompt.
        temperature: 0 is greedy.
        seed: For a temperature: all sides then make the same tokens.
        progress: Show a bar.

    Raises:
        ConfigError: Nothing to measure, or names and lengths that don't exist.
    """
    config = generator if isinstance(generator, GeneratorConfig) else generator.config
    plans = _sides(config, gammas, sources)
    _check(tokens=tokens, repeats=repeats)
    options: dict[str, Any] = {"max_tokens": tokens, "temperature": temperature, "seed": seed, "ignore_eos": True}
    runs: dict[str, list[list[Run]]] = {name: [] for name in plans}
    with ExitStack() as stack:
        if isinstance(generator, GeneratorConfig):
            generator = stack.enter_context(Generator.from_config(generator))
        named = named_prompts(built_in(chat=_chats(generator)) if prompts is None else prompts)
        # Not a disabled bar: that would leave tqdm's monitor thread behind.
        bar = stack.enter_context(tqdm(total=len(named) * len(plans) * repeats, unit="run")) if progress else None
        tick = bar.update if bar is not None else lambda: None
        for number, prompt in enumerate(named.values()):
            sides = {
                name: partial(time_call, generator, prompt, source=source, gamma=gamma, **options)
                for name, (source, gamma) in plans.items()
            }
            for name, got in interleave(sides, repeats, warm=number == 0, tick=tick).items():
                runs[name].append(got)
    comparable = temperature == 0 or seed is not None
    made = tuple(_summary(name, *plan, runs[name], runs[PLAIN], comparable) for name, plan in plans.items())
    return BenchReport(config.target.label, tuple(named), tokens, repeats, temperature, seed, made)


def plot(report: BenchReport, path: Path) -> None:
    """Draws the decode rate of each side as bars.

    Args:
        report: Of `run`.
        path: Where to write; its ending says the format: ``.png``, ``.svg``, ``.pdf``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: An ending that matplotlib does not know.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.4 * len(report.sides) + 1.2), layout="constrained")
    axes = figure.subplots()
    sides = report.sides[::-1]
    rates = [side.tokens_per_second or 0.0 for side in sides]
    colours = ["#9a9a9a" if side is report.plain else "#3f6fb5" for side in sides]
    made = axes.barh([side.name for side in sides], rates, color=colours)
    axes.bar_label(made, [f"{rate:.1f}" for rate in rates], padding=3)
    axes.set_xlabel("tokens per second")
    axes.set_title(report.target)
    figure.savefig(path, dpi=150)


def check_plot(path: Path) -> None:
    """Refuses what `plot` could not draw, before anything is measured.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: An ending that matplotlib does not know.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise MissingDependencyError(
            "A plot needs the package 'matplotlib', which is not installed.",
            hint="Install the extra: pip install 'fastdraft[plot]'.",
        ) from error
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise ConfigError(
            f"the plot cannot be written to {path}: its ending is none of {', '.join(sorted(known))}.",
            hint="Name it such as bench.png.",
        )


def _chats(generator: Generator) -> bool:
    return bool(getattr(generator.tokenizer, "chat_template", None))


def _sides(
    config: GeneratorConfig, gammas: Sequence[Gamma], sources: Sequence[str] | None
) -> dict[str, tuple[str | None, Gamma]]:
    """Source and draft length of each side, by name; plain is first."""
    known = [source.name for source in config.draft]
    if strangers := [name for name in sources or () if name not in known]:
        names = ", ".join(map(repr, known)) or "none"
        raise ConfigError(f"sources names {strangers[0]!r}, but the generator's sources are: {names}.")
    for gamma in gammas:
        if gamma != "auto" and (isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 1):
            raise ConfigError(f"gammas holds {gamma!r}, expected integers of at least 1, or 'auto'.")
    sides: dict[str, tuple[str | None, Gamma]] = {PLAIN: (None, 0)}
    for name in known if sources is None else sources:
        sides |= {f"{name} {gamma}": (name, gamma) for gamma in gammas}
    if sources is None and len(known) > 1 and "auto" in gammas:
        sides["all sources auto"] = (None, "auto")
    return sides


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}, expected an integer of at least 1.")


def _summary(
    name: str,
    source: str | None,
    gamma: Gamma,
    runs: Sequence[Sequence[Run]],
    plain: Sequence[Sequence[Run]],
    comparable: bool,
) -> Side:
    """One side's figures from its runs, a list for each prompt."""
    rates, base = [_rate(got) for got in runs], [_rate(got) for got in plain]
    ratios = [mine / other if mine and other else None for mine, other in zip(rates, base, strict=True)]
    every = [one for got in runs for one in got]
    drafted, calls = sum(one.drafted for one in every), sum(one.calls for one in every)
    accepted = sum(one.accepted for one in every)
    equal = sum(all(one.tokens == own[0].tokens for one in got) for got, own in zip(runs, plain, strict=True))
    return Side(
        name=name,
        source=source,
        gamma=gamma,
        tokens_per_second=_mean(rates),
        ratio=_mean(ratios),
        time_to_first_token=statistics.fmean(median([one.first for one in got]) for got in runs),
        seconds=statistics.fmean(median([one.total for one in got]) for got in runs),
        acceptance_rate=accepted / drafted if drafted else None,
        mean_acceptance_length=1 + accepted / calls if drafted else None,
        rounds=sum(got[0].calls for got in runs),
        equal=equal if comparable else None,
        rates=tuple(rates),
    )


def _rate(runs: Sequence[Run]) -> float | None:
    rates = [one.rate for one in runs if one.rate is not None]
    return median(rates) if rates else None


def _mean(values: Sequence[float | None]) -> float | None:
    """The geometric mean; None where one is missing."""
    known = [value for value in values if value is not None]
    return math.exp(statistics.fmean(map(math.log, known))) if len(known) == len(values) else None

"""One examination: generate, read, measure, forecast, run, judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from fastdraft.config import ModelLike, NGram, Prompt, Source, make_config
from fastdraft.control.costs import Costs
from fastdraft.doctor.day import Day
from fastdraft.doctor.reading import Output, copy, summarise
from fastdraft.doctor.report import Live, Report
from fastdraft.doctor.subject import Subject
from fastdraft.errors import ConfigError
from fastdraft.forecast import Overhead, Rate, Text, forecast, mean_rate, round_seconds
from fastdraft.generator import Generator
from fastdraft.lending import lend, load_models
from fastdraft.timing import Run, median
from fastdraft.workload import built_in, named_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["examine"]

TRIAL = 4  # drafted tokens a round of the call that overheads are learnt from
STAGES = ("load", "decode", "measure", "read", "run")


def examine(
    target: ModelLike,
    draft: ModelLike | Source = "auto",
    prompts: Mapping[str, Prompt] | Sequence[Prompt] | None = None,
    *,
    tokens: int = 64,
    temperatures: Sequence[float] = (0.8,),
    repeats: int = 2,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    requests_per_day: float | None = None,
    tokens_per_request: float | None = None,
    price_per_hour: float | None = None,
    progress: bool = False,
) -> Report:
    """Tells what a target and a draft give together, and whether they should be used together.

    The target answers the prompts. Both models read the answers by themselves, which tells what would have been
    accepted at every token. Rounds are replayed over costs measured here, for each draft length. The best one and plain
    decoding then really run, in turns.

    Args:
        target: As `Generator` takes it.
        draft: One draft model or source, as `Generator` takes it.
        prompts: By name, or in order; None takes `fastdraft.workload.built_in`. Your own tell more.
        tokens: New tokens of each answer at most.
        temperatures: At which acceptance is told, beside greedy.
        repeats: Live runs of each prompt.
        tokenizer: As `Generator` takes it.
        device: As `Generator` takes it.
        dtype: As `Generator` takes it.
        requests_per_day: For a cost estimate.
        tokens_per_request: For a cost estimate.
        price_per_hour: For a cost estimate: of the machine, in any currency.
        progress: Show a bar.

    Raises:
        ConfigError: Arguments that cannot be used; more than one source.
        VocabularyMismatchError: A draft with another vocabulary.
        FastDraftError: Whatever else `Generator` and its calls raise.
    """
    day = Day.given(requests_per_day, tokens_per_request, price_per_hour)
    named = None if prompts is None else named_prompts(prompts)
    _check(tokens, repeats, temperatures)
    config = make_config({"target": target, "draft": draft, "tokenizer": tokenizer, "device": device, "dtype": dtype})
    if len(config.draft) != 1:
        raise ConfigError(f"draft names {len(config.draft)} sources, expected one.", hint="Examine them one by one.")
    source = config.draft[0]
    with _stages(progress) as done:
        models = load_models(config)
        with Generator.from_config(lend(config, models, take=True)) as generator:
            if named is None:
                named = built_in(chat=bool(getattr(generator.tokenizer, "chat_template", None)))
            subject = Subject(generator, source, models[0], models[1] if len(models) > 1 else None)
            ids = [subject.encode(prompt) for prompt in named.values()]
            subject.warm_up(ids[0])
            done("load")
            once = [subject.time(prompt, tokens, 0) for prompt in ids]
            outputs = [Output(prompt, run.tokens) for prompt, run in zip(ids, once, strict=True)]
            done("decode")
            target_costs, draft_costs = subject.measure()
            costs = Costs(target_costs, {} if draft_costs is None else {source.name: draft_costs})
            done("measure")
            readings = subject.read(outputs, 0.0)
            texts = [reading.text for reading in readings]
            acceptance = [summarise(0.0, texts)]
            for temperature in sorted({*map(float, temperatures)} - {0.0}):
                found = subject.read(subject.sample(ids, tokens, temperature), temperature)
                acceptance.append(summarise(temperature, [reading.text for reading in found]))
            positions = subject.compare(outputs[0])
            kept = subject.kept
            done("read")
            learnt = Overhead(_round_overhead(costs, texts, [[run] for run in once]))
            learnt = replace(learnt, token=_token_overhead(subject, costs, outputs, texts, tokens, learnt))
            gamma = _best(forecast(texts, costs, source=source.name, overhead=learnt)[1:])
            runs = [subject.run(prompt, tokens, (0, gamma), repeats) for prompt in ids]
            done("run")
    # What the machine did meanwhile is in all plain runs, so the forecast is made with all of them.
    plain = [[first, *more] for first, (more, _) in zip(once, runs, strict=True)]
    overhead = replace(learnt, round=_round_overhead(costs, texts, plain))
    rates = forecast(texts, costs, source=source.name, overhead=overhead)
    live = _live(rates[0], plain), _live(rates[gamma], [drafting for _, drafting in runs])
    copies = [copy(NGram(), output).text for output in outputs]
    other = forecast(copies, costs, source="", overhead=Overhead(overhead.round)) if draft_costs is not None else ()
    return Report(
        target=models[0].label,
        draft=models[1].label if len(models) > 1 else source.name,
        prompts=tuple(named),
        tokens=tokens,
        pairing=subject.pairing,
        vocabulary=None if kept is None else len(kept),
        speed_ratio=costs.step(source.name, 1) / costs.verify(1),
        jaccard=_mean([reading.jaccard for reading in readings]),
        total_variation=_mean([reading.total_variation for reading in readings]),
        rollback=_rollback(costs, source.name, gamma),
        acceptance=tuple(acceptance),
        target_costs=target_costs,
        draft_costs=draft_costs,
        overhead=overhead,
        forecast=rates,
        best=_best(rates),
        live=live,
        ngram=other[_best(other)] if other else None,
        estimate=None if day is None else day.estimate(*live),
        positions=positions,
    )


def _check(tokens: int, repeats: int, temperatures: Sequence[float]) -> None:
    for name, value, least in (("tokens", tokens, 2), ("repeats", repeats, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} is {value!r}, expected an integer of at least {least}.")
    for warmth in temperatures:
        if isinstance(warmth, bool) or not isinstance(warmth, int | float) or not 0 <= warmth < float("inf"):
            raise ConfigError(f"temperatures holds {warmth!r}, expected numbers that are not negative.")


@contextmanager
def _stages(progress: bool) -> Iterator[Callable[[str], None]]:
    """A bar over the stages; called with the one that is done."""
    if not progress:
        yield lambda stage: None
        return
    with tqdm(total=len(STAGES), desc=STAGES[0], unit="stage") as bar:

        def done(stage: str) -> None:
            bar.update()
            bar.set_description((*STAGES, "done")[STAGES.index(stage) + 1])

        yield done


def _best(rates: Sequence[Rate]) -> int:
    return max(rates, key=lambda rate: rate.tokens_per_second).gamma


def _mean(each: Sequence[Sequence[float]]) -> float | None:
    values = [value for one in each for value in one]
    return fmean(values) if values else None


def _round_overhead(costs: Costs, texts: Sequence[Text], plain: Sequence[Sequence[Run]]) -> float:
    """Seconds of a plain round beyond its forward, over all outputs that have a rate."""
    over = 0.0
    tokens = 0
    for text, runs in zip(texts, plain, strict=True):
        rate = _rate(runs)
        if rate is not None:
            context = text.prompt + len(text.chances) // 2
            over += len(text.chances) * (1 / rate - costs.verify(1, context))
            tokens += len(text.chances)
    if not tokens:
        raise ConfigError("every answer ended with its first token; there is nothing to examine.", hint="Ask others.")
    return over / tokens


def _token_overhead(
    subject: Subject, costs: Costs, outputs: Sequence[Output], texts: Sequence[Text], tokens: int, learnt: Overhead
) -> float:
    """Seconds of a drafted token beyond its forwards, from one call on the prompt with the most to draft."""
    drafted = [sum(min(TRIAL, len(chances)) for chances in text.chances) for text in texts]
    output = outputs[drafted.index(max(drafted))]
    trace, seconds = subject.try_out(output.prompt, tokens, TRIAL)
    name, context, lag, count = subject.source.name, len(output.prompt), 1, 0
    for number, one in enumerate(trace.rounds):
        if number:
            seconds -= round_seconds(costs, name, len(one.draft), context, lag, learnt)
            count += len(one.draft)
        context += len(one.tokens)
        lag = 2 if one.draft and one.accepted == len(one.draft) else 1
    return seconds / count if count else 0.0


def _rate(runs: Sequence[Run]) -> float | None:
    rates = [run.rate for run in runs if run.rate is not None]
    return median(rates) if rates else None


def _live(expected: Rate, runs: Sequence[Sequence[Run]]) -> Live:
    measured = mean_rate([_rate(each) for each in runs], [len(each[0].tokens) for each in runs])
    if measured is None:  # every answer came whole with its first round: there is no time after it
        measured = fmean(len(run.tokens) / run.total for each in runs for run in each)
    first = fmean(median([run.first for run in each]) for each in runs)
    return Live(expected.gamma, expected.tokens_per_second, measured, first)


def _rollback(costs: Costs, source: str, gamma: int) -> float:
    """Cost of a round whose first drafted token is rejected, beyond a plain step, in target steps."""
    plain = costs.verify(1)
    return (costs.step(source, 1) * gamma + costs.verify(gamma + 1) - plain) / plain

"""A world in numbers: sources that are right with known probabilities, forwards that take known seconds.

Calls are played through a controller as the engine would play them; nothing is timed and no model runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fastdraft import SamplingParams
from fastdraft.control.costs import Costs, Forward, Measured
from fastdraft.control.course import Course, Offer, Played, Turn
from fastdraft.control.gamma import MOST, expected_tokens
from fastdraft.control.plan import AdaptiveController, Spent
from fastdraft.round import Plan

ROWS = (1, 2, 4, 8, 16)


@dataclass
class Source:
    """A draft source.

    Attributes:
        name: Its name.
        accept: Acceptance of each level of confidence; read anew for each token, so that it may change.
        weights: How often each level comes.
        step: Seconds of a step; 0 for a source without a model.
        prefill: Seconds of each token of a lag.
        offers: Whether it has a draft, asked for each round.
        levels: Whether it says how sure it is.
    """

    name: str = "draft_model"
    accept: Sequence[float] = (0.8,)
    weights: Sequence[float] = (1.0,)
    step: float = 0.05
    prefill: float = 0.005
    offers: Callable[[], bool] = lambda: True
    levels: bool = False

    @property
    def model(self) -> bool:
        return self.step > 0


@dataclass
class World:
    """Costs, sources and chance.

    Attributes:
        verify: Seconds of the target by rows.
        sources: By no particular order.
        noise: Standard deviation of the logarithm of each measured time.
        slow: Factor on all real times: what was measured before is off by it.
    """

    verify: Callable[[int], float]
    sources: Sequence[Source]
    seed: int = 0
    noise: float = 0.0
    slow: float = 1.0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def costs(self) -> Costs:
        def measured(seconds: Callable[[int], float], far: Callable[[int], float]) -> Measured:
            return Measured(tuple((n, seconds(n)) for n in ROWS), ((64, far(64)),))

        drafts = {
            s.name: measured(lambda n, s=s: s.step * (1 + 0.02 * (n - 1)), lambda n, s=s: s.step + n * s.prefill)
            for s in self.sources
            if s.model
        }
        return Costs(measured(self.verify, self.verify), drafts)

    def controller(self, *, stops: bool = False) -> AdaptiveController:
        return AdaptiveController(self.costs(), stops=stops)

    def took(self, seconds: float) -> float:
        return seconds * self.slow * self.rng.lognormvariate(0, self.noise)


@dataclass
class Call:
    """What came of a call.

    Attributes:
        seconds: Of all rounds.
        tokens: Given.
        plans: Of each round.
        drafted: Tokens drafted in each round.
        course: Its state.
    """

    course: Course
    seconds: float = 0.0
    tokens: int = 0
    plans: list[Plan] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def play(world: World, controller: AdaptiveController, tokens: int, *, prompt: int = 1, **params: object) -> Call:
    """One call by itself."""
    (call,) = play_batch(world, controller, [tokens], prompt=prompt, **params)
    return call


def play_batch(
    world: World, controller: AdaptiveController, lengths: Sequence[int], *, prompt: int = 1, **params: object
) -> list[Call]:
    """Calls that run together; each counts the whole time of the rounds it takes part in."""
    asked = SamplingParams.model_validate({"temperature": 0.0, **params})
    calls = [Call(controller.start(asked)) for _ in lengths]
    lags: list[Mapping[str, int]] = [{s.name: prompt for s in world.sources} for _ in lengths]
    kept = [dict(lag) for lag in lags]
    sources = {source.name: source for source in world.sources}
    while running := [i for i, call in enumerate(calls) if call.tokens < lengths[i]]:
        turns = [
            Turn(
                calls[i].course,
                [
                    Offer(s.name, MOST if s.offers() else 0, s.model, kept[i][s.name] if s.model else 1)
                    for s in world.sources
                ],
                lengths[i] - calls[i].tokens,
                0,
                not calls[i].plans,
            )
            for i in running
        ]
        plans = controller.plan(turns)
        rows, drafts, played = 0, {}, []
        for i, plan in zip(running, plans, strict=True):
            drafted, chances, levels, forwards = 0, [], [], 0
            source = sources.get(plan.source)
            if source is not None and plan.gamma:
                drafted, accepted, chances, levels, forwards = draft(world, source, plan)
                lag = kept[i][source.name]
                seconds = forwards * source.step + (source.prefill * lag if source.model and lag > 1 else 0.0)
                cost, sizes = drafts.setdefault(source.name, [0.0, []])
                drafts[source.name] = [cost + seconds, [*sizes, *[Forward(1, 1)] * forwards]]
            else:
                accepted = 0
            rows += 1 + drafted
            given = min(accepted + 1, lengths[i] - calls[i].tokens)
            calls[i].tokens += given
            calls[i].plans.append(plan)
            calls[i].drafted.append(drafted)
            for name in kept[i]:
                kept[i][name] = 1 if name == plan.source and forwards else kept[i][name] + given
            done = calls[i].tokens >= lengths[i]
            played.append(Played(calls[i].course, plan, drafted, accepted, chances, levels, given, done))
        spent = Spent(
            Forward(rows, rows),
            world.took(world.verify(rows)),
            [(name, sizes, world.took(seconds)) for name, (seconds, sizes) in drafts.items() if sizes or seconds],
        )
        controller.observe(played, spent)
        for i in running:
            calls[i].seconds += spent.target_seconds + sum(seconds for *_, seconds in spent.drafts)
    return calls


def draft(world: World, source: Source, plan: Plan) -> tuple[int, int, list[float], list[int], int]:
    """A round of one source: drafted, accepted, whether each reached position was, levels, forwards."""
    levels, right, drafted, forwards, reach = [], [], 0, 0, 1.0
    while drafted < plan.gamma:
        level = world.rng.choices(range(len(source.weights)), source.weights)[0]
        forwards += 1
        levels.append(level)
        if plan.stop is not None:
            reach *= plan.stop.accept[level]
            if reach < plan.stop.row[drafted]:
                break
        right.append(world.rng.random() < source.accept[level])
        drafted += 1
        if plan.stop is not None and drafted < plan.gamma and reach < plan.stop.step[drafted]:
            break
    accepted = next((i for i, good in enumerate(right) if not good), drafted)
    reached = min(accepted + 1, drafted)
    known = levels if accepted == drafted else levels[:reached]
    return (
        drafted,
        accepted,
        [float(good) for good in right[:reached]],
        known if source.levels else [],
        (forwards if source.model else 0),
    )


def best_fixed(world: World, source: Source) -> tuple[float, int]:
    """The best rate that a constant draft length gives, and the length; 0 is plain."""
    share = sum(a * w for a, w in zip(source.accept, source.weights, strict=True)) / sum(source.weights)
    rates = [
        expected_tokens((share,), g) / (world.verify(1 + g) + g * source.step) / world.slow for g in range(MOST + 1)
    ]
    best = max(range(MOST + 1), key=lambda g: rates[g])
    return rates[best], best

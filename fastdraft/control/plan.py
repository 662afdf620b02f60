"""Source and draft length of each request, chosen together, before anything is drafted. Torch-free.

Each round takes the source and gamma that give the most expected tokens a second:

    (1 + a1 + a1 a2 + ...) / (verify(rows) + catching up + draft steps)

Plain decoding, gamma 0, is one of them. In a batch each request pays its share. See docs/explanation/control.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

from fastdraft.config import SamplingParams
from fastdraft.control.costs import Costs, Forward
from fastdraft.control.course import Course, Key, Offer, Played, Turn
from fastdraft.control.gamma import MOST, Acceptance, expected_tokens
from fastdraft.control.savings import Savings
from fastdraft.round import PLAIN, Plan, Stop

__all__ = ["AdaptiveController", "Controller", "Spent"]

SHARE = 0.02  # of a call's time that speculation may cost and not earn back
_MARGIN = 1.01  # what drafting must be expected to gain over plain decoding
_STAY = 0.98  # the same for a draft model that is up to date
_CLEAR = 1.2  # the same where a call's drafts have cost more than their share so far
_HISTORY = 24  # observations from which a source has a history
_UNKNOWN = 3.0  # what a source without one may cost, in shares of one call: found out once, it is known
_NEAR = 8  # lag up to which a source counts as caught up
_SIGHT = 4  # tokens ahead that a stop looks
_PACE_KEEP = 0.9
_TYPICAL, _TYPICAL_KEEP = 128.0, 0.9  # tokens of a call, and weight of the calls before in what is typical


class Spent(NamedTuple):
    """What a round took.

    Attributes:
        verify: The target's forward.
        target_seconds: Its time, and that of all that follows from it.
        drafts: For each source that drafted: its name, its model's forwards, its seconds.
    """

    verify: Forward
    target_seconds: float
    drafts: Sequence[tuple[str, Sequence[Forward], float]]


class Controller(Protocol):
    """Chooses what is drafted."""

    def start(self, params: SamplingParams) -> Course:
        """The state of a new call."""
        ...

    def plan(self, turns: Sequence[Turn]) -> list[Plan]:
        """A plan for each request of a round, from what is known before anything is drafted."""
        ...

    def observe(self, played: Sequence[Played], spent: Spent) -> None:
        """Takes in what came of a round; prefill chunks have a time too, with no request in ``played``."""
        ...


class _Bid(NamedTuple):
    """A draft of one source and length.

    Attributes:
        tokens: Expected of the round.
        seconds: The request's share of the round's.
    """

    offer: Offer
    gamma: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class _Prices:
    """One round's costs, as shares of a request.

    Args:
        costs: Of target and drafts.
        batch: Requests that share the round.
        context: KV tokens of all of them.
        kind: Of sampling.
    """

    def __init__(self, costs: Costs, batch: int, context: int, kind: str) -> None:
        self._costs, self._batch, self._context, self.kind = costs, batch, context, kind
        self._verify: list[float] = []
        self.plain = self.verify(0)

    def verify(self, gamma: int) -> float:
        """Seconds of the target's forward with so many drafted tokens a request."""
        while len(self._verify) <= gamma:
            rows = self._batch * (1 + len(self._verify))
            self._verify.append(self._costs.verify(rows, self._context, self.kind) / self._batch)
        return self._verify[gamma]

    def step(self, offer: Offer) -> float:
        """Seconds of one draft step."""
        if not offer.model:
            return 0.0
        return self._costs.step(offer.name, self._batch, self._context, self.kind) / self._batch

    def catch_up(self, offer: Offer) -> float:
        """Seconds until a draft can begin; nobody shares them."""
        return self._costs.catch_up(offer.name, offer.lag, self.kind) if offer.model else 0.0


class AdaptiveController:
    """Maximises expected tokens a second, from measured costs and observed acceptance.

    An integer ``gamma`` is kept whatever comes of it; where several sources have a draft, the best is taken all the
    same. Where drafts don't pay, nothing is drafted but probes, see `Savings`.

    Args:
        costs: Of target and draft models.
        stops: Whether a draft model may stop within a round: it reads each step's confidence on the host.
    """

    def __init__(self, costs: Costs, *, stops: bool) -> None:
        self._costs = costs
        self._stops = stops
        self._acceptance: dict[Key, Acceptance] = {}
        self._savings: dict[Key, Savings] = {}
        self._pace: dict[Key, float] = {}  # seconds that a drafted token takes, as a share of a step's
        self._typical = _TYPICAL

    def start(self, params: SamplingParams) -> Course:
        """See `Controller`."""
        return Course(params)

    def plan(self, turns: Sequence[Turn]) -> list[Plan]:
        """See `Controller`."""
        if not turns:
            return []
        prices = _Prices(self._costs, len(turns), sum(turn.context for turn in turns), _kind(t.course for t in turns))
        return [self._choose(turn, prices) for turn in turns]

    def _choose(self, turn: Turn, prices: _Prices) -> Plan:
        course, wanted = turn.course, turn.course.params.gamma
        course.asked, course.probing = None, False
        # What a grammar forces is nearly certain and costs no draft: it leads, and what a source adds stands behind it.
        turn = turn._replace(lead=min(turn.lead, turn.left - 1, MOST if wanted == "auto" else wanted))
        plan = self._behind(turn, wanted, prices)
        return plan._replace(lead=turn.lead)

    def _behind(self, turn: Turn, wanted: int | Literal["auto"], prices: _Prices) -> Plan:
        """Source and draft length behind the forced tokens."""
        course = turn.course
        room = turn.left - 1 - turn.lead
        named = course.params.source
        offers = [o for o in turn.offers if min(o.most, room) > 0 and named in (None, o.name)]
        if wanted != "auto":
            return self._fixed(turn, offers, min(wanted - turn.lead, room), prices)
        # The first token does not wait for a draft model's prefill.
        offers = [o for o in offers if not (o.model and turn.fresh)]
        if not offers:
            return PLAIN
        bids = [self._best(turn, offer, min(offer.most, room, MOST), prices) for offer in offers]
        best = max(bids, key=lambda bid: bid.rate)
        alone = (1 + turn.lead) / prices.verify(turn.lead)
        pays = best.rate >= alone * self._margin(turn, best.offer, prices)
        course.decide(pays)
        rate = best.rate if pays else alone
        probe = self._probe(turn, [bid.offer for bid in bids if not (pays and bid is best)], rate, prices)
        if probe is not None:
            course.asked, course.probing = course.key(probe.name, probe.key), True
            return Plan(probe.name, 1)
        if not pays:
            return PLAIN
        course.asked = course.key(best.offer.name, best.offer.key)
        return self._draft(turn, best, min(best.offer.most, room, MOST), prices)

    def _fixed(self, turn: Turn, offers: Sequence[Offer], gamma: int, prices: _Prices) -> Plan:
        """The user's gamma, from the source that is expected to do best with it."""
        if not offers or gamma <= 0:
            return PLAIN
        offer = offers[0]
        if len(offers) > 1:
            lengths = [min(o.most, gamma) for o in offers]
            bids = [self._bids(turn, o, n, prices)[-1] for o, n in zip(offers, lengths, strict=True)]
            offer = max(bids, key=lambda bid: bid.rate).offer
        turn.course.asked = turn.course.key(offer.name, offer.key)
        return Plan(offer.name, min(offer.most, gamma))

    def _step(self, course: Course, offer: Offer, prices: _Prices) -> float:
        """Seconds that a drafted token is expected to take: one forward of a model may give several."""
        return prices.step(offer) * self._pace.get(course.key(offer.name, ""), 1.0)

    def _curve(self, course: Course, offer: Offer) -> tuple[float, ...]:
        """The acceptance of each position that a call may expect."""
        return course.lean(offer.name).shift(self._known(course.key(offer.name, offer.key)).curve)

    def _known(self, key: Key) -> Acceptance:
        return self._acceptance.setdefault(key, Acceptance())

    def _bids(self, turn: Turn, offer: Offer, most: int, prices: _Prices) -> list[_Bid]:
        """Every draft length of an offer, from 1."""
        curve = self._curve(turn.course, offer)
        step, late = self._step(turn.course, offer, prices), prices.catch_up(offer) / self._ahead(turn)
        found, tokens, reach = [], 1.0 + turn.lead, 1.0
        for gamma in range(1, most + 1):
            reach *= curve[min(gamma, MOST) - 1]
            tokens += reach
            # Catching up is paid once, and serves all tokens that are still to come.
            verify = prices.verify(turn.lead + gamma)
            found.append(_Bid(offer, gamma, tokens, verify + gamma * step + late * tokens))
        return found

    def _best(self, turn: Turn, offer: Offer, most: int, prices: _Prices) -> _Bid:
        return max(self._bids(turn, offer, most, prices), key=lambda bid: bid.rate)

    def _ahead(self, turn: Turn) -> float:
        """Tokens that the call is still expected to give: few use up what they may, and long ones go on."""
        tokens = turn.course.tokens
        return max(1.0, min(turn.left, max(self._typical - tokens, self._typical / 8, tokens / 4)))

    def _allowance(self, turn: Turn, prices: _Prices) -> float:
        """Seconds that drafts may have cost this call and not earned back."""
        return SHARE * (turn.course.elapsed + prices.plain * self._ahead(turn))

    def _margin(self, turn: Turn, offer: Offer, prices: _Prices) -> float:
        """What an offer must be expected to gain: more, where experience so far speaks against it."""
        savings = self._savings_of(turn.course.key(offer.name, ""))
        lost = savings.lost if savings.seen < _HISTORY else turn.course.lost
        if lost > self._allowance(turn, prices):
            return _CLEAR
        # A draft model that stops falls behind, and to come back costs more than a doubtful stretch.
        return _STAY if offer.model and offer.lag <= _NEAR and not turn.course.off else _MARGIN

    def _probe(self, turn: Turn, offers: Sequence[Offer], rate: float, prices: _Prices) -> Offer | None:
        """A source worth one drafted token, to see whether it has become better than what is best at ``rate``."""
        for offer in offers:
            course = turn.course
            tokens = 1 + turn.lead + self._curve(course, offer)[0]
            cost = (
                prices.verify(turn.lead + 1)
                + self._step(course, offer, prices)
                + prices.catch_up(offer)
                - tokens / rate
            )
            savings, allowance = self._savings_of(course.key(offer.name, "")), self._allowance(turn, prices)
            # Probes may cost half of what a call may lose; what is left covers drafts that were expected to pay.
            fits = course.lost + cost <= allowance / 2
            near = offer.lag <= _NEAR and savings.lost + cost <= _UNKNOWN * allowance
            if (near and savings.seen < _HISTORY) or savings.allow(cost, fits):
                return offer
        return None

    def _savings_of(self, key: Key) -> Savings:
        return self._savings.setdefault(key, Savings())

    def _draft(self, turn: Turn, bid: _Bid, most: int, prices: _Prices) -> Plan:
        """The plan of the best bid; a draft model may go further where it is sure, and stops where it is not."""
        offer, gamma = bid.offer, bid.gamma
        if not (self._stops and offer.model):
            return Plan(offer.name, gamma)
        curve = self._curve(turn.course, offer)[: gamma + 1]
        mean = sum(curve) / len(curve)
        step = self._step(turn.course, offer, prices)
        rows, steps = [], []
        for drawn in range(most):
            # The next token is worth what it and those after it bring: a dear row may be followed by cheap ones.
            further = range(1, min(_SIGHT, most - drawn) + 1)
            rows_before = turn.lead + drawn
            costs = [prices.verify(rows_before + n) - prices.verify(rows_before) + (n - 1) * step for n in further]
            gains = [expected_tokens((mean,), n - 1) for n in further]
            rows.append(bid.rate * min(cost / gain for cost, gain in zip(costs, gains, strict=True)))
            steps.append(bid.rate * min((cost + step) / gain for cost, gain in zip(costs, gains, strict=True)) / mean)
        table = self._known(turn.course.key(offer.name, offer.key)).table
        return Plan(offer.name, most, Stop(table, tuple(rows), tuple(steps)))

    def observe(self, played: Sequence[Played], spent: Spent) -> None:
        """See `Controller`."""
        kind = _kind(p.course for p in played)
        self._costs.observe(None, [spent.verify], spent.target_seconds, kind)
        for source, forwards, seconds in spent.drafts:
            self._costs.observe(source, forwards, seconds, kind)
        if not played:
            return
        self._time(played, spent, kind)
        prices = _Prices(self._costs, len(played), spent.verify.context, kind)
        asked = Counter(p.plan.source for p in played)
        drafting = {source: seconds / max(1, asked[source]) for source, _, seconds in spent.drafts}
        total = (spent.target_seconds + sum(seconds for *_, seconds in spent.drafts)) / len(played)
        for one in played:
            course = one.course
            rows = prices.verify(one.forced + one.drafted) - prices.verify(one.forced)
            gained = one.tokens - 1 - min(one.forced_kept, one.tokens - 1)
            self._settle(one, rows + drafting.get(one.plan.source, 0.0) - gained * prices.plain, total)
            if course.leniency is not None:
                course.leniency.observe(one.drafted, one.accepted)
            if one.done:
                self._typical = _TYPICAL_KEEP * self._typical + (1 - _TYPICAL_KEEP) * course.tokens

    def _time(self, played: Sequence[Played], spent: Spent, kind: str) -> None:
        """Learns how many tokens a draft model's forwards give."""
        for source, forwards, _ in spent.drafts:
            mine = [one for one in played if one.plan.source == source and one.drafted]
            steps = [self._costs.step(source, f.rows, f.context, kind) for f in forwards if f.kept]
            one_each = self._costs.step(source, len(mine), spent.verify.context, kind)
            if not (mine and steps and one_each):
                continue
            pace = sum(steps) / (one_each * max(one.drafted for one in mine))
            for key in {one.course.key(source, "") for one in mine}:
                self._pace[key] = _PACE_KEEP * self._pace.get(key, 1.0) + (1 - _PACE_KEEP) * min(pace, 1.0)

    def _settle(self, one: Played, loss: float, seconds: float) -> None:
        """One request's part of a round: what its drafts cost, and what they say of the next ones."""
        course = one.course
        course.elapsed += seconds
        course.tokens += one.tokens
        for key, savings in self._savings.items():
            if key.kind == course.kind:
                savings.earn(seconds)
        if course.asked is None or not one.plan.gamma:
            return
        course.lost += loss
        acceptance = self._known(course.asked)
        course.lean(course.asked.source).observe(one.chances, acceptance)
        acceptance.observe(one.chances, one.levels)
        if one.drafted:
            savings = self._savings_of(course.key(course.asked.source, ""))
            savings.learn(len(one.chances), loss)
            if course.probing:
                savings.spend(-loss, accepted=one.accepted > 0)
            else:
                savings.clear()


def _kind(courses: Iterable[Course]) -> str:
    """How a batch is verified; where its requests differ, the costs of that are learnt apart."""
    kinds = {course.kind for course in courses}
    return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else ""

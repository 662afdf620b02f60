"""What a day's requests cost, with and without speculation."""

from __future__ import annotations

from dataclasses import dataclass

from fastdraft.doctor.report import DayCost, Estimate, Live
from fastdraft.errors import ConfigError

__all__ = ["Day"]


@dataclass(frozen=True, slots=True)
class Day:
    """A day's work.

    Attributes:
        requests: A day.
        tokens: A request.
        price: An hour of the machine.
    """

    requests: float
    tokens: float
    price: float

    @classmethod
    def given(cls, requests: float | None, tokens: float | None, price: float | None) -> Day | None:
        """All three, or none.

        Raises:
            ConfigError: Some are missing, or negative.
        """
        values = {"requests_per_day": requests, "tokens_per_request": tokens, "price_per_hour": price}
        lacking = [name for name, value in values.items() if value is None]
        if requests is None or tokens is None or price is None:
            if len(lacking) == len(values):
                return None
            raise ConfigError(f"a cost estimate also needs {' and '.join(lacking)}.", hint="Give all three or none.")
        for name, value in values.items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
                raise ConfigError(f"{name} is {value!r}, expected a number that is not negative.")
        if tokens < 1:
            raise ConfigError(f"tokens_per_request is {tokens!r}, expected at least 1.")
        return cls(requests, tokens, price)

    def estimate(self, plain: Live, speculative: Live) -> Estimate:
        """What it costs with and without speculation."""
        return Estimate(self.requests, self.tokens, self.price, self._cost(plain), self._cost(speculative))

    def _cost(self, live: Live) -> DayCost:
        seconds = live.time_to_first_token + (self.tokens - 1) / live.measured
        hours = seconds * self.requests / 3600
        return DayCost(seconds, hours, hours * self.price)

"""A generator's metrics for Prometheus: `Collector` reads them whenever a registry is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from fastdraft.errors import GeneratorClosedError, MissingDependencyError

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ImportError as error:
    raise MissingDependencyError(
        "fastdraft.integrations.prometheus needs the package prometheus-client, which is not installed.",
        hint="Run pip install 'fastdraft[prometheus]'.",
    ) from error

if TYPE_CHECKING:
    from fastdraft.metrics import Metrics, Spread

__all__ = ["Collector"]

_GAUGES = {
    "running": "Requests in the batch",
    "queued": "Requests that wait",
    "free_blocks": "Target KV blocks that can be taken at once",
    "total_blocks": "All target KV blocks",
    "draft_free_blocks": "KV blocks of draft models that can be taken at once",
    "draft_total_blocks": "All KV blocks of draft models",
}
_COUNTERS = {
    "finished": "Calls that ended",
    "rounds": "Rounds of the batch",
    "tokens": "Tokens generated",
    "prompt_tokens": "Prompt tokens admitted",
    "prefix_hit_tokens": "Prompt tokens served from reused KV",
    "preempted": "Times that a request gave its KV back and waited again",
    "draft_failures": "Times that a draft source raised",
    "split_rounds": "Rounds whose forward raised",
}


class _Measured(Protocol):
    def metrics(self) -> Metrics: ...


class Collector:
    """Register it: ``REGISTRY.register(Collector(generator))``. A closed generator gives nothing.

    All names begin with ``fastdraft_``: gauges ``running``, ``queued``, ``free_blocks``, ``total_blocks``,
    ``draft_free_blocks``, ``draft_total_blocks``; counters ``finished_total``, ``rounds_total``, ``tokens_total``,
    ``prompt_tokens_total``, ``prefix_hit_tokens_total``, ``preempted_total``, ``draft_failures_total``,
    ``split_rounds_total``, ``seconds_total`` by ``part`` (draft, target, constraint), ``drafted_tokens_total`` and
    ``accepted_tokens_total`` by ``source``; and of the latest times ``time_to_first_token_seconds`` and
    ``inter_token_seconds`` by ``quantile``.

    Args:
        generator: A `Generator`; read between two of its rounds.
        name: Put on every sample as ``generator``, where several are registered.
    """

    def __init__(self, generator: _Measured, name: str = "") -> None:
        self._generator = generator
        self._labels = {"generator": name} if name else {}

    def describe(self) -> list[Metric]:
        """Nothing: a registry then need not ask the generator when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment."""
        try:
            found = self._generator.metrics()
        except GeneratorClosedError:
            return
        for name, said in _GAUGES.items():
            yield self._gauge(name, said, [({}, getattr(found, name))])
        for name, said in _COUNTERS.items():
            yield self._counter(name, said, [({}, getattr(found, name))])
        parts = {"draft": found.draft_seconds, "target": found.target_seconds, "constraint": found.constraint_seconds}
        yield self._counter("seconds", "Seconds spent", [({"part": part}, value) for part, value in parts.items()])
        sources = found.by_source.items()
        drafted = [({"source": source}, float(one.draft_tokens)) for source, one in sources]
        accepted = [({"source": source}, float(one.accepted_tokens)) for source, one in sources]
        yield self._counter("drafted_tokens", "Drafted tokens", drafted)
        yield self._counter("accepted_tokens", "Drafted tokens that stand in the output", accepted)
        yield self._spread("time_to_first_token_seconds", "From a call to its first token", found.time_to_first_token)
        yield self._spread("inter_token_seconds", "Between the chunks of a call", found.inter_token)

    def _spread(self, name: str, said: str, spread: Spread) -> Metric:
        values = {"0.5": spread.p50, "0.95": spread.p95, "0.99": spread.p99}
        return self._gauge(name, said, [({"quantile": at}, value) for at, value in values.items() if value is not None])

    def _gauge(self, name: str, said: str, samples: list[tuple[dict[str, str], float]]) -> Metric:
        labels = [*self._labels, *(samples[0][0] if samples else ())]
        family = GaugeMetricFamily(f"fastdraft_{name}", said, labels=labels)
        for own, value in samples:
            family.add_metric([*self._labels.values(), *own.values()], value)
        return family

    def _counter(self, name: str, said: str, samples: list[tuple[dict[str, str], float]]) -> Metric:
        labels = [*self._labels, *(samples[0][0] if samples else ())]
        family = CounterMetricFamily(f"fastdraft_{name}", said, labels=labels)
        for own, value in samples:
            family.add_metric([*self._labels.values(), *own.values()], value)
        return family

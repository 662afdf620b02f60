"""A registry reads a generator's metrics as they are."""

from __future__ import annotations

from typing import Any

import pytest

from fastdraft import Generator, NGram
from tests import tiny

prometheus_client = pytest.importorskip("prometheus_client")
from fastdraft.integrations.prometheus import Collector  # noqa: E402


def _samples(registry: Any) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def test_a_registry_reads_what_metrics_says() -> None:
    registry = prometheus_client.CollectorRegistry()
    with Generator(tiny.model("llama"), NGram(min=1), tokenizer=tiny.tokenizer(), kv_memory="4MiB") as generator:
        registry.register(Collector(generator))
        registry.register(Collector(generator, "two"))
        before = _samples(registry)
        assert before["fastdraft_finished_total[]"] == 0 and "quantile" not in str(before)
        prompt = [5, 6, 7, 8] * 8
        generator.batch([prompt] * 3, temperature=0, max_tokens=20, ignore_eos=True, gamma=4)
        found, told = _samples(registry), generator.metrics()
        assert found["fastdraft_finished_total[]"] == 3 and found["fastdraft_tokens_total[]"] == 60
        assert found["fastdraft_finished_total[('generator', 'two')]"] == 3
        for name in ("running", "queued", "free_blocks", "total_blocks"):
            assert found[f"fastdraft_{name}[]"] == getattr(told, name)
        source = "[('source', 'ngram')]"
        assert found[f"fastdraft_drafted_tokens_total{source}"] == told.by_source["ngram"].draft_tokens
        assert found[f"fastdraft_accepted_tokens_total{source}"] == told.by_source["ngram"].accepted_tokens
        assert found["fastdraft_seconds_total[('part', 'target')]"] == told.target_seconds > 0
        p99 = found["fastdraft_inter_token_seconds[('quantile', '0.99')]"]
        assert p99 == told.inter_token.p99 and p99 >= found["fastdraft_inter_token_seconds[('quantile', '0.5')]"] > 0
        text = prometheus_client.generate_latest(registry).decode()
        assert "# TYPE fastdraft_tokens_total counter" in text and "fastdraft_running 0.0" in text
    assert _samples(registry) == {}

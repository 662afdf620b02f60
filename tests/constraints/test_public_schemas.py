"""Public schemas and their instances: the official test suite of JSON Schema, and schemas from the real world."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.schema_support import Count, by_file, count, generated, on_page, real_world, suite


@pytest.fixture(scope="module")
def official(shared: Path) -> dict[str, Count]:
    return by_file(suite(shared / "workloads" / "json_schema_test_suite"))


def test_no_invalid_instance_of_the_official_suite_passes(official):
    for one in official.values():
        assert one.accepted_wrongly == []
        assert one.crashed == {}


def test_most_of_the_official_suite_is_served(official):
    refused = {name: reason for one in official.values() for name, reason in one.refused.items()}
    assert sum(one.served for one in official.values()) + len(refused) == 383
    assert len(refused) <= 60, sum((one.by_keyword() for one in official.values()), Counter())
    assert all(" at #" in reason for reason in refused.values())


def test_the_reference_page_says_so(official):
    assert on_page() == generated(official), "run python -m tests.schema_support"


def test_real_world_schemas_are_served_and_nothing_invalid_passes(shared: Path):
    result = count(real_world(shared / "workloads" / "jsonschemabench.jsonl"))
    assert result.accepted_wrongly == []
    assert result.crashed == {}
    assert result.served >= 61, result.refused

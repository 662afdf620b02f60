"""Public schemas and their instances: the official test suite of JSON Schema, and schemas from the real world."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fastdraft import Constrained, InvalidConstraintError
from fastdraft.constraints.types import spec_of
from tests.byte_grammar import Grammar, in_order, write


@dataclass
class Count:
    """What became of a number of schemas."""

    enforced: list[str] = field(default_factory=list)
    checked: dict[str, tuple[str, ...]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    accepted_wrongly: list[str] = field(default_factory=list)
    never_written: list[str] = field(default_factory=list)
    crashed: dict[str, str] = field(default_factory=dict)

    @property
    def served(self) -> int:
        return len(self.enforced) + len(self.checked)

    def by_keyword(self) -> Counter[str]:
        """How many schemas were refused for each keyword."""
        return Counter(reason.partition(" at ")[0] for reason in self.refused.values())


def count(schemas: Iterable[tuple[str, Any, list[Mapping[str, Any]]]]) -> Count:
    """Puts every instance to its schema's grammar, and what that writes to validation."""
    result = Count()
    for name, schema, tests in schemas:
        try:
            spec = spec_of(Constrained(schema if isinstance(schema, dict) else {"allOf": [schema]}))
        except InvalidConstraintError as error:
            result.refused[name] = str(error)
            continue
        try:
            grammar = Grammar(spec)
        except ValueError as error:
            result.crashed[name] = str(error)
            continue
        if spec.checks:
            result.checked[name] = spec.checks
        else:
            result.enforced.append(name)
        for test in tests:
            text = write(in_order(test["data"], spec.source))
            is_written = grammar.writes(text)
            try:
                spec.parse(text)
                is_valid = True
            except ValueError:
                is_valid = False
            label = f"{name}: {text}"
            if is_written and is_valid and not test["valid"]:
                result.accepted_wrongly.append(label)
            if is_written and not is_valid and not spec.checks:
                result.crashed[label] = "written, not valid, and no keyword was left to validation"
            if test["valid"] and not is_written:
                result.never_written.append(label)
    return result


def suite(folder: Path) -> Iterable[tuple[str, Any, list[Mapping[str, Any]]]]:
    for path in sorted((folder / "tests" / "draft2020-12").glob("*.json")):
        for group in json.loads(path.read_text("utf-8")):
            yield f"{path.stem}: {group['description']}", group["schema"], group["tests"]


def real_world(path: Path) -> Iterable[tuple[str, Any, list[Mapping[str, Any]]]]:
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        yield row["id"], row["schema"], row["tests"]


@pytest.fixture(scope="module")
def official(shared: Path) -> Count:
    return count(suite(shared / "workloads" / "json_schema_test_suite"))


def test_no_invalid_instance_of_the_official_suite_passes(official):
    assert official.accepted_wrongly == []
    assert official.crashed == {}


def test_most_of_the_official_suite_is_served(official):
    assert official.served + len(official.refused) == 383
    assert len(official.refused) <= 60, official.by_keyword()
    assert all(" at #" in reason for reason in official.refused.values())


def test_real_world_schemas_are_served_and_nothing_invalid_passes(shared: Path):
    result = count(real_world(shared / "workloads" / "jsonschemabench.jsonl"))
    assert result.accepted_wrongly == []
    assert result.crashed == {}
    assert result.served >= 61, result.refused

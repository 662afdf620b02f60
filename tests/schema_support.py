"""What becomes of public schemas and their instances; run as a module, it writes the reference page about it.

python -m tests.schema_support
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdraft import Constrained, InvalidConstraintError
from fastdraft.constraints.types import spec_of
from tests.byte_grammar import Grammar, in_order, write

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "json-schema.md"
SUITE = ROOT.parent / "shared" / "workloads" / "json_schema_test_suite"
BEGIN, END = "<!-- generated: python -m tests.schema_support -->\n", "<!-- end of what is generated -->\n"


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


def by_file(schemas: Iterable[tuple[str, Any, list[Mapping[str, Any]]]]) -> dict[str, Count]:
    """A count for each file of the suite, which is named for its keyword."""
    files: dict[str, list[tuple[str, Any, list[Mapping[str, Any]]]]] = {}
    for name, schema, tests in schemas:
        files.setdefault(name.partition(":")[0], []).append((name, schema, tests))
    return {file: count(groups) for file, groups in files.items()}


def generated(counts: Mapping[str, Count]) -> str:
    """The tables of the page."""

    def row(name: str, *numbers: int) -> str:
        return f"| {name} | " + " | ".join(str(number or "") for number in numbers) + " |"

    lines = [
        "| Keyword | Schemas | by the grammar | checked afterwards | refused | valid instances never written |",
        "|---|---|---|---|---|---|",
    ]
    sums = [0] * 5
    for name, one in counts.items():
        numbers = [
            one.served + len(one.refused),
            len(one.enforced),
            len(one.checked),
            len(one.refused),
            len(one.never_written),
        ]
        sums = [a + b for a, b in zip(sums, numbers, strict=True)]
        lines.append(row(f"`{name}`", *numbers))
    lines += [row("**all**", *sums), "", "Refused, by the keyword that the error names:", "", "| Keyword | Schemas |"]
    lines.append("|---|---|")
    refused: Counter[str] = sum((one.by_keyword() for one in counts.values()), Counter())
    lines += [
        f"| `{keyword}` | {number} |"
        for keyword, number in sorted(refused.items(), key=lambda item: (-item[1], item[0]))
    ]
    return "\n".join(lines) + "\n"


def on_page() -> str:
    """What the page has between its marks."""
    return PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0].strip() + "\n"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{generated(by_file(suite(SUITE)))}\n{END}{rest.partition(END)[2]}", "utf-8")

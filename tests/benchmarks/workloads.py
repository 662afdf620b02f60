"""The prompts that benchmarks run on, in two halves that never meet.

Whatever is fitted (thresholds, frequent tokens, quantisation) is fitted on the half ``fit``; what a page reports is
measured on ``measure``. Texts are ordered by the sha256 of their id and cut in the middle; questions about one document
stay together. The texts are public ones (``../shared/workloads``); where that folder is absent, own.jsonl beside this
file takes its place.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

GROUPS = ("code", "edit", "extraction", "rag", "qa")
Half = Literal["fit", "measure"]

OWN = Path(__file__).with_name("own.jsonl")
PUBLIC = Path(__file__).resolve().parents[3] / "shared" / "workloads"

# The record to extract is the longest valid instance of its schema, in these bounds (characters of JSON).
SCHEMA_MOST, RECORD_LEAST, RECORD_MOST = 3000, 300, 1500


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        id: Its name in the workload it comes from.
        group: One of ``GROUPS``.
        text: The user's message.
        document: What it is divided by: prompts with the same one are in the same half.
    """

    id: str
    group: str
    text: str
    document: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat that is sent."""
        return [{"role": "user", "content": self.text}]


def prompts(group: str, half: Half) -> list[Prompt]:
    """The prompts of a group in one half, in an order that says nothing about them (sha256 of their ids).

    Args:
        group: One of ``GROUPS``.
        half: ``fit`` for whatever is tuned, ``measure`` for what is reported.

    Raises:
        ValueError: An unknown group.
    """
    if group not in GROUPS:
        raise ValueError(f"unknown group {group!r}: it is one of {', '.join(GROUPS)}")
    found = list(_public(group)) if PUBLIC.is_dir() else []
    if group == "extraction" or not found:
        found += _own(group)
    documents = sorted({prompt.document for prompt in found}, key=_digest)
    middle = (len(documents) + 1) // 2
    chosen = set(documents[:middle] if half == "measure" else documents[middle:])
    return sorted((prompt for prompt in found if prompt.document in chosen), key=lambda prompt: _digest(prompt.id))


def take(count: int, half: Half = "measure") -> list[Prompt]:
    """So many prompts, the groups in turns: ``take(12)`` has three of code and edit, two of each other group."""
    turns = itertools.zip_longest(*(prompts(group, half) for group in GROUPS))
    return list(itertools.islice((prompt for turn in turns for prompt in turn if prompt is not None), count))


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _own(group: str) -> list[Prompt]:
    return [Prompt(line["id"], group, line["prompt"], line["id"]) for line in _lines(OWN) if line["group"] == group]


def _public(group: str) -> Iterator[Prompt]:
    if group == "extraction":
        yield from _records()
        return
    if group in ("code", "edit"):
        for line in _lines(PUBLIC / f"{group}.jsonl"):
            # HumanEval's are to be completed; asked plainly, a chat model explains first and writes no code for long.
            ask = "Complete this Python function. Reply with the code alone.\n\n" if group == "code" else ""
            yield Prompt(line["id"], group, ask + line["prompt"], line["id"])
        return
    ask = "Answer in a short paragraph."
    if group == "rag":
        for line in _lines(PUBLIC / "rag.jsonl"):
            for at, question in enumerate(line["questions"]):
                text = f"{line['text']}\n\n{question['q']} {ask} Use only the text above."
                yield Prompt(f"{line['doc_id']}/{at}", group, text, str(line["doc_id"]))
    for line in _lines(PUBLIC / "spec_bench.jsonl"):
        if line["group"] == group == "qa":
            yield Prompt(line["id"], group, f"{line['turns'][0]} {ask}", line["id"])


def _records() -> Iterator[Prompt]:
    """Records written out as text, to be given back as JSON under their schema."""
    for line in _lines(PUBLIC / "jsonschemabench.jsonl"):
        schema = json.dumps(line["schema"], ensure_ascii=False)
        valid = [test["data"] for test in line["tests"] if test["valid"] and isinstance(test["data"], dict)]
        record = max(valid, key=lambda data: len(json.dumps(data, ensure_ascii=False)), default={})
        if len(schema) > SCHEMA_MOST or not RECORD_LEAST <= len(json.dumps(record, ensure_ascii=False)) <= RECORD_MOST:
            continue
        text = f"Give the record below as JSON that follows this schema. Reply with the JSON alone.\n\n{schema}\n\n"
        yield Prompt(line["id"], "extraction", text + "\n".join(_written(record)), line["id"])


def _written(value: Any, depth: int = 0) -> Iterator[str]:
    """A value as an indented list, its keys as words."""
    entries = value.items() if isinstance(value, dict) else ((f"entry {at + 1}", item) for at, item in enumerate(value))
    for key, item in entries:
        start = f"{'  ' * depth}- {key.replace('_', ' ')}:"
        if isinstance(item, dict | list):
            yield start if item else f"{start} none"
            yield from _written(item, depth + 1)
        else:
            yield f"{start} {item}"


def _lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]

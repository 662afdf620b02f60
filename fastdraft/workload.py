"""Prompts to measure with: a few that come along, or a user's own from a file. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdraft.errors import ConfigError

if TYPE_CHECKING:
    from fastdraft.config import Prompt

__all__ = ["QUESTIONS", "as_prompt", "built_in", "named_prompts", "read_prompts"]

# One of each kind of work; how well drafts do differs more between kinds than between models.
QUESTIONS: Mapping[str, str] = {
    "code": (
        "Write a Python function `merge_intervals(intervals)` that merges overlapping intervals given as pairs of "
        "integers and returns them sorted. Add a docstring with one example."
    ),
    "edit": (
        "Rename the variable `total` to `amount` in this code and return the whole code, otherwise unchanged.\n\n"
        "```python\ndef pay(items, rate):\n    total = 0\n    for item in items:\n"
        "        total += item.price * item.count\n    total *= 1 + rate\n    print('to pay:', total)\n"
        "    return total\n```"
    ),
    "extraction": (
        "List every person in this text as JSON objects with the keys name, role and city.\n\n"
        "Maria Keller, an architect from Graz, met Tom Okafor, who teaches physics in Leeds, and Ines Duarte, a "
        "surgeon in Porto. Their host was Paul Lindqvist, a baker from Uppsala."
    ),
    "document": (
        "The old observatory on the hill above Merrin was built in 1874 by the astronomer Clara Voss. Its brass "
        "telescope was moved to the museum in 1962, after the lights of the town had made the sky too bright. Since "
        "1998 the dome has housed a weather station, which measures wind, rain and temperature every ten minutes.\n\n"
        "Using this text alone: who built the observatory, why was the telescope moved, and what does the dome do "
        "today?"
    ),
    "question": "Why does bread rise, and what happens to the dough when it is left for too long? Explain briefly.",
}


def built_in(*, chat: bool) -> dict[str, Prompt]:
    """The prompts that come along, by kind.

    Args:
        chat: As messages for the model's chat template, else as raw text.
    """
    return {name: as_prompt(text, chat=chat) for name, text in QUESTIONS.items()}


def named_prompts(prompts: Mapping[str, Prompt] | Sequence[Prompt]) -> dict[str, Prompt]:
    """Prompts by name; those of a list are numbered from 1.

    Raises:
        ConfigError: Not a list of prompts, or none in it.
    """
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Mapping | Sequence):
        raise ConfigError(f"prompts is a {type(prompts).__name__}, expected a list of prompts, or prompts by name.")
    if not prompts:
        raise ConfigError("prompts is empty; there is nothing to measure.")
    if isinstance(prompts, Mapping):
        return {str(name): prompt for name, prompt in prompts.items()}
    return {str(number): prompt for number, prompt in enumerate(prompts, 1)}


def as_prompt(text: str, *, chat: bool) -> Prompt:
    """One user message, or the text as it is."""
    return [{"role": "user", "content": text}] if chat else text


def read_prompts(path: Path, *, chat: bool) -> dict[str, Prompt]:
    """Prompts of a file, by name.

    Args:
        path: One prompt a line; or, where the name ends in ``.jsonl``, one JSON object a line with ``"prompt"`` (text,
            messages or token ids) and, if you like, ``"id"``. Empty lines are left out.
        chat: Text becomes one user message for the model's chat template, else it stays raw.

    Raises:
        ConfigError: No such file, no prompt in it, or a line that is none.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts in {path} cannot be read: {error}") from error
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            name, prompt = _parse(line, f"{path}:{number}") if path.suffix == ".jsonl" else ("", line)
            key = name or str(number)
            if key in prompts:
                raise ConfigError(f"{path}:{number} is named {key!r}, as an earlier line is.", hint="Use other ids.")
            prompts[key] = as_prompt(prompt, chat=chat) if isinstance(prompt, str) else prompt
    if not prompts:
        raise ConfigError(f"{path} holds no prompt.", hint="Write one a line.")
    return prompts


def _parse(line: str, where: str) -> tuple[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is no JSON: {error}.", hint='Write {"prompt": "..."} on each line.') from error
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str | list):
        raise ConfigError(f"{where} has no prompt.", hint='Write {"prompt": "..."} on each line.')
    return str(found.get("id", "")), found["prompt"]

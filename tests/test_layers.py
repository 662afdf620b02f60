"""The walls of docs/explanation/structure.md: who may import whom, and where third parties are let in.

Reads source text only, so it needs nothing installed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the top down. A room is named by its longest prefix here; it imports only from lines below its own.
LAYERS = (
    ("integrations", "cli"),
    ("doctor", "bench", "audit", "training", "testing"),
    ("timing", "forecast", "lending"),
    ("",),  # fastdraft/__init__.py, the public face
    ("generator",),
    ("build", "worker", "streams", "intake", "memory"),
    ("engine",),
    ("launch", "pins", "soundness"),
    ("scheduler", "proposers"),
    ("models",),
    ("attention", "kv.cache"),
    ("commit", "outcome"),
    ("request",),
    ("sampling", "control", "constraints", "prompt", "text", "kv", "kv.pool", "kv.table"),
    ("metrics",),
    ("round", "results", "trace", "precedence", "workload"),
    ("config", "constrained"),
    ("errors", "_log", "aside"),
)
LEVELS = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
HELPERS = {"build", "worker", "streams", "intake", "memory"}  # one level, yet free to import each other
FOLDERS = ("kv",)  # whose files stand on different levels, so that each is named
NO_NAMES = {"utils", "util", "common", "core", "helpers", "misc"}

TORCH_FREE = {
    *("", "errors", "_log", "aside", "config", "constrained", "results", "round", "trace", "precedence"),
    *("kv", "kv.pool", "kv.table", "metrics", "request", "control", "testing", "workload", "forecast"),
}
HEAVY = {"torch", "transformers"}

CORE = {"torch", "transformers", "pydantic", "pydantic_core", "structlog", "tqdm"}
# What only some rooms may import. Beyond this, a third party is let in by the file named for it: llguidance
# by constraints/llguidance.py, flash_attn by attention/flash.py, langchain_core by integrations/langchain.py.
GUESTS = {
    "outlines": "constraints",
    "typer": "cli",
    "rich": "cli",
    "matplotlib": "bench",
    "numpy": "models.gguf",
    "accelerate": "models.gguf",
    "safetensors": "models.rounded",  # transformers brings it
}
LAZY = {"gguf", "numpy", "matplotlib"}  # only inside functions, so that the extra stays optional


class Import(NamedTuple):
    target: str  # an absolute dotted name
    line: int
    at_load: bool  # runs when the module is imported


def read_sources(root: Path) -> dict[str, str]:
    """The source of every module in a checkout, by its name below ``fastdraft``; the package itself is ''."""
    sources = {}
    for folder, prefix in ((root / "fastdraft", ()), (root / "integrations", ("integrations",))):
        for path in sorted(folder.rglob("*.py")):
            parts = (*prefix, *path.relative_to(folder).with_suffix("").parts)
            if prefix or parts[0] != "integrations":  # fastdraft/integrations is a link to the other folder
                sources[".".join(parts).removesuffix("__init__").rstrip(".")] = path.read_text("utf-8")
    return sources


def find_imports(module: str, source: str, modules: frozenset[str]) -> Iterator[Import]:
    """Every import of a module but those under ``if TYPE_CHECKING:``, ``import_module("...")`` included."""
    package = ["fastdraft", *module.split(".")] if module else ["fastdraft"]
    if module and not any(name.startswith(f"{module}.") for name in modules):
        package.pop()

    def submodule(base: str, name: str) -> str:
        full = f"{base}.{name}"
        return full if full.removeprefix("fastdraft.") in modules else base

    def walk(node: ast.AST, at_load: bool) -> Iterator[Import]:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                children: list[ast.AST] = list(node.orelse)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                children, at_load = list(ast.iter_child_nodes(node)), False
            case ast.Import():
                children = []
                yield from (Import(alias.name, node.lineno, at_load) for alias in node.names)
            case ast.ImportFrom():
                children = []
                base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
                base = ".".join(filter(None, (base, node.module)))
                yield from (Import(submodule(base, a.name), node.lineno, at_load) for a in node.names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                children = []
                yield Import(name, node.lineno, at_load)
            case _:
                children = list(ast.iter_child_nodes(node))
        for child in children:
            yield from walk(child, at_load)

    yield from walk(ast.parse(source), True)


def room_of(module: str) -> str | None:
    """The room that a module belongs to, or None where LAYERS has no place for it yet."""
    parts = module.split(".")
    if parts[0] in FOLDERS:
        return module if module in LEVELS else None
    return parts[0] if parts[0] in LEVELS else None


def check_layers(sources: Mapping[str, str]) -> list[str]:
    """What breaks the order of the rooms, one line each."""
    faults = []
    modules = frozenset(sources)
    for module, source in sources.items():
        room = room_of(module)
        if room is None:
            faults.append(f"{module}: has no place in LAYERS")
            continue
        if bad := NO_NAMES.intersection(module.split(".")):
            faults.append(f"{module}: {bad.pop()!r} says nothing of what is inside")
        for found in find_imports(module, source, modules):
            if found.target.split(".")[0] != "fastdraft":
                continue
            other = room_of(found.target.removeprefix("fastdraft").lstrip("."))
            where = f"{module}:{found.line} imports {found.target}"
            if other is None:
                faults.append(f"{where}, which has no place in LAYERS")
            elif other == room or {room, other} <= HELPERS:
                continue
            elif LEVELS[other] < LEVELS[room]:
                faults.append(f"{where}, which stands above it")
            elif LEVELS[other] == LEVELS[room] and room.split(".")[0] != other.split(".")[0]:
                faults.append(f"{where}, which stands beside it")
    return faults


def check_third_parties(sources: Mapping[str, str]) -> list[str]:
    """What imports a third party that is not its own to import, one line each."""
    faults = []
    modules = frozenset(sources)
    for module, source in sources.items():
        for found in find_imports(module, source, modules):
            name = found.target.split(".")[0]
            where = f"{module}:{found.line} imports {found.target}"
            if name == "fastdraft" or name in sys.stdlib_module_names:
                continue
            home = GUESTS.get(name)
            at_home = home is not None and f"{module}.".startswith(f"{home}.")
            stem = module.split(".")[-1]
            if not (name in CORE or at_home or (stem and name.startswith(stem))):
                faults.append(f"{where}, whose place is {home or f'a file named {name}'}")
            elif name in LAZY and found.at_load:
                faults.append(f"{where} outside a function, but it is an optional extra")
    return faults


def check_light(sources: Mapping[str, str]) -> list[str]:
    """Which torch-free rooms load torch or transformers when imported, themselves or through others."""
    modules = frozenset(sources)
    loads = {
        module: [found for found in find_imports(module, source, modules) if found.at_load]
        for module, source in sources.items()
    }

    def chain_to_heavy(module: str, seen: set[str]) -> list[str] | None:
        if module in seen or module not in loads:
            return None
        seen.add(module)
        for found in loads[module]:
            top, _, rest = found.target.partition(".")
            if top in HEAVY:
                return [module, found.target]
            if top == "fastdraft":
                parts = rest.split(".")
                for end in range(len(parts) + 1):  # importing a.b.c runs a and a.b first
                    if chain := chain_to_heavy(".".join(parts[:end]), seen):
                        return [module, *chain]
        return None

    light = [module for module in sources if room_of(module) in TORCH_FREE]
    chains = ((module, chain_to_heavy(module, set())) for module in light)
    return [f"{module or 'fastdraft'} loads {' -> '.join(chain[1:])}" for module, chain in chains if chain]


CHECKS = (check_layers, check_third_parties, check_light)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_checkout_keeps_its_walls(check):
    sources = read_sources(ROOT)
    assert "errors" in sources
    assert "integrations" in sources
    assert check(sources) == []


@pytest.mark.parametrize(
    ("check", "module", "source", "fault"),
    [
        (check_layers, "shiny", "", "no place"),
        (check_layers, "kv.shiny", "", "no place"),
        (check_layers, "models.utils", "", "says nothing"),
        (check_layers, "engine", "import fastdraft.shiny", "no place"),
        (check_layers, "engine", "from fastdraft.generator import Generator", "above"),
        (check_layers, "engine", "def f():\n    from fastdraft.generator import Generator", "above"),
        (check_layers, "engine", "from fastdraft import Generator", "above"),
        (check_layers, "engine", "from . import worker", "above"),
        (check_layers, "kv.pool", "from .cache import PagedCache", "above"),
        (check_layers, "scheduler", "from fastdraft.proposers.base import Proposer", "beside"),
        (check_layers, "results", "from fastdraft import trace", "beside"),
        (check_layers, "engine", "import importlib\nimportlib.import_module('fastdraft.worker')", "above"),
        (check_layers, "engine", "if TYPE_CHECKING:\n    pass\nelse:\n    import fastdraft.worker", "above"),
        (check_third_parties, "engine", "import numpy", "place is models.gguf"),
        (check_third_parties, "engine", "import huggingface_hub", "file named huggingface_hub"),
        (check_third_parties, "constraints.types", "import llguidance.torch", "file named llguidance"),
        (check_third_parties, "engine", "import outlines", "place is constraints"),
        (check_third_parties, "generator", "import rich.table", "place is cli"),
        (check_third_parties, "models.gguf", "import gguf", "outside a function"),
        (check_third_parties, "integrations.haystack", "import langchain_core", "file named langchain_core"),
        (check_light, "config", "import torch.nn", "torch.nn"),
        (check_light, "control.gamma", "from transformers import AutoConfig", "transformers"),
        (check_light, "testing", "from fastdraft.sampling.probs import probs", "sampling.probs -> torch"),
        (check_light, "", "from fastdraft.sampling import probs", "sampling.probs -> torch"),
    ],
)
def test_each_check_can_fail(check, module, source, fault):
    sources = {
        "worker": "",
        "trace": "",
        "kv": "",
        "kv.cache": "",
        "sampling": "",
        "sampling.probs": "import torch",
    }
    assert check(sources) == []
    faults = check(sources | {module: source})
    assert len(faults) == 1
    assert fault in faults[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine", "if TYPE_CHECKING:\n    from fastdraft.generator import Generator"),
        ("engine", "import typing\nif typing.TYPE_CHECKING:\n    import numpy"),
        ("worker", "from fastdraft.streams import Stream"),
        ("kv.table", "from fastdraft.kv.pool import BlockPool"),
        ("sampling.verify", "from .probs import probs\nimport math, torch, structlog"),
        ("generator", "from fastdraft.build import build"),
        ("testing", "def f():\n    import torch"),
        ("cli.demo", "import typer, rich.table\nfrom fastdraft import Generator"),
        ("models.gguf", "def f():\n    import gguf, numpy"),
        ("constraints.outlines", "import outlines, outlines_core"),
        ("attention.flash", "import flash_attn"),
        ("integrations.langchain", "import langchain_core\nfrom fastdraft.results import Completion"),
    ],
)
def test_the_checks_let_good_imports_pass(module, source):
    sources = {"sampling": "", "sampling.probs": "import torch", module: source}
    assert [fault for check in CHECKS for fault in check(sources)] == []

"""The documentation: Python blocks run as shown, commands exist, and what the pages list is what there is.

A block fenced as ``python notest`` or ``{.python .notest}`` is not run. The others of a page run in order, in one
namespace; pages that begin with the same block share what it made, so that the model is loaded once for most of them.
"""

from __future__ import annotations

import logging
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.main import get_command

import fastdraft
from fastdraft.cli.app import app
from fastdraft.config import CallOptions
from fastdraft.models.catalogue import CATALOGUE
from tests.test_greedy import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^`\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE_COMMAND = re.compile(r"`((?:make|fastdraft|pip|python) [^`\n]+)`")


class Block(NamedTuple):
    line: int  # of its first line of code
    language: str
    tested: bool
    code: str


def read(page: str) -> str:
    return (DOCS / page).read_text("utf-8")


def blocks(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        words = re.findall(r"\w+", match["info"])
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(line, words[0] if words else "", "notest" not in words, match["code"]))
    return found


def python_blocks(page: Path) -> list[Block]:
    return [b for b in blocks(page.read_text("utf-8")) if b.language == "python" and b.tested]


def compiled(page: Path, block: Block) -> Any:
    """The code of a block; a traceback shows the page's own line."""
    return compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)


def rows(page: str) -> dict[str, list[str]]:
    """The cells of every table row whose first cell begins with a name in backquotes, by that name."""
    cells = [[c.strip() for c in line.strip("|").split(" | ")] for line in read(page).splitlines() if line[:2] == "| "]
    return {match[1]: row for row in cells if (match := re.match(r"`([^`]+)`", row[0].strip()))}


@pytest.fixture(scope="module")
def beginnings() -> Iterator[dict[str, dict[str, Any]]]:
    """The namespaces that first blocks have made, by their code."""
    made: dict[str, dict[str, Any]] = {}
    yield made
    for namespace in made.values():
        namespace["gen"].close(drain=False)


@pytest.fixture
def library_logger() -> Iterator[None]:
    """Puts back what a page about logging does to our logger."""
    logger = logging.getLogger("fastdraft")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


RUNNABLE = [page for page in PAGES if python_blocks(page)]
FIRSTS = [python_blocks(page)[0].code for page in RUNNABLE]


@pytest.mark.usefixtures("library_logger", "smollm2_path")
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_blocks_run(page: Path, beginnings: dict[str, dict[str, Any]]) -> None:
    first, *others = python_blocks(page)
    namespace = dict(beginnings.get(first.code, {"__name__": "__main__"}))
    if first.code not in beginnings:
        exec(compiled(page, first), namespace)
    if FIRSTS.count(first.code) > 1:
        beginnings[first.code] = dict(namespace)
    for block in others:
        exec(compiled(page, block), namespace)
    generator = namespace.get("gen")
    if generator is not None and generator.status != "ready":  # the page closed it
        beginnings.pop(first.code, None)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    lines = [
        line for block in blocks(text) if block.language in {"sh", "bash", "console"} for line in block.code.split("\n")
    ]
    lines += INLINE_COMMAND.findall(FENCE.sub("", text))
    for line in lines:
        words = shlex.split(line, comments=True)
        if words and words[0] != ".":  # the shell's own
            check_command(words)


def check_command(words: list[str]) -> None:
    match words:
        case ["make", *rest]:
            makefile = (ROOT / "Makefile").read_text("utf-8")
            for word in rest:
                name, assigned, _ = word.partition("=")
                assert re.search(rf"^{name} \?=" if assigned else rf"^{name}:|#   {name}=", makefile, re.MULTILINE), (
                    word
                )
        case ["fastdraft", *rest]:
            check_fastdraft(rest)
        case ["pip", "install", *rest]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
            for name in re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*?)\]", " ".join(rest)))):
                assert name in extras, name
        case ["python", "-m", module, *_]:
            ours = ROOT.joinpath(*module.split("."))
            assert module == "venv" or ours.is_dir() or ours.with_suffix(".py").is_file(), module
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), script
        case _:
            raise AssertionError(f"a command of a kind this test does not know: {words}")


def check_fastdraft(arguments: list[str]) -> None:
    """Parses a call of the command line without running it."""
    group: Any = get_command(app)
    if arguments[0].startswith("-"):
        assert arguments[0] == "--help" or any(arguments[0] in p.opts for p in group.params), arguments
    else:
        command = group.commands[arguments[0]]
        if len(arguments) > 1 or command.name != "generate":  # in a sentence the command may stand alone
            command.make_context(command.name, arguments[1:]).close()


def test_every_public_name_has_its_place_in_the_reference() -> None:
    text = "".join(page.read_text("utf-8") for page in (DOCS / "reference").glob("*.md"))
    placed = set(re.findall(r"^::: fastdraft\.(\w+)$", text, re.MULTILINE))
    assert placed == {*fastdraft.__all__} - {"Prompt"}
    listed = set(re.findall(r"`(\w+)`", read("reference/index.md")))
    errors = {name for name in fastdraft.__all__ if name.endswith("Error")}
    assert {*fastdraft.__all__} - errors <= listed


def test_every_parameter_is_listed_with_its_default() -> None:
    listed = rows("reference/sampling-params.md")
    for name, field in fastdraft.SamplingParams.model_fields.items():
        default = field.get_default(call_default_factory=True)
        expected = f'"{default}"' if isinstance(default, str) else repr(default)
        assert listed[name][1] == f"`{expected}`", name
    assert {*CallOptions.__annotations__, "output_type", "a", "the"} >= {*listed}


def test_every_error_is_explained() -> None:
    for page in ("how-to/errors.md", "reference/errors.md"):
        for name in fastdraft.__all__:
            assert not name.endswith("Error") or name in read(page), (page, name)


def test_every_event_is_listed() -> None:
    logged = set()
    for path in (ROOT / "fastdraft").rglob("*.py"):
        for event, fields in re.findall(r'_log\.\w+\(\s*"(\w+)"([^\n]*)', path.read_text("utf-8")):
            logged.add(event)
            for name in re.findall(r"(\w+)=", fields):
                assert f"`{name}`" in rows("how-to/log.md")[event][2], (event, name)
    assert logged == {*rows("how-to/log.md")}


def test_every_command_line_option_is_listed() -> None:
    listed = read("reference/cli.md")
    group: Any = get_command(app)
    for name, command in group.commands.items():
        assert f"\n## {name}\n" in listed
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                assert not option.startswith("--") or option == "--help" or f"`{option}`" in listed, (name, option)


def test_every_architecture_and_model_is_listed() -> None:
    for architecture in ARCHITECTURES:
        assert f"`{architecture}`" in read("reference/support.md"), architecture
    assert {*CATALOGUE} == {*rows("reference/store.md")}


def test_every_module_has_its_words_in_structure() -> None:
    text = read("explanation/structure.md")
    for path in (ROOT / "fastdraft").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT / "fastdraft").with_suffix("").parts)
        if not name.startswith("integrations") and path.name != "__init__.py":
            assert f"`{name}`" in text, name


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text("utf-8")):
        assert target.startswith("https://") or (ROOT / target).exists(), target

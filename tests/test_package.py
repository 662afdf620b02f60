"""What is installed: the public names, a light import, and a wheel that carries the integrations."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import fastdraft

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def run_python(code: str, *arguments: str | Path, cwd: Path) -> str:
    """Runs code in a process of its own that sees neither the working folder nor PYTHONPATH."""
    command = [sys.executable, "-I", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_all_is_sorted_and_names_what_type_checkers_see():
    tree = ast.parse(Path(fastdraft.__file__).read_text("utf-8"))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("fastdraft"))
        for alias in node.names
    }
    public = {name for name in imported if not name.startswith("_")}
    assert fastdraft.__all__ == sorted(fastdraft.__all__)
    assert {name for name in fastdraft.__all__ if name != "__version__"} == public


def test_every_public_name_is_there_and_shown_by_dir():
    for name in fastdraft.__all__:
        assert getattr(fastdraft, name) is not None
    assert set(fastdraft.__all__) <= set(dir(fastdraft))
    assert not hasattr(fastdraft, "Genrator")


def test_import_is_light_and_touches_nothing_global(tmp_path):
    code = """
import logging, sys, warnings
filters, handlers, level = list(warnings.filters), list(logging.root.handlers), logging.root.level
sys.path.insert(0, sys.argv[1])
import fastdraft
assert (warnings.filters, logging.root.handlers, logging.root.level) == (filters, handlers, level)
heavy = ("torch", "transformers", "tokenizers", "outlines", "llguidance", "numpy", "typer")
print([name for name in heavy if name in sys.modules])
"""
    assert run_python(code, ROOT, cwd=tmp_path) == "[]"


def test_one_version_everywhere():
    heading = re.search(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert heading
    assert heading[1] == PROJECT["version"]
    assert fastdraft.__version__ == PROJECT["version"]


def test_a_wheel_made_from_the_sdist_brings_the_package_and_its_integrations(tmp_path):
    checkout, dist, target = tmp_path / "checkout", tmp_path / "dist", tmp_path / "target"
    checkout.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, checkout)
    for name in ("fastdraft", "integrations"):
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=no_caches)
    build = "import sys; from setuptools import build_meta as b; getattr(b, f'build_{sys.argv[1]}')(sys.argv[2])"

    run_python(build, "sdist", dist, cwd=checkout)
    shutil.unpack_archive(next(dist.glob("*.tar.gz")), tmp_path / "unpacked", filter="data")
    run_python(build, "wheel", dist, cwd=next((tmp_path / "unpacked").iterdir()))
    wheel = next(dist.glob("*.whl"))

    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    core = {path.relative_to(ROOT) for path in (ROOT / "fastdraft").rglob("*.py")}
    adapters = {Path("fastdraft") / path.relative_to(ROOT) for path in (ROOT / "integrations").rglob("*.py")}
    assert packed == {path.as_posix() for path in core | adapters} | {"fastdraft/py.typed"}

    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, target, wheel], check=True, timeout=120)
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import fastdraft.integrations
print(fastdraft.__version__, fastdraft.__file__, fastdraft.integrations.__file__, sep="\\n")
"""
    version, *files = run_python(code, target, cwd=tmp_path).splitlines()
    assert version == PROJECT["version"]
    assert all(Path(file).is_relative_to(target) for file in files)

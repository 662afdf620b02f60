"""Tools that a model may call: how a prompt tells of them, the grammar of a call, and the calls of a finished text.

Two forms are written. Where the chat template speaks of ``<tool_call>`` (Qwen, Hermes), calls stand between
``<tool_call>`` and ``</tool_call>``, after any text and as many as the model likes; elsewhere a call is the whole
answer, one JSON object.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter

from fastdraft.constraints.jsonschema import Validation
from fastdraft.constraints.pydantic import schema_of
from fastdraft.constraints.schema import Normalised, normalise, plain_json
from fastdraft.constraints.types import Spec, as_constrained, spec_of
from fastdraft.errors import ConfigError, InvalidConstraintError
from fastdraft.results import ToolCall

__all__ = ["Tool", "asked_spec", "describe_tools", "is_wrapped", "read_tools"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FORMS = "Pass {'name': ..., 'description': ..., 'parameters': <JSON schema>}, the same as OpenAI wraps it, or a model."
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALLS = re.compile(f"{_OPEN}\n(.*)\n{_CLOSE}")  # JSON holds no bare newline, so a line is a call
# As json.dumps writes by itself, which is what models were shown.
_SPACED = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_EMPTY = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool, checked.

    Attributes:
        name: What calls name.
        description: What it does; may be empty.
        parameters: JSON schema of its arguments, as it was given.
        plain: The same for a grammar.
        parse: The typed arguments of a JSON value; raises ValueError where it is not valid.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    plain: Normalised
    parse: Callable[[Any], Any]

    def for_template(self) -> dict[str, Any]:
        """As chat templates read tools."""
        told = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": told}


def read_tools(given: Any) -> tuple[Tool, ...]:
    """What a user passed as ``tools``.

    Raises:
        ConfigError: It is no list of tools; names the index.
        InvalidConstraintError: Parameters that cannot be enforced; names the tool.
    """
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise ConfigError(f"tools is a {type(given).__name__}, expected a list of tools.", hint=_FORMS)
    tools = tuple(_read_tool(item, f"tools[{index}]") for index, item in enumerate(given))
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two tools are named {twice[0]!r}.", hint="Give each a name of its own.")
    return tools


def _read_tool(given: Any, where: str) -> Tool:
    if isinstance(given, type) and issubclass(given, BaseModel):
        adapter: TypeAdapter[Any] = TypeAdapter(given)
        schema = schema_of(adapter, omit_defaults=True)
        return _make(given.__name__, given.__doc__ or "", schema, adapter.validate_python)
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is a {type(given).__name__}, expected a tool.", hint=_FORMS)
    function = given["function"] if given.get("type") == "function" and "function" in given else given
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{where} has no name.", hint=_FORMS)
    parameters = function.get("parameters") or _EMPTY
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"the parameters of {where} are a {type(parameters).__name__}, expected a JSON schema.")
    return _make(function["name"], str(function.get("description") or ""), parameters, None)


def _make(name: str, description: str, schema: Mapping[str, Any], parse: Callable[[Any], Any] | None) -> Tool:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a tool is named {name!r}, expected 1 to 64 letters, digits, '_', '-' or '.'.")
    parameters = plain_json(schema)
    try:
        plain = normalise({"type": "object", **parameters})
    except InvalidConstraintError as error:
        raise InvalidConstraintError(f"the parameters of tool {name!r}: {error}", hint=error.hint) from error
    validation = Validation(parameters)

    def typed(arguments: Any) -> Any:
        if parse is None or plain.checks:
            validation.check(arguments)
        return arguments if parse is None else parse(arguments)

    return Tool(name, " ".join(description.split()), parameters, plain, typed)


def _read_choice(given: Any, tools: Sequence[Tool]) -> str:
    """``"none"``, ``"auto"``, ``"required"`` or the name of a tool.

    Raises:
        ConfigError: Something else.
    """
    choice = given
    if isinstance(given, Mapping):  # as OpenAI names one: {"type": "function", "function": {"name": ...}}
        choice = given.get("function", given)
        choice = choice.get("name") if isinstance(choice, Mapping) else None
    known = ["none", "auto", "required", *(tool.name for tool in tools)]
    if choice not in known:
        raise ConfigError(f"tool_choice is {given!r}, expected one of {', '.join(map(repr, known))}.")
    return str(choice)


def asked_spec(output_type: Any, tools: Sequence[Tool], choice: Any, *, wrapped: bool) -> Spec | None:
    """What a call's output must be; None where anything goes.

    Args:
        output_type: As the user passed it.
        tools: Of `read_tools`.
        choice: As the user passed it as ``tool_choice``.
        wrapped: Of `is_wrapped`.

    Raises:
        ConfigError: A choice that is none, or a choice without tools.
        InvalidConstraintError: Of `spec_of`; or an output type beside tools.
    """
    if not tools:
        if choice not in ("auto", "none"):
            raise ConfigError(f"tool_choice is {choice!r}, but there are no tools.", hint="Pass tools=[...].")
        return None if output_type is None else spec_of(as_constrained(output_type))
    chosen = _read_choice(choice, tools)
    if output_type is None:
        return _tool_spec(tools, chosen, wrapped=wrapped)
    raise InvalidConstraintError(
        "tools and output_type were given together, and an output is one or the other.",
        hint="Make the type a tool, and pass tool_choice with its name.",
    )


def is_wrapped(template: str | None) -> bool:
    """Whether a chat template asks for calls between ``<tool_call>`` and ``</tool_call>``, as JSON."""
    return template is not None and _OPEN in template and "<function=" not in template


def describe_tools(tools: Sequence[Tool]) -> str:
    """Words for a model whose chat template knows no tools."""
    lines = [json.dumps(tool.for_template()["function"]) for tool in tools]
    return "\n".join(
        [
            "You can call these tools:",
            *lines,
            'To call one, answer with nothing but {"name": "<its name>", "arguments": <an object of its parameters>}.',
        ]
    )


def _tool_spec(tools: Sequence[Tool], choice: str, *, wrapped: bool) -> Spec | None:
    """What a call with tools writes; None where anything goes.

    Args:
        tools: At least one.
        choice: Of `_read_choice`.
        wrapped: Of `is_wrapped`.
    """
    if choice == "none":  # the prompt tells of no tools then; the words that open a call are kept out all the same
        return (
            Spec("lark", f"start: TEXT\n{_TEXT}", lambda text: (), "an answer in words", calls=True)
            if wrapped
            else None
        )
    chosen = [tool for tool in tools if choice in ("auto", "required", tool.name)]
    read = _wrapped_calls(chosen) if wrapped else _single_call(chosen)

    def at_least_one(text: str) -> tuple[ToolCall, ...]:
        if not (calls := read(text)):
            raise ValueError("there is no tool call")
        return calls

    return Spec(
        "lark",
        _grammar(chosen, wrapped=wrapped, free=choice == "auto"),
        read if choice == "auto" else at_least_one,
        "a tool call",
        tuple(sorted({check for tool in chosen for check in tool.plain.checks})),
        calls=True,
    )


_TEXT = f"TEXT: /(?s:.*)/ & ~/(?s:.*){_OPEN}(?s:.*)/"
_WORDS = r"TEXT: /([^{](?s:.*))?/"


def _grammar(tools: Sequence[Tool], *, wrapped: bool, free: bool) -> str:
    call = f"call: %json {json.dumps(_SPACED | _any_call(tools))}"
    if not wrapped:
        return "\n".join(["start: TEXT | call", _WORDS, call] if free else ["start: call", call])
    rest = rf'"\n" call "\n{_CLOSE}" ("\n{_OPEN}\n" call "\n{_CLOSE}")*'
    if not free:
        return f'start: "{_OPEN}" {rest}\n{call}'
    return "\n".join([f"start: TEXT | before {rest}", f'before[suffix="{_OPEN}"]: /(?s:.*)/', _TEXT, call])


def _any_call(tools: Sequence[Tool]) -> dict[str, Any]:
    """A call of one of the tools, as a plain schema."""
    calls, definitions = [], {}
    for index, tool in enumerate(tools):
        arguments, prefix = dict(tool.plain.schema), f"{index}_"
        for name, body in arguments.pop("$defs", {}).items():
            definitions[prefix + name] = _renamed(body, prefix)
        properties = {"name": {"const": tool.name}, "arguments": _renamed(arguments, prefix)}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls} | ({"$defs": definitions} if definitions else {})


def _renamed(schema: Any, prefix: str) -> Any:
    """A plain schema whose references name definitions with a prefix."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref":
            made[key] = f"#/$defs/{prefix}{value.removeprefix('#/$defs/')}"
        elif key in ("properties", "patternProperties"):
            made[key] = {name: _renamed(item, prefix) for name, item in value.items()}
        elif key in ("anyOf", "allOf", "prefixItems"):
            made[key] = [_renamed(item, prefix) for item in value]
        elif key in ("items", "additionalProperties"):
            made[key] = _renamed(value, prefix)
        else:
            made[key] = value
    return made


def _wrapped_calls(tools: Sequence[Tool]) -> Callable[[str], tuple[ToolCall, ...]]:
    def parse(text: str) -> tuple[ToolCall, ...]:
        _, opened, rest = text.partition(_OPEN)
        found = _CALLS.findall(opened + rest)
        if opened + rest != "\n".join(f"{_OPEN}\n{call}\n{_CLOSE}" for call in found):
            raise ValueError("a tool call is not whole")
        return tuple(_call(call, tools) for call in found)

    return parse


def _single_call(tools: Sequence[Tool]) -> Callable[[str], tuple[ToolCall, ...]]:
    return lambda text: (_call(text, tools),) if text.startswith("{") else ()


def _call(text: str, tools: Sequence[Tool]) -> ToolCall:
    made = json.loads(text)
    if not isinstance(made, dict) or not {"name", "arguments"} <= made.keys():
        raise ValueError("a tool call has a name and arguments")
    name, arguments = made["name"], made["arguments"]
    for tool in tools:
        if tool.name == name:
            return ToolCall(f"call_{secrets.token_hex(6)}", name, arguments, tool.parse(arguments))
    raise ValueError(f"no tool is named {name!r}")

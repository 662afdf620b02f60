"""What users pass as ``output_type``: Python types, schemas, patterns, grammars and choices, made one kind of thing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import EnumMeta
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import TypeAdapter

from fastdraft.constrained import Constrained, Json
from fastdraft.constraints.jsonschema import Validation
from fastdraft.constraints.partial import partial
from fastdraft.constraints.patterns import find_flaw, whole
from fastdraft.constraints.pydantic import schema_of
from fastdraft.constraints.schema import normalise, plain_json
from fastdraft.errors import ConfigError, InvalidConstraintError

__all__ = ["Spec", "as_constrained", "one_each", "spec_of"]

_TYPE_MAKERS = ("types", "typing", "typing_extensions")  # whose objects are types without being classes
_ACCEPTED = (
    "Pass a type that pydantic reads (a model, dataclass, TypedDict, Enum, Literal, Union, list, int, ...), a JSON "
    "schema as a dict, a list of strings, Json(), or a Regex, CFG, JsonSchema or Choice from outlines.types."
)


@dataclass(frozen=True, slots=True)
class Spec:
    """What a grammar engine compiles for an output type, and how its text is read.

    Attributes:
        kind: What ``source`` is.
        source: A plain JSON schema, a regular expression for the whole text, a Lark grammar, a tuple of texts, or what
            an outlines logits processor was compiled to: a grammar of llguidance's, an index of outlines_core's.
        parse: The Python value of a finished text; raises ValueError where it is not valid.
        label: For errors and logs; nothing of the user's data.
        checks: Keywords of a schema that the grammar leaves to ``parse``.
        whitespace: Whether JSON may have whitespace between its parts.
        after: What ends the free text before it; None where there is none.
        retries: Further tries where a finished text is not valid.
        closes: Whether it is steered to its end where tokens run out.
        calls: Whether its values are tool calls.
        backend: As in `Constrained`.
    """

    kind: Literal["json", "regex", "lark", "choice", "llguidance", "index"]
    source: Any
    parse: Callable[[str], Any]
    label: str
    checks: tuple[str, ...] = ()
    whitespace: bool = False
    after: str | None = None
    retries: int = 0
    closes: bool = False
    calls: bool = False
    backend: str = "auto"

    @property
    def is_opaque(self) -> bool:
        """Whether only the grammar knows where its texts may end; ``parse`` takes any."""
        return self.kind in ("lark", "llguidance", "index") and not self.calls

    def read(self, text: str) -> Any:
        """The value of a whole output; ValueError where it has none."""
        body = self._body(text)
        if body is None:
            raise ValueError(f"the output never says {self.after!r}, after which it would begin")
        return self.parse(body)

    def partial(self, text: str) -> Any | None:
        """What can be read of an output so far: of JSON the value as far as it goes, else the text itself."""
        body = None if self.calls else self._body(text)
        if body is None:
            return None
        return partial(body) if self.kind == "json" else body

    def _body(self, text: str) -> str | None:
        if self.after is None:
            return text
        _, found, body = text.partition(self.after)
        if not found:
            return None
        return body.lstrip(" \n") if self.kind == "json" else body


def as_constrained(output_type: Any) -> Constrained:
    """What a user passed as ``output_type``, with the default options where it has none."""
    return output_type if isinstance(output_type, Constrained) else Constrained(output_type)


def one_each(output_type: Any, count: int) -> list[Any]:
    """The output type of each of several prompts: one for all, or a list with one each; strings alone are a choice.

    Raises:
        ConfigError: Another number of types than of prompts.
    """
    if not isinstance(output_type, list | tuple) or all(isinstance(item, str) for item in output_type):
        return [output_type] * count
    if len(output_type) != count:
        raise ConfigError(
            f"{len(output_type)} output types for {count} prompts; pass one for all, or one a prompt.",
            hint="A choice is a list of strings.",
        )
    return list(output_type)


def spec_of(constrained: Constrained) -> Spec:
    """Reads an output type and its options.

    Raises:
        InvalidConstraintError: As `_read_type`; or options that do not go with the type.
    """
    spec = _read_type(constrained)
    options: tuple[str, ...] = ("max_string", "max_items", "whitespace", "omit_defaults") if spec.kind != "json" else ()
    if isinstance(constrained.type, Mapping | Json):
        options = ("omit_defaults",)
    for name in options:
        if getattr(constrained, name):
            kind = "Python types" if name == "omit_defaults" else "JSON"
            raise InvalidConstraintError(
                f"{name} goes with {kind}; here is {spec.label}.", hint="Leave it out, or bound the type itself."
            )
    if constrained.after is not None and spec.is_opaque:
        raise InvalidConstraintError(
            "after goes with types, schemas, patterns and choices; here a grammar was given.",
            hint="Write what comes first into the grammar.",
        )
    if constrained.finish == "close" and (spec.kind != "json" or constrained.after is not None):
        raise InvalidConstraintError(
            "finish='close' goes with JSON from the first token on; here is something else.",
            hint="Leave finish out, and allow more max_tokens.",
        )
    is_simple = spec.kind in ("regex", "choice", "index") and constrained.after is None
    if constrained.backend == "outlines_core" and not is_simple:
        raise InvalidConstraintError(
            "backend='outlines_core' writes regular expressions and choices from the first token on; here is something "
            "else.",
            hint="Leave backend out.",
        )
    if constrained.backend == "xgrammar" and (
        spec.kind not in ("json", "regex", "choice") or constrained.after is not None
    ):
        raise InvalidConstraintError(
            "backend='xgrammar' writes JSON, patterns and choices from the first token on; here is something else.",
            hint="Leave backend out.",
        )
    return replace(
        spec,
        after=constrained.after,
        retries=constrained.retries,
        closes=constrained.finish == "close",
        backend=constrained.backend,
    )


def _read_type(constrained: Constrained) -> Spec:
    """Reads an output type.

    A `Literal` or `Enum` of strings is a choice of raw texts, as a list of strings is; every other type is JSON.

    Raises:
        InvalidConstraintError: It is none, or it cannot be enforced; says what is wrong, where and what to do.
    """
    given = constrained.type
    if isinstance(given, Json):
        plain = normalise({}, max_string=constrained.max_string, max_items=constrained.max_items)
        return Spec("json", plain.schema, _read_json, "JSON", whitespace=constrained.whitespace)
    if isinstance(given, Mapping):
        return _of_schema(given, constrained)
    if isinstance(given, list | tuple):
        return _of_choice(given)
    if type(given).__module__.partition(".")[0] == "outlines":
        return _of_outlines(given, constrained)
    if isinstance(given, EnumMeta) or get_origin(given) is Literal:
        options: Sequence[Any] = get_args(given) or [*given.__members__.values()]
        texts = [getattr(option, "value", option) for option in options]
        if all(isinstance(text, str) for text in texts):
            return _of_texts(dict(zip(texts, options, strict=True)), getattr(given, "__name__", "Literal"))
    return _of_type(given, constrained)


def _of_type(given: Any, constrained: Constrained) -> Spec:
    if not (given is None or isinstance(given, type) or type(given).__module__ in _TYPE_MAKERS):
        _refuse(given)
    label = f"{getattr(given, '__name__', None) or given!s:.60}"
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(given)
        adapter.rebuild(raise_errors=True)  # a name that nothing defines is only found now
        schema = schema_of(adapter, omit_defaults=constrained.omit_defaults)
    except Exception as error:  # pydantic's own, or what the user's type raises when it is asked for its schema
        _refuse(given, error)
    plain = normalise(schema, max_string=constrained.max_string, max_items=constrained.max_items)
    parse: Callable[[str], Any] = adapter.validate_json
    if plain.checks:  # what the type does not know of its own schema
        validation = Validation(plain_json(schema))

        def parse(text: str) -> Any:
            validation.check(_read_json(text))
            return adapter.validate_json(text)

    return Spec("json", plain.schema, parse, label, plain.checks, constrained.whitespace)


def _of_schema(schema: Mapping[str, Any], constrained: Constrained) -> Spec:
    plain = normalise(schema, max_string=constrained.max_string, max_items=constrained.max_items)
    validation = Validation(plain_json(schema))
    return Spec(
        "json",
        plain.schema,
        lambda text: validation.check(_read_json(text)),
        "the JSON schema",
        plain.checks,
        constrained.whitespace,
    )


def _of_outlines(term: Any, constrained: Constrained) -> Spec:
    from outlines.types import dsl

    if not isinstance(term, dsl.Term):
        return _of_processor(term)
    match term:
        case dsl.JsonSchema():
            if term.whitespace_pattern is not None:
                raise InvalidConstraintError(
                    "the JsonSchema has a whitespace_pattern, which is not followed.",
                    hint="Use Constrained(schema, whitespace=True).",
                )
            return _of_schema(json.loads(term.schema), constrained)
        case dsl.CFG():
            return Spec("lark", term.definition, str, "the grammar")
        case dsl.Regex():
            return _of_regex(term.pattern)
        case dsl.String():
            return _of_choice([term.value])
        case dsl.Choice() if all(isinstance(item, str) for item in term.items):
            return _of_choice(term.items)
        case dsl.Alternatives() if all(isinstance(part, dsl.String) for part in term.terms):
            return _of_choice([getattr(part, "value", "") for part in term.terms])
        case dsl.Term() if _holds_schema(term):
            raise InvalidConstraintError(
                "a JSON schema is a part of an outlines expression, which would be followed only in part.",
                hint="Pass the type or schema by itself, or a Union of types.",
            )
        case dsl.Term():
            try:
                return _of_regex(dsl.to_regex(term))
            except (TypeError, NotImplementedError) as error:
                _refuse(term, error)
    _refuse(term)


def _holds_schema(term: Any) -> bool:
    """Whether a JSON schema is somewhere in an expression."""
    from outlines.types import dsl

    if isinstance(term, dsl.JsonSchema):
        return True
    inner = vars(term).values() if isinstance(term, dsl.Term) else term if isinstance(term, list | tuple) else ()
    return any(map(_holds_schema, inner))


def _of_processor(processor: Any) -> Spec:
    """An outlines logits processor, lifted to what it was compiled to."""
    label = "the logits processor's grammar"
    if (index := getattr(processor, "index", None)) is not None:
        return Spec("index", index, str, label)
    if isinstance(grammar := getattr(processor, "grammar", None), str):
        return Spec("llguidance", grammar, str, label)
    raise InvalidConstraintError(
        f"a {type(processor).__name__} cannot be lifted to a grammar that drafts can be masked with.",
        hint="Build it with backend='llguidance' or 'outlines_core', or pass the type itself.",
    )


def _of_regex(pattern: str) -> Spec:
    if flaw := find_flaw(pattern):
        raise InvalidConstraintError(
            f"the regular expression {pattern!r} cannot be enforced: {flaw.what} at position {flaw.position}.",
            hint="Write it without: what may follow and what came before is not known while a text is written.",
        )
    matches = re.compile(whole(pattern)).fullmatch

    def parse(text: str) -> str:
        if matches(text) is None:
            raise ValueError("the text does not match the regular expression")
        return text

    return Spec("regex", whole(pattern), parse, "the regular expression")


def _of_choice(choices: Sequence[Any]) -> Spec:
    for index, choice in enumerate(choices):
        if not isinstance(choice, str):
            raise InvalidConstraintError(
                f"choice {index} is a {type(choice).__name__}, expected a string.",
                hint="For other values pass a Literal or an Enum; they are written as JSON.",
            )
    return _of_texts({choice: choice for choice in choices}, f"a choice of {len(choices)}")


def _of_texts(members: Mapping[str, Any], label: str) -> Spec:
    if not members:
        raise InvalidConstraintError(f"{label} is empty, so there is nothing to choose.", hint="Give it a member.")

    def parse(text: str) -> Any:
        if text not in members:
            raise ValueError(f"the text is none of the {len(members)} choices")
        return members[text]

    return Spec("choice", tuple(members), parse, label)


def _read_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse(given: Any, error: Exception | None = None) -> NoReturn:
    is_type = isinstance(given, type) or type(given).__module__ in _TYPE_MAKERS
    shown = f"{given!r:.100}" if is_type else f"an instance of {type(given).__name__}"
    reason = f" ({str(error).splitlines()[0]})" if error and str(error) else ""
    raise InvalidConstraintError(
        f"output_type is {shown}, which cannot be read from text{reason}.", hint=_ACCEPTED
    ) from error

"""How a call's output is constrained, where the output type alone does not say it. Torch-free."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = ["Constrained", "Json"]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Json(_Spec):
    """An output type: any JSON value."""


class Constrained(_Spec):
    """An output type with the options of its grammar; an output type by itself has the defaults.

    Attributes:
        type: What ``output_type`` takes: a type, a JSON schema, a list of strings, `Json`, or an outlines term.
        after: The grammar begins after this text, such as ``"</think>"``; what comes before is free.
        whitespace: Allow whitespace between the parts of JSON; without, it is compact and cannot run away.
        max_string: Characters of strings that set no limit themselves.
        max_items: Items of arrays that set no limit themselves.
        retries: Further tries where the finished text is not valid, for what no grammar can enforce.
        omit_defaults: Fields that have a default may be left out. Without, all fields are written.
        finish: ``"close"`` steers to the shortest valid end when ``max_tokens`` comes near; ``"error"`` raises there.
        backend: The grammar engine; ``"auto"`` is llguidance. ``"outlines_core"`` writes regular expressions and
            choices of strings. ``"xgrammar"``, an extra, writes these and JSON, and refuses schemas of which it would
            follow a part only.
    """

    type: Any
    after: str | None = None
    whitespace: bool = False
    max_string: int | None = Field(default=None, ge=1)
    max_items: int | None = Field(default=None, ge=1)
    retries: int = Field(default=0, ge=0)
    omit_defaults: bool = False
    finish: Literal["error", "close"] = "error"
    backend: Literal["auto", "llguidance", "outlines_core", "xgrammar"] = "auto"

    def __init__(self, type: Any, **fields: Any) -> None:  # the type is the one positional field
        super().__init__(**{"type": type, **fields})

    @field_validator("type")
    @classmethod
    def _not_nested(cls, value: Any) -> Any:
        if isinstance(value, Constrained):
            raise ValueError("a Constrained is inside another one; give its options to the outer one")
        return value

    @field_validator("after")
    @classmethod
    def _some_text(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("after is empty (''); leave it out to begin with the grammar")
        return value

    @field_validator("max_string", "max_items", "retries", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(f"got {value}, expected a number")
        return value

"""What a user may set: sampling parameters, models, draft sources, the generator itself. Torch-free."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from fastdraft.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "CallOptions",
    "DraftModel",
    "DynamicAlpha",
    "GeneratorConfig",
    "Model",
    "ModelLike",
    "NGram",
    "Prompt",
    "SamplingOverrides",
    "SamplingParams",
    "Source",
    "first_problem",
    "make_config",
    "parse_bytes",
]

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int]

MAX_STOP_STRINGS = 16


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())


class DynamicAlpha(_Spec):
    """Leniency that follows load and acceptance: each call's own alpha, chosen anew before each round.

    A utilisation above 60 % lowers it by 0.05 for each 5 points; a recent acceptance under 65 % raises it by 0.03 for
    each 5 points. Outputs are lossy: `Completion.lossless` is False, and `Stats.distortion` says by how much.

    Attributes:
        base: Where it starts.
        low: Its least value.
        high: Its largest value.
        utilisation: Called before each round on the generator's thread; returns how loaded the machine is, 0 to 1. None
            is the GPU's own figure where there is one, else the generator's: the share of time it is busy, times the
            share of its ``max_batch`` places that are wanted.
    """

    base: float = Field(default=0.5, gt=0, le=1)
    low: float = Field(default=0.3, gt=0, le=1)
    high: float = Field(default=0.8, gt=0, le=1)
    utilisation: SkipJsonSchema[Callable[[], float]] | None = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _ordered(self) -> DynamicAlpha:
        if not self.low <= self.base <= self.high:
            raise ValueError(f"low={self.low}, base={self.base}, high={self.high}, expected low <= base <= high")
        return self


def _kind_of_alpha(value: Any) -> str:
    return "dynamic" if isinstance(value, DynamicAlpha | Mapping) else "number"


# Told apart by hand, so that a complaint is about one of the two only.
Alpha: TypeAlias = Annotated[
    Annotated[float, Field(gt=0, le=1), Tag("number")] | Annotated[DynamicAlpha, Tag("dynamic")],
    Discriminator(_kind_of_alpha),
]


class SamplingParams(_Spec):
    """How tokens are drawn and when a call stops. Frozen; unknown fields are refused.

    ``temperature``, ``top_k``, ``top_p``, ``min_p`` and ``repetition_penalty`` left at None come from the model's
    ``generation_config``; ``top_k=0``, ``top_p=1``, ``repetition_penalty=1`` undo what it says.
    """

    max_tokens: int = Field(default=256, ge=1, description="New tokens at most.")
    min_tokens: int = Field(
        default=0, ge=0, description="No end-of-sequence, stop token or stop string before this many."
    )
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False, description="0 is greedy.")
    top_k: int | None = Field(default=None, ge=0, description="Keep the k likeliest tokens; 0 is off.")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="Keep the smallest set of this probability; 1 is off."
    )
    min_p: float | None = Field(default=None, ge=0, le=1, description="Drop tokens under this share of the likeliest.")
    repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Divides the logits of tokens in prompt and output; 1 is off.",
    )
    presence_penalty: float = Field(
        default=0.0, allow_inf_nan=False, description="Subtracted once for a generated token."
    )
    frequency_penalty: float = Field(
        default=0.0, allow_inf_nan=False, description="Subtracted for each time generated."
    )
    logit_bias: Mapping[int, float] = Field(default_factory=dict, description="Added to the logits of token ids.")
    seed: int | None = Field(default=None, ge=0, lt=2**64, description="Repeats a sampled call.")
    stop: tuple[str, ...] = Field(default=(), description="Strings that end the call; cut out of the text.")
    stop_token_ids: tuple[int, ...] = Field(
        default=(), description="Token ids that end the call, beside end-of-sequence."
    )
    ignore_eos: bool = Field(default=False, description="Go on after end-of-sequence tokens.")
    logprobs: int | None = Field(default=None, ge=0, le=1024, description="Top-n log-probabilities of the target.")
    alpha: Alpha = Field(default=1.0, description="Acceptance leniency; 1 is lossless.")
    acceptance_rule: Literal["lenience", "threshold"] = "lenience"
    gamma: int | Literal["auto"] = Field(default="auto", description="Drafted tokens a round; 0 is no drafting.")
    source: str | None = Field(
        default=None,
        description="Draft only from the source of this name; 'forced': only what a grammar leaves no choice.",
    )
    verification: Literal["auto", "rejection", "invariant"] = "auto"

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name != "ignore_eos":
            raise ValueError(f"{info.field_name} is {value}, expected something else than a truth value")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _usable_stops(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > MAX_STOP_STRINGS:
            raise ValueError(f"{len(value)} stop strings given, at most {MAX_STOP_STRINGS} are allowed")
        if "" in value:
            raise ValueError("a stop string is empty (''); it would match everywhere, leave it out")
        return value

    @field_validator("gamma")
    @classmethod
    def _gamma_not_negative(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError(f"gamma is {value}, expected 'auto' or an integer >= 0")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _finite_bias(cls, value: Mapping[int, float]) -> Mapping[int, float]:
        for token, bias in value.items():
            if math.isnan(bias) or bias == math.inf:
                raise ValueError(f"logit_bias of token {token} is {bias}, expected a number or -inf")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}")
        if self.verification == "invariant" and not self.exact:
            raise ValueError(
                f"verification='invariant' keeps the target's own samples, so it needs alpha=1 and "
                f"acceptance_rule='lenience'; got alpha={self.alpha}, acceptance_rule={self.acceptance_rule!r}"
            )
        return self

    @property
    def exact(self) -> bool:
        """Whether acceptance keeps the target's distribution."""
        return self.alpha == 1.0 and self.acceptance_rule == "lenience"

    @property
    def invariant(self) -> bool:
        """Whether the sampled tokens do not depend on the draft: ``invariant``, or ``auto`` with a seed at alpha 1."""
        if self.verification == "auto":
            return self.seed is not None and self.exact
        return self.verification == "invariant"


class SamplingOverrides(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords of one call."""

    max_tokens: int
    min_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    alpha: float | DynamicAlpha
    acceptance_rule: Literal["lenience", "threshold"]
    gamma: int | Literal["auto"]
    source: str | None
    verification: Literal["auto", "rejection", "invariant"]


class CallOptions(SamplingOverrides, total=False):
    """Keywords of one call: what concerns the call itself, and any field of `SamplingParams`.

    Attributes:
        tools: What the model may call: each a dict with ``name``, ``description`` and ``parameters`` (a JSON schema),
            the same as OpenAI wraps it, or a pydantic model.
        tool_choice: ``"auto"`` (the model chooses), ``"none"``, ``"required"``, or the name of a tool.
        template_options: Further variables for the chat template.
        fold_system: Merge the system message into the first user turn, for templates that refuse it.
        timeout: Seconds from now, waiting included; the call then ends with what it has and ``timeout``.
        priority: Higher ones run sooner where calls wait: a level counts as 5 seconds of waiting.
        request_id: Your name for the call.
        trace: Keep a record of every round.
    """

    tools: Sequence[Any]
    tool_choice: str | Mapping[str, Any]
    template_options: Mapping[str, Any] | None
    fold_system: bool
    timeout: float | None
    priority: int
    request_id: str | None
    trace: bool


def first_problem(error: ValidationError) -> str:
    """What pydantic found, in one line that names the field and the value."""
    problems = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"])
        said = item["msg"].removeprefix("Value error, ")
        if item["type"] == "value_error" and (not place or place in said):  # our own words, which name the value
            problems.append(said)
        else:
            problems.append(f"{place}: {said} (got {item['input']!r:.80})")
    return "; ".join(problems)


class Model(_Spec):
    """One model: where it comes from and how it is loaded.

    Attributes:
        id: Hub id, folder, ``.gguf`` file, or a loaded ``PreTrainedModel`` (borrowed: never changed, moved or freed).
        take: Hands a loaded model over: it may be changed and is freed by ``close()``.
        revision: Hub revision.
        dtype: ``"auto"`` (as stored), ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``; None takes the
            generator's.
        device: Such as ``"cpu"`` or ``"cuda:0"``; None takes the generator's.
        quantization: ``"int8"`` or ``"int4"`` rounds the weights; ``"none"`` keeps their values; ``"auto"`` takes what
            runs fastest here, which may differ by row count, so a target refuses it. None keeps a target's values, and
            is ``"auto"`` for a draft model on a CPU. A borrowed model runs as it is.
        trust_remote_code: Passed to transformers.
        kwargs: Further keywords for ``from_pretrained``.
    """

    id: Any
    take: bool = False
    revision: str | None = None
    dtype: str | None = None
    device: str | None = None
    quantization: Literal["auto", "int8", "int4", "none"] | None = None
    trust_remote_code: bool = False
    kwargs: Mapping[str, Any] = Field(default_factory=dict)

    def __init__(self, id: Any, **fields: Any) -> None:  # the id is the one positional field
        super().__init__(**{"id": id, **fields})

    @field_validator("id")
    @classmethod
    def _known_kind(cls, value: Any) -> Any:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, str) and not value.strip():
            raise ValueError("the model id is empty; pass a hub id, a folder, a .gguf file or a loaded model")
        if not isinstance(value, str) and not callable(getattr(value, "forward", None)):
            raise ValueError(f"a {type(value).__name__} is not a model; pass a hub id, path or PreTrainedModel")
        return value

    @model_validator(mode="after")
    def _borrowed_stays(self) -> Model:
        if self.loaded and not self.take and self.quantization not in (None, "none"):
            raise ValueError(
                f"quantization={self.quantization!r} was asked for a loaded model, which is borrowed and never "
                "changed; hand it over with take=True"
            )
        return self

    @property
    def loaded(self) -> bool:
        """Whether ``id`` is a model in memory rather than a name."""
        return not isinstance(self.id, str)

    @property
    def label(self) -> str:
        """``id@revision`` for logs and results."""
        name = (getattr(self.id, "name_or_path", "") or type(self.id).__name__) if self.loaded else self.id
        return f"{name}@{self.revision}" if self.revision else name


ModelLike: TypeAlias = "str | Path | Model | PreTrainedModel"


class DraftModel(_Spec):
    """Drafts with a smaller model that shares the target's vocabulary.

    Attributes:
        model: What `Model` takes, or a `Model`.
        vocabulary: Tokens its output layer keeps, for cheaper steps: a number (the most frequent), their ids, or
            ``"auto"`` (as many as cover nearly all that was counted; all of them until enough was). None keeps all.
            Outputs stay exact; what the draft cannot propose comes from the target. Where a number or ``"auto"``
            chose them, it can also propose the tokens of the call's own prompt and output.
        text: Texts like those to come, whose tokens are counted; without any, what the target has produced is, from
            call to call, with the counts (never the text) kept in the cache folder.
        name: How results and ``SamplingParams.source`` call it.
    """

    kind: Literal["draft_model"] = "draft_model"
    model: Model
    vocabulary: int | Literal["auto"] | tuple[int, ...] | None = None
    text: tuple[str, ...] = ()
    name: str = "draft_model"

    def __init__(self, model: Any, **fields: Any) -> None:
        super().__init__(**{"model": model, **fields})

    @field_validator("model", mode="before")
    @classmethod
    def _as_model(cls, value: Any) -> Any:
        return _as_model(value)

    @field_validator("text", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("vocabulary", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(f"vocabulary is {value!r}, expected 'auto', a number of tokens >= 1, or token ids")
        return value

    @field_validator("vocabulary")
    @classmethod
    def _some_tokens(cls, value: int | str | tuple[int, ...] | None) -> int | str | tuple[int, ...] | None:
        if (isinstance(value, int) and value < 1) or value == ():
            raise ValueError(f"vocabulary is {value!r}, expected 'auto', a number of tokens >= 1, or token ids")
        if isinstance(value, tuple) and min(value) < 0:
            raise ValueError(f"vocabulary holds {min(value)}, expected token ids >= 0")
        return value

    @model_validator(mode="after")
    def _text_is_counted(self) -> DraftModel:
        if self.text and not (isinstance(self.vocabulary, int) or self.vocabulary == "auto"):
            raise ValueError("text was given, but vocabulary is not a number or 'auto', so nothing counts its tokens")
        return self


class NGram(_Spec):
    """Drafts what followed the longest recent match of the last tokens in prompt and output (prompt lookup).

    Attributes:
        min: Shortest match, in tokens; where it is left out, one word is enough under a grammar, where values stand
            apart.
        max: Longest match, in tokens.
        name: How results and ``SamplingParams.source`` call it.
    """

    kind: Literal["ngram"] = "ngram"
    min: int = Field(default=2, ge=1)
    max: int = Field(default=8, ge=1)
    name: str = "ngram"

    @model_validator(mode="after")
    def _ordered(self) -> NGram:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, more than max {self.max}")
        return self


Source: TypeAlias = Annotated[DraftModel | NGram, Field(discriminator="kind")]


def _as_model(value: Any) -> Any:
    """A model in any of its short forms as a `Model`; mappings and models pass through to pydantic."""
    return value if isinstance(value, Model | Mapping) else Model(value)


class GeneratorConfig(_Spec):
    """Everything `Generator` takes, as one value; nests in a user's own settings.

    Attributes:
        target: The model whose distribution is kept.
        draft: A source, a list of sources (each round takes the fastest), a model in any form, ``"auto"``
            (`NGram`), or None.
        tokenizer: Folder or hub id, or a loaded tokenizer; None takes the target's own.
        device: ``"auto"`` is CUDA where there is one, else CPU.
        dtype: For both models; ``"auto"`` is as stored.
        kv_memory: Bytes, such as ``"2GiB"``, or ``"auto"``; one budget for target and draft.
        max_context: Positions a call may use; None is the model's own limit. The last token of an output needs none.
        max_batch: Requests that decode together.
        max_queue: Requests that may wait.
        attention: ``"auto"`` or ``"sdpa"``.
        progress: Show progress bars while loading.
        defaults: Parameters of calls that do not say otherwise.
    """

    target: Model
    draft: tuple[Source, ...] = (NGram(),)
    tokenizer: Any = None
    device: str = "auto"
    dtype: str = "auto"
    kv_memory: int | str = "auto"
    max_context: int | None = Field(default=None, ge=2)
    max_batch: int = Field(default=16, ge=1)
    max_queue: int = Field(default=1024, ge=1)
    attention: Literal["auto", "sdpa"] = "auto"
    progress: bool = False
    defaults: SamplingParams = SamplingParams()

    @field_validator("target", mode="before")
    @classmethod
    def _target(cls, value: Any) -> Any:
        return _as_model(value)

    @field_validator("draft", mode="before")
    @classmethod
    def _sources(cls, value: Any) -> Any:
        if value is None:
            return ()
        items = value if isinstance(value, list | tuple) else (value,)
        return tuple(_as_source(item) for item in items)

    @field_validator("target")
    @classmethod
    def _one_precision(cls, value: Model) -> Model:
        if value.quantization == "auto":
            raise ValueError(
                "quantization='auto' was asked for the target, but its results may not depend on how many rows are "
                "computed together; name 'int8' or 'int4', or leave it out"
            )
        return value

    @model_validator(mode="after")
    def _nothing_taken_is_shared(self) -> GeneratorConfig:
        models = [self.target, *(source.model for source in self.draft if isinstance(source, DraftModel))]
        for model in models:
            if model.loaded and model.take and sum(other.id is model.id for other in models) > 1:
                raise ValueError(
                    f"{model.label} is handed over with take=True and also used a second time; a model that is handed "
                    "over may be changed, so load another one"
                )
        return self

    @field_validator("draft")
    @classmethod
    def _names_differ(cls, value: tuple[Source, ...]) -> tuple[Source, ...]:
        names = [source.name for source in value]
        if "forced" in names:
            raise ValueError("a source is named 'forced', which is what a grammar's own tokens are called")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two sources are named {name!r}; give one a name= of its own")
        return value

    @field_validator("kv_memory")
    @classmethod
    def _readable_memory(cls, value: int | str) -> int | str:
        if value != "auto":
            parse_bytes(value)
        return value


def make_config(fields: Mapping[str, Any]) -> GeneratorConfig:
    """Builds a `GeneratorConfig`, with pydantic's complaint as a `ConfigError`."""
    try:
        return GeneratorConfig.model_validate(dict(fields))
    except ValidationError as error:
        raise ConfigError(first_problem(error)) from error


def _as_source(value: Any) -> Any:
    if isinstance(value, DraftModel | NGram) or (isinstance(value, Mapping) and "kind" in value):
        return value
    return NGram() if isinstance(value, str) and value == "auto" else DraftModel(_as_model(value))


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(value: int | str) -> int:
    """Reads ``4096``, ``"512MiB"`` or ``"2 GB"`` as bytes.

    Raises:
        ValueError: Not a positive amount.
    """
    if isinstance(value, int):
        amount = float(value)
    else:
        digits = value.strip().rstrip("".join(set("".join(_UNITS)) | {"i", "k", "m", "g", "b", " "}))
        unit = value.strip()[len(digits) :].strip().upper()
        try:
            amount = float(digits) * _UNITS[unit]
        except (ValueError, KeyError):
            raise ValueError(f"{value!r} is not an amount of memory; write bytes or such as '2GiB'") from None
    if not 0 < amount < math.inf:
        raise ValueError(f"{value!r} is not a positive amount of memory")
    return int(amount)

"""From a call to a checked request; everything that can be refused is refused here, before any model runs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastdraft.config import Prompt, SamplingParams
from fastdraft.constraints.grammars import Grammars
from fastdraft.constraints.tools import Tool, asked_spec, describe_tools, is_wrapped, read_tools
from fastdraft.constraints.trail import Trail
from fastdraft.constraints.types import Spec, one_each
from fastdraft.errors import ConfigError, PromptTooLongError
from fastdraft.precedence import check_names, resolve_params
from fastdraft.prompt import PromptEncoder
from fastdraft.request import Event, Request, Tally
from fastdraft.round import FORCED
from fastdraft.sampling.noise import derive_seed, new_seed
from fastdraft.sampling.probs import Warp
from fastdraft.text import TextStream

__all__ = ["Ask", "Intake"]

_CALL = ("tools", "tool_choice", "template_options", "fold_system", "timeout", "priority", "request_id", "trace")


@dataclass(frozen=True, slots=True)
class Ask:
    """One call's keywords, divided; see `fastdraft.config.CallOptions`.

    Attributes:
        known: What was made of each output type so far; shared by all prompts of a batch.
    """

    output_type: Any = None
    tools: Sequence[Any] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    template_options: Mapping[str, Any] | None = None
    fold_system: bool = False
    timeout: float | None = None
    priority: int = 0
    request_id: str | None = None
    trace: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    known: dict[int, tuple[tuple[Tool, ...], Spec | None]] = field(default_factory=dict, compare=False)

    @classmethod
    def divide(cls, output_type: Any, options: Mapping[str, Any]) -> Ask:
        """Divides keywords into those of the call and sampling parameters.

        Raises:
            ConfigError: A keyword that is neither; names the nearest.
        """
        own = {name: options[name] for name in _CALL if name in options}
        overrides = {name: value for name, value in options.items() if name not in _CALL}
        check_names(overrides)
        return cls(output_type=output_type, overrides=overrides, **own)

    def __post_init__(self) -> None:
        if self.request_id is not None and (not isinstance(self.request_id, str) or not self.request_id):
            raise ConfigError(f"request_id is {self.request_id!r}, expected a non-empty string or None.")
        seconds = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if self.timeout is not None and not (seconds and self.timeout > 0):
            raise ConfigError(f"timeout is {self.timeout!r}, expected seconds > 0 or None.")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ConfigError(f"priority is {self.priority!r}, expected an integer; higher ones run sooner.")
        if self.template_options is not None and not isinstance(self.template_options, Mapping):
            raise ConfigError(f"template_options is a {type(self.template_options).__name__}, expected a dict or None.")
        for name, value in (("fold_system", self.fold_system), ("trace", self.trace)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}, expected True or False.")

    @property
    def compiles(self) -> bool:
        """Whether a grammar may have to be compiled, which takes a while."""
        return self.output_type is not None or bool(self.tools)

    def spread(self, count: int) -> list[Ask]:
        """The same for each of several prompts: a request id of its own, and its output type.

        Raises:
            ConfigError: Another number of output types than of prompts.
        """
        types, name = one_each(self.output_type, count), self.request_id
        return [
            replace(self, output_type=own, request_id=f"{name}-{index}" if name and count > 1 else name)
            for index, own in enumerate(types)
        ]


@dataclass(frozen=True, slots=True)
class Intake:
    """What a request is checked against.

    Attributes:
        tokenizer: The target's.
        encoder: Prompts to ids.
        vocabulary: Usable ids.
        context: Tokens of the target's context.
        capacity: Tokens one request can hold in KV.
        eos: End-of-sequence ids.
        defaults: The generator's parameters.
        sampling: The model's own, under our names.
        sources: Names of the draft sources.
        label: ``id@revision`` of the target.
        grammars: Compiled for the target's tokenizer.
    """

    tokenizer: Any
    encoder: PromptEncoder
    vocabulary: int
    context: int
    capacity: int
    eos: tuple[int, ...]
    defaults: SamplingParams
    sampling: Mapping[str, Any]
    sources: tuple[str, ...]
    label: str
    grammars: Grammars

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        ask: Ask,
        *,
        sample: int = 0,
    ) -> Request:
        """Checks a call and makes its request.

        Args:
            prompt: Text, messages or ids.
            params: The call's parameters.
            ask: Its keywords.
            sample: Which of n samples of the prompt.

        Raises:
            ConfigError: A parameter or prompt that cannot be used.
            PromptTooLongError: Longer than the context, or than KV can ever hold.
            InvalidConstraintError: An output type that cannot be enforced.
        """
        arrived = time.perf_counter()
        resolved = resolve_params(params, ask.overrides, defaults=self.defaults, model=self.sampling)
        self._check(resolved)
        tools, spec = self._wanted(ask)
        told = tools if ask.tool_choice != "none" else ()
        ids = self.encoder.encode(
            prompt,
            template_options=ask.template_options,
            fold_system=ask.fold_system,
            tools=[tool.for_template() for tool in told],
            without=describe_tools(told),
        )
        self._check_length(len(ids))
        ends = frozenset(resolved.stop_token_ids) | (frozenset() if resolved.ignore_eos else frozenset(self.eos))
        if spec is not None and spec.retries and resolved.temperature == 0:
            raise ConfigError(
                f"retries={spec.retries} at temperature 0 would write the same text again.",
                hint="Set a temperature, or leave retries out.",
            )
        # The last token of an output is never fed, so it needs neither a position nor a slot.
        limit = min(len(ids) + resolved.max_tokens, min(self.context, self.capacity) + 1)
        trail = None if spec is None else self._trail(spec, ends, limit - len(ids))
        seed = derive_seed(new_seed() if resolved.seed is None else resolved.seed, sample)
        if resolved.seed is not None:  # so that a sample can be repeated by itself
            resolved = resolved.model_copy(update={"seed": seed})
        name = ask.request_id or f"fd-{secrets.token_hex(8)}"
        return Request(
            id=f"{name}-{sample}" if sample else name,
            prompt=ids,
            params=resolved,
            warp=Warp.compile(resolved, self.eos, self.vocabulary),
            seed=seed,
            limit=limit,
            ends=ends,
            text=TextStream(self.tokenizer, ids, resolved.stop),
            decode=lambda token: str(self.tokenizer.decode([token])),
            emit=_unheard,
            speculation=self._speculation(resolved, constrained=spec is not None),
            model=self.label,
            tally=Tally(arrived),
            deadline=None if ask.timeout is None else arrived + ask.timeout,
            priority=ask.priority,
            logprobs=None if resolved.logprobs is None else [],
            rounds=[] if ask.trace else None,
            trail=trail,
            spec=spec,
        )

    def prefix(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens that every prompt which begins so has in common: what comes behind may change the last ones.

        Args:
            prompt: Token ids, which stay as they are; a text; or messages, to the last of which text is added where it
                is the user's, and a user's message else.

        Raises:
            ConfigError: A prompt that cannot be used, or that fixes no token.
            PromptTooLongError: Longer than the context or than KV can ever hold.
        """
        ids = self.encoder.encode(prompt)
        for longer in _longer(prompt):
            other = self.encoder.encode(longer)
            same = (i for i, (mine, its) in enumerate(zip(ids, other, strict=False)) if mine != its)
            ids = ids[: next(same, min(len(ids), len(other)))]
        if not ids:
            raise ConfigError("the prefix fixes no token of a prompt.", hint="Pass a longer one.")
        self._check_length(len(ids))
        return ids

    def compile(self, output_type: Any) -> None:
        """Compiles a grammar, so that calls find it.

        Raises:
            InvalidConstraintError: It cannot be enforced.
        """
        _, spec = self._wanted(Ask(output_type=output_type))
        if spec is not None:
            self.grammars.start(spec)

    def again(self, request: Request, attempt: int) -> Request:
        """The same call once more with a seed of its own, for an output that was not valid."""
        assert request.spec is not None
        seed = derive_seed(request.seed, -attempt)  # samples of a prompt have the indices above 0
        params = request.params
        return replace(
            request,
            params=params if params.seed is None else params.model_copy(update={"seed": seed}),
            seed=seed,
            text=TextStream(self.tokenizer, request.prompt, params.stop),
            tally=Tally(time.perf_counter()),
            logprobs=None if request.logprobs is None else [],
            rounds=None if request.rounds is None else [],
            trail=self._trail(request.spec, request.ends, request.limit - len(request.prompt)),
            table=None,
            course=None,
            finish_reason=None,
            stop_reason=None,
        )

    def _wanted(self, ask: Ask) -> tuple[tuple[Tool, ...], Spec | None]:
        """The tools of a call and what its output must be: read once for all prompts and samples that share them."""
        key = id(ask.output_type)
        if key not in ask.known:
            tools = read_tools(ask.tools)
            wrapped = is_wrapped(self.encoder.template(ask.template_options))
            ask.known[key] = tools, asked_spec(ask.output_type, tools, ask.tool_choice, wrapped=wrapped)
        return ask.known[key]

    def _trail(self, spec: Spec, ends: frozenset[int], budget: int) -> Trail:
        closing = self.grammars.closing if spec.closes else None
        start, guesses = partial(self.grammars.start, spec), self.grammars.key_ends
        return Trail(start, self.vocabulary, ends, closing=closing, budget=budget, guesses=guesses)

    def _check(self, params: SamplingParams) -> None:
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if not 0 <= token < self.vocabulary:
                    raise ConfigError(
                        f"{name} names token id {token}, outside the vocabulary (0 .. {self.vocabulary - 1})."
                    )
        sources = (*self.sources, FORCED)
        if params.source is not None and params.source not in sources:
            known = ", ".join(map(repr, sources))
            raise ConfigError(f"source is {params.source!r}, but the generator's sources are: {known}.")

    def _check_length(self, length: int) -> None:
        if length > self.context:
            raise PromptTooLongError(
                f"the prompt has {length} tokens, more than the context of {self.context}.",
                hint="Shorten it, or raise max_context if the model allows.",
            )
        if length > self.capacity:
            raise PromptTooLongError(
                f"the prompt has {length} tokens, more than the {self.capacity} the KV cache can hold.",
                hint="Raise kv_memory.",
            )

    def _speculation(self, params: SamplingParams, *, constrained: bool) -> str:
        if not self.sources and not constrained:
            return "off: no draft source"
        return "off: gamma is 0" if params.gamma == 0 else "on"


def _longer(prompt: Prompt) -> list[Any]:
    """Prompts that begin with one, and go on differently."""
    if isinstance(prompt, str):
        return [prompt + text for text in ("a", " b", "\n", "1")]
    last: Any = prompt[-1] if isinstance(prompt, Sequence) and prompt else None
    if not isinstance(last, Mapping):
        return []
    texts = ("a", " b", "\n\n1")
    if last.get("role") == "user" and isinstance(last.get("content"), str):
        return [[*prompt[:-1], {**last, "content": last["content"] + text}] for text in texts]
    return [[*prompt, {"role": "user", "content": text}] for text in texts]


def _unheard(event: Event) -> None:
    raise AssertionError("a request was submitted before anyone listens")

"""The user's verbs."""

from __future__ import annotations

import asyncio
import os
import queue
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from tqdm.auto import tqdm

from fastdraft.build import build
from fastdraft.config import (
    CallOptions,
    DraftModel,
    GeneratorConfig,
    Model,
    ModelLike,
    Prompt,
    SamplingParams,
    Source,
    make_config,
)
from fastdraft.engine import Engine
from fastdraft.errors import ConfigError, FastDraftError, ForkedProcessError
from fastdraft.intake import Ask
from fastdraft.memory import MemoryPlan, plan_memory
from fastdraft.metrics import Metrics
from fastdraft.models.pairing import Pairing
from fastdraft.request import Event, Request
from fastdraft.results import Completion, Pin
from fastdraft.streams import AsyncStream, Stream, async_emitter
from fastdraft.worker import Status, Worker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Generator"]

T = TypeVar("T")


class Generator:
    """A target model and its draft sources in this process.

    Any number of threads and tasks may call one generator at once. Use it as a context manager, or `close` it.

    Args:
        target: Hub id, folder, ``.gguf`` file, `Model`, or a loaded ``PreTrainedModel`` (borrowed, never changed).
        draft: A source, a list of sources (each round takes the fastest), a draft model in any of the forms of
            ``target``, None, or ``"auto"``: `NGram`.
        tokenizer: Loaded, or its folder or hub id; None takes the target's own.
        device: ``"auto"`` is CUDA where there is one, else CPU.
        dtype: Of both models; ``"auto"`` is as stored.
        kv_memory: Bytes, such as ``"2GiB"``, or ``"auto"``: 85 % of free CUDA memory; on CPU the smaller of 2 GiB and
            a quarter of free memory. One budget for target and drafts.
        max_context: Positions a call may use; None is the model's limit. The last token of an output needs none.
        max_batch: Requests that decode together.
        max_queue: Requests that may wait.
        attention: ``"auto"`` or ``"sdpa"``.
        progress: Show bars while loading.
        defaults: Parameters of calls that don't say otherwise.

    Raises:
        ConfigError: Arguments that cannot be used.
        ModelLoadError: Files that are missing or broken.
        UnsupportedModelError: A model that cannot be paged and rolled back.
        VocabularyMismatchError: A draft with another vocabulary.
    """

    def __init__(
        self,
        target: ModelLike,
        draft: ModelLike | Source | Sequence[ModelLike | Source] | None = "auto",
        *,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        kv_memory: int | str = "auto",
        max_context: int | None = None,
        max_batch: int = 16,
        max_queue: int = 1024,
        attention: Literal["auto", "sdpa"] = "auto",
        progress: bool = False,
        defaults: SamplingParams | None = None,
    ) -> None:
        self._start(
            make_config(
                {
                    "target": target,
                    "draft": draft,
                    "tokenizer": tokenizer,
                    "device": device,
                    "dtype": dtype,
                    "kv_memory": kv_memory,
                    "max_context": max_context,
                    "max_batch": max_batch,
                    "max_queue": max_queue,
                    "attention": attention,
                    "progress": progress,
                    "defaults": SamplingParams() if defaults is None else defaults,
                }
            )
        )

    @classmethod
    def from_config(cls, config: GeneratorConfig) -> Self:
        """Builds a generator from one value."""
        generator = cls.__new__(cls)
        generator._start(config)
        return generator

    @staticmethod
    def plan(config: GeneratorConfig) -> MemoryPlan:
        """Weights, KV bytes and tokens of a configuration, from config files alone."""
        return plan_memory(config)

    def _start(self, config: GeneratorConfig) -> None:
        built = build(config)
        self._config = config
        self._intake = built.intake
        self._pairings = built.pairings
        self._worker = Worker(built.engine, config.max_queue)
        self._process = os.getpid()
        # Not a bound method of self: collected or at exit, the thread ends and frees everything.
        self._finalizer = weakref.finalize(self, self._worker.close, drain=False)

    @property
    def config(self) -> GeneratorConfig:
        """What it was built from."""
        return self._config

    @property
    def pairings(self) -> Mapping[str, Pairing]:
        """How each draft model fits the target: vocabulary, rope, context; by source name."""
        return dict(self._pairings)

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return self._intake.tokenizer

    @property
    def status(self) -> Status:
        """``ready``, ``draining`` after `close`, ``failed`` after a device fault."""
        return self._worker.status

    def metrics(self) -> Metrics:
        """A snapshot of running and waiting calls and of the KV blocks."""
        self._check_process()
        return self._worker.metrics()

    def pin(self, prefix: Prompt) -> Pin:
        """Computes what many prompts begin with, for target and draft models, and keeps it in KV.

        Any prefix that was computed is reused while there is room; a pinned one also when others need room, but for
        a call that could not run at all without it. At most half of KV can be pinned.

        Args:
            prefix: A text, messages (such as a system message and examples), or token ids. What is kept are the tokens
                that stay the same whatever comes behind, in whole blocks.

        Returns:
            What releases it.

        Raises:
            ConfigError: A prefix that cannot be used.
            PromptTooLongError: Longer than the context or than KV can ever hold.
            CacheFullError: More than half of KV would be pinned.
        """
        self._check_process()
        ids = self._intake.prefix(prefix)
        first = SamplingParams(max_tokens=1, temperature=0, gamma=0)
        self._submit([self._intake.request(ids, first, Ask())])[0].result()
        held = self._worker.ask(lambda engine: engine.pins.hold(ids))
        pin = Pin(held.length, lambda: self._worker.ask(lambda engine: engine.pins.release(held)))
        try:
            # A chunk at a time: other calls' rounds run between them.
            while not self._worker.ask(lambda engine: engine.pins.warm(held)):
                pass
        except BaseException:
            pin.release()
            raise
        return pin

    def prepare(self, *, output_types: Sequence[Any] = (), prefixes: Sequence[Prompt] = ()) -> None:
        """Does ahead what first calls would wait for: compiles grammars, computes and pins prefixes.

        Args:
            output_types: Each as a call takes it.
            prefixes: Each as `pin` takes it; pinned until the generator is closed.

        Raises:
            InvalidConstraintError: An output type that cannot be enforced.
            FastDraftError: What `pin` raises.
        """
        self._check_process()
        for output_type in output_types:
            self._intake.compile(output_type)
        for prefix in prefixes:
            self.pin(prefix)

    def forget_prefixes(self) -> None:
        """Drops the KV of earlier prompts, so that the next call computes its whole prompt, as a first call does."""
        self._check_process()
        self._worker.ask(Engine.forget_prefixes)

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: None = None,
        **options: Unpack[CallOptions],
    ) -> Completion[None]: ...
    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: type[T],
        **options: Unpack[CallOptions],
    ) -> Completion[T]: ...
    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any,
        **options: Unpack[CallOptions],
    ) -> Completion[Any]: ...
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> Completion[Any]:
        """Generates one answer.

        Args:
            prompt: Raw text (no template; it may hold control tokens), chat messages, or token ids.
            params: Sampling and stopping; ``options`` win, the generator's defaults and the model's own come after.
            output_type: What the answer must be: see `Constrained.type`, or a `Constrained` itself.
            **options: `CallOptions`: ``tools``, ``tool_choice``, ``template_options``, ``fold_system``, ``timeout``,
                ``request_id``, ``trace``, and any field of `SamplingParams`.

        Raises:
            ConfigError: A parameter or prompt that cannot be used.
            PromptTooLongError: Longer than the context or than KV can ever hold.
            QueueFullError: Too many calls wait.
            GeneratorClosedError: After `close`.
            InvalidConstraintError: An output type that cannot be enforced.
            OutputValidationError: The call ended without a valid value of its output type.
            EngineFailedError: A round failed; its cause is attached.
        """
        self._check_process()
        with self._submit([self._intake.request(prompt, params, Ask.divide(output_type, options))])[0] as stream:
            return stream.completion

    @overload
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: None = None,
        **options: Unpack[CallOptions],
    ) -> Stream[None]: ...
    @overload
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: type[T],
        **options: Unpack[CallOptions],
    ) -> Stream[T]: ...
    @overload
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any,
        **options: Unpack[CallOptions],
    ) -> Stream[Any]: ...
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> Stream[Any]:
        """`generate`, chunk by chunk; what can be refused is refused here, before the first chunk."""
        self._check_process()
        return self._submit([_once(self._intake.request(prompt, params, Ask.divide(output_type, options)))])[0]

    @overload
    def batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        n: int = 1,
        return_exceptions: Literal[False] = False,
        progress: bool = False,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> list[Completion[Any]]: ...
    @overload
    def batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        n: int = 1,
        return_exceptions: bool,
        progress: bool = False,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> list[Completion[Any] | FastDraftError]: ...
    def batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        n: int = 1,
        return_exceptions: bool = False,
        progress: bool = False,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> list[Any]:
        """Generates for many prompts together.

        Args:
            prompts: All are checked before any runs; an error names the index.
            params: One for all, or one a prompt.
            n: Samples a prompt; sample i of a seeded call uses a seed derived from it, sample 0 the seed itself.
            return_exceptions: Put errors into the list instead of raising the first.
            progress: Show a bar.
            output_type: As in `generate`, or a list with one a prompt (a list of strings is a choice for all).
            **options: As in `generate`.

        Returns:
            ``n`` completions a prompt, in order.
        """
        asked = self._ask_all(prompts, params, n, return_exceptions, Ask.divide(output_type, options))
        streams = self._submit([a for a in asked if isinstance(a, Request)])
        left = iter(streams)
        results: list[Any] = []
        try:
            for item in _counted(asked, progress):
                try:
                    results.append(next(left).completion if isinstance(item, Request) else item)
                except FastDraftError as error:
                    if not return_exceptions:
                        raise
                    results.append(error)
        finally:
            for stream in streams:
                stream.close()
        return results

    @overload
    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: None = None,
        **options: Unpack[CallOptions],
    ) -> Completion[None]: ...
    @overload
    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: type[T],
        **options: Unpack[CallOptions],
    ) -> Completion[T]: ...
    @overload
    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any,
        **options: Unpack[CallOptions],
    ) -> Completion[Any]: ...
    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> Completion[Any]:
        """`generate` for an event loop; cancelling the task cancels the call."""
        self._check_process()
        ask = Ask.divide(output_type, options)
        # A grammar is compiled where it keeps nobody waiting.
        make = self._intake.request
        request = await asyncio.to_thread(make, prompt, params, ask) if ask.compiles else make(prompt, params, ask)
        async with self._asubmit([request])[0] as stream:
            return await stream.result()

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> AsyncStream[Any]:
        """`stream` for the running event loop; not a coroutine: what can be refused is refused here.

        A grammar is compiled here too, milliseconds; a generator's first reads its vocabulary, a second or more.
        """
        self._check_process()
        return self._asubmit([_once(self._intake.request(prompt, params, Ask.divide(output_type, options)))])[0]

    @overload
    async def abatch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        n: int = 1,
        return_exceptions: Literal[False] = False,
        progress: bool = False,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> list[Completion[Any]]: ...
    @overload
    async def abatch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        n: int = 1,
        return_exceptions: bool,
        progress: bool = False,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> list[Completion[Any] | FastDraftError]: ...
    async def abatch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        n: int = 1,
        return_exceptions: bool = False,
        progress: bool = False,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> list[Any]:
        """`batch` for an event loop."""
        ask = Ask.divide(output_type, options)
        every = (prompts, params, n, return_exceptions, ask)
        asked = await asyncio.to_thread(self._ask_all, *every) if ask.compiles else self._ask_all(*every)
        streams = self._asubmit([a for a in asked if isinstance(a, Request)])
        left = iter(streams)
        results: list[Any] = []
        try:
            for item in _counted(asked, progress):
                try:
                    results.append(await next(left).result() if isinstance(item, Request) else item)
                except FastDraftError as error:
                    if not return_exceptions:
                        raise
                    results.append(error)
        finally:
            for stream in streams:
                stream.close()
        return results

    def _ask_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None,
        n: int,
        return_exceptions: bool,
        ask: Ask,
    ) -> list[Request | FastDraftError]:
        """A request, or its error where errors are returned, for each sample of each prompt."""
        self._check_process()
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sequence):
            raise ConfigError(f"prompts is a {type(prompts).__name__}, expected a list of prompts.")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigError(f"n is {n!r}, expected an integer of at least 1.")
        if params is not None and not isinstance(params, SamplingParams | Sequence):
            raise ConfigError(
                f"params is a {type(params).__name__}, expected SamplingParams, or one a prompt.",
                hint="Pass SamplingParams(...) or keywords such as temperature=0.",
            )
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ConfigError(f"{len(each)} params for {len(prompts)} prompts; pass one for all, or one a prompt.")
        asked: list[Request | FastDraftError] = []
        asks = ask.spread(len(prompts))
        for index, (prompt, mine, own) in enumerate(zip(prompts, each, asks, strict=True)):
            for sample in range(n):
                try:
                    asked.append(self._intake.request(prompt, mine, own, sample=sample))
                except FastDraftError as error:
                    named = type(error)(f"prompt {index} of the batch: {error}")
                    named.hint = error.hint
                    if not return_exceptions:
                        raise named from error
                    asked.append(named)
        return asked

    def _submit(self, requests: Sequence[Request]) -> list[Stream[Any]]:
        streams = []
        for request in requests:
            events: queue.SimpleQueue[Event] = queue.SimpleQueue()
            request.emit = events.put
            streams.append(Stream[Any](request, self, events, self._again))
        self._worker.submit(requests)
        return streams

    def _asubmit(self, requests: Sequence[Request]) -> list[AsyncStream[Any]]:
        loop = asyncio.get_running_loop()
        streams = []
        for request in requests:
            events: asyncio.Queue[Event] = asyncio.Queue()
            request.emit = async_emitter(loop, events)
            streams.append(AsyncStream[Any](request, self, events, self._again))
        self._worker.submit(requests)
        return streams

    def _again(self, request: Request, attempt: int) -> Request:
        """Submits a call once more, to whoever waits for it."""
        another = self._intake.again(request, attempt)
        self._worker.submit([another])
        return another

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ForkedProcessError(
                f"this generator was built in process {self._process} and is used in its fork {os.getpid()}.",
                hint="Build the generator in each process, after the fork.",
            )

    def close(self, *, drain: bool = True, timeout: float | None = 30.0) -> None:
        """Ends the worker and frees models and KV. Idempotent, from any thread.

        Args:
            drain: Let calls that run or wait finish first; else they end as cancelled.
            timeout: Seconds to drain; what is left then is cancelled.
        """
        if os.getpid() == self._process:
            self._worker.close(drain=drain, timeout=timeout)
        self._finalizer.detach()
        self._config = _without_taken(self._config)

    async def aclose(self, *, drain: bool = True, timeout: float | None = 30.0) -> None:
        """`close` without blocking the event loop."""
        await asyncio.to_thread(self.close, drain=drain, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(drain=error is None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose(drain=error is None)


def _once(request: Request) -> Request:
    """A request whose chunks are handed out as they come.

    Raises:
        ConfigError: It may be tried again.
    """
    if request.spec is not None and request.spec.retries:
        raise ConfigError(
            f"retries={request.spec.retries} in a stream, which cannot take back what it handed out.",
            hint="Use generate, or leave retries out.",
        )
    return request


def _without_taken(config: GeneratorConfig) -> GeneratorConfig:
    """The config with models that were handed over named only: nothing of ours may keep them alive."""

    def named(model: Model) -> Model:
        return Model(model.label) if model.take else model

    draft = tuple(
        source.model_copy(update={"model": named(source.model)}) if isinstance(source, DraftModel) else source
        for source in config.draft
    )
    return config.model_copy(update={"target": named(config.target), "draft": draft})


def _counted(items: Sequence[Request | FastDraftError], progress: bool) -> Iterable[Request | FastDraftError]:
    """The items, behind a bar where one is wanted; a disabled bar would leave tqdm's monitor thread behind."""
    return tqdm(items, unit="answer") if progress else items

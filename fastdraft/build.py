"""What ``Generator()`` does: load, pair, divide memory, put the engine together."""

from __future__ import annotations

import contextvars
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers

from fastdraft._log import get_logger
from fastdraft.attention.base import AttentionBackend
from fastdraft.attention.sdpa import SdpaAttention
from fastdraft.config import DraftModel, GeneratorConfig, Model, NGram, Source, parse_bytes
from fastdraft.control.costs import Costs, Measured
from fastdraft.control.plan import AdaptiveController
from fastdraft.engine import Engine
from fastdraft.errors import ConfigError
from fastdraft.intake import Intake
from fastdraft.kv.cache import LayerShape
from fastdraft.models.calibrate import load_or_measure
from fastdraft.models.frequent import Frequencies, cut_head, frequent
from fastdraft.models.kernels import fasten
from fastdraft.models.loading import Loaded, load_config, load_model, load_tokenizer, pick_device, torch_dtype
from fastdraft.models.pairing import Pairing, pair, usable_vocabulary
from fastdraft.models.runner import Runner
from fastdraft.models.support import context_of, examine, refuse_config
from fastdraft.models.views import view
from fastdraft.prompt import PromptEncoder
from fastdraft.proposers.base import Proposer
from fastdraft.proposers.chain import Chain
from fastdraft.proposers.draft_model import DraftModelProposer
from fastdraft.proposers.ngram import NGramProposer
from fastdraft.scheduler import Limits

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["Built", "MemoryPlan", "ModelPlan", "build", "plan_memory"]

_log = get_logger(__name__)

CHUNK = 512  # prompt tokens a round: bounds activations, keeps matrix products large


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model's memory.

    Attributes:
        model: ``id@revision``.
        weight_bytes: Parameters in the dtype they are held in.
        kv_bytes_per_token: Keys and values of all layers.
    """

    model: str
    weight_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a configuration needs, from config files alone.

    Attributes:
        target: The target.
        drafts: The draft models.
        kv_bytes: KV memory of target and drafts together.
        kv_tokens: Tokens it holds, over all requests.
        context: Tokens one request can have.
    """

    target: ModelPlan
    drafts: tuple[ModelPlan, ...]
    kv_bytes: int
    kv_tokens: int
    context: int

    @property
    def total_bytes(self) -> int:
        """Weights and KV."""
        return self.kv_bytes + sum(m.weight_bytes for m in (self.target, *self.drafts))


@dataclass(frozen=True, slots=True)
class Built:
    """A generator's parts.

    Attributes:
        engine: Ready to run.
        intake: Makes requests.
        pairings: For each draft model how it fits the target, by source name.
    """

    engine: Engine
    intake: Intake
    pairings: dict[str, Pairing]


def build(config: GeneratorConfig) -> Built:
    """Loads the models, checks that they fit, and allocates KV, in a thread of its own that ends with it.

    OpenMP keeps a team for every thread that ever computed. With a second one beside the worker's there would be more
    threads than cores, and libgomp then lets them sleep between kernels: a third of all speed.

    Raises:
        ModelLoadError: Files that are missing or broken.
        UnsupportedModelError: A model that cannot be paged and rolled back.
        VocabularyMismatchError: A draft with another vocabulary.
        ConfigError: Options that cannot be met.
    """
    outcome: Future[Built] = Future()
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(_fulfil, outcome, config), name="fastdraft-build", daemon=True).start()
    try:
        return outcome.result()
    finally:
        del outcome  # it holds an error, whose frames hold it and all weights loaded so far


def _fulfil(outcome: Future[Built], config: GeneratorConfig) -> None:
    try:
        outcome.set_result(_build(config))
    except BaseException as error:  # the caller's, whatever it is
        outcome.set_exception(error)
    finally:
        del outcome


def _build(config: GeneratorConfig) -> Built:
    backend = SdpaAttention()
    target = _load(config.target, config)
    tokenizer = load_tokenizer(config.tokenizer, target, config.target)
    specs = [source for source in config.draft if isinstance(source, DraftModel)]
    drafts = {spec.name: _load(spec.model, config) for spec in specs}
    for name, loaded in drafts.items():
        if loaded.model.device != target.model.device:
            raise ConfigError(
                f"draft {name} is on {loaded.model.device}, the target on {target.model.device}.",
                hint="Put both on one device.",
            )
    pairings = {
        spec.name: pair(
            target.model.config,
            tokenizer,
            drafts[spec.name].model.config,
            _draft_tokenizer(drafts[spec.name], spec.model),
            drafts[spec.name].label,
        )
        for spec in specs
    }
    for name, pairing in pairings.items():
        for note in pairing.notes:
            _log.warning("draft_differs", source=name, note=note)
    vocabulary = usable_vocabulary(tokenizer, target.model.config.get_text_config().vocab_size)
    layers = examine(target.model, target.label, backend, vocabulary)
    draft_layers = {
        name: examine(loaded.model, loaded.label, backend, pairings[name].shared_tokens)
        for name, loaded in drafts.items()
    }
    eos = tuple(i for i in target.eos or _tokenizer_eos(tokenizer) if i < vocabulary)
    # Checked as loaded: rounded layers would blur the comparison.
    kernels = {"": _fasten(config.target, target)}
    heads = {}
    for spec in specs:
        heads[spec.name] = head = _head(spec, target.label, tokenizer, eos, pairings[spec.name].shared_tokens)
        if head.kept is not None:
            # A borrowed draft keeps its own output layer: a view gets the smaller one.
            borrowed = spec.model.loaded and not spec.model.take
            model = view(drafts[spec.name].model, "sdpa") if borrowed else drafts[spec.name].model
            cut_head(model, head.kept)
            drafts[spec.name] = replace(drafts[spec.name], model=model)
        kernels[spec.name] = _fasten(spec.model, drafts[spec.name], draft=True)
    context = _context(config, target.model.config)
    per_token = [_token_bytes(layers, target.model.dtype)]
    per_token += [_token_bytes(draft_layers[name], loaded.model.dtype) for name, loaded in drafts.items()]
    blocks = _blocks(config, per_token, backend, context, target.model.device)
    runner = Runner(
        target.model, vocabulary=vocabulary, layers=layers, blocks=blocks, backend=backend, space=target.label
    )
    sources: list[Proposer] = []
    for source in config.draft:
        if isinstance(source, NGram):
            sources.append(NGramProposer(source, runner.device))
            continue
        loaded, head = drafts[source.name], heads[source.name]
        draft_runner = Runner(
            loaded.model,
            vocabulary=len(head.kept or range(pairings[source.name].shared_tokens)),
            layers=draft_layers[source.name],
            blocks=blocks,
            backend=backend,
            space=loaded.label,
        )
        sources.append(
            DraftModelProposer(
                source.name,
                draft_runner,
                context=context_of(loaded.model.config),
                vocabulary=vocabulary,
                chunk=CHUNK,
                kept=head.kept,
                frequencies=head.frequencies,
            )
        )
    controller = AdaptiveController(
        _costs(config, target, drafts, kernels, heads, runner, sources), stops=runner.device.type == "cpu"
    )
    engine = Engine(runner, Chain(sources), controller, Limits(config.max_batch, CHUNK))
    # A shared block is copied before it is written: one block stays for the copy.
    capacity = max(1, blocks - 1) * backend.block_size
    intake = Intake(
        tokenizer=tokenizer,
        encoder=PromptEncoder(tokenizer, vocabulary),
        vocabulary=vocabulary,
        context=context,
        capacity=capacity,
        eos=eos,
        defaults=config.defaults,
        sampling=target.sampling,
        sources=tuple(source.name for source in sources),
        label=target.label,
    )
    _log.info("generator_built", target=target.label, sources=intake.sources, kv_tokens=capacity, context=context)
    return Built(engine, intake, pairings)


class _Head(NamedTuple):
    """A draft's output layer.

    Attributes:
        kept: Its token ids; None for all.
        frequencies: Where produced tokens are counted; None where nothing asks for them.
    """

    kept: tuple[int, ...] | None = None
    frequencies: Frequencies | None = None


def _head(spec: DraftModel, target: str, tokenizer: Any, eos: Sequence[int], shared: int) -> _Head:
    """Which tokens a draft can propose."""
    wanted = spec.vocabulary
    if wanted is None:
        return _Head()
    if isinstance(wanted, tuple):
        if max(wanted) >= shared:
            raise ConfigError(
                f"vocabulary of {spec.name} holds token {max(wanted)}, but target and draft share {shared} tokens.",
                hint=f"Pass ids under {shared}.",
            )
        return _Head(tuple(sorted(set(wanted))))
    frequencies = Frequencies(target)
    counts = Counter(i for text in spec.text for i in tokenizer(text, add_special_tokens=False).input_ids)
    kept = frequent(wanted, counts or frequencies.read(), (*eos, *tokenizer.all_special_ids), shared)
    _log.info("draft_vocabulary", source=spec.name, tokens=shared if kept is None else len(kept))
    return _Head(kept, None if counts else frequencies)


def _fasten(spec: Model, loaded: Loaded, *, draft: bool = False) -> str:
    """Puts the fastest kernels under a model that is ours; a borrowed one runs as it is."""
    if spec.loaded and not spec.take:
        return "plain"
    quantization = spec.quantization or ("auto" if draft else "none")
    # What was handed over may have been changed, and keywords may choose other weights: neither is what a name says.
    source = "" if spec.loaded or spec.kwargs else loaded.source
    return fasten(loaded.model, quantization, label=loaded.label, source=source)


def _costs(
    config: GeneratorConfig,
    target: Loaded,
    drafts: Mapping[str, Loaded],
    kernels: Mapping[str, str],
    heads: Mapping[str, _Head],
    runner: Runner,
    sources: Sequence[Proposer],
) -> Costs:
    """What target and draft models cost here; measured only where something can draft."""
    if not sources:
        return Costs(Measured(((1, 1.0),)), {})
    specs = {spec.name: spec for spec in config.draft}
    models = {s.name: s.runner for s in sources if isinstance(s, DraftModelProposer)}
    own = context_of(target.model.config)
    measured = load_or_measure(runner, _costs_key(config.target, target, kernels[""]), context=own)
    others = {
        name: load_or_measure(
            model,
            _costs_key(specs[name], drafts[name], kernels[name], heads[name].kept),
            context=context_of(drafts[name].model.config),
        )
        for name, model in models.items()
    }
    return Costs(measured, others)


def _costs_key(spec: Model | Source, loaded: Loaded, kernels: str, kept: Sequence[int] | None = None) -> str:
    """Names what was loaded, and how; empty for a model that was handed in, which may be anything."""
    given = spec if isinstance(spec, Model) else getattr(spec, "model", None)
    if given is None or given.loaded:
        return ""
    return f"{given!r} {kernels} {kept and len(kept)} {loaded.model.dtype} {loaded.model.config.to_json_string()}"


def _load(spec: Model, config: GeneratorConfig) -> Loaded:
    return load_model(spec, device=config.device, dtype=config.dtype, progress=config.progress)


def _draft_tokenizer(loaded: Loaded, spec: Model) -> Any | None:
    """The draft's own tokenizer; None for a loaded draft that came without one."""
    if spec.loaded and not loaded.source:
        return None
    return load_tokenizer(None, loaded, spec)


def _tokenizer_eos(tokenizer: Any) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def _context(config: GeneratorConfig, model: PretrainedConfig) -> int:
    own = context_of(model)
    if config.max_context is not None and config.max_context > own:
        raise ConfigError(
            f"max_context is {config.max_context}, but {config.target.label} was made for {own} tokens.",
            hint=f"Pass at most {own}.",
        )
    return config.max_context or own


def _token_bytes(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    return sum(n * (k + v) for n, k, v in layers) * dtype.itemsize


def _blocks(
    config: GeneratorConfig,
    per_token: Sequence[int],
    backend: AttentionBackend,
    context: int,
    device: torch.device,
) -> int:
    """Blocks of each pool: one budget, every model gets the same number of tokens.

    Raises:
        ConfigError: A budget under two blocks.
    """
    budget = _budget(config, device)
    block_bytes = sum(per_token) * backend.block_size
    # More than every running request's whole context can't be used, beyond one of reusable prefixes.
    most = (config.max_batch + 1) * (-(-context // backend.block_size) + 1)
    blocks = min(budget // block_bytes, most)
    if blocks < 2:
        raise ConfigError(
            f"kv_memory is {config.kv_memory!r} ({budget} bytes), but two blocks of {backend.block_size} tokens for "
            f"{len(per_token)} model(s) need {2 * block_bytes} bytes.",
            hint="Raise kv_memory.",
        )
    return blocks


def _budget(config: GeneratorConfig, device: torch.device) -> int:
    if config.kv_memory != "auto":
        return parse_bytes(config.kv_memory)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.85)
    return min(2 * 2**30, _free_memory() // 4)


def _free_memory() -> int:
    """Bytes the system could give without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 4 * 2**30


def plan_memory(config: GeneratorConfig) -> MemoryPlan:
    """Weights, KV bytes and tokens of a configuration, without loading weights.

    Raises:
        ModelLoadError: A config that is missing or broken.
        UnsupportedModelError: What the config alone rules out.
    """
    specs = [config.target, *(source.model for source in config.draft if isinstance(source, DraftModel))]
    configs = [load_config(spec) for spec in specs]
    for spec, found in zip(specs, configs, strict=True):
        refuse_config(found, spec.label)
    plans = [_plan_model(spec, found, config.dtype) for spec, found in zip(specs, configs, strict=True)]
    backend = SdpaAttention()
    context = _context(config, configs[0])
    device = pick_device(config.target.device or config.device)
    per_token = [plan.kv_bytes_per_token for plan in plans]
    blocks = _blocks(config, per_token, backend, context, device)
    tokens = blocks * backend.block_size
    return MemoryPlan(plans[0], tuple(plans[1:]), tokens * sum(per_token), tokens, context)


def _plan_model(spec: Model, config: PretrainedConfig, dtype: str) -> ModelPlan:
    wanted = torch_dtype(spec.dtype or dtype)
    held = wanted if isinstance(wanted, torch.dtype) else getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    weights = sum(p.numel() for p in model.parameters()) * held.itemsize
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelPlan(spec.label, weights, text.num_hidden_layers * heads * size * 2 * held.itemsize)

"""What ``Generator()`` does: load, pair, divide memory, put the engine together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

from fastdraft._log import get_logger
from fastdraft.attention.base import AttentionBackend
from fastdraft.attention.sdpa import SdpaAttention
from fastdraft.config import DraftModel, GeneratorConfig, Model, NGram, parse_bytes
from fastdraft.control.plan import FixedController
from fastdraft.engine import Engine
from fastdraft.errors import ConfigError
from fastdraft.intake import Intake
from fastdraft.kv.cache import LayerShape
from fastdraft.models.loading import Loaded, load_config, load_model, load_tokenizer, pick_device, torch_dtype
from fastdraft.models.pairing import Pairing, pair, usable_vocabulary
from fastdraft.models.runner import Runner
from fastdraft.models.support import context_of, examine, refuse_config
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
    """Loads the models, checks that they fit, and allocates KV.

    Raises:
        ModelLoadError: Files that are missing or broken.
        UnsupportedModelError: A model that cannot be paged and rolled back.
        VocabularyMismatchError: A draft with another vocabulary.
        ConfigError: Options that cannot be met.
    """
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
        loaded, shared = drafts[source.name], pairings[source.name].shared_tokens
        draft_runner = Runner(
            loaded.model,
            vocabulary=shared,
            layers=draft_layers[source.name],
            blocks=blocks,
            backend=backend,
            space=loaded.label,
        )
        draft_context = context_of(loaded.model.config)
        sources.append(
            DraftModelProposer(source.name, draft_runner, context=draft_context, vocabulary=vocabulary, chunk=CHUNK)
        )
    engine = Engine(runner, Chain(sources), FixedController(), Limits(config.max_batch, CHUNK))
    # A shared block is copied before it is written: one block stays for the copy.
    capacity = max(1, blocks - 1) * backend.block_size
    eos = tuple(i for i in target.eos or _tokenizer_eos(tokenizer) if i < vocabulary)
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

"""What ``Generator()`` does: load, pair, divide memory, put the engine together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

from fastdraft._log import get_logger
from fastdraft.aside import aside
from fastdraft.attention.sdpa import SdpaAttention
from fastdraft.config import DraftModel, GeneratorConfig, Model, NGram
from fastdraft.constraints.grammars import Grammars
from fastdraft.control.costs import Costs, Measured
from fastdraft.control.plan import AdaptiveController
from fastdraft.engine import Engine
from fastdraft.errors import ConfigError
from fastdraft.intake import Intake
from fastdraft.memory import context_limit, kv_blocks, token_bytes
from fastdraft.models.calibrate import load_or_measure
from fastdraft.models.frequent import Frequencies, Others, cut_head, frequent, open_head, structural
from fastdraft.models.kernels import fasten, quantization_of
from fastdraft.models.loading import Loaded, load_model, load_tokenizer
from fastdraft.models.pairing import Pairing, pair, usable_vocabulary
from fastdraft.models.runner import Runner
from fastdraft.models.support import context_of, examine
from fastdraft.models.views import view
from fastdraft.prompt import PromptEncoder
from fastdraft.proposers.base import Proposer
from fastdraft.proposers.chain import Chain
from fastdraft.proposers.draft_model import DraftModelProposer
from fastdraft.proposers.ngram import NGramProposer
from fastdraft.proposers.spaces import spaceless
from fastdraft.scheduler import Limits

__all__ = ["Built", "build"]

_log = get_logger(__name__)

_ROOMY = 2048  # tokens of a cut head from which what JSON is held together by, some 300, has room in it
CHUNK = 512  # prompt tokens a round: bounds activations, keeps matrix products large


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
    """Loads the models, checks that they fit, and allocates KV; aside, so that the worker's OpenMP team stays alone.

    Raises:
        ModelLoadError: Files that are missing or broken.
        UnsupportedModelError: A model that cannot be paged and rolled back.
        VocabularyMismatchError: A draft with another vocabulary.
        ConfigError: Options that cannot be met.
    """
    return aside(partial(_build, config))


def _build(config: GeneratorConfig) -> Built:
    backend = SdpaAttention()
    target = _load(config.target, config)
    tokenizer = load_tokenizer(config.tokenizer, target, config.target)
    vocabulary = usable_vocabulary(tokenizer, target.model.config.get_text_config().vocab_size)
    eos = tuple(i for i in target.eos or _tokenizer_eos(tokenizer) if i < vocabulary)
    specs = [source for source in config.draft if isinstance(source, DraftModel)]
    drafts = {spec.name: _pair(spec, config, target, tokenizer, eos) for spec in specs}
    # All are checked as loaded: rounded layers would blur the comparison.
    layers = examine(target.model, target.label, backend, vocabulary)
    shapes = {n: examine(d.loaded.model, d.loaded.label, backend, d.pairing.shared_tokens) for n, d in drafts.items()}
    kernels = _fasten(config.target, target)
    drafts = {name: _lighten(draft) for name, draft in drafts.items()}
    context = context_limit(config, target.model.config)
    per_token = [token_bytes(layers, target.model.dtype)]
    per_token += [token_bytes(shapes[name], draft.loaded.model.dtype) for name, draft in drafts.items()]
    blocks = kv_blocks(config, per_token, backend, context, target.model.device)
    runner = Runner(
        target.model, vocabulary=vocabulary, layers=layers, blocks=blocks, backend=backend, space=target.label
    )
    same = cache(lambda: spaceless(tokenizer.get_vocab()))
    sources: list[Proposer] = []
    for source in config.draft:
        if isinstance(source, NGram):
            sources.append(NGramProposer(source, runner.device, same))
            continue
        draft = drafts[source.name]
        sources.append(
            DraftModelProposer(
                source.name,
                Runner(
                    draft.loaded.model,
                    vocabulary=draft.pairing.shared_tokens,
                    layers=shapes[source.name],
                    blocks=blocks,
                    backend=backend,
                    space=draft.loaded.label,
                ),
                context=context_of(draft.loaded.model.config),
                vocabulary=vocabulary,
                chunk=CHUNK,
                kept=draft.head.kept,
                others=draft.others,
                guesses=runner.device.type == "cpu",
                spaceless=same,
            )
        )
    costs = _costs(config, target, kernels, drafts, runner, sources)
    controller = AdaptiveController(costs, stops=runner.device.type == "cpu")
    counting = next((draft.head.frequencies for draft in drafts.values() if draft.head.frequencies is not None), None)
    engine = Engine(runner, Chain(sources), controller, Limits(config.max_batch, CHUNK), counting)
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
        grammars=Grammars(tokenizer, vocabulary, eos),
    )
    _log.info("generator_built", target=target.label, sources=intake.sources, kv_tokens=capacity, context=context)
    return Built(engine, intake, {name: draft.pairing for name, draft in drafts.items()})


class _Head(NamedTuple):
    """A draft's output layer.

    Attributes:
        kept: Its token ids; None for all.
        open: Whether a call's own tokens may be proposed, too; not where the ids were given.
        frequencies: Where produced tokens are counted; None where nothing asks for them.
    """

    kept: tuple[int, ...] | None = None
    open: bool = False
    frequencies: Frequencies | None = None


@dataclass(frozen=True, slots=True)
class _Draft:
    """A draft model on its way into the engine.

    Attributes:
        spec: What was asked for.
        loaded: The model; after `_lighten` with its kernels and its output layer.
        pairing: How it fits the target.
        head: Its output layer.
        kernels: What its linear layers run on.
        others: What its output layer can be asked for beside the kept tokens.
    """

    spec: DraftModel
    loaded: Loaded
    pairing: Pairing
    head: _Head
    kernels: str = ""
    others: Others | None = None


def _pair(spec: DraftModel, config: GeneratorConfig, target: Loaded, tokenizer: Any, eos: Sequence[int]) -> _Draft:
    """Loads a draft model and refuses one that does not fit, before any model runs."""
    loaded = _load(spec.model, config)
    if loaded.model.device != target.model.device:
        raise ConfigError(
            f"draft {spec.name} is on {loaded.model.device}, the target on {target.model.device}.",
            hint="Put both on one device.",
        )
    own = _draft_tokenizer(loaded, spec.model)
    pairing = pair(target.model.config, tokenizer, loaded.model.config, own, loaded.label)
    for note in pairing.notes:
        _log.warning("draft_differs", source=spec.name, note=note)
    return _Draft(spec, loaded, pairing, _head(spec, target.label, tokenizer, eos, pairing.shared_tokens))


def _lighten(draft: _Draft) -> _Draft:
    """Cuts a draft's output layer and puts fast kernels under it; a borrowed one keeps its own, a view is cut."""
    spec, loaded = draft.spec.model, draft.loaded
    whole = None
    if draft.head.kept is not None:
        if spec.loaded and not spec.take:
            loaded = replace(loaded, model=view(loaded.model, "sdpa"))
        whole = cut_head(loaded.model, draft.head.kept)
    kernels = _fasten(spec, loaded, draft=True)
    others = None
    if whole is not None and draft.head.open:
        others = open_head(loaded.model, whole, draft.pairing.shared_tokens)
    return replace(draft, loaded=loaded, kernels=kernels, others=others)


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
    always = [*eos, *tokenizer.all_special_ids]
    if wanted != "auto" and wanted >= _ROOMY:
        always += structural(tokenizer.get_vocab())
    kept = frequent(wanted, counts or frequencies.read(), always, shared)
    _log.info("draft_vocabulary", source=spec.name, tokens=shared if kept is None else len(kept))
    return _Head(kept, kept is not None, None if counts else frequencies)


def _fasten(spec: Model, loaded: Loaded, *, draft: bool = False) -> str:
    """Puts the fastest kernels under a model that is ours; a borrowed one runs as it is."""
    if spec.loaded and not spec.take:
        return "plain"
    # What was handed over may have been changed, and keywords may choose other weights: neither is what a name says.
    source = "" if spec.loaded or spec.kwargs else loaded.source
    return fasten(loaded.model, quantization_of(spec, draft=draft), label=loaded.label, source=source)


def _costs(
    config: GeneratorConfig,
    target: Loaded,
    kernels: str,
    drafts: Mapping[str, _Draft],
    runner: Runner,
    sources: Sequence[Proposer],
) -> Costs:
    """What target and draft models cost here; measured only where something can draft."""
    if not sources:
        return Costs(Measured(((1, 1.0),)), {})
    key = _costs_key(config.target, target, kernels)
    measured = load_or_measure(runner, key, context=context_of(target.model.config))
    others = {}
    for source in sources:
        if isinstance(source, DraftModelProposer):
            draft = drafts[source.name]
            key = _costs_key(draft.spec.model, draft.loaded, draft.kernels, draft.head.kept)
            context = context_of(draft.loaded.model.config)
            others[source.name] = load_or_measure(source.runner, key, context=context)
    return Costs(measured, others)


def _costs_key(spec: Model, loaded: Loaded, kernels: str, kept: Sequence[int] | None = None) -> str:
    """Names what was loaded, and how; empty for a model that was handed in, which may be anything."""
    if spec.loaded:
        return ""
    return f"{spec!r} {kernels} {kept and len(kept)} {loaded.model.dtype} {loaded.model.config.to_json_string()}"


def _load(spec: Model, config: GeneratorConfig) -> Loaded:
    return load_model(spec, device=config.device, dtype=config.dtype, progress=config.progress)


def _draft_tokenizer(loaded: Loaded, spec: Model) -> Any | None:
    """The draft's own tokenizer; None for a loaded draft that came without one."""
    if spec.loaded and not loaded.source:
        return None
    return load_tokenizer(None, loaded, spec)


def _tokenizer_eos(tokenizer: Any) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)

"""An audit of losslessness, on a user's own models, prompts and sampling settings.

Text is generated through `Generator`. What judges it takes no part in generating: dense forwards of the models
themselves over the finished text, and the statistics of `fastdraft.audit.evidence`.

Shapes: T tokens of a text, V usable vocabulary.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from fastdraft.audit.evidence import Rows, differences, join, read, weigh
from fastdraft.audit.report import AuditReport, Difference, Greedy, Sampled
from fastdraft.config import (
    DraftModel,
    GeneratorConfig,
    ModelLike,
    NGram,
    Prompt,
    SamplingParams,
    Source,
    make_config,
)
from fastdraft.errors import ConfigError
from fastdraft.generator import Generator
from fastdraft.lending import lend, load_models
from fastdraft.models.dense import dense_logits
from fastdraft.models.loading import Loaded
from fastdraft.models.pairing import usable_vocabulary
from fastdraft.precedence import resolve_params
from fastdraft.prompt import PromptEncoder
from fastdraft.results import Completion
from fastdraft.workload import built_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["AuditReport", "Difference", "Greedy", "Sampled", "audit"]

SMALL = 10**9  # parameters of all models together up to which "auto" computes in float32
TEXTS, LEAST = 16, 32  # texts at once and tokens of each, unless prompts are more or tokens fewer
OFF: Mapping[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "min_tokens": 0,
}

# What another order of the same sums explains, by dtype: root mean square between two log-probabilities of a token.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.02}
COARSE = 0.15  # bfloat16
TAIL = 4.0  # a single one may be this many times further off


class _Text(NamedTuple):
    prompt: tuple[int, ...]
    completion: Completion[Any]


class _Draft(NamedTuple):
    """A draft model, and what it may propose: the first ``shared`` ids, or of these only those in ``kept``."""

    model: PreTrainedModel
    shared: int
    kept: tuple[int, ...] | None


def audit(
    target: ModelLike,
    draft: ModelLike | Source | Sequence[ModelLike | Source] | None = "auto",
    prompts: Sequence[Prompt] | None = None,
    *,
    params: SamplingParams | None = None,
    tokens: int = 2000,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    level: float = 1e-3,
    progress: bool = False,
) -> AuditReport:
    """Tests whether the output of a target with these drafts is distributed as the target's own.

    Takes as long as generating the text and reading it once more. Each model is in memory once, and is read as the
    generator runs it: with its kernels, quantised where you ask for it or it is a draft's default.

    Args:
        target: As `Generator` takes it.
        draft: As `Generator` takes it. Of several draft models the first defines S_t.
        prompts: Several that are like your own; None takes those that come along.
        params: Your sampling: temperature, top_k, top_p, min_p, gamma, source, alpha, acceptance_rule, verification
            (rejection unless it is set), seed (0 unless set), max_tokens of a text, and what ends one. Penalties,
            logit_bias and min_tokens are off, also those of the model's own generation config.
        tokens: About how many to judge. At temperature 0 each prompt is answered once, so there may be fewer.
        tokenizer: As `Generator` takes it.
        device: As `Generator` takes it.
        dtype: ``"auto"``: float32 for models of at most a billion parameters together, else as stored.
        level: Chance of calling a lossless pair lossy.
        progress: Show bars.

    Raises:
        ConfigError: An argument that cannot be used, penalties among them.
        FastDraftError: Whatever `Generator` and its calls raise.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"tokens is {tokens!r}, expected an integer of at least 1.")
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level < 1:
        raise ConfigError(f"level is {level!r}, expected a number between 0 and 1.")
    if prompts is not None and (isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence) or not prompts):
        raise ConfigError("prompts is not a list with prompts in it.", hint="Pass several, or None.")
    asked = _without_penalties(params)
    config = make_config({"target": target, "draft": draft, "tokenizer": tokenizer, "device": device, "dtype": dtype})
    models = _load(config, progress)
    config = lend(config, models, take=True)
    asked = _settle(asked, models[0].sampling)
    computed = models[0].model.dtype
    with Generator.from_config(config) as generator:
        vocabulary = usable_vocabulary(generator.tokenizer, models[0].model.config.get_text_config().vocab_size)
        if prompts is None:
            prompts = list(built_in(chat=bool(generator.tokenizer.chat_template)).values())
        encoder = PromptEncoder(generator.tokenizer, vocabulary)
        drafting = _first_draft(generator, config, models)
        texts = list(_generate(generator, [encoder.encode(prompt) for prompt in prompts], asked, tokens, progress))
    lookups = frozenset(source.name for source in config.draft if isinstance(source, NGram))
    limit = ROUNDING.get(computed, COARSE)
    evidence, rounding = _examine(
        models[0].model, drafting, texts, vocabulary, asked, lookups, limit=limit, level=level, progress=progress
    )
    stats = [text.completion.stats for text in texts]
    others = iter(models[1:])
    return AuditReport(
        target=models[0].label,
        draft=tuple(next(others).label if isinstance(s, DraftModel) else s.name for s in config.draft),
        dtype=str(computed).removeprefix("torch."),
        params=asked,
        level=level,
        texts=len(texts),
        tokens=sum(text.completion.completion_tokens for text in texts),
        draft_tokens=sum(s.draft_tokens for s in stats),
        accepted_tokens=sum(s.accepted_tokens for s in stats),
        rounding=rounding,
        rounding_limit=limit,
        evidence=evidence,
    )


def _without_penalties(params: SamplingParams | None) -> SamplingParams:
    """Refuses what the audit does not model, and switches it off where a model's own config asks for it."""
    if params is None:
        params = SamplingParams()
    elif not isinstance(params, SamplingParams):
        raise ConfigError(f"params is a {type(params).__name__}, expected SamplingParams.")
    for name, off in OFF.items():
        given = getattr(params, name)
        if given is not None and given != off:
            raise ConfigError(
                f"{name} is {given!r}, but an audit runs without penalties, biases and bans.",
                hint=f"Leave {name} out; what it does to p is the same with and without speculation.",
            )
    return params.model_copy(update=dict(OFF))


def _settle(params: SamplingParams, sampling: Mapping[str, Any]) -> SamplingParams:
    """Every field set; a seed by itself does not ask for invariant verification here."""
    seed = params.seed or 0
    verification = "rejection" if params.verification == "auto" else params.verification
    settled = {"seed": seed, "verification": verification, "logprobs": 0}
    return resolve_params(params, settled, defaults=SamplingParams(), model=sampling)


def _load(config: GeneratorConfig, progress: bool) -> list[Loaded]:
    """The target, then the draft models."""
    specs = [config.target, *(source.model for source in config.draft if isinstance(source, DraftModel))]
    models = load_models(config, progress=progress)
    size = sum(weight.numel() for loaded in models for weight in loaded.model.parameters())
    if config.dtype == "auto" and size <= SMALL:
        for spec, loaded in zip(specs, models, strict=True):
            if not spec.loaded and spec.dtype is None:
                loaded.model.to(torch.float32)  # type: ignore[arg-type]  # as in models.loading
    return models


def _generate(
    generator: Generator, prompts: Sequence[tuple[int, ...]], params: SamplingParams, tokens: int, progress: bool
) -> Iterator[_Text]:
    """Texts until there are enough tokens; at temperature 0 one of each prompt.

    Every text has a seed of its own: under invariant verification a shared one would share its noise, and texts that
    are not independent would look more certain than they are.
    """
    seeds = random.Random(params.seed)
    turn = itertools.cycle(prompts)
    while tokens > 0:
        count = min(max(TEXTS, len(prompts)), math.ceil(tokens / LEAST))
        if params.temperature == 0:
            count = len(prompts)
        length = min(params.max_tokens, max(LEAST, math.ceil(tokens / count)))
        some = list(itertools.islice(turn, count))
        each = [params.model_copy(update={"seed": seeds.getrandbits(63), "max_tokens": length}) for _ in some]
        for prompt, completion in zip(some, generator.batch(some, each, trace=True, progress=progress), strict=True):
            tokens -= completion.completion_tokens
            yield _Text(prompt, completion)
        if params.temperature == 0:
            return


def _first_draft(generator: Generator, config: GeneratorConfig, models: Sequence[Loaded]) -> _Draft | None:
    """The draft model that defines S_t where nothing was looked up."""
    name = next((source.name for source in config.draft if isinstance(source, DraftModel)), None)
    if name is None:
        return None
    kept = generator._worker.ask(lambda engine: engine.drafts[name].kept)
    return _Draft(models[1].model, generator.pairings[name].shared_tokens, kept)


def _examine(
    target: PreTrainedModel,
    draft: _Draft | None,
    texts: Sequence[_Text],
    vocabulary: int,
    params: SamplingParams,
    lookups: frozenset[str],
    *,
    limit: float,
    level: float,
    progress: bool,
) -> tuple[Sampled | Greedy, float]:
    """The evidence, and how far the engine's log-probabilities are from those of the dense forwards.

    Args:
        target: Read as it is.
        draft: Defines S_t where nothing was looked up.
        texts: What was generated.
        vocabulary: Usable ids.
        params: Resolved.
        lookups: Names of the sources whose drafts are point masses.
        limit: What rounding explains.
        level: Chance of a false alarm.
        progress: Show a bar.
    """
    reach = TAIL * limit
    chance = torch.Generator().manual_seed(params.seed or 0)
    rows: list[Rows] = []
    found: list[Difference] = []
    squares, count = 0.0, 0
    bar: Iterable[_Text] = tqdm(texts, unit="text") if progress else texts
    for number, text in enumerate(bar):
        token_T = torch.tensor(text.completion.token_ids, device=target.device)
        logits_TV = dense_logits(target, text.prompt, text.completion.token_ids, vocabulary)
        assert text.completion.logprobs is not None
        own_T = logits_TV.double().log_softmax(-1).gather(1, token_T[:, None])[:, 0]
        engine_T = own_T.new_tensor([entry.logprob for entry in text.completion.logprobs])
        squares, count = squares + float((engine_T - own_T).square().sum()), count + len(token_T)
        if params.temperature == 0:
            found += differences(logits_TV, token_T, reach, number)
            continue
        draft_TV = None if draft is None else _draft_logits(draft, text, vocabulary)
        uniform_T = torch.rand(len(token_T), dtype=torch.float64, generator=chance).to(target.device)
        guess_T = torch.tensor(_guesses(text.completion, lookups), device=target.device)
        rows.append(read(logits_TV, draft_TV, token_T, guess_T, uniform_T, params, reach))
    rounding = math.sqrt(squares / count)
    if params.temperature == 0:
        return Greedy(tuple(sorted(found, key=lambda d: -d.gap))), rounding
    assert params.temperature is not None
    return weigh(join(rows), rounding / params.temperature, level), rounding


def _draft_logits(draft: _Draft, text: _Text, vocabulary: int) -> Tensor:
    """[T, V]; -inf for ids it may not propose, and for all beyond its context."""
    tokens = text.completion.token_ids
    logits_TV = dense_logits(draft.model, text.prompt, tokens, draft.shared, draft.kept)
    lacking = vocabulary - draft.shared, len(tokens) - len(logits_TV)
    return torch.nn.functional.pad(logits_TV, (0, lacking[0], 0, lacking[1]), value=-torch.inf)


def _guesses(completion: Completion[Any], lookups: frozenset[str]) -> list[int]:
    """The token that a lookup had drafted at each position, found before anything was drawn; -1 where none had."""
    assert completion.trace is not None
    return [
        r.draft[i] if i < len(r.draft) and r.sources[i] in lookups else -1
        for r in completion.trace.rounds
        for i in range(len(r.tokens))
    ]

"""The tokens a draft's output layer keeps: the frequent ones (Zhao et al., "FR-Spec", 2025), and a call's own.

A draft that can propose only some tokens stays exact: its q is the distribution over just those, and what it lacks
comes from the target. An answer often takes up the rare words of its question, such as names, so the tokens of a call's
prompt and output are scored beside the frequent ones.

Shapes: R rows, C width of the model, K kept tokens, E further ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from fastdraft._log import get_logger
from fastdraft.errors import ConfigError
from fastdraft.models.store import cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Frequencies", "Others", "cut_head", "frequent", "open_head", "structural"]

_log = get_logger(__name__)

_ENOUGH = 20_000  # counted tokens before "auto" trusts them
_COVERED = 0.998
_STEP = 1024
_SAVE_EVERY = 2_000
# With a space before and a line's end behind, as vocabularies write them.
_STRUCTURE = re.compile(r'[ \u0120\u2581]?[\[\]{}:,"]+[\n\u010a]?')


class Frequencies:
    """How often the target produced each token, kept in the cache folder: counts alone, never text.

    Args:
        label: The target's, which names the file.
    """

    def __init__(self, label: str) -> None:
        name = hashlib.sha256(label.encode()).hexdigest()[:32]
        self._path = cache_dir() / "frequencies" / f"{name}.json"
        self._new: Counter[int] = Counter()

    def read(self) -> Counter[int]:
        """What earlier generators saved; empty where nothing was, or it cannot be read."""
        try:
            return Counter({int(token): int(count) for token, count in json.loads(self._path.read_text()).items()})
        except (OSError, ValueError, TypeError, AttributeError):
            return Counter()

    def add(self, tokens: Iterable[int]) -> None:
        """Counts tokens of a finished call; saved now and then."""
        self._new.update(tokens)
        if self._new.total() >= _SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Adds the new counts to the file; without room for it they are lost."""
        if not self._new:
            return
        draft: Path = self._path.with_name(f"{uuid.uuid4().hex}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(self.read() + self._new))
            os.replace(draft, self._path)
        except OSError as error:
            _log.info("frequencies_not_saved", error=str(error))
            with suppress(OSError):
                draft.unlink()
        self._new.clear()


def frequent(
    wanted: int | Literal["auto"], counts: Counter[int], always: Iterable[int], vocabulary: int
) -> tuple[int, ...] | None:
    """Token ids to keep, ascending.

    Args:
        wanted: How many; ``"auto"`` keeps what covers 99.8 % of the counted tokens, where enough were counted.
        counts: Of tokens seen.
        always: Tokens kept whatever their count, such as end-of-sequence.
        vocabulary: Ids there are.

    Returns:
        None where all are kept. Places that counts leave open go to the lowest ids: merges are numbered by frequency.
    """
    seen = [token for token, _ in counts.most_common() if token < vocabulary]
    if wanted == "auto":
        total = counts.total()
        # Tokens seen once estimate how often the next one is new (Good and Turing).
        if total < _ENOUGH or sum(count == 1 for count in counts.values()) > (1 - _COVERED) * 5 * total:
            return None
        covered, wanted = 0, 0
        for token in seen:
            if covered >= _COVERED * total:
                break
            covered += counts[token]
            wanted += 1
        wanted = -(-wanted // _STEP) * _STEP
    if wanted >= vocabulary:
        return None
    kept = {token for token in always if token < vocabulary}
    for token in (*seen, *range(vocabulary)):
        if len(kept) >= wanted:
            break
        kept.add(token)
    return tuple(sorted(kept))


def structural(words: Mapping[str, int]) -> tuple[int, ...]:
    """Tokens that JSON is held together by, such as ``":[{"``: no text that is counted need have them.

    Args:
        words: The tokenizer's vocabulary.
    """
    return tuple(sorted(token for word, token in words.items() if _STRUCTURE.fullmatch(word)))


class Others:
    """Tokens that a cut output layer scores behind its own, for as long as they are asked for.

    Args:
        whole: The layer of all tokens, which has their rows.
        tokens: Ids below this can be asked for.

    Attributes:
        ids_E: What is asked for.
    """

    ids_E: Tensor

    def __init__(self, whole: nn.Linear, tokens: int) -> None:
        self.tokens = tokens
        self._whole = whole
        self._ids: tuple[int, ...] | None = None
        self.ask(())

    def ask(self, ids: Sequence[int]) -> None:
        """Chooses for the forwards to come."""
        if tuple(ids) == self._ids:
            return
        self._ids = tuple(ids)
        self.ids_E = torch.tensor(self._ids, dtype=torch.int64, device=self._whole.weight.device)
        self._rows_EC = self._whole.weight.detach()[self.ids_E]
        self._bias_E = None if self._whole.bias is None else self._whole.bias.detach()[self.ids_E]

    def score(self, states_RC: Tensor) -> Tensor:
        """Logits [R, E]."""
        return nn.functional.linear(states_RC.to(self._rows_EC.dtype), self._rows_EC, self._bias_E)


class CutHead(nn.Module):
    """An output layer of the kept tokens and of others.

    Args:
        kept: The layer of the kept tokens.
        others: Shared with whoever asks: a view of the model has another ``CutHead``.
    """

    def __init__(self, kept: nn.Module, others: Others) -> None:
        super().__init__()
        self.kept = kept
        self.others = others

    def forward(self, states_RC: Tensor) -> Tensor:
        """Logits [R, K + E]."""
        logits_RK: Tensor = self.kept(states_RC)
        if not len(self.others.ids_E):
            return logits_RK
        return torch.cat([logits_RK, self.others.score(states_RC).to(logits_RK.dtype)], dim=-1)


def cut_head(model: PreTrainedModel, ids: tuple[int, ...]) -> nn.Linear:
    """Gives a model an output layer of its own with the rows of ``ids`` alone; the old one is left as it is.

    Args:
        model: Ours to change, or a view.
        ids: Ascending.

    Returns:
        The old one.

    Raises:
        ConfigError: An output layer whose rows are not its tokens'.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"the draft's output layer is a {type(head).__name__}; vocabulary= can only restrict a plain linear layer.",
            hint="Leave vocabulary out.",
        )
    ids_K: Tensor = torch.tensor(ids, device=head.weight.device)
    cut = nn.Linear(head.in_features, len(ids), bias=head.bias is not None, device="meta")
    cut.weight = nn.Parameter(head.weight.detach()[ids_K], requires_grad=False)
    if head.bias is not None:
        cut.bias = nn.Parameter(head.bias.detach()[ids_K], requires_grad=False)
    model.set_output_embeddings(cut)
    return head


def open_head(model: PreTrainedModel, whole: nn.Linear, tokens: int) -> Others:
    """Lets a cut output layer score other tokens, too.

    Args:
        model: Its layer was cut.
        whole: The layer before.
        tokens: Ids below this can be asked for.
    """
    others = Others(whole, tokens)
    model.set_output_embeddings(CutHead(model.get_output_embeddings(), others))
    return others

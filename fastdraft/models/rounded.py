"""Rounded weights on disk: a model is quantised once.

A folder of the cache holds one model under one rounding: safetensors shards of at most 256 MB, and an index, written
after them, that names each layer's shard. Layers it lacks are added when they are first made; a set that turns out
broken is removed, and made again next time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fastdraft._log import get_logger
from fastdraft.errors import ModelLoadError
from fastdraft.models.quantised import Rounded, Rounding
from fastdraft.models.store import cache_dir, make_folder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["RoundedWeights", "fingerprint"]

_log = get_logger(__name__)

_SCHEME = 1  # of the roundings in quantised.py; a new one leaves old folders behind
_SHARD = 256 * 10**6


def fingerprint(model: PreTrainedModel, source: str) -> str | None:
    """A name for the weights a model was loaded from; None where they are not known to be those of files.

    Args:
        model: As loaded.
        source: Folder or hub id; empty for weights that may have been changed since.
    """
    if not source:
        return None
    said: list[object]
    if commit := getattr(model.config, "_commit_hash", None):
        said = [source, commit]
    elif os.path.isdir(source):
        files = [f for f in sorted(Path(source).iterdir()) if f.suffix in (".safetensors", ".bin", ".json")]
        said = [os.path.abspath(source), [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]]
    else:
        return None
    return hashlib.sha256(json.dumps([*said, str(model.dtype)]).encode()).hexdigest()[:32]


class RoundedWeights:
    """A model's rounded weights, read where the cache has them, else collected and written.

    Args:
        key: Of `fingerprint`; None keeps nothing.
        rounding: Which of them.
    """

    def __init__(self, key: str | None, rounding: Rounding) -> None:
        self._folder = None if key is None else cache_dir() / "quantised" / f"{key}-{rounding}-{_SCHEME}"
        self._index: dict[str, str] = {}
        self._shards: dict[str, Any] = {}
        self._waiting: dict[str, Tensor] = {}
        self._written: dict[str, str] = {}

    @contextmanager
    def open(self) -> Iterator[RoundedWeights]:
        """Reads the index; on leaving without an error, names in it what was collected."""
        try:
            self._index = self._read()
            yield self
            self._finish()
        finally:
            self._shards.clear()  # unmaps them
            self._forget()

    def get(self, name: str) -> Rounded | None:
        """A layer's tensors, mapped from disk; None where there are none."""
        shard = self._index.get(name)
        if shard is None or self._folder is None:
            return None
        try:
            if shard not in self._shards:
                self._shards.clear()  # layers come in order: one shard is mapped at a time
                self._shards[shard] = safe_open(self._folder / shard, framework="pt")
            file = self._shards[shard]
            mine = [key for key in file.keys() if key.startswith(f"{name}/")]  # noqa: SIM118
            return {key.rpartition("/")[2]: file.get_tensor(key) for key in mine} or None
        except (OSError, SafetensorError) as error:
            self._discard(error)
            return None

    def put(self, name: str, rounded: Rounded) -> None:
        """Collects a layer's tensors; a full shard is written at once."""
        if self._folder is None:
            return
        self._waiting |= {f"{name}/{field}": tensor.contiguous() for field, tensor in rounded.items()}
        if sum(tensor.nbytes for tensor in self._waiting.values()) > _SHARD // 2:
            self._write()

    def _read(self) -> dict[str, str]:
        """The index on disk; empty where there is none."""
        if self._folder is None or not self._folder.is_dir():
            return {}
        try:
            layers = json.loads((self._folder / "index.json").read_text("utf-8"))["layers"]
            return {str(name): str(shard) for name, shard in layers.items()}
        except FileNotFoundError:  # it is being written
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._discard(error)
            return {}

    def _write(self) -> None:
        """Writes a shard; no room on the disk costs only the cache."""
        if self._folder is None or not self._waiting:
            return
        shard = f"{uuid.uuid4().hex}.safetensors"
        self._written |= {key.rpartition("/")[0]: shard for key in self._waiting}
        try:
            make_folder(self._folder)
            save_file(self._waiting, self._folder / shard)
        except (OSError, SafetensorError, ModelLoadError) as error:
            self._give_up(error)
        self._waiting = {}

    def _finish(self) -> None:
        """Adds what was written to the index, unless another process was first."""
        self._write()
        present = self._read()
        if self._folder is None or self._written.keys() <= present.keys():
            return
        draft = self._folder / f"{uuid.uuid4().hex}.part"
        try:
            draft.write_text(json.dumps({"layers": present | self._written}), "utf-8")
            os.replace(draft, self._folder / "index.json")
            self._written = {}
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        _log.info("quantised_cache_not_written", error=str(error))
        self._forget()
        self._folder = None

    def _forget(self) -> None:
        """Removes shards that no index names."""
        if self._folder is not None:
            for shard in set(self._written.values()):
                with suppress(OSError):
                    (self._folder / shard).unlink()
        self._written = {}

    def _discard(self, error: Exception) -> None:
        """Removes a broken set; it is made again next time."""
        _log.warning("quantised_cache_broken", error=type(error).__name__)
        self._index = {}
        self._shards.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

"""GGUF files, converted once into folders that transformers loads at once: safetensors, config and tokenizer.

transformers reads GGUF itself, slowly and into models it then refuses to save. ``convert`` has it do so once
for each file's content and keeps the result in the cache folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from tqdm.auto import tqdm

from fastdraft._log import get_logger
from fastdraft.errors import FastDraftError, MissingDependencyError, ModelLoadError
from fastdraft.models.gguf_header import GGUFHeader, check_magic, check_tensors, read_header, write_copy
from fastdraft.models.store import cache_dir, counting, make_folder

__all__ = ["convert", "converted_path"]

_log = get_logger(__name__)
_FORMAT = 1  # raised when the result changes, so that an older result is not taken for it
_SHARD = "256MB"
_CONTROL, _UNUSED = 3, 5
_DAY = 24 * 3600.0

# What ends a turn or a document. A file names one end token; models are trained to emit any of theirs.
_DOCUMENT_ENDS = frozenset(("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>"))
_TURN_ENDS = frozenset(("<end_of_turn>", "<|im_end|>", "<|end|>", "<|eot_id|>", "<|eom_id|>"))
# llama.cpp's names of the pre-tokenizers that split digits one by one; transformers takes them for GPT-2's.
_DIGIT_SPLITTERS = frozenset(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"))
_DIGITS_THEN_BYTES = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}

# transformers keeps its verbosity and progress bars for the whole process; conversions take turns at them.
TURN = threading.RLock()


def converted_path(sha256: str) -> Path:
    """Returns the folder for a file of that checksum; it exists once the file is converted."""
    return cache_dir() / "converted" / f"{sha256}-{_FORMAT}"


def convert(path: str | Path, *, progress: bool = False) -> Path:
    """Converts a GGUF file into a folder that transformers loads, once for each content.

    The weights become bfloat16, whatever their quantisation. Two processes may convert one file at once.

    Args:
        path: The file.
        progress: Show progress bars.

    Returns:
        The folder with safetensors, config, generation config and tokenizer.

    Raises:
        ModelLoadError: Not a GGUF file, a truncated one, or one that transformers cannot convert.
        MissingDependencyError: The extra ``gguf`` is not installed.
    """
    path = Path(path).expanduser().absolute()
    check_magic(path)
    folder = converted_path(_checksum(path, progress=progress))
    if folder.is_dir():
        return folder
    header = read_header(path)
    check_tensors(header, _block_sizes())
    began = time.monotonic()
    _sweep(make_folder(folder.parent))
    draft = make_folder(folder.with_name(f".{uuid.uuid4().hex}"))
    try:
        with _as_a_guest(progress=progress):
            if folder.is_dir():  # by another thread, whose turn was before
                return folder
            _write(header, draft, progress=progress)
        _publish(draft, folder)
    except FastDraftError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"{path} (architecture {header.architecture!r}) could not be converted: {type(error).__name__}: {error}",
            hint="Take another quantisation of the model, or its safetensors folder.",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _log.info("gguf_converted", path=str(path), folder=str(folder), seconds=time.monotonic() - began)
    return folder


def _checksum(path: Path, *, progress: bool) -> str:
    """Returns the file's sha256, from a note of an earlier call if its size and time are those of then."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}".encode()).hexdigest()
    note = cache_dir() / "checksums" / key
    if note.is_file():
        return note.read_text()
    digest = hashlib.sha256()
    with counting("checksum", stat.st_size, "B", progress=progress) as count, path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            count(len(block))
    draft = make_folder(note.parent) / f".{uuid.uuid4().hex}"
    draft.write_text(digest.hexdigest())
    os.replace(draft, note)
    return digest.hexdigest()


def _block_sizes() -> dict[int, tuple[int, int]]:
    """Returns elements and bytes of a block by ggml type, from the extra that the whole conversion needs."""
    try:
        import_module("accelerate")
        sizes = import_module("gguf").GGML_QUANT_SIZES
    except ImportError as error:
        raise MissingDependencyError(
            f"Reading GGUF files needs the package {error.name!r}, which is not installed.",
            hint="Install the extra: pip install 'fastdraft[gguf]'.",
        ) from error
    return {int(kind): pair for kind, pair in sizes.items()}


def _sweep(parent: Path) -> None:
    """Removes what conversions that were killed left behind."""
    for draft in parent.glob(".*"):
        with suppress(OSError):  # it may be finished or swept just now
            if time.time() - draft.stat().st_mtime > _DAY:
                shutil.rmtree(draft, ignore_errors=True)


def _publish(draft: Path, folder: Path) -> None:
    try:
        os.replace(draft, folder)
    except OSError:
        if not folder.is_dir():  # else another process was first, with the same result
            raise


@contextmanager
def _as_a_guest(*, progress: bool) -> Iterator[None]:
    """Makes transformers quick, and silent or its bars ours, in this thread; afterwards all is as before."""
    from transformers.utils import logging as settings

    me = threading.get_ident()
    shown = cast(Callable[..., Any], functools.partial(tqdm, leave=False) if progress else settings.EmptyTqdm)

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() == me:
            return shown(*args, **kwargs)
        return previous(factory, args, kwargs) if previous else factory(*args, **kwargs)

    # Its GGUF reader calls tqdm itself, past the hook. A newer transformers may have done away with it.
    name = "transformers.modeling_gguf_pytorch_utils"
    reader = import_module(name) if find_spec(name) else None
    gguf = import_module("gguf")
    root = logging.getLogger("transformers")
    with (
        TURN,
        _swapped(reader, "tqdm", lambda own: lambda *args, **kwargs: bar(own, args, kwargs)),
        # The map of names is built anew for each of the model's modules.
        _swapped(gguf, "get_tensor_name_map", functools.cache),
    ):
        level, previous = root.level, settings.set_tqdm_hook(bar)
        root.setLevel(logging.ERROR)
        try:
            yield
        finally:
            root.setLevel(level)
            settings.set_tqdm_hook(previous)


@contextmanager
def _swapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Wraps an attribute for a while, if there is one."""
    own = getattr(owner, name, None)
    if own is not None:
        setattr(owner, name, wrap(own))
    try:
        yield
    finally:
        if own is not None:
            setattr(owner, name, own)


def _write(header: GGUFHeader, folder: Path, *, progress: bool) -> None:
    source = folder / "source"
    source.mkdir()
    with counting(f"converting {header.path.name}", 2, "stage", progress=progress) as count:
        _write_tokenizer(header, source, folder)
        count(1)
        _write_model(header, source, folder)
        count(1)
    shutil.rmtree(source)


def _write_model(header: GGUFHeader, source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    file = source / "model.gguf"
    stated = f"{header.architecture}.vocab_size" in header.metadata
    size = {} if stated else {"vocab_size": len(header.tokens)}
    write_copy(header, file, vocabulary=False, tensors=True)
    try:
        config = AutoConfig.from_pretrained(source, gguf_file=file.name, **size)
    except KeyError:  # some architectures' configs are made with the vocabulary, and quickly
        write_copy(header, file, vocabulary=True, tensors=True)
        config = AutoConfig.from_pretrained(source, gguf_file=file.name)
    loader: Any = AutoModelForCausalLM
    state = torch.get_rng_state()
    model, report = loader.from_pretrained(
        source, gguf_file=file.name, config=config, dtype=torch.bfloat16, output_loading_info=True
    )
    lacking = sorted(report["missing_keys"])
    if lacking:  # transformers has drawn random numbers for them
        torch.set_rng_state(state)
        raise ModelLoadError(
            f"{header.path} lacks {len(lacking)} weights of its architecture {header.architecture!r}: "
            f"{', '.join(lacking[:3])}, ...",
            hint="It may be an adapter, or newer than this transformers.",
        )
    _warn_of_loss(header)
    # transformers still takes the model for a quantised one, and refuses to save it.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.config._name_or_path = str(header.metadata.get("general.name", header.path.stem))
    model.generation_config._from_model_config = False
    if end := _end_ids(header):
        model.generation_config.eos_token_id = end
    model.save_pretrained(folder, max_shard_size=_SHARD)


def _warn_of_loss(header: GGUFHeader) -> None:
    """Tells the log what transformers drops in silence: how positions past the trained length are scaled."""
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    factors = any(tensor.name.startswith("rope_f") for tensor in header.tensors)
    if scaling != "none" or factors:
        _log.warning("gguf_rope_scaling_lost", path=str(header.path), scaling=scaling, factors=factors)


def _end_ids(header: GGUFHeader) -> list[int]:
    """Returns the ids that end a generation: the file's own first, then the control tokens known for it."""
    named = (header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    kinds = zip(header.tokens, header.token_types, strict=False)
    ends = _DOCUMENT_ENDS | _TURN_ENDS
    if "<|return|>" in header.tokens:  # gpt-oss ends its answer with this, and each message before with that:
        ends -= {"<|end|>"}
    known = (token_id for token_id, (token, kind) in enumerate(kinds) if kind == _CONTROL and token in ends)
    return list(dict.fromkeys([*(token_id for token_id in named if token_id is not None), *known]))


def _write_tokenizer(header: GGUFHeader, source: Path, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    # Alone in a folder: beside a tokenizer.json the file would not be asked.
    file = source / "tokenizer.gguf"
    write_copy(header, file, vocabulary=True, tensors=False)
    PreTrainedTokenizerFast.from_pretrained(source, gguf_file=file.name).save_pretrained(folder)
    result = folder / "tokenizer.json"
    content = json.loads(result.read_text(encoding="utf-8"))
    if header.metadata.get("tokenizer.ggml.pre") in _DIGIT_SPLITTERS:
        content["pre_tokenizer"] = _DIGITS_THEN_BYTES
    if isinstance(content["model"]["vocab"], dict):
        content["model"]["vocab"] = _without_padding(content["model"]["vocab"], header)
    result.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


def _without_padding(vocabulary: dict[str, int], header: GGUFHeader) -> dict[str, int]:
    """Drops the ``[PAD151665]`` that llama.cpp writes where the embedding has more rows than tokens."""
    pairs = list(zip(header.tokens, header.token_types, strict=False))
    end = len(pairs)
    while end and pairs[end - 1] == (f"[PAD{end - 1}]", _UNUSED):
        end -= 1
    padding = {token for token, _ in pairs[end:]}
    return {token: number for token, number in vocabulary.items() if token not in padding}

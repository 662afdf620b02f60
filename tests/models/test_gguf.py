"""GGUF files: what is refused, what a conversion keeps, and that it leaves the process as it was."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as settings

from fastdraft.errors import MissingDependencyError, ModelLoadError
from fastdraft.models import gguf, gguf_header
from tests import tiny

PADDING = ["[PAD320]", "[PAD321]"]
ROWS = tiny.VOCABULARY + len(PADDING)
NORMAL, CONTROL, UNUSED = 1, 3, 5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def nothing_left_behind(cache: Path) -> Iterator[None]:
    yield
    assert not list(cache.rglob(".*")), "a draft folder was left"
    assert not list(cache.rglob("*.gguf")), "a copy of the model was left"


@pytest.fixture(scope="module")
def source() -> PreTrainedModel:
    """What the tiny file is written from, its weights already rounded to bfloat16."""
    model = tiny.model("llama", vocabulary=ROWS)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    return model


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rotated dimensions: interleaved pairs instead of two halves."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def tensors_of(model: PreTrainedModel) -> dict[str, np.ndarray]:
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    state = {name: value.float().numpy() for name, value in model.state_dict().items()}
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(model.config.num_hidden_layers):
        for theirs, ours in names.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                config = model.config
                heads = config.num_attention_heads if ours == "attn_q" else config.num_key_value_heads
                weight = permuted(weight, heads)
            tensors[f"blk.{layer}.{ours}.weight"] = weight
    return tensors


def write(
    path: Path,
    model: PreTrainedModel,
    *,
    architecture: str = "llama",
    omit: str = "nothing",
    edit: Callable[[GGUFWriter], None] = lambda writer: None,
) -> Path:
    """A tiny llama with a byte-level vocabulary, written as llama.cpp's converter does."""
    config, tokenizer = model.config, tiny.tokenizer()
    writer = GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ids = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    tokens = [token for token, _ in ids] + PADDING
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    kinds = [CONTROL if token in tiny.SPECIAL else UNUSED if token in PADDING else NORMAL for token in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{token[0]} {token[1]}" for token, number in ids if number >= 259])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.add_chat_template(tiny.CHATML)
    edit(writer)
    for name, tensor in tensors_of(model).items():
        if name != omit:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path: Path, source: PreTrainedModel) -> Path:
    return write(tmp_path / "tiny.gguf", source)


class TestConvert:
    def test_the_model_is_the_one_that_was_written(self, file: Path, source: PreTrainedModel) -> None:
        folder = gguf.convert(file)
        assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for name, weight in source.state_dict().items():
            assert torch.equal(model.state_dict()[name], weight), name
        ids = torch.arange(40).reshape(1, -1)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, source(ids).logits)
        assert model.config.vocab_size == ROWS  # although no key of the file tells it
        assert not hasattr(model.config, "quantization_config")

    def test_quantised_weights_are_dequantised(self, tmp_path: Path, source: PreTrainedModel) -> None:
        kind = GGMLQuantizationType.Q8_0
        weight = tensors_of(source)["blk.0.ffn_gate.weight"]

        def edit(writer: GGUFWriter) -> None:
            writer.add_tensor("blk.0.ffn_gate.weight", quants.quantize(weight, kind), raw_dtype=kind)

        path = write(tmp_path / "q8.gguf", source, omit="blk.0.ffn_gate.weight", edit=edit)
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.convert(path))
        found = model.model.layers[0].mlp.gate_proj.weight.detach().float().numpy()
        expected = torch.from_numpy(quants.dequantize(quants.quantize(weight, kind), kind))
        np.testing.assert_array_equal(found, expected.to(torch.bfloat16).float().numpy())

    def test_the_tokenizer(self, file: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(gguf.convert(file))
        expected = tiny.tokenizer()
        text = "the stars<|im_end|> are  12"
        assert tokenizer.encode(text) == expected.encode(text)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "the stars are  12"
        assert tokenizer.chat_template == tiny.CHATML
        assert tokenizer.eos_token == "<|im_end|>"
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        assert special == set(tiny.SPECIAL)

    def test_padding_is_no_token(self, file: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(gguf.convert(file))
        assert len(tokenizer) == tiny.VOCABULARY
        assert tokenizer.convert_tokens_to_ids("[PAD320]") in (None, tokenizer.unk_token_id)

    def test_digits_are_split_as_in_training(self, file: Path) -> None:
        backend = AutoTokenizer.from_pretrained(gguf.convert(file)).backend_tokenizer
        pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a  12")]
        assert pieces == ["a", "ĠĠ", "1", "2"]

    def test_a_tokenizer_beside_the_file_is_not_asked(self, file: Path) -> None:
        (file.parent / "tokenizer.json").write_text("{}")
        (file.parent / "config.json").write_text("{}")
        assert len(AutoTokenizer.from_pretrained(gguf.convert(file))) == tiny.VOCABULARY

    def test_all_end_tokens_end_a_generation(self, file: Path) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.convert(file))
        assert model.generation_config.eos_token_id == [2, 0]  # <|im_end|> as the file says, <|endoftext|>

    def test_a_second_call_takes_milliseconds(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = gguf.convert(file)
        monkeypatch.setattr(gguf, "read_header", lambda path: pytest.fail("the header was read again"))
        began = time.perf_counter()
        assert gguf.convert(str(file)) == folder
        assert time.perf_counter() - began < 0.1

    def test_the_content_is_the_key(self, file: Path, tmp_path: Path, source: PreTrainedModel) -> None:
        folder = gguf.convert(file)
        assert gguf.convert(shutil.copy(file, tmp_path / "copy.gguf")) == folder
        write(file, source, edit=lambda writer: writer.add_description("another"))
        assert gguf.convert(file) != folder

    def test_lost_rope_scaling_is_logged(
        self, tmp_path: Path, source: PreTrainedModel, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write(tmp_path / "rope.gguf", source, edit=lambda w: w.add_string("llama.rope.scaling.type", "yarn"))
        with caplog.at_level(logging.WARNING, "fastdraft"):
            gguf.convert(path)
        assert [record.msg for record in caplog.records] == ["gguf_rope_scaling_lost"]


class TestGuest:
    def test_silent_and_everything_put_back(self, file: Path, capfd: pytest.CaptureFixture[str]) -> None:
        import gguf as library
        from transformers import modeling_gguf_pytorch_utils as reader

        def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return factory(*args, **kwargs)

        before = (reader.tqdm, library.get_tensor_name_map, logging.getLogger("transformers").level)
        bars, previous = settings.is_progress_bar_enabled(), settings.set_tqdm_hook(hook)
        try:
            gguf.convert(file)
        finally:
            assert settings.set_tqdm_hook(previous) is hook
        assert capfd.readouterr() == ("", "")
        assert before == (reader.tqdm, library.get_tensor_name_map, logging.getLogger("transformers").level)
        assert settings.is_progress_bar_enabled() == bars

    def test_put_back_after_a_failure(self, tmp_path: Path, source: PreTrainedModel) -> None:
        from transformers import modeling_gguf_pytorch_utils as reader

        own = reader.tqdm
        with pytest.raises(ModelLoadError):
            gguf.convert(write(tmp_path / "odd.gguf", source, architecture="oddity"))
        assert reader.tqdm is own

    def test_progress(self, file: Path, capfd: pytest.CaptureFixture[str]) -> None:
        gguf.convert(file, progress=True)
        out, err = capfd.readouterr()
        assert out == ""
        for stage in ("checksum", "converting tiny.gguf", "de-quantizing", "Loading weights", "shards"):
            assert stage in err


class TestRefused:
    def refuse(self, path: Path, *said: str) -> None:
        with pytest.raises(ModelLoadError) as caught:
            gguf.convert(path)
        for part in (path.name, *said):
            assert part in str(caught.value)

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"<!DOCTYPE html>", "b'<!DO'"),
            (b"version https://git-lfs.github.com/spec/v1", "git-lfs"),
            (b"", "b''"),
            (b"GGUF\x03", "5 bytes"),
            (b"GGUF\x09\0\0\0" + bytes(64), "version 9"),
            (b"GGUF\0\0\0\x03" + bytes(64), "big-endian"),
            (b"GGUF\x03\0\0\0" + bytes(4), "truncated or damaged"),
            (b"GGUF\x03\0\0\0" + bytes(16), "architecture"),
            (b"GGUF\x03\0\0\0" + bytes(8) + b"\xff" * 200, "truncated or damaged"),
        ],
    )
    def test_not_a_model(self, tmp_path: Path, content: bytes, said: str) -> None:
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        self.refuse(path, said)

    def test_missing(self, tmp_path: Path) -> None:
        self.refuse(tmp_path / "none.gguf", "is not a file")

    @pytest.mark.parametrize("keep", [0.01, 0.1, 0.5, 0.95])
    def test_truncated(self, file: Path, keep: float) -> None:
        os.truncate(file, int(file.stat().st_size * keep))
        self.refuse(file, "truncated", "get the file again")

    def test_last_tensor_lacks_its_last_bytes(self, file: Path) -> None:
        os.truncate(file, file.stat().st_size - 64)
        self.refuse(file, "is truncated: it has", "ends at")

    def test_one_part_of_a_split_model(self, tmp_path: Path, source: PreTrainedModel) -> None:
        path = write(tmp_path / "part.gguf", source, edit=lambda w: w.add_uint16("split.count", 3))
        self.refuse(path, "one part of 3", "--merge")

    def test_unknown_tensor_type(self, file: Path) -> None:
        header = gguf_header.read_header(file)
        with pytest.raises(ModelLoadError, match="unknown ggml type 0"):
            gguf_header.check_tensors(header, {})

    def test_missing_weights_are_not_made_up(self, tmp_path: Path, source: PreTrainedModel, cache: Path) -> None:
        path = write(tmp_path / "lacking.gguf", source, omit="blk.1.ffn_up.weight")
        self.refuse(path, "lacks 1 weights", "model.layers.1.mlp.up_proj.weight")
        assert not list((cache / "converted").iterdir())

    def test_unknown_architecture(self, tmp_path: Path, source: PreTrainedModel) -> None:
        self.refuse(write(tmp_path / "odd.gguf", source, architecture="oddity"), "'oddity'")

    @pytest.mark.parametrize("name", ["gguf", "accelerate"])
    def test_missing_extra(self, file: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingDependencyError, match=r"fastdraft\[gguf\]"):
            gguf.convert(file)


class TestAtOnce:
    def test_threads(self, file: Path) -> None:
        found: list[Path] = []
        threads = [threading.Thread(target=lambda: found.append(gguf.convert(file))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 3
        assert len(set(found)) == 1

    def test_another_process_was_first(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        publish = gguf._publish

        def late(draft: Path, folder: Path) -> None:
            shutil.copytree(draft, folder)
            publish(draft, folder)

        monkeypatch.setattr(gguf, "_publish", late)
        assert (gguf.convert(file) / "config.json").is_file()

    @pytest.mark.slow
    def test_processes(self, file: Path) -> None:
        command = "import sys; from fastdraft.models import gguf; print(gguf.convert(sys.argv[1]))"
        runs = [
            subprocess.Popen([sys.executable, "-c", command, str(file)], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        folders = {run.communicate()[0].strip() for run in runs}
        assert [run.returncode for run in runs] == [0, 0]
        assert folders == {str(gguf.convert(file))}

    def test_what_a_killed_conversion_left_is_swept(self, file: Path, cache: Path) -> None:
        old, young = cache / "converted" / ".old", cache / "converted" / ".young"
        for folder in (old, young):
            folder.mkdir(parents=True)
        os.utime(old, (0, 0))
        gguf.convert(file)
        assert not old.exists()
        assert young.exists()
        young.rmdir()


class TestSmolLM2:
    def test_counts_on(self, smollm2_path: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
        model: Any = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
        prompt = tokenizer("1 2 3 4 5 6 7 8 9 10 11 12 13", return_tensors="pt")
        out = model.generate(**prompt, do_sample=False, max_new_tokens=24)
        said = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
        assert said.startswith(" 14 15 16 17 18 19 20 21")
        assert model.generation_config.eos_token_id[0] == tokenizer.eos_token_id == 2

    def test_files(self, smollm2_path: Path) -> None:
        names = {path.name for path in smollm2_path.iterdir()}
        assert names >= {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
        assert json.loads((smollm2_path / "config.json").read_text())["dtype"] == "bfloat16"
        shards = list(smollm2_path.glob("*.safetensors"))
        assert shards
        assert all(path.stat().st_size <= 256e6 + 1e5 for path in shards)

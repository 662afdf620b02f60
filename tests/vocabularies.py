"""Small tokenizers of the kinds that real models have, and what tests of text and prompts do with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fastdraft.prompt import PromptEncoder
from fastdraft.text import TextStream

# With markup that is added but not special, as Qwen's, and a run of spaces as Phi's.
CONTROL = ("<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<b>", "    ")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content | trim }}"
    "{% else %}{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
PIECES = [*"abcdefghijklmnopqrstuvwxyz0123456789.,!<>|_/[]'\"{}:\n", "\u2581", "\ufffd", "\u00e9", "\u65e5"]


def byte_level(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3 and Qwen: characters split over tokens anywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # "\u00e2\u0124" and the like join bytes across characters, as large vocabularies do.
    merges = [("h", "e"), ("l", "l"), ("\u0120", "a"), ("\u00f0", "\u0141"), ("\u0124", "\u00ac"), ("a", "\u00e2")]
    vocab = {piece: i for i, piece in enumerate([*CONTROL, *alphabet, *map("".join, merges), "<s>", "<0x41>"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _fast(backend, bos)


def gemma_like(*, bos: bool = True) -> PreTrainedTokenizerFast:
    """Spaces as pieces of their own, unknown characters as bytes; no space is added in front."""
    backend = _sentencepiece()
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _fast(backend, bos)


def llama_like(*, bos: bool = True) -> PreTrainedTokenizerFast:
    """A space is added in front when encoding and stripped when decoding."""
    backend = _sentencepiece()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _fast(backend, bos)


def unigram() -> PreTrainedTokenizerFast:
    """A vocabulary whose own pieces spell a control token in one."""
    pieces = [(piece, -5.0) for piece in ["<unk>", *PIECES]] + [("<|im_end|>", -1.0), ("<|im_start|>", -1.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    return _fast(backend, bos=False)


def with_template(template: str) -> dict[str, PreTrainedTokenizerFast]:
    """One of each kind, with a chat template."""
    kinds = {
        "byte_level": byte_level(),
        "byte_level_bos": byte_level(bos=True),
        "gemma_like": gemma_like(),
        "llama_like": llama_like(),
        "unigram": unigram(),
    }
    for tokenizer in kinds.values():
        tokenizer.chat_template = template
    return kinds


def _sentencepiece() -> Tokenizer:
    special = ["<unk>", "<s>", *CONTROL]
    merges = [("\u2581", "a"), ("h", "e"), ("\u2581", "he"), ("l", "l")]
    pieces = [*special, *(f"<0x{i:02X}>" for i in range(256)), *PIECES, *map("".join, merges)]
    return Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
        )
    )


def _fast(backend: Tokenizer, bos: bool) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(["<s>", *CONTROL])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>")


def byte_characters() -> list[str]:
    """How a byte-level vocabulary spells each of the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def after_dot(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text that stands after a full stop."""
    return encode(tokenizer, "." + text)[len(encode(tokenizer, ".")) :]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def stream(
    tokenizer: Any, prompt: Sequence[int], ids: Sequence[int], stop: Sequence[str] = ()
) -> tuple[list[str], str | None]:
    """The chunks of a stream, one a token and one at the end, and the stop string."""
    text = TextStream(tokenizer, prompt, stop)
    chunks = []
    found = None
    for token in ids:
        found = text.push(token)
        chunks.append(text.take())
        if found is not None:
            break
    text.finish()
    chunks.append(text.take())
    assert text.take() == ""
    assert text.text == "".join(chunks)
    return chunks, found


def user(content: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **fields}]


def encoder(tokenizer: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer, len(tokenizer))


def templated(template: str | None) -> Any:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return tokenizer


def plainly(tokenizer: Any, messages: Any, **options: Any) -> list[int]:
    """What transformers gives."""
    options = {"add_generation_prompt": True} | options
    return list(tokenizer.apply_chat_template(messages, return_dict=False, **options))


def controls(tokenizer: Any, ids: Any) -> list[str]:
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    return [piece for piece in pieces if piece in (*CONTROL, *MARKUP[:2], "<s>")]

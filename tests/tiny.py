"""Tiny random models and tokenizers: every oracle runs on these in milliseconds.

Weights are drawn wide, so that greedy outputs wander instead of repeating one token; a draft is the target with its
weights perturbed, so that it is neither always right nor always wrong.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 320
# Fields of a model whose layers every quantisation takes: int4 needs inputs by 64 and outputs by 16.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


JSON = tuple(tuple(pair.split()) for pair in ('" :', '": "', '" ,', '", "', '{ "', '" }', "[ ]"))


def tokenizer(
    size: int = VOCABULARY, merged: tuple[tuple[str, ...], ...] = (), texts: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of ``size`` tokens: three specials, 256 bytes, and merges of letter pairs.

    Args:
        size: Of the vocabulary.
        merged: Merges before those of letters, such as ``JSON``: large vocabularies have these.
        texts: Added tokens that are no control tokens, the last ids: ``<tool_call>`` of Qwen is one.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    merges = [(a, b) for a, b in merged]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    letters = "etaoinshrdlu"
    for a in letters:
        for b in letters:
            if len(vocab) < size - len(texts):
                merges.append((a, b))
                vocab[a + b] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens([AddedToken(text, normalized=False) for text in texts])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    fast.chat_template = CHATML
    return fast


def letters(count: int) -> PreTrainedTokenizerFast:
    """A vocabulary of ``count`` one-letter words: small enough to enumerate whole joint laws."""
    backend = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(count)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def config(architecture: str, *, vocabulary: int = VOCABULARY, context: int = 256, **fields: Any) -> Any:
    """A two-layer config; grouped queries where the architecture knows them."""
    names: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "head_dim": 8,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    if architecture == "gpt2":
        names = {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": context,
            "vocab_size": vocabulary,
            "tie_word_embeddings": False,
        }
        names |= {"bos_token_id": None, "eos_token_id": None}
    if architecture in ("gpt_neox", "phi", "opt", "starcoder2", "olmo2", "granite"):
        names.pop("head_dim")
    if architecture == "opt":
        names |= {"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}
    if architecture in ("gemma3_text", "gemma2"):
        names |= {"sliding_window": 24, "query_pre_attn_scalar": 8}
    if architecture == "gemma3_text":
        names |= {"layer_types": ["sliding_attention", "full_attention"]}
    if architecture == "mistral":
        names |= {"sliding_window": None}
    return AutoConfig.for_model(architecture, **(names | fields))


def model(
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    spread: float = 1.0,
    **fields: Any,
) -> PreTrainedModel:
    """A random model in evaluation mode.

    Args:
        architecture: transformers' name.
        seed: Of its weights; the global generator is left as it was.
        dtype: Of its weights.
        spread: Scales the output layer: larger is more certain.
        **fields: For `config`.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(config(architecture, **fields))
        with torch.no_grad():
            for name, weight in made.named_parameters():
                if weight.dim() > 1:
                    fan = weight.shape[-1]
                    weight.copy_(
                        torch.randn_like(weight) * (1.0 if "emb" in name or "wte" in name else 1.5 / math.sqrt(fan))
                    )
            made.get_output_embeddings().weight.mul_(spread)
    made.generation_config = transformers.GenerationConfig()
    return made.to(dtype).eval()


def perturbed(target: PreTrainedModel, noise: float, *, seed: int = 1) -> PreTrainedModel:
    """A draft that mostly agrees: the target with noise added to its weights."""
    draft = copy.deepcopy(target)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for weight in draft.parameters():
            if weight.dim() > 1:
                weight.add_(torch.randn_like(weight) * weight.std() * noise)
    return draft


def greedy(target: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """What transformers' own ``generate`` gives."""
    ids = torch.tensor([prompt])
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=tokens,
        pad_token_id=0,
        eos_token_id=None,
    )
    return [int(t) for t in out[0, len(prompt) :]]


def save(folder: Path, model: PreTrainedModel, words: Any) -> Path:
    """A model and its tokenizer in a folder."""
    log = transformers.utils.logging
    log.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        log.enable_progress_bar()
    words.save_pretrained(folder)
    return folder

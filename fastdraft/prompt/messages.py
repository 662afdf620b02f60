"""What users pass as a prompt, checked and brought into plain dicts, lists and strings."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fastdraft.errors import ConfigError

__all__ = [
    "Message",
    "add_system",
    "check_ids",
    "merge_system",
    "read_items",
    "read_messages",
    "read_options",
    "refuse_surrogates",
]

Message: TypeAlias = dict[str, Any]

_KINDS = "Pass a string, a list of messages (dicts with 'role' and 'content') or a flat list of token ids."
_SURROGATE = re.compile("[\ud800-\udfff]")
# Keywords of apply_chat_template that are not the template's.
_RESERVED = {"conversation", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask"}
_RESERVED |= {"sanitize_control_tokens", "padding", "truncation", "max_length", "tokenizer_kwargs"}


def read_items(prompt: Any) -> Sequence[Any]:
    """The elements of a prompt that is not a string; arrays and tensors become lists.

    Raises:
        ConfigError: No elements, or not a sequence.
    """
    items = prompt
    if not isinstance(prompt, Sequence) and callable(getattr(prompt, "tolist", None)):
        items = prompt.tolist()
    if isinstance(items, bytes | bytearray) or not isinstance(items, Sequence):
        hint = "Put the message in a list." if isinstance(prompt, Mapping) and "role" in prompt else _KINDS
        raise ConfigError(
            f"the prompt is of type {type(prompt).__name__}, expected a string, messages or ids.", hint=hint
        )
    if not items:
        raise ConfigError("the prompt is empty: it holds no messages and no token ids.", hint=_KINDS)
    return items


def check_ids(items: Sequence[Any], vocabulary: int) -> tuple[int, ...]:
    """Token ids as plain ints.

    Raises:
        ConfigError: Something else among them, or an id the model does not know.
    """
    ids = []
    for index, item in enumerate(items):
        try:
            token = -1 if isinstance(item, bool) else operator.index(item)
        except TypeError:
            token = -1
        if not 0 <= token < vocabulary:
            raise _bad_id(item, index, vocabulary)
        ids.append(token)
    return tuple(ids)


def _bad_id(item: Any, index: int, vocabulary: int) -> ConfigError:
    if hasattr(item, "__index__") and not isinstance(item, bool):
        return ConfigError(
            f"prompt[{index}] is the token id {item}, expected 0 to {vocabulary - 1}.",
            hint="Encode the prompt with this model's own tokenizer.",
        )
    return ConfigError(
        f"prompt[{index}] is a {type(item).__name__}, expected a token id or a message.",
        hint=f"{_KINDS} For several prompts use batch().",
    )


def read_messages(items: Sequence[Any], *, fold: bool) -> list[Message]:
    """Messages as plain dicts that share nothing with the caller's, folded where asked.

    Raises:
        ConfigError: A message that is none, names its index.
    """
    messages = [_read_message(item, f"messages[{index}]") for index, item in enumerate(items)]
    return merge_system(messages) if fold else messages


def _read_message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise ConfigError(
            f"{where} is a {type(item).__name__}, expected a message: a dict with 'role' and 'content'.",
            hint="Objects of other libraries have a method for it, such as model_dump().",
        )
    message: Message = _plain(item)
    refuse_surrogates(message, where)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ConfigError(f"{where} has no 'role'.", hint="Add one, such as 'user', 'assistant' or 'system'.")
    if content is None and message.get("tool_calls"):
        return message
    if content is None:
        raise ConfigError(f"{where} has no 'content'.", hint="Add one; it may be an empty string.")
    if not isinstance(content, str | list):
        raise ConfigError(
            f"the 'content' of {where} is a {type(content).__name__}, expected a string or a list of parts.",
            hint="Pass text, or parts such as {'type': 'text', 'text': ...}.",
        )
    return message


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for the chat template, as plain values, with a turn of the assistant to begin.

    Raises:
        ConfigError: One that is not the template's.
    """
    if reserved := _RESERVED.intersection(options):
        raise ConfigError(
            f"template_options holds {sorted(reserved)[0]!r}, which is not a setting of the chat template.",
            hint="Leave it out; prompts are always encoded whole, to token ids.",
        )
    plain: dict[str, Any] = _plain(options)
    refuse_surrogates(plain, "template_options")
    plain.setdefault("add_generation_prompt", not plain.get("continue_final_message"))
    return plain


def add_system(items: Sequence[Any], text: str) -> list[Any]:
    """Messages with a text more in their system message, or with one."""
    first = items[0]
    if isinstance(first, Mapping) and first.get("role") == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *items[1:]]
    return [{"role": "system", "content": text}, *items]


def merge_system(messages: list[Message]) -> list[Message]:
    """Puts the system messages, a blank line after each, before the first user message's text.

    Raises:
        ConfigError: No user message.
    """
    system = [message for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    if not system:
        return messages
    at = next((index for index, message in enumerate(rest) if message["role"] == "user"), None)
    if at is None:
        raise ConfigError(
            "fold_system=True puts the system text into the first user message, but there is none.",
            hint="Add a user message.",
        )
    text = "".join(_text(message["content"]) + "\n\n" for message in system)
    content: Any = rest[at].get("content") or ""
    folded = [{"type": "text", "text": text}, *content] if isinstance(content, list) else text + content
    return [*rest[:at], {**rest[at], "content": folded}, *rest[at + 1 :]]


def refuse_surrogates(value: Any, where: str) -> None:
    """Raises ConfigError where a string in a value holds half a UTF-16 pair, which no tokenizer takes."""
    if isinstance(value, str):
        if found := _SURROGATE.search(value):
            raise ConfigError(
                f"{where} has a lone surrogate (U+{ord(found[0]):04X}) at index {found.start()}, which is "
                "not a character and cannot be encoded in UTF-8.",
                hint="Decode the text with the right codec, or remove it with "
                "text.encode('utf-8', 'ignore').decode('utf-8').",
            )
    elif isinstance(value, Mapping):
        for key, item in value.items():
            refuse_surrogates(key, f"a key of {where}")
            refuse_surrogates(item, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            refuse_surrogates(item, f"{where}[{index}]")


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    return str(content or "")


def _plain(value: Any) -> Any:
    """The value in dicts and lists; what the template would unpack by itself is unpacked."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, type):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    return value

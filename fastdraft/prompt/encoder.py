"""The encoder: what is tokenised as it is, what the chat template renders, what is only checked."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from fastdraft.config import Prompt
from fastdraft.errors import ConfigError
from fastdraft.prompt.control import ControlTokens, Spans, unmark, unused_characters
from fastdraft.prompt.messages import (
    Message,
    add_system,
    check_ids,
    merge_system,
    read_items,
    read_messages,
    read_options,
    refuse_surrogates,
)

__all__ = ["PromptEncoder"]

_SETTINGS = {"chat_template", "continue_final_message"}  # options that hold no text of the prompt


class PromptEncoder:
    """Turns prompts into token ids. May be used from many threads at once; never changes the tokenizer.

    Args:
        tokenizer: A transformers tokenizer.
        vocabulary: Number of ids the model knows.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._control = ControlTokens(tokenizer)
        self._lock = threading.Lock()

    def encode(
        self,
        prompt: Prompt,
        *,
        template_options: Mapping[str, Any] | None = None,
        fold_system: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        without: str = "",
    ) -> tuple[int, ...]:
        """Returns the ids of a prompt.

        A string is taken as it is, with the special tokens the tokenizer adds by itself; control tokens in it
        are control tokens. Messages are rendered by the chat template; a control token written in a message,
        a tool or another option is encoded as ordinary text. Ids are checked and passed on.

        Args:
            prompt: A string, a list of messages, or a list (or 1-D array) of ids.
            template_options: Keywords for the chat template: ``tools``, ``continue_final_message``,
                ``chat_template``, or whatever the template itself reads. Only with messages.
            tools: Told to the template of messages; any other prompt speaks of its tools itself.
            without: What a system message says where the template knows no tools.
            fold_system: Puts the system messages before the first user message's text, for templates that
                refuse them.

        Raises:
            ConfigError: A prompt that is empty, of another type, or refused by the template.
        """
        items = [prompt] if isinstance(prompt, str) else read_items(prompt)
        if (template_options or fold_system) and not isinstance(items[0], Mapping):
            raise ConfigError(
                f"{'template_options' if template_options else 'fold_system'} is for messages, and this prompt is not "
                "rendered by a chat template.",
                hint="Pass the prompt as messages, [{'role': 'user', 'content': ...}], or leave them out.",
            )
        if isinstance(prompt, str):
            refuse_surrogates(prompt, "the prompt")
            return self._checked(self._tokenize(prompt, add_special_tokens=True)["input_ids"])
        if not isinstance(items[0], Mapping):
            return check_ids(items, self._vocabulary)
        options = read_options(template_options or {})
        if tools and "tools" in options:
            raise ConfigError("tools were given twice, in template_options too.", hint="Pass tools= alone.")
        if tools and "tools" in (self.template(options) or ""):
            options["tools"] = list(tools)
        elif tools:
            items = add_system(items, without)
        messages = read_messages(items, fold=fold_system)
        return self._checked(self._chat(messages, options))

    def template(self, options: Mapping[str, Any] | None) -> str | None:
        """The chat template that messages with these options are rendered by; None where there is none."""
        own = getattr(self._tokenizer, "chat_template", None)
        if isinstance(own, Mapping):
            own = own.get("tool_use", own.get("default"))
        chosen = (options or {}).get("chat_template") or own
        return chosen if isinstance(chosen, str) else None

    def _checked(self, ids: Sequence[int]) -> tuple[int, ...]:
        if not ids:
            raise ConfigError("the prompt is empty: its text gives no tokens.", hint="Pass some text.")
        if (token := max(ids)) >= self._vocabulary:
            piece = self._tokenizer.convert_ids_to_tokens([token])[0]
            raise ConfigError(
                f"the prompt holds {piece!r}, token id {token}, but the model knows only ids below {self._vocabulary}.",
                hint="Use the model's own tokenizer, or leave that text out.",
            )
        return tuple(ids)

    def _tokenize(self, text: str, **options: Any) -> Any:
        options |= {"return_attention_mask": False, "verbose": False}
        if self._control.thread_safe:
            return self._tokenizer(text, **options)
        with self._lock:
            return self._tokenizer(text, **options)

    def _chat(self, messages: list[Message], options: dict[str, Any]) -> list[int]:
        if not (options.get("chat_template") or getattr(self._tokenizer, "chat_template", None)):
            raise ConfigError(
                "this model's tokenizer has no chat template (tokenizer.chat_template is not set), so "
                "messages cannot be rendered.",
                hint="Pass the prompt as a string, Generator(..., tokenizer=) with one that has a template, "
                "or template_options={'chat_template': ...}.",
            )
        try:
            rendered = self._render(messages, options)
        except Exception as error:  # a template may raise anything
            raise self._refusal(messages, options, error) from error
        if written := self._control.written_in([messages, _texts_of(options)]):
            return self._kept_apart(messages, options, written)
        return list(self._tokenize(rendered, add_special_tokens=False)["input_ids"])

    def _render(self, messages: list[Message], options: Mapping[str, Any]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def _refusal(self, messages: list[Message], options: Mapping[str, Any], error: Exception) -> ConfigError:
        said = str(error).rstrip(".") or type(error).__name__
        if any(message["role"] == "system" for message in messages):
            try:
                self._render(merge_system(messages), options)
            except Exception:  # then the system role is not all it minds
                pass
            else:
                return ConfigError(
                    f"the model's chat template refuses the 'system' role: {said}.",
                    hint="Pass fold_system=True to put the system text before the first user message.",
                )
        return ConfigError(
            f"the model's chat template cannot render these messages: {said}.",
            hint="Change the messages or template_options to what it accepts, or pass a string prompt.",
        )

    def _kept_apart(self, messages: list[Message], options: dict[str, Any], written: list[str]) -> list[int]:
        """The ids of messages in which control tokens are written: those become ordinary text.

        They are found by rendering again with private-use characters around them. A template that cuts the
        model's own markup (``</think>``) out of earlier turns must see it as it is: the second attempt.
        """
        marks = unused_characters([messages, options])
        for own_words in (False, True):
            marked = self._control.mark(messages, marks, own_words=own_words)
            texts = self._control.mark(_texts_of(options), marks)
            try:
                plain = self._render(messages, options)
                text, spans = unmark(self._render(marked, {**options, **texts}), marks)
            except Exception:  # the template minds the marks
                continue
            if text == plain:
                return self._encode_apart(text, spans, written)
        raise _cannot_keep_apart(written, "the chat template changes that text")

    def _encode_apart(self, text: str, spans: Spans, written: list[str]) -> list[int]:
        """The ids of a text, but ordinary ones for the control tokens that touch a span."""
        control = self._control
        if not control.fast:
            raise _cannot_keep_apart(written, "this tokenizer is not a fast one")
        encoding = self._tokenize(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = []
        at = 0
        for token, (start, end) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
            while at < len(spans) and spans[at][1] <= start:
                at += 1
            if not control.is_at(token, text[start:end]):
                raise _cannot_keep_apart(written, "this tokenizer does not tell where its tokens begin")
            if token in control.texts and at < len(spans) and spans[at][0] < end:
                ids += control.as_text(text[start:end])
            else:
                ids.append(token)
        return ids


def _texts_of(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _SETTINGS}


def _cannot_keep_apart(written: list[str], reason: str) -> ConfigError:
    return ConfigError(
        f"a message holds the text of control tokens ({', '.join(map(repr, written))}), and {reason}, so "
        "that it cannot be kept apart from the chat template's own.",
        hint="Remove or change that text.",
    )

"""A fastdraft generator as an outlines model: what outlines constrains is written with drafts.

``outlines.Generator(FastDraft(gen), Invoice)("...")`` gives the text, as outlines does; ``gen.generate(...,
output_type=Invoice)`` gives the value, compiles faster and masks without outlines' processors.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from outlines.inputs import Chat
from outlines.models.transformers import Transformers

from fastdraft.errors import FastDraftError, OutputValidationError
from fastdraft.generator import Generator
from fastdraft.results import Completion

__all__ = ["FastDraft"]


class FastDraft(Transformers):
    """An outlines model for its types and its backends outlines_core and llguidance.

    As outlines does, it gives back the text as far as it came, also where ``max_tokens`` cut it off.

    Keywords of a call are those of `Generator.generate`: ``max_tokens``, ``temperature``, ``seed``, ...

    Args:
        generator: Stays the caller's to close.
    """

    def __init__(self, generator: Generator) -> None:
        # outlines sets the padding of the tokenizer it is given.
        super().__init__(cast("Any", generator), copy.deepcopy(generator.tokenizer))
        self.generator = generator

    def generate(self, model_input: Any, output_type: Any = None, **options: Any) -> str:
        """The text of one answer.

        Args:
            model_input: Text, which becomes a user's message where there is a chat template, or a ``Chat``.
            output_type: The logits processor that outlines built.
            **options: Of `Generator.generate`.
        """
        return _text(self._batch([model_input], output_type, options)[0])

    def generate_batch(
        self, model_input: Sequence[Any], output_type: Any = None, **options: Any
    ) -> list[str | list[str]]:
        """The texts of several answers, written together."""
        return [_text(out) for out in self._batch(model_input, output_type, options)]

    def generate_stream(self, model_input: Any, output_type: Any = None, **options: Any) -> Iterator[str]:
        """The pieces of one answer, as they come."""
        stream = self.generator.stream(self._prompt(model_input), output_type=output_type, **options)
        with stream, contextlib.suppress(OutputValidationError):
            for chunk in stream:
                if chunk.text:
                    yield chunk.text

    def _batch(self, inputs: Sequence[Any], output_type: Any, options: Mapping[str, Any]) -> list[Any]:
        prompts = [self._prompt(item) for item in inputs]
        return self.generator.batch(prompts, output_type=output_type, return_exceptions=True, **options)

    def _prompt(self, model_input: Any) -> Any:
        if isinstance(model_input, Chat):
            return model_input.messages
        return [{"role": "user", "content": model_input}] if self.hf_tokenizer.chat_template else model_input


def _text(out: Completion[Any] | FastDraftError) -> str:
    if isinstance(out, OutputValidationError):
        return out.completion.text
    if isinstance(out, FastDraftError):
        raise out
    return out.text

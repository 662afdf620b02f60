"""Prompts to token ids: raw text, chat messages, ids. Text inside messages never becomes a control token."""

from __future__ import annotations

from fastdraft.prompt.encoder import PromptEncoder

__all__ = ["PromptEncoder"]

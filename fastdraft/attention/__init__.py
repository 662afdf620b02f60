"""Attention over paged KV: one protocol, one file a kernel."""

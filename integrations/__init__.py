"""Adapters to other frameworks, installed as `fastdraft.integrations`.

One module a framework, named for it, with an extra of its own: fastdraft itself needs none of them.
"""

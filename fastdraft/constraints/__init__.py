"""Constraints: what an output type allows next, and what a finished text means."""

"""Peers that need a Python environment of their own: each file is a program that answers JSON lines.

They run under another interpreter, so they import neither fastdraft nor each other's libraries.
"""

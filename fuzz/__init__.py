"""Fuzzing: what reads bytes of others is fed bytes that nobody would send.

A target takes bytes and raises when something happened that must not; else it names what came of them
(`targets.py`). Two drivers feed it: `guided.py` (atheris, which looks for inputs that reach new code) and
`plain.py` (mutation of the corpus, without any dependency). `python -m fuzz` is the command.
"""

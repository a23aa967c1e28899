"""Benchmarks: each a command, `python -m benchmarks.NAME`, run from the project's folder.

A command prints a table with the limit beside each figure, and one JSON line last. What is compared is
measured in one run, in turns, so that a ratio holds on any machine and survives a noisy one.
"""

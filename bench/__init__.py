"""Benchmarks: one command a file, run from the checkout (``python -m bench.collective_matmul --help``).

Every command prints a table and can write JSON. ``harness/`` launches ranks, times and checks; ``methods/`` holds what
is timed.
"""

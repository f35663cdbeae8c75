"""Benchmarks. Each file here is a command, to be run from the checkout (``python -m bench.collective_matmul --help``).

Every command prints a table and can write JSON. ``harness/`` launches the ranks, measures times and checks results.
``methods/`` contains the methods that are timed.
"""

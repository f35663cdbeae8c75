"""Emulation of W ranks by one real rank and peers that are only memory: `bench.collective_matmul --emulate W`.

The real rank is rank 0. It makes the calls of a program, with the real planner's plan for W ranks, on the real
executor. Its peers are *phantoms*. A phantom consists of memory that already contains its shard and partial results
(`contents`), and of signals (`mirror`). Copies from and to a phantom cross a link of a chosen speed (`link`).
"""

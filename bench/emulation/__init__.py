"""One real rank and peers that are only memory: `python -m bench.collective_matmul --emulate W`.

The real rank is rank 0. It makes the calls of a program, with the real planner's plan for W ranks, on the real
executor. Its peers are *phantoms*: memory in which their shards and partial results lie already (`contents`), and
signals (`mirror`). What comes from a phantom, or goes to one, passes a link of a chosen speed (`link`).
"""

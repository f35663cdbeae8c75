"""Random programs of ops on GPUs, for a chosen time: ``python -m tests.gpu.fuzz --seconds 600 --seed 7``.

A program is a few calls of any ops on any paths, forward and backward, with inputs of any strides, on a lane and a
stream. It runs several times with different numbers: eagerly, and as a CUDA graph that is replayed between eager calls.
The host does not wait in between. Graphs of earlier programs are replayed, too. Inputs are zeros and ones, so results
are compared bit by bit with plain PyTorch on the CPU, in float64, on the inputs of all ranks.

- `programs`: draws programs. They depend only on a seed and a number, so every rank has the same program.
- `cases`: ops for which other tests have no cases, or fewer forms.
- `session`: runs programs on a rank.

On the host GPU: ``python -m tests.host_gpu.run -m tests.gpu.fuzz``. If a program fails, it is printed with the
arguments that reproduce it.
"""

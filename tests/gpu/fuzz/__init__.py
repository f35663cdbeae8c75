"""Random programs of ops on GPUs, for as long as one likes: ``python -m tests.gpu.fuzz --seconds 600 --seed 7``.

A program is a few calls of any ops on any paths, forward and backward, on inputs with any strides, on a lane and a
stream. It runs several times on other numbers: eagerly, and as a CUDA graph replayed between eager calls, without the
host waiting in between; graphs of earlier programs are replayed too. Zeros and ones go in, so that what comes out is
compared bit by bit with plain PyTorch on the CPU, in float64, on the inputs of all ranks.

- `programs`: what is drawn, from a seed and a number alone, so that every rank has the same program.
- `cases`: ops that other tests have no case for, or not in so many forms.
- `session`: runs programs on a rank.

On the host GPU: ``python -m tests.host_gpu.run -m tests.gpu.fuzz``. A program that fails is printed with the arguments
that draw it again.
"""

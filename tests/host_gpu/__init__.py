"""A GPU emulated by threads of the host. It runs the GPU tests, and so the code for GPUs, on machines without a GPU.

::

    python -m tests.host_gpu [arguments of pytest]     (in the tree of a CUDA build: `make host-gpu`)
    python -m tests.host_gpu.run [-m module | file] [its arguments]

The second line runs any Python program on it, such as
``python -m tests.host_gpu.run -m symm_overlap.cli train --compare --device cuda --tp 2``. There is one GPU, and ranks
share it.

Libraries of the host GPU replace those of CUDA (libcudart.so.13, which includes the driver's functions, and
libnvidia-ml.so.1). The package and torch, compiled for CUDA, use them without any change.

- Streams are threads with queues. Events, graphs, memory operations and memory shared between processes do what CUDA
  guarantees, and no more. A graph runs in any order that its dependencies allow, loading code late waits for the whole
  device, and calls that CUDA forbids during a capture fail (`runtime/`).
- The kernels of csrc/cuda are compiled by g++ from their own sources (`kernels/`, `build.py`).
- torch's kernels are replaced by those for CPUs, which run on the threads of the streams (`site/host_gpu_aten.py`).
  Attention is not fused.
- Triton's kernels run in its interpreter, on the threads of the streams (`site/host_gpu_triton.py`).

A call of a function that is not emulated ends the process and prints the name of the function. The host GPU cannot show
speed, the memory order of a GPU, PTX, and the code that nvcc and Triton generate.
"""

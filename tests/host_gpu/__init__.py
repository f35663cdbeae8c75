"""A GPU made of threads of the host: it runs the GPU tests, and with them the code for GPUs, where there is no GPU.

::

    python -m tests.host_gpu [arguments of pytest]     (in the tree of a CUDA build: `make host-gpu`)
    python -m tests.host_gpu.run [-m module | file] [its arguments]

The second line runs any Python program there, such as
``python -m tests.host_gpu.run -m symm_overlap.cli train --compare --device cuda --tp 2``. There is one GPU, and ranks
share it.

Three libraries stand for those of CUDA (libcudart.so.13 with the driver's functions in it, libnvidia-ml.so.1), and the
package and torch use them as they are, compiled for CUDA.

- Streams are threads with queues. Events, graphs, memory operations and memory shared between processes do what CUDA
  documents, and no more: a graph runs in any order that it allows, code that is loaded late waits for the whole device,
  and what CUDA forbids during a capture fails (`runtime/`).
- The kernels of csrc/cuda are compiled by g++, from their own sources (`kernels/`, `build.py`).
- torch's kernels are replaced by those for CPUs, on the threads of the streams (`site/host_gpu_aten.py`). Attention is
  not fused.
- Triton's kernels run in its interpreter, on the threads of the streams (`site/host_gpu_triton.py`).

What is not imitated ends the process with its name. What this cannot show: how fast anything is, the memory order of a
GPU, PTX, and the code that nvcc and Triton generate.
"""

"""The back end for NVIDIA GPUs, built on torch's own symmetric memory."""

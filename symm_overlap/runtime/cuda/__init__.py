"""The back end for NVIDIA GPUs, on torch's own symmetric memory."""

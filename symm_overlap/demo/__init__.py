"""The demonstration behind ``symm-overlap train``: a small language model, its text, its training and its ranks."""

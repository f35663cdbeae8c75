"""The demo that ``symm-overlap train`` runs: a small language model, its text, its training and its ranks."""

"""``symm-overlap info``."""

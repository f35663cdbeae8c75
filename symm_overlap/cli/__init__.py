"""The commands people run: ``symm-overlap train``, ``symm-overlap info``, ``symm-overlap plan``."""

"""The sub-commands of ``symm-overlap``: ``train``, ``info``, ``plan``, ``schedule``, ``fsdp`` and ``profile``."""

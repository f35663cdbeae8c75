"""What plugs into torch's FSDP2 (``fully_shard``)."""

from .apply import apply

__all__ = ["apply"]

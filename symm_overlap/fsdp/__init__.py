"""For models that are trained with torch's FSDP2 (``fully_shard``), and linear layers with sharded weights."""

from .apply import apply
from .shard_linears import shard_linears
from .sharded_linear import ShardedLinear

__all__ = ["ShardedLinear", "apply", "shard_linears"]

"""Fully sharded data parallelism on symmetric memory."""

from .shard_linears import shard_linears
from .sharded_linear import ShardedLinear

__all__ = ["ShardedLinear", "shard_linears"]

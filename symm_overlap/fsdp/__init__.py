"""For models that are trained with torch's FSDP2 (``fully_shard``), and linear layers with sharded weights."""

from .apply import apply
from .policy import Auto, Bytes, Depth
from .post_optimizer_event import PostOptimizerEvent, post_optimizer_event
from .prefetch import PrefetchPlan, plan_prefetch
from .shard_linears import shard_linears
from .sharded_linear import ShardedLinear

__all__ = [
    "Auto",
    "Bytes",
    "Depth",
    "PostOptimizerEvent",
    "PrefetchPlan",
    "ShardedLinear",
    "apply",
    "plan_prefetch",
    "post_optimizer_event",
    "shard_linears",
]

"""Extensions for models trained with torch's FSDP2 (``fully_shard``), and linear layers with sharded weights."""

from .communication.apply import apply
from .layers.shard_linears import shard_linears
from .layers.sharded_linear import ShardedLinear
from .prefetch.plan_prefetch import PrefetchPlan, plan_prefetch
from .prefetch.policy import Auto, Bytes, Depth
from .prefetch.post_optimizer_event import PostOptimizerEvent, post_optimizer_event

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

"""For models that train with FSDP2 (``torch.distributed.fsdp.fully_shard``). See docs/fsdp.md."""

from .policy import Auto, Bytes, Depth
from .post_optimizer_event import PostOptimizerEvent, post_optimizer_event
from .prefetch import PrefetchPlan, plan_prefetch

__all__ = ["Auto", "Bytes", "Depth", "PostOptimizerEvent", "PrefetchPlan", "plan_prefetch", "post_optimizer_event"]

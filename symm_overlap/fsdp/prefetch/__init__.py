"""Plan with the simulator what FSDP2 gathers ahead. The entry point is `symm_overlap.fsdp.plan_prefetch`."""

"""What FSDP2 gathers ahead, planned with the simulator. The way in is `symm_overlap.fsdp.plan_prefetch`."""

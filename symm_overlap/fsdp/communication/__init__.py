"""FSDP2's collectives through symmetric memory. The entry point is `symm_overlap.fsdp.apply`."""

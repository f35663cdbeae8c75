"""FSDP2's collectives through symmetric memory. The way in is `symm_overlap.fsdp.apply`."""

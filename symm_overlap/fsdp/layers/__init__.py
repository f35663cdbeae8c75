"""Linear layers that consume their weight shard by shard. The entry point is `symm_overlap.fsdp.shard_linears`."""

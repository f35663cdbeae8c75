"""Linear layers whose weight arrives in shards. The way in is `symm_overlap.fsdp.shard_linears`."""

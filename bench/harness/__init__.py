"""What every benchmark shares: ranks, timing, checks, the environment and reports."""

"""Code that all benchmarks share: ranks, timing, checks, the environment and reports."""


class NotAvailableError(Exception):
    """Raised if something cannot be measured here. The message is the reason, which the table shows."""

"""What every benchmark shares: ranks, timing, checks, the environment and reports."""


class NotAvailableError(Exception):
    """Something cannot be measured here; the message is the reason, which the table shows."""

"""Which path a call takes, and which plan carries it out: pure functions, evaluated alike on every rank."""

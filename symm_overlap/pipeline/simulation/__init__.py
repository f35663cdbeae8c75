"""Simulate schedules: in unit times, or with costs. csrc/sim computes it; twins in plain Python compute the same."""

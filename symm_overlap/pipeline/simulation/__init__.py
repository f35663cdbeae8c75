"""Simulate schedules: in unit times, or with costs. csrc/sim computes it."""

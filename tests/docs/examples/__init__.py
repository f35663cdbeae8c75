"""What CONTRIBUTING.md shows: an op, a planner, an exchange and a back end, each in its one file."""

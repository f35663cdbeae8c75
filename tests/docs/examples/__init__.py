"""The examples of the pages. CONTRIBUTING.md shows an op, a planner, an exchange and a backend, one file for each."""

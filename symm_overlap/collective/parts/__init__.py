"""The computation on the parts of a collective: consumers of what an all-gather brings, producers of what a reduction
sums. `protocol` says what an exchange calls; the other files have one kind each.
"""

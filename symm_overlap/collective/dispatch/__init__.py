"""From a Python call to the kernel of an op: the public functions, torch's library of ops, and autograd."""

"""Extract the graph of a model around its layers, and reject what a graph cannot say. `tracer` is where it starts."""

"""How a step of a model becomes a MemoryTrace: ahead of time on fake tensors, or recorded while it runs."""

"""Training: the hooks, the engine behind ``GeminiDDP``, ``HybridAdam``, checkpoints and export."""

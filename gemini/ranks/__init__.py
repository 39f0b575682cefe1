"""The ranks that share one model: who they are, the wire between them, and how they agree on what comes next."""

"""Optimizers as programs use them: true ones of torch, over managed and plain params."""

"""Modules: what is hooked into a model, which calls run, and what autograd saves of weights that move."""

"""Modules: what each reads in its own forward, which calls run, and what autograd saves of weights that move."""

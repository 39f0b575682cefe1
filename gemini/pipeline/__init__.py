"""Pipelines: the blocks of a model in stages, over the ranks of a mesh's ``pp`` or one after another in one process."""

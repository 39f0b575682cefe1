"""The jobs behind the command line: train, demo and doctor, from text files and HF configs, on the public API alone.

Nothing here reaches below ``gemini``'s public names, so each job is also an example of how to use them. The modules are
imported by ``gemini.cli`` when a command needs them, for torch and transformers take seconds to load.
"""

"""The jobs behind the command line: trace, plan, simulate, train, demo and doctor, from HF configs and text files.

The loop of the training is written with ``gemini``'s public names, so it is also an example of how to use them;
``team`` borrows the wire of ``gemini.ranks`` for what the processes of a job tell each other besides. The modules are
imported by ``gemini.cli`` when a command needs them, for torch and transformers take seconds to load.
"""

import logging

# PEFT imports it where it is installed, and on a CPU it tells each process of kernels that nobody asked for.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

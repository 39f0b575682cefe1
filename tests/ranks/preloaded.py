"""What tests on ranks import, imported once in the process that ranks are forked from (``tests/ranks/pool.py``).

That process has no threads and no device: nothing here may start one. No collection of garbage in a rank looks at what
it was forked with, or each rank would soon have a copy of every page.
"""

import gc

import torch.distributed
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.mixtral import modeling_mixtral  # noqa: F401
from transformers.models.t5 import modeling_t5  # noqa: F401

import tests.standin_device  # noqa: F401
from tests.ranks import cases, pipeline_cases, schedules  # noqa: F401

if torch.version.cuda is None and torch.version.hip is None:  # bitsandbytes, which it imports, begins with the device
    import peft  # noqa: F401

gc.collect()
gc.freeze()

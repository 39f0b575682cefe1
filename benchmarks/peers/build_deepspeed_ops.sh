#!/usr/bin/env bash
# Compiles DeepSpeed's CPU Adam and asynchronous I/O into ENVIRONMENT/extensions, where compare.py looks for them.
#   build_deepspeed_ops.sh ENVIRONMENT
set -euo pipefail
environment=$(cd "${1:?which environment?}" && pwd)
export DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$environment/extensions" PATH="$environment/bin:$PATH"
exec "$environment/bin/python" - <<'PYTHON'
from deepspeed.accelerator import get_accelerator

for name in ("CPUAdamBuilder", "AsyncIOBuilder"):
    builder = get_accelerator().create_op_builder(name)
    assert builder.is_compatible(verbose=True), f"{name}: what is missing is said above"
    print(builder.load())
PYTHON

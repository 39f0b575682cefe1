"""Draw and load every class of the model zoo in chunks, and compare each value with plain transformers.

    python tests/hunts/zoo_loading.py --out benchmarks/reports/zoo_loading_<hardware>_<date>.md

For each class of the zoo that transformers can build from its tiny config: ``gemini.from_config`` against the class
itself from the same seed, then ``gemini.from_pretrained`` against plain ``from_pretrained`` of a file that lacks some
keys. Compared are params, buffers, ties, the report of keys, and the random numbers that come next. Params may take so
few pages while they are drawn that all of them go home and come back. What plain transformers itself draws differently
the second time (params it leaves as ``torch.empty`` gives them) is not compared.
"""

import argparse
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks._report import add_out, head, publish  # noqa: E402


def check(entry: Any, folder: Path) -> None:
    """Raises ``Unlike`` where something differs, and ``Untried`` where plain transformers does not get that far."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    import gemini
    from tests.hunts.zoo.configs import tiny_config
    from tests.hunts.zoo.runner import Untried

    def managed_config() -> gemini.GeminiConfig:
        return gemini.GeminiConfig(precision="fp32", device="cpu", memory=gemini.MemoryBudget(cpu="1GiB"))

    def seeded(make: Any) -> tuple[Any, Any]:
        torch.manual_seed(3)
        return make(), torch.rand(2)

    model_class = getattr(transformers, entry.name)
    try:
        config = tiny_config(entry.model_type, entry.name)
        with torch.device("meta"):
            if sum(p.numel() for p in model_class(config).parameters()) > 16_000_000:
                raise Untried("too many params")
        plain, after = seeded(lambda: model_class._from_config(config))
        again, _ = seeded(lambda: model_class._from_config(config))
    except Exception as e:
        raise Untried(f"{type(e).__name__}: {str(e)[:100]}") from e
    undefined = differing(plain, again)
    del again
    managed, mine = seeded(lambda: gemini.from_config(config, managed_config(), model_class=model_class))
    compare("from_config", plain, managed, undefined)
    if not torch.equal(after, mine):
        raise Unlike("from_config: other random numbers come after it")
    del managed

    with torch.no_grad():
        for name in undefined:
            owner = plain.get_submodule(name.rpartition(".")[0])
            getattr(owner, name.rpartition(".")[2]).zero_()
    try:
        plain.save_pretrained(folder)
        file = folder / "model.safetensors"
        values = load_file(file)
        dropped = [name for name in sorted(values) if "expert" not in name][::5]
        save_file({n: v for n, v in values.items() if n not in dropped}, file, metadata={"format": "pt"})
        (loaded, info), after = seeded(lambda: model_class.from_pretrained(folder, output_loading_info=True))
        (again, _), _ = seeded(lambda: model_class.from_pretrained(folder, output_loading_info=True))
    except Exception as e:
        raise Untried(f"{type(e).__name__}: {str(e)[:100]}") from e
    undefined = differing(loaded, again)
    # Memory that was never written to may hold the same by chance; what transformers says it drew is left.
    undefined |= {n for n in info["missing_keys"] if not _drawn(loaded, n)}
    (managed, found), mine = seeded(
        lambda: gemini.from_pretrained(folder, managed_config(), model_class=model_class, output_loading_info=True)
    )
    compare("from_pretrained", loaded, managed, undefined)
    if found != info:
        raise Unlike(f"from_pretrained: the report of keys is {found} instead of {info}"[:300])
    if not torch.equal(after, mine):
        raise Unlike("from_pretrained: other random numbers come after it")


def _drawn(model: Any, name: str) -> bool:
    """Whether a missing param has values that an initialization gives: not those of memory as it was found."""
    try:
        value = model.get_parameter(name).detach().float()
    except AttributeError:
        return True
    size = value[value != 0].abs()
    return len(size) > 0 and bool(size.isfinite().all()) and bool(((size < 100) & (size > 1e-30)).all())


class Unlike(Exception):
    """Something differs from plain transformers."""


def same(a: Any, b: Any) -> bool:
    """The same bits; NaN equals NaN."""
    import torch

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def differing(one: Any, other: Any) -> set[str]:
    """Names of params and buffers that two plain models do not have alike."""
    found = {n for n, p in one.named_parameters() if not same(p, other.get_parameter(n))}
    return found | {n for n, b in one.named_buffers() if not same(b, other.get_buffer(n))}


def compare(what: str, plain: Any, managed: Any, undefined: set[str]) -> None:
    """Params, buffers and ties of ``managed`` against those of ``plain``."""
    import torch

    if [n for n, _ in plain.named_parameters()] != [n for n, _ in managed.named_parameters()]:
        raise Unlike(f"{what}: other params or ties")
    for name, param in plain.named_parameters():
        mine = managed.full_param(name, torch.float32)
        if name not in undefined and not same(param.detach().float(), mine):
            raise Unlike(f"{what}: {name} differs by {float((param.detach().float() - mine).abs().max())}")
        if param.requires_grad != managed.get_parameter(name).requires_grad:
            raise Unlike(f"{what}: requires_grad of {name}")
    buffers = dict(managed.named_buffers())
    for name, buffer in plain.named_buffers():
        if name not in undefined and not same(buffer, buffers[name]):
            raise Unlike(f"{what}: buffer {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="classes whose name matches this regular expression")
    add_out(parser)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")

    import transformers

    from gemini.train.loading import skeleton
    from tests.hunts.zoo.mappings import all_entries
    from tests.hunts.zoo.runner import Untried

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    skeleton.ROOM = 20_000
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    entries = {entry.name: entry for _, entry in all_entries() if re.search(args.only, entry.name)}
    for entry in entries.values():
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(entry, Path(folder))
                counts["the same"] += 1
            except Untried as e:
                counts["not tried"] += 1
                print(f"{entry.name}: not tried, {e}", flush=True)
            except Exception as e:
                counts["unlike"] += 1
                wrong.append(f"{entry.name}: {type(e).__name__}: {str(e)[:240]}")
                print(wrong[-1], flush=True)
    lines = [
        f"{len(entries)} classes of transformers {transformers.__version__}: {counts['the same']} are drawn and loaded "
        f"as plain transformers does it, {counts['unlike']} are not, {counts['not tried']} were not tried (plain "
        "transformers does not build, save or load them here).",
        *([""] + [f"- {line}" for line in wrong] if wrong else []),
    ]
    publish([*head("Drawing and loading the zoo", []), *lines], args.out)


if __name__ == "__main__":
    main()

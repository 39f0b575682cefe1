"""Draw and load every class of the model zoo in chunks, and compare each value with plain transformers.

    python tests/hunts/zoo_loading.py [--only 'Llama|T5For']

For each class of the zoo that transformers can build from its tiny config: ``gemini.from_config`` against the class
itself from the same seed, then ``gemini.from_pretrained`` against plain ``from_pretrained`` of a file that lacks some
keys. Compared are params, buffers, ties, the report of keys, and the random numbers that come next. Params may take so
few pages while they are drawn that all of them go home and come back. What plain transformers itself draws differently
the second time (params it leaves as ``torch.empty`` gives them) is not compared.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import gemini  # noqa: E402
from gemini.train.loading import skeleton  # noqa: E402
from tests.hunts.zoo.configs import tiny_config  # noqa: E402
from tests.hunts.zoo.mappings import KINDS  # noqa: E402
from tests.hunts.zoo.runner import Untried  # noqa: E402
from tests.hunts.zoo.whole import hunt, make_parser  # noqa: E402


def check(entry: Any, folder: Path) -> None:
    """Raises ``Unlike`` where something differs, and ``Untried`` where plain transformers does not get that far."""

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
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def differing(one: Any, other: Any) -> set[str]:
    """Names of params and buffers that two plain models do not have alike."""
    found = {n for n, p in one.named_parameters() if not same(p, other.get_parameter(n))}
    return found | {n for n, b in one.named_buffers() if not same(b, other.get_buffer(n))}


def compare(what: str, plain: Any, managed: Any, undefined: set[str]) -> None:
    """Params, buffers and ties of ``managed`` against those of ``plain``."""
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


def ends(entry: Any) -> tuple[str, str]:
    """How a class ended, and why."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(entry, Path(folder))
        except Untried as e:
            return "untried", str(e)
        except Exception as e:
            return "UNLIKE", f"{type(e).__name__}: {str(e)[:240]}"
    return "the same", ""


def main() -> int:
    args = make_parser(__doc__).parse_args()
    transformers.utils.logging.disable_progress_bar()
    skeleton.ROOM = 20_000
    return hunt(tuple(KINDS), args.only, ends)


if __name__ == "__main__":
    sys.exit(main())

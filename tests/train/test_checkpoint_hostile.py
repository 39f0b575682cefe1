"""Checkpoints that nobody wrote: manifests and headers changed at random, their checksums made anew.

Whatever stands in them, loading ends in one of our errors before anything has changed, or the change was to a value
that may be any (a learning rate, say) and the run goes on with it.
"""

import contextlib
import copy
import json
import os
import random
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import lr_scheduler

import gemini
from gemini.train.checkpoint import format as checkpoint_format
from tests.scaling import backward, make_step
from tests.train.helpers import adam, assert_same_snapshot, same_bits, snapshot, wrap
from tests.world import world_of

REFUSED = (gemini.StorageError, gemini.PlanMismatch)
MANY = int(os.environ.get("GEMINI_HOSTILE_MANIFESTS", "300"))


class Squares(nn.Sequential):
    """Computes its loss itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float().square().mean()


class Tiny:
    """All that a checkpoint can hold, in a model of a few numbers."""

    def __init__(self, path: Path, precision: str = "fp16"):
        torch.manual_seed(0)
        model = Squares(nn.Linear(3, 4), nn.Linear(4, 2))
        model.register_buffer("angles", torch.tensor([1 - 2j, 3j]).conj())
        model.register_buffer("count", torch.tensor(7))
        model[1].bias.requires_grad_(False)
        self.model: Any = wrap(model, "ram", path, precision=precision)
        self.plain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = gemini.HybridAdam(
            [{"params": trained[:1]}, {"params": [*trained[1:], self.plain], "weight_decay": 0.0}], lr=1e-2
        )
        self.scheduler = lr_scheduler.OneCycleLR(self.optimizer, max_lr=2e-2, total_steps=10**6)

    def train(self) -> None:
        dtype = next(self.model.parameters()).dtype
        backward(self.model, self.model(torch.ones(2, 3, dtype=dtype)))
        self.plain.grad = torch.ones_like(self.plain)
        make_step(self.model, self.optimizer)
        with contextlib.suppress(ValueError, ArithmeticError):  # a schedule of other numbers may be over, say
            self.scheduler.step()
        self.optimizer.zero_grad()

    def save(self, directory: Path, extra: Any = None) -> None:
        gemini.save_checkpoint(directory, self.model, self.optimizer, self.scheduler, extra)

    def load(self, directory: Path) -> Any:
        return gemini.load_checkpoint(directory, self.model, self.optimizer, self.scheduler)

    def everything(self) -> dict[str, Any]:
        world = world_of(self.model)
        return {
            "model": snapshot(self.model),
            "groups": repr(self.optimizer.state_dict()["param_groups"]),
            "plain": [self.plain.detach().clone(), *(v.clone() for v in self.optimizer.state[self.plain].values())],
            "buffers": [buffer.clone() for buffer in self.model.buffers()],
            "scheduler": repr(vars(self.scheduler)),
            "rng": (random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()),
            "lost": world.corrupted_by,
        }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert_same_snapshot(before.pop("model"), after.pop("model"))
    for key in ("plain", "buffers"):
        assert all(same_bits(a, b) for a, b in zip(before.pop(key), after.pop(key), strict=True)), key
    assert before == after


def rewrite(directory: Path, manifest: dict[str, Any]) -> None:
    """With the checksum that belongs to it."""
    manifest = {key: value for key, value in manifest.items() if key != "checksum"}
    manifest["checksum"] = checkpoint_format._checksum(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))


def rewrite_header(directory: Path, name: str, header: Any, manifest: dict[str, Any]) -> None:
    path = directory / name
    data = path.read_bytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    path.write_bytes(start + data[8 + int.from_bytes(data[:8], "little") :])
    manifest["files"][name]["header"] = zlib.crc32(start)


EXTRA = {
    "position": 5, "pair": (1, 2.5), "keys": {1: "one", (2, 3): None}, "list": [True, "text", [1.0]],
    "tensors": [torch.arange(4.0), torch.ones(2, 2, dtype=torch.complex128), torch.zeros(0, 3), torch.tensor(3)],
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tiny, Path]]:
    folder = tmp_path_factory.mktemp("hostile")
    run = Tiny(folder)
    run.train()
    run.save(folder / "good", EXTRA)
    run.train()
    yield run, folder / "good"


# ---- at random -------------------------------------------------------------------------------------------------------


def places_in(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places_in(value, (*path, key))


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def deep(depth: int) -> Any:
    tree: Any = 0
    for _ in range(depth):
        tree = [tree]
    return tree


STRANGE: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 2**31, 2**53, 2**63, 2**64, 10**400, -(10**400), 0.0, -0.5, 1.5, 1e308,
    float("nan"), float("inf"), "", "x", "0", "../x", "/etc/passwd", "manifest.json", "a\0b", "optimizer", [], {}, [[]],
    [None], [1, 2], {"__tensor__": 0}, {"__tensor__": 1}, {"__tensor__": -1}, {"__tensor__": 10**9},
    {"__tensor__": True}, {"__tensor__": 0, "dtype": "uint16", "shape": [1]},
    {"__tensor__": 0, "dtype": "Tensor", "shape": []}, {"__tuple__": 3}, {"__tuple__": []}, {"__items__": [[[], 1]]},
    {"__items__": [[1]]}, {"__items__": [[1, 2], [1, 3]]}, {"step": 1}, deep(150), deep(400),
]  # fmt: skip


def changed(tree: Any, rng: random.Random) -> tuple[Any, tuple[Any, ...]]:
    """A copy of the tree in which something at some place is otherwise, and the place."""
    tree = copy.deepcopy(tree)
    path: tuple[Any, ...] = ()
    while True:  # down from the top, so that every part has its share
        here = at(tree, path)
        keys = list(here) if isinstance(here, dict) else list(range(len(here))) if isinstance(here, list) else []
        if not keys or (path and rng.random() < 0.25):
            break
        path = (*path, rng.choice(keys))
    if not path:
        return rng.choice(STRANGE), path
    holder, key, value = at(tree, path[:-1]), path[-1], at(tree, path)
    ways = ["strange", "strange", "other place", "remove", "add", "again", "sign"]
    way = rng.choice(ways)
    if way == "other place":
        holder[key] = copy.deepcopy(at(tree, rng.choice(list(places_in(tree))[1:])))
    elif way == "remove":
        del holder[key]
    elif way == "add" and isinstance(value, list):
        value.insert(rng.randrange(len(value) + 1), copy.deepcopy(rng.choice([*value, *STRANGE])))
    elif way == "add" and isinstance(value, dict):
        value[rng.choice(["x", "0", "step", "optimizer", "params", "__tuple__", *value])] = rng.choice(STRANGE)
    elif way == "again" and isinstance(holder, dict):
        holder[rng.choice(["x", f"{key}x", "1"])] = copy.deepcopy(value)
    elif way == "again" and isinstance(holder, list):
        holder.append(copy.deepcopy(value))
    elif way == "sign" and type(value) in (int, float):
        holder[key] = rng.choice([-value, value + 1, value - 1, value * 2, float(value), value * 10**6])
    else:
        holder[key] = rng.choice(STRANGE)
    return tree, path


@pytest.mark.slow
def test_manifests_and_headers_changed_at_random(saved: tuple[Tiny, Path], tmp_path: Path) -> None:
    run, good = saved
    manifest = json.loads((good / "manifest.json").read_text())
    del manifest["checksum"]
    refused, accepted = 0, []
    for seed in range(MANY):
        rng = random.Random(seed)
        directory = tmp_path / str(seed)
        shutil.copytree(good, directory)
        if rng.random() < 0.2:
            name = rng.choice(list(manifest["files"]))
            data = (good / name).read_bytes()
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            other, path = changed(header, rng)
            again = copy.deepcopy(manifest)
            rewrite_header(directory, name, other, again)
            rewrite(directory, again)
            path = ("header", *path)
        else:
            other, path = changed(manifest, rng)
            if json.dumps(other) == json.dumps(manifest):
                continue  # by chance the same
            if not isinstance(other, dict) or rng.random() < 0.02:
                (directory / "manifest.json").write_text(json.dumps(other))
            else:
                rewrite(directory, other)
        before = run.everything()
        try:
            run.load(directory)
        except REFUSED as error:
            refused += 1
            assert str(directory) in str(error)
            assert_same(before, run.everything())
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {path}: {type(error).__name__}: {error}") from error
        else:
            accepted.append(path)
            run.train()  # whatever it took, it can go on with
            world_of(run.model).check()
            run.load(good)
            run.train()
        shutil.rmtree(directory)
    # What may be any value: nobody can tell another from the one that was saved.
    free = {"extra", "groups", "scheduler", "rng", "params", "plain", "piece", "scheduler_kind", "header"}
    free.add("version")  # 3 may become 2, which says the same of params that are whole; others are refused
    assert not (strange := [path for path in accepted if path[0] not in free]), strange
    assert refused > MANY * 0.6, (refused, sorted(map(str, accepted)))


def test_values_of_other_bits(saved: tuple[Tiny, Path], tmp_path: Path) -> None:
    """Tensors of plain values (random states, counts of updates, states) with the checksums of them."""
    run, good = saved
    manifest = json.loads((good / "manifest.json").read_text())
    name = "values.safetensors"
    data = (good / name).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    refused = 0
    for number, strange in ((n, s) for n in header if n != "__metadata__" for s in (b"\xff", b"\x00", b"\x80\x01")):
        first, stop = (start + offset for offset in header[number]["data_offsets"])
        changed = bytearray(data)
        changed[first:stop] = (strange * (stop - first))[: stop - first]
        shutil.copytree(good, tmp_path / "ckpt")
        (tmp_path / "ckpt" / name).write_bytes(changed)
        other = copy.deepcopy(manifest)
        if first < stop:
            other["files"][name]["tensors"][number]["sums"] = [zlib.crc32(changed[first:stop])]
        rewrite(tmp_path / "ckpt", other)
        before = run.everything()
        try:
            run.load(tmp_path / "ckpt")
        except gemini.StorageError as error:
            refused += 1
            assert "is damaged" in str(error)
            assert_same(before, run.everything())
        shutil.rmtree(tmp_path / "ckpt")
        run.load(good)
        run.train()
    assert refused >= 5  # three random generators, a count of updates


# ---- by hand ---------------------------------------------------------------------------------------------------------


def assert_refused(run: Tiny, directory: Path, match: str, kind: Any = gemini.StorageError) -> None:
    before = run.everything()
    with pytest.raises(kind, match=match):
        run.load(directory)
    assert_same(before, run.everything())


def put(path: str, value: Any) -> Any:
    keys = [int(key) if key.isdigit() else key for key in path.split("/")]

    def change(manifest: dict[str, Any]) -> None:
        at(manifest, tuple(keys[:-1]))[keys[-1]] = value

    return change


def swap_parts(manifest: dict[str, Any]) -> None:
    """Two states of one shape change places."""
    tensors = manifest["files"]["params-00000-00000.safetensors"]["tensors"]
    one, two = "exp_avg/0.weight", "exp_avg_sq/0.weight"
    tensors[one]["of"], tensors[two]["of"] = two, one


NAN = float("nan")
OLD_SCALE = {"scale": 2.0**14, "growth_interval": 2000, "num_good_steps": 3, "largest": 2.0**24}
"""What fp16 checkpoints have of versions in which models kept a loss scale themselves."""


def test_a_loss_scale_of_before_is_no_matter(saved: tuple[Tiny, Path], tmp_path: Path) -> None:
    run, good = saved
    manifest = json.loads((good / "manifest.json").read_text())
    assert manifest["precision"] == "fp16" and "loss_scale" not in manifest
    shutil.copytree(good, tmp_path / "older")
    rewrite(tmp_path / "older", manifest | {"loss_scale": OLD_SCALE})
    found = []
    for folder in (good, tmp_path / "older"):
        run.train()
        run.load(folder)
        found.append(run.everything())
    assert_same(*found)


BY_HAND = {
    "a negative step": (put("params/0.weight/step", -1), r"params\.0\.weight\.step is -1"),
    "a loss scale that is not a number": (put("loss_scale", OLD_SCALE | {"scale": NAN}), r"loss_scale\.scale is nan"),
    "a loss scale of nothing": (put("loss_scale", OLD_SCALE | {"scale": 0.0}), r"loss_scale\.scale is 0\.0"),
    "an infinite lr": (put("groups/0/lr", float("inf")), r"lr of groups\[0\] must be a finite number"),
    "a negative lr": (put("groups/1/lr", -0.1), r"lr of groups\[1\] must be .* not negative"),
    "what Adam does not have": (put("groups/1/amsgrad", True), r"groups\[1\] has amsgrad=True"),
    "one beta": (put("groups/0/betas/__tuple__", [0.9]), r"groups\[0\]"),
    "a file elsewhere": (put("files/..", {"header": 0, "tensors": {}}), "no name of a file"),
    "a file in another folder": (put("files/..-x.safetensors", {"header": 0, "tensors": {}}), "no name of a file"),
    "parts that change places": (swap_parts, "which is not what it is"),
    "a tensor twice": (put("extra/tensors/1", {"__tensor__": 0}), "as something else does"),
    "a tensor that is not there": (put("extra/tensors/0", {"__tensor__": 99}), "which is not there"),
    "no random states": (put("rng", {}), "nothing refers to tensor"),
    "another place in NumPy's stream": (put("rng/0/numpy/2", 10**6), r"rng\[0\] is not the state"),
    "Python's of long ago": (put("rng/0/python/0", 2), r"rng\[0\] is not the state"),
    "what is no rule": (put("rule", 3), "rule is 3, and no update rule"),
    "a plane without a name": (put("rule", ["x", [[5, "float32", 1]], "elements"]), "no update rule"),
    "a plane of one endless block": (put("rule", ["x", [["a", "float32", float("inf")]], "place"]), "no update rule"),
    "another rule than its files are of": (put("rule", ["x", [["a", "float32", 1]], "place"]), "which no param has"),
    "an unknown key": (put("step", 3), "has no use for 'step'"),
    "nested too deep": (put("extra/list", deep(400)), "nested too deep"),
}


@pytest.mark.parametrize("what", BY_HAND)
def test_what_cannot_be_is_refused_by_name(what: str, saved: tuple[Tiny, Path], tmp_path: Path) -> None:
    run, good = saved
    shutil.copytree(good, tmp_path / "ckpt")
    change, said = BY_HAND[what]
    manifest = json.loads((good / "manifest.json").read_text())
    change(manifest)
    rewrite(tmp_path / "ckpt", manifest)
    assert_refused(run, tmp_path / "ckpt", f"is damaged: .*{said}.*Use an older checkpoint")


@pytest.mark.timeout(60)
def test_files_that_are_none_are_not_waited_for(saved: tuple[Tiny, Path], tmp_path: Path) -> None:
    run, good = saved
    for number, name in enumerate(("manifest.json", "values.safetensors", "params-00000-00000.safetensors")):
        directory = tmp_path / str(number)
        shutil.copytree(good, directory)
        (directory / name).unlink()
        os.mkfifo(directory / name)
        assert_refused(run, directory, f"{name}.*it is not a regular file")
        (directory / name).unlink()
        (directory / name).symlink_to("/dev/zero")
        assert_refused(run, directory, f"{name}.*it is not a regular file")


def test_names_that_stand_twice(saved: tuple[Tiny, Path], tmp_path: Path) -> None:
    run, good = saved
    shutil.copytree(good, tmp_path / "ckpt")
    text = (good / "manifest.json").read_text()
    (tmp_path / "ckpt" / "manifest.json").write_text(text.replace('"piece"', '"piece": 1, "piece"', 1))
    assert_refused(run, tmp_path / "ckpt", "a name stands in it twice")


@pytest.mark.parametrize("overlap", [False, True])
def test_headers_whose_tensors_lie_elsewhere(overlap: bool, saved: tuple[Tiny, Path], tmp_path: Path) -> None:
    """In each other's place, or with a gap: what is checked is not what a reader of the format would see."""
    run, good = saved
    name = "params-00000-00000.safetensors"
    shutil.copytree(good, tmp_path / "ckpt")
    data = (good / name).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    one, two = header["exp_avg/0.weight"], header["exp_avg_sq/0.weight"]
    if overlap:
        one["data_offsets"] = two["data_offsets"]
    else:
        header["exp_avg/0.weight"] = {**one, "data_offsets": [offset + 8 for offset in one["data_offsets"]]}
    manifest = json.loads((good / "manifest.json").read_text())
    rewrite_header(tmp_path / "ckpt", name, header, manifest)
    rewrite(tmp_path / "ckpt", manifest)
    assert_refused(run, tmp_path / "ckpt", "does not begin where the tensor before it ends")


# ---- whole, but not of this run --------------------------------------------------------------------------------------

# Schedulers of another kind, buffers that cannot be written to, params without a master: all of it is noticed before
# the first write.

# ---- schedulers ------------------------------------------------------------------------------------------------------

KINDS: dict[str, Any] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "times": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),  # its state looks like that of LambdaLR
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "plateau": lr_scheduler.ReduceLROnPlateau,  # takes any state
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "other sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.CosineAnnealingLR(o, 9)], [2]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_of_another_kind_is_noticed_before_anything_changes(kind: str, tmp_path: Path) -> None:
    run = Tiny(tmp_path)
    run.scheduler = KINDS[kind](run.optimizer)
    for _ in range(3):
        run.optimizer.step()
        run.scheduler.step(*([1.0] if kind == "plateau" else []))
    run.save(tmp_path / "ckpt")
    expected = run.scheduler.state_dict()
    run.scheduler = KINDS["cosine"](run.optimizer)
    run.train()
    for other, make in KINDS.items():
        run.scheduler = make(run.optimizer)
        if other != kind:
            assert_refused(run, tmp_path / "ckpt", "saved with another scheduler than this", gemini.PlanMismatch)
        else:
            run.load(tmp_path / "ckpt")
            assert run.scheduler.state_dict() == expected


class Own(lr_scheduler.LRScheduler):
    """A user's: it has another attribute after a while, and does not take every state."""

    def get_lr(self) -> list[float]:
        if self.last_epoch > 1:
            self.late = "came later"
        return [group["lr"] for group in self.optimizer.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict["last_epoch"] == 7:
            raise RuntimeError("not on a Sunday")


def test_schedulers_of_users(tmp_path: Path) -> None:
    run = Tiny(tmp_path)
    run.scheduler = Own(run.optimizer)
    for _ in range(3):
        run.optimizer.step()
        run.scheduler.step()
    run.save(tmp_path / "ckpt")
    run.scheduler = Own(run.optimizer)
    run.load(tmp_path / "ckpt")
    assert run.scheduler.late == "came later" and run.scheduler.last_epoch == 3
    run.scheduler = Own(run.optimizer)
    manifest = json.loads((tmp_path / "ckpt" / "manifest.json").read_text())
    for key, value, said in (
        ("last_epoch", 7, "not on a Sunday"), ("optimizer", 3, "has no 'optimizer'"), ("step", 3, "has no 'step'"),
        ("base_lrs", [0.1], "base_lrs has 1 entries where there are 2"), ("last_epoch", -9, "its last_epoch is -9"),
    ):  # fmt: skip
        other = copy.deepcopy(manifest)
        other["scheduler"][key] = value
        rewrite(tmp_path / "ckpt", other)
        assert_refused(run, tmp_path / "ckpt", said, gemini.PlanMismatch)


# ---- what cannot be written to ---------------------------------------------------------------------------------------


def test_buffers_that_nothing_can_be_copied_into(tmp_path: Path) -> None:
    """Found before the weights are written, not when it is their turn."""
    run = Tiny(tmp_path)
    run.save(tmp_path / "ckpt")
    run.train()
    run.model.count = run.model.count.expand(2)
    assert_refused(run, tmp_path / "ckpt", r"other buffers.*'count'", gemini.PlanMismatch)
    run.model.count = torch.tensor(7.0)
    assert_refused(run, tmp_path / "ckpt", r"other buffers.*'count'", gemini.PlanMismatch)
    run.model.count = torch.tensor(7)
    run.model.angles = torch.zeros(1, dtype=torch.complex64).expand(2)
    assert_refused(run, tmp_path / "ckpt", r"buffer 'angles' cannot be written to", gemini.PlanMismatch)
    with torch.inference_mode():
        run.model.angles = torch.zeros(2, dtype=torch.complex64)
    assert_refused(run, tmp_path / "ckpt", r"'angles' cannot be written to .*inference mode", gemini.PlanMismatch)
    run.model.angles = torch.zeros(2, dtype=torch.complex64)
    run.load(tmp_path / "ckpt")
    assert run.model.angles.tolist() == [1 + 2j, -3j]


def test_params_that_fp16_has_no_master_of(tmp_path: Path) -> None:
    """Frozen when it was saved, trained here."""
    run, other = Tiny(tmp_path), wrap(nn.Sequential(nn.Linear(3, 4)), "ram", tmp_path, precision="fp16")
    frozen = wrap(nn.Sequential(nn.Linear(3, 4)).requires_grad_(False), "ram", tmp_path, precision="fp16")
    run.model, run.optimizer = other, gemini.HybridAdam(other.parameters())
    gemini.save_checkpoint(tmp_path / "ckpt", frozen, gemini.HybridAdam(frozen.parameters()))
    before = snapshot(other)
    with pytest.raises(gemini.PlanMismatch, match="was frozen when .* was saved, which has no fp32 master"):
        gemini.load_checkpoint(tmp_path / "ckpt", other, run.optimizer)
    assert_same_snapshot(before, snapshot(other))


def test_the_other_way_to_decay_weights(tmp_path: Path) -> None:
    """Without weight decay both are the same, and the optimizer stays what it was made as."""
    run = Tiny(tmp_path)
    run.save(tmp_path / "ckpt")
    run.train()
    first, second = run.optimizer.param_groups
    assert first["weight_decay"] and not second["weight_decay"]
    second["decoupled"] = False
    run.load(tmp_path / "ckpt")
    assert second["decoupled"] is False
    first["decoupled"] = False
    assert_refused(run, tmp_path / "ckpt", r"HybridAdam\(\.\.\., decoupled=True\)", gemini.PlanMismatch)


# ---- what is kept besides weights and states -------------------------------------------------------------------------

# Tensors of every dtype and form that is plain numbers come back as the same numbers, and everything else is refused
# before anything is written.

PLAIN = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


class Holder(nn.Module):
    """A model with one persistent buffer."""

    def __init__(self, buffer: torch.Tensor | None = None):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("held", buffer)


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    data = torch.arange(1, numel * dtype.itemsize + 1, dtype=torch.uint8)
    return ((data % 2).bool() if dtype is torch.bool else data.view(dtype)).view(shape)


@pytest.mark.parametrize("wait", [True, False])
def test_every_plain_dtype_comes_back_bit_by_bit(wait: bool, tmp_path: Path) -> None:
    extra = {
        str(dtype): [
            of_dtype(dtype, 2, 3),
            of_dtype(dtype, 1).view(()),
            of_dtype(dtype, 0, 3),
            of_dtype(dtype, 2, 2).t(),
        ]
        for dtype in PLAIN
    }
    model = wrap(Holder(), "ram", tmp_path)
    optimizer = adam(model)
    gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, extra=extra, wait=wait).wait()
    found = gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
    for name, values in extra.items():
        assert all(same_bits(a, b) for a, b in zip(values, found[name], strict=True)), name


@pytest.mark.parametrize("dtype", PLAIN)
def test_buffers_of_every_plain_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = wrap(Holder(of_dtype(dtype, 4)), "ram", tmp_path)
    optimizer = adam(model)
    gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer)
    kept = model.held.clone()
    model.held.copy_(torch.zeros_like(kept))
    gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
    assert same_bits(model.held, kept)


def forms() -> dict[str, torch.Tensor]:
    number = torch.tensor([1 - 2j, 3 + 4j])
    negative = number.conj().imag
    assert number.conj().is_conj() and negative.is_neg()
    return {
        "conjugated": number.conj(), "negated": negative, "both": torch.view_as_complex(torch.ones(3, 2)).conj()[::2],
        "every other": torch.arange(9.0)[::2], "expanded": torch.tensor([2.0]).expand(3),
        "a part": torch.arange(9)[4:6],
        "a param": nn.Parameter(torch.ones(2)), "upside down": torch.arange(6).view(2, 3).t(),
    }  # fmt: skip


def test_views_come_back_as_the_numbers_they_show(tmp_path: Path) -> None:
    for name, value in forms().items():
        held = value.detach() if name != "expanded" else value.clone()
        model = wrap(Holder(held), "ram", tmp_path)
        optimizer = adam(model)
        shown = value.tolist()
        gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, extra=value)
        with torch.no_grad():
            model.held.zero_()
        found = gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
        assert found.tolist() == model.held.tolist() == shown, name
        assert world_of(model).corrupted_by is None


def impossible() -> dict[str, Any]:
    found = {
        "sparse": torch.eye(2).to_sparse(), "csr": torch.eye(2).to_sparse_csr(), "meta": torch.ones(2, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "jagged": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    }  # fmt: skip
    with FakeTensorMode():
        found["fake"] = torch.ones(2)
    return found


@pytest.mark.parametrize("name", impossible())
def test_tensors_that_are_not_plain_numbers_are_refused(name: str, tmp_path: Path) -> None:
    value = impossible()[name]
    model = wrap(Holder(), "ram", tmp_path)
    with pytest.raises(TypeError, match=r"extra\.odd is a .*which a checkpoint cannot keep"):
        gemini.save_checkpoint(tmp_path / "ckpt", model, adam(model), extra={"odd": value})
    model = wrap(Holder(), "ram", tmp_path)
    model.held = value
    with pytest.raises(TypeError, match=r"state_dict\(\)\.held is a .*which a checkpoint cannot keep"):
        gemini.save_checkpoint(tmp_path / "ckpt", model, adam(model))
    assert list(tmp_path.iterdir()) == []


def test_values_that_cannot_be_read_back_are_refused(tmp_path: Path) -> None:
    model = wrap(Holder(), "ram", tmp_path)
    optimizer = adam(model)
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 1
    for _ in range(30):
        deep = {1: (deep,)} if isinstance(deep, list) else [deep]
    for extra in (endless, 10**5000, {torch.ones(1): 1}):
        with pytest.raises(TypeError, match="which a checkpoint cannot keep"):
            gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, extra=extra)
        assert list(tmp_path.iterdir()) == []
    for value in (deep, 10**3000, "\ud800", float("-inf"), [1, "a" * 10**5]):
        gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, extra=value)
        assert gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer) == value

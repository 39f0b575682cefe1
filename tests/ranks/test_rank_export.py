"""``save_pretrained`` and torch's own state-dict functions with several ranks: one writes, all have the whole values.

What the first rank writes opens with plain transformers and holds the bits of every rank's parts; no rank ever holds
the whole model, and a failure on the first rank is raised on all.

State that modules keep besides params and buffers is saved by one mesh and loaded by another; where one rank's module
does not take it, no rank's does.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import GPT2Config, GPT2LMHeadModel

import gemini
from tests.peaks import rise_over
from tests.ranks.parallel_cases import config_for, mesh_of
from tests.ranks.pipeline_cases import half
from tests.ranks.pool import Pools, failures
from tests.ranks.test_checkpoints import MODELS, Run
from tests.train.helpers import DTYPES, adam, same_bits


def open_files(folder: Path) -> int:
    """How many files below ``folder`` this process has open, nameless ones too."""
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return sum(link.is_symlink() and os.readlink(link).startswith(str(folder)) for link in links)


def save_pretrained(model: str, where: str, precision: str, folder: Path, mesh: Any) -> Any:
    run = Run(where, folder, model=model, precision=precision, mesh=mesh)
    run.train(1)
    before = run.digest()
    files = open_files(folder)
    run.model.save_pretrained(folder / "out", max_shard_size="20KB")
    assert open_files(folder) == files
    assert run.digest() == before
    state = run.model.state_dict()
    run.model.save_pretrained(folder / "masters", dtype=torch.float32)
    masters = run.model.state_dict(dtype=torch.float32)
    run.train(1)
    if run.rank != 0:
        return {name: value.float().sum().item() for name, value in state.items()}
    torch.save(state, folder / "state.pt")
    plain = type(MODELS[model]()).from_pretrained(folder / "out", dtype=DTYPES[precision])
    theirs = plain.state_dict()
    assert theirs.keys() == state.keys()
    for name, value in state.items():
        assert same_bits(value, theirs[name]), name
    exact = type(MODELS[model]()).from_pretrained(folder / "masters").state_dict()
    assert all(same_bits(value, exact[name]) for name, value in masters.items())
    return {name: value.float().sum().item() for name, value in state.items()}


@pytest.mark.parametrize(
    ("size", "model", "where", "precision", "mesh"),
    [(2, "llama", "disk", "bf16", None), (2, "t5", "standin", "fp16", None), (4, "mixtral", "mixed", "bf16", (2, 2)),
     (4, "gpt2", "ram", "fp32", (4, 1))],
)  # fmt: skip
@pytest.mark.sweep(every=2)
def test_saved_models_open_with_plain_transformers(
    size: int, model: str, where: str, precision: str, mesh: Any, pool_of: Pools, tmp_path: Path
) -> None:
    found = pool_of(size).run(save_pretrained, model, where, precision, tmp_path, mesh)
    assert all(state == found[0] for state in found), "every rank has the same full state"
    shards = [name for name in os.listdir(tmp_path / "out") if name.endswith(".safetensors")]
    assert len(shards) > 2 and not [name for name in os.listdir(tmp_path / "out") if name.startswith((".", "tmp"))]


def refused_target(folder: Path, mesh: Any) -> str:
    run = Run("ram", folder, mesh=mesh)
    (folder / "file").write_text("x")
    with pytest.raises(gemini.StorageError) as caught:
        run.model.save_pretrained(folder / "file")
    run.train(1)
    run.model.save_pretrained(folder / "out")
    return str(caught.value)


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize(("size", "mesh"), [(2, None), (4, (2, 2))])
def test_a_failure_of_the_writing_rank_is_raised_on_all(size: int, mesh: Any, pool_of: Pools, tmp_path: Path) -> None:
    first, *others = pool_of(size).run(refused_target, tmp_path, mesh)
    assert "not a directory" in first
    assert all("rank 0 refused save_pretrained" in other and "not a directory" in other for other in others)


def rise_of_saving(save: Callable[[], Any]) -> int:
    save()  # whatever allocators keep of a first time is there before
    return rise_over(save)[0]


def rise_while_saving(folder: Path, precision: str) -> tuple[int, int, int]:
    """The rise on this rank over save_pretrained, over save_checkpoint, and the bytes of all weights."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=512, n_layer=8, n_head=8, vocab_size=4096, n_positions=64))
    num_bytes = 2 * sum(p.numel() for p in model.parameters())
    memory = gemini.MemoryBudget(cpu="1GiB", nvme="2GiB", nvme_path=folder)
    placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    config = gemini.GeminiConfig(precision=precision, memory=memory, placement=placement, device="cpu")
    managed: Any = gemini.GeminiDDP(model, config)
    optimizer = gemini.HybridAdam(managed.parameters())
    exported = rise_of_saving(lambda: managed.save_pretrained(folder / "out"))
    return exported, rise_of_saving(lambda: gemini.save_checkpoint(folder / "ckpt", managed, optimizer)), num_bytes


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_no_rank_ever_holds_the_model(precision: str, pool_of: Pools, tmp_path: Path) -> None:
    for exported, saved, weights in pool_of(2).run(rise_while_saving, tmp_path, precision):
        assert exported < weights / 4 and saved < weights / 4


def through_torch(folder: Path, full: bool) -> Any:
    one, two = Run("mixed", folder, model="llama"), Run("disk", folder, model="llama")
    one.train(2)
    options = StateDictOptions(full_state_dict=full)
    model = get_model_state_dict(one.model, options=options)
    optimizer = get_optimizer_state_dict(one.model, one.optimizer, options=options)
    for name, value in one.model.state_dict().items():
        assert model[name].shape == value.shape and same_bits(model[name], value), name
    for name, state in optimizer["state"].items():
        own = one.optimizer.full_state(name)
        assert state.keys() - {"residual_of"} == own.keys()
        assert all(same_bits(state[kind], own[kind].view(state[kind].shape)) for kind in own), name
    if full:
        two.train(1)  # torch distributes full values like those that the optimizer has already
    set_model_state_dict(two.model, model, options=options)
    set_optimizer_state_dict(two.model, two.optimizer, optimizer, options=options)
    assert two.digest()["planes"] == one.digest()["planes"]
    return sorted(optimizer["state"])


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("full", [False, True])
def test_torch_state_dict_functions_have_full_values_on_every_rank(full: bool, pool_of: Pools, tmp_path: Path) -> None:
    one, two = pool_of(2).run(through_torch, tmp_path, full)
    assert one == two and len(one) > 5


class Marked(nn.Module):
    """A norm with a word, and a buffer of any length."""

    def __init__(self, norm: nn.Module, refuses: bool) -> None:
        super().__init__()
        self.norm, self.word, self.refuses = norm, "none", refuses
        self.register_buffer("grown", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)

    def get_extra_state(self) -> Any:
        return {"word": self.word}

    def set_extra_state(self, state: Any) -> None:
        if self.refuses and state["word"] != "none":
            raise RuntimeError("not here")
        self.word = state["word"]

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.grown = state[f"{prefix}grown"].clone()
        super()._load_from_state_dict(state, prefix, *args)


def marks(sizes: dict[str, int], folder: str, save: bool, refusing: int = -1) -> dict[str, Any]:
    """The words and buffers of the modules that are here."""
    rank = dist.get_rank()
    if not sizes and rank:
        return {}
    model: Any = half()
    for number, layer in enumerate(model.model.layers):
        layer.input_layernorm = Marked(layer.input_layernorm, refusing == rank)
        if save:
            layer.input_layernorm.word = f"layer {number}"
            layer.input_layernorm.grown = torch.arange(float(number + 1))
    config = config_for("disk", folder, precision="bf16")
    if "pp" in sizes:
        model = gemini.Pipeline(model, config, mesh=mesh_of(sizes), micro_batches=2, schedule="1f1b").model
    else:
        group = None if sizes else dist.new_group([rank], use_local_synchronization=True)
        model = gemini.GeminiDDP(model, config, mesh=mesh_of(sizes) if sizes else None, process_group=group)
    if save:
        gemini.save_checkpoint(f"{folder}/marks", model, adam(model))
    else:
        try:
            gemini.load_checkpoint(f"{folder}/marks", model, adam(model))
        except gemini.PlanMismatch:
            assert {m.word for m in model.modules() if isinstance(m, Marked)} == {"none"}
            raise
    return {name: (m.word, m.grown.tolist()) for name, m in model.named_modules() if isinstance(m, Marked)}


MESHES: tuple[dict[str, int], ...] = ({"dp": 2}, {"pp": 2}, {"tp": 2}, {})


@pytest.mark.parametrize("after", MESHES, ids=str)
@pytest.mark.parametrize("before", MESHES, ids=str)
def test_from_any_mesh_into_any(before: dict[str, int], after: dict[str, int], pool_of: Pools, tmp_path: Any) -> None:
    pool, found = pool_of(2), dict[str, Any]()
    pool.run(marks, before, str(tmp_path), True)
    for own in pool.run(marks, after, str(tmp_path), False):
        found.update(own)
    assert len(found) == 4
    for number in range(4):
        name = f"model.layers.{number}.input_layernorm"
        assert found[name] == (f"layer {number}", [float(i) for i in range(number + 1)])


def test_what_one_rank_does_not_take_no_rank_has(pool_of: Pools, tmp_path: Any) -> None:
    pool_of(2).run(marks, {"dp": 2}, str(tmp_path), True)
    for text in failures(pool_of(2).outcomes(marks, {"dp": 2}, str(tmp_path), False, 1), "PlanMismatch"):
        assert "not here" in text

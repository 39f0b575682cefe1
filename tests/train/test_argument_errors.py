"""Arguments that are meant otherwise: the error says what to write; files that are damaged are named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import gemini
from benchmarks._progress import run
from gemini.train.setup import arguments
from tests.world import world_of

ROOT = Path(__file__).parents[2]
TINY = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32,
}  # fmt: skip


def test_fields_of_the_config_given_to_the_call() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'precision'"):
        gemini.GeminiDDP(model, precision="fp32")
    assert type(model) is nn.Linear
    with pytest.raises(TypeError, match="unexpected keyword argument 'gradients'"):
        gemini.from_config(LlamaConfig(**TINY), gradients="retain")
    for given in ("config.json", {"model_type": "llama"}):
        with pytest.raises(TypeError, match=r"takes a config object.*AutoConfig\.from_pretrained"):
            gemini.from_config(given)


@pytest.mark.parametrize(
    "option, words",
    [
        ("adamw_mode", "decoupled=True"),
        ("amsgrad", "leave it out"),
        ("fused", "one kernel each"),
        ("rho", "it takes params, lr, betas"),
    ],
)
def test_options_of_other_adams(option: str, words: str) -> None:
    with pytest.raises(TypeError, match=f"HybridAdam has no option {option}=: .*{words}"):
        gemini.HybridAdam(nn.Linear(2, 2).parameters(), **{option: True})


def test_checkpoint_arguments_in_another_order(tmp_path: Path) -> None:
    model = gemini.GeminiDDP(nn.Linear(2, 2))
    optimizer = gemini.HybridAdam(model.parameters())
    for call in (gemini.save_checkpoint, gemini.load_checkpoint):
        with pytest.raises(TypeError, match=r"the folder comes first.*Got PosixPath for the model"):
            call(model, tmp_path / "ck", optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"scheduler is a dict, which has no state_dict.*extra="):
        gemini.save_checkpoint(tmp_path / "ck", model, optimizer, {"step": 1})
    assert not any(tmp_path.iterdir())


def test_paths_of_the_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "spill").mkdir()
    memory = gemini.MemoryBudget(cpu="16MiB", nvme="16MiB", nvme_path="~/spill")
    assert memory.nvme_path == tmp_path / "spill"
    config = gemini.GeminiConfig(memory=memory, placement=gemini.StaticPlacement(weights_on_nvme=1.0))
    assert world_of(gemini.GeminiDDP(nn.Linear(8, 8), config)).spill.directory == tmp_path / "spill"
    if Path("/proc/self").exists():
        memory = gemini.MemoryBudget(cpu="16MiB", nvme="16MiB", nvme_path="/proc")
        with pytest.raises(gemini.StorageError, match=r"nvme_path /proc cannot be written: \w+"):
            gemini.GeminiDDP(nn.Linear(8, 8), gemini.GeminiConfig(memory=memory))


# ---- model folders ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in several shards."""
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path / "model", max_shard_size="6KB")
    return tmp_path / "model"


@pytest.mark.parametrize("damage", ["short", "empty", "junk"])
@pytest.mark.parametrize("dtype", ["auto", torch.float32])
def test_a_damaged_shard_is_named(folder: Path, damage: str, dtype: Any) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    for number in (0, 1, -1):
        whole = shards[number].read_bytes()
        shards[number].write_bytes({"short": whole[:-100], "empty": b"", "junk": b"junk" * 40}[damage])
        with pytest.raises(gemini.StorageError, match=rf"{shards[number].name} cannot be read: .*damaged"):
            gemini.from_pretrained(folder, dtype=dtype)
        shards[number].write_bytes(whole)
    assert type(gemini.from_pretrained(folder, dtype=dtype)).__name__ == "LlamaForCausalLM"


def test_a_damaged_pytorch_model_is_named(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    for file in folder.glob("model*"):
        file.unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    managed: Any = gemini.from_pretrained(folder)
    assert torch.equal(managed.full_param("model.norm.weight", torch.float32), model.model.norm.weight)
    whole = (folder / "pytorch_model.bin").read_bytes()
    for data in (whole[:-500], b"junk" * 40, b""):
        (folder / "pytorch_model.bin").write_bytes(data)
        with pytest.raises(gemini.StorageError, match=r"pytorch_model\.bin cannot be read"):
            gemini.from_pretrained(folder)


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("nothere", "./nothere", tmp_path / "nothere"):
        with pytest.raises(OSError, match=rf"{path}: there is no such folder \(looked for in {tmp_path}\)"):
            gemini.from_pretrained(path)


# ---- optional packages -----------------------------------------------------------------------------------------------

WITHOUT = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
try:
    {code}
except ImportError as e:
    print("said:", e)
"""


@pytest.mark.sweep(every=6)
@pytest.mark.parametrize(
    "hidden, code, extra",
    [
        ("accelerate", "from gemini.integrations.huggingface import GeminiTrainer", "trainer"),
        ("accelerate", "from gemini.integrations.accelerate import GeminiAccelerator", "trainer"),
        ("transformers", "from gemini.integrations.huggingface import GeminiTrainer", "trainer"),
        ("transformers", "import gemini; gemini.from_pretrained('model')", "hf"),
        ("transformers", "import gemini; gemini.from_config(object())", "hf"),
        ("lightning", "import gemini.integrations.lightning", "lightning"),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(hidden: str, code: str, extra: str) -> None:
    done = run([sys.executable, "-c", WITHOUT.format(hidden=hidden, code=code)], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("said: ") and "pip install" in done.stdout and hidden in done.stdout
    assert extra in done.stdout


class Lengths(nn.Linear):
    """Whose second input belongs on the CPU, wherever the model computes."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        assert lengths.device.type != "cpu", "the device of a model without a GPU is the CPU"
        return super().forward(x)


def test_a_batch_on_another_device() -> None:
    """Another device than the model's is told by what torch says; what merely is elsewhere is nobody's business."""
    model: Any = gemini.GeminiDDP(nn.Linear(4, 2), gemini.GeminiConfig(precision="fp32", device="cpu"))
    assert model.device == torch.device("cpu")
    with pytest.raises(
        gemini.GeminiError, match=r"computes on cpu.*tensors on meta\. .*value\.to\(model\.device\)"
    ) as e:
        model(torch.zeros(3, 4, device="meta"))
    assert "same device" in str(e.value.__cause__) or "device" in str(e.value.__cause__)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(3, 5))
    model(torch.zeros(3, 4)).sum().backward()
    more: Any = gemini.GeminiDDP(Lengths(4, 2), gemini.GeminiConfig(precision="fp32", device="cpu"))
    more(torch.zeros(3, 4), torch.zeros(3, device="meta"))


def test_config_fields_follow_the_config() -> None:
    assert {"precision", "memory", "placement"} <= arguments.CONFIG_FIELDS

"""Every method of PEFT on every kind of layer, managed, against PEFT alone: a table.

    pip install '.[peft]'
    python benchmarks/peft_kinds.py

Both sides start from the same values in fp32 and are updated by ``HybridAdam``, in memory and with all on NVMe. A cell
is about both placements: "same bits", how far it is from PEFT's, "PEFT: ..." where PEFT alone raises, "refused: ..."
where Gemini says no, and "RAW: ..." where something else was raised. Exit code 1 if a cell is raw or differs.
"""

import argparse
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peft
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import gemini
from benchmarks._report import add_report_arguments, head, publish, table

REFUSALS = (gemini.GeminiError, ValueError, TypeError)
CLOSE = 1e-5
"""Relative; anything further away is a difference."""


class Net(nn.Module):
    """One layer of some kind, called ``layer``, between two others."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]):
        super().__init__()
        self.first, self.layer, self.shape, self.kind = nn.Linear(64, 64), layer, shape, type(layer)
        self.norm = nn.LayerNorm(64)
        self.last = nn.LazyLinear(8)
        self.last(torch.zeros_like(self.middle(torch.zeros(2, 64))))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is nn.Embedding:
            out = self.layer(x.abs().mul(4).long() % 16)
        else:
            out = self.norm(self.first(x)).view(2, *self.shape)
            out = self.layer(out, out, out)[0] if self.kind is nn.MultiheadAttention else self.layer(out)
        return out.flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(x))


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, max_position_embeddings=64, **sizes))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: Net(nn.Linear(64, 64), (64,)),
    "Conv1d": lambda: Net(nn.Conv1d(16, 16, 1), (16, 4)),
    "Conv2d": lambda: Net(nn.Conv2d(4, 4, 3, padding=1), (4, 4, 4)),
    "Conv3d": lambda: Net(nn.Conv3d(8, 8, 3, padding=1), (8, 2, 2, 2)),
    "Embedding": lambda: Net(nn.Embedding(16, 64), (64,)),
    "transformers' Conv1D": lambda: Net(Conv1D(64, 64), (64,)),
    "MultiheadAttention": lambda: Net(nn.MultiheadAttention(16, 2, batch_first=True), (4, 16)),
    "LayerNorm": lambda: Net(nn.Identity(), (64,)),
    "language model": llama,
}

HERE: dict[str, Any] = {"target_modules": ["layer"]}
TASK: dict[str, Any] = {"task_type": "CAUSAL_LM"}

METHODS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": lambda: peft.LoraConfig(r=4, **HERE),
    "LoRA, rsLoRA": lambda: peft.LoraConfig(r=4, use_rslora=True, **HERE),
    "LoRA, bias": lambda: peft.LoraConfig(r=4, bias="all", **HERE),
    "DoRA": lambda: peft.LoraConfig(r=4, use_dora=True, **HERE),
    "LoRA of a param": lambda: peft.LoraConfig(r=4, target_parameters=["layer.weight"], target_modules=[]),
    "AdaLoRA": lambda: peft.AdaLoraConfig(total_step=10, **HERE),
    "AdaMSS": lambda: peft.AdamssConfig(r=16, num_subspaces=2, **HERE),
    "BEFT": lambda: peft.BeftConfig(**HERE),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, **HERE),
    "C3A": lambda: peft.C3AConfig(block_size=8, **HERE),
    "DEFT": lambda: peft.DeftConfig(r=4, **HERE),
    "DeLoRA": lambda: peft.DeloraConfig(r=4, **HERE),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=20, **HERE),
    "FRoD": lambda: peft.FrodConfig(**HERE),
    "GLoRA": lambda: peft.GloraConfig(r=4, **HERE),
    "GraLoRA": lambda: peft.GraloraConfig(r=8, alpha=16, gralora_k=2, **HERE),
    "HiRA": lambda: peft.HiraConfig(r=4, **HERE),
    "HRA": lambda: peft.HRAConfig(r=4, **HERE),
    "IA3": lambda: peft.IA3Config(feedforward_modules=[], **HERE),
    "IA3, feedforward": lambda: peft.IA3Config(feedforward_modules=["layer"], **HERE),
    "Lily": lambda: peft.LilyConfig(r=4, num_B=2, scaling=1.0, **HERE),
    "LN tuning": lambda: peft.LNTuningConfig(target_modules=["norm"]),
    "LoHa": lambda: peft.LoHaConfig(r=4, **HERE),
    "LoKr": lambda: peft.LoKrConfig(r=4, **HERE),
    "MiSS": lambda: peft.MissConfig(r=4, **HERE),
    "MiSS, bat": lambda: peft.MissConfig(r=4, init_weights="bat", **HERE),
    "OFT": lambda: peft.OFTConfig(oft_block_size=4, **HERE),
    "OFT, coft": lambda: peft.OFTConfig(oft_block_size=4, coft=True, eps=1e-2, **HERE),
    "OSF": lambda: peft.OSFConfig(effective_rank=4, **HERE),
    "PEANuT": lambda: peft.PeanutConfig(r=4, **HERE),
    "PSOFT": lambda: peft.PsoftConfig(r=4, **HERE),
    "PVeRA": lambda: peft.PveraConfig(r=4, **HERE),
    "RandLoRA": lambda: peft.RandLoraConfig(r=4, **HERE),
    "RoAd": lambda: peft.RoadConfig(group_size=4, **HERE),
    "SHiRA": lambda: peft.ShiraConfig(r=4, **HERE),
    "SuperTuning": lambda: peft.SupertuningConfig(sparsity=0.5, **HERE),
    "TinyLoRA": lambda: peft.TinyLoraConfig(**HERE),
    "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 2, 3], **HERE),
    "UniLora": lambda: peft.UniLoraConfig(r=4, theta_d_length=32, **HERE),
    "VB-LoRA": lambda: peft.VBLoRAConfig(r=4, num_vectors=16, vector_length=4, **HERE),
    "VeRA": lambda: peft.VeraConfig(r=4, **HERE),
    "WaveFT": lambda: peft.WaveFTConfig(n_frequency=20, **HERE),
}

OF_LANGUAGE_MODELS: dict[str, Callable[[], peft.PeftConfig]] = {
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **TASK),
    "multitask prompts": lambda: peft.MultitaskPromptTuningConfig(num_virtual_tokens=4, num_tasks=2, **TASK),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, **TASK),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **TASK),
    "CPT": lambda: peft.CPTConfig(
        cpt_token_ids=[1, 2, 3, 4], cpt_mask=[1] * 4, cpt_tokens_type_mask=[1, 2, 3, 4], **TASK
    ),
    "cartridge": lambda: peft.CartridgeConfig(num_virtual_tokens=4, **TASK),
    "adaption prompt": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, **TASK),
    "Poly": lambda: peft.PolyConfig(r=4, n_tasks=2, n_skills=2, n_splits=2, target_modules=["q_proj"], **TASK),
    "Shadow": lambda: peft.ShadowConfig(r=4, **TASK),
}


def cases() -> list[tuple[str, str, Callable[[], peft.PeftConfig]]]:
    """Every method on every layer, and what only language models have."""
    layers = [layer for layer in LAYERS if layer not in ("LayerNorm", "language model")]
    found = [
        (method, layer, config)
        for method, config in METHODS.items()
        for layer in (["LayerNorm"] if method == "LN tuning" else layers)
    ]
    return found + [(method, "language model", config) for method, config in OF_LANGUAGE_MODELS.items()]


MORE: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "Poly": lambda: {"task_ids": torch.tensor([0, 1])},
    "multitask prompts": lambda: {"task_ids": torch.tensor([0, 1])},
    "CPT": lambda: {"input_type_mask": torch.full((2, 6), 4)},
}
"""What a method asks of each row beside the data."""


def adapted(layer: str, config: Callable[[], peft.PeftConfig]) -> Any:
    """The same values every time, of adapters too, which at their start would add nothing."""
    torch.manual_seed(0)
    model = peft.get_peft_model(LAYERS[layer](), config())
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        if param.requires_grad and param.is_floating_point():
            param.data.add_(0.05 * torch.randn(param.shape, generator=generator))
    return model


class Side:
    """One model, plain or managed, and the same things done to it."""

    def __init__(self, method: str, layer: str, config: Callable[[], peft.PeftConfig], place: str, folder: Path):
        self.layer, self.folder = layer, folder
        self.more = MORE.get(method, dict)()
        self.model = adapted(layer, config)
        if place != "plain":
            on_nvme = place == "NVMe"
            self.model = gemini.GeminiDDP(
                self.model,
                gemini.GeminiConfig(
                    precision="fp32", device="cpu",
                    memory=gemini.MemoryBudget(cpu="16MiB", nvme="64MiB", nvme_path=folder),
                    placement=gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1) if on_nvme else "auto",
                ),
            )  # fmt: skip

    def outputs(self, model: Any = None) -> torch.Tensor:
        torch.manual_seed(7)
        model = self.model if model is None else model
        if self.layer == "language model":
            return model(**batch(9), **self.more).logits.detach()
        return model(inputs(9), **self.more).detach()

    def trained(self) -> list[Any]:
        optimizer = gemini.HybridAdam([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for seed in range(3):
            torch.manual_seed(seed)
            if self.layer == "language model":
                loss = self.model(**batch(seed), **self.more).loss
            else:
                loss = self.model(inputs(seed), **self.more).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        self.model.eval()
        return [*losses, self.outputs()]

    def merged(self) -> list[Any]:
        self.model.merge_adapter()
        return [self.outputs()]

    def unmerged(self) -> list[Any]:
        self.model.unmerge_adapter()
        return [self.outputs()]

    def disabled(self) -> list[Any]:
        with self.model.disable_adapter():
            off = self.outputs()
        return [off, self.outputs()]

    def merged_and_disabled(self) -> list[Any]:
        self.model.merge_adapter()
        return self.disabled()

    def saved(self) -> list[Any]:
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            self.model.save_pretrained(out)
            torch.manual_seed(0)
            again = peft.PeftModel.from_pretrained(LAYERS[self.layer](), out).eval()
        return [self.outputs(again)]


ABOUT = (
    "Three training steps, then what is named in the column, against PEFT alone in fp32; in memory and with all",
    "on NVMe. Numbers in brackets are messages, below the table. After unmerging, OFT and BOFT leave the weight of",
    "a Linear transposed in memory, which torch multiplies with another kernel: weights are the same bits there,",
    "and what is computed from them is not.",
)
STEPS: dict[str, Callable[[Side], list[Any]]] = {
    "trained": Side.trained, "disabled": Side.disabled, "saved, opened by PEFT": Side.saved, "merged": Side.merged,
    "unmerged": Side.unmerged, "merged, then disabled": Side.merged_and_disabled,
}  # fmt: skip


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def attempt(do: Callable[[], Any]) -> Any:
    """What it gives, or what it raises."""
    try:
        return do()
    except Exception as e:
        return e


def words(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())}".replace("|", "/")


def is_refusal(e: Exception) -> bool:
    """Whether it was raised by Gemini, for users."""
    *_, (frame, _) = traceback.walk_tb(e.__traceback__)
    return isinstance(e, REFUSALS) and frame.f_globals.get("__name__", "").startswith("gemini.")


def compared(theirs: Any, ours: Any) -> str:
    if isinstance(theirs, Exception):
        return f"PEFT: {words(theirs)}"
    if isinstance(ours, Exception):
        if is_refusal(ours):
            return f"refused: {words(ours)}"
        traceback.print_exception(ours, file=sys.stderr)
        return f"RAW: {words(ours)}"
    if any(a.isnan().any() for a in theirs):
        return "PEFT: its values are NaN"
    if all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)):
        return "same bits"
    far = max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in zip(theirs, ours, strict=True))
    return f"within {far:.0e}" if far < CLOSE else f"DIFFERS by {far:.0e}"


def row_of(method: str, layer: str, config: Callable[[], peft.PeftConfig], folder: Path) -> dict[str, str] | Exception:
    """What happened in each step; what PEFT raises where it cannot train this method on this layer."""
    plain = attempt(lambda: Side(method, layer, config, "plain", folder))
    if isinstance(plain, Exception):
        return plain
    cells: dict[str, str] = {}
    expected = {}
    for step, do in STEPS.items():
        expected[step] = attempt(lambda do=do: do(plain))
        if step == "trained" and isinstance(expected[step], Exception):
            return expected[step]
    for place in ("memory", "NVMe"):
        side = attempt(lambda place=place: Side(method, layer, config, place, folder))
        for step, do in STEPS.items():
            ours = side if isinstance(side, Exception) else attempt(lambda do=do, side=side: do(side))
            if isinstance(side, Exception) and step != "trained":
                break
            cell = compared(expected[step], ours)
            if cells.setdefault(step, cell) != cell:
                cells[step] += f"; on NVMe {cell}"
            if step == "trained" and isinstance(ours, Exception):
                break
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_arguments(parser)
    parser.add_argument("--only", default="", help="methods whose names hold this")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, unknown, notes, bad = [], dict[str, list[str]](), list[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        for method, layer, config in cases():
            if args.only.lower() not in method.lower():
                continue
            print(f"{method} on {layer}", file=sys.stderr, flush=True)
            cells = row_of(method, layer, config, Path(folder))
            if isinstance(cells, Exception):
                unknown.setdefault(method, []).append(layer)
                if layer in ("Linear", "language model"):
                    unknown[method].append(f"({words(cells)})")
                continue
            shown = []
            for step in STEPS:
                cell = cells.get(step, "")
                bad += "RAW" in cell or "DIFFERS" in cell
                if ": " in cell:
                    if cell not in notes:
                        notes.append(cell)
                    cell = f"{cell.partition(':')[0]} ({notes.index(cell) + 1})"
                shown.append(cell)
            rows.append((f"{method}, {layer}", *shown))
    report = head(
        "PEFT's methods on every kind of layer",
        [*ABOUT, ""], 1, "peft",
    )  # fmt: skip
    report += table(("method and layer", *STEPS), rows)
    report += ["## Messages", "", *(f"{number}. {note}" for number, note in enumerate(notes, 1)), ""]
    report += ["## Not of PEFT", "", "Layers on which PEFT itself refuses or fails to train the method:", ""]
    report += [f"- {method}: {', '.join(layers)}" for method, layers in unknown.items()]
    publish(report, args.out, theme=None if args.quick or args.only else "peft_kinds")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())

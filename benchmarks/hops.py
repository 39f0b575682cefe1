"""How far a param travels through the code: files, hops between them and calls, for each phase of one step.

    python benchmarks/hops.py
    python benchmarks/hops.py --files --out hops.json

Five Linear layers (10 params) are wrapped, trained for two steps and saved under a call trace of the training thread.
For each phase it says how many files of ``gemini/`` were entered, how often execution went from one of them to another,
and how many functions were called; last, how many Python calls a module costs that moves nothing, inside another one.
Kernels are the reference in torch, so that native code hides nothing. ``--files`` also names the files of forward,
backward and step where everything is in memory, with the calls in each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import gemini
from gemini import kernels

ROOT = str(Path(gemini.__file__).parent)


class Walk:
    """The functions of Gemini that one thread enters, in order."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            self.files.append(frame.f_code.co_filename)

    def figures(self) -> dict[str, int]:
        hops = sum(a != b for a, b in zip(self.files, self.files[1:], strict=False))
        return {"files": len(set(self.files)), "hops": hops, "calls": len(self.files)}

    def by_file(self) -> dict[str, int]:
        """Calls in each file, most of them first."""
        return dict(Counter(name.removeprefix(ROOT + "/") for name in self.files).most_common())


def walk(do: Callable[[], Any]) -> tuple[Any, Walk]:
    seen = Walk()
    sys.setprofile(seen)
    try:
        result = do()
    finally:
        sys.setprofile(None)
    return result, seen


class Block(nn.Module):
    """A numbered part, which is hooked as an entrance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def configs(folder: Path) -> dict[str, gemini.GeminiConfig]:
    def config(overlap: bool, **how: Any) -> gemini.GeminiConfig:
        memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=folder)
        return gemini.GeminiConfig(precision="bf16", memory=memory, overlap=overlap, **how)

    on_nvme = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    return {
        "in memory": config(False),
        "NVMe, serial": config(False, placement=on_nvme),
        "NVMe, overlapped": config(True, placement=on_nvme),
    }


def phases(config: gemini.GeminiConfig, folder: Path) -> dict[str, Walk]:
    torch.manual_seed(0)
    found: dict[str, Walk] = {}
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    bare = nn.Sequential(*(Block() for _ in range(5)))
    model, found["wrap"] = walk(lambda: gemini.GeminiDDP(bare, config))
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
    for _ in range(2):  # the second step is that of every later one
        loss, found["forward"] = walk(lambda: model(x).float().square().mean())
        _, found["backward"] = walk(loss.backward)
        _, found["step"] = walk(optimizer.step)
        _, found["zero_grad"] = walk(optimizer.zero_grad)
    _, found["save"] = walk(lambda: gemini.save_checkpoint(folder / "saved", model, optimizer))
    return found


def calls_of_unmoved_module(config: gemini.GeminiConfig) -> float:
    """Of a block inside the model, when every weight stays where it is: more blocks, divided by how many more."""

    def calls(num_blocks: int) -> int:
        model = gemini.GeminiDDP(nn.Sequential(*(Block() for _ in range(num_blocks))), config)
        with torch.no_grad():
            model(torch.zeros(1, 16, dtype=torch.bfloat16))
            return len(walk(lambda: model(torch.zeros(1, 16, dtype=torch.bfloat16)))[1].files)

    # What is per chunk and not per module (params become ordinary, and guarded again) is counted too.
    return (calls(40) - calls(20)) / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="name the files")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, kernels.use_isa("reference"):
        for label, config in configs(Path(name)).items():
            folder = Path(name) / label.replace(" ", "_")
            folder.mkdir()
            walks = phases(config, folder)
            report[label] = {phase: seen.figures() for phase, seen in walks.items()}
            if label == "in memory":
                report["files"] = {phase: walks[phase].by_file() for phase in ("forward", "backward", "step")}
        report["calls of an unmoved module"] = calls_of_unmoved_module(configs(Path(name))["in memory"])
    names = [label for label in report if isinstance(report[label], dict) and label != "files"]
    print("files / hops / calls" + "".join(f"{label:>22}" for label in names))
    for phase in report[names[0]]:
        rows = (" / ".join(str(n) for n in report[label][phase].values()) for label in names)
        print(f"{phase:<20}" + "".join(f"{row:>22}" for row in rows))
    print(f"Python calls of a module that moves nothing, inside another: {report['calls of an unmoved module']:.1f}")
    for phase, files in report["files"].items() if args.files else ():
        print(f"\n{phase}: " + ", ".join(f"{name} {calls}" for name, calls in files.items()))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

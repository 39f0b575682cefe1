"""Is what ``gemini plan --fastest`` chooses the quickest step on this machine? Every way to make the step of a small
Llama out of a drive is planned, and some of them, evenly from the quickest predicted to the slowest, are run by the
lines that the plan prints: ``python -m benchmarks.chosen_here --spill FOLDER``.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

import gemini
from benchmarks import _models
from benchmarks._report import add_out, head, publish, table
from benchmarks._rounds import Spread, measure_in_turn, seconds_of
from benchmarks.simulate_here import measure_machine
from gemini.jobs import planner
from gemini.jobs.settings import PlanSettings

CLOSE = 0.05
SHAPE: dict[str, int] = {"hidden": 384, "layers": 8, "vocab": 8192, "tokens": 128}


def ways(settings: PlanSettings, sequences: int, most: int) -> tuple[str, dict[str, Any]]:
    """What is chosen, and up to ``most`` ways with it among them: plan, predicted seconds, by their options."""
    with Console(stderr=True).status("choosing") as status:
        chosen, _, _ = planner.choose(planner.Way(settings), status)
        found = {planner.options_of(chosen): chosen}
        start = planner.Way(settings, planner.Traces(of_two=True))
        for way, blocks in planner._ways(start, sequences):
            for kept in dict.fromkeys((None, blocks // 2 or None, blocks or None)):
                other = way.changed(kept_blocks=kept) if kept else way
                found.setdefault(planner.options_of(other), other)
        played = {}
        for name, way in found.items():
            try:
                status.update(f"playing {name}")
                played[name] = (way, plan := way.plan(), way.seconds_of(plan))
            except gemini.BudgetExceeded:
                continue
    order = sorted(played, key=lambda name: played[name][2])
    picked = {order[i * (len(order) - 1) // max(most - 1, 1)] for i in range(most)} | {next(iter(found))}
    return next(iter(found)), {name: played[name] for name in order if name in picked}


def step_of(way: Any, plan: Any, config: Any, folder: Path, sequences: int) -> Any:
    """Run the lines that the plan prints; gives what makes a step."""
    (path := folder / f"{id(plan)}.json").write_text(plan.to_json())
    lines = planner.run_by(way.changed(out=path), plan)["python"]
    given: dict[str, Any] = {"model": _models.build(config, "bfloat16")}
    exec("\n".join(line for line in lines if "micro_batches" not in line).replace("'FOLDER'", repr(str(folder))), given)
    model = given["model"]
    optimizer, size = gemini.HybridAdam(model.parameters(), lr=1e-4), way.settings.batch_size
    parts = [_models.make_batch({**SHAPE, "batch": size}, number, 0) for number in range(sequences // size)]

    def step() -> None:
        for part in parts if plan.trace.micro_batches == 1 else [gemini.train_step(model, parts)][:0]:
            (model(**part).loss / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.memory_report()  # waits for the updates

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=8, help="of a step")
    parser.add_argument("--cpu", default="160MiB")
    parser.add_argument("--ways", type=int, default=12, help="that are run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spill", type=Path, default=None, help="folder of the drive (default: a temporary one)")
    add_out(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.spill) as name:
        folder = Path(name)
        config = _models.llama_config(*(SHAPE[key] for key in ("hidden", "layers", "vocab")), positions=SHAPE["tokens"])
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        (machine := folder / "machine.json").write_text(measure_machine(folder).to_json())
        settings = PlanSettings(
            config=str(folder / "config.json"), machine=str(machine), compute="cpu", cpu=args.cpu, nvme="4GiB",
            seq_len=SHAPE["tokens"], tokens_per_step=args.sequences * SHAPE["tokens"], fastest=True,
        )  # fmt: skip
        chosen, found = ways(settings, args.sequences, args.ways)
        steps = {each: step_of(*found[each][:2], config, folder, args.sequences) for each in found}
        took = measure_in_turn(tuple(steps), args.rounds, lambda each: seconds_of(steps[each]))
    seconds = {each: statistics.median(values) for each, values in took.items()}
    rows = [
        [f"**{each}**" if each == chosen else each, f"{found[each][2]:.3f}", Spread.of(took[each]).told(3)]
        for each in found
    ]
    best = min(seconds, key=seconds.__getitem__)
    loss = seconds[chosen] / seconds[best] - 1
    step = f"{args.sequences} sequences a step, {args.cpu} of host memory and a drive, {args.rounds} rounds in turn"
    publish(
        [
            *head("What --fastest chooses, beside other ways to make the step", [f"Llama {SHAPE}, {step}."]),
            *table(["way (what is chosen: bold)", "predicted, s", "measured, s"], rows),
            f"The quickest of {len(found)}: {best}. What is chosen takes {loss:.1%} more (goal: at most {CLOSE:.0%}).",
        ],
        args.out,
    )


if __name__ == "__main__":
    main()

"""The commands that answer before anything is run: trace, plan, simulate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gemini.cli.app import OnceForAll, app, refusals
from gemini.jobs.plan_settings import (
    ATTENTIONS,
    COMPUTES,
    MOST_POSITIONS,
    OFFLOADS,
    STEP_SCHEDULES,
    TARGETS,
    PlanSettings,
    TraceSettings,
    as_tiles,
)
from gemini.optim.names import RULES
from gemini.planning.compact import STATES
from gemini.planning.planes import GRADIENTS, PRECISIONS

# Help is grouped by the questions that the options answer.
_WHAT, _STEP, _MACHINE, _OUTPUT = "Which model", "Which step", "On what", "What is written"
_NAMES = "A Hugging Face config.json, a model folder (its weights are not read), or a preset: gpt2-small."

_Layers = Annotated[
    int | None, typer.Option(help="This many layers instead of the config's own.", rich_help_panel=_WHAT)
]
_SeqLen = Annotated[
    int | None,
    typer.Option(
        help=f"Tokens in a window. (Default: the model's positions, at most {MOST_POSITIONS}.)", rich_help_panel=_STEP
    ),
]
_Checkpointing = Annotated[
    bool,
    typer.Option(
        "--gradient-checkpointing",
        help="Compute activations again in backward instead of keeping them.",
        rich_help_panel=_STEP,
    ),
]
_TileTokens = Annotated[
    str | None,
    typer.Option(
        help="Compute MLPs, norms and the output head with its loss so many tokens at a time; auto: where the step "
        "does not fit otherwise. (Default: a whole micro-batch.)",
        rich_help_panel=_STEP,
    ),
]
_Lora = Annotated[
    int | None,
    typer.Option(help="Train a LoRA of this rank on all linear layers; all else is frozen.", rich_help_panel=_STEP),
]
_Attention = Annotated[
    str | None,
    typer.Option(
        help=f"How attention is computed: {', '.join(ATTENTIONS)}. (Default: auto, what transformers chooses.)",
        rich_help_panel=_STEP,
    ),
]
_Machine = Annotated[
    str | None,
    typer.Option(
        help="Whose speeds are predicted with: a machine by name, or a JSON file of `gemini doctor --measure`.",
        rich_help_panel=_MACHINE,
    ),
]
_Schedule = Annotated[
    str,
    typer.Option(
        help=f"What is predicted: {' or '.join(STEP_SCHEDULES)}, which is training with overlap=False.",
        rich_help_panel=_MACHINE,
    ),
]
_Json = Annotated[
    bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.", rich_help_panel=_OUTPUT)
]
_Pictures = Annotated[
    list[Path] | None,
    typer.Option(
        help="Draw the predicted step: .png, .svg, .html, or .json for a trace viewer. Repeat for more.",
        rich_help_panel=_OUTPUT,
    ),
]
_T, _P = TraceSettings(), PlanSettings()


@app.command(cls=OnceForAll)
@refusals
def trace(
    config: Annotated[str, typer.Argument(help=_NAMES, show_default=False)],
    layers: _Layers = None,
    batch_size: Annotated[int, typer.Option(help="Windows in a forward pass.", rich_help_panel=_STEP)] = _T.batch_size,
    seq_len: _SeqLen = None,
    precision: Annotated[
        str, typer.Option(help=f"What is computed in: {', '.join(PRECISIONS)}.", rich_help_panel=_STEP)
    ] = _T.precision,
    gradient_checkpointing: _Checkpointing = False,
    tile_tokens: _TileTokens = None,
    lora: _Lora = None,
    attn_implementation: _Attention = None,
    tp: Annotated[int, typer.Option(help="Slices of layers, of which this is one.", rich_help_panel=_STEP)] = 1,
    cp: Annotated[int, typer.Option(help="Parts of sequences, of which this is one.", rich_help_panel=_STEP)] = 1,
    target: Annotated[
        str, typer.Option(help=f"Whose workspaces count: {', '.join(TARGETS)}.", rich_help_panel=_STEP)
    ] = _T.target,
    json: _Json = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the trace to this JSON file: what --trace of `plan` takes.", rich_help_panel=_OUTPUT),
    ] = None,
) -> int:
    """Trace a step of a model ahead of time: its memory beside params and its work. Needs no weights and no GPU."""
    settings = TraceSettings(
        config=config,
        layers=layers,
        batch_size=batch_size,
        seq_len=seq_len,
        precision=precision,
        gradient_checkpointing=gradient_checkpointing,
        tile_tokens=as_tiles(tile_tokens),
        lora=lora,
        attn_implementation=attn_implementation,
        tensor_parallel=tp,
        context_parallel=cp,
        target=target,
    )
    settings.check()
    from gemini.jobs.trace import trace as job

    return job(settings, Console(), as_json=json, out=out)


@app.command(cls=OnceForAll)
@refusals
def plan(
    config: Annotated[
        str | None, typer.Argument(help=f"{_NAMES} With --trace it may be left out.", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Take the step from this file of `trace --out`.", rich_help_panel=_WHAT),
    ] = None,
    layers: _Layers = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Windows in a forward pass of each GPU. (Default: 1.)", rich_help_panel=_STEP)
    ] = None,
    seq_len: _SeqLen = None,
    accumulate: Annotated[
        int, typer.Option(help="Batches in an optimizer step.", rich_help_panel=_STEP)
    ] = _P.accumulate,
    micro_batch: Annotated[
        str | None,
        typer.Option(
            help="auto: keep the windows of a step (--batch-size times --accumulate), and choose how many of them go "
            "through a forward pass at once.",
            rich_help_panel=_STEP,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help=f"What is computed in: {', '.join(PRECISIONS)}. (Default: bf16.)", rich_help_panel=_STEP),
    ] = None,
    gradients: Annotated[
        str | None,
        typer.Option(
            help=f"What is kept until the update: {', '.join(GRADIENTS)}. (Default: retain, or accumulate with "
            "--accumulate.)",
            rich_help_panel=_STEP,
        ),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help=f"The update rule: {', '.join(RULES)}.", rich_help_panel=_STEP)
    ] = _P.optimizer,
    states: Annotated[
        str,
        typer.Option(
            help=f"How optimizer states and masters are kept: {', '.join(STATES)} (8 bits, 5 bytes per param in all).",
            rich_help_panel=_STEP,
        ),
    ] = _P.states,
    gradient_checkpointing: _Checkpointing = False,
    tile_tokens: _TileTokens = None,
    lora: _Lora = None,
    offload_activations: Annotated[
        str,
        typer.Option(
            help=f"Where the inputs of checkpointed blocks wait for backward: {', '.join(OFFLOADS)}.",
            rich_help_panel=_STEP,
        ),
    ] = _P.offload_activations,
    attn_implementation: _Attention = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Budget on each GPU, such as 24GiB. (Default: 80 % of what the machine's has.)",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    cpu: Annotated[
        str | None,
        typer.Option(
            help="Budget in host memory, for all GPUs of a machine together. (Default: 80 % of the machine's.)",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    nvme: Annotated[
        str | None,
        typer.Option(
            help="Budget on NVMe drives, for all GPUs of a machine together. (Default: 80 % of the machine's.)",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    machine: _Machine = None,
    gpus: Annotated[
        int, typer.Option(help="GPUs (or, on CPUs, processes) that share the model.", rich_help_panel=_MACHINE)
    ] = _P.gpus,
    tp: Annotated[
        int, typer.Option(help="GPUs that share each layer, in slices (tensor parallel).", rich_help_panel=_MACHINE)
    ] = _P.tp,
    pp: Annotated[
        int, typer.Option(help="Stages of a pipeline; --accumulate says its micro-batches.", rich_help_panel=_MACHINE)
    ] = _P.pp,
    cp: Annotated[
        int, typer.Option(help="GPUs that share each sequence, in parts (context parallel).", rich_help_panel=_MACHINE)
    ] = _P.cp,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="auto: the best of all meshes of --gpus for the windows of a step, and the runners-up.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(
            help=f"Where forward and backward run: {', '.join(COMPUTES)}. (Default: gpu if there is one.)",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    schedule: _Schedule = _P.schedule,
    alternatives: Annotated[
        bool,
        typer.Option(
            "--alternatives",
            help="A table of what else the machine could do with the step: checkpointing, tiles, transient gradients, "
            "compact states, a LoRA, twice the GPUs. Each is planned as the step is.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    json: _Json = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the plan to this JSON file: what `simulate` takes.", rich_help_panel=_OUTPUT),
    ] = None,
    picture: _Pictures = None,
) -> int:
    """Does it fit, how fast will it be, what should be changed? From a config alone; exit code 2 if it does not fit.

    For example: gemini plan config.json --gpu 24GiB --cpu 64GiB --nvme 1TB --machine rtx4090
    """
    settings = PlanSettings(
        config=config,
        trace=trace,
        layers=layers,
        batch_size=batch_size,
        seq_len=seq_len,
        precision=precision,
        gradient_checkpointing=gradient_checkpointing,
        tile_tokens=as_tiles(tile_tokens),
        lora=lora,
        attn_implementation=attn_implementation,
        accumulate=accumulate,
        micro_batch=micro_batch,
        gradients=gradients,
        optimizer=optimizer,
        states=states,
        offload_activations=offload_activations,
        gpu=gpu,
        cpu=cpu,
        nvme=nvme,
        machine=machine,
        gpus=gpus,
        tp=tp,
        pp=pp,
        cp=cp,
        parallel=parallel,
        compute=compute,
        schedule=schedule,
    )
    settings.check()
    from gemini.jobs.plan import plan as job

    return job(
        settings, Console(), as_json=json, out=out, pictures=tuple(picture or ()), with_alternatives=alternatives
    )


@app.command()
@refusals
def machines() -> int:
    """List the machines that --machine knows by name; their figures are data sheets' peaks, each with its source."""
    from gemini.errors import human_bytes
    from gemini.planning.machines import machine, machine_names
    from gemini.tiers import Tier

    for name in machine_names():
        known = machine(name)
        sizes = (f"{tier.value} {human_bytes(known.capacity(tier) or 0)}" for tier in Tier)
        typer.echo(f"{name:<10}{known.figures['num_gpus'].value:>3.0f} x {',  '.join(sizes)}")
    return 0


@app.command(cls=OnceForAll)
@refusals
def simulate(
    plan: Annotated[Path, typer.Argument(help="A plan: a JSON file of `plan --out`.", show_default=False)],
    machine: _Machine = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="Divide a plan of one GPU among this many. (Default: as it was planned.)", rich_help_panel=_MACHINE
        ),
    ] = None,
    schedule: _Schedule = _P.schedule,
    json: _Json = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the timeline to this JSON file.", rich_help_panel=_OUTPUT)
    ] = None,
    picture: _Pictures = None,
) -> int:
    """Play a plan on a machine: how long a step takes, what waits for what, what moves and what every tier holds."""
    from gemini.jobs.simulate import simulate as job

    return job(
        plan,
        Console(),
        machine=machine,
        gpus=gpus,
        schedule=schedule,
        as_json=json,
        out=out,
        pictures=tuple(picture or ()),
    )

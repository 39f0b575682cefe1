"""The commands that train, and the one that says what there is to train on: train, demo, doctor."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gemini.cli.app import OnceForAll, app, refusals
from gemini.jobs.plan_settings import as_tiles
from gemini.jobs.settings import PRECISIONS, SCHEDULES, TrainSettings
from gemini.jobs.text_files import DEFAULT_GLOBS
from gemini.planning.compact import STATES
from gemini.ranks import launch


@app.command()
@refusals
def doctor(
    nvme_path: Annotated[
        Path | None, typer.Option(help="Try this folder as the NVMe tier: direct I/O or not, and the room on it.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the machine's speeds as well; with --nvme-path the drive's too.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write what was measured to this file, for --machine of gemini plan.")
    ] = None,
) -> int:
    """Say what this machine offers: versions, processors, native kernels, memory, disks; --measure how fast it is."""
    if not launch.speaks():
        return 0
    from gemini.jobs.doctor import doctor as job

    return job(Console(), nvme_path=nvme_path, measure=measure, json=json)


_DEFAULTS = TrainSettings(data=())
# Help is grouped by the questions of the settings record.
_WHAT, _HOW, _MEMORY, _FILES = "What is trained, on what", "How", "In how much memory", "What is written"


@app.command(cls=OnceForAll)
@refusals
def train(
    model: Annotated[
        Path | None,
        typer.Option(
            help="A Hugging Face config.json (weights are drawn from --seed, tokens are bytes), or a model folder (its "
            "weights are loaded, and its tokenizer is used).",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="A built-in shape instead of --model: gpt2-small.", rich_help_panel=_WHAT)
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="This many layers instead of the config's own.", rich_help_panel=_WHAT)
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of plain text, or a folder to search for --glob. Repeat for more.", rich_help_panel=_WHAT
        ),
    ] = None,
    glob: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Which files of a folder are text. Repeat for more. (Default: {' '.join(DEFAULT_GLOBS)}.)",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    bytes: Annotated[
        bool,
        typer.Option(
            "--bytes",
            help="Every byte is a token, whatever tokenizer the model folder has, and any file is text.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    seq_len: Annotated[int, typer.Option(help="Tokens in a window.", rich_help_panel=_HOW)] = _DEFAULTS.seq_len,
    batch_size: Annotated[
        int, typer.Option(help="Windows in a forward pass of each process.", rich_help_panel=_HOW)
    ] = _DEFAULTS.batch_size,
    accumulate: Annotated[
        int, typer.Option(help="Batches in an optimizer step.", rich_help_panel=_HOW)
    ] = _DEFAULTS.accumulate,
    steps: Annotated[
        int, typer.Option(help="Optimizer steps, those before a resume included.", rich_help_panel=_HOW)
    ] = _DEFAULTS.steps,
    lr: Annotated[float, typer.Option(help="Learning rate after the warm-up.", rich_help_panel=_HOW)] = _DEFAULTS.lr,
    weight_decay: Annotated[
        float, typer.Option(help="AdamW's weight decay; biases and norms have none.", rich_help_panel=_HOW)
    ] = _DEFAULTS.weight_decay,
    warmup: Annotated[
        int, typer.Option(help="Steps over which the learning rate rises.", rich_help_panel=_HOW)
    ] = _DEFAULTS.warmup,
    schedule: Annotated[
        str, typer.Option(help=f"The learning rate after that: {', '.join(SCHEDULES)}.", rich_help_panel=_HOW)
    ] = _DEFAULTS.schedule,
    clip: Annotated[
        float, typer.Option(help="Largest gradient norm; 0 turns clipping off.", rich_help_panel=_HOW)
    ] = _DEFAULTS.clip,
    precision: Annotated[
        str, typer.Option(help=f"What is computed in: {', '.join(PRECISIONS)}.", rich_help_panel=_HOW)
    ] = _DEFAULTS.precision,
    states: Annotated[
        str,
        typer.Option(
            help=f"How optimizer states and masters are kept: {', '.join(STATES)} (8 bits, 5 bytes per param in all).",
            rich_help_panel=_HOW,
        ),
    ] = _DEFAULTS.states,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing",
            help="Compute activations again in backward instead of keeping them.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    tile_tokens: Annotated[
        str | None,
        typer.Option(
            help="Compute MLPs, norms and the output head with its loss so many tokens at a time; auto: where the step "
            "does not fit otherwise. (Default: a whole batch.)",
            rich_help_panel=_HOW,
        ),
    ] = None,
    attn_implementation: Annotated[
        str,
        typer.Option(
            help="How attention is computed: eager, sdpa, flash_attention_2, or another name of transformers. auto: "
            "what the config says; else FlashAttention on a GPU where it is installed, and torch's sdpa.",
            rich_help_panel=_HOW,
        ),
    ] = _DEFAULTS.attn_implementation,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the repeated blocks with torch.compile.", rich_help_panel=_HOW)
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Draws the weights, the order of the text and dropout.", rich_help_panel=_HOW)
    ] = _DEFAULTS.seed,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda. (Default: cuda if there is one.)", rich_help_panel=_HOW)
    ] = None,
    rank_timeout: Annotated[
        int,
        typer.Option(
            help="Of several processes (torchrun): seconds to wait for another one before it counts as lost.",
            rich_help_panel=_HOW,
        ),
    ] = _DEFAULTS.rank_timeout,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            help="Budget on the GPU of each process, such as 20GiB. (Default: what is free.)", rich_help_panel=_MEMORY
        ),
    ] = None,
    cpu_memory: Annotated[
        str | None,
        typer.Option(
            help="Budget in host memory, for all processes of a machine together. (Default: what is free.)",
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    nvme_memory: Annotated[
        str | None,
        typer.Option(
            help="Budget on the drive of --nvme-path, for all processes of a machine together.", rich_help_panel=_MEMORY
        ),
    ] = None,
    nvme_path: Annotated[
        Path | None,
        typer.Option(
            help="A folder for what does not fit elsewhere. The file in it has no name.", rich_help_panel=_MEMORY
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(help="The part of --gpu-memory to leave to activations, such as 4GiB.", rich_help_panel=_MEMORY),
    ] = None,
    offload_activations: Annotated[
        str | None,
        typer.Option(
            help="Where the inputs of checkpointed blocks wait for backward: cpu or nvme. (Default: where they are.)",
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="A plan that `gemini plan --out` wrote for this model: its budgets, homes and moves.",
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="A folder for the model and the checkpoints.", rich_help_panel=_FILES)
    ] = _DEFAULTS.out,
    save_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; 0 writes none but on Ctrl-C.", rich_help_panel=_FILES)
    ] = _DEFAULTS.save_every,
    keep: Annotated[int, typer.Option(help="Checkpoints to keep.", rich_help_panel=_FILES)] = _DEFAULTS.keep,
    resume: Annotated[
        str | None,
        typer.Option(help="A checkpoint folder, or 'auto' for the newest in --out.", rich_help_panel=_FILES),
    ] = None,
    log_every: Annotated[
        int, typer.Option(help="Steps between lines where there is no terminal.", rich_help_panel=_FILES)
    ] = _DEFAULTS.log_every,
) -> int:
    """Train a causal language model on local text files, in the memory given. Ctrl-C saves a checkpoint.

    Several processes share the model and the work: torchrun --nproc-per-node 2 -m gemini train ...
    """
    options = dict(locals())
    options["data"] = tuple(data or ())
    options["glob"] = tuple(glob or DEFAULT_GLOBS)
    options["tile_tokens"] = as_tiles(tile_tokens)
    settings = TrainSettings(**options)
    settings.check()
    from gemini.jobs.train import train as job

    return job(settings, Console(), command=_again())


@app.command()
@refusals
def demo(
    full: Annotated[bool, typer.Option("--full", help="Four times the context and more steps.")] = False,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    cpu_memory: Annotated[
        str | None, typer.Option(help="Budget in host memory. (Default: a fixed part of what the model needs.)")
    ] = None,
    nvme_path: Annotated[
        Path | None, typer.Option(help="A folder for the rest. (Default: a new one in --out.)")
    ] = None,
    out: Annotated[Path, typer.Option(help="A folder for the model.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Draws the weights, the order of the text and dropout.")] = 0,
) -> int:
    """Train a GPT-2-shaped model on Python's own library in less memory than it needs, and check the result."""
    from gemini.jobs.demo import demo as job

    return job(Console(), full=full, steps=steps, cpu_memory=cpu_memory, nvme_path=nvme_path, out=out, seed=seed)


def _again() -> str:
    """The command line that continues this run: the same one, resuming."""
    words = sys.argv[1:]
    for index, word in enumerate(words):
        if word == "--resume" and index + 1 < len(words):
            words = words[:index] + words[index + 2 :]
            break
        if word.startswith("--resume="):
            words = words[:index] + words[index + 1 :]
            break
    return launch.again(shlex.join([*words, "--resume", "auto"]))

"""TrainingArguments that Gemini cannot honour are refused when the Trainer is made, naming what can be done instead."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from gemini.config import GeminiConfig
from gemini.errors import warn
from gemini.rules import rule_of
from gemini.train.modules.changing import BLOCKS_INSTEAD

from .rules import BY_NAME, rule_of_name
from .settings import check_precision

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
_PEERS = ("deepspeed", "fsdp", "megatron_lm")


def check_args(args: Any) -> None:
    """Refuse what takes Gemini's own place, or needs what a managed model has not."""
    for peer in _PEERS:
        if getattr(args, peer, None) or os.environ.get(f"ACCELERATE_USE_{peer.upper()}", "false").lower() == "true":
            raise ValueError(
                f"{peer}= cannot be used with GeminiTrainer, which shards and offloads the model itself: leave it out "
                "(in `accelerate config` too). GeminiConfig(memory=gemini.MemoryBudget(...)) says what goes where"
            )
    if args.torch_compile:
        raise ValueError(
            f"torch_compile=True: a managed model cannot be compiled as a whole; leave it out. {BLOCKS_INSTEAD}"
        )
    optim = getattr(args.optim, "value", args.optim)
    if optim not in (*OPTIMIZERS, *BY_NAME):
        raise ValueError(
            f"optim={optim!r} cannot update a managed model: use one of {', '.join(map(repr, OPTIMIZERS))} (both "
            "become gemini.HybridAdam: exact fp32 masters and states on whatever tier the budgets say), of "
            f"{', '.join(map(repr, BY_NAME))}, or GeminiConfig(optimizer=rule) with any rule of gemini.optim"
        )
    if args.save_on_each_node and int(os.environ.get("WORLD_SIZE", 1)) > int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        raise ValueError(
            "save_on_each_node=True: a checkpoint is written by all nodes into one folder; give an output_dir they "
            "share"
        )


def with_rule(args: Any, config: GeminiConfig | None) -> GeminiConfig | None:
    """The config of a model that is to be managed, with the rule that ``optim=`` says."""
    optim = getattr(args.optim, "value", args.optim)
    if optim not in BY_NAME:
        return config
    config, (rule, _) = config or GeminiConfig(), rule_of_name(args)
    if config.optimizer is not None and rule_of(config.optimizer).face == rule:
        return config
    if config.optimizer is not None:
        raise ValueError(
            f"optim={optim!r} is {rule!r}, and the model is to be managed for {config.optimizer!r}: say one of them"
        )
    return replace(config, optimizer=rule)


def check_managed_args(args: Any, config: GeminiConfig | None) -> None:
    """Compare arguments with how the model is, or is to be, managed."""
    precision = check_precision(args.mixed_precision, config, f"TrainingArguments({args.mixed_precision}=True)")
    for flag in ("bf16", "fp16"):
        if getattr(args, f"{flag}_full_eval") and precision != flag:
            raise ValueError(
                f"{flag}_full_eval=True, but the model is managed in {precision} and evaluated in it: leave it out, or "
                f"train in {flag} too"
            )
    transient = config is not None and config.gradients == "transient"
    if transient and (args.max_grad_norm or args.gradient_accumulation_steps > 1):
        raise ValueError(
            'GeminiConfig(gradients="transient") updates inside backward, so that gradients can be neither clipped nor '
            "accumulated: give TrainingArguments(max_grad_norm=0, gradient_accumulation_steps=1), or use "
            'gradients="retain"'
        )


def use_one_gpu(args: Any) -> None:
    """Without torchrun the Trainer would put DataParallel around the model where it sees several GPUs."""
    if args.n_gpu > 1:
        warn(f"{args.n_gpu} GPUs are there, one is used: `torchrun --nproc-per-node {args.n_gpu}` uses all")
        args._n_gpu = 1

"""The training jobs: a trainer of TRL's on a model that Gemini manages, in the memory that it was given.

Everything that can be refused is refused before the first step, the cheap checks first; the model is read straight into
its tiers. Under torchrun every process makes the same run; each takes its part of every batch. Rank 0 prints, writes,
and chooses where to go on.
"""

from __future__ import annotations

import copy
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from rich.console import Console
from torch import nn

import gemini
import gemini.integrations.trl as ready
from gemini.errors import counted
from gemini.integrations.beside import budget_for
from gemini.integrations.huggingface_durable import store_behind
from gemini.integrations.metrics import MetricsCallback
from gemini.integrations.parallelism import parallel_of
from gemini.jobs import checkpoints
from gemini.jobs.data import CountsRows, open_data, words_of
from gemini.jobs.errors import JobError, as_job_error, refusing
from gemini.jobs.models import (
    ModelSource,
    byte_tokenizer,
    find_model,
    hush,
    load_tokenizer,
    name_the_loss,
)
from gemini.jobs.screen import budget_lines, refusing_in_options, shares
from gemini.jobs.team import Team, join
from gemini.jobs.train_options import (
    Options,
    Parser,
    check_step,
    options_of,
    plan_command,
    precision_of,
    to_yaml,
)
from gemini.jobs.watch import Position, Shown, Stop, StopWish, identity_of
from gemini.planning import document
from gemini.planning.rules import rule_named
from gemini.ranks import launch
from gemini.tiers import Tier
from gemini.train.ddp import GeminiDDP
from gemini.train.loading.attention import Attention
from gemini.train.loading.from_config import skeleton_from_config
from gemini.train.loading.from_pretrained import skeleton_from_pretrained
from gemini.train.loading.skeleton import replaced
from gemini.train.modules.compiled import compile_blocks
from gemini.train.params.codes import num_weights

PAIRS = ("dpo", "reward")
"""Trainers whose forward pass has two sequences for each row."""
MARKS = (
    " Templates that mark what the assistant says are in docs/examples/chat_templates, for --chat_template_path FILE; "
    "without --assistant_only_loss all of a chat is learned."
)
_STOPPING = "Stopping after this step, then saving. Once more stops at once, and saves nothing."


def train(kind: str, words: Sequence[str], console: Console) -> int:
    """Run a job as the command line does; returns the exit code. ``kind``: "sft", "dpo", ..."""
    hush()
    parser = Parser(kind)
    if {"-h", "--help"} & {*words}:
        parser.print_help()
        return 0
    asked = parser.read(words)
    cuda = torch.cuda.is_available() and not asked.values.use_cpu
    with join(asked.values.ddp_timeout, cuda=cuda) as team, team.speaking(), ExitStack() as until_end:
        with team.all_or_none("the options"):
            options = options_of(asked, team.size)
            rewards = {"reward_funcs": reward_functions(options.script)} if kind in ("grpo", "rloo") else {}
            if team.is_first:
                until_end.enter_context(checkpoints.claimed(Path(options.args.output_dir)))
        if not team.is_first:
            console = Console(quiet=True, force_terminal=False)
        return Run(kind, options, console, team, rewards).go(launch.again(command_again(kind, words)))


def command_again(kind: str, words: Sequence[str]) -> str:
    """The words that go on with a run."""
    last = ["--resume_from_checkpoint", "auto"]  # of an option that is given twice, the last one counts
    return shlex.join([kind, *words] if [*words[-2:]] == last else [kind, *words, *last])


class Run:
    """A model under Gemini in a trainer, with its data, ready for the next step.

    Raises:
        JobError: if the options, the model or the data cannot be trained on.
        gemini.GeminiError: if the model cannot fit the budgets, or the NVMe folder or a checkpoint is unusable.
    """

    def __init__(
        self, kind: str, options: Options, console: Console, team: Team, rewards: Mapping[str, Any] | None = None
    ) -> None:
        self.kind, self.options, self.team, self._console = kind, options, team, console
        self.begun_at, args, self.out, self._more = 0, options.args, Path(options.args.output_dir), rewards or {}
        with team.all_or_none("the preparation of the job"):
            checkpoints.prepare_out(self.out)
            source = find_model(
                options.model.model_name_or_path,
                as_bytes=options.ours.bytes,
                trust=args.trust_remote_code,
                revision=options.model.model_revision,
            )
            _check_model(source, options)
            found = self._find_checkpoint() if team.is_first else None
            data = open_data(options.script, options.mixture, args.seed)
            tokenizer = self._tokenizer(source, data)
            length = getattr(args, "max_length", None)
            identity = identity_of(data[options.script.dataset_train_split], args.seed, length)
        everyone = team.tell([None if found is None else str(found), identity], "the comparison of the data")
        for rank, (_, other) in enumerate(everyone):
            if other != everyone[0][1]:
                raise JobError(
                    f"rank {rank} found other rows than rank 0. Every process reads all of them: give a --dataset_name "
                    "that is the same on all machines."
                )
        self._resume = None if everyone[0][0] is None else Path(everyone[0][0])
        self.position = Position(identity)
        self.model = self._managed(source)
        self._wish = StopWish(_STOPPING if team.is_first else "")
        self._stop = Stop(self._wish, team, console)
        self.trainer = self._trainer(data, tokenizer)
        if self._resume is not None:
            self.position.check(self._resume)

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return torch.device(self.options.args.device)

    # ---- before the first step ---------------------------------------------------------------------------------------

    def _find_checkpoint(self) -> Path | None:
        ours, asked = self.options.ours, self.options.args.resume_from_checkpoint
        # Of several folders the first one has the records.
        store = Path(ours.nvme_path[0]) if ours.durable_every and ours.nvme_path else None
        return checkpoints.choose("auto" if asked in ("True", "true") else asked, self.out, store=store)

    def _tokenizer(self, source: ModelSource, data: dict[str, Any]) -> Any:
        """The tokenizer, once it is known that the model has a number for each of its tokens."""
        model, args = self.options.model, self.options.args
        if source.tokenizer is None:
            tokenizer, words = byte_tokenizer(), "byte-level tokens (ids 0..255, 256 ends a document)"
        else:
            tokenizer = load_tokenizer(source.tokenizer, trust=args.trust_remote_code, revision=model.model_revision)
            words = f"tokenizer of {source.tokenizer} with {len(tokenizer)} ids"
        vocabulary = source.config.get_text_config().vocab_size
        if len(tokenizer) > vocabulary:
            raise JobError(
                f"{source.label} has a vocabulary of {vocabulary}; {words} need {len(tokenizer)}. Give a config with a "
                f"vocab_size of at least {len(tokenizer)}."
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        train, test = self.options.script.dataset_train_split, self.options.script.dataset_test_split
        self._console.print(f"data: {words_of(data, train)}; {words}")
        if args.eval_strategy != "no":
            if test not in data:
                raise JobError(
                    f"--eval_strategy {args.eval_strategy.value}: the data has no split {test!r} (it has "
                    f"{', '.join(data)}). --test_split_size 0.05 takes one, --dataset_test_split names another."
                )
            self._console.print(f"to evaluate on: {words_of(data, test)}")
        return tokenizer

    def _managed(self, source: ModelSource) -> Any:
        """The model in its tiers, and the plan of it on the screen."""
        args, ours = self.options.args, self.options.ours
        with self.team.all_or_none("the outline of the model"):
            outline, lacking = outline_of(self.kind, source, self.options)
            if self.options.compiles:
                _compile(outline)
        notes: list[str] = []
        config = make_config(self.kind, self.options, source, notes)
        self._console.print(*notes, sep="\n", end="\n" if notes else "")
        mesh = mesh_of(self.options, self.team.size)
        transformers.set_seed(args.seed)  # drawn weights must not depend on what ran before
        with refusing_in_options("--nvme_path FOLDER --nvme_memory", f"Other ways: {plan_command(self.options)}"):
            with nullcontext() if mesh is None else as_job_error(asked="The model cannot be dealt out"):
                is_built = isinstance(outline, nn.Module)
                model: Any = GeminiDDP(outline, config, mesh=mesh) if is_built else outline.manage(config, mesh=mesh)
        if self.options.compiles:
            _compile(model)  # drawing builds the model anew
        name_the_loss(model).train()
        params = list(model.parameters())
        count, trained = sum(map(num_weights, params)), sum(p.numel() for p in params if p.requires_grad)
        if args.save_strategy != "no" and self.team.is_first:
            checkpoints.check_room(self.out, checkpoints.num_bytes(count, trained), args.save_total_limit or 1)
        self._console.print(
            f"model: {source.label}, {count:,} params{'' if trained == count else f', {trained:,} of them trained'}, "
            f"{config.precision}, {model.config._attn_implementation} attention"
        )
        if lacking:
            more = f" and {len(lacking) - 3:,} more" if len(lacking) > 3 else ""
            self._console.print(f"not in its files, and therefore drawn at random: {', '.join(lacking[:3])}{more}")
        if self.team.size > 1:
            sharing, each = ours.tp * ours.cp, args.per_device_train_batch_size
            batch = counted(self.team.size // sharing * each, "sequence")
            who = "each takes" if sharing == 1 else f"{sharing} of them together take"
            self._console.print(
                f"{self.team.size} processes: each keeps a share of the model and of the memory; {who} {each} of the "
                f"{batch} of a batch"
            )
        self._console.print(f"plan{' of rank 0' if self.team.size > 1 else ''}: {model._gemini_engine.decision.plan}")
        return model

    def _trainer(self, data: dict[str, Any], tokenizer: Any) -> Any:
        args, script, ours = self.options.args, self.options.script, self.options.ours
        callbacks: list[Any] = [MetricsCallback(), Shown(self._console), self._stop, self.position]
        if ours.patience is not None:
            callbacks.append(transformers.EarlyStoppingCallback(ours.patience))
        use_cache = getattr(self.model.config, "use_cache", None)
        if getattr(args, "precompute_ref_log_probs", False):
            self._console.print("the reference is the model itself as it is now: what it says of each row is kept")
        marks = getattr(args, "assistant_only_loss", False)
        with refusing(f"gemini {self.kind}", MARKS if marks else "", innermost=True), _base_as_reference(self.model):
            trainer = trainer_class(self.kind)(
                model=self.model,
                args=args,
                train_dataset=data[script.dataset_train_split],
                eval_dataset=data[script.dataset_test_split] if args.eval_strategy != "no" else None,
                processing_class=tokenizer,
                callbacks=callbacks,
                **self._more,
            )
        if use_cache is not None:
            self.model.config.use_cache = use_cache  # switched off for training; the saved model is to generate with it
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.durable_every = ours.durable_every or 1
        for line in trainer.told:
            self._console.print(line)
        if self.team.size > 1:
            # Or dropout would drop the same on every rank; slices of a layer drop the same.
            transformers.set_seed(args.seed + self.team.rank // ours.tp)
        return trainer

    # ---- the steps ---------------------------------------------------------------------------------------------------

    def steps(self) -> bool:
        """Train to the last step, or to the whole step after Ctrl-C, where a checkpoint is; say if that was the end."""
        trainer = self.trainer
        self.begun_at = self._start()
        try:
            with self._wish:
                trainer.train(None if self._resume is None else str(self._resume))
        except gemini.NonFiniteGradient as e:
            trainer.optimizer.zero_grad()
            trainer._save_checkpoint(self.model, None)
            at = trainer.state.global_step
            raise JobError(
                f"The gradients of step {at + 1} hold inf or NaN, so no weight was changed. The state before it is "
                f"saved as checkpoint-{at}; --resume_from_checkpoint auto goes on from there. A lower --learning_rate "
                "may help."
            ) from e
        return trainer.state.global_step >= trainer.state.max_steps or not self._stop.heeded

    def go(self, again: str) -> int:
        """Make the steps and write the model; returns the exit code. ``again``: how to call it to go on."""
        finished, state = self.steps(), self.trainer.state
        past = self.begun_at > state.max_steps
        if finished and not past:
            self.trainer.save_model(str(self.out))
            self.trainer.save_state()
        memory = self.model.memory_report()
        shared = self.model._gemini_engine.config.memory
        own = shares(shared.report() if isinstance(shared, gemini.SharedBudget) else memory)
        lines, all_within = budget_lines(*self.team.tell(own, "the end of the job"))
        self._console.print(str(memory), *lines, sep="\n")
        if not finished:
            self._console.print(f"Stopped after step {state.global_step} of {state.max_steps}. To go on: {again}")
            return 130
        what, whose = ("adapter", "peft's AutoPeftModel") if self.options.model.use_peft else (
            "model", "transformers' AutoModel")  # fmt: skip
        said = f"The {what} is in {self.out}; it opens with {whose}ForCausalLM.from_pretrained."
        if self.kind == "reward":
            said = said.replace("ForCausalLM", "ForSequenceClassification")
        if past:
            said = f"Nothing was trained and nothing written: step {self.begun_at} is past {state.max_steps}."
        elif state.global_step < state.max_steps:
            said = f"Stopped after step {state.global_step} of {state.max_steps}: no lower loss. {said}"
        self._console.print(said)
        if self.options.args.push_to_hub and not past:
            self.trainer.push_to_hub(dataset_name=self.options.script.dataset_name)
        return 0 if all_within else 1

    def _start(self) -> int:
        """Say where the run begins, and write down what was asked; returns the steps that are done."""
        step = checkpoints.step_of(self._resume)
        if self._resume is not None:
            store = store_behind(self._resume)
            where = self._resume if store is None else f"the store in {store}"
            self._console.print(f"resuming from {where} after step {step}")
        elif self.options.args.resume_from_checkpoint == "auto":
            self._console.print(f"no checkpoint in {self.out}: starting anew")
        if self.team.is_first:
            (self.out / "gemini.yaml").write_text(to_yaml(self.options.said), encoding="utf-8")
        return step


# ---- the model -------------------------------------------------------------------------------------------------------


def _check_model(source: ModelSource, options: Options) -> None:
    """Refuse what is no causal language model, and sequences that are longer than it has positions."""
    config, args = source.config, options.args
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise JobError(
            f"{source.label} is of type {config.model_type!r}, which transformers has no causal language model for."
        )
    if options.model.use_peft and source.weights is None:
        raise JobError(f"--use_peft adapts trained weights, and {source.label} has none: give a model folder.")
    longest, asked = getattr(config, "max_position_embeddings", None), getattr(args, "max_length", None)
    if longest is not None and asked is not None and asked > longest:
        if "max_length" in options.said:
            raise JobError(f"--max_length {asked} is more than the model's {longest} positions. Use at most {longest}.")
        args.max_length = longest


def outline_of(kind: str, source: ModelSource, options: Options) -> tuple[Any, list[str]]:
    """The model without values, from its config or what its files say they hold (with its linear layers in 4 bits: with
    values), and the params that these files lack.

    Raises:
        JobError: if transformers or PEFT cannot make it of these files.
    """
    args, asked = options.args, options.model
    auto: Any = transformers.AutoModelForCausalLM
    if kind == "reward":
        auto, source.config.num_labels = transformers.AutoModelForSequenceClassification, 1
        if "lora_task_type" not in options.said:
            asked.lora_task_type = "SEQ_CLS"
    attention = Attention(asked.attn_implementation, precision_of(args), args.device)
    transformers.set_seed(args.seed)  # adapters
    with refusing(f"{source.label} cannot be built"):
        adapters, codes = trl.get_peft_config(asked), trl.get_quantization_config(asked)
        adapt = None if adapters is None else partial(_get_peft_model(), peft_config=adapters)
        if source.weights is None:
            attention.keyword(source.config, auto)
            return skeleton_from_config(source.config, model_class=auto, attention=attention, dtype=torch.float32), []
        how = {"config": source.config, "trust_remote_code": args.trust_remote_code}
        if not Path(source.weights).exists():
            how["revision"] = asked.model_revision
        if codes is not None:
            keyword = attention.keyword(source.config, auto)
            dtype = codes.bnb_4bit_compute_dtype
            model = auto.from_pretrained(
                source.weights, quantization_config=codes, device_map="cpu", dtype=dtype, **how, **keyword
            )
            return (model if adapt is None else adapt(model)), []
        how["dtype"] = asked.dtype if "dtype" in options.said else "auto"
        skeleton, info = skeleton_from_pretrained(
            source.weights, model_class=auto, attention=attention, adapt=adapt, **how
        )
        return skeleton, sorted(info["missing_keys"])


def _get_peft_model() -> Callable[..., Any]:
    import peft

    return peft.get_peft_model


def _compile(model: Any) -> None:
    try:
        compile_blocks(model if isinstance(model, nn.Module) else model.model)
    except gemini.GeminiError as e:
        raise JobError(f"--torch_compile: {e}") from e


def make_config(kind: str, options: Options, source: ModelSource, notes: list[str]) -> gemini.GeminiConfig:
    """How the model of a job is managed: its options, or a plan that ``gemini plan`` wrote. ``notes`` takes what a job
    that runs a plan makes otherwise.

    Raises:
        JobError: for options that cannot be used together.
        PlanMismatch: for a plan that cannot be read.
    """
    args, ours = options.args, options.ours
    plan: gemini.Plan | None = None
    budgets: Mapping[Tier, int] = {}
    gradients = "accumulate" if args.gradient_accumulation_steps > 1 else "retain"
    if ours.plan is not None:
        plan = document.load(Path(ours.plan), "--plan", gemini.Plan.from_json)
        budgets, gradients = plan.problem.budgets, plan.problem.gradients
        notes += check_step(plan, options)
    trace = None
    if plan is None and ours.activations is None and args.device.type == "cuda":
        if ours.ep > 1 or kind in ("grpo", "rloo"):
            raise JobError(f"gemini {kind} needs --activations, such as 4GiB: such a step is not traced ahead.")
        trace = trace_of(kind, options, source)
    with as_job_error(asked="The options cannot be used together"):
        config = gemini.GeminiConfig(
            precision=precision_of(args),
            states=ours.states,
            memory=gemini.MemoryBudget(
                gpu=ours.gpu_memory or budgets.get(Tier.GPU),
                cpu=ours.cpu_memory or budgets.get(Tier.CPU),
                nvme=ours.nvme_memory or budgets.get(Tier.NVME),
                nvme_path=ours.nvme_path,
                durable=ours.durable_every > 0,
            ),
            placement="auto" if plan is None else plan,
            gradients=gradients,
            device=str(args.device),
            activations=ours.activations,
            offload_activations=ours.offload_activations,
            trace=trace,
            tile_tokens=ours.tile_tokens,
            optimizer=rule_named(ours.optimizer or "adamw"),
        )
    number = num_beside(kind, options)
    return replace(config, memory=budget_for(config, number)) if number else config


def num_beside(kind: str, options: Options) -> int:
    """The number of models that the trainer evaluates beside the one that it trains."""
    args, has_reference = options.args, not options.model.use_peft
    if kind in ("dpo", "kto"):
        return int(has_reference and not args.precompute_ref_log_probs)
    if kind in ("grpo", "rloo"):
        return int(has_reference and args.beta > 0) + bool(options.script.reward_model_name_or_path)
    return 0


def trace_of(kind: str, options: Options, source: ModelSource) -> gemini.MemoryTrace:
    """One micro-batch of the job's step, traced on fake tensors."""
    args, ours = options.args, options.ours
    config = copy.deepcopy(source.config)
    if options.model.attn_implementation is not None:
        config._attn_implementation = options.model.attn_implementation
    rows = args.per_device_train_batch_size * (2 if kind in PAIRS else 1)
    ids = torch.empty(rows, args.max_length or config.max_position_embeddings, dtype=torch.int64, device="meta")
    return gemini.trace(
        config,
        {"input_ids": ids, "labels": ids},
        precision=precision_of(args),
        checkpointing="non-reentrant" if args.gradient_checkpointing else None,
        tile_tokens=ours.tile_tokens,
        tensor_parallel=ours.tp,
        context_parallel=ours.cp,
    )


# ---- several processes -----------------------------------------------------------------------------------------------


def mesh_of(options: Options, num_processes: int) -> Any:
    """The mesh of the job's processes; None where all of them share one model."""
    ours, kind = options.ours, options.args.device.type
    if options.args.parallelism_config is not None:
        found = parallel_of(options.args.parallelism_config, num_processes, kind)
        return None if found is None else found.mesh
    if ours.replicas == ours.ep == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    sizes = (ours.replicas, num_processes // (ours.replicas * ours.ep), ours.ep)
    return init_device_mesh(kind, sizes, mesh_dim_names=("dp_replicate", "dp", "ep"))


# ---- the trainer -----------------------------------------------------------------------------------------------------


def trainer_class(kind: str) -> type[Any]:
    """TRL's trainer through our bridge; where it makes tokens of rows beforehand, it counts what it cuts."""
    name = f"Gemini{'Reward' if kind == 'reward' else kind.upper()}Trainer"
    return type(name, (CountsRows, getattr(ready, name)), {})


def reward_functions(script: Any) -> list[Any]:
    """What ``--reward_funcs`` and ``--reward_model_name_or_path`` name, as TRL's scripts understand it.

    Raises:
        JobError: for a name that is none.
    """
    found: list[Any] = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    for name in script.reward_funcs or ():
        module, _, function = name.rpartition(".")
        try:
            if module:
                sys.path.insert(0, os.getcwd())
            made = getattr(importlib.import_module(module or "trl.rewards"), function)
        except (ImportError, AttributeError) as e:
            raise JobError(
                f"--reward_funcs {name}: {e}. It is a function of trl.rewards, or one of a file here as module.name."
            ) from e
        if name == "get_soft_overlong_punishment":
            made = made(max_completion_len=1280, soft_punish_cache=256)  # as in TRL's scripts
        found.append(made)
    if not found:
        raise JobError("Say what is rewarded: --reward_funcs NAME, or --reward_model_name_or_path FOLDER.")
    return found


@contextmanager
def _base_as_reference(model: Any) -> Iterator[None]:
    """Of a model with new adapters the reference is its base: TRL does so where it makes the adapters itself, and gives
    a model that comes with some a second one, to which it copies them. New ones change nothing yet.
    """
    if not hasattr(model, "peft_config"):
        yield
        return
    with replaced(model, "add_adapter", lambda *_: None), replaced(model, "get_parameter", lambda _: _Nowhere()):
        yield


class _Nowhere:
    """Where a copy goes that is not needed."""

    @property
    def data(self) -> _Nowhere:
        return self

    def copy_(self, other: Any) -> None:
        pass

"""The training jobs: a trainer of TRL's on a model that Gemini manages, in the memory that it was given. All that can
be refused is refused before the first step, the cheap checks first. Under torchrun every process makes the same run and
takes its part of every batch; rank 0 prints, writes, and chooses where to go on.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shlex
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
import trl
import yaml
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gemini
import gemini.integrations.trl as ready
from gemini.errors import BudgetExceeded, counted
from gemini.integrations.beside import budget_for, figures_of_all
from gemini.integrations.callbacks import LinesCallback, Position, StopCallback, identity_of
from gemini.integrations.metrics import MetricsCallback
from gemini.jobs import JobError, refusing
from gemini.jobs.models import ModelSource, find_model, hush, tokenizer_of
from gemini.jobs.parts import check_start, claimed, open_data, prepare_out, words_of
from gemini.jobs.screen import budget_lines, in_options
from gemini.jobs.trace import params_of
from gemini.jobs.train_options import ROWS, GeminiArguments, Options, Parser, options_of, stem
from gemini.patches import replaced
from gemini.planning.parallel import block_by_block
from gemini.ranks import launch
from gemini.ranks.process_groups import start_group
from gemini.ranks.wire import Wire
from gemini.train.ddp import GeminiDDP
from gemini.train.loading.from_pretrained import skeleton_from_pretrained
from gemini.train.loading.skeleton import attention_keyword, skeleton_from_config
from gemini.train.modules.changing import compile_blocks
from gemini.train.modules.codes import is_coded

MARKS = (
    " Templates that mark what the assistant says are in docs/examples/chat_templates, for --chat_template_path FILE; "
    "without --assistant_only_loss all of a chat is learned."
)
ELSE = "`gemini plan MODEL --alternatives` says what else would do, if it is told of this step and these budgets."


def train(kind: str, words: Sequence[str], console: Console, about: str = "") -> int:
    """Run a job as the command line does; returns the exit code. ``kind``: "sft", "dpo", ...; ``about``: its help."""
    hush()
    asked = Parser(kind, about).read(words)
    cuda = torch.cuda.is_available() and not asked.values.use_cpu
    with join(asked.values.ddp_timeout, cuda=cuda) as wire, ExitStack() as until_end:
        options = options_of(asked, wire.size)
        judges = judges_of(options)
        if wire.rank == 0:
            until_end.enter_context(claimed(Path(options.args.output_dir)))
        else:
            console = Console(quiet=True, force_terminal=False)
        last = ["--resume_from_checkpoint", "auto"]  # of an option that is given twice, the last one counts
        again = shlex.join([kind, *words] if [*words[-2:]] == last else [kind, *words, *last])
        return Run(options, console, wire, judges).go(launch.again(again))


class Run:
    """A model under Gemini in a trainer, with its data, ready for the next step. Raises JobError if options, model or
    data cannot be trained on, GeminiError if the model does not fit, or the NVMe folder or a checkpoint is unusable.
    """

    def __init__(
        self, options: Options, console: Console, wire: Wire | None = None, judges: Mapping[str, Any] | None = None
    ) -> None:
        self.options, self.wire, self._say = options, wire or Wire(), console.print
        args, ours, script = options.args, options.ours, options.script
        self.out = Path(args.output_dir)
        prepare_out(self.out)
        source = find_model(
            options.model.model_name_or_path,
            as_bytes=ours.bytes,
            trust=args.trust_remote_code,
            revision=options.model.model_revision,
        )
        _check_model(source, options)
        # Of several folders the first one has the records.
        store = Path(ours.nvme_path[0]) if ours.durable_every and ours.nvme_path else None
        if self.wire.rank == 0 and (words := check_start(args.resume_from_checkpoint or None, self.out, store)):
            self._say(words)
        rows, held_out = open_data(options.kind, script, options.mixture, args)
        tokenizer, words = tokenizer_of(source, trust=args.trust_remote_code, revision=options.model.model_revision)
        self._say(f"data: {words_of(rows)}; {words}")
        if held_out is not None:
            self._say(f"to evaluate on: {words_of(held_out)}")
        identity = identity_of(rows, args.seed, getattr(args, "max_length", None))
        self.position = Position(identity)
        told = self._tell(identity, "the preparation of the job")
        for rank, other in enumerate(told):
            if other != told[0]:
                raise JobError(f"--dataset_name: rank {rank} has other data than rank 0: {other} and {told[0]}.")
        self.model = self._managed(source)
        self._stop = StopCallback(self.wire, console.print)
        watching = [MetricsCallback(), LinesCallback(console.print), self._stop, self.position]
        self.trainer = self._trainer(rows, held_out, tokenizer, callbacks=watching, **(judges or {}))

    def _tell(self, value: Any, what: str) -> list[Any]:
        """The ``value`` (plain, as in JSON) of every rank. All call it at the same point, called ``what``."""
        return [json.loads(text) for text in self.wire.exchange_texts(json.dumps(value), what)]

    # ---- before the first step ---------------------------------------------------------------------------------------

    def _managed(self, source: ModelSource) -> Any:
        """The model in its tiers, and the plan of it on the screen."""
        options, args, ours, size = self.options, self.options.args, self.options.ours, self.wire.size
        outline, lacking = outline_of(source, options)
        bare = outline if (is_built := isinstance(outline, nn.Module)) else outline.model
        config = replace(options.config, trace=trace_of(options, bare))
        _compile(bare, options)
        if number := num_beside(options):
            config = replace(config, memory=budget_for(config, number))
        mesh = mesh_of(ours, size, args.device.type)
        transformers.set_seed(args.seed)  # drawn weights must not depend on what ran before
        try:
            model: Any = GeminiDDP(outline, config, mesh=mesh) if is_built else outline.manage(config, mesh=mesh)
        except BudgetExceeded as e:
            refusal = str(e).partition(" If it is only evaluated")[0].rstrip(".")
            raise JobError(f"{in_options(refusal, '--nvme_path FOLDER --nvme_memory')}. {ELSE}") from e
        except ValueError as e:
            if size == 1:
                raise
            raise JobError(f"The model cannot be dealt out: {e}") from e
        _compile(model, options)  # drawing builds the model anew
        if getattr(model, "loss_type", "") is None:  # what transformers takes anyway; the Trainer counts tokens by it
            model.loss_type = "ForCausalLM"
        model.train()
        self._say_model(model, source, lacking)
        return model

    def _say_model(self, model: Any, source: ModelSource, lacking: list[str]) -> None:
        """Say what is trained, of which the params ``lacking`` were drawn, among how many, and the plan of it."""
        args, ours, size = self.options.args, self.options.ours, self.wire.size
        params = list(model.parameters())
        # Two weights are in each byte of codes.
        count = sum(p.numel() * (2 if is_coded(p) else 1) for p in params)
        trained = sum(p.numel() for p in params if p.requires_grad)
        self._say(
            f"model: {source.label}, {count:,} params{'' if trained == count else f', {trained:,} of them trained'}, "
            f"{model._gemini_engine.config.precision}, {model.config._attn_implementation} attention"
        )
        if lacking:
            more = f" and {len(lacking) - 3:,} more" if len(lacking) > 3 else ""
            self._say(f"not in its files, and therefore drawn at random: {', '.join(lacking[:3])}{more}")
        if size > 1:
            batch = counted(size // (ours.tp * ours.cp) * args.per_device_train_batch_size, "sequence")
            self._say(f"{size} processes share the model and the memory; a batch of all of them has {batch}")
        self._say(f"plan{' of rank 0' if size > 1 else ''}: {model._gemini_engine.decision.plan}")

    def _trainer(self, rows: Any, held_out: Any, tokenizer: Any, **more: Any) -> Any:
        """TRL's trainer of the managed model; JobError if it refuses its options, or a judge the data."""
        kind, args, ours = self.options.kind, self.options.args, self.options.ours
        use_cache = getattr(self.model.config, "use_cache", None)
        if getattr(args, "precompute_ref_log_probs", False):
            self._say("the reference is the model itself as it is now: what it says of each row is kept")
        marks = getattr(args, "assistant_only_loss", False)
        name = f"Gemini{stem(kind)}Trainer"
        # TRL's trainer through our bridge; where it makes tokens of rows beforehand, it counts what it cuts.
        counting = type(name, (ready.CountsRows, getattr(ready, name)), {})
        with refusing(f"gemini {kind}", MARKS if marks else ""), _base_as_reference(self.model):
            trainer: Any = counting(
                model=self.model,
                args=args,
                train_dataset=rows,
                eval_dataset=held_out,
                processing_class=tokenizer,
                order=ours.order,
                **more,
            )
        judges = getattr(trainer, "reward_processing_classes", ())  # None of a reward that is a function
        unmarked = any(judge is not None and not judge.chat_template for judge in judges)
        if unmarked and trl.is_conversational(next(iter(rows))):
            raise JobError("--reward_model_name_or_path: a tokenizer without a chat template, and the data has chats.")
        if use_cache is not None:
            self.model.config.use_cache = use_cache  # switched off for training; the saved model is to generate with it
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.durable_every = ours.durable_every or 1
        for line in trainer.told:
            self._say(line)
        if self.wire.size > 1:
            # Or dropout would drop the same on every rank; slices of a layer drop the same.
            transformers.set_seed(args.seed + self.wire.rank // ours.tp)
        return trainer

    # ---- the steps ---------------------------------------------------------------------------------------------------

    def steps(self) -> bool:
        """Train to the last step, or to the whole step after Ctrl-C, where a checkpoint is; say if that was the end."""
        trainer = self.trainer
        if self.wire.rank == 0:
            said = {name: value for name, value in self.options.said.items() if name != "resume_from_checkpoint"}
            text = yaml.safe_dump(said, sort_keys=False, allow_unicode=True)
            (self.out / "gemini.yaml").write_text(text, encoding="utf-8")
        try:
            with self._stop:
                trainer.train(trainer.args.resume_from_checkpoint)
        except gemini.NonFiniteGradient as e:
            trainer.optimizer.zero_grad()
            trainer._save_checkpoint(self.model, None)
            at = trainer.state.global_step
            raise JobError(
                f"The gradients of step {at + 1} hold inf or NaN, so no weight was changed. The state before it is "
                f"saved as checkpoint-{at}; --resume_from_checkpoint auto goes on from there. A lower --learning_rate "
                "may help."
            ) from e
        except (TypeError, ValueError):
            if self.position.begun_at is not None:
                raise  # no option's
            with refusing(f"gemini {self.options.kind}"):
                raise
        return trainer.state.global_step >= trainer.state.max_steps or not self._stop.heeded

    def go(self, again: str) -> int:
        """Make the steps and write the model; returns the exit code. ``again``: how to call it to go on."""
        finished, state = self.steps(), self.trainer.state
        if finished:
            self.trainer.save_model(str(self.out))
            self.trainer.save_state()
        memory = self.model.memory_report()
        own, beside = figures_of_all(self.model, memory)
        lines, all_within = budget_lines(*self._tell(own, "the end of the job"))
        self._say(str(memory), *beside, *lines, sep="\n")
        if not finished:
            self._say(f"Stopped after step {state.global_step} of {state.max_steps}. To go on: {again}")
            return 130
        what = "adapter" if self.options.model.use_peft else "model"
        self._say(f"The {what} of step {state.global_step} is in {self.out}.")
        if self.options.args.push_to_hub:
            self.trainer.push_to_hub(dataset_name=self.options.script.dataset_name)
        return 0 if all_within else 1


# ---- the model -------------------------------------------------------------------------------------------------------


def _check_model(source: ModelSource, options: Options) -> None:
    """Refuse adapters of a model without weights, and sequences that are longer than it has positions."""
    if options.model.use_peft and source.weights is None:
        raise JobError(f"--use_peft adapts trained weights, and {source.label} has none: give a model folder.")
    args, longest = options.args, getattr(source.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and (getattr(args, "max_length", None) or 0) > longest:
        if "max_length" in options.said:
            raise JobError(f"--max_length {args.max_length} is more than the model's {longest} positions.")
        args.max_length = longest


def outline_of(source: ModelSource, options: Options) -> tuple[Any, list[str]]:
    """The model without values (with layers in 4 bits: with values), and the params that its files do not have."""
    args, asked = options.args, options.model
    auto: Any = transformers.AutoModelForCausalLM
    if options.kind == "reward":
        auto, source.config.num_labels = transformers.AutoModelForSequenceClassification, 1
        if "lora_task_type" not in options.said:
            asked.lora_task_type = "SEQ_CLS"
    attention = attention_keyword(asked.attn_implementation)
    transformers.set_seed(args.seed)  # adapters
    with refusing(f"{source.label} cannot be built"):
        adapters, codes, adapt = trl.get_peft_config(asked), trl.get_quantization_config(asked), None
        if adapters is not None:
            import peft

            adapt = partial(peft.get_peft_model, peft_config=adapters)
        if source.weights is None:
            return skeleton_from_config(source.config, model_class=auto, dtype=torch.float32, **attention), []
        how = {"config": source.config, "trust_remote_code": args.trust_remote_code, **attention}
        if not Path(source.weights).exists():
            how["revision"] = asked.model_revision
        if codes is not None:
            model = auto.from_pretrained(
                source.weights, quantization_config=codes, device_map="cpu", dtype=codes.bnb_4bit_compute_dtype, **how
            )
            return (model if adapt is None else adapt(model)), []
        how["dtype"] = asked.dtype if "dtype" in options.said else "auto"
        skeleton, info = skeleton_from_pretrained(source.weights, model_class=auto, adapt=adapt, **how)
        return skeleton, sorted(info["missing_keys"])


def _compile(model: nn.Module, options: Options) -> None:
    try:
        if options.compiles is not None:
            torch._dynamo.lookup_backend(options.compiles.get("backend", "inductor"))  # else the first step finds it
            compile_blocks(model, **options.compiles)
    except (gemini.GeminiError, torch._dynamo.exc.InvalidBackend) as e:
        raise JobError(f"--torch_compile: {e}") from e


def num_beside(options: Options) -> float:
    """How many models of the size of the one that it trains the trainer evaluates beside that."""
    kind, args, has_reference = options.kind, options.args, not options.model.use_peft
    if kind in ("dpo", "kto"):
        return int(has_reference and not args.precompute_ref_log_probs)
    if kind in ("grpo", "rloo"):
        return int(has_reference and args.beta > 0) + bool(options.script.reward_model_name_or_path)
    if kind == "distillation":
        names = args.teacher_model_name_or_path, options.model.model_name_or_path
        teacher, own = (params_of(name, None, options.config.precision or "fp32").num_params for name in names)
        return teacher / own
    return 0


def trace_of(options: Options, model: Any) -> gemini.MemoryTrace | None:
    """One micro-batch of the step of ``model``, traced on fake tensors; None where nobody asks how large it is."""
    args, ours, kind = options.args, options.ours, options.kind
    is_asked_for = args.device.type == "cuda" or ours.fastest
    if not is_asked_for or ours.plan is not None or ours.activations is not None:
        return None
    if ours.ep > 1 or kind in ("grpo", "rloo", "distillation"):
        raise JobError(f"gemini {kind} needs --activations, such as 4GiB: such a step is not traced ahead.")
    rows = args.per_device_train_batch_size * ROWS.get(kind, 1)
    config: Any = model.config.get_text_config()
    longest = args.max_length or getattr(config, "max_position_embeddings", None)
    if longest is None:
        raise JobError(
            f"gemini {kind} of a {model.config.model_type} without positions, which say no length: --max_length N."
        )
    ids, pad = torch.empty(rows, longest, dtype=torch.int64, device="meta"), getattr(config, "pad_token_id", None)
    loss, labels = None, {"labels": ids}
    if kind == "reward":  # a number for each row, from where it is not padded any more: the trainer makes the loss
        loss, labels, pad = lambda found: found.logits.mean(), {}, pad or 0
    with refusing(f"gemini {kind}: its step cannot be traced"), replaced(config, "pad_token_id", pad):
        trace = gemini.trace(
            model,
            {"input_ids": ids, **labels},
            precision=options.config.precision or "fp32",
            checkpointing="non-reentrant" if args.gradient_checkpointing else None,
            loss=loss,
            tile_tokens=ours.tile_tokens,
            kept_blocks="auto" if ours.fastest else 0,
            fp16_accumulation=ours.fp16_accumulation,
            float8=ours.float8,
            tensor_parallel=ours.tp,
            context_parallel=ours.cp,
        )
    if ours.order == "bfs" and args.gradient_accumulation_steps > 1:
        with suppress(ValueError):  # it cannot be cut, and is computed in the ordinary order
            return block_by_block(trace, args.gradient_accumulation_steps)
    return trace


# ---- several processes -----------------------------------------------------------------------------------------------


@contextmanager
def join(timeout_s: float, *, cuda: bool) -> Iterator[Wire]:
    """The wire to the other processes of this job, in torch's default group, which waits ``timeout_s`` seconds for any
    of them. Gemini makes groups of its own beside it, so their messages never meet.
    """
    starts = launch.num_processes() > 1 and not dist.is_initialized()
    if starts:
        start_group(timedelta(seconds=timeout_s), cuda=cuda)
    yield Wire(dist.group.WORLD if dist.is_initialized() else None)
    if starts:
        # Not after an error: a group whose ranks stand at different points may wait for them, and the process ends.
        dist.destroy_process_group()


def mesh_of(ours: GeminiArguments, num_processes: int, kind: str) -> Any:
    """The mesh of the job's processes on devices of a ``kind``; None where all of them share one model."""
    groups = {"dp_replicate": ours.replicas, "cp": ours.cp, "tp": ours.tp, "ep": ours.ep}
    shared = num_processes // math.prod(groups.values())
    sizes = {name: size for name, size in {"dp_replicate": ours.replicas, "dp": shared, **groups}.items() if size > 1}
    return init_device_mesh(kind, (*sizes.values(),), mesh_dim_names=(*sizes,)) if sizes.keys() - {"dp"} else None


# ---- what the trainer is given ---------------------------------------------------------------------------------------


def judges_of(options: Options) -> dict[str, Any]:
    """The judges of answers for the trainer: what ``--reward_funcs``, ``--reward_model_name_or_path`` and
    ``--teacher_model_name_or_path`` name, as TRL's scripts understand them.
    """
    script = options.script
    if options.kind == "distillation":
        if options.args.teacher_model_name_or_path is None:
            raise JobError("Say what to learn from with --teacher_model_name_or_path: a folder, a name.")
        return {"teacher_model": options.args.teacher_model_name_or_path}
    if options.kind not in ("grpo", "rloo"):
        return {}
    found: list[Any] = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    sys.path.insert(0, os.getcwd())
    for name in script.reward_funcs or ():
        module, _, function = name.rpartition(".")
        with refusing(f"--reward_funcs {name}", ". Name one of trl.rewards, or of a file here as module.name"):
            made = getattr(importlib.import_module(module or "trl.rewards"), function)
        if name == "get_soft_overlong_punishment":
            made = made(max_completion_len=1280, soft_punish_cache=256)  # as in TRL's scripts
        found.append(made)
    if not found:
        raise JobError("Say what is rewarded: --reward_funcs NAME, or --reward_model_name_or_path FOLDER.")
    return {"reward_funcs": found}


@contextmanager
def _base_as_reference(model: Any) -> Iterator[None]:
    """The base is the reference of a model with new adapters: TRL does so where it makes adapters itself, and gives
    a model that comes with some a second one, to which it copies them. New ones change nothing yet.
    """
    if not hasattr(model, "peft_config"):
        yield
        return
    nowhere = SimpleNamespace(data=SimpleNamespace(copy_=lambda _: None))
    with replaced(model, "add_adapter", lambda *_: None), replaced(model, "get_parameter", lambda _: nowhere):
        yield


# ---- the demo --------------------------------------------------------------------------------------------------------

_PARAMS = 124_439_808
_HELD_OUT, _SEQ_LEN = 8, 128

_DEMO = {
    "model_name_or_path": "gpt2-small",
    "dataset_name": str(Path(sysconfig.get_path("stdlib"), "[a-s]*.py")),
    "output_dir": "runs/demo",
    "max_length": _SEQ_LEN,
    "per_device_train_batch_size": 2,
    "max_steps": 40,
    "learning_rate": 6e-4,
    "lr_scheduler_type": "cosine",
    "gradient_checkpointing": False,
    # A part of what weights and states take in bf16 with Adam, 12 bytes for each param; room for all.
    "cpu_memory": int(0.15 * 12 * _PARAMS),
    "nvme_memory": 16 * _PARAMS,
    "save_strategy": "no",
    "resume_from_checkpoint": "auto",  # of a demo that was stopped
}


def demo(words: Sequence[str], console: Console, about: str = "") -> int:
    """The README's demo: a GPT-2-shaped model learns Python from the machine's own library, in less memory than it
    needs, by ``gemini sft`` with other defaults. Returns 0 if the loss fell and the saved model is what was trained.
    """
    hush()
    parser = Parser("sft", about, "demo", **_DEMO)
    if (number := launch.num_processes()) > 1:
        raise JobError(f"`gemini demo` runs in one process, and {number} were started. Start it without torchrun.")
    asked = parser.read(words).values
    out, device = asked.output_dir, torch.device("cpu" if asked.use_cpu else "cuda")
    # Beside the model by default, and not where temporary files go: that may be memory.
    asked.nvme_path = asked.nvme_path or [out]
    if "warmup_steps" not in parser.said:
        asked.warmup_steps = max(min(10, asked.max_steps // 4), 0)  # -1 steps: as many as its epochs have
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(library.glob("t*.py")))[: _HELD_OUT * _SEQ_LEN]
    held_out = torch.tensor(list(text), device=device).reshape(_HELD_OUT, _SEQ_LEN)
    with claimed(Path(out)):
        run = Run(options_of(parser), console)
        first = _mean_loss(run.model, held_out)
        if (code := run.go(shlex.join(["gemini", "demo", *words]))) == 130:
            return code
        last = _mean_loss(run.model, held_out)
    plain = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, local_files_only=True)
    reloaded = _mean_loss(plain.to(device), held_out)
    fell = "it fell" if last < first else "IT DID NOT FALL"
    same = "the same bits" if reloaded == last else "NOT THE SAME"
    console.print(f"loss on held-out text: {first:.4f} before, {last:.4f} after: {fell}")
    console.print(f"reloaded with plain transformers: held-out loss {reloaded!r} there, {last!r} here: {same}")
    return code if last < first and reloaded == last else 1


@torch.no_grad()
def _mean_loss(model: Any, sequences: torch.Tensor) -> float:
    """The mean over batches of sequences, in as little memory as training takes."""
    model.eval()
    losses = [float(model(input_ids=ids, labels=ids, use_cache=False).loss) for ids in sequences.split(2)]
    model.train()
    return sum(losses) / len(losses)

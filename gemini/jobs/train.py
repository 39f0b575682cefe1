"""The main job: a causal language model and data, through transformers' Trainer or TRL's, in the memory it was given.

``TrainRun`` is one run from settings to a saved model. Everything that can be refused is refused while it is made, the
cheap checks first; then ``run`` goes through the steps, ``save`` writes the model.

Under torchrun every process makes the same run; each takes its part of every batch. Rank 0 prints, writes, and chooses
where to go on.
"""

from __future__ import annotations

import importlib.util
import json
import math
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console

import gemini
from gemini.errors import counted
from gemini.integrations.huggingface_durable import store_behind
from gemini.jobs import checkpoints
from gemini.jobs.data import JobData, open_data
from gemini.jobs.errors import JobError, as_job_error
from gemini.jobs.models import (
    ModelSource,
    byte_tokenizer,
    checkpoint_activations,
    draw_from,
    fill_model,
    find_model,
    hush,
    load_tokenizer,
    lora_of,
    outline_model,
    quantize_model,
)
from gemini.jobs.options import to_yaml
from gemini.jobs.screen import budget_lines, refusing_in_options, shares
from gemini.jobs.settings import TrainSettings
from gemini.jobs.team import Team, join
from gemini.jobs.text import BYTE_VOCABULARY
from gemini.jobs.train_config import OF_A_STEP, make_config, mesh_of, parallelism_of, plan_command
from gemini.jobs.trainer import POSITION, Samples, Shown, Stop, StopWish, make_trainer
from gemini.memory.devices.device import torch_device_of
from gemini.ranks import launch
from gemini.train.loading.attention import Attention
from gemini.train.modules.compiled import compile_blocks
from gemini.train.params.codes import num_weights


class TrainRun:
    """A model under Gemini in a Trainer, with its data, ready for the next step.

    Raises:
        JobError: if the settings, the model or the data cannot be trained on.
        gemini.GeminiError: if the model cannot fit the budgets, or the NVMe folder or a checkpoint is unusable.
    """

    def __init__(self, settings: TrainSettings, console: Console, team: Team | None = None) -> None:
        settings.check()
        self.settings = settings
        self.team = Team() if team is None else team
        self._console = console
        with self.team.all_or_none("the preparation of the job"):
            source = find_model(settings.model, settings.preset, settings.layers, as_bytes=settings.bytes)
            _check_tracker(settings.report_to)
            checkpoints.prepare_out(settings.out)
            found = None
            if self.team.is_first:
                store = settings.nvme_path if settings.durable_every else None
                found = checkpoints.choose(settings.resume, settings.out, overwrite=settings.overwrite, store=store)
            self.data = self._open_data(source)
            self.device = _device(settings.device)
            draw_from(settings.seed)  # adapters
            adapt = None if settings.lora is None else lora_of(settings.lora, source)
            attention = _attention(settings, source, self.device)
            outline: Any
            lacking: list[str] = []
            if settings.load_in_4bit:
                outline = quantize_model(source, settings.precision, attention, adapt)
            else:
                outline, lacking = outline_model(source, attention, adapt)
                if settings.compile:
                    _compile_blocks(outline.model)
        checkpoint = self._compare(found)
        notes: list[str] = []
        config = make_config(settings, source, self.device, notes)
        self._console.print(*notes, sep="\n", end="\n" if notes else "")
        mesh = mesh_of(settings, self.team.size)
        with refusing_in_options("--nvme-path FOLDER --nvme-memory", f"Other ways: {plan_command(settings)}"):
            with nullcontext() if mesh is None else as_job_error(asked="The model cannot be dealt out"):
                model = fill_model(outline, config, seed=settings.seed, mesh=mesh)
        self.model = model
        if settings.compile:
            _compile_blocks(model)  # drawing builds the model anew
        model.train()
        if settings.gradient_checkpointing:
            with as_job_error(asked="--gradient-checkpointing"):
                checkpoint_activations(model)
        params = list(model.parameters())
        self.num_params = sum(map(num_weights, params))
        trained = sum(p.numel() for p in params if p.requires_grad)
        if settings.save_every and self.team.is_first:
            checkpoints.check_room(settings.out, checkpoints.num_bytes(self.num_params, trained), settings.keep)
        self._console.print(
            f"model: {source.label}, {self.num_params:,} params"
            f"{'' if trained == self.num_params else f', {trained:,} of them trained'}, {settings.precision}, "
            f"{model.config._attn_implementation} attention{', compiled blocks' if settings.compile else ''}"
        )
        if lacking:
            more = f" and {len(lacking) - 3:,} more" if len(lacking) > 3 else ""
            self._console.print(f"not in its files, and therefore drawn at random: {', '.join(lacking[:3])}{more}")
        if self.team.size > 1:
            batch = counted(self._batches * settings.batch_size, "sequence")
            who = "each" if settings.sharing == 1 else f"{settings.sharing} of them together"
            self._console.print(
                f"{self.team.size} processes: each keeps a share of the model and of the memory; {who} "
                f"{'takes' if settings.sharing == 1 else 'take'} {settings.batch_size} of the {batch} of a batch"
            )
        self._console.print(f"plan{' of rank 0' if self.team.size > 1 else ''}: {model._gemini_engine.decision.plan}")
        self._wish = StopWish(_STOPPING if self.team.is_first else "")
        self._stop = Stop(self._wish, self.team, console)
        self._shown = Shown(
            console,
            model._gemini_engine,
            num_tokens=self._sequences * settings.seq_len,
            sharing=settings.sharing,
            metrics=settings.out / "metrics.jsonl" if self.team.is_first else None,
        )
        self.trainer = self._make_trainer()
        if self.team.size > 1:
            # Or dropout would drop the same on every rank; slices of a layer drop the same.
            draw_from(settings.seed + self.team.rank // settings.tp)
        self._resumed = self._look_into(checkpoint)

    # ---- before the first step ---------------------------------------------------------------------------------------

    def _open_data(self, source: ModelSource) -> JobData:
        """Open the data and the tokenizer, and refuse what does not go with each other or with the model.

        Raises:
            JobError: saying which.
        """
        settings = self.settings
        _check_length(settings, source)
        self._tokenizer = byte_tokenizer() if source.tokenizer is None else load_tokenizer(source.tokenizer)
        if settings.chat_template is not None:
            with as_job_error(asked=f"--chat-template {settings.chat_template}"):
                self._tokenizer.chat_template = settings.chat_template.read_text(encoding="utf-8")
        # Bytes are read without a tokenizer: theirs is for samples and for what is saved.
        data = open_data(settings, None if source.tokenizer is None else self._tokenizer)
        if data.rows == ("messages",) and self._tokenizer.chat_template is None:
            raise JobError(
                f"--data has messages, and the tokenizer of {source.tokenizer} has no chat template: give a Jinja file "
                "with --chat-template, or rows of prompt and completion."
            )
        tokens = _tokens_of(source, self._tokenizer)
        if tokens.num_ids > source.config.vocab_size:
            raise JobError(
                f"{source.label} has a vocabulary of {source.config.vocab_size}; the text as {tokens.words} needs "
                f"{tokens.num_ids}. Give a config with a vocab_size of at least {tokens.num_ids}."
            )
        self._console.print(f"{data.words[0]}; {tokens.words}", *data.words[1:], sep="\n")
        return data

    def _num_steps(self, sequences: int) -> int:
        settings = self.settings
        if settings.epochs is None:
            return settings.steps
        batches = math.ceil(sequences / (settings.batch_size * self._batches))
        return math.ceil(settings.epochs * math.ceil(batches / settings.accumulate))

    @property
    def _batches(self) -> int:
        """That the processes take at once: those that share one count once."""
        return self.team.size // self.settings.sharing

    @property
    def _sequences(self) -> int:
        return self.settings.accumulate * self.settings.batch_size * self._batches

    @property
    def asked(self) -> str:
        """How many steps, as the options say it."""
        epochs = self.settings.epochs
        return f"--steps {self.steps}" if epochs is None else f"--epochs {epochs:g}, {counted(self.steps, 'step')}"

    @property
    def _position(self) -> dict[str, Any]:
        return {"data": self.data.identity, "sequences_per_step": self._sequences}

    def _compare(self, found: Path | None) -> Path | None:
        """The checkpoint that rank 0 chose, once it is known that all ranks have the same data."""
        own = {"checkpoint": None if found is None else str(found), "data": self.data.identity}
        everyone = self.team.tell(own, "the comparison of the data")
        for rank, other in enumerate(everyone):
            if other["data"] != everyone[0]["data"]:
                raise JobError(
                    f"rank {rank} found other text than rank 0. Every process reads all of it: give --data files that "
                    "are the same on all machines."
                )
        chosen = everyone[0]["checkpoint"]
        return None if chosen is None else Path(chosen)

    def _make_trainer(self) -> Any:
        settings, chat = self.settings, self.data.rows == ("messages",)
        callbacks: list[Any] = [self._shown, self._stop]
        if settings.sample_every:
            callbacks.append(Samples(self._console, self._tokenizer, settings.prompt, settings.sample_every, chat=chat))
        if settings.patience is not None:
            callbacks.append(transformers.EarlyStoppingCallback(settings.patience))
        with as_job_error(asked="The settings cannot be used together"):
            trainer = make_trainer(
                settings,
                self.model,
                self.data,
                self._tokenizer,
                use_cpu=self.device.type == "cpu",
                parallelism=parallelism_of(settings, self.team.size),
                callbacks=callbacks,
            )
        self._console.print(*trainer.told, sep="\n", end="\n" if trainer.told else "")
        self.steps = trainer.args.max_steps = self._num_steps(len(trainer.train_dataset))
        trainer.position, trainer.measure = self._position, self._shown.measure
        return trainer

    def _look_into(self, checkpoint: Path | None) -> Path | None:
        """The checkpoint to go on from, once it is known to fit this job."""
        self.step = 0
        if checkpoint is None:
            if self.settings.resume == "auto":
                self._console.print(f"no checkpoint in {self.settings.out}: starting anew")
            return None
        saved = _position_in(checkpoint)
        for name, what in _IDENTITY.items():
            before, now = saved["data"].get(name), self.data.identity[name]
            if before != now:
                raise JobError(
                    f"{checkpoint} stands in the middle of other data: its {what} is {before}, here it is {now}. Give "
                    "what that run was given, or start anew in another --out."
                )
        self.step = int(json.loads((checkpoint / "trainer_state.json").read_text())["global_step"])
        store = store_behind(checkpoint)
        self._console.print(
            f"resuming from {checkpoint if store is None else f'the store in {store}'} after step {self.step}"
        )
        if saved["sequences_per_step"] != self._sequences:
            self._console.print(
                f"a step was {saved['sequences_per_step']} sequences before, it is {self._sequences} from now on: the "
                "data goes on where so many steps of the new size would stand"
            )
        if self.step < self.steps:
            return checkpoint
        if self.settings.resume == "auto" and self.step > self.steps:
            self._console.print(f"that is past {self.asked}: nothing is left to do ({_MORE})")
            return checkpoint
        if self.settings.resume != "auto":
            raise JobError(
                f"--resume {checkpoint}: its {self.step} steps are all of {self.asked}. Ask for more to go on."
            )
        # A run that died while it wrote the model, and is started again with the same command, has only that to do.
        self._console.print(f"these are all of {self.asked}: only the model is written ({_MORE})")
        return checkpoint

    # ---- the steps ---------------------------------------------------------------------------------------------------

    def run(self) -> list[float]:
        """Train to the last step, or to the whole step after Ctrl-C. Returns the losses that were logged.

        Afterwards ``self.finished`` says whether that was the end; if not, a checkpoint is there.
        """
        if self.step > self.steps:
            return []
        if self.team.is_first:
            always = () if self.settings.plan is None else OF_A_STEP  # defaults are the plan's
            (self.settings.out / "gemini.yaml").write_text(to_yaml(self.settings, always), encoding="utf-8")
            self._shown.rewind(self.step)
        before = self.step
        resume = None if self._resumed is None else str(self._resumed)
        try:
            with self._wish:
                self.trainer.train(resume)
        except gemini.NonFiniteGradient as e:
            self.trainer.optimizer.zero_grad()
            self.trainer._save_checkpoint(self.model, None)
            at = self.trainer.state.global_step
            raise JobError(
                f"The gradients of step {at + 1} hold inf or NaN, so no weight was changed. The state before it is "
                f"saved as checkpoint-{at}; --resume auto goes on from there. A lower --lr may help."
            ) from e
        finally:
            self._shown.end()
        self.step = self.trainer.state.global_step
        history = self.trainer.state.log_history
        return [row["loss"] for row in history if "loss" in row and row["step"] > before]

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do: all steps were made, or the loss no longer fell."""
        return self.step >= self.steps or not self._stop.heeded

    def why_early(self) -> str:
        """Why a run that is finished made fewer steps than were asked for."""
        state, patience = self.trainer.state, counted(self.settings.patience or 0, "evaluation")
        return (
            f"Stopped after step {self.step} of {self.steps}: no lower loss in {patience}. The weights are those of "
            f"step {state.best_global_step}, loss {state.best_metric:.4f}."
        )

    def save(self) -> None:
        """Write the model to ``--out`` as Hugging Face safetensors, its tokenizer beside it."""
        self.trainer.save_model(str(self.settings.out))
        if self.team.is_first:
            (self.settings.out / "training_args.bin").unlink(missing_ok=True)  # a pickle that nobody needs


_MORE = "more --steps or --epochs go on"
_STOPPING = "Stopping after this step, then saving. Once more stops at once, and saves nothing."
_IDENTITY = {
    "files": "list of files",
    "rows": "kind of rows",
    "seq_len": "sequence length",
    "seed": "seed",
    "count": "number of sequences",
}


class _Tokens(NamedTuple):
    """The ids in which text is given to the model: how many, and what they are in words."""

    num_ids: int
    words: str


def _tokens_of(source: ModelSource, tokenizer: Any) -> _Tokens:
    if source.tokenizer is None:
        return _Tokens(BYTE_VOCABULARY, "byte-level tokens (ids 0..255, 256 ends a document; text need not be UTF-8)")
    end = tokenizer.eos_token_id
    boundary = "no id between documents" if end is None else f"{end} ends a document"
    return _Tokens(len(tokenizer), f"tokenizer of {source.tokenizer} with {len(tokenizer)} ids, {boundary}")


def _check_length(settings: TrainSettings, source: ModelSource) -> None:
    """Refuse sequences that are longer than the model has positions.

    Raises:
        JobError: saying how many it has.
    """
    longest = getattr(source.config, "max_position_embeddings", None)
    if longest is not None and settings.seq_len > longest:
        default = " (the default)" if settings.seq_len == TrainSettings.seq_len else ""
        raise JobError(
            f"--seq-len {settings.seq_len}{default} is more than the model's {longest} positions. "
            f"Use at most {longest}."
        )


def _check_tracker(name: str) -> None:
    packages = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}.get(name)
    if packages is not None and not any(map(importlib.util.find_spec, packages)):
        raise JobError(
            f"--report-to {name}: {name} is not installed: pip install {name}. Losses are in metrics.jsonl too."
        )


def _position_in(checkpoint: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((checkpoint / POSITION).read_text()))
    except (OSError, ValueError) as e:
        raise JobError(
            f"--resume {checkpoint}: this checkpoint was not written by `gemini train`, it has no position."
        ) from e


def train(settings: TrainSettings, console: Console, *, command: str) -> int:
    """Run the job as the command line does; returns the exit code. ``command`` is how to call it again."""
    hush()
    cuda = torch.cuda.is_available() and (settings.device or "cuda").startswith("cuda")
    with join(settings.rank_timeout, cuda=cuda) as team, team.speaking(), ExitStack() as until_end:
        with team.all_or_none("the folder of the run"):
            if team.is_first:
                until_end.enter_context(checkpoints.claimed(settings.out))
        if not team.is_first:
            console = Console(quiet=True, force_terminal=False)
        run = TrainRun(settings, console, team)
        run.run()
        past = run.step > run.steps
        if run.finished and not past:
            run.save()
        memory = run.model.memory_report()
        lines, all_within = budget_lines(*team.tell(shares(memory), "the end of the job"))
        console.print(str(memory), *lines, sep="\n")
        if past:
            said = f"Nothing was trained and nothing written: step {run.step} is past {run.asked}."
        elif run.finished:
            if run.step < run.steps and settings.patience is not None:
                console.print(run.why_early())
            said = f"The model is in {settings.out}; it opens with transformers' AutoModelForCausalLM.from_pretrained."
            if settings.lora is not None:
                said = (
                    f"The adapter is in {settings.out}; it opens with peft's AutoPeftModelForCausalLM.from_pretrained."
                )
        else:
            said = f"Stopped after step {run.step} of {run.steps}. To go on: {command}"
        console.print(said)
        return 130 if not run.finished else 0 if all_within else 1


def _device(asked: str | None) -> torch.device:
    """Where the batches go: the device Gemini computes on.

    Of several processes on a machine each takes a GPU of its own.
    """
    if asked is None:
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch_device_of(asked)
    except RuntimeError as e:
        raise JobError(f"--device {asked}: there is no such device. Use cpu or cuda, or leave it out.") from e
    if device.type == "cuda" and not torch.cuda.is_available():
        raise JobError(
            f"--device {asked}: torch finds no usable GPU (`gemini doctor` says more). Leave it out to use the CPU."
        )
    if device.type == "cuda" and device.index is None:
        if launch.local_size() > torch.cuda.device_count():
            raise JobError(
                f"{launch.local_size()} processes were started on this machine, and it has {torch.cuda.device_count()} "
                "GPUs. Start one for each GPU (torchrun --nproc-per-node), or use --device cpu; where each process "
                "sees a GPU of its own only, --device cuda:0."
            )
        device = torch.device("cuda", launch.local_rank())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _attention(settings: TrainSettings, source: ModelSource, device: torch.device) -> Attention:
    """What ``--attn-implementation`` asks for, as far as it can be told before the model is built."""
    attention = Attention(settings.attn_implementation, settings.precision, device)
    with as_job_error(asked=f"--attn-implementation {settings.attn_implementation}"):
        attention.keyword(source.config, transformers.AutoModelForCausalLM)
    return attention


def _compile_blocks(model: torch.nn.Module) -> None:
    try:
        compile_blocks(model)
    except gemini.GeminiError as e:
        raise JobError(f"--compile: {e}") from e

"""The main job: a causal language model, text files, and the ordinary PyTorch loop, in the memory it was given.

``TrainRun`` is one run from settings to a saved model. Everything that can be refused is refused while it is made, the
cheap checks first; then ``run`` goes through the steps, ``save`` writes the model. The loop in ``_step`` is the loop of
the README.

Under torchrun every process makes the same run. Each takes its part of every batch, such that all of them see the
windows that one process with the whole batch would see; rank 0 prints, writes, and chooses where to go on.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

import gemini
from gemini.errors import human_bytes
from gemini.jobs import checkpoints
from gemini.jobs.budgets import budget_lines, shares, use_line
from gemini.jobs.errors import JobError, as_job_error
from gemini.jobs.file_kinds import LeftOut, describe, only_text
from gemini.jobs.interrupt import StopWish
from gemini.jobs.models import (
    ModelSource,
    checkpoint_activations,
    draw_from,
    fill_model,
    find_model,
    hush,
    outline_model,
)
from gemini.jobs.progress import StepReport, TrainProgress
from gemini.jobs.settings import TrainSettings
from gemini.jobs.team import Team, join
from gemini.jobs.text_files import find_text_files, fingerprint
from gemini.jobs.tokenizers import load_tokenizer
from gemini.jobs.tokens import ByteTokens, TokenizerTokens, Tokens
from gemini.jobs.train_config import make_config
from gemini.jobs.windows import WindowStream
from gemini.memory.devices.device import torch_device_of
from gemini.ranks import launch
from gemini.train.loading.attention import Attention
from gemini.train.modules.compiled import compile_blocks

# fp16 skips steps while it looks for a loss scale, but then the loss itself is finite.
_HOPELESS_STEPS = 10


class TrainRun:
    """A model under Gemini with its optimizer, schedule and text, ready for the next step.

    Raises:
        JobError: if the settings, the model or the text cannot be trained on.
        gemini.GeminiError: if the model cannot fit the budgets, or the NVMe folder or a checkpoint is unusable.
    """

    def __init__(self, settings: TrainSettings, console: Console, team: Team | None = None) -> None:
        settings.check()
        self.settings = settings
        self.team = Team() if team is None else team
        self._console = console
        self._tokenizer: Any = None
        with self.team.all_or_none("the preparation of the job"):
            source = find_model(settings.model, settings.preset, settings.layers, as_bytes=settings.bytes)
            checkpoints.prepare_out(settings.out)
            found = None
            if self.team.is_first:
                if settings.resume == "auto":
                    checkpoints.clean_up(settings.out)
                found = checkpoints.choose(settings.resume, settings.out, overwrite=settings.overwrite)
            self.stream = self._open_text(source)

            self.device = _device(settings.device)
            skeleton = outline_model(source, _attention(settings, source, self.device))
            if settings.compile:
                _compile_blocks(skeleton.model)
        checkpoint = self._compare(found)
        config = make_config(settings, source, self.device)
        model = self.model = fill_model(skeleton, config, seed=settings.seed)
        if settings.compile:
            _compile_blocks(model)  # drawing builds the model anew
        model.train()
        self._use_cache = getattr(model.config, "use_cache", None)
        model.config.use_cache = False  # generate()'s cache would keep keys and values of all layers for nothing
        if settings.gradient_checkpointing:
            with as_job_error(asked="--gradient-checkpointing"):
                checkpoint_activations(model)
        groups = _param_groups(model, settings.weight_decay)
        self._weight_decays = [group["weight_decay"] for group in groups]
        self.num_params = sum(p.numel() for p in model.parameters())
        self.optimizer = gemini.HybridAdam(
            groups, lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
        self.scheduler = transformers.get_scheduler(
            settings.schedule, self.optimizer, num_warmup_steps=settings.warmup, num_training_steps=settings.steps
        )
        self.step = 0
        self._say(
            f"model: {source.label}, {self.num_params:,} params, {settings.precision}, "
            f"{model.config._attn_implementation} attention{', compiled blocks' if settings.compile else ''}"
        )
        if self.team.size > 1:
            self._say(
                f"{self.team.size} processes: each keeps a share of the model and of the memory, and takes "
                f"{settings.batch_size} of the {self.team.size * settings.batch_size} windows of a batch"
            )
            draw_from(settings.seed + self.team.rank)  # or dropout would drop the same on every rank
        self._say(use_line(self.model.memory_report(), self.team.size))
        self._resume(checkpoint)

    # ---- before the first step ---------------------------------------------------------------------------------------

    def _open_text(self, source: ModelSource) -> WindowStream:
        settings = self.settings
        longest = getattr(source.config, "max_position_embeddings", None)
        if longest is not None and settings.seq_len > longest:
            raise JobError(
                f"--seq-len {settings.seq_len} is more than the model's {longest} positions. Use at most {longest}."
            )
        files = find_text_files(settings.data, settings.glob, without_folders=settings.without_folders)
        left_out: list[LeftOut] = []
        if not settings.bytes:
            files, left_out = only_text(files, settings.data)
        tokens: Tokens
        if source.tokenizer is None:
            tokens = ByteTokens(files)
        else:
            self._tokenizer = load_tokenizer(source.tokenizer)
            tokens = TokenizerTokens(
                files, self._tokenizer, scratch=settings.out, origin=f"tokenizer of {source.tokenizer}"
            )
        if tokens.vocabulary > source.config.vocab_size:
            raise JobError(
                f"{source.label} has a vocabulary of {source.config.vocab_size}; the text as {tokens.describe()} needs "
                f"{tokens.vocabulary}. Give a config with a vocab_size of at least {tokens.vocabulary}."
            )
        stream = WindowStream(
            tokens,
            settings.seq_len,
            seed=settings.seed,
            num_held_out=settings.num_held_out,
            identity=fingerprint(files),
        )
        self._say(
            f"text: {len(files)} files, {human_bytes(sum(file.num_bytes for file in files))}, {tokens.num_tokens:,} "
            f"tokens in {stream.num_windows:,} windows of {settings.seq_len}; {tokens.describe()}"
        )
        if left_out:
            self._say(f"left out as no text: {describe(left_out)} (--bytes takes everything)")
        return stream

    def _compare(self, found: Path | None) -> Path | None:
        """The checkpoint that rank 0 chose, once it is known that all ranks have the same text."""
        own = {"checkpoint": None if found is None else str(found), "text": self.stream.state_dict()}
        everyone = self.team.tell(own, "the comparison of the text")
        for rank, other in enumerate(everyone):
            if other["text"] != everyone[0]["text"]:
                raise JobError(
                    f"rank {rank} found other text than rank 0. Every process reads all of it: give --data files that "
                    "are the same on all machines."
                )
        chosen = everyone[0]["checkpoint"]
        return None if chosen is None else Path(chosen)

    def _resume(self, checkpoint: Path | None) -> None:
        if checkpoint is None:
            if self.settings.resume == "auto":
                self._say(f"no checkpoint in {self.settings.out}: starting anew")
            return
        extra = gemini.load_checkpoint(checkpoint, self.model, self.optimizer, self.scheduler)
        if not isinstance(extra, dict) or "gemini_train" not in extra:
            raise JobError(
                f"--resume {checkpoint}: this checkpoint was not written by `gemini train`, it has no position."
            )
        saved = extra["gemini_train"]
        self._follow_settings()
        self.stream.load_state_dict(saved["data"])
        self.step = int(saved["step"])
        self._say(f"resumed from {checkpoint} after step {self.step}")
        if saved.get("windows_per_step", self._windows_per_step) != self._windows_per_step:
            self._say(
                f"a step was {saved['windows_per_step']} windows before, it is {self._windows_per_step} from now on"
            )
        if self.step < self.settings.steps:
            return
        if self.settings.resume == "auto" and self.step > self.settings.steps:
            self._say(f"that is past --steps {self.settings.steps}: nothing is left to do (more --steps go on)")
            return
        if self.settings.resume != "auto":
            raise JobError(
                f"--resume {checkpoint}: its {self.step} steps are all of --steps {self.settings.steps}. Ask for more "
                "steps to go on."
            )
        # A run that died while it wrote the model, and is started again with the same command, has only that to do.
        self._say(f"these are all of --steps {self.settings.steps}: only the model is written (more --steps go on)")

    def _follow_settings(self) -> None:
        """Learning rate and weight decay as the command line has them: the checkpoint brought back those of its run."""
        self.scheduler.base_lrs = [self.settings.lr for _ in self.optimizer.param_groups]
        for group, decay, factor in zip(
            self.optimizer.param_groups, self._weight_decays, self.scheduler.lr_lambdas, strict=True
        ):
            group["initial_lr"], group["weight_decay"] = self.settings.lr, decay
            group["lr"] = self.settings.lr * factor(self.scheduler.last_epoch)

    @property
    def _windows_per_step(self) -> int:
        return self.settings.accumulate * self.settings.batch_size * self.team.size

    # ---- the steps ---------------------------------------------------------------------------------------------------

    def run(self) -> list[float]:
        """Train to the last step, or to the whole step after Ctrl-C. Returns the loss of each step that was run.

        Afterwards ``self.step < self.settings.steps`` says that it was stopped, and a checkpoint is there.
        """
        settings = self.settings
        losses: list[float] = []
        self.model.train()
        progress = TrainProgress(
            self._console, num_steps=settings.steps, first_step=self.step, log_every=settings.log_every
        )
        answer = "Stopping after this step, then saving. Once more stops at once, and saves nothing."
        stop = StopWish(answer if self.team.is_first else "")
        with stop, progress:
            stopping = False
            while self.step < settings.steps and not stopping:
                report, stopping = self._step_or_stop(progress, stop)
                losses.append(report.loss)
                if len(losses) >= _HOPELESS_STEPS and not any(map(math.isfinite, losses[-_HOPELESS_STEPS:])):
                    raise JobError(
                        f"The loss has been inf or NaN for {_HOPELESS_STEPS} steps, the last is step {self.step}. "
                        f"A lower --lr may help, or --precision bf16. {self._newest_checkpoint()}"
                    )
                progress.show(report)
                if stopping and not stop.wanted:
                    progress.say("Another rank was asked to stop: stopping after this step, then saving.")
                due = self.step == settings.steps or self.step % max(settings.save_every, 1) == 0
                if stopping or (settings.save_every and due):
                    self._save_checkpoint(progress)
        return losses

    def _step_or_stop(self, progress: TrainProgress, stop: StopWish) -> tuple[StepReport, bool]:
        """A step; where gradients are not finite, a checkpoint from before it, so that hours are not lost."""
        try:
            return self._step(stop)
        except gemini.NonFiniteGradient as e:
            self.optimizer.zero_grad()
            self._save_checkpoint(progress)
            raise JobError(
                f"The gradients of step {self.step + 1} hold inf or NaN, so no weight was changed. The state before it "
                "is saved; --resume auto goes on from there with the text that follows. A lower --lr may help."
            ) from e

    def _step(self, stop: StopWish) -> tuple[StepReport, bool]:
        """One optimizer step over ``accumulate`` batches, and whether any rank was asked to stop until it was done.

        A signal after the ranks have told each other counts for the next step.
        """
        settings, team = self.settings, self.team
        lr = self.optimizer.param_groups[0]["lr"]
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for _ in range(settings.accumulate):
            windows = self.stream.next_batch(settings.batch_size, part=team.rank, parts=team.size)
            ids = torch.tensor(windows, device=self.device)
            # Not in no_sync(), where every rank would keep whole gradients, which is what may not fit.
            loss = self.model(input_ids=ids, labels=ids).loss / settings.accumulate
            loss.backward()
            total += loss.detach().float()
        # Shown in every step, as the loss is: so a bad gradient may be told here, before anything of the step is done.
        norm = float(self.model.clip_grad_norm_(settings.clip or math.inf, error_if_nonfinite=True))
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        everyone = team.swap([float(total), float(stop.wanted)], "the loss of a step")
        ledger = self.model._gemini_engine.store.ledger  # memory_report() would wait for the updates that are in flight
        report = StepReport(
            step=self.step,
            loss=sum(loss for loss, _ in everyone) / team.size,
            grad_norm=norm if settings.clip else None,
            lr=lr,
            num_tokens=self._windows_per_step * settings.seq_len,
            used_bytes={tier.value: ledger.used(tier) for tier in ledger.tiers},
        )
        return report, any(wanted for _, wanted in everyone)

    def _newest_checkpoint(self) -> str:
        there = checkpoints.checkpoints_in(self.settings.out)
        return f"The newest checkpoint is {there[-1]}." if there else "There is no checkpoint."

    def _save_checkpoint(self, progress: TrainProgress) -> None:
        path = checkpoints.checkpoint_path(self.settings.out, self.step)
        position = {"step": self.step, "data": self.stream.state_dict(), "windows_per_step": self._windows_per_step}
        path.parent.mkdir(exist_ok=True)
        gemini.save_checkpoint(path, self.model, self.optimizer, self.scheduler, extra={"gemini_train": position})
        if self.team.is_first:
            checkpoints.prune(self.settings.out, self.settings.keep)
        progress.say(f"saved {path}")

    # ---- after the last step -----------------------------------------------------------------------------------------

    def held_out_loss(self) -> float:
        """The mean loss on the windows that training never sees; every rank computes all of it."""
        self.model.eval()
        loss = mean_loss(self.model, torch.tensor(self.stream.held_out(), device=self.device), self.settings.batch_size)
        self.model.train()
        return loss

    def save(self) -> None:
        """Write the model to ``--out`` as Hugging Face safetensors, its tokenizer beside it."""
        if self._use_cache is not None:
            self.model.config.use_cache = self._use_cache
        self.model.save_pretrained(self.settings.out)
        self.model.config.use_cache = False
        if self._tokenizer is not None and self.team.is_first:
            self._tokenizer.save_pretrained(self.settings.out)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


@torch.no_grad()
def mean_loss(model: Any, windows: torch.Tensor, batch_size: int) -> float:
    """The mean over batches of windows, in as little memory as training takes."""
    losses = [float(model(input_ids=ids, labels=ids, use_cache=False).loss) for ids in windows.split(batch_size)]
    return sum(losses) / len(losses)


def train(settings: TrainSettings, console: Console, *, command: str) -> int:
    """Run the job as the command line does; returns the exit code. ``command`` is how to call it again."""
    cuda = torch.cuda.is_available() and (settings.device or "cuda").startswith("cuda")
    with join(settings.rank_timeout, cuda=cuda) as team, team.speaking():
        if not team.is_first:
            console = Console(quiet=True, force_terminal=False)
            hush()
        run = TrainRun(settings, console, team)
        run.run()
        finished, past = run.step >= settings.steps, run.step > settings.steps
        if finished and not past:
            run.save()
        memory = run.model.memory_report()
        lines, all_within = budget_lines(*team.tell(shares(memory), "the end of the job"))
        console.print(str(memory), *lines, sep="\n", highlight=False, markup=False, soft_wrap=True)
        if past:
            said = f"Nothing was trained and nothing written: step {run.step} is past --steps {settings.steps}."
        elif finished:
            said = f"The model is in {settings.out}; it opens with transformers' AutoModelForCausalLM.from_pretrained."
        else:
            said = f"Stopped after step {run.step} of {settings.steps}. To go on: {command}"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
        return 130 if not finished else 0 if all_within else 1


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


def _param_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and embeddings decay; biases and norms, which have one dimension, do not."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]

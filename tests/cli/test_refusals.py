"""Each wrong request gets one paragraph that says what was asked, what is there and what to do; exit code 2."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import FOUR_BLOCKS, Command, llama_config, refused

JOB, PLAN = "sft --dataset_name x --model_name_or_path gpt2-small", "plan c.json --cpu 1GiB"
MESH = "plan llama.json --machine dgx-a100 --gpus 16"
BY_PART = '"auto" or a number of tokens, 2 or more, or one by part ("head=1024,mlp=4096")'
TWO = "--machine dgx-h100 --gpus 2"
REQUESTS = {
    "sft --dataset_name x": "Say what to train with --model_name_or_path",
    "sft --model_name_or_path gpt2-small": "Say what to train on with --dataset_name",
    f"{JOB} --max_steps few": "argument --max_steps/--max-steps: invalid literal for int() with base 10: 'few'",
    f"{JOB} --max-step 3": "unrecognized arguments: --max-step 3 (perhaps --max_steps). `gemini sft --help`",
    f"{JOB} more": "unrecognized arguments: more",
    f"{JOB} --config": "argument --config: a YAML file is expected",
    f"{JOB} --config absent.yaml": "--config: [Errno 2] No such file or directory: 'absent.yaml'",
    f"{JOB} --config text.txt": "--config: Config file text.txt must contain a YAML mapping",
    f"{JOB} --config old.yaml": "unrecognized arguments: --lr",
    f"{JOB} --cpu-memory '5 parsecs'": "argument --cpu_memory/--cpu-memory: size: cannot read '5 parsecs'",
    f"{JOB} --cpu-memory=-1GiB": "argument --cpu_memory/--cpu-memory: size: cannot read '-1GiB'",
    f"{JOB} --nvme-memory 1GiB": "nvme='1GiB') needs nvme_path=",
    f"{JOB} --durable_every 1": "durable=True) needs nvme_path=",
    f"{JOB} --gradient_checkpointing false --offload_activations cpu": "needs --gradient_checkpointing: it moves",
    f"{JOB} --gradient_checkpointing false --activation_offloading": "needs --gradient_checkpointing: it moves",
    f"{JOB} --offload_activations disk": "invalid choice: 'disk'",
    f"{JOB} --offload_activations nvme": "needs MemoryBudget(nvme_path=...)",
    f"{JOB} --states 8bit": "argument --states: invalid choice: '8bit' (choose from",
    f"{JOB} --states compact --fp16 true": "and precision='fp16' was asked for",
    f"{JOB} --optimizer lamb": "argument --optimizer: invalid choice: 'lamb' (choose from",
    f"{JOB} --config sophia.yaml": "--optimizer must be one of adamw, lion",
    f"{JOB} --optimizer sophia": "argument --optimizer: invalid choice: 'sophia'",
    f"{JOB} --optim adafactor": "optim='adafactor' cannot update a managed model: use one of 'adamw_torch'",
    f"{JOB} --optim sgd --optimizer muon": "optim='sgd' is PlainSGDRule(), and the model is to be managed for MuonRule",
    f"{JOB} --config mixture.yaml": "--dataset_name and datasets: of a YAML file both say what to train on: give one",
    f"{JOB} --dataset_streaming --test_split_size 0.2": "--dataset_streaming does not go with --test_split_size: a",
    f"{JOB} --tile-tokens head=8,tail=8": f"argument --tile_tokens/--tile-tokens: {BY_PART}",
    f"{JOB} --tile-tokens 1": f"argument --tile_tokens/--tile-tokens: {BY_PART}, got 1",
    f"{JOB} --load_in_4bit": "--load_in_4bit needs --use_peft",
    f"{JOB} --tp 0": "argument --tp: must be at least 1",
    f"{JOB} --tp 2": "--tp 2 takes 2 processes or a multiple of that, and there are 1",
    f"{JOB} --durable_every=-1": "argument --durable_every/--durable-every: must be at least 0, got -1",
    f"{JOB} --gradient_accumulation_steps 0": "-steps: must be at least 1, got 0",
    f"{JOB} --max_length 0": "argument --max_length/--max-length: must be at least 1, got 0",
    f"{JOB} --seed=-1": "argument --seed: must be at least 0",
    f"{JOB} --seed {2**32}": "argument --seed: must be at least 0 and less than 4294967296, got 4294967296",
    f"{JOB} --use_peft": "--use_peft adapts trained weights, and preset gpt2-small has none",
    "dpo --model_name_or_path gpt2-small": "Say what to train on with --dataset_name",
    "distillation --dataset_name x --model_name_or_path gpt2-small": "Say what to learn from with --teacher_model",
    "grpo --dataset_name x": "Say what to train with --model_name_or_path",
    "grpo --dataset_name x --model_name_or_path gpt2-small": "Say what is rewarded: --reward_funcs NAME",
    "plan": "Say what to plan for",
    "plans": "No such command: plans. There are trace, plan, doctor",
    "trace": "the following arguments are required: CONFIG",
    "plan c.json --batch-size few": "argument --batch-size: invalid literal for int() with base 10: 'few'",
    "plan c.json --gpu-memory 1GiB": "unrecognized arguments: --gpu-memory 1GiB. `gemini plan --help`",
    "plan c.json d.json": "unrecognized arguments: d.json",
    "plan nobody/none": "nobody/none: no such file or folder here. As a name on the hub: Cannot reach https://",
    "plan ./no/config.json": "./no/config.json: no such file or folder here. As a name on the hub: Repo id must",
    f"grpo{JOB[3:]} --reward_funcs none --output_dir left": "--reward_funcs none:",
    "plan c.json --gpu '24 parsecs' --cpu 1GiB": "argument --gpu: size: cannot read '24 parsecs'",
    "plan c.json --cpu=-1GiB": "argument --cpu: size: cannot read '-1GiB'",
    f"{PLAN} --fastest --machine rtx4090 --tokens-per-step 0": "argument --tokens-per-step: must be at least 2, got 0",
    f"{PLAN} --batch-size 0": "argument --batch-size: must be at least 1, got 0",
    f"{PLAN} --seq-len 1": "argument --seq-len: must be at least 2",
    f"{PLAN} --gpus 0": "argument --gpus: must be at least 1",
    f"{PLAN} --precision int8": "argument --precision: invalid choice: 'int8'",
    f"{PLAN} --gradients none": "argument --gradients: invalid choice: 'none'",
    f"{PLAN} --optimizer lamb": "argument --optimizer: invalid choice: 'lamb' (choose from",
    f"{PLAN} --optimizer muon --states compact": "--optimizer muon: states=",
    f"{PLAN} --states 8bit": "argument --states: invalid choice: '8bit' (choose from",
    f"{JOB} --bf16 true --fp16_accumulation": 'fp16_accumulation=True with precision="bf16": use precision="fp16"',
    "trace c.json --fp16-accumulation": "--fp16-accumulation needs --precision=fp16: it is of products in fp16",
    "plan llama.json --cpu 1GiB --gpu 2GiB --fp16-accumulation": "--fp16-accumulation needs --precision=fp16",
    "plan llama.json --cpu 1GiB --precision fp16 --fp16-accumulation": "needs --target=cuda: a CPU sums in fp32",
    "plan --trace t.json --cpu 1GiB --fp16-accumulation": "--trace does not go with --fp16-accumulation: that",
    f"{PLAN} --states compact --precision fp16": "and precision='fp16' was asked for",
    f"{PLAN} --compute tpu": "argument --compute: invalid choice: 'tpu'",
    f"{PLAN} --schedule soon": "argument --schedule: invalid choice: 'soon'",
    f"{PLAN} --attn-implementation fast": "argument --attn-implementation: invalid choice: 'fast'",
    f"{PLAN} --offload-activations disk": "argument --offload-activations: invalid choice: 'disk'",
    "plan c.json --gradients transient --accumulate 2": "has one backward per update, and --accumulate 2",
    f"{PLAN} --gradients transient --precision fp16": "transient does not go with --precision fp16",
    "plan c.json --gpu 24GiB": "A plan needs host memory",
    f"{PLAN} --compute gpu": "--compute gpu needs the size of a GPU",
    "plan c.json --machine rtx9999": "'rtx9999' is neither a machine that Gemini knows nor a file",
    "plan c.json --machine dgx-h100 --gpus 12": "--gpus 12: a dgx-h100 has 8",
    "plan absent.json": "absent.json: no such file or folder here",
    f"{PLAN} --picture x.png": "--picture needs --machine: it shows a step in time",
    "plan --trace t.json --cpu 1GiB": "--trace t.json cannot be read: No such file",
    f"{PLAN} --tile-tokens 1": f"argument --tile-tokens: {BY_PART}, got 1",
    f"{PLAN} --tile-tokens some": f"argument --tile-tokens: {BY_PART}, got 'some'",
    f"{PLAN} --tile-tokens -3": f"argument --tile-tokens: {BY_PART}, got '-3'",
    f"{PLAN} --lora 0": "argument --lora: must be at least 1",
    f"{PLAN} --load-in-4bit": "--load-in-4bit needs --lora: weights in 4 bits are frozen",
    "plan --trace t.json --cpu 1GiB --load-in-4bit": "--trace does not go with --load-in-4bit: that describes",
    "plan --trace t.json --cpu 1GiB --lora 8": "--trace does not go with --lora: that",
    "plan --trace t.json --cpu 1GiB --seq-len 8": "--trace does not go with --seq-len: that",
    "plan c.json --lora 4 --tp 2": "--tp does not go with --lora: of a mesh each stage has a plan",
    f"plan c.json {TWO} --tp 2 --alternatives": "--tp does not go with --alternatives",
    f"plan --trace t.json {TWO} --tp 2": "--tp does not go with --trace",
    "plan llama.json --gpus 2 --tp 2 --gpu 24MiB --cpu 64MiB": "A plan over a mesh needs the speeds of a machine",
    f"{MESH} --tp 3": "--gpus 16 with --tp 3, which are 3 GPUs together: a multiple of 3.",
    f"{MESH} --pp 2": "--pp 2 with --accumulate 1: a pipeline takes a micro-batch for each of its stages at least",
    f"{MESH} --tp 0": "argument --tp: must be at least 1",
    f"{MESH} --parallel best": "argument --parallel: invalid choice: 'best'",
    f"{MESH} --parallel auto --tp 2": "--parallel does not go with --tp: it chooses them",
    f"{MESH} --tp 2 --gradients transient": "--tp does not go with --gradients transient",
    f"{MESH} --pp 2 --precision fp16": "--pp does not go with --precision fp16: stages",
    f"{MESH} --tp 2 --tile-tokens 16": "--tp does not go with --tile-tokens",
    f"{MESH} --tp 2 --out plan.json": "--tp does not go with --out",
    f"{MESH} --tp 16": "tensor parallel over 16 ranks: the model has num_attention_heads=8",
    f"{MESH} --tp 2 --optimizer muon": "--tp 2 with --optimizer muon, which looks at whole params",
    f"{MESH} --cp 2 --optimizer muon": "--cp 2: the rule 'Muon' updates whole params",
    f"{MESH} --parallel auto --optimizer muon --pp 1": "--parallel auto: the rule 'Muon' updates",
    f"{MESH} --optimizer muon": "--optimizer muon with --gpus 16: the rule 'Muon' updates whole params",
    f"{MESH} --pp 8 --accumulate 8": "8 stages of LlamaForCausalLM, which has only 4 blocks",
    "trace absent.json": "absent.json: no such file or folder here",
    "trace tiny.json --seq-len 64": "--seq-len 64 is more than the model's 32 positions",
    "trace tiny.json --layers 0": "argument --layers: must be at least 1",
    "trace tiny.json --precision int8": "argument --precision: invalid choice: 'int8'",
    "trace tiny.json --target tpu": "argument --target: invalid choice: 'tpu'",
    "trace tiny.json --attn-implementation flash_attention_2 --target cpu": "does not go with --target cpu",
    "plan tiny.json --compute cpu --cpu 1GiB --attn-implementation flash_attention_2": "not go with --compute cpu",
    "trace tiny.json --out absent/trace.json": "argument --out: absent/trace.json cannot be written",
    "trace tiny.json --out .": "argument --out: . is a folder: give the name of a file",
    "trace odd.json": "config of odd.json cannot be traced",
    "trace text.txt": "is not a valid JSON file",
    "doctor --json mine.json": "--json needs --measure",
    "doctor --measure --json absent/mine.json": "there is no folder absent",
    "doctor --measure --json .": "is a folder",
    "sft --model_name_or_path vit.json --dataset_name text.txt --output_dir out": "has no vocabulary",
    "demo --seed=-1 --output_dir out": "argument --seed: must be at least 0",
    "demo --cpu-memory 'a lot' --output_dir out": "argument --cpu_memory/--cpu-memory: size: cannot read 'a lot'",
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_what_cannot_be_is_refused(
    gemini_command: Command, tiny_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, values in {
        "tiny": tiny_values,
        "odd": {**tiny_values, "n_head": 3},
        "c": {"model_type": "gpt2"},
        "vit": {"model_type": "vit"},
    }.items():
        Path(f"{name}.json").write_text(json.dumps(values))
    Path("text.txt").write_text("a text\n")
    Path("old.yaml").write_text("lr: 0.1\n")
    Path("sophia.yaml").write_text("optimizer: sophia\n")
    Path("mixture.yaml").write_text("datasets:\n  - path: json\n    data_files: text.txt\n")
    llama_config(Path("llama.json"), **FOUR_BLOCKS)
    result = gemini_command(*shlex.split(request_))
    refused(result, REQUESTS[request_])
    assert not Path("left").exists(), "nothing is made before what was asked is known to be right"

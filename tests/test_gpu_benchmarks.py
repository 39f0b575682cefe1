"""The GPU benchmarks run: commands, models, a tiny form of what needs no GPU, and a suite whose parts fail.

Their other tiny forms are processes of their own (``benchmarks/gpu/README.md``); nothing here measures anything.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from benchmarks import gpu_suite
from benchmarks._report import told_command
from benchmarks.gpu import _llama, copies, exactness, kernels, pack_deepspeed, peers, size, throughput
from benchmarks.gpu._card import Card
from benchmarks.gpu._training import CLIPPED, Training
from gemini.rules import Arrays
from tests import models

SCRIPTS = (gpu_suite, kernels, copies, exactness, throughput, size, peers, pack_deepspeed)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_every_script_says_what_it_takes(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        script.main(["--help"])
    assert left.value.code == 0 and "--" in capsys.readouterr().out


def test_every_part_of_the_suite_is_a_script() -> None:
    for part in set(gpu_suite.PARTS) - {"build", "tests"}:
        assert (gpu_suite.ROOT / "benchmarks" / "gpu" / f"{part}.py").exists(), part


@pytest.mark.parametrize(("name", "params"), [("8b", 8_030_261_248), ("3b", 3_212_749_824), ("tiny-tied", None)])
def test_shapes_are_those_of_the_models_they_are_named_after(name: str, params: int | None) -> None:
    shape = _llama.SHAPES[name]
    with torch.device("meta"):
        model = _llama.PiecewiseLlama(_llama.config_of(shape, 64))
    assert sum(param.numel() for param in model.parameters()) == shape.params == (params or shape.params)


def test_flops_are_six_per_weight_and_token_and_half_of_attention() -> None:
    shape = _llama.Shape(hidden=4, intermediate=8, layers=2, heads=2, kv_heads=1, vocab=10)
    matrices = 2 * (4 * 4 + 2 * 2 * 4 + 4 * 4 + 3 * 4 * 8) + 4 * 10  # two layers (q, k, v, o, MLP), and the head
    scores = 2 * 2 * 5 * 5 * 4 / 2  # of a layer in forward: two products of 5 x 5 x 4, half masked
    assert shape.flops(5, 5) == 5 * 6 * matrices + 3 * 2 * scores


def test_the_managed_model_starts_from_the_plain_one_s_weights() -> None:
    shape = _llama.SHAPES["tiny-tied"]
    plain = _llama.plain_model(shape, 32)
    memory = gemini.MemoryBudget(gpu="64MiB", cpu="64MiB")
    training = Training(Card("standin"), shape, 64, 32, {"memory": memory})
    for name, param in plain.named_parameters():
        models.assert_same_bits(training.model.full_param(name), param.detach(), name)
    training.use(CLIPPED)
    batch = _llama.make_batch(shape, 64, 32, 0)
    wanted = plain(**batch).loss
    assert training.step(batch).item() == wanted.item()
    whole = super(_llama.PiecewiseLlama, plain).forward(**batch)
    torch.testing.assert_close(wanted, whole.loss, rtol=1e-5, atol=0)
    training.close()


def test_kernels_in_a_tiny_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--device", "standin", "--tiny", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert found["state"] == "done" and set(found["raw"]) == {"Adam", "Gradients", "bits"}
    bits = found["raw"]["bits"]
    assert bits["differing"] == bits["norms differing"] == 0 < bits["nan"] and bits["params"] == bits["asked"]
    assert "goal at least 0.9" in capsys.readouterr().out


def test_a_bit_that_differs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = kernels.kernels.update, []

    def one_bit_off(arrays: Arrays, *rest: Any) -> bool:
        done = real(arrays, *rest)
        calls.append(None)
        if len(calls) == 6:  # the last update on the other side, of the first kind
            arrays.weights.view(torch.int16)[7] ^= 1
        return done

    monkeypatch.setattr(kernels.kernels, "update", one_bit_off)
    assert kernels.compare_slab(1000, 0, "cpu")["differing"] == 1


def test_who_fits_together_is_compared_together() -> None:
    everybody = ["gemini", "deepspeed", "fsdp2"]
    assert peers.groups_of(everybody, 10**9, 60 * 10**9) == [everybody]
    assert peers.groups_of(everybody, 10**9, 40 * 10**9) == [["gemini", "deepspeed"], ["gemini", "fsdp2"]]


def test_without_deepspeed_the_others_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[list[str]] = []

    def take_turns(args: Any, names: list[str], results: Any, extensions: str) -> list[str]:
        compared.append(names)
        results.append("compared", {"group": names, "tokens": 64, "rounds": []})
        return ["nobody was started"]

    monkeypatch.setattr(peers, "take_turns", take_turns)
    command = ["--device", "standin", "--tiny", "--out", str(tmp_path), "--deepspeed", str(tmp_path / "packed")]
    with pytest.raises(SystemExit):
        peers.main(command)
    (tmp_path / "packed" / "deepspeed").mkdir(parents=True)
    with pytest.raises(SystemExit):
        peers.main(command)
    assert compared == [["gemini", "fsdp2"], ["gemini", "deepspeed", "fsdp2"]]


def test_a_case_without_memory_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the cases before have shown stands in the report before the last one is over."""
    real, seen = throughput.case_of, []

    def case_of(args: Any, training: Any, tokens: int, results: Any) -> Any:
        seen.append(json.loads((tmp_path / "throughput.json").read_text())["lines"])
        if len(seen) == 2:
            raise torch.OutOfMemoryError("so much is not there")
        return real(args, training, tokens, results)

    monkeypatch.setattr(throughput, "case_of", case_of)
    throughput.main(["--device", "standin", "--tiny", "--typical", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "throughput.json").read_text())
    assert found["state"] == "done" and len(found["raw"]["cases"]) == 1
    assert seen[0] == [] and any("with clipping" in line for line in seen[1])
    assert any("64 tokens: ended by OutOfMemoryError: so much is not there" in line for line in found["lines"])
    assert sum(line.startswith("Llama of ") for line in found["lines"]) == 1


SAYS = "import json, time; open(OUT, 'w').write(json.dumps({WHAT}));"
PROGRAMS = {
    "kernels": SAYS.replace("WHAT", "'lines': ['- it went well'], 'raw': [1], 'machine': {'card': 'NVIDIA H200'}"),
    "copies": "print('about to fail'); raise SystemExit(3)",
    "exactness": SAYS.replace("WHAT", "'lines': ['- half of it'], 'raw': [2]") + "time.sleep(60)",
}


def test_a_part_that_fails_or_hangs_is_told_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command_of(part: str, args: Any, seconds: float) -> list[str]:
        return [sys.executable, "-c", PROGRAMS[part].replace("OUT", repr(str(args.parts_folder / f"{part}.json")))]

    monkeypatch.setattr(gpu_suite, "command_of", command_of)
    command = ["--out", str(tmp_path), "--parts", "copies,exactness,kernels,size", "--limit", "exactness=4"]
    monkeypatch.setitem(gpu_suite.PARTS, "size", gpu_suite.PARTS["size"]._replace(least=10**6))
    assert gpu_suite.main(command) == 1
    (report,) = tmp_path.glob("gpu_suite_h200_*.md")
    raw = json.loads(report.with_suffix(".json").read_text())["parts"]
    states = {part: raw[part]["state"] for part in ("copies", "exactness", "kernels", "size")}
    assert states == {
        "copies": "failed with 3", "exactness": "stopped after 4 s", "kernels": "done", "size": "not run: no time left",
    }  # fmt: skip
    text = report.read_text()
    for told in ("about to fail", "- half of it", "- it went well", "not measured: build, throughput, peers, tests"):
        assert told in text, told
    assert raw["exactness"]["raw"] == [2] and sorted(file.name for file in tmp_path.iterdir()) == sorted(
        [report.name, report.with_suffix(".json").name, "log.txt"]
    )


def test_a_part_whose_packages_are_missing_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite, "command_of", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    monkeypatch.setitem(gpu_suite.NEEDED_BY, "tests", ("pytest", "no_such_package"))
    assert gpu_suite.main(["--out", str(tmp_path), "--parts", "tests,copies"]) == 1
    (report,) = tmp_path.glob("*.md")
    parts = json.loads(report.with_suffix(".json").read_text())["parts"]
    assert parts["tests"]["state"] == f"not run: {sys.executable} cannot import no_such_package"
    assert parts["copies"]["state"] == "failed with 3" and "cannot import no_such_package" in report.read_text()


def test_a_call_goes_on_where_another_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command_of(part: str, args: Any, seconds: float) -> list[str]:
        ran.append(part)
        says = f"{SAYS} {'raise SystemExit(fails)' if part == 'copies' else ''}"
        says = says.replace("WHAT", f"'lines': ['- speed of {part}: 2.000; goal at least 1: met'], 'raw': [7]")
        says = says.replace("OUT", repr(f"{args.parts_folder}/{part}.json"))
        return [sys.executable, "-c", f"fails = {fails}; {says}"]

    monkeypatch.setattr(gpu_suite, "command_of", command_of)
    ran: list[str] = []
    fails = 3
    assert gpu_suite.main(["--out", str(tmp_path / "first"), "--parts", "kernels,copies"]) == 1
    fails = 0
    again = ["--out", str(tmp_path / "second"), "--resume", str(tmp_path / "first")]
    assert gpu_suite.main([*again, "--parts", "kernels,copies,exactness"]) == 0
    assert ran == ["kernels", "copies", "copies", "exactness"]
    (report,) = (tmp_path / "second").glob("*.md")
    parts = json.loads(report.with_suffix(".json").read_text())["parts"]
    assert list(parts) == ["exactness", "copies", "kernels"] and parts["kernels"]["raw"] == [7]
    assert "kept" in parts["kernels"] and "kept" not in parts["copies"]
    assert report.read_text().count("| speed of ") == 3
    with pytest.raises(SystemExit, match="there is no gpu_suite"):
        gpu_suite.main(["--out", str(tmp_path / "third"), "--resume", str(tmp_path / "nowhere")])


def test_folders_are_not_told() -> None:
    command = ["/x/benchmarks/gpu_suite.py", "--out", "/y", "--parts", "peers"]
    command += ["--args", "peers=--deepspeed /z --clip 0"]
    told = "python benchmarks/gpu_suite.py --out DIR --parts peers --args 'peers=--deepspeed DIR --clip 0'"
    assert told_command(command) == told
    command = ["/x/benchmarks/durable.py", "/y", "--rounds", "6"]
    assert told_command(command) == "python benchmarks/durable.py DIR --rounds 6"


def test_a_part_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_suite.main(["--parts", "kernels,kernel"])
    assert "no part kernel; there are build, exactness" in capsys.readouterr().err

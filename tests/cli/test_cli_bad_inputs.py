"""Wrong inputs to every command: one sentence, exit code 2, nothing written, no wait.

A case is what a user types, and the beginning of the sentence that answers it: the setting, option
or file, its value, and what is wrong with it. A wrong use of the command line has Typer's own form.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from tiny import tiny_job, train

from outlast.cli.app import app
from outlast.cli.main import main
from outlast.errors import EXIT_BAD_INPUT
from outlast.job import default_job_text
from outlast.records import RunDirectory
from outlast.train.export import export_model

NOISE = bytes(range(256)) * 8
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
PROFILE = "stage,phase,clock_mhz,seconds,joules\n0,forward,"
SCRIPT = """
import torch
m = torch.nn.Linear(2, 2)
o = torch.optim.SGD(m.parameters(), lr=0.1)
for step in range(3):
    m(torch.ones(2)).sum().backward()
    o.step()
"""
TEXTS = {
    "notes.txt": "just some words\n",
    "truncated.toml": "[train]\nsteps = ",
    "twice.toml": "[train]\nsteps = 1\nsteps = 2\n",
    "misspelt.toml": default_job_text().replace("\nsteps =", "\nstpes ="),
    "section.toml": "[trian]\nsteps = 1\n",
    "job.toml": default_job_text(),
    "deep.toml": "a = " + "[" * 5000,
    "truncated.json": '{"model_type": "ll',
    "list.json": "[]",
    "deep.json": "[" * 100_000,
    "untyped.json": '{"hidden_size": 8}',
    "unknown.json": '{"model_type": "lama", "hidden_size": 8}',
    "llama.json": json.dumps(LLAMA),
    "negative.json": json.dumps({**LLAMA, "hidden_size": -64}),
    "words.json": json.dumps({**LLAMA, "hidden_size": "many"}),
    "syntax.py": "for step in range(:\n",
    "hello.py": "print('hello')\n",
    "loop_script.py": SCRIPT,
    "columns.csv": "stage,phase,seconds\n0,forward,1.0\n",
    "negative.csv": f"{PROFILE}1410,-1.0,5\n",
    "nan.csv": f"{PROFILE}1410,nan,5\n",
    "words.csv": f"{PROFILE}fast,1,5\n",
    "node.toml": 'name = "x"\n[node]\ndevice = "h1000"\n',
    "a_node.toml": '[cluster]\nnode = "dgx-h1000"\nnodes = 8\n',
    "tasks.toml": "[run]\nsteps = -3\n",
}


def _cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def _newer_format(file: Path) -> None:
    file.write_text(re.sub(r'"format": ?\d+', '"format": 99', file.read_text()))


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "cut_manifest": ("*/rank*.json", _cut),
    "no_packs": ("*/*.pack", Path.unlink),
    "no_manifest": ("*/rank*.json", Path.unlink),
    "noise_manifest": ("*/rank*.json", lambda file: file.write_bytes(NOISE)),
    "future": ("*/*.json", _newer_format),
}


def _make_files() -> None:
    """Files that are none of what they are called."""
    Path("folder").mkdir()
    Path("empty").touch()
    Path("odd.bin").write_bytes(b"abc")
    Path("noise.bin").write_bytes(NOISE)
    for kind in ("toml", "json", "csv", "txt", "py"):
        Path(f"empty.{kind}").touch()
        Path(f"noise.{kind}").write_bytes(NOISE)
        Path(f"latin.{kind}").write_bytes('name = "größe"\n'.encode("latin-1"))
        Path(f"dangling.{kind}").symlink_to("nowhere")
        Path(f"loop.{kind}").symlink_to(f"loop.{kind}")
        os.mkfifo(f"pipe.{kind}")
    for name, text in TEXTS.items():
        Path(name).write_text(text)


def _make_runs() -> None:
    """A run, its store, its model, and copies that are damaged."""
    job = tiny_job(Path(), "a")
    assert train(job, 1) == 0
    run = Path("runs/a")
    shutil.copytree(run / "checkpoints", "store")
    export_model(job, RunDirectory(run), Path("hf"))
    kept = ("events.jsonl", "job.toml", "id")
    for name, (pattern, damage) in DAMAGE.items():
        shutil.copytree("store", name)
        for file in [*Path(name).glob(pattern)]:
            damage(file)
        shutil.copytree(name, f"run_{name}/checkpoints")
        for file_name in kept:
            shutil.copy(run / file_name, f"run_{name}")
    for name, jobs in {"without_job": None, "bad_job": b"[train\n", "noise_job": NOISE}.items():
        Path(f"run_{name}").mkdir()
        shutil.copy(run / "events.jsonl", f"run_{name}")
        if jobs is not None:
            Path(f"run_{name}/job.toml").write_bytes(jobs)
    Path("run_empty").mkdir()
    Path("run_empty/events.jsonl").touch()
    shutil.copy(run / "job.toml", "run_empty")
    Path("script_run").mkdir()
    Path("bad_chain/chain").mkdir(parents=True)
    Path("bad_chain/chain/chain.json").write_text('{"name":')
    shutil.copy("job.toml", "bad_chain")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with everything that a case names; no case changes it."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        _make_files()
        _make_runs()
    return folder


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below a folder, with the size and time of those that are no folders."""
    found = {}
    for place, folders, files in os.walk(folder):
        found |= dict.fromkeys((f"{place}/{name}" for name in folders), (0, 0))
        for name in files:
            facts = os.lstat(f"{place}/{name}")
            found[f"{place}/{name}"] = facts.st_size, facts.st_mtime_ns
    return found


# Command -> arguments, and how the answer to them begins or which option it names.
CASES: dict[str, list[tuple[str, str]]] = {
    "train": [
        ("missing.toml", "missing.toml: the file does not exist; `outlast init`"),
        ("folder", "folder: the file cannot be read: it is a folder; give the"),
        ("noise.toml", "noise.toml: the file is not UTF-8 text (byte 128); save it"),
        ("latin.toml", "latin.toml: the file is not UTF-8 text (byte 10); save it"),
        ("dangling.toml", "dangling.toml: the file does not exist; `outlast init`"),
        ("loop.toml", "loop.toml: the file cannot be read: Too many levels of"),
        ("truncated.toml", "truncated.toml: not valid TOML: Invalid value (at end of"),
        ("twice.toml", "twice.toml: not valid TOML: Cannot overwrite a value (at"),
        ("misspelt.toml", "misspelt.toml: train.stpes is not a known key; did you mean"),
        ("section.toml", "section.toml: trian is not a known section; did you mean"),
        ("deep.toml", "deep.toml: not valid TOML: maximum recursion depth exceeded"),
        ("notes.txt", "notes.txt: not valid TOML: Expected '=' after a key in a"),
        ("llama.json", "llama.json: not valid TOML: Invalid statement (at line 1"),
        ("train.steps=-1", "train.steps = -1 is not possible: it should be at least 1"),
        ("train.steps=nan", "train.steps = nan is not possible: it should be a whole"),
        ("train.steps=1e400", "train.steps = inf is not possible: it should be a whole"),
        ("train.steps=", 'train.steps = "" is not possible: it should be a whole'),
        ("train.steps=abc", 'train.steps = "abc" is not possible: it should be a whole'),
        ("train.steps=1.5", "train.steps = 1.5 is not possible: it should be a whole"),
        (
            "optimizer.learning_rate=inf",
            "optimizer.learning_rate = inf is not possible: it should be",
        ),
        (
            "optimizer.learning_rate=-1",
            "optimizer.learning_rate = -1 is not possible: it should be",
        ),
        ("train.stpes=3", "train.stpes is not a known key; did you mean train.steps?"),
        ("tarin.steps=3", "tarin is not a known section; did you mean train?"),
        ("steps=3", "the override `steps=3` is not of the form section.key=value"),
        ("train.steps", "train.steps is a setting without a value: write"),
        ("job.toml job.toml", "job.toml: the job is job.toml already: leave out job.toml"),
        ("job.toml train.steps", "job.toml: the override `train.steps` is not of the form"),
        ("train.batch_size=0", "train.batch_size = 0 is not possible: it should be at least"),
        ("train.precision=fp12", 'train.precision = "fp12" is not possible: it should be'),
        ("--nproc 0", "--nproc"),
        ("--nproc -3", "--nproc"),
        ("--nproc two", "--nproc"),
        ("--nporc 2", "Possible options: --nproc"),
        ("--nproc 99999999", "train.batch_size = 16 gives no sample to some of the"),
        ("model.config=missing.json", 'model.config = "missing.json" does not exist'),
        ("model.config=folder", 'model.config = "folder" holds no Hugging Face config'),
        ("model.config=truncated.json", 'model.config = "truncated.json" holds no Hugging Face'),
        ("model.config=untyped.json", 'model.config = "untyped.json" holds no Hugging Face config'),
        ("model.config=unknown.json", 'model.config = "unknown.json" holds no Hugging Face config'),
        ("model.config=noise.json", 'model.config = "noise.json" holds no Hugging Face config'),
        ("model.config=list.json", 'model.config = "list.json" holds no Hugging Face config'),
        ("model.config=empty.json", 'model.config = "empty.json" holds no Hugging Face config'),
        ("model.config=negative.json", "the model cannot be built: Trying to create tensor with"),
        ("model.config=words.json", 'model.config = "words.json" holds no Hugging Face config'),
        ("model.config=lama", 'model.config = "lama" does not exist'),
        ("model.directory=missing", 'model.directory = "missing" does not exist'),
        ("model.directory=folder", 'model.directory = "folder" holds no Hugging Face config'),
        ("model.directory=notes.txt", 'model.directory = "notes.txt" holds no Hugging Face config'),
        ("model.module=nothing:model", 'model.module = "nothing:model" cannot be imported: No'),
        ("data.tokenizer=missing", "data.tokenizer = 'missing' is neither 'byte' nor a file or"),
        ("data.tokenizer=notes.txt", "data.tokenizer = 'notes.txt' ends in '.txt'; it must be a"),
        ("data.tokenizer=folder", "data.tokenizer = 'folder': the folder folder holds neither"),
        ("data.sequence_length=0", "data.sequence_length = 0 is not possible: it should be at"),
        (
            "data.sequence_length=1000000000000",
            "data.sequence_length = 1000000000000 exceeds the model's",
        ),
        ("run.directory=notes.txt", "the run directory notes.txt/quickstart cannot be made: Not"),
        ("run.directory=notes.txt/below", "the run directory notes.txt/below/quickstart cannot be"),
        ("run.name=a/b", 'run.name = "a/b" is not possible: it should be letters'),
        ("run.name=", 'run.name = "" is not possible: it should be letters'),
        (
            "run.directory=/proc/nothing",
            "the run directory /proc/nothing/quickstart cannot be made",
        ),
        ("checkpoint.keep=-1", "checkpoint.keep = -1 is not possible: it should be at least"),
        ("checkpoint.every_steps=-5", "checkpoint.every_steps = -5 is not possible: it should be"),
        ("checkpoint.mode=none", "checkpoint.mode is not a known key; did you mean"),
        ("guard.policy=ful", 'guard.policy = "ful" is not possible: it should be "off"'),
        ("data.source=text data.train=nothing/*.txt", "no glob matches 'nothing/*.txt' in ."),
        (
            "data.source=text data.train=folder",
            "'folder' is a folder (folder); write 'folder/**' for its",
        ),
        ("data.source=text data.train=odd.bin", "odd.bin (3 bytes) is too short to keep"),
        ("data.source=text data.train=empty.bin", "no file is found for 'empty.bin' in ."),
        ("data.source=text data.train=missing.bin", "no file is found for 'missing.bin' in ."),
        (
            "data.source=text data.train=empty.txt",
            "the corpus is empty: 1 files in , no text in any",
        ),
        (
            "data.source=text data.train=latin.txt",
            "runs/quickstart/data/train.bin holds 15 tokens, too few for",
        ),
        (
            "data.source=text data.train=notes.txt",
            "runs/quickstart/data/train.bin holds 16 tokens, too few for",
        ),
        (
            "data.source=tokens data.train=odd.bin",
            "odd.bin has 3 bytes, not a multiple of 2: it is cut short",
        ),
        (
            "data.source=tokens data.train=noise.bin",
            "noise.json cannot be read as JSON (Expecting value: line 1",
        ),
        ("data.source=tokens data.train=missing.bin", "no file is found for 'missing.bin' in ."),
        (
            "data.source=tokens data.train=folder",
            "'folder' is a folder (folder); write 'folder/**' for its",
        ),
        ("data.source=text data.train=loop.txt", "no file is found for 'loop.txt' in ."),
        ("data.source=text data.train=pipe.txt", "no file is found for 'pipe.txt' in ."),
        ("data.source=texts", 'data.source = "texts" is not possible: it should be'),
        ("model.config=pipe.json", 'model.config = "pipe.json" is a pipe or a device'),
        ("pipe.toml", "pipe.toml: the file cannot be read: it is a pipe or a"),
        ("data.train=nothing/*.txt", 'data.source = "stdlib" reads no files, but data.train or'),
        ("/dev/zero", "/dev/zero: the file cannot be read: it is a pipe or a"),
    ],
    "trian": [
        ("", "train"),
    ],
    "watch": [
        ("missing", "missing is not a run directory: it has no job.toml; name a"),
        ("folder", "folder is not a run directory: it has no job.toml; name a"),
        ("notes.txt", "notes.txt is not a run directory: it has no job.toml; name"),
        ("loop.txt", "loop.txt is not a run directory: it has no job.toml; name a"),
        ("pipe.txt", "pipe.txt is not a run directory: it has no job.toml; name a"),
        ("store", "store is not a run directory: it has no job.toml; name a"),
        ("runs/a --every 0", "--every"),
        ("runs/a --every nan --once", "--every"),
        ("", "RUN"),
    ],
    "report": [
        ("missing", "missing is not a run directory: it has no job.toml; name a"),
        ("folder", "folder is not a run directory: it has no job.toml; name a"),
        ("notes.txt", "notes.txt is not a run directory: it has no job.toml; name"),
        ("pipe.txt", "pipe.txt is not a run directory: it has no job.toml; name a"),
        ("store", "store is not a run directory: it has no job.toml; name a"),
        ("runs", "runs is not a run directory: it has no job.toml; name a"),
        ("run_without_job", "run_without_job is not a run directory: it has no job.toml"),
        ("run_noise_job", "run_noise_job/job.toml is damaged: it is not UTF-8 text"),
        ("runs/a --output folder", "the report folder cannot be written: Is a directory; name a"),
        (
            "runs/a --output notes.txt/below.html",
            "the report notes.txt/below.html cannot be written: Not a",
        ),
        (
            "runs/a --output nowhere/page.html",
            "the report nowhere/page.html cannot be written: No such",
        ),
        ("runs/a runs/missing", "runs/missing is not a run directory: it has no job.toml"),
        ("", "RUN ..."),
    ],
    "resize": [
        ("missing -n 2", "missing is no run directory; give that of a run, e.g."),
        ("folder -n 2", "folder is no run directory; give that of a run, e.g."),
        ("notes.txt -n 2", "notes.txt is no run directory; give that of a run, e.g."),
        ("runs/a -n 2", "runs/a has ended (completed); there is nothing to resize."),
        ("runs/a -n 0", "--nproc"),
        ("runs/a --nproc two", "--nproc"),
        ("runs/a", "--nproc"),
        ("run_noise_job -n 2", "run_noise_job/job.toml is damaged: it is not UTF-8 text"),
        ("runs/a -n 2 --wait -1", "--wait"),
        ("runs/a -n 2 --wait nan", "--wait"),
    ],
    "export": [
        ("missing", "missing is not a run directory: it has no job.toml; name a"),
        ("folder", "folder is not a run directory: it has no job.toml; name a"),
        ("notes.txt", "notes.txt is not a run directory: it has no job.toml; name"),
        ("store", "store is not a run directory: it has no job.toml; name a"),
        ("runs/a -o notes.txt", "/notes.txt exists; give another folder to export to, or"),
        (
            "runs/a -o notes.txt/below",
            "the model cannot be exported to /notes.txt/below: the model",
        ),
        (
            "runs/a -o folder/../noise.bin",
            "/folder/../noise.bin exists; give another folder to export",
        ),
        ("run_without_job", "run_without_job is not a run directory: it has no job.toml"),
        ("run_bad_job", "run_bad_job/job.toml: not valid TOML: Expected ']' at the"),
        ("run_noise_job", "run_noise_job/job.toml is damaged: it is not UTF-8 text"),
        ("run_cut_manifest -o out", "no checkpoint in run_cut_manifest/checkpoints can be used"),
        ("run_no_packs -o out", "no checkpoint in run_no_packs/checkpoints can be used"),
        ("run_no_manifest -o out", "no checkpoint in run_no_manifest/checkpoints can be used"),
        ("run_noise_manifest -o out", "no checkpoint in run_noise_manifest/checkpoints can be"),
        ("run_future -o out", "no checkpoint in run_future/checkpoints can be used"),
        ("script_run", "script_run is not a run directory: it has no job.toml; name"),
        ("runs/a -o store", "/store exists; give another folder to export to, or remove"),
    ],
    "init": [
        ("folder", "folder is a folder; give the name of a file, e.g."),
        ("notes.txt", "notes.txt exists; give another name or --force to replace it"),
        ("nowhere/job.toml", "the folder nowhere does not exist; make it first"),
        ("notes.txt/job.toml", "the folder notes.txt does not exist; make it first"),
        ("dangling.toml", "dangling.toml exists; give another name or --force to"),
        ("a.toml b.toml", "unexpected extra argument"),
        ("--lop", "Possible options: --help, --loop"),
    ],
    "convert": [
        ("missing out", "missing holds no config.json: give the folder of a Hugging"),
        ("folder out", "folder holds no config.json: give the folder of a Hugging"),
        ("notes.txt out", "notes.txt holds no config.json: give the folder of a"),
        ("runs/a out", "runs/a holds no config.json: give the folder of a Hugging"),
        ("folder notes.txt", "notes.txt is no folder: give another name to write the"),
        ("folder out --form lowrank", "form = 'lowrank' is not one of low_rank, cola, lax"),
        ("folder out --dtype float12", "--dtype float12 is not one of float32, bfloat16, float16"),
        ("folder out --as pickle", "--as pickle is not one of factored, merged, dense"),
        ("folder", "OUT"),
        ("hf notes.txt", "notes.txt is no folder: give another name to write the"),
        ("hf hf", "IN and OUT are both hf: give another folder to write to"),
        ("hf notes.txt/out", "the model cannot be written to /notes.txt/out: Not a"),
        ("hf out --rank -1", "model.layers.0.self_attn.q_proj: rank = -1 must be at least"),
        ("hf out --rank nan", "model.layers.0.self_attn.q_proj: rank = nan is no fraction"),
        ("hf out --rank 0", "model.layers.0.self_attn.q_proj: rank = 0 must be at least 1"),
        ("hf out --rank many", "model.layers.0.self_attn.q_proj: rank = 'many': give an"),
        ("hf out --device tpu", "--device tpu cannot be used: Expected one of cpu, cuda"),
        ("hf out --error -1", "model.layers.0.self_attn.q_proj: rank = 'error=-1.0': give"),
        ("hf out --error nan", "model.layers.0.self_attn.q_proj: rank = 'error=nan': give"),
        ("hf out --tokens 0", "--tokens"),
        ("hf out --window 0", "--window"),
        ("hf out --calibrate missing.txt", "the text missing.txt cannot be read: No such file or"),
        (
            "hf out --calibrate empty.txt",
            "the text empty.txt has 0 tokens, and 2 sequences of 32 are",
        ),
        (
            "hf out --calibrate pipe.txt",
            "the text pipe.txt cannot be read: it is a pipe or a device",
        ),
        ("hf out --match nothing.*", "the pattern 'nothing.*' fits no linear layer or embedding"),
        ("hf out --cores 0", "--cores"),
        ("hf out --distill-steps -1", "distill_steps = -1 must be 0 or more"),
    ],
    "submit": [
        ("missing.toml --dry-run", "missing.toml: the file does not exist; `outlast init`"),
        ("job.toml --dry-run --hours nan", "--hours"),
        (
            "--dry-run slurm.wall_time=tomorrow",
            'slurm.wall_time = "tomorrow" is not possible: it should be',
        ),
        (
            "--dry-run slurm.wall_time=-1",
            'slurm.wall_time = "-1" is not possible: it should be a time',
        ),
        ("--dry-run slurm.nodes=0", "slurm.nodes.0 = 0 is not possible: it should be at least 1"),
        (
            "--dry-run --script missing.py slurm.wall_time=4h",
            '--script "missing.py" does not begin with the path of a',
        ),
        (
            "--dry-run --script folder slurm.wall_time=4h",
            '--script "folder" does not begin with the path of a Python',
        ),
        (
            "--dry-run --script syntax.py slurm.wall_time=4h",
            "/syntax.py, line 1: invalid syntax; Python cannot read this",
        ),
        (
            "--dry-run --script empty.py slurm.wall_time=4h",
            "no training loop was found in empty.py: nothing in it or in",
        ),
        (
            "--dry-run --script hello.py slurm.wall_time=4h",
            "no training loop was found in hello.py: nothing in it or in",
        ),
        (
            "--dry-run --script noise.py slurm.wall_time=4h",
            "the script /noise.py cannot be read: it is not UTF-8 text",
        ),
        (
            '--dry-run --script "loop_script.py \'open" slurm.wall_time=4h',
            "--script loop_script.py 'open cannot be read as a shell",
        ),
        (
            "--dry-run --script loop_script.py --every never slurm.wall_time=4h",
            '--every never is neither a number of steps, as "100", nor a',
        ),
        ("--dry-run --script loop_script.py --keep 0 slurm.wall_time=4h", "--keep"),
        (
            "--dry-run --every 5 slurm.wall_time=4h",
            "--every and --keep are those of outlast run and go with",
        ),
        (
            "--dry-run --hours 5 slurm.wall_time=4h",
            "--hours = 5 is only used where the time limit is chosen",
        ),
    ],
    "run": [
        ("missing.py", "there is no script missing.py; give the path of a Python"),
        ("folder", "folder is a folder; name the script in it that is to be run"),
        ("noise.py", "the script /noise.py cannot be read: it is not UTF-8 text"),
        ("latin.py", "/latin.py: invalid or missing encoding declaration for"),
        ("syntax.py", "/syntax.py, line 1: invalid syntax; Python cannot read this"),
        ("empty.py", "no training loop was found in empty.py: nothing in it or in"),
        ("hello.py", "no training loop was found in hello.py: nothing in it or in"),
        ("dangling.py", "there is no script dangling.py; give the path of a Python"),
        ("loop.py", "there is no script loop.py; give the path of a Python file"),
        ("pipe.py", "the script /pipe.py cannot be read: it is a pipe or a device"),
        ("notes.txt", "/notes.txt, line 1: invalid syntax; Python cannot read this"),
        ("--every 0 loop_script.py", '--every 0 is neither a number of steps, as "100", nor a'),
        (
            "--every never loop_script.py",
            '--every never is neither a number of steps, as "100", nor a',
        ),
        ("--every -5 loop_script.py", '--every -5 is neither a number of steps, as "100", nor a'),
        ("--every nan loop_script.py", '--every nan is neither a number of steps, as "100", nor a'),
        ("--keep 0 loop_script.py", "--keep"),
        (
            "--time-limit never loop_script.py",
            "--time-limit never is no length of time above 0 s: write it",
        ),
        (
            "--time-limit -1h loop_script.py",
            "--time-limit -1h is no length of time above 0 s: write it",
        ),
        ("--nproc 0 loop_script.py", "--nproc"),
        (
            "--loop nonsense loop_script.py",
            "--loop nonsense: no `for` or `while` begins there; the",
        ),
        (
            "--loop loop_script.py:999 loop_script.py",
            "--loop loop_script.py:999: no `for` or `while` begins",
        ),
        (
            "--loop missing.py:3 loop_script.py",
            "--loop missing.py:3: no `for` or `while` begins there; the",
        ),
        (
            "--directory notes.txt loop_script.py",
            "the folder /notes.txt cannot be written (File exists); give",
        ),
        (
            "--directory notes.txt/below loop_script.py",
            "the folder /notes.txt/below cannot be written (Not a",
        ),
        ("--evry 5 loop_script.py", "Possible options: --every"),
        ("", "SCRIPT.PY"),
        ("/dev/zero", "the script /dev/zero cannot be read: it is a pipe or a"),
    ],
    "ckpt": [
        ("diff store 2 3", "step = 3 is not in store; the steps there are 2, 4, 6"),
        ("diff store 2", "B"),
        ("diff store two 4", "A"),
        ("diff no_packs 2 4", "no_packs/step-00000002-a1/rank-00000-of-00001.pack cannot"),
        ("diff cut_manifest 2 4", "cut_manifest/step-00000002-a1/rank-00000-of-00001.json is"),
        ("du missing", "missing does not exist, is empty or is a file; give a"),
        ("du hf", "hf holds no checkpoint: there is no folder such as"),
        ("export store notes.txt", "notes.txt exists already; give a new name"),
        (
            "export store out --to pickle",
            'kind = "pickle" is unknown; take safetensors, torch, dcp',
        ),
        ("export store out --step 3", "step = 3 is not in store; the steps there are 2, 4, 6"),
        (
            "export store out --prefix nothing.",
            "step 6 in store has no tensor whose name begins with",
        ),
        ("export store notes.txt/below", "notes.txt/below cannot be written: File exists"),
        ("export missing out", "missing does not exist, is empty or is a file; give a"),
        ("export no_packs out", "no_packs/step-00000006-a1/rank-00000-of-00001.pack cannot"),
        ("import missing out", "missing does not exist; give the checkpoint of another"),
        ("import folder out", "folder is no checkpoint of a known kind: a folder of DCP"),
        ("import notes.txt out", "notes.txt is no file of torch.save, or damaged: torch.load"),
        ("import noise.bin out", "noise.bin holds Python objects that"),
        ("import empty out", "empty is no file of torch.save, or damaged: torch.load"),
        ("import pipe.txt out", "pipe.txt is no checkpoint of a known kind: a folder of DCP"),
        ("import hf out --from npz", 'kind = "npz" is unknown; take auto, dcp, torch'),
        ("import hf out --from torch", "hf is no file of torch.save"),
        ("import hf out --step -1", "--step"),
        ("import hf notes.txt", "notes.txt cannot be made: File exists"),
        ("import hf notes.txt/below", "notes.txt/below cannot be made: File exists"),
        ("ls missing", "missing does not exist, is empty or is a file; give a"),
        ("ls folder", "folder does not exist, is empty or is a file; give a"),
        ("ls notes.txt", "notes.txt does not exist, is empty or is a file; give a"),
        ("ls pipe.txt", "pipe.txt does not exist, is empty or is a file; give a"),
        ("ls loop.txt", "loop.txt cannot be read: Too many levels of symbolic links"),
        ("ls noise.bin", "noise.bin does not exist, is empty or is a file; give a"),
        ("ls nothing://bucket/x", "nothing://bucket/x cannot be used: Protocol not known"),
        ('ls ""', "STORE is empty; give a checkpoint store or a run directory"),
        ("lst store", "ls"),
        ("prune store", "say what stays, e.g. --keep 3; --dry-run shows what would"),
        ("prune store --keep -1", "keep = -1 keeps no checkpoint; it must be at least 1"),
        ("prune store --keep 0", "keep = 0 keeps no checkpoint; it must be at least 1"),
        ("prune store --every -3", "every = -3 and best = 0 must be 0 (none) or larger"),
        ("prune store --best 1", "best = 1 needs the name of a metric to compare, e.g."),
        (
            "prune store --best 1 --metric nothing",
            'metric = "nothing" was saved with no version of store, so',
        ),
        ("prune store --keep 1 --mode small", "--mode"),
        ("prune missing --keep 1", "missing does not exist, is empty or is a file; give a"),
        ("restore-to store notes.txt", "notes.txt exists and is not an empty directory; give one"),
        ("restore-to store notes.txt/below", "notes.txt/below cannot be written: Not a directory"),
        ("restore-to store store", "store exists and is not an empty directory; give one that"),
        ("restore-to store out --step 3", "step = 3 is not in store; the steps there are 2, 4, 6"),
        (
            "restore-to store out --only nothing.*",
            'only = "nothing.*" fits no tensor of step-00000006-a1; one',
        ),
        ("restore-to no_packs out", "no_packs/step-00000006-a1/rank-00000-of-00001.pack cannot"),
        (
            "restore-to noise_manifest out",
            "noise_manifest/step-00000006-a1/rank-00000-of-00001.json is",
        ),
        ("restore-to missing out", "missing does not exist, is empty or is a file; give a"),
        ("show store --step 3", "step = 3 is not in store; the steps there are 2, 4, 6"),
        ("show store --step -1", "--step"),
        ("show store --step two", "--step"),
        ("show cut_manifest", "cut_manifest/step-00000006-a1/rank-00000-of-00001.json is"),
        ("show noise_manifest", "noise_manifest/step-00000006-a1/rank-00000-of-00001.json is"),
        ("show no_manifest", "no_manifest/step-00000006-a1 has no manifest"),
        ("show future", "future/step-00000006-a1/rank-00000-of-00001.json is"),
        ("show missing", "missing does not exist, is empty or is a file; give a"),
        ("verify missing", "missing does not exist, is empty or is a file; give a"),
        ("verify store --step 3", "step = 3 is not in store; the steps there are 2, 4, 6"),
        ("verify store --step 2 --all", "--step 2 and --all exclude each other; give one of them"),
        ("verify hf", "hf holds no checkpoint: there is no folder such as"),
    ],
    "doctor": [
        ("--path missing", "--path = missing is not a directory: make it, or name"),
        ("--path notes.txt", "--path = notes.txt is not a directory: make it, or name"),
        ("--path loop.txt", "--path = loop.txt is not a directory: make it, or name"),
        ("--pth x", "Possible options: --path"),
        ("extra", "unexpected extra argument"),
    ],
    "energy": [
        ("advise missing.toml", "missing.toml: the file does not exist; `outlast init`"),
        (
            "advise job.toml --device h1000",
            "--device = h1000 has no model of clocks and rates; known is",
        ),
        (
            "advise job.toml --profile missing.csv",
            "missing.csv cannot be read (No such file or directory)",
        ),
        (
            "advise job.toml --deadline soon",
            'deadline = "soon" is neither seconds nor a percentage: say',
        ),
        ("advise job.toml --deadline nan", "deadline = nan s is not a time: say e.g. 3.2"),
        ("advise job.toml --nproc 0", "--nproc"),
        ("advise", "JOB"),
        ("frontier missing.csv", "missing.csv cannot be read (No such file or directory)"),
        ("frontier folder", "folder ends with neither .csv nor .json: name a profile of"),
        ("frontier empty.csv", "empty.csv is empty: give it the columns stage, phase"),
        ("frontier noise.csv", "noise.csv is no UTF-8 text: save it as CSV in UTF-8"),
        ("frontier latin.csv", "latin.csv is no UTF-8 text: save it as CSV in UTF-8"),
        ("frontier pipe.csv", "pipe.csv cannot be read (it is a pipe or a device): give"),
        ("frontier columns.csv", "columns.csv has no column for clock_mhz: it needs one"),
        ("frontier negative.csv", "negative.csv does not say blocking_watts, the power of a"),
        ("frontier nan.csv", "nan.csv does not say blocking_watts, the power of a device"),
        ("frontier words.csv", "words.csv does not say blocking_watts, the power of a"),
        ("frontier truncated.json", "truncated.json is no JSON file (Unterminated string"),
        ("frontier list.json", 'list.json is no outlast energy profile: it has no "format"'),
        ("frontier deep.json", "deep.json is no JSON file (maximum recursion depth exceeded"),
        ("frontier example:h1000", 'device = "h1000" has no example profile; there are a100 and'),
        ("frontier --schedule 2f2b", '--schedule = "2f2b" is none of 1f1b, gpipe, zero-bubble'),
        (
            "frontier --schedule missing.json",
            "missing.json cannot be read (No such file or directory)",
        ),
        (
            "frontier --schedule pipe.json",
            "pipe.json cannot be read (it is a pipe or a device): give",
        ),
        ("frontier --schedule list.json", "list.json is no schedule: it must be an object with"),
        (
            "frontier --schedule truncated.json",
            "truncated.json is no JSON: Unterminated string starting at",
        ),
        ("frontier --microbatches 0", "--microbatches"),
        ("frontier --points 0", "--points"),
        ("frontier --longest soon", 'deadline = "soon" is neither seconds nor a percentage: say'),
        ("frontier --longest nan", "deadline = nan s is not a time: say e.g. 3.2"),
        ("frontier --longest -5", "deadline = -5 s is not a time: say e.g. 3.2"),
        ("frontier --switches often", '--switches = "often" is none of none, per_stage, per_phase'),
        ("frontier --switch-seconds -1", "--switch-seconds"),
        ("frontier --switch-seconds nan", "--switch-seconds"),
        ("frontier --margin much", '--margin = "much" is neither a share, as 0.01, nor auto'),
        ("frontier --margin 2", "margin = 2 must be below 1 and not below 0"),
        ("frontier --blocking-watts -5", "--blocking-watts"),
        ("frontier --out plans", "--output"),
        ("frontier --output notes.txt", "--output = notes.txt: it is a file; name another folder"),
        (
            "frontier --output notes.txt/below",
            "--output = notes.txt/below: /notes.txt is no folder; name",
        ),
        (
            "frontier --schedule interleaved --stages-per-device 3",
            "--stages-per-device = 3 does not divide the profile's 8",
        ),
        (
            "frontier nan.csv --blocking-watts 80",
            'nan.csv, line 2: seconds = "nan" is not a finite number',
        ),
        (
            "frontier negative.csv --blocking-watts 80",
            "negative.csv: stage 0 forward at 1410 MHz has seconds = -1",
        ),
        (
            "frontier words.csv --blocking-watts 80",
            'words.csv, line 2: clock_mhz = "fast" is not a finite',
        ),
        ("frontier /dev/zero", "/dev/zero ends with neither .csv nor .json: name a profile"),
        ("monitor --every 0", "--every"),
        ("monitor --every nan", "--every"),
        ("monitor --seconds -1", "--seconds"),
        ("monitor --seconds nan", "--seconds"),
        ("monitor --output folder", "--output = folder cannot be written: name a file in a"),
        (
            "monitor --output nowhere/x.json",
            "--output = nowhere/x.json cannot be written: name a file in a",
        ),
        (
            "monitor --output notes.txt/x.json",
            "--output = notes.txt/x.json cannot be written: name a file in",
        ),
        ("monitor --port 99999999", "--port"),
        ("monitor --port -1", "--port"),
        ("replay missing.json", "--profile"),
        ("replay folder", "--profile"),
        ("replay truncated.json", "--profile"),
        ("replay untyped.json", "--profile"),
        ("replay pipe.json", "--profile"),
        ("replay", "PLAN"),
        (
            "replay missing.json --profile example:a100",
            "missing.json cannot be read (No such file or directory)",
        ),
        (
            "replay folder --profile example:a100",
            "folder cannot be read (it is a folder): give another file",
        ),
        (
            "replay truncated.json --profile example:a100",
            "truncated.json is no JSON file (Unterminated string",
        ),
        (
            "replay untyped.json --profile example:a100",
            'untyped.json is no outlast clock plan: it has no "format"',
        ),
        (
            "replay pipe.json --profile example:a100",
            "pipe.json cannot be read (it is a pipe or a device): give",
        ),
        ("report missing", "missing is not a run directory: it has no job.toml; name a"),
        ("report folder", "folder is not a run directory: it has no job.toml; name a"),
        ("report notes.txt", "notes.txt is not a run directory: it has no job.toml; name"),
        ("report runs/a --region XX", 'region = "XX" is not in the carbon table: did you mean MX?'),
        ("report runs/a --pue 0.5", "--pue"),
        ("report runs/a --pue nan", "--pue"),
        ("report runs/a --loss inf", "--loss = inf must be a finite number"),
        ("report run_noise_job", "run_noise_job/job.toml is damaged: it is not UTF-8 text"),
        ("report runs/a --tariff missing.toml", "tariff file missing.toml cannot be read"),
        (
            "report runs/a --tariff noise.toml",
            "tariff file noise.toml cannot be read: it is not UTF-8 text",
        ),
        ("report runs/a --tariff pipe.toml", "tariff file pipe.toml cannot be read: it is a pipe"),
        ("report runs/a --tariff truncated.toml", "truncated.toml is not TOML"),
        ("report runs/a --tariff job.toml", "job.toml: checkpoint is not known"),
        ("restor", "restore"),
        ("restore missing", "there is no lease missing: nothing is to be restored"),
        ("restore folder", "the lease folder cannot be read: it is a folder"),
        ("restore notes.txt", "notes.txt is no lease of clocks (version 1): if it should"),
        ("restore noise.bin", "noise.bin is no lease of clocks (version 1): if it should"),
        ("restore pipe.json", "the lease pipe.json cannot be read: it is a pipe or a device"),
    ],
    "plan": [
        ("calibrate missing.log", "missing.log cannot be read: it is not there"),
        ("calibrate folder", "none of the 1 sources gives a row: folder: folder is not a"),
        ("calibrate notes.txt", "none of the 1 sources gives a row: notes.txt: no log says"),
        ("calibrate pipe.txt", "none of the 1 sources gives a row: pipe.txt: no log says"),
        (
            "calibrate --table missing.csv",
            "missing.csv cannot be read as a table of runs: No such file",
        ),
        (
            "calibrate --table columns.csv",
            "columns.csv lacks the columns row_id, group, status, model",
        ),
        (
            "calibrate --table noise.csv",
            "noise.csv cannot be read as a table of runs: 'utf-8' codec",
        ),
        (
            "calibrate --table pipe.csv",
            "pipe.csv cannot be read as a table of runs: it is a pipe or",
        ),
        ("calibrate --table empty.csv", "empty.csv lacks the columns row_id, group, status, model"),
        ("calibrate --run --minutes 0", "--minutes = 0: give more than 0, 5 are usual"),
        ("calibrate --run --minutes nan", "--minutes = nan: give more than 0, 5 are usual"),
        (
            "calibrate --run --output notes.txt/x",
            "--output = notes.txt/x cannot be made: Not a directory; give",
        ),
        ("calibrate", "nothing to calibrate from: name run directories, logs or"),
        (
            "check llama.json --cluster h100x8 --headroom lots",
            "--headroom 'lots' is no number with a unit: known are h, d",
        ),
        (
            "check llama.json --cluster h100x8 --tensor 16",
            "data x tensor x context x pipeline = 16 devices, but h100x8",
        ),
        ("clusters extra", "unexpected extra argument"),
        ("compare missing", "missing is not a run directory: it has no job.toml; name a"),
        ("compare notes.txt", "notes.txt is not a run directory: it has no job.toml; name"),
        ("compare run_empty", "run_empty holds no start of a run: name a run directory of"),
        ("compare run_noise_job", "run_noise_job/job.toml is damaged: it is not UTF-8 text"),
        (
            "compare runs/a --cluster missing.toml",
            "cluster file missing.toml cannot be read: No such file or",
        ),
        (
            "compare runs/a --calibration missing.toml",
            "how fast this machine computes is not known (no facts are",
        ),
        (
            "emit llama.json --cluster h100x8 --target jax --output out",
            "target = 'jax' is none of outlast, torchtitan, megatron",
        ),
        (
            "emit llama.json --cluster h100x8 --target torchtitan --output notes.txt",
            "notes.txt cannot be written: File exists",
        ),
        (
            "emit llama.json --cluster h100x8 --target torchtitan --output notes.txt/below",
            "notes.txt/below cannot be written: Not a directory",
        ),
        ("emit llama.json --cluster h100x8 --target torchtitan", "--output"),
        (
            "emit llama.json --cluster h100x8 --target sbatch --launches jax --output out",
            "launches = 'jax' is none of outlast, torchtitan, megatron",
        ),
        (
            "emit llama.json --cluster h100x8 --target outlast --output out --name a/b",
            'job.toml: run.name = "a/b" is not possible: it should be',
        ),
        (
            "emit llama.json --cluster h100x8 --target outlast --output out --set train.stpes=3",
            "job.toml: train.stpes is not a known key; did you mean",
        ),
        (
            "emit llama.json --cluster h100x8 --target outlast --output out --set train.steps",
            "the override 'train.steps' is not of the form",
        ),
        (
            "emit llama.json --cluster h100x8 --target sbatch --output out --longest-hours 0",
            "longest_hours = 0.0: give a number above 0",
        ),
        (
            "emit llama.json --cluster h100x8 --target sbatch --output out --longest-hours nan",
            "longest_hours = nan: give a number above 0",
        ),
        (
            "explain llama.json --cluster h100x8 --tensor 3",
            "tensor = 3 does not divide heads = 4 of llama.json; tensor = 3",
        ),
        (
            "explain llama.json --cluster h100x8 --shard all",
            "sharding = 'all' is none of none, optimizer, gradients",
        ),
        (
            "explain llama.json --cluster h100x8 --choose 0 --tensor 2",
            "--choose = 0 and --tensor both say which way to run: keep",
        ),
        ("models --jsn", "Possible options: --json"),
        (
            "pareto llama.json --cluster h100x8 --html notes.txt/x.html",
            "notes.txt/x.html cannot be written: File exists",
        ),
        (
            "pareto llama.json --cluster h100x8 --csv folder",
            "folder cannot be written: Is a directory",
        ),
        ("rank missing.toml", "missing.toml: the file does not exist; `outlast init`"),
        ("rank truncated.toml", "truncated.toml: not valid TOML: Invalid value (at end of"),
        ('rank ""', "SOURCE is empty: name a job, a config.json or a model"),
        (
            "rank llama.json --cluster missing.toml",
            "cluster file missing.toml cannot be read: No such file or",
        ),
        (
            "rank llama.json --cluster folder",
            "no cluster is named 'folder': give the path of a TOML file",
        ),
        (
            "rank llama.json --cluster node.toml",
            "name of node.toml is not a known section: did you mean",
        ),
        (
            "rank llama.json --cluster truncated.toml",
            "truncated.toml is no TOML: Invalid value (at end of",
        ),
        (
            "rank llama.json --cluster pipe.toml",
            "cluster file pipe.toml cannot be read: it is a pipe or a",
        ),
        (
            "rank llama.json --cluster noise.toml",
            "cluster file noise.toml cannot be read: it is not UTF-8 text",
        ),
        (
            "rank llama.json --cluster h1000x8",
            "cluster 'h1000x8': no device is named 'h1000'; did you mean",
        ),
        (
            "rank llama.json --cluster h100x0",
            "cluster 'h100x0' has no device: give a count of at least 1",
        ),
        ("rank llama.json --cluster h100x64 --batch 0", "--batch = 0: give at least 1"),
        ("rank llama.json --cluster h100x64 --sequence -1", "--sequence = -1: give at least 1"),
        (
            "rank llama.json --cluster h100x64 --tokens many",
            "--tokens = many: give a number above 0, as 15T, 300B or 1e9",
        ),
        (
            "rank llama.json --cluster h100x64 --precision int8",
            "--precision = 'int8' is none of fp32, fp16, bf16, fp8",
        ),
        (
            "rank llama.json --cluster h100x64 --framework jax",
            "framework = 'jax' is not known: known are any, outlast",
        ),
        (
            "rank llama.json --cluster h100x64 --budget 40",
            "budget '40' has no unit: known are h, d, min, s; kWh, MWh",
        ),
        (
            "rank llama.json --cluster h100x64 --budget -5h",
            "budget '-5h' is no number with a unit: known are h, d, min",
        ),
        (
            "rank llama.json --cluster h100x64 --by luck",
            "--by = 'luck' is none of hours, kwh, lost_hours",
        ),
        (
            "rank llama.json --cluster h100x64 --tier tape",
            "tiers = tape: give some of memory, peer, local, shared",
        ),
        (
            "rank llama.json --cluster h100x64 --guard strict",
            "guard = 'strict' is none of off, light, linear, full",
        ),
        ("rank llama.json --cluster h100x64 --copies 0", "coding_copies = 0: give at least 1"),
        (
            "rank llama.json --cluster h100x64 --tensorize low_rank:many",
            "--tensorize = 'low_rank:many': give a form and the share of",
        ),
        (
            "rank llama.json --cluster h100x64 --tensorize lowrank:0.5",
            "form = 'lowrank' is not one of dense, low_rank, cola, lax",
        ),
        (
            "rank llama.json --cluster h100x64 --recover always",
            "recovery = 'always' is none of off, restart, live",
        ),
        (
            "rank llama.json --cluster h100x64 --checkpoint-seconds -1",
            "checkpoint_seconds = -1.0: give a number of at least 0",
        ),
        (
            "rank llama.json --cluster h100x64 --checkpoint-seconds nan",
            "checkpoint_seconds = nan: give a number of at least 0",
        ),
        (
            "rank llama.json --cluster h100x64 --region XX",
            'region = "XX" is not in the carbon table: did you mean MX?',
        ),
        (
            "rank llama.json --cluster h100x64 --price nan",
            "--price = nan: give a number of at least 0",
        ),
        (
            "rank llama.json --cluster h100x64 --deadline soon",
            "--deadline 'soon' is no number with a unit: known are h, d",
        ),
        (
            "rank llama.json --cluster h100x64 --calibration missing.toml",
            "missing.toml cannot be read as a calibration: No such file",
        ),
        (
            "rank llama.json --cluster h100x64 --calibration job.toml",
            "job.toml: run is not a known key; known are format, digest",
        ),
        (
            "rank llama.json --cluster h100x64 --calibration pipe.toml",
            "pipe.toml cannot be read as a calibration: it is a pipe or",
        ),
        (
            "rank llama.json --cluster h100x64 --file-system-load 1",
            "--file-system-load = 1: give a share of the bandwidth from",
        ),
        (
            "rank llama.json --cluster h100x64 --file-system-load nan",
            "--file-system-load = nan: give a share of the bandwidth",
        ),
        ("rank llama.json --cluster h100x64 --top 0", "--top"),
        (
            "rank llama.json --cluster h100x64 --wall-time tomorrow",
            '--wall-time = "tomorrow" is no length of time: write it as',
        ),
        (
            "rank llama.json train.steps=3",
            "'train.steps=3' replaces a setting of a job, and llama.json",
        ),
        (
            "rank missing.json --cluster h100x8",
            "missing.json cannot be read: No such file or directory",
        ),
        (
            "rank folder --cluster h100x8",
            "folder is a folder without a config.json: name a file or a",
        ),
        (
            "rank notes.txt --cluster h100x8",
            "notes.txt is no JSON: Expecting value: line 1 column 1",
        ),
        (
            "rank noise.json --cluster h100x8",
            "noise.json is no JSON: 'utf-8' codec can't decode byte 0x80",
        ),
        (
            "rank latin.json --cluster h100x8",
            "latin.json is no JSON: 'utf-8' codec can't decode byte 0xf6",
        ),
        (
            "rank truncated.json --cluster h100x8",
            "truncated.json is no JSON: Unterminated string starting at",
        ),
        (
            "rank list.json --cluster h100x8",
            "list.json holds no table: give a Hugging Face config.json",
        ),
        (
            "rank deep.json --cluster h100x8",
            "deep.json is no JSON: maximum recursion depth exceeded",
        ),
        (
            "rank untyped.json --cluster h100x8",
            "untyped.json has no model_type: give a Hugging Face config.json",
        ),
        (
            "rank unknown.json --cluster h100x8",
            "model_type = 'lama' of unknown.json is not known: did you mean",
        ),
        (
            "rank negative.json --cluster h100x8",
            "hidden_size = -64 of negative.json: give a whole number of at",
        ),
        (
            "rank words.json --cluster h100x8",
            "hidden_size = 'many' of words.json: give a whole number of at",
        ),
        ("rank pipe.json --cluster h100x8", "pipe.json cannot be read: it is a pipe or a device"),
        (
            "rank loop.json --cluster h100x8",
            "loop.json cannot be read: Too many levels of symbolic links",
        ),
        (
            "rank lama-3-8b --cluster h100x8",
            "no published model is named 'lama-3-8b': did you mean",
        ),
        (
            "rank llama.json --cluster a_node.toml",
            "cluster a_node: no node is named 'dgx-h1000': did you mean",
        ),
        (
            "rank llama.json --cluster h100x64 --queue-wait tomorrow",
            "queue_wait = tomorrow is of each link",
        ),
        ("rnak llama.json", "'rnak' is no file and no model: did you mean `outlast plan"),
        ("simulate missing.toml", "scenario missing.toml cannot be read: No such file or"),
        ("simulate noise.toml", "scenario noise.toml cannot be read: it is not UTF-8 text"),
        ("simulate truncated.toml", "truncated.toml is no TOML: Invalid value (at end of"),
        ("simulate folder.toml", "scenario folder.toml cannot be read: No such file or"),
        ("simulate pipe.toml", "scenario pipe.toml cannot be read: it is a pipe or a"),
        ("simulate node.toml", "name in node.toml is unknown: known are run, lemons"),
        ("simulate llama.json --cluster h100x8 --trials 0", "--trials"),
        ("simulate llama.json --cluster h100x8 --trials -1", "--trials"),
        ("simulate llama.json --cluster h100x8 --seed -1", "--seed"),
        ("targets extra", "unexpected extra argument"),
    ],
    "coding": [
        ("choose", "--workers"),
        ("choose --workers 0 --slow-share 0.1 --slow-factor 2", "--workers"),
        ("choose --workers 8 --slow-share 2 --slow-factor 2", "share = 2.0 is not in [0, 1]"),
        ("choose --workers 8 --slow-share nan --slow-factor 2", "share = nan is not in [0, 1]"),
        ("choose --workers 8 --slow-share 0.1 --slow-factor 0", "factor = 0.0 is below 1"),
        (
            "choose --workers 8 --slow-share 0.1 --slow-factor inf",
            "factor = inf is not finite; give a number",
        ),
        (
            "choose --workers 8 --slow-share 0.1 --slow-factor 2 --persistence 2",
            "persistence = 2.0 is not in [0, 1]",
        ),
        (
            "choose --workers 8 --slow-share 0.1 --slow-factor 2 --chunk-seconds -1",
            "chunk_seconds = -1.0 is not above 0",
        ),
        (
            "choose --workers 8 --slow-share 0.1 --slow-factor 2 --chunks 0",
            "chunks_per_worker = 0 is below 1",
        ),
        (
            "choose --workers 8 --slow-share 0.1 --slow-factor 2 --reduction-seconds nan",
            "reduction_seconds = nan is below 0",
        ),
        ("choose --workers 8 --slow-share 0.1 --slow-factor 2 --seed -1", "--seed"),
        ("choose --workers 99999999999 --slow-share 0.1 --slow-factor 2", "--workers"),
        ("show FractionalRepetition --workers 0", "--workers"),
        ("show Fractional --workers 8", "code = Fractional is not known; take one of"),
        ("show FractionalRepetition --workers 8", "FractionalRepetition needs --stragglers"),
        (
            "show FractionalRepetition --workers 8 --stragglers 8",
            "stragglers = 8 is not in [0, 7] for 8 workers; take",
        ),
        ("show FractionalRepetition --workers 8 --stragglers -1", "--stragglers"),
        (
            "show FractionalRepetition --workers 9 --stragglers 1",
            "workers = 9 is not a multiple of stragglers + 1 = 2; take",
        ),
        (
            "show FractionalRepetition --workers 8 --degree 3",
            "FractionalRepetition has no --degree; FractionalRepetition",
        ),
        (
            "show CyclicMDS --workers 8 --stragglers 1 --dtype float12",
            "dtype = 'float12' is not one of float64, float32, float16",
        ),
        (
            "show ReedSolomon --workers 8 --stragglers 99",
            "stragglers = 99 is not in [0, 7] for 8 workers; take",
        ),
        ("show BernoulliCode --workers 8 --mean-copies nan", "mean_copies = nan is not in (0, 8]"),
        ("show BernoulliCode --workers 8 --mean-copies -1", "mean_copies = -1 is not in (0, 8]"),
        (
            "show Expander --workers 8 --degree 99",
            "degree = 99 is not possible with 8 vertices; take 2 to 7",
        ),
        (
            "show GraphCode --workers 7 --degree 3",
            "workers = 7 and degree = 3 make no regular graph, which",
        ),
        ("show SoftDesign --workers 8 --copies 99", "copies = 99 is not in [1, 8]"),
        (
            "show SymmetricDesign --workers 8",
            "workers = 8 has no known difference set; take 7 or 11",
        ),
        ("show FractionalRepetition --workers 99999999999 --stragglers 1", "--workers"),
    ],
    "cluster": [
        ("adopt 12 missing.toml", "missing.toml: the file does not exist; `outlast init`"),
        ("adopt twelve job.toml", "JOBID = twelve is no number of a Slurm job; squeue shows"),
        ("adopt 12 folder", "folder/job.toml: the file does not exist; `outlast init`"),
        ("adopt 12 notes.txt", "notes.txt: not valid TOML: Expected '=' after a key in a"),
        ("adopt", "JOBID"),
        ("explain missing.toml", "missing.toml: the file does not exist; `outlast init`"),
        (
            "explain slurm.wall_time=never",
            'slurm.wall_time = "never" is not possible: it should be a',
        ),
        ("plan missing.toml", "missing.toml: the file does not exist; `outlast init`"),
        ("plan --hours nan", "--hours"),
        ("plan --hours -1", "--hours"),
        ("plan --sacct missing.txt", "missing.txt cannot be read as a log: No such file or"),
        ("plan --sacct notes.txt", "notes.txt: its first line must name sacct's columns, parted"),
        ("plan --sacct folder", "folder cannot be read as a log: it is a folder; give another"),
        ("plan --sacct noise.txt", "noise.txt cannot be read as a log: it is not UTF-8 text"),
        ("plan --sacct pipe.txt", "pipe.txt cannot be read as a log: it is a pipe or a device"),
        ("plan --sacct empty.txt", "empty.txt: its first line must name sacct's columns, parted"),
        (
            "plan slurm.wall_time=tomorrow",
            'slurm.wall_time = "tomorrow" is not possible: it should be',
        ),
        ("plan slurm.nodes=0", "slurm.nodes.0 = 0 is not possible: it should be at least 1"),
        ("plan slurm.partiton=gpu", "slurm.partiton is not a known key; did you mean"),
        ("prefetch missing.toml", "missing.toml: the file does not exist; `outlast init`"),
        ("resume missing", "missing is no run directory, so it has no chain"),
        ("resume runs/a", "/runs/a has no chain: `outlast submit job.toml` makes one"),
        ("resume notes.txt", "notes.txt is no run directory, so it has no chain"),
        ("resume bad_chain", "/bad_chain/chain/chain.json cannot be read: it is damaged"),
        ("simulate", "give one of --swf FILE, --sacct FILE and --generated NODES"),
        ("simulate --swf missing.swf", "missing.swf cannot be read as a log: No such file or"),
        ("simulate --swf notes.txt", "notes.txt, line 1: a job in the Standard Workload Format"),
        ("simulate --swf folder", "folder cannot be read as a log: it is a folder; give another"),
        ("simulate --swf noise.bin", "noise.bin cannot be read as a log: it is not UTF-8 text"),
        ("simulate --swf empty.txt", "empty.txt: no job in it ran"),
        ("simulate --swf pipe.txt", "pipe.txt cannot be read as a log: it is a pipe or a device"),
        ("simulate --sacct missing.txt", "missing.txt cannot be read as a log: No such file or"),
        (
            "simulate --sacct notes.txt",
            "notes.txt: its first line must name sacct's columns, parted",
        ),
        (
            "simulate --sacct empty.txt",
            "empty.txt: its first line must name sacct's columns, parted",
        ),
        ("simulate --sacct pipe.txt", "pipe.txt cannot be read as a log: it is a pipe or a device"),
        ("simulate --sacct truncated.json", "truncated.json: no job in it ran"),
        (
            "simulate --sacct list.json",
            "list.json: its first line must name sacct's columns, parted",
        ),
        (
            "simulate --swf notes.txt --generated 64",
            "give one of --swf FILE, --sacct FILE and --generated NODES",
        ),
        ("simulate --generated 1", "--generated"),
        (
            "simulate --generated 64 --nodes 65",
            "--nodes 65: the log's machine has 64 nodes; give fewer",
        ),
        ("simulate --generated 64 --nodes 0", "--nodes"),
        ("simulate --generated 64 --hours nan", "--hours"),
        ("simulate --generated 64 --size 0", "--size"),
        ("simulate --generated 64 --exponent 2", "--exponent"),
        ("simulate --generated 64 --exponent nan", "--exponent"),
        ("simulate --generated 64 --restart -1", "--restart"),
        (
            "simulate --generated 64 --max-time tomorrow",
            '--max-time = "tomorrow" is no length of time: write it as',
        ),
        (
            "simulate --generated 64 --max-time 00:01:00",
            "--max-time 00:01:00: restart and last save alone take 360",
        ),
        (
            "simulate --generated 64 --policy luck",
            '--policy = "luck" is none of long, links, filler, planned',
        ),
        ("simulate --generated 64 --load 0", "--load"),
        ("simulate --generated 64 --load nan", "--load"),
        ("simulate --generated 64 --runs 0", "--runs"),
        (
            "simulate --generated 64 --backfill hard",
            '--backfill = "hard" is neither easy nor conservative',
        ),
        (
            "simulate --generated 64 --partition gpu",
            "--partition belongs to --sacct: other logs are read whole",
        ),
        ("simulate --generated 64 --seed -1", "--seed"),
        ("status missing", "missing is no run directory, so it has no chain"),
        ("status folder", "/folder has no chain: `outlast submit job.toml` makes one"),
        ("status notes.txt", "notes.txt is no run directory, so it has no chain"),
        ("status runs/a", "/runs/a has no chain: `outlast submit job.toml` makes one"),
        ("status missing.toml", "missing.toml: the file does not exist; `outlast init`"),
        ("status pipe.toml", "pipe.toml: the file cannot be read: it is a pipe or a"),
        ("status bad_chain", "/bad_chain/chain/chain.json cannot be read: it is damaged"),
        ("stop missing", "missing is no run directory, so it has no chain"),
        ("stop runs/a", "/runs/a has no chain: `outlast submit job.toml` makes one"),
        ("tasks missing.toml", "missing.toml cannot be read (No such file or directory)"),
        ("tasks folder", "folder cannot be read (it is a folder): give another"),
        ("tasks empty.toml", "empty.toml has neither a [run] nor a [[task]]: give one of"),
        ("tasks noise.toml", "noise.toml is no UTF-8 text: give a TOML file"),
        ("tasks truncated.toml", "truncated.toml is no TOML file: Invalid value (at end of"),
        ("tasks pipe.toml", "pipe.toml cannot be read (it is a pipe or a device): give"),
        ("tasks job.toml", "job.toml has an unknown key, model: known are run"),
        ("tasks tasks.toml", "tasks.toml: [run] has no step_seconds: give one"),
        ("tasks section.toml", "section.toml has an unknown key, trian: known are nodes"),
    ],
    "drill": [
        ("missing.toml", "missing.toml: the file does not exist; `outlast init`"),
        ("--faults nonsense", "fault 'nonsense': 'nonsense' is no fault site; known are"),
        (
            "--faults linear.output:bit=99",
            "fault 'linear.output:bit=99': bit = 99 is not within 0 to 63",
        ),
        ("--faults kill", "fault 'kill': kill needs a step, as in kill:step=12"),
        ("--faults kill:step=-1", "fault 'kill:step=-1': step = -1 of kill is below 0"),
        ("--faults kil:step=2", "fault 'kil:step=2': 'kil' is no fault site; did you mean"),
        (
            "--faults linear.output:bit=14:evry=5",
            "fault 'linear.output:bit=14:evry=5': 'evry' is no key of",
        ),
        ("--kill often", "--kill often: give kills per time above 0, such as 6/min"),
        ("--kill -1/min", "--kill -1/min: give kills per time above 0, such as 6/min"),
        ("--kill 0/s", "--kill 0/s: give kills per time above 0, such as 6/min"),
        ("--kill nan/s", "--kill nan/s: give kills per time above 0, such as 6/min"),
        ("--at lunch", "--at lunch: give one of heal, save, evaluate, data"),
        ("--stop -1", "--stop"),
        ("--stop nan", "--stop"),
        ("--trials 0", "--trials"),
        ("--trials 0 --at forward", "--trials"),
        ("--trials -5 --kill 6/min", "--trials"),
        ("--seed -1 --kill 6/min", "--seed"),
        ("--nproc 0", "--nproc"),
        (
            "--output folder --faults kill:step=2",
            "--output = folder: it is no name of a file in a folder; name",
        ),
        (
            "--output notes.txt/x.json --faults kill:step=2",
            "--output = notes.txt/x.json: it is no name of a file in a",
        ),
        (
            "--output nowhere/x.json --kill 6/min",
            "--output = nowhere/x.json: it is no name of a file in a",
        ),
        ("guard.policy=off", 'guard.policy = "off" leaves nothing to drill; set it to'),
        ("guard.policy=ful", 'guard.policy = "ful" is not possible: it should be "off"'),
        ("--trials 3", "--trials 3 is of --kill, --at and --stop: give one of them"),
        ("--stop inf", "--stop inf: give seconds above 0"),
        ("--output folder", "--output = folder: it is no name of a file in a folder; name"),
        ("--json result.json", "--json takes no file, it prints to stdout: write --output"),
    ],
    "autosave": [
        ("check missing.py", "there is no script missing.py; give the path of a Python"),
        ("check folder", "there is no script folder; give the path of a Python file"),
        ("check noise.py", "the script /noise.py cannot be read: it is not UTF-8 text"),
        ("check syntax.py", "/syntax.py, line 1: invalid syntax; Python cannot read this"),
        ("check empty.py", "no training loop was found in empty.py: nothing in it or in"),
        ("check hello.py", "no training loop was found in hello.py: nothing in it or in"),
        ("check pipe.py", "there is no script pipe.py; give the path of a Python file"),
        ("check --steps 0 loop_script.py", "--steps"),
        ("check --at 2 loop_script.py", "--at"),
        ("check --timeout -1 loop_script.py", "--timeout"),
        ("check --timeout nan loop_script.py", "--timeout"),
        (
            "check --loop nonsense loop_script.py",
            "--loop nonsense: no `for` or `while` begins there; the",
        ),
        ("check", "SCRIPT.PY"),
        ("chek", "check"),
    ],
}


# Every fourth case is for `make test`, the others for `make test-rest`.
QUICK = range(0, 1000, 4)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param(
            f"{command} {arguments}".strip(),
            said,
            id=f"{command} {arguments}"[:60],
            marks=[] if number in QUICK else pytest.mark.slow,
        )
        for command, cases in CASES.items()
        for number, (arguments, said) in enumerate(cases)
    ],
)
def test_a_wrong_input_is_answered_with_one_sentence(world, monkeypatch, capsys, line, said):
    monkeypatch.chdir(world)
    monkeypatch.setattr(sys, "argv", ["outlast", *shlex.split(line)])
    before = _state(world)
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == EXIT_BAD_INPUT, told
    assert told.out == ""
    if told.err.startswith("outlast: "):
        assert told.err.count("\n") == 1
        assert told.err.endswith("\n")
        assert said in told.err.replace(str(world), "")
    else:
        assert "Usage: outlast" in told.err
        assert said in " ".join(told.err.split())
    assert _state(world) == before


def _commands(group: Any, path: str = "") -> list[str]:
    """Names of all commands, those of groups with the group's."""
    return [
        name
        for word, command in group.commands.items()
        for name in (
            _commands(command, f"{path}{word} ")
            if hasattr(command, "commands")
            else [f"{path}{word}"]
        )
    ]


@pytest.mark.parametrize("command", _commands(typer.main.get_command(app)))
def test_every_command_is_asked(command):
    group, _, name = command.rpartition(" ")
    cases = CASES[group or command]
    asked = [arguments for arguments, _ in cases]
    assert len([line for line in asked if not group or line.split()[:1] == [name]]) > 0

"""Checkpoints that were lost, passed over in silence, or that stopped what reads or trains."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import blake3
import torch
from harness import Bar, at_most

from outlast.checkpoint import CheckpointStore, list_versions, load, storage_of
from outlast.errors import OutlastError

WRITER = """
import sys, torch
from outlast.checkpoint import CheckpointStore
from outlast.errors import CheckpointError

class Holder:
    def __init__(self, state): self.state = state
    def state_dict(self): return self.state
    def load_state_dict(self, state): self.state = state

for line in sys.stdin:
    store = CheckpointStore(line.strip(), writer="thread", keep=9)
    print("open", flush=True)
    sys.stdin.readline()
    try:
        state = {"data": Holder({"x": torch.full((3000,), int(sys.argv[1]))})}
        error = store.save_async(5, state).result().error
    except CheckpointError as refused:
        error = str(refused)
    print("saved" if error is None else "refused", flush=True)
    sys.stdin.readline()
    store.close()
"""
PART = "rank-00000-of-00001.json"
FOLDER = "step-00000002-a1"


class _Holder:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _state(value: int) -> dict[str, Any]:
    return {"data": _Holder({"x": torch.full((3000,), value)})}


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="never-checkpoint-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _s3_server() -> Iterator[str]:
    """The URL of a bucket of an S3 server on this machine; needs moto and s3fs."""
    import fsspec
    import s3fs  # noqa: F401 looked for before anything starts
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = DomainDispatcherApplication(create_backend_app)
    # One answer after the other, so that a conditional put is atomic, as that of S3 is.
    server = make_server("127.0.0.1", 0, application, threaded=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
    }
    bucket = f"never-{uuid.uuid4().hex[:8]}"
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            fsspec.filesystem("s3").mkdir(bucket)
            yield f"s3://{bucket}"
    finally:
        server.shutdown()


def _race(place: str, races: int) -> int:
    """How often two processes saved one step of one store, and the state of one was lost."""
    lost = 0
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(value)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for value in (1, 2)
    ]

    def ask(line: str) -> None:
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write(f"{line}\n")
            writer.stdin.flush()

    def answers() -> list[str]:
        return [writer.stdout.readline().strip() for writer in writers if writer.stdout is not None]

    try:
        for number in range(races):
            here = f"{place}/{number}"
            ask(here)
            assert answers() == ["open", "open"]
            ask("save")
            outcomes = answers()
            ask("close")
            found = _state(0)
            restored = CheckpointStore(here).restore(found)
            winners = [
                value for value, said in zip((1, 2), outcomes, strict=True) if said == "saved"
            ]
            kept = None if restored is None else int(found["data"].state["x"][0])
            lost += len(winners) != 1 or winners != [kept]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    return lost


def two_writers() -> Bar:
    """Point 7: two processes save one step of one store on S3 at the same moment."""
    name = "states lost or doubled by two writers of one step"
    try:
        with _s3_server() as place:
            lost = _race(place, 3)
    except ImportError as error:
        return Bar(name, None, "", "<= 0", False, f"skipped: {error}; install moto[s3] and s3fs")
    with _folder() as folder:
        lost += _race(str(folder), 3)
    return at_most(name, lost, "of 6 races", 0, "an S3 server and a file system, two processes")


def unfinished() -> Bar:
    """Point 8: of the only version, a kill has left no manifest or a part of them."""
    silent = cases = 0
    for kept in ((".pack",), (".pack", "catalogue"), ("catalogue",)):
        with _folder() as folder:
            with CheckpointStore(folder, writer="thread") as store:
                store.save(7, _state(7))
            for path in (folder / "step-00000007-a1").iterdir():
                if not any(part in path.name for part in kept):
                    path.unlink()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                restored = CheckpointStore(folder, writer="thread").restore(_state(0))
            cases += 2
            silent += restored is not None or not any(
                "step-00000007" in str(w.message) for w in told
            )
            verify = [sys.executable, "-m", "outlast", "ckpt", "verify", str(folder), "--all"]
            silent += subprocess.run(verify, capture_output=True, check=False).returncode != 1
    return at_most(
        "lone unfinished versions passed over in silence",
        silent,
        f"of {cases} restores and verifications",
        0,
        "what a kill in the first save leaves",
    )


def _rewritten(folder: Path, file: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and give it the hash that it then has."""
    path = next(folder.glob(f"{FOLDER}/{file}*"))
    content = json.loads(path.read_bytes())
    content.pop("blake3")
    change(content)
    body = json.dumps(content, separators=(",", ":"))[:-1].encode()
    root = blake3.blake3(body).hexdigest()
    data = body + f',"blake3":"{root}"}}\n'.encode()
    if file != "catalogue":
        path.write_bytes(data)
        return
    path.with_name(f"catalogue-{root[:16]}.json").write_bytes(data)
    _rewritten(folder, PART, lambda part: part.update(catalogue=root))


def _row(column: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda part: part["chunks"][0].__setitem__(column, value)


def _box(column: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda part: part["pieces"]["data.x"][0].__setitem__(column, value)


def _facts(column: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["tensors"]["data.x"].__setitem__(column, value)


def _deep(part: dict[str, Any]) -> None:
    found: Any = 1
    for _ in range(900):
        found = [found]
    part["values"]["data"] = found


MALFORMED: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    *((PART, _row(7, value)) for value in (0, 10**9, -5, None, "x")),
    *((PART, _row(0, value)) for value in (99, -1, 10**30, "x")),
    *((PART, _row(1, value)) for value in (-1, 10**30, "0", 1.5, 10**18)),
    *((PART, _row(2, value)) for value in (10**15, -1, None)),
    *((PART, _row(4, value)) for value in (10**18, 10**30, 0, [])),
    *((PART, _box(0, value)) for value in ([-1], [10**18], [], "x")),
    *((PART, _box(1, value)) for value in ([10**9], [10**18], [3000, 1], None)),
    *((PART, _box(2, value)) for value in ([], [10**6], ["x"], 5)),
    (PART, lambda part: part.update(packs=["/etc/passwd"])),
    (PART, lambda part: part.update(packs=["../../x.pack"])),
    (PART, lambda part: part.update(codecs=["evil"])),
    (PART, lambda part: part.update(catalogue="../" * 9)),
    (PART, lambda part: part.update(world_size=10**12)),
    (PART, lambda part: part.pop("chunks")),
    (PART, lambda part: part.update(chunks=5)),
    (PART, _deep),
    *(("catalogue", _facts(0, value)) for value in ("float99999999", "load", 3)),
    *(("catalogue", _facts(1, value)) for value in ([10**18], [-1], [1] * 99, "x")),
    *(("catalogue", _facts(2, value)) for value in ([0], [-1], [], None)),
]

JUDGE = """
import resource, sys, warnings
from pathlib import Path
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
sys.path.insert(0, sys.argv[1])
import never_checkpoint
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 30),) * 2)
warnings.simplefilter("ignore")
for folder in sys.stdin:
    print(never_checkpoint.judged(Path(folder.strip())), flush=True)
"""


def judged(folder: Path) -> int:
    """Whether a store whose second version is malformed harms what reads it, in CPU time too."""
    from typer.testing import CliRunner

    from outlast.cli.ckpt import ckpt

    begun = time.process_time()
    try:
        storage = storage_of(folder)
        with contextlib.suppress(OutlastError):
            # Where a chunk lies in its file is compared with the file when that is opened.
            load(storage, list_versions(storage)[1])
            CheckpointStore(folder, writer="thread").restore(_state(0), step=2)
            return 1
        found = _state(0)
        restored = CheckpointStore(folder, writer="thread").restore(found)
        if restored is None or restored.step != 1 or not restored.skipped:
            return 1
        verified = CliRunner().invoke(ckpt, ["verify", str(folder), "--all", "--json"])
        states = [each["state"] for each in json.loads(verified.stdout)["versions"]]
        if verified.exit_code != 1 or states != ["ok", "damaged"]:
            return 1
    except BaseException:
        return 1
    return int(time.process_time() - begun > 2.0)


def malformed() -> Bar:
    """Point 9: manifests whose hashes are right and that say what no save has written."""
    wrong = 0
    with _folder() as folder:
        whole = folder / "whole"
        with CheckpointStore(whole, writer="thread") as store:
            for step in (1, 2):
                store.save(step, {"data": _Holder({"x": torch.arange(3000.0) + step})})
        judge: subprocess.Popen[str] | None = None
        cases = [*MALFORMED, ("pipe", lambda _: None)]
        try:
            for number, (file, change) in enumerate(cases):
                case = folder / str(number)
                shutil.copytree(whole, case)
                if file == "pipe":
                    (case / FOLDER / PART).unlink()
                    os.mkfifo(case / FOLDER / PART)
                else:
                    _rewritten(case, file, change)
                if judge is None:
                    judge = subprocess.Popen(
                        [sys.executable, "-c", JUDGE, str(Path(__file__).parent)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        text=True,
                    )
                assert judge.stdin is not None
                assert judge.stdout is not None
                late = threading.Timer(15.0, judge.kill)
                late.start()
                judge.stdin.write(f"{case}\n")
                judge.stdin.flush()
                answer = judge.stdout.readline().strip()
                late.cancel()
                wrong += answer != "0"
                if not answer:
                    judge.communicate()
                    judge = None
        finally:
            if judge is not None:
                judge.kill()
                judge.communicate()
    return at_most(
        "malformed manifests that crash, hang or are believed",
        wrong,
        f"of {len(cases)} stores",
        0,
        "load, restore and verify in 1 GiB of memory",
    )


def storage_away() -> Bar:
    """Point 10: the storage does not answer at the first save, and comes back."""
    wrong = cases = 0
    for away in ("a file in place of the directory", "a read-only device", "no space"):
        with _folder() as folder:
            place = folder / "mount" / "run"
            if away == "a file in place of the directory":
                place.parent.write_text("")
            elif away == "a read-only device":
                place = Path("/proc/outlast/run")
            else:
                place = Path("/dev/full/run")
            cases += 1
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                try:
                    with CheckpointStore(place, writer="thread") as store:
                        result = store.save_async(1, _state(1)).result()
                        wrong += result.error is None or not told
                        if place.parent.is_file() and folder in place.parents:
                            place.parent.unlink()
                            wrong += store.save_async(2, _state(2)).result().error is not None
                except Exception:
                    wrong += 1
    return at_most(
        "first saves without storage that raise or say nothing",
        wrong,
        f"of {cases} stores",
        0,
        "directories that cannot be made, one of which can be later",
    )


CASES: dict[int, Callable[[], Bar]] = {
    7: two_writers,
    8: unfinished,
    9: malformed,
    10: storage_away,
}

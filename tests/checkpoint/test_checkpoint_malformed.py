"""Manifests that say what no save has written, with right hashes: one error, and on to the next."""

import copy
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from backports import zstd
from checkpoint_states import DELTA_CHAIN, open_store
from forked import run_ranks
from hostile_stores import FOLDER, PART, content_of, deep, make_state, save_two, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from outlast.checkpoint import list_versions, load, storage_of
from outlast.checkpoint.codec import Coder
from outlast.checkpoint.content import compare, extract
from outlast.checkpoint.convert import export_checkpoint
from outlast.checkpoint.dcp import OutlastReader, OutlastWriter
from outlast.checkpoint.inspection import describe, find_version, summarize, usage, verify
from outlast.checkpoint.manifest import ManifestError, Part, unsealed
from outlast.cli.ckpt import ckpt
from outlast.cli.main import main
from outlast.errors import CheckpointError

MEMORY = 1 << 30
CPU_SECONDS = 1.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two versions."""
    return save_two(tmp_path_factory.mktemp("saved") / "store")


@pytest.fixture(scope="module")
def saved_by_dcp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("dcp") / "store"
    writer = OutlastWriter(place)
    for step in (1, 2):
        writer.step = step
        dcp.save(dcp_state(step), storage_writer=writer)
    return place


def dcp_state(step: int) -> dict[str, Any]:
    return {"w": torch.full((30, 50), float(step)), "words": {"a": [step, "b"]}}


NASTY: list[Any] = [
    *(None, True, -1, 0, 1, 7, 2**31, 2**53, 10**18, 10**30, -(10**18), 10**400),
    *(0.5, 1e308, float("nan"), float("inf"), "", "x", "raw", "xor+planes", "float9999999999999"),
    *("../../../etc/passwd", "/etc/passwd", "step-00000001-a1/../../x.pack", "\0", "\ud800"),
    *([], {}, [[]], [0] * 9, {"!tensor": "absent", "kind": "torch"}, {"!tensor": 5}),
    *({"!evil": 1}, {"!dict": 3}, {"!set": [[1]]}, {"!shared": [0, {"!same": 0}]}, {"!same": 9}),
    *({"!bytes": "?"}, {"!torch.dtype": "load"}, {"!range": [0, 1, 0]}, {"!float": []}),
]


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, (dict, list)) and len(path) < 7:
        keys: Any = value.keys() if isinstance(value, dict) else range(min(len(value), 6))
        for key in keys:
            found += places_in(value[key], (*path, key))
    return found


@st.composite
def mutation(draw: st.DrawFn, content: dict[str, Any]) -> Any:
    """The content with one to three things changed."""
    found = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places_in(found)))
        parent = found
        for key in path[:-1]:
            parent = parent[key]
        kind = draw(st.sampled_from(["replace", "replace", "remove", "add", "number", "deep"]))
        if kind == "remove":
            del parent[path[-1]]
        elif kind == "add" and isinstance(parent, dict):
            parent[draw(st.sampled_from(["x", "!same", "../x", ""]))] = draw(st.sampled_from(NASTY))
        elif kind == "add":
            parent.insert(path[-1], copy.deepcopy(draw(st.sampled_from([*parent, *NASTY]))))
        elif kind == "number" and type(parent[path[-1]]) is int:
            parent[path[-1]] += draw(st.sampled_from([-1, 1, 2, 100, 10**9]))
        elif kind == "deep":
            parent[path[-1]] = deep(draw(st.sampled_from([50, 400, 900])))
        else:
            parent[path[-1]] = copy.deepcopy(draw(st.sampled_from(NASTY)))
        if not places_in(found):
            break
    return found


def refuses(work: Callable[[], Any]) -> str:
    """What `work` says when it refuses; any other error is for the test to show."""
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return ""


def look_at_everything(place: Path) -> None:
    """All that reads a store without a model."""
    storage = storage_of(place)
    first, second = list_versions(storage)
    assert verify(storage, first).state == "ok"
    verdict = verify(storage, second)
    assert verdict.state in ("ok", "damaged"), verdict
    summarize(storage, second)
    usage(storage)
    refuses(lambda: describe(storage, load(storage, second)))
    refuses(lambda: compare(storage, load(storage, first), load(storage, second)))
    refuses(lambda: extract(storage, load(storage, second), place.parent / "out"))
    shutil.rmtree(place.parent / "out", ignore_errors=True)
    assert find_version(storage, 1).version == first
    refuses(lambda: find_version(storage))


def restore(place: Path) -> None:
    """What a run does: the newest version, or the one before."""
    state = make_state(7)
    expected = make_state()
    store = open_store(place)
    refusal = ""
    try:
        restored = store.restore(state)
    except CheckpointError as error:
        refusal = str(error)
        restored = store.restore(state, step=1)
    assert not refusal or "does not fit this model" in refusal, refusal
    assert restored is not None
    with torch.no_grad():
        expected["model"].weight[restored.step] += 1e-3
    assert torch.equal(state["model"].weight, expected["model"].weight)
    assert restored.step == 2 or refusal or FOLDER in restored.skipped[0]


def load_by_dcp(place: Path) -> None:
    state = dcp_state(0)
    reader = OutlastReader(place)
    cause = ""
    try:
        dcp.load(state, storage_reader=reader)
    except BaseException as error:  # DCP's own is no Exception
        cause = str(error)
    if cause:
        # DCP wraps what its readers raise; a misfit is its planner's own word.
        known = ("CheckpointError", "ManifestError", "Missing key", "size mismatch", "cannot be")
        assert any(word in cause for word in known), cause
        return
    assert torch.equal(state["w"], torch.full((30, 50), float(state["w"][0, 0])))


def limited(memory: int = MEMORY) -> None:
    torch.set_num_threads(1)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + memory, held + memory))


def in_time(work: Callable[[Path], None], place: Path) -> None:
    begun = time.process_time()
    work(place)
    assert time.process_time() - begun < CPU_SECONDS


def mutate(
    source: Path, target: Path, file: str, checks: list[Callable[[Path], None]], examples: int
) -> int:
    """In a process with little memory: many changes of one file; returns how many."""
    limited()
    content = content_of(source, file)
    count = 0

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(mutation(content))
    def check(changed: Any) -> None:
        nonlocal count
        count += 1
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        try:
            write(target, file, changed)
        except (KeyError, ValueError, TypeError, UnicodeEncodeError):
            return
        for each in checks:
            in_time(each, target)

    check()
    return count


def only_file(place: Path, prefix: str) -> str:
    [path] = (place / FOLDER).glob(f"{prefix}*.json")
    return path.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefix", "examples"), [("rank", 130), ("catalogue", 60), ("version", 40)]
)
def test_changed_manifests_are_refused_or_read_right(
    saved: Path, tmp_path: Path, prefix: str, examples: int
) -> None:
    checks = [look_at_everything, restore]
    [count] = run_ranks(
        1, mutate, saved, tmp_path / "store", only_file(saved, prefix), checks, examples
    )
    assert count >= examples


@pytest.mark.parametrize(("prefix", "examples"), [("dcp", 60), ("rank", 40), ("catalogue", 30)])
def test_changed_manifests_are_refused_or_read_right_by_dcp(
    saved_by_dcp: Path, tmp_path: Path, prefix: str, examples: int
) -> None:
    file = only_file(saved_by_dcp, prefix)
    [count] = run_ranks(1, mutate, saved_by_dcp, tmp_path / "store", file, [load_by_dcp], examples)
    assert count >= examples


Change = Callable[[dict[str, Any]], None]


def chunk(column: int, value: Any, row: int = 0) -> Change:
    def change(part: dict[str, Any]) -> None:
        part["chunks"][row][column] = value

    return change


def piece(column: int, value: Any) -> Change:
    def change(part: dict[str, Any]) -> None:
        part["pieces"]["model.weight"][0][column] = value

    return change


def facts(column: int, value: Any) -> Change:
    def change(catalogue: dict[str, Any]) -> None:
        catalogue["tensors"]["model.weight"][column] = value

    return change


def field(name: str, value: Any) -> Change:
    return lambda content: content.update({name: value})


def cyclic(part: dict[str, Any]) -> None:
    part["codecs"] += [f"xor+{codec}" for codec in part["codecs"]]
    for number in (0, 1):
        part["chunks"][number][3] += len(part["codecs"]) // 2
        part["chunks"][number][7] = 1 - number


def overlapping(part: dict[str, Any]) -> None:
    numbers = part["pieces"]["model.weight"][0][2][:1]
    part["pieces"]["model.weight"] = [
        [[n % 30, n % 17], [1 + n % 7, 1 + n % 11], numbers] for n in range(4000)
    ]


CORPUS: dict[str, tuple[str, Change, str]] = {
    "its own base": ("rank", chunk(7, 0), "chunks[0] has the base 0"),
    "cyclic bases": ("rank", cyclic, "chunks["),
    "base out of range": ("rank", chunk(7, 10**9), "chunks[0]"),
    "pack out of range": ("rank", chunk(0, 99), "chunks[0]"),
    "codec out of range": ("rank", chunk(3, -1), "chunks[0]"),
    "negative offset": ("rank", chunk(1, -1), "chunks[0]"),
    "huge length": ("rank", chunk(2, 10**15), "chunks[0]"),
    "huge size": ("rank", chunk(4, 10**18), "chunks[0]"),
    "size beyond integers": ("rank", chunk(4, 10**30), "chunks[0]"),
    "NaN error": ("rank", chunk(8, float("nan")), "NaN"),
    "text for a number": ("rank", chunk(1, "0"), "chunks[0]"),
    "true for a number": ("rank", chunk(0, True), "chunks[0]"),
    "short row": ("rank", lambda part: part["chunks"][0].pop(), "chunks[0]"),
    "no list": ("rank", field("chunks", 5), "chunks"),
    "absolute pack": ("rank", field("packs", ["/etc/passwd"]), "packs[0]"),
    "pack outside": ("rank", field("packs", [f"{FOLDER}/../../x.pack"]), "packs[0]"),
    "unknown codec": ("rank", lambda part: part["codecs"].append("evil"), "codecs"),
    "box of 10^18": ("rank", piece(1, [10**9, 10**9]), "pieces['model.weight']"),
    "negative box": ("rank", piece(0, [-1, 0]), "pieces['model.weight']"),
    "box of 3 dimensions": ("rank", piece(1, [1, 1, 1]), "pieces['model.weight']"),
    "no chunks": ("rank", piece(2, []), "pieces['model.weight']"),
    "chunk that is not there": ("rank", piece(2, [10**6]), "pieces['model.weight']"),
    "overlapping boxes": ("rank", overlapping, ""),
    "unknown tensor": ("rank", lambda part: part["pieces"].update(x=[]), "pieces['x']"),
    "catalogue outside": ("rank", field("catalogue", "../" * 30), "catalogue"),
    "world of 10^12": ("rank", field("world_size", 10**12), "world_size"),
    "unknown kind": ("rank", field("kind", "evil"), "kind"),
    "missing field": ("rank", lambda part: part.pop("values"), "values is missing"),
    "unknown field": ("rank", field("evil", 1), "evil is unknown"),
    "deep value": ("rank", field("values", {"data": deep(900)}), "values['data']"),
    "tensor that is not there": (
        "rank",
        field("values", {"data": {"!tensor": "x", "kind": "torch"}}),
        "the tensor `x`",
    ),
    "zero steps": ("catalogue", facts(2, [0, 0]), "tensors['model.weight']"),
    "negative steps": ("catalogue", facts(2, [-1, 1]), "tensors['model.weight']"),
    "steps of one dimension": ("catalogue", facts(2, [1]), "tensors['model.weight']"),
    "huge tiles": (
        "catalogue",
        lambda content: content["tensors"].update({"x": ["float32", [10**5, 10**5], [10**5] * 2]}),
        "tensors['x']",
    ),
    "shape of 10^18": ("catalogue", facts(1, [10**18, 10**18]), "tensors['model.weight']"),
    "65 dimensions": ("catalogue", facts(1, [1] * 65), "tensors['model.weight']"),
    "unknown type": ("catalogue", facts(0, "float9999999999999"), "tensors['model.weight']"),
    "type that is a path": ("catalogue", facts(0, "../load"), "tensors['model.weight']"),
    "values that are no list": ("catalogue", field("values", 3), "values"),
    "tensors that are no table": ("catalogue", field("tensors", []), "tensors"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CORPUS)
def test_what_no_save_can_have_written_is_named_and_passed_over(
    saved: Path, tmp_path: Path, case: str
) -> None:
    prefix, change, words = CORPUS[case]
    place = tmp_path / "store"
    shutil.copytree(saved, place)
    file = only_file(place, prefix)
    content = content_of(place, file)
    change(content)
    write(place, file, content)
    begun = time.process_time()
    storage = storage_of(place)
    with pytest.raises(CheckpointError) as refused:
        load(storage, list_versions(storage)[1])
    assert time.process_time() - begun < CPU_SECONDS
    text = str(refused.value)
    assert words in text
    if words:
        assert "is malformed" in text
        assert (PART if prefix == "rank" else "catalogue-") in text
    look_at_everything(place)
    restore(place)
    runner = CliRunner()
    verified = runner.invoke(ckpt, ["verify", str(place), "--all"])
    assert verified.exit_code == 1
    assert "step 1, session 1: OK" in verified.output
    assert "step 2, session 1: DAMAGED" in verified.output
    listed = runner.invoke(ckpt, ["ls", str(place)])
    assert listed.exit_code == 0
    assert "damaged" in listed.output
    for arguments in (["show", str(place), "--step", "2"], ["diff", str(place), "1", "2"]):
        assert isinstance(runner.invoke(ckpt, arguments).exception, CheckpointError)
    for arguments in (["show", str(place)], ["du", str(place)]):
        assert runner.invoke(ckpt, arguments).exit_code == 0
    export_checkpoint(place, tmp_path / "out", kind="safetensors")


@pytest.mark.parametrize(("row", "offset"), [(0, 10**18), (0, 2**62), (0, 10**6), (-1, 10**18)])
def test_a_chunk_behind_the_end_of_its_pack_is_named_before_it_is_read(
    saved: Path, tmp_path: Path, row: int, offset: int
) -> None:
    place = tmp_path / "store"
    shutil.copytree(saved, place)
    file = only_file(place, "rank")
    content = content_of(place, file)
    number = content["pieces"]["model.weight"][0][2][row]
    content["chunks"][number][1] = offset
    write(place, file, content)

    def look() -> None:
        limited(256 << 20)
        in_time(look_at_everything, place)
        in_time(restore, place)
        with pytest.raises(CheckpointError) as refused:
            open_store(place).restore(make_state(7), step=2)
        for words in (PART, f"malformed: chunks[{number}]", f"from byte {offset}", ".pack is cut"):
            assert words in str(refused.value)
        verified = CliRunner().invoke(ckpt, ["verify", str(place), "--all"])
        assert verified.exit_code == 1
        assert "step 2, session 1: DAMAGED" in verified.output

    run_ranks(1, look)


COMMANDS_ON = [
    "cyclic bases",
    "no list",
    "overlapping boxes",
    "shape of 10^18",
    "deep value",
]


@pytest.mark.slow
@pytest.mark.parametrize("case", COMMANDS_ON)
def test_commands_say_in_a_sentence_what_is_malformed(
    saved: Path,
    tmp_path: Path,
    case: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    prefix, change, _ = CORPUS[case]
    place = tmp_path / "store"
    shutil.copytree(saved, place)
    file = only_file(place, prefix)
    content = content_of(place, file)
    change(content)
    write(place, file, content)
    commands = [
        *(["ls", str(place), *more] for more in ([], ["--json"])),
        *(["show", str(place), *more] for more in ([], ["--step", "2"])),
        *(["diff", str(place), *steps] for steps in (["1", "2"], ["2", "1"])),
        *(["du", str(place), *more] for more in ([], ["--json"])),
        *(["verify", str(place), *more] for more in ([], ["--all"], ["--step", "2"])),
        *(
            ["export", str(place), str(tmp_path / f"out-{len(more)}"), *more]
            for more in ([], ["--step", "2"])
        ),
    ]
    codes = []
    for arguments in commands:
        monkeypatch.setattr("sys.argv", ["outlast", "ckpt", *arguments])
        try:
            main()
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
        said = "".join(capfd.readouterr())
        assert "Traceback" not in said, (arguments, said)
        assert code == 0 or said.strip(), arguments
        codes.append(code)
    assert codes == [0, 0, 0, 2, 2, 2, 0, 0, 1, 1, 1, 0, 2]


def test_a_frame_that_names_terabytes_is_not_believed() -> None:
    plane = np.arange(256, dtype=np.uint8).tobytes() * 8
    honest = zstd.compress(plane)
    # A frame header of 8 bytes of content size, then one empty block.
    bomb = b"\x28\xb5\x2f\xfd\xe0" + (10 << 40).to_bytes(8, "little") + b"\x01\x00\x00"
    assert zstd.get_frame_info(bomb).decompressed_size == 10 << 40
    assert zstd.get_frame_info(honest).decompressed_size == len(plane)

    def decode() -> None:
        limited(256 << 20)
        for flags, exceptions in ((0, 0), (2, 0), (2, 2**31), (3, 5)):
            for parts in ([bomb, bomb], [bomb, b""], [honest, bomb]):
                head = bytes([2, flags]) + exceptions.to_bytes(4, "little")
                code = head + b"".join(len(p).to_bytes(4, "little") for p in parts)
                for itemsize in (2, 4):
                    with pytest.raises(CheckpointError, match="cannot be decoded"):
                        Coder().decode("planes", [code + b"".join(parts)], itemsize, 4096)

    run_ranks(1, decode)


def test_a_part_is_read_as_it_was_written(saved: Path) -> None:
    for place in (saved / FOLDER, DELTA_CHAIN / "step-00000004-a1"):
        content = (place / PART).read_bytes()
        part = Part.from_bytes(content, PART)
        assert part.to_bytes() == content
    assert any(len(part.chain(number)) > 1 for number in range(len(part.chunks)))
    body = b'{"format":2,"step":' + b"9" * 5000
    with pytest.raises(ManifestError, match="is malformed"):
        unsealed(body + f',"blake3":"{blake3.blake3(body).hexdigest()}"}}\n'.encode(), PART)

"""Numbers in memory come back bit for bit, and who looks at whose memory."""

import types

import numpy as np
import pytest
import torch
from heap_runs import copied, resume
from torch import nn

from outlast.autosave.heap.capture import capture, restore
from outlast.autosave.heap.names import Names

DTYPES = [
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.bool,
    torch.int8,
    torch.uint16,
    torch.int64,
]


class Holder:
    def __init__(self, value):
        self.value = value


def both(setup, train):
    runs = resume(setup, train, __name__)
    return runs.saved, runs.resumed


def assert_bits(before, after):
    assert before.dtype == after.dtype
    assert before.shape == after.shape
    assert before.contiguous().reshape(-1).view(torch.uint8).tolist() == (
        after.contiguous().reshape(-1).view(torch.uint8).tolist()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype):
    def setup():
        return {"named": torch.zeros(3, 2, dtype=dtype)}

    def train(run):
        torch.manual_seed(1)
        run["named"].copy_((torch.randn(3, 2) * 3).to(dtype))
        run["late"] = (torch.randn(5) * 3).to(dtype)

    saved, run = both(setup, train)
    for name in ("named", "late"):
        assert_bits(saved[name], run[name])


def test_every_geometry_comes_back():
    def setup():
        base = torch.zeros(4, 6)
        return {
            "base": base,
            "row": base[1],
            "odd": base[:, 1::2],
            "turned": base.t(),
            "wide": torch.zeros(1).expand(5),
            "empty": torch.zeros(0, 3),
            "number": torch.zeros(()),
        }

    def train(run):
        run["base"].copy_(torch.arange(24).view(4, 6))
        run["number"].fill_(7)
        run["wide"][:1] = 3
        run |= {
            "late odd": run["base"][::2, ::3],
            "late": torch.arange(10.0),
            "none": torch.zeros(3, 0),
            "bits": run["base"].view(torch.int32)[2],
        }
        run["late tail"] = run["late"][4:]

    saved, run = both(setup, train)
    for name in saved:
        assert torch.equal(saved[name], run[name])
        assert saved[name].stride() == run[name].stride()
    run["base"].fill_(5)
    for name in ("row", "odd", "turned", "late odd"):
        assert bool((run[name] == 5).all())
    run["late"].zero_()
    assert not run["late tail"].any()
    assert run["bits"].view(torch.float32).tolist() == [5] * 6


def test_memory_that_two_share_is_written_once():
    def setup():
        base = torch.zeros(1000)
        return {"base": base, "head": base[:10]}

    def train(run):
        run["tail"] = run["base"][10:]

    runs = resume(setup, train, __name__)
    assert sum(row.nbytes for row in runs.captured.tensors.values()) == 4000


def test_who_looks_at_what_may_change():
    def setup():
        one, two = torch.zeros(3), torch.ones(3)
        return {"one": one, "view": one[:2], "two": two, "three": torch.full((3,), 3.0)}

    def train(run):
        run["one"].data = torch.full((3,), 9.0)
        run["three"].data = run["two"]
        run["view"].add_(4)
        run["two"].add_(1)

    saved, run = both(setup, train)
    for name in saved:
        assert torch.equal(saved[name], run[name])
    run["one"].zero_()
    assert run["view"].tolist() == [4, 4]
    run["two"].zero_()
    assert run["three"].tolist() == [0, 0, 0]


def test_tensors_with_attributes_and_gradients_come_back():
    def setup():
        return {"named": nn.Parameter(torch.zeros(2))}

    def train(run):
        late = nn.Parameter(torch.ones(2), requires_grad=False)
        late.tag = ["a", late]
        leaf = torch.ones(2, requires_grad=True)
        leaf.grad = torch.full((2,), 3.0)
        run["named"].tag = run["named"]
        run["named"].grad = torch.full((2,), 4.0)
        run |= {"late": late, "leaf": leaf}

    _, run = both(setup, train)
    assert isinstance(run["late"], nn.Parameter)
    assert not run["late"].requires_grad
    assert run["late"].tag[1] is run["late"]
    assert run["leaf"].grad.tolist() == [3, 3]
    assert run["leaf"].requires_grad
    assert run["named"].tag is run["named"]
    assert run["named"].grad.tolist() == [4, 4]


def test_conjugates_and_negatives_read_as_before():
    def setup():
        return {"base": torch.zeros(2, dtype=torch.complex64)}

    def train(run):
        run["base"].copy_(torch.tensor([1 + 2j, 3 - 4j]))
        run |= {"conjugate": run["base"].conj(), "negative": run["base"].conj().imag}

    saved, run = both(setup, train)
    for name in saved:
        assert torch.equal(saved[name], run[name])
    run["base"].fill_(1j)
    assert run["conjugate"].tolist() == [-1j, -1j]
    assert run["negative"].tolist() == [-1, -1]


def test_sparse_tensors_come_back():
    def setup():
        return {"named": torch.eye(3).to_sparse(), "rows": torch.eye(3).to_sparse_csr()}

    def train(run):
        run["named"].mul_(2)
        run["late"] = torch.eye(2).to_sparse()
        run["late rows"] = torch.eye(2).to_sparse_csr()

    saved, run = both(setup, train)
    for name in saved:
        assert saved[name].layout == run[name].layout
        assert torch.equal(saved[name].to_dense(), run[name].to_dense())


def test_arrays_come_back_with_their_views():
    def setup():
        base = np.zeros((4, 6))
        shared = torch.zeros(4)
        return {
            "base": base,
            "odd": base[:, ::-2],
            "objects": np.array([[], None], dtype=object),
            "structured": np.zeros(2, dtype=[("a", "i4"), ("b", "U3")]),
            "fortran": np.zeros((2, 3), order="F"),
            "shared": shared,
            "window": shared.numpy()[1:],
            "constant": np.frombuffer(b"abcd", np.uint8),
        }

    def train(run):
        run["base"][:] = np.arange(24).reshape(4, 6)
        run["objects"][0].append(run["base"])
        run["structured"]["b"] = "xyz"
        run["fortran"][1, 2] = 5
        run["window"][:] = 3
        late = np.arange(10)[::-3]
        run |= {
            "late": late,
            "late view": late[1:],
            "late row": run["base"][2],
            "dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
            "texts": np.array(["a", "bc"]),
            "late objects": np.array([run["base"], None], dtype=object),
            "late tensor": torch.from_numpy(run["base"]),
        }

    saved, run = both(setup, train)
    for name in ("base", "odd", "structured", "fortran", "window", "late", "dates", "texts"):
        assert np.array_equal(saved[name], run[name])
        assert saved[name].strides == run[name].strides
        assert saved[name].dtype == run[name].dtype
    assert run["objects"][0][0] is run["base"]
    assert run["late objects"][0] is run["base"]
    assert run["shared"].tolist() == [0, 3, 3, 3]
    run["base"][:] = 1
    run["late"][:] = 8
    run["shared"].zero_()
    assert run["late row"].tolist() == [1] * 6
    assert run["odd"].tolist() == [[1] * 3] * 4
    assert run["late view"].tolist() == [8] * 3
    assert run["window"].tolist() == [0] * 3
    assert bool((run["late tensor"] == 1).all())
    assert run["constant"].tobytes() == b"abcd"


def test_masked_arrays_and_arrays_in_pieces_come_back():
    def setup():
        piece = np.lib.stride_tricks.as_strided(np.zeros(8), (2, 2), (32, 8))
        return {"masked": np.ma.array([1, 2, 3], mask=[0, 1, 0]), "piece": piece}

    def train(run):
        run["masked"][0] = 9
        run["masked"][2] = np.ma.masked
        run["piece"][:] = 4

    saved, run = both(setup, train)
    assert run["masked"].tolist() == [9, None, None]
    assert np.array_equal(saved["piece"], run["piece"])


def test_files_mapped_into_memory_are_left_on_disk(tmp_path):
    np.arange(1000, dtype=np.int64).tofile(tmp_path / "data")

    def setup():
        return {"data": np.memmap(tmp_path / "data", np.int64, "r")}

    def train(run):
        run["late"] = np.memmap(tmp_path / "data", np.int64, "r")

    runs = resume(setup, train, __name__)
    assert len(runs.captured.program) < 2000
    assert not runs.captured.tensors
    assert runs.resumed["late"][999] == 999


def test_what_set_up_has_dropped_and_nobody_changed_is_not_written():
    def setup():
        return {"weights": torch.zeros(10), "sample": torch.ones(1000)}

    def train(run):
        del run["sample"]

    runs = resume(setup, train, __name__)
    assert list(runs.captured.tensors) == ["=weights"]


def test_what_is_held_out_of_sight_and_changes_is_written():
    hidden = types.SimpleNamespace()

    def setup():
        hidden.holder = Holder(torch.ones(3))
        return {"holder": hidden.holder}

    def train(run):
        run.pop("holder").value.add_(1)

    resume(setup, train, __name__)
    assert hidden.holder.value.tolist() == [2, 2, 2]


def test_a_tensor_that_nothing_leads_to_is_saved_in_each_life_once_it_was_written():
    def setup():
        torch.manual_seed(0)
        return {"model": nn.Linear(2, 2), "spare": torch.zeros(3), "still": torch.ones(3)}

    held = []
    saved = None
    for _ in range(3):
        variables = setup()
        names = Names(variables, {__name__})
        # Somebody holds them where nobody can look.
        held.append([variables.pop(each) for each in ("spare", "still")])
        if saved is None:
            held[-1][0].add_(1.0)
        else:
            restore(saved, names, {})
        saved = copied(capture(names, variables, {}))
        assert "=spare" in saved.tensors
        assert "=still" not in saved.tensors
    assert [each.tolist() for each, _ in held] == [[1.0] * 3] * 3

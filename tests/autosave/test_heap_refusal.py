"""What cannot be saved or found again is named, with its path and the remedy."""

import socket
import threading
import types

import pytest
import torch
from heap_runs import resume

from outlast.autosave.heap.capture import capture, restore
from outlast.autosave.heap.names import Names, SetupDiffersError, Unsaveable
from outlast.errors import AutosaveError


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Stubborn:
    def __reduce__(self):
        raise RuntimeError("no")


def refused(setup, train):
    with pytest.raises(Unsaveable) as caught:
        resume(setup, train, __name__)
    return caught.value


def test_a_later_lock_is_named_by_its_path():
    def train(run):
        run["places"] = [Holder(parts={"a": (1, Holder(lock=threading.Lock()))})]

    error = refused(dict, train)
    assert error.path == ("['places']", "[0]", ".parts", "['a']", "[1]", ".lock")
    assert error.root is None
    assert error.type == "_thread.lock"
    assert "make it before the training loop" in str(error)


def test_what_hangs_on_an_object_of_set_up_is_named_from_there():
    def setup():
        return {"holder": Holder(other=None)}

    def train(run):
        run["holder"].other = [threading.Event()]

    error = refused(setup, train)
    assert (error.root, error.path) == ("holder", (".other", "[0]"))
    assert str(error).startswith("`holder.other[0]`, a threading.Event, cannot be saved: ")


def test_what_hangs_on_an_object_without_name_is_named():
    def train(run):
        run["places"] = {Holder(deep=Holder(stubborn=Stubborn()))}

    assert refused(dict, train).path == ("['places']", "{...}", ".deep", ".stubborn")


def test_connections_and_generators_get_advice_of_their_own():
    with socket.socket() as connection:
        error = refused(dict, lambda run: run.update(link=connection))
    assert error.type == "socket.socket"
    assert "connection" in error.advice
    error = refused(dict, lambda run: run.update(stream=(each for each in [])))
    assert "__next__" in error.advice


def test_a_class_made_in_a_function_is_named():
    class Local:
        pass

    error = refused(dict, lambda run: run.update(made=Local()))
    assert error.path[0] == "['made']"
    assert "top of its file" in error.advice


def test_a_reducer_may_refuse():
    def refuse(value):
        raise Unsaveable(value, "close it first")

    def setup():
        return {}

    with pytest.raises(Unsaveable, match=r"`\['stream'\]`, a generator, .* close it first"):
        resume(
            setup,
            lambda run: run.update(stream=(each for each in [])),
            __name__,
            reducers={types.GeneratorType: refuse},
        )


def test_the_cause_of_a_refusal_is_kept():
    error = refused(dict, lambda run: run.update(it=Stubborn()))
    assert isinstance(error.__cause__, RuntimeError)
    assert isinstance(error, AutosaveError)


def restored(first, second, change=lambda run: None):
    names = Names(first, {__name__})
    change(first)
    captured = capture(names, first, {})
    return restore(captured, Names(second, {__name__}), {})


def test_an_object_that_set_up_did_not_make_again_is_named():
    with pytest.raises(SetupDiffersError, match=r"`two` was there .* same objects in every run"):
        restored({"one": Holder(), "two": Holder()}, {"one": Holder()})


def test_an_object_of_another_type_is_named():
    with pytest.raises(SetupDiffersError, match=r"`one` was a list .* is a dict;"):
        restored({"one": []}, {"one": {}})


def test_a_tensor_of_another_size_is_overwritten():
    values = restored({"one": torch.ones(3)}, {"one": torch.zeros(5)})
    assert values["one"].tolist() == [1, 1, 1]


def test_an_array_of_another_size_is_named():
    numbers = torch.ones(3).numpy(), torch.ones(4).numpy()
    with pytest.raises(SetupDiffersError, match=r"`one` was an array \(3,\) .* is one \(4,\)"):
        restored({"one": numbers[0]}, {"one": numbers[1]})


def test_a_chain_of_too_many_links_is_named_by_its_beginning():
    def train(run):
        chain = None
        for _ in range(3000):
            chain = Holder(next=chain)
        run["chain"] = chain

    error = refused(dict, train)
    assert error.path == ("['chain']", *[".next"] * 5)
    assert "keep its links in a list" in str(error)

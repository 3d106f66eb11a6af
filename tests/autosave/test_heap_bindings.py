"""The line that binds a name is found for the sentence that refuses it."""

import ast

import pytest

from outlast.autosave.program.scopes import attribute_line, binding_line

TEXT = """\
import socket as net

writer = None

def train(log, *rest, rate=0.1):
    writer = log
    for batch in rest:
        writer = net.socket()
        with open("x") as stream:
            best, (worst, _) = 1, (2, 3)
        def inner():
            hidden = 1
    if (late := rate) > 1:
        pass

class Trainer:
    def __init__(self):
        self.writer = None
        self.writer = writer
"""
TREE = ast.parse(TEXT)
TRAIN = TREE.body[2]


@pytest.mark.parametrize(
    ("name", "before", "line"),
    [
        ("writer", 7, 6),
        ("writer", 13, 8),
        ("log", 13, 5),
        ("rest", 13, 5),
        ("rate", 13, 5),
        ("batch", 13, 7),
        ("stream", 13, 9),
        ("worst", 13, 10),
        ("worst", 8, 10),
        ("inner", 13, 11),
        ("late", 13, 13),
        ("hidden", 13, None),
        ("net", 13, None),
    ],
)
def test_a_local_name_is_bound_where_it_got_its_value(name, before, line):
    assert binding_line(TRAIN, name, before) == line


@pytest.mark.parametrize(
    ("name", "line"), [("writer", 3), ("net", 1), ("Trainer", 16), ("x", None)]
)
def test_a_global_name_is_bound_in_the_module(name, line):
    assert binding_line(TREE, name, 20) == line


def test_an_attribute_is_set_where_it_is_set_first():
    assert attribute_line(TREE, "writer") == 18
    assert attribute_line(TREE, "other") is None

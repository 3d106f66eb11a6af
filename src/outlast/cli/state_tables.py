"""Tables of what a script's steps leave behind, as ``autosave check`` and ``--explain`` show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.cli.figures import Column, print_table, size_text

if TYPE_CHECKING:
    from rich.console import Console

    from outlast.autosave.measured import MeasuredState

_MEANING = {
    "must-save": "changes, and is read again",
    "save-once": "is read, and never changed",
    "derivable": "is made again by set-up, and never changed",
    "dead": "is written before it is read",
}


def print_classes(console: Console, state: MeasuredState) -> None:
    """Tensors and bytes of each class, and what state_dict() misses."""
    print_table(
        console,
        [
            Column("class", number=False),
            Column("tensors"),
            Column("bytes"),
            Column("what it is", number=False, least=20),
        ],
        [
            [kind, str(count), size_text(state.bytes[kind]), _MEANING[kind]]
            for kind, count in state.tensors.items()
        ],
        title=f"what a step leaves behind (measured after {state.at} steps)",
    )
    for lint in state.lints:
        console.print(f"note: {lint}", markup=False, soft_wrap=True)


def print_sizes(console: Console, state: MeasuredState) -> None:
    """Bytes of a save beside those of other ways to save."""
    print_table(
        console,
        [
            Column("bytes per save", number=False),
            Column("size"),
            Column("what it is", number=False),
        ],
        [[name, size_text(size), what] for name, size, what in state.rows()],
        title="bytes per save, before compression (measured)",
    )

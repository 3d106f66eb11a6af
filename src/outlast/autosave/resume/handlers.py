"""Log files that a program gives to its loggers while it trains, as one for each fold.

Loggers are objects of the process, and what set-up gives them set-up gives them again. Handlers of
files that came later are written by value: their files are opened again, at their ends.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_OF_PROCESS = ("lock", "stream", "_builtin_open")

Handlers = dict[str, list[logging.FileHandler]]


def file_handlers() -> Handlers:
    """Name of each logger that writes to files, and its handlers that do."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    found = {
        logger.name: [one for one in logger.handlers if isinstance(one, logging.FileHandler)]
        for logger in loggers
        if isinstance(logger, logging.Logger)
    }
    return {name: found_item for name, found_item in found.items() if found_item}


def later_handlers(before: Handlers) -> Handlers:
    """Those that loggers have and had not `before`."""
    return {
        name: [one for one in handler if not any(one is old for old in before.get(name, ()))]
        for name, handler in file_handlers().items()
    }


def add_handlers(handlers: Handlers) -> None:
    """Give loggers their later handlers again."""
    for name, handler in handlers.items():
        for one in handler:
            logging.getLogger(name).addHandler(one)


def reduced_handler(handler: logging.FileHandler) -> Any:
    """How a handler that set-up has not made is made again, as `object.__reduce__` gives it."""
    state = {name: variable for name, variable in vars(handler).items() if name not in _OF_PROCESS}
    return _made, (type(handler), state, handler.stream is not None)


def _made(
    kind: type[logging.FileHandler], state: Mapping[str, Any], opened: bool
) -> logging.FileHandler:
    handler = kind.__new__(kind)
    vars(handler).update(state, stream=None, _builtin_open=open)
    handler.createLock()
    if opened:
        mode, handler.mode = handler.mode, "a"
        handler.stream = handler._open()
        handler.mode = mode
    logging._addHandlerRef(handler)  # type: ignore[attr-defined]
    return handler

"""Switches that concern the whole process, as far as a program has set them in training."""

from __future__ import annotations

import decimal
import gc
import locale
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_UNSET = ("unset",)
"""Stands for a variable of the environment that was deleted."""

_ENVIRONMENT, _LOGGER, _SIGNAL = "environment ", "logger ", "signal "
_TAKEN = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP})
"""Signals that ask a run to stop, and those that nobody can handle."""

_DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _autocast(device: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    def put(value: Any) -> None:
        torch.set_autocast_enabled(device, value[0])
        torch.set_autocast_dtype(device, value[1])

    return lambda: (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
    ), put


def _set_filters(value: Any) -> None:
    warnings.filters[:] = value  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _set_decimal(value: Any) -> None:
    context = decimal.getcontext()
    for name, item in zip(_DECIMAL, value, strict=True):
        setattr(context, name, item)


def _flushes() -> bool:
    # No function tells.
    return bool((torch.tensor(1e-310, dtype=torch.float64) * 1).item() == 0.0)


def _folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path()


_SWITCHES: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (lambda: str(torch.get_default_device()), torch.set_default_device),
    "deterministic": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "filled memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    "gradients": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "autocast on cpu": _autocast("cpu"),
    "autocast on cuda": _autocast("cuda"),
    "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "flushed denormals": (_flushes, torch.set_flush_denormal),
    "anomalies": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    "cudnn": _attribute(torch.backends.cudnn, "enabled"),
    "cudnn benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "cudnn deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "cudnn tf32": _attribute(torch.backends.cudnn, "allow_tf32"),
    "mkldnn": _attribute(torch.backends.mkldnn, "enabled"),
    "flash attention": (
        torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp,
    ),
    "memory efficient attention": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "plain attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "printing of tensors": (
        lambda: dict(vars(torch._tensor_str.PRINT_OPTS)),
        lambda value: vars(torch._tensor_str.PRINT_OPTS).update(value),
    ),
    "errors of numpy": (np.geterr, lambda value: np.seterr(**value)),
    "printing of numpy": (
        lambda: {
            name: printoption
            for name, printoption in np.get_printoptions().items()
            if name not in ("formatter", "override_repr", "legacy")
        },
        lambda value: np.set_printoptions(**value),
    ),
    "decimals": (
        lambda: tuple(getattr(decimal.getcontext(), name) for name in _DECIMAL), _set_decimal,
    ),
    "warnings": (lambda: list(warnings.filters), _set_filters),
    "recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "collection": (gc.get_threshold, lambda value: gc.set_threshold(*value)),
    "locale": (
        lambda: locale.setlocale(locale.LC_ALL),
        lambda value: locale.setlocale(locale.LC_ALL, value),
    ),
    "folder": (_folder, os.chdir),
}  # fmt: skip


def switches() -> dict[str, Any]:
    """How all of them are set."""
    found = {name: read() for name, (read, _) in _SWITCHES.items()}
    found |= {f"{_ENVIRONMENT}{name}": value for name, value in os.environ.items()}
    for name, logger in {"root": logging.root, **logging.root.manager.loggerDict}.items():
        if isinstance(logger, logging.Logger):
            found[f"{_LOGGER}{name}"] = (logger.level, logger.disabled, logger.propagate)
    for number in signal.valid_signals() - _TAKEN:
        handler = signal.getsignal(number)
        if handler is not None:
            found[f"{_SIGNAL}{int(number)}"] = handler
    return found


def changed(before: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are set in another way than `before`; a machine's own settings are not among them.

    Args:
        before: What `switches` gave when set-up was done.
    """
    now = switches()
    found = {name: item for name, item in now.items() if name not in before or before[name] != item}
    lost = (name for name in before.keys() - now.keys() if name.startswith(_ENVIRONMENT))
    return found | dict.fromkeys(lost, _UNSET)


def set_switches(values: Mapping[str, Any]) -> None:
    """Set what `changed` gave."""
    for name, value in values.items():
        if name.startswith(_ENVIRONMENT):
            variable = name.removeprefix(_ENVIRONMENT)
            if value == _UNSET:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        elif name.startswith(_LOGGER):
            logger = name.removeprefix(_LOGGER)
            own = logging.root if logger == "root" else logging.getLogger(logger)
            own.setLevel(value[0])
            own.disabled, own.propagate = value[1:]
        elif name.startswith(_SIGNAL):
            signal.signal(int(name.removeprefix(_SIGNAL)), value)
        else:
            read, write = _SWITCHES[name]
            if read() != value:
                write(value)

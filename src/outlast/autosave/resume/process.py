"""State of the process: switches that a program has set, caches, paths, sources of random numbers.

`functools.lru_cache` hides its results. A function that is cached may have drawn random numbers or
made a tensor that was changed since; computed again it would give another. Of functions whose
results are many bytes, or cannot be written down, nothing is saved: they are computed again.

A path that set-up computes anew from the time or by chance stays what it was, unless that is gone,
as the scratch folder of a job, and the new one exists. Paths below the program's folder are written
relative to it, so that the folder may be moved.

The state of a source of random numbers is bytes: small, equal when the numbers to come are equal,
and the same in every process.
"""

from __future__ import annotations

import decimal
import functools
import gc
import locale
import logging
import os
import pickle
import random
import signal
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from outlast.autosave.heap.objects import Results, vars_of
from outlast.autosave.resume.files import program_folder
from outlast.errors import AutosaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from outlast.autosave.heap.names import Names


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

    return lambda: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)), put


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
    """Present values of all switches."""
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


_plain_cache, _plain_lru_cache = functools.cache, functools.lru_cache


_MISSING = object()


@contextmanager
def visible_caches(files: frozenset[str]) -> Iterator[None]:
    """Within, functions that these files decorate with `cache` and `lru_cache` show their caches.

    Args:
        files: Of the program.
    """

    def lru_cache(maxsize: Any = 128, typed: bool = False) -> Any:
        if sys._getframe(1).f_code.co_filename not in files:
            return _plain_lru_cache(maxsize, typed)
        if callable(maxsize):
            return _cached(maxsize, 128, typed)
        return lambda function: _cached(function, maxsize, typed)

    def cache(function: Callable[..., Any], /) -> Any:
        if sys._getframe(1).f_code.co_filename not in files:
            return _plain_cache(function)
        return _cached(function, None, typed=False)

    functools.cache, functools.lru_cache = cache, lru_cache
    try:
        yield
    finally:
        functools.cache, functools.lru_cache = _plain_cache, _plain_lru_cache


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Callable[..., Any]:
    """Return the function behind Python's `lru_cache`, with its results in a variable."""
    results = Results()
    counts = {"hits": 0, "misses": 0}

    @functools.wraps(function)
    def wrapper(*args: Any, **words: Any) -> Any:
        if torch.compiler.is_compiling():
            # As with Python's own, what is compiled has the function itself.
            return function(*args, **words)
        key: Any = (args, tuple(words.items()))
        if typed:
            key = (key, *map(type, args), *map(type, words.values()))
        found = results.get(key, _MISSING)
        if found is not _MISSING:
            counts["hits"] += 1
            results.move_to_end(key)
            return found
        counts["misses"] += 1
        made = function(*args, **words)
        if maxsize != 0:
            results[key] = made
            if maxsize is not None and len(results) > max(maxsize, 0):
                results.popitem(last=False)
        return made

    def cache_info() -> Any:
        return functools._CacheInfo(counts["hits"], counts["misses"], maxsize, len(results))

    def cache_clear() -> None:
        results.clear()
        counts.update(hits=0, misses=0)

    made: Any = wrapper
    made.cache_info, made.cache_clear = cache_info, cache_clear
    made.cache_parameters = lambda: {"maxsize": maxsize, "typed": typed}
    return made  # type: ignore[no-any-return]


_of_setup: dict[str, PurePath] = {}


_names_of_setup: dict[PurePath, str] = {}


def remember(roots: Mapping[str, Any], names: Names) -> None:
    """Take note of the paths that set-up has made: variables, and attributes of own objects.

    Args:
        roots: Name to value of each variable.
        names: What they lead to.
    """
    found = dict(roots)
    for name, object_ in names.objects.items():
        if names.is_own(name):
            found |= {f"{name}.{key}": value for key, value in vars_of(object_).items()}
    _of_setup.clear()
    _names_of_setup.clear()
    for name, found_item in found.items():
        if isinstance(found_item, PurePath) and found_item.is_absolute():
            _of_setup[name] = found_item
            _names_of_setup.setdefault(found_item, name)


def _reduced(path: PurePath) -> Any:
    folder = program_folder()
    if folder is not None and path.is_absolute() and path.is_relative_to(folder):
        return _below, (type(path), str(path.relative_to(folder)))
    above = [parent for parent in (path, *path.parents) if parent in _names_of_setup]
    if not above:
        return type(path), (str(path),)
    return _at_setup, (type(path), str(path), {_names_of_setup[item]: str(item) for item in above})


def _at_setup(kind: type[PurePath], path: str, above: dict[str, str]) -> PurePath:
    for name, before in above.items():
        now = _of_setup.get(name)
        if now is not None and _exists(now) and not _exists(Path(before)):
            return kind(now, PurePath(path).relative_to(before))
    return kind(path)


def _exists(path: PurePath) -> bool:
    try:
        return Path(path).exists()
    except OSError:
        # Of another user, or on a file system that is gone.
        return False


def _below(kind: type[PurePath], rest: str) -> PurePath:
    folder = program_folder()
    return kind(rest) if folder is None else kind(folder, rest)


REDUCERS: Mapping[type, Callable[[Any], Any]] = {PurePath: _reduced}
"""How paths are pickled."""


_DEVICES = ("cuda", "xpu", "mps")


class Source(NamedTuple):
    """A source of random numbers.

    Attributes:
        read: Gives its state.
        write: Sets its state.
    """

    read: Callable[[], bytes]
    write: Callable[[bytes], None]


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's own generators, of all devices in use.

    What torch.compile draws for dropout comes from these, too.
    """
    states: dict[str, Any] = {name: source.read() for name, source in host_sources().items()}
    for device in _DEVICES:
        module = getattr(torch, device)
        # Only where random numbers may have been drawn.
        if device == "mps":
            drawn = [module.get_rng_state()] if torch.backends.mps.is_available() else None
        else:
            in_use = module.is_available() and module.is_initialized()
            drawn = module.get_rng_state_all() if in_use else None
        if drawn is not None:
            states[device] = [_bytes_of(tensor) for tensor in drawn]
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set what `random_states` gave.

    Raises:
        AutosaveError: When a kind of device is not here that the states are of.
    """
    for name, source in host_sources().items():
        source.write(states[name])
    for device in (device for device in _DEVICES if device in states):
        module = torch.backends.mps if device == "mps" else getattr(torch, device)
        if not module.is_available():
            raise AutosaveError(
                f"the program was saved with {device} devices in use, and there is none here; "
                "continue where there is one, or begin anew with another save directory"
            )
        drawn = [_tensor_of(state) for state in states[device]]
        if device == "mps":
            torch.mps.set_rng_state(drawn[0])
            continue
        # A program that uses one device may continue where there are fewer of them.
        for number, state in enumerate(drawn[: module.device_count()]):
            module.set_rng_state(state, number)


_GENERATORS: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    random.Random: (lambda own: own.getstate(), lambda own, state: own.setstate(state)),
    np.random.RandomState: (
        lambda own: own.get_state(legacy=False), lambda own, state: own.set_state(state),
    ),
    np.random.Generator: (
        lambda own: own.bit_generator.state,
        lambda own, state: setattr(own.bit_generator, "state", state),
    ),
}  # fmt: skip


def host_sources() -> dict[str, Source]:
    """Python's, NumPy's and torch's own generators of the host."""
    own = {
        "python": random._inst,
        "numpy": np.random.mtrand._rand,
        "torch": torch.default_generator,
    }
    found = {name: source_of(generator) for name, generator in own.items()}
    return {name: source for name, source in found.items() if source is not None}


def source_of(value: Any) -> Source | None:
    """The source that an object is; None for any other object."""
    if isinstance(value, torch.Generator):

        def write(state: bytes) -> None:
            value.set_state(_tensor_of(state))

        return Source(lambda: _bytes_of(value.get_state()), write)
    found = next((pair for kind, pair in _GENERATORS.items() if isinstance(value, kind)), None)
    if found is None:
        return None
    get, put = found
    return Source(lambda: pickle.dumps(get(value)), lambda state: put(value, pickle.loads(state)))


def _bytes_of(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor_of(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)

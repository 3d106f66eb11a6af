"""Torch's switches that concern the whole process, as far as a program has set them in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


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
    "gradients": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "anomalies": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    "cudnn": _attribute(torch.backends.cudnn, "enabled"),
    "cudnn benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "cudnn deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "flash attention": (
        torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp,
    ),
    "memory efficient attention": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "plain attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
}  # fmt: skip


def switches() -> dict[str, Any]:
    """How all of them are set."""
    return {name: read() for name, (read, _) in _SWITCHES.items()}


def changed(before: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are set in another way than `before`; a machine's own settings are not among them.

    Args:
        before: What `switches` gave when set-up was done.
    """
    return {name: now for name, now in switches().items() if now != before[name]}


def set_switches(values: Mapping[str, Any]) -> None:
    """Set what `changed` gave."""
    for name, value in values.items():
        read, write = _SWITCHES[name]
        if read() != value:
            write(value)

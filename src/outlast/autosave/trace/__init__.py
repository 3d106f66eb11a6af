"""State of a program, found and proved: what a step reads, writes and leaves behind."""

from outlast.autosave.trace.dispatch import Access, Accesses, traced_step
from outlast.autosave.trace.plan import find_state
from outlast.autosave.trace.state import StatePlan, TensorState

__all__ = ["Access", "Accesses", "StatePlan", "TensorState", "find_state", "traced_step"]

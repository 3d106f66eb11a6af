"""Objects that answer for attributes which they do not have come back as they were."""

from __future__ import annotations

import pytest
from rerun import check_every_step

PROGRAM = """
from collections import defaultdict
class Weights:
    value = 1
    def backward(self): self.value = self.value * 7 % 1009
    def step(self): self.value += 1
class Meters:
    def __init__(self): self.meters = defaultdict(list)
    def __getattr__(self, name):
        if name in self.meters:
            return self.meters[name]
        raise AttributeError(name)
class Both(Meters, dict):
    __slots__ = ("extra",)
    def __init__(self): Meters.__init__(self); self.extra = 0
class Late:
    def __init__(self): self.inner = Meters()
    def __getattr__(self, name): return getattr(self.inner, name)
weights = Weights()
def train(epoch):
    meters, both, late = Meters(), Both(), Late()
    late.again = late
    for step in range(3):
        weights.backward(); weights.step()
        meters.meters["value"].append(weights.value)
        both["step"] = step
        both.extra += weights.value
        late.inner.meters["step"].append(step)
    assert late.again is late
    return meters.value, both, both.extra, late.step
for epoch in range(3):
    done = train(epoch)
print(done, weights.value)
"""


@pytest.mark.slow
def test_an_object_is_read_back_without_being_asked_for_what_it_lacks(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    assert check_every_step(script) > 8

"""To which library `outlast run` leaves a script: by what the script makes, not what it imports."""

import pytest
from running import outlast

from outlast.autosave.libraries import read_and_rewrite, read_training
from outlast.errors import AutosaveError

HUGGING_FACE, LIGHTNING = "Hugging Face's Trainer", "Lightning's Trainer"

TWO_WAYS = """
import torch
from transformers import AutoModel
model = AutoModel.from_pretrained("x")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.train()

def inner():
    for _ in range(3):
        model(torch.ones(1)).sum().backward()
        optimizer.step()

for _ in range(2):
    model(torch.ones(1)).sum().backward()
    optimizer.step()
    inner()
inner()
"""
IN_A_LIST = """
import torch
from transformers import AutoModel
model = AutoModel.from_pretrained("x")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.train()

def step():
    model(torch.ones(1)).sum().backward()
    optimizer.step()

steps = [step() for _ in range(5)]
"""
BOTH_IMPORTED = """
import lightning.pytorch as pl
from transformers import AutoModel, Trainer

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = AutoModel.from_pretrained("x")
        self.encoder.train()

    def of(self, trainer: Trainer) -> Trainer:
        assert not isinstance(trainer, Trainer)

trainer = pl.Trainer(max_epochs=1)
trainer.fit(Net())
"""
MADE = {
    "imported by name": (
        "from transformers import Trainer as T\nt = T(model=None)\nt.train()",
        HUGGING_FACE,
    ),
    "derived from": (
        "import transformers\nclass Mine(transformers.Trainer): pass\nMine().train()",
        HUGGING_FACE,
    ),
    "of TRL": ("from trl import SFTTrainer\nSFTTrainer('x').train()", HUGGING_FACE),
    "chosen": (
        "from trl import GRPOTrainer, SFTTrainer\nfor T in (GRPOTrainer, SFTTrainer): T().train()",
        HUGGING_FACE,
    ),
    "everything imported": ("from transformers import *\nTrainer().train()", HUGGING_FACE),
    "of Lightning": ("from lightning import Trainer\nTrainer().fit(None)", LIGHTNING),
    "under Lightning's short name": ("import lightning as L\nL.Trainer().fit(None)", LIGHTNING),
    "by a full name": (
        "import lightning.pytorch\nlightning.pytorch.Trainer().fit(None)",
        LIGHTNING,
    ),
    "by Lightning's command line": (
        "from lightning.pytorch.cli import LightningCLI\nLightningCLI(run=False).trainer.fit(None)",
        LIGHTNING,
    ),
    "where another library is imported": (BOTH_IMPORTED, LIGHTNING),
}


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("way", MADE)
def test_the_library_whose_trainer_is_made_trains(written, way):
    text, name = MADE[way]
    _, library = read_and_rewrite(written(text))
    assert library is not None
    assert library.name == name


@pytest.mark.parametrize("read", [read_and_rewrite, read_training])
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (TWO_WAYS, "two training loops conflict"),
        # Nothing but a library that is imported tells this from one that a library trains.
        (IN_A_LIST, "no training loop was found"),
        (TWO_WAYS + "from transformers import Trainer\nTrainer().train()\n", "loops conflict"),
        (
            "import transformers\nt: transformers.Trainer = make()\nt.train()\n",
            "no training loop was found",
        ),
        ("from transformers import Trainer\nTrainer().evaluate()\n", "no training loop was found"),
        (
            "from pytorch_lightning import Trainer\nTrainer().fit(None)\n",
            "imports pytorch_lightning, which is not followed",
        ),
        (
            BOTH_IMPORTED + "Trainer().train()\n",
            "has Hugging Face's Trainer and Lightning's Trainer, and one library at a time",
        ),
    ],
)
def test_what_no_library_trains_is_refused_with_its_own_sentence(written, read, text, sentence):
    with pytest.raises(AutosaveError, match=sentence):
        read(written(text))


@pytest.mark.distributed
def test_training_that_the_library_does_not_do_is_warned_of_when_it_begins(written):
    pytest.importorskip("transformers")
    script = written("""
import torch
from transformers import Trainer

def by_library(model):
    Trainer(model).train()

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    model(torch.ones(2)).sum().backward()
    optimizer.step()

print("BEGUN", flush=True)
steps = [step() for _ in range(5)]
print("ENDED", flush=True)
""")
    ended = outlast("run", script)
    assert ended.code == 0, ended.said
    early = ended.said.partition("BEGUN")[2].partition("ENDED")[0]
    assert early.count("warning: an optimizer steps before a training by Hugging Face") == 1
    assert "warning: the script ended without a training by Hugging Face's" in ended.said
    # It is no finished run, which another start would refuse to do again.
    text = script.read_text().replace(
        "    optimizer.step()",
        "    torch.compile(optimizer.step, backend='eager')()",
    )
    script.write_text(text)
    ended = outlast("run", script)
    assert ended.code == 0, ended.said
    assert ended.said.count("warning: an optimizer steps before a training by Hugging Face") == 1

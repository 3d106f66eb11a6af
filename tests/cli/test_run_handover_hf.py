"""Unmodified scripts of Hugging Face's Trainer under `outlast run`, killed and started again."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from running import TORCHRUN, outlast, plain

pytest.importorskip("transformers")
pytestmark = [pytest.mark.distributed, pytest.mark.supports("transformers", "checkpoint", "resume")]

SCRIPT = '''
import os
import signal
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

HERE = Path(__file__).parent


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


class Reached(TrainerCallback):
    """Does what the file `plan` says for a step, once."""

    def on_step_end(self, args, state, control, **_):
        plan = HERE / "plan"
        if plan.exists() and args.process_index == 0:
            at, what = plan.read_text().split()
            if state.global_step == int(at):
                plan.unlink()
                os.kill(os.getpid(), getattr(signal, what))


def main():
    torch.manual_seed(3)
    data = [{"x": torch.randn(6), "labels": torch.randn(1)} for _ in range(32)]
    arguments = TrainingArguments(
        output_dir=str(HERE / "out"), num_train_epochs=2, per_device_train_batch_size=4,
        learning_rate=0.01, save_strategy="no", logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(Net(), arguments, train_dataset=data, callbacks=[Reached()])
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    torch.save({"model": trainer.model.state_dict(), "losses": losses}, HERE / "result.pt")


if __name__ == "__main__":
    main()
'''
"""Trains for 8 steps an epoch."""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_script_killed_and_stopped_ends_with_the_weights_of_plain_python(script):
    folder = script.parent
    ended = plain(script)
    assert ended.code == 0, ended.said
    expected = torch.load(folder / "result.pt")
    (folder / "result.pt").unlink()

    command = ("run", "--every", 3, script)
    (folder / "plan").write_text("8 SIGKILL")
    ended = outlast(*command)
    assert ended.code == -signal.SIGKILL, ended.said
    (folder / "plan").write_text("11 SIGTERM")
    ended = outlast(*command)
    assert ended.code == 3, ended.said
    assert not (folder / "plan").exists()
    script.write_text(SCRIPT + "\n# changed\n")
    ended = outlast(*command)
    assert ended.code == 2, ended.said
    assert "+# changed" in ended.said
    script.write_text(SCRIPT)
    ended = outlast(*command)
    assert ended.code == 0, ended.said
    assert "Hugging Face's Trainer trains this script" in ended.said
    assert "finished after 16 steps" in ended.said

    found = torch.load(folder / "result.pt")
    assert found["losses"] == expected["losses"]
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    ended = outlast(*command)
    assert ended.code == 0
    assert "this run has finished" in ended.said
    ended = outlast("run", "--fresh", script)
    assert ended.code == 2, ended.said
    assert "out/checkpoints has the checkpoints of another run" in ended.said


def test_explain_says_who_trains(script):
    ended = outlast("run", "--explain", script)
    assert ended.code == 0, ended.said
    assert "is trained by Hugging Face's Trainer" in ended.said
    assert not (script.parent / ".outlast").exists()
    ended = outlast("autosave", "check", script)
    assert ended.code == 2, ended.said
    assert "there is no state of the script's own to look at" in ended.said


def on_two_ranks(*command):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240.0,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout


def test_ranks_stop_together_and_go_on(script):
    text = SCRIPT.replace('HERE / "result.pt"', 'HERE / f"result{arguments.process_index}.pt"')
    script.write_text(text)
    results = [script.parent / f"result{rank}.pt" for rank in (0, 1)]
    code, said = on_two_ranks(*TORCHRUN, script)
    assert code == 0, said
    expected = [torch.load(each)["model"] for each in results]
    for each in results:
        each.unlink()
    (script.parent / "plan").write_text("3 SIGTERM")
    command = ("-m", "outlast", "run", "--nproc=2", "--every=90s", script)
    code, said = on_two_ranks(*command)
    assert code == 3, said
    code, said = on_two_ranks(*command)
    assert code == 0, said
    assert "finished after 8 steps" in said
    for each, model in zip(results, expected, strict=True):
        found = torch.load(each)["model"]
        assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


def test_a_run_that_begins_from_a_named_checkpoint_goes_on_from_its_own(script):
    folder = script.parent
    text = SCRIPT.replace(
        '        plan = HERE / "plan"\n',
        '        (HERE / "steps").open("a").write(f"{state.global_step} ")\n'
        '        plan = HERE / "plan"\n',
    )
    saving = text.replace('save_strategy="no"', 'save_strategy="steps", save_steps=4')
    script.write_text(saving.replace('"out"', '"base"'))
    ended = plain(script)
    assert ended.code == 0, ended.said
    (folder / "steps").unlink()
    named = 'trainer.train(str(HERE / "base" / "checkpoint-4"))'
    script.write_text(text.replace("trainer.train()", named))
    (folder / "plan").write_text("7 SIGTERM")
    ended = outlast("run", script)
    assert ended.code == 3, ended.said
    ended = outlast("run", script)
    assert ended.code == 0, ended.said
    assert (folder / "steps").read_text().split() == [str(step) for step in range(5, 17)]


def test_a_second_training_into_one_directory_is_refused(script):
    # It would continue from the end of the first, and train nothing.
    text = script.read_text().replace(
        "    trainer.train()\n", "    trainer.train()\n    trainer.train()\n"
    )
    script.write_text(text)
    ended = outlast("run", script)
    assert ended.code == 2, ended.said
    assert "is used by a second training of this script" in ended.said
    assert "Traceback" not in ended.said
    assert not (script.parent / "result.pt").exists()

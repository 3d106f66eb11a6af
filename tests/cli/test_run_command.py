"""`outlast run` as a person uses it: what it says, refuses and leaves behind."""

import pytest
import torch
from running import SCRIPT, outlast, plain

pytestmark = pytest.mark.distributed


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def stopped(script, *arguments, at=8):
    (script.parent / "plan").write_text(f"{at} SIGTERM")
    ended = outlast("run", *arguments)
    assert ended.code == 3, ended.said


def test_finished_run_says_so_and_starts_anew_when_asked(script):
    assert outlast("run", script).code == 0
    (script.parent / "result0.pt").unlink()
    ended = outlast("run", script)
    assert ended.code == 0
    assert "this run has finished" in ended.said
    assert "--fresh" in ended.said
    assert not (script.parent / "result0.pt").exists(), ended.said
    ended = outlast("run", "--fresh", script)
    assert ended.code == 0
    assert "moved the earlier run to" in ended.said
    assert (script.parent / "result0.pt").exists()
    folders = sorted(each.name for each in (script.parent / ".outlast").iterdir())
    assert len(folders) == 2
    assert folders[1] == f"{folders[0]}.old1"


def test_changed_script_is_refused_with_the_difference_and_goes_on_when_accepted(script):
    stopped(script, script)
    script.write_text(script.read_text().replace("best = min(best", "best = max(best"))
    ended = outlast("run", script)
    assert ended.code == 2
    assert "-        best = min(best" in ended.said
    assert "+        best = max(best" in ended.said
    assert "--accept-changes" in ended.said
    ended = outlast("run", "--accept-changes", script)
    assert ended.code == 0, ended.said
    assert "resumed at step" in ended.said
    result = torch.load(script.parent / "result0.pt")
    epochs = [sum(result["losses"][begun : begun + 6]) for begun in (0, 6, 12)]
    assert result["best"] == max(epochs)


def test_other_arguments_are_another_run_unless_they_share_a_folder(script, tmp_path):
    folder = tmp_path / "versions"
    stopped(script, "--directory", folder, script, "--lr", "0.1")
    ended = outlast("run", "--directory", folder, script, "--lr", "0.2")
    assert ended.code == 2
    assert "- arguments: --lr 0.1" in ended.said
    assert "+ arguments: --lr 0.2" in ended.said
    ended = outlast("run", script, "--lr", "0.2")
    assert ended.code == 0, ended.said
    assert "resumed" not in ended.said


@pytest.mark.smoke
def test_damaged_newest_version_falls_back_to_the_one_before(script):
    expected = plain(script)
    assert expected.code == 0
    expected = torch.load(script.parent / "result0.pt")
    stopped(script, "--every", 2, script, at=11)
    versions = sorted((script.parent / ".outlast").glob("*/checkpoints/step-*"))
    assert len(versions) >= 2
    for file in versions[-1].iterdir():
        if file.suffix != ".json" and file.stat().st_size > 4096:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
    ended = outlast("run", script)
    assert ended.code == 0, ended.said
    assert "passed over: " in ended.said
    found = torch.load(script.parent / "result0.pt")
    assert found["losses"] == expected["losses"]


def test_time_limit_saves_and_ends_with_3(script):
    text = script.read_text().replace(
        "    for _ in range(arguments.epochs):", "    for _ in range(10**9):"
    )
    script.write_text(text)
    ended = outlast("run", "--time-limit", "3s", "--every", 5, script)
    assert ended.code == 3, ended.said
    assert "(the time limit); the same command continues from there" in ended.said


def test_error_of_the_script_is_its_own_and_begins_with_its_first_line(script):
    script.write_text(script.read_text().replace("schedule.step()", "open('missing.csv')"))
    ended = outlast("run", script)
    assert ended.code == 1
    lines = ended.said.splitlines()
    assert lines[-1] == "FileNotFoundError: [Errno 2] No such file or directory: 'missing.csv'"
    first = lines.index("Traceback (most recent call last):") + 1
    assert lines[first].startswith(f'  File "{script}", line ')
    assert lines[first].endswith("in <module>")


def test_exit_code_and_arguments_are_those_of_the_script(script):
    script.write_text(
        script.read_text().replace("    main()", "    import sys\n    main()\n    sys.exit(7)")
    )
    ended = outlast("run", script, "--epochs", "1", "--lr=0.5")
    assert ended.code == 7, ended.said
    assert "finished" not in ended.said
    assert len(torch.load(script.parent / "result0.pt")["losses"]) == 6


def test_explain_prints_the_loops_and_runs_nothing(script):
    ended = outlast("run", "--explain", script)
    assert ended.code == 0, ended.said
    assert "for features, targets in loader:" in ended.said
    assert "+++ " in ended.said
    assert not (script.parent / ".outlast").exists()
    assert not (script.parent / "result0.pt").exists(), ended.said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing.py"], "there is no script"),
        (["."], "is a folder"),
        (["--every", "sometimes", "train.py"], "--every sometimes is neither"),
        (["--time-limit", "soon", "train.py"], "--time-limit soon is no length of time"),
        (["--loop", "train.py:1", "train.py"], "no `for` or `while` begins there"),
        (["broken.py"], "broken.py, line 1"),
        (["empty.py"], "no training loop was found"),
    ],
)
def test_wrong_input_is_one_sentence(script, monkeypatch, arguments, sentence):
    folder = script.parent
    monkeypatch.chdir(folder)
    (folder / "broken.py").write_text("for in x:\n")
    (folder / "empty.py").write_text("print('nothing to train')\n")
    ended = outlast("run", *arguments)
    assert ended.code == 2, ended.said
    assert sentence in ended.said
    assert ended.said.startswith("outlast: ")
    assert len(ended.said.splitlines()) == 1


def test_script_that_catches_everything_cannot_train_on_after_a_refusal(script):
    text = script.read_text().replace(
        "        train_epoch(model, loader, optimizer, losses)",
        "        try:\n"
        "            train_epoch(model, loader, optimizer, losses)\n"
        "        except Exception as error:\n"
        "            print('caught', error)",
    )
    text = text.replace("        begun = len(losses)", "        begun, losses.x = len(losses), 0")
    text = text.replace("    losses = []", "    losses = type('Losses', (list,), {})()")
    text = text.replace(
        "        losses.append(loss.item())",
        "        losses.append(loss.item())\n        losses.socket = __import__('socket').socket()",
    )
    script.write_text(text)
    ended = outlast("run", "--every", 2, script)
    assert ended.code == 2, ended.said
    assert "cannot be saved" in ended.said
    assert "the script caught this error: let OutlastError pass" in ended.said
    assert not (script.parent / "result0.pt").exists(), ended.said


def test_script_that_does_not_train_this_time_is_told_and_runs_again(script):
    for _ in range(2):
        ended = outlast("run", script, "--epochs", 0)
        assert ended.code == 0, ended.said
        assert "without a step of the training loops" in ended.said
    assert (script.parent / "result0.pt").exists()


def test_first_interrupt_says_how_to_end_and_the_second_leaves_no_false_word(script):
    text = script.read_text().replace(
        "            os.kill(os.getpid(), getattr(signal, what))",
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "            os.kill(os.getpid(), signal.SIGINT)",
    )
    text = text.replace(
        "        train_epoch(model, loader, optimizer, losses)",
        "        try:\n"
        "            train_epoch(model, loader, optimizer, losses)\n"
        "        except KeyboardInterrupt:\n"
        "            return",
    )
    script.write_text(text)
    (script.parent / "plan").write_text("8 SIGINT")
    ended = outlast("run", "--every", 2, script)
    assert "outlast: saving at the next step, then it ends; Ctrl-C again ends it" in ended.said
    assert ended.code == 3, ended.said
    assert "interrupted after 7 steps; the same command continues" in ended.said
    script.write_text(text.replace("            return", "            raise"))
    ended = outlast("run", "--accept-changes", script)
    assert ended.code == 0, ended.said
    assert "resumed at step" in ended.said


def test_options_behind_the_script_are_told_to_be_the_scripts(script):
    script.write_text(
        script.read_text().replace("parser.parse_args()", "parser.parse_known_args()[0]")
    )
    ended = outlast("run", script, "--epochs=0", "--every=5", "--lr", "1")
    assert ended.code == 0, ended.said
    assert f"note: --every stands behind {script} and so is for the script" in ended.said
    assert f"outlast run --every ... {script}" in ended.said
    assert "--lr" not in ended.said.partition("note:")[2].splitlines()[0]


def test_save_at_the_end_of_an_epoch_is_durable_before_what_follows(script):
    # Late copies have been seen to be right by then: the weights of the third save lie still.
    wait = (
        "        import time\n"
        "        end = time.monotonic() + 60\n"
        "        while not list(HERE.glob(\n"
        "            f'.outlast/*/checkpoints/step-*{len(losses)}-*/version.json'\n"
        "        )):\n"
        "            assert time.monotonic() < end, 'the save waits for the next step'\n"
        "            time.sleep(0.01)\n"
    )
    text = script.read_text().replace(
        "        schedule.step()\n", f"{wait}        schedule.step()\n"
    )
    script.write_text(text)
    ended = outlast("run", "--every", 6, script)
    assert ended.code == 0, ended.said


def test_numbers_that_differ_end_a_script_that_catches_everything(script):
    text = script.read_text().replace(
        "        train_epoch(model, loader, optimizer, losses)",
        "        try:\n"
        "            train_epoch(model, loader, optimizer, losses)\n"
        "        except Exception as error:\n"
        "            print('caught', error)",
    )
    # What it depends on is outside of the program.
    text = text.replace(
        "        loss.backward()",
        "        (loss * float((HERE / 'scale').read_text())).backward()",
    )
    script.write_text(text)
    (script.parent / "scale").write_text("1.0")
    (script.parent / "plan").write_text("11 SIGKILL")
    assert outlast("run", "--every", 4, script).code == -9
    (script.parent / "scale").write_text("2.0")
    ended = outlast("run", "--every", 4, script)
    assert ended.code == 2, ended.said
    assert "caught" in ended.said
    (said,) = (
        line
        for line in ended.said.splitlines()
        if line.startswith("outlast: ") and "differs" in line
    )
    assert "the script caught this error" in said
    assert not (script.parent / "result0.pt").exists(), ended.said

"""Signals under `outlast run`: what they do before training, in its middle, and in children."""

import os
import signal

import pytest

from outlast.errors import EXIT_TO_BE_CONTINUED
from outlast.runtime.stop import Stop


@pytest.fixture
def stop():
    with Stop() as made:
        yield made


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signal_asks_for_a_stop_once_training_has_begun(stop, number):
    stop.training_begins()
    assert stop() == ""
    os.kill(os.getpid(), number)
    assert stop() == stop.signalled == signal.Signals(number).name


def test_second_interrupt_ends_at_once_as_the_first_one_says(stop, capfd):
    stop.training_begins()
    os.kill(os.getpid(), signal.SIGINT)
    assert "saving at the next step" in (said := capfd.readouterr().err)
    assert "Ctrl-C again ends it at once" in said
    assert not stop.interrupted
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.interrupted


def test_before_training_there_is_nothing_to_save(stop, capsys):
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == EXIT_TO_BE_CONTINUED
    assert "SIGTERM before the first training step" in capsys.readouterr().err


def test_handlers_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with Stop():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_forked_worker_outlives_an_interrupt_and_ends_by_sigterm(stop):
    stop.training_begins()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert stop() == ""

"""A stop signal sets a flag and nothing else."""

import os
import signal

import pytest

from outlast.runtime.stop import STOP_SIGNALS, StopFlag


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_is_noted_and_the_old_handler_comes_back(number):
    before = signal.getsignal(number)
    with StopFlag() as stop:
        assert stop.reason is None
        os.kill(os.getpid(), number)
        assert stop.reason == signal.Signals(number).name
    assert signal.getsignal(number) == before


def test_a_second_interrupt_ends_at_once():
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_two_warnings_of_a_scheduler_are_one_stop():
    with StopFlag() as stop:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.reason == "SIGINT"


def test_the_old_handlers_come_back_after_an_error():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(RuntimeError), StopFlag():
        raise RuntimeError
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before

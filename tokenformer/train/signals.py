"""Signals that ask a run to stop: the loop ends after its step, and the run saves."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last is what Slurm is asked to send before preemption


@contextlib.contextmanager
def caught_signals(ask: Callable[[int], None], once: bool) -> Iterator[None]:
    """Call `ask` with the number of a signal. With `once`, a second signal ends the process as usual.

    A rank of many gets each signal several times, from the launcher and from Slurm.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, _frame: object) -> None:
        ask(number)
        if once:
            restore()

    for number in SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore()

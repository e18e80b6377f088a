"""Signals that the launcher gets and passes on."""

import contextlib
import selectors
import signal
import socket

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handle(
    selector: selectors.BaseSelector, received: list[signal.Signals], stack: contextlib.ExitStack
) -> None:
    """Wakes the selector at every signal, and adds signals for the processes to `received`."""
    wake, written = socket.socketpair()
    for sock in (wake, written):
        sock.setblocking(False)
        stack.enter_context(sock)
    selector.register(wake, selectors.EVENT_READ, lambda: wake.recv(4096))
    stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(written.fileno()))

    def receive(number: int, _frame: object) -> None:
        if number != signal.SIGCHLD:
            received.append(signal.Signals(number))

    for number in (signal.SIGCHLD, *_PASSED_ON):
        if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            stack.callback(signal.signal, number, signal.signal(number, receive))

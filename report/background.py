"""Loggers that wait for a network run in a thread of their own, so that no step waits with them."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import Any

from report.formatting import excerpt
from report.logger import Logger, RunInfo

FINISH_SECONDS = 60.0  # that the end of a run waits for what is still on its way


def in_background(kind: Any) -> type[Logger]:
    """A logger that calls another one in a thread, in the same order.

    What the other raises or has to say is reported by the next call on the run's own thread. At the end of the run it
    is given FINISH_SECONDS; what it has not sent by then is given up, with a notice.
    """

    class Background(Logger):
        name = kind.name

        @classmethod
        def wanted(cls, settings: dict[str, Any]) -> bool:
            return kind.wanted(settings)

        def start(self, run: RunInfo) -> None:
            self.run, self.inner = run, kind()
            self._calls: queue.SimpleQueue = queue.SimpleQueue()
            self._words: queue.SimpleQueue[tuple[Callable[[str], None], str]] = queue.SimpleQueue()
            self._failed: set[str] = set()
            later = dataclasses.replace(
                run,
                notice=lambda text: self._words.put((run.notice, text)),
                show=lambda text: self._words.put((run.show, text)),
            )
            self.inner.start(later)
            self._thread = threading.Thread(target=self._work, name=f"{kind.name} logger", daemon=True)
            self._thread.start()

        def load_state(self, state: dict[str, Any]) -> None:
            self._later("load_state", state)

        def metrics(self, *arguments: Any) -> None:
            self._later("metrics", *arguments)

        def samples(self, *arguments: Any) -> None:
            self._later("samples", *arguments)

        def state(self) -> dict[str, Any]:
            return self.inner.state()

        def finish(self, ok: bool, message: str | None) -> None:
            self._later("finish", ok, message)
            self._calls.put(None)
            self.wait(FINISH_SECONDS)
            if self._thread.is_alive():
                self.run.notice(
                    f"{kind.name} has not taken everything within {FINISH_SECONDS:.0f} seconds; the run ends without "
                    "it. metrics.jsonl and samples.jsonl have all of it"
                )

        def wait(self, seconds: float) -> None:
            """Until everything so far is done, for so many seconds at most."""
            done = threading.Event()
            self._calls.put(done)
            # After its end the thread takes no more events.
            waited = 0.0
            while self._thread.is_alive() and not done.is_set() and waited < seconds:
                done.wait(0.05)
                waited += 0.05
            self._say()

        def _later(self, method: str, *arguments: Any) -> None:
            self._calls.put((method, arguments))
            self._say()

        def _say(self) -> None:
            """Report what came up in the thread."""
            while True:
                try:
                    say, text = self._words.get_nowait()
                except queue.Empty:
                    return
                say(text)

        def _work(self) -> None:
            while (call := self._calls.get()) is not None:
                if isinstance(call, threading.Event):
                    call.set()
                    continue
                method, arguments = call
                try:
                    getattr(self.inner, method)(*arguments)
                except Exception as error:
                    if method not in self._failed:
                        self._failed.add(method)
                        words = excerpt(str(error), 300)
                        self._words.put(
                            (
                                self.run.notice,
                                f"{kind.name} failed to {ACTIONS[method]}: {type(error).__name__}: {words}; training "
                                "goes on",
                            )
                        )

    return Background


ACTIONS = {"metrics": "log", "samples": "log samples", "load_state": "resume", "finish": "finish"}

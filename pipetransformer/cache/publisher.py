"""Completes stores for later runs, in a thread beside the training."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Event, Thread
from typing import Any

from pipetransformer.cache.kept import Held
from pipetransformer.errors import UserError


class Publisher:
    """Syncs and publishes entries, one after another. A disk that fails costs the entry, never the job."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._cancelled = Event()

    def publish(self, held: Held, *, about: Mapping[str, Any]) -> None:
        """Begins to complete an entry whose stores are filled, once those before it are complete."""
        given = (held, about, self._thread)
        self._thread = Thread(target=self._run, args=given, name="cache-publisher", daemon=True)
        self._thread.start()

    def _run(self, held: Held, about: Mapping[str, Any], before: Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            is_published = held.publish(about, is_cancelled=self._cancelled.is_set)
        except (OSError, UserError):
            is_published = False
        if not is_published:
            held.close()  # what is mapped can still be read here

    def wait(self) -> None:
        """Returns when all entries are complete."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self, *, is_cancelled: bool) -> None:
        """Waits, or gives the entry up. May be called twice."""
        if is_cancelled:
            self._cancelled.set()
        self.wait()

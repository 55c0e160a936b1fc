"""Tells the user once that loops are being compiled, which takes a minute or two."""

from __future__ import annotations

import logging
from typing import Any

from numba.core import event

log = logging.getLogger(__name__)

_OURS = __name__.partition(".")[0]


class Teller(event.Listener):
    """Listens to Numba. Loops that are already on disk are not compiled, and not mentioned."""

    told = False

    def on_start(self, event: Any) -> None:
        function = getattr((event.data or {}).get("dispatcher"), "py_func", None)
        if not self.told and str(getattr(function, "__module__", "")).partition(".")[0] == _OURS:
            self.told = True
            log.info("compiling the simulator, once on this machine: a minute or two")

    def on_end(self, event: Any) -> None: ...


teller = Teller()
event.register("numba:compile", teller)  # type: ignore[no-untyped-call]

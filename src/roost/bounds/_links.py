"""Links in the solver's model: each bus carries one transfer at a time, as its sender's ops finish.

What one device sends is exactly as in the simulator. A parameter is fetched once for each device,
either at the start, before anything is sent, or once an op has finished that used another fetched
one, since it is the window that decides; what several senders share is in the order of their
finish, give or take a tick. That what crosses keeps both ends busy is left out. So with those the
least step of the model may be below that of every placement, and is never above.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from roost.bounds._model import SolverModel
from roost.core.graph import UPDATE

# Of transfers that may meet on a bus: of more only those get an order that need one.
MOST_PAIRS = 2_000


@dataclass(frozen=True, eq=False)
class Transfer:
    """A possible transfer."""

    producer: int  # the op whose finish issues it; -1 for a fetch
    source: int  # device
    begin: Any
    size: Any  # ticks, the rest of the bus after it included
    present: Any  # literal
    home: bool = False
    at_once: Any = None  # literal: a fetch that is issued at the start


class Links:
    """Adds transfers to a model, instead of delays."""

    def __init__(self, model: SolverModel) -> None:
        self.model = model
        self.cp = model.cp
        self.graph = model.graph
        self.cluster = model.cluster
        self.on_bus: dict[int, list[Transfer]] = {}
        consumers = self.graph.consumer_lists()
        for op in model.begin:
            for source in self.graph.inputs_of(op).tolist():
                if not self.graph.is_parameter[source]:
                    model.follows(source, op)
            if consumers[op]:
                self._broadcast(op, consumers[op]) if self.cluster.broadcast else self._send(
                    op, consumers[op]
                )
        for parameter in np.flatnonzero(self.graph.is_parameter).tolist():
            self._fetch(parameter, consumers[parameter])
            for update in (op for op in consumers[parameter] if self.graph.phase[op] == UPDATE):
                self._home(parameter, update)
        self._carry_one_at_a_time()

    def _send(self, op: int, consumers: list[int]) -> None:
        """The output of an op, once to each device where a consumer is."""
        for d in self.model.devices:
            readers = self._readers(op, consumers, d)
            if readers:
                begin = self._begin(op, f"send {op} to {d}")
                for e in (e for e in self.model.where(op) if e != d):
                    present = self._present(op, e, readers, d)
                    self._add(Transfer(op, e, begin, self._size(e, d, op), present), e, d)
                    self._wait(
                        readers, begin, self.model.ticks(self.model.takes(e, d, op)), op, e, d
                    )

    def _broadcast(self, op: int, consumers: list[int]) -> None:
        """The output of an op, once to all devices together, for as long as to the farthest."""
        model = self.model
        for e in model.where(op):
            readers = {d: self._readers(op, consumers, d) for d in model.devices if d != e}
            readers = {d: found for d, found in readers.items() if found}
            if not readers:
                continue
            begin = self._begin(op, f"send {op} from {e}")
            present = self.cp.new_bool_var("")
            longest = max(model.ticks(model.takes(e, d, op)) for d in readers)
            lasts = self.cp.new_int_var(0, min(longest, model.most), "")
            for d, ops in readers.items():
                for reader in ops:
                    apart = [model.on(op, e), model.on(reader, d)]
                    self.cp.add_bool_or([~apart[0], ~apart[1], present])
                    self.cp.add(lasts >= model.ticks(model.takes(e, d, op))).only_enforce_if(apart)
                    self.cp.add(model.begin[reader] >= begin + lasts).only_enforce_if(apart)
            d = next(iter(readers))
            rest = model.ticks(float(self.cluster.bus_gap[self.cluster.bus[e, d]]))
            self._add(Transfer(op, e, begin, lasts + rest, present), e, d)

    def _fetch(self, parameter: int, consumers: list[int]) -> None:
        for d in self.model.devices:
            readers = self._readers(parameter, consumers, d)
            if readers:
                begin = self.cp.new_int_var(0, self.model.most, f"fetch {parameter} to {d}")
                at_once = self._at_once(parameter, d, begin)
                for home in (home for home in self.model.where(parameter) if home != d):
                    present = self._present(parameter, home, readers, d)
                    size = self._size(home, d, parameter)
                    self._add(Transfer(-1, home, begin, size, present, at_once=at_once), home, d)
                    takes = self.model.ticks(self.model.takes(home, d, parameter))
                    self._wait(readers, begin, takes, parameter, home, d)

    def _at_once(self, parameter: int, d: int, begin: Any) -> Any:
        """A literal: the fetch is issued at the start, and not after an op there is done with
        another fetched one."""
        at_once = self.cp.new_bool_var("")
        model = self.model
        others = [p for p in np.flatnonzero(self.graph.is_parameter).tolist() if p != parameter]
        users = {
            op
            for other in others
            for op in self.graph.consumers_of(other).tolist()
            if model.open[op, d]
        }
        witnesses = []
        for op in sorted(users):
            seen = self.cp.new_bool_var("")
            done = model.begin[op] + model.ticks(model.relaxed.time[op, d])
            self.cp.add(begin >= done).only_enforce_if(seen)
            self.cp.add_implication(seen, model.on(op, d))
            read = [
                p
                for p in self.graph.inputs_of(op).tolist()
                if self.graph.is_parameter[p] and p != parameter
            ]
            if all(model.open[p, d] for p in read):
                self.cp.add_bool_or([~seen, *(~model.on(p, d) for p in read)])
            witnesses.append(seen)
        self.cp.add_bool_or([at_once, *witnesses])
        return at_once

    def _home(self, parameter: int, update: int) -> None:
        """The new value of a parameter, from its update to where it lives."""
        model = self.model
        if model.relaxed.unit[parameter] == model.relaxed.unit[update]:
            return
        for d in model.where(update):
            for home in (home for home in model.where(parameter) if home != d):
                begin = self._begin(update, f"home {parameter}")
                present = self.cp.new_bool_var("")
                apart = [model.on(update, d), model.on(parameter, home)]
                self.cp.add_bool_or([~apart[0], ~apart[1], present])
                takes = model.ticks(model.takes(d, home, parameter, home=True))
                self.cp.add(model.step >= begin + takes).only_enforce_if(apart)
                size = self._size(d, home, parameter, home=True)
                self._add(Transfer(update, d, begin, size, present, True), d, home)

    def _readers(self, op: int, consumers: list[int], d: int) -> list[int]:
        """The consumers that may be on a device where the op is not."""
        unit = self.model.relaxed.unit
        return [
            reader
            for reader in consumers
            if self.model.open[reader, d] and unit[reader] != unit[op]
        ]

    def _begin(self, op: int, name: str) -> Any:
        """The start of a transfer: after the op that issues it."""
        model = self.model
        begin = self.cp.new_int_var(0, model.most, name)
        done = sum(
            model.ticks(model.relaxed.time[op, d]) * model.on(op, d) for d in model.where(op)
        )
        self.cp.add(begin >= model.begin[op] + done)
        return begin

    def _present(self, op: int, e: int, readers: list[int], d: int) -> Any:
        present = self.cp.new_bool_var("")
        for reader in readers:
            self.cp.add_bool_or([~self.model.on(op, e), ~self.model.on(reader, d), present])
        return present

    def _wait(self, readers: list[int], begin: Any, takes: int, op: int, e: int, d: int) -> None:
        for reader in readers:
            after = self.cp.add(self.model.begin[reader] >= begin + takes)
            after.only_enforce_if(self.model.on(op, e), self.model.on(reader, d))

    def _size(self, e: int, d: int, tensor: int, home: bool = False) -> int:
        rest = float(self.cluster.bus_gap[self.cluster.bus[e, d]])
        return self.model.ticks(self.model.takes(e, d, tensor, home) + rest)

    def _add(self, transfer: Transfer, e: int, d: int) -> None:
        self.on_bus.setdefault(int(self.cluster.bus[e, d]), []).append(transfer)

    def _carry_one_at_a_time(self) -> None:
        for bus, transfers in self.on_bus.items():
            self.cp.add_no_overlap(self._carried(transfer, f"bus {bus}") for transfer in transfers)
        # Literals: whether one op finishes before another.
        self._first: dict[tuple[int, int], Any] = {}
        self._free = [
            pair
            for row in self.on_bus.values()
            for pair in combinations(row, 2)
            if self._ordered(*pair)
        ]
        if len(self._free) <= MOST_PAIRS:
            self._put_in_order(self._free)

    def tighten(self, solver: Any) -> bool:
        """Order the transfers of an answer; return whether any pair had no order yet."""
        there = {
            id(t): solver.boolean_value(t.present) for row in self.on_bus.values() for t in row
        }
        met = {
            _makers(one, other) for one, other in self._free if there[id(one)] and there[id(other)]
        }
        self._put_in_order([pair for pair in self._free if _makers(*pair) in met])
        return bool(met)

    def _put_in_order(self, pairs: list[tuple[Transfer, Transfer]]) -> None:
        for one, other in pairs:
            self._in_order(one, other, self._first)
        done = {(id(one), id(other)) for one, other in pairs}
        self._free = [(one, other) for one, other in self._free if (id(one), id(other)) not in done]

    def _carried(self, transfer: Transfer, name: str) -> Any:
        if isinstance(transfer.size, int):
            return self.cp.new_optional_fixed_size_interval_var(
                transfer.begin, transfer.size, transfer.present, name
            )
        end = self.cp.new_int_var(0, 5 * self.model.most + 5, "")
        return self.cp.new_optional_interval_var(
            transfer.begin, transfer.size, end, transfer.present, name
        )

    def _ordered(self, one: Transfer, other: Transfer) -> bool:
        if one.producer < 0 or other.producer < 0:
            return one.producer != other.producer
        return one.producer != other.producer or (
            one.home != other.home and one.source == other.source
        )

    def _in_order(self, one: Transfer, other: Transfer, first: dict[tuple[int, int], Any]) -> None:
        """Two transfers of different ops go in the order in which these finish; sends before what
        goes home."""
        if one.producer < 0 or other.producer < 0:
            early, late = (one, other) if one.producer < 0 else (other, one)
            after = self.cp.add(late.begin >= early.begin + early.size)
            after.only_enforce_if(one.present, other.present, early.at_once)
            return
        if one.producer == other.producer:
            early, late = (other, one) if one.home else (one, other)
            self.cp.add(late.begin >= early.begin + early.size).only_enforce_if(
                one.present, other.present
            )
            return
        key = (one.producer, other.producer)
        if key not in first and key[::-1] in first:
            key, one, other = key[::-1], other, one
        if key not in first:
            first[key] = self.cp.new_bool_var("")
        literal = first[key]
        begin = self.model.begin
        for early, late, order in ((one, other, literal), (other, one, ~literal)):
            if early.source == late.source:
                before = self._finish(early) <= begin[late.producer]
            else:  # finishes are compared; each of the two roundings may be off by up to a tick
                before = self._finish(early) <= self._finish(late) + 1
            self.cp.add(before).only_enforce_if(early.present, late.present, order)
            self.cp.add(late.begin >= early.begin + early.size).only_enforce_if(
                early.present, late.present, order
            )

    def _finish(self, transfer: Transfer) -> Any:
        time = self.model.relaxed.time
        op = transfer.producer
        return self.model.begin[op] + self.model.ticks(time[op, transfer.source])


def _makers(one: Transfer, other: Transfer) -> frozenset[int]:
    return frozenset((one.producer, other.producer))

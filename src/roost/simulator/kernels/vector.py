"""Sixteen numbers at a time: the few vector operations that the lanes need, as LLVM vectors.

Left to itself the compiler vectorises such loops only sometimes, since it cannot know that the
arrays do not overlap. On a machine with shorter vectors LLVM splits these into what it has. Indices
count numbers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

LANES = 16

_VECTOR = ir.VectorType(ir.DoubleType(), LANES)
_WHOLE = ir.VectorType(ir.IntType(64), LANES)
_INDEX = ir.IntType(32)


def _at(
    context: Any, builder: Any, array_type: Any, array: Any, index: Any, vector: Any = _VECTOR
) -> Any:
    """A pointer to the sixteen numbers from an index on."""
    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _load(builder: Any, pointer: Any) -> Any:
    value = builder.load(pointer)
    value.align = 8  # what numpy promises
    return value


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, pointer).align = 8


def _all(builder: Any, scalar: Any, vector: Any = _VECTOR) -> Any:
    """The same number in every lane."""
    nothing = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(nothing, scalar, ir.Constant(_INDEX, 0))
    return builder.shuffle_vector(
        first, nothing, ir.Constant(ir.VectorType(_INDEX, LANES), [0] * LANES)
    )


def _later(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


@intrinsic
def run_op(
    typing: Any,
    ready: Any,
    op: Any,
    free: Any,
    device: Any,
    ends: Any,
    end: Any,
    step: Any,
    takes: Any,
    gap: Any,
) -> Any:
    """Run an op in every lane: when its device is free and it is ready. Write its end, clear its
    ready time."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ready_at = _at(context, builder, signature.args[0], args[0], args[1])
        free_at = _at(context, builder, signature.args[2], args[2], args[3])
        end_at = _at(context, builder, signature.args[4], args[4], args[5])
        step_at = _at(context, builder, signature.args[6], args[6], ir.Constant(args[1].type, 0))
        begin = _later(builder, _load(builder, ready_at), _load(builder, free_at))
        finish = builder.fadd(begin, _all(builder, args[7]))
        _store(builder, finish, end_at)
        _store(builder, builder.fadd(finish, _all(builder, args[8])), free_at)
        _store(builder, _later(builder, finish, _load(builder, step_at)), step_at)
        _store(builder, ir.Constant(_VECTOR, [0.0] * LANES), ready_at)
        return context.get_dummy_value()

    index = types.uintp
    number = types.float64
    return types.void(ready, index, free, index, ends, index, step, number, number), generate


@intrinsic
def run_busy_op(
    typing: Any,
    ready: Any,
    op: Any,
    free: Any,
    device: Any,
    ends: Any,
    end: Any,
    step: Any,
    takes: Any,
    gap: Any,
    extra: Any,
    after: Any,
) -> Any:
    """The same for an op that takes `extra` longer in each lane, whose device is busy after it.
    Clear the extra."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ready_at = _at(context, builder, signature.args[0], args[0], args[1])
        free_at = _at(context, builder, signature.args[2], args[2], args[3])
        end_at = _at(context, builder, signature.args[4], args[4], args[5])
        step_at = _at(context, builder, signature.args[6], args[6], ir.Constant(args[1].type, 0))
        extra_at = _at(context, builder, signature.args[9], args[9], args[1])
        nothing = ir.Constant(_VECTOR, [0.0] * LANES)
        lasts = builder.fadd(_all(builder, args[7]), _load(builder, extra_at))
        begin = _later(builder, _load(builder, ready_at), _load(builder, free_at))
        finish = builder.fadd(begin, lasts)
        _store(builder, finish, end_at)
        rest = builder.select(
            builder.fcmp_ordered(">", lasts, nothing), _all(builder, args[8]), nothing
        )
        rested = builder.fadd(finish, rest)
        _store(builder, builder.fadd(rested, _all(builder, args[10])), free_at)
        _store(builder, _later(builder, finish, _load(builder, step_at)), step_at)
        _store(builder, nothing, ready_at)
        _store(builder, nothing, extra_at)
        return context.get_dummy_value()

    index = types.uintp
    number = types.float64
    return types.void(
        ready, index, free, index, ends, index, step, number, number, extra, number
    ), generate


@intrinsic
def run_transfer(
    typing: Any,
    arrives: Any,
    source: Any,
    target: Any,
    bus_free: Any,
    bus: Any,
    takes: Any,
    gap: Any,
) -> Any:
    """Send in every lane what has ended at `source`: when the bus is free. Write when it arrives at
    `target`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source_at = _at(context, builder, signature.args[0], args[0], args[1])
        target_at = _at(context, builder, signature.args[0], args[0], args[2])
        bus_at = _at(context, builder, signature.args[3], args[3], args[4])
        begin = _later(builder, _load(builder, source_at), _load(builder, bus_at))
        arrival = builder.fadd(begin, _all(builder, args[5]))
        _store(builder, arrival, target_at)
        _store(builder, builder.fadd(arrival, _all(builder, args[6])), bus_at)
        return context.get_dummy_value()

    index = types.uintp
    number = types.float64
    return types.void(arrives, index, index, bus_free, index, number, number), generate


@intrinsic
def wait_for(typing: Any, ready: Any, op: Any, arrives: Any, device: Any) -> Any:
    """In every lane the op is ready no earlier than this arrival."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ready_at = _at(context, builder, signature.args[0], args[0], args[1])
        arrives_at = _at(context, builder, signature.args[2], args[2], args[3])
        _store(
            builder, _later(builder, _load(builder, arrives_at), _load(builder, ready_at)), ready_at
        )
        return context.get_dummy_value()

    return types.void(ready, types.uintp, arrives, types.uintp), generate


@intrinsic
def take_peak(typing: Any, peak: Any, shift: Any, device: Any, most: Any) -> Any:
    """In every lane the peak of a device is no lower than this many bytes and the lane's shift."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        peak_at = _at(context, builder, signature.args[0], args[0], args[2], _WHOLE)
        shift_at = _at(context, builder, signature.args[1], args[1], args[2], _WHOLE)
        held = builder.add(_all(builder, args[3], _WHOLE), _load(builder, shift_at))
        before = _load(builder, peak_at)
        higher = builder.icmp_signed(">", held, before)
        _store(builder, builder.select(higher, held, before), peak_at)
        return context.get_dummy_value()

    return types.void(peak, shift, types.uintp, types.int64), generate

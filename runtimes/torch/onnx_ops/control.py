"""If, Loop and Scan.

A branch or loop that host values decide is plain Python, unrolled where torch traces. One that
data decides is plain Python too when it runs eagerly; traced, it becomes torch.cond or
torch.while_loop, whose branches must agree in shape and whose state must keep its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._higher_order_ops import scan as torch_scan

from qgraph.errors import InputError
from qgraph.runtimes.torch.onnx_ops.host import (
    DTYPES,
    Value,
    device_of,
    is_tensor,
    number,
    to_tensor,
)
from qgraph.runtimes.torch.table import op

Body = Callable[..., tuple[Any, ...]]
_Result: TypeAlias = tuple[int, tuple[int, ...] | None]
"""An ONNX type, and sizes where they are known."""


@op("If", hosts=(0,))
def if_(
    bodies: tuple[Body, Body], inputs: tuple[Value], captured: tuple[Value, ...], *, outputs: int
) -> tuple[Value, ...]:
    """The results of one of two bodies."""
    otherwise, then = bodies
    condition = inputs[0]
    if not is_tensor(condition) or not torch.compiler.is_compiling():
        return (then if bool(condition) else otherwise)(*captured)
    return tuple(
        torch.cond(condition.reshape(()), _apart(then), _apart(otherwise), tuple(captured))
    )


def _apart(body: Body) -> Body:
    """A body whose results are memory of their own, as torch wants them."""
    return lambda *operands: tuple(result.clone() for result in body(*operands))


@op("Loop", scalars=(0, 1))
def loop(
    bodies: tuple[Body],
    inputs: tuple[Value, ...],
    captured: tuple[Value, ...],
    *,
    outputs: int,
    like: Tensor | None,
    stacked: tuple[_Result, ...],
) -> tuple[Value, ...]:
    """A body run up to `inputs[0]` times while its condition holds.

    Raises:
        InputError: traced, and the number of runs is no constant while the body stacks results.
    """
    (body,), (limit, condition, *state) = bodies, inputs
    if torch.compiler.is_compiling() and (is_tensor(limit) or is_tensor(condition)):
        if outputs != len(state):
            raise InputError(
                "a Loop that stacks results and whose length is data or a dynamic shape cannot be "
                "traced: run it without torch.export and torch.compile, or on ONNX Runtime"
            )
        return _while(body, limit, condition, state, captured, like)
    columns: list[list[Tensor]] = [[] for _ in range(outputs - len(state))]
    last = None if limit is None else number(limit)
    count, condition = 0, True if condition is None else condition
    while (last is None or count < last) and bool(condition):
        condition, *results = body(count, condition, *state, *captured)
        state = results[: len(state)]
        for kept, result in zip(columns, results[len(state) :], strict=True):
            kept.append(result)
        count += 1
    return (*state, *_stack(columns, stacked, like))


def _stack(
    columns: list[list[Tensor]], results: tuple[_Result, ...], like: Tensor | None
) -> list[Tensor]:
    """Each column as one tensor; an empty one of the type and sizes of its result in the body."""
    kinds = results[len(results) - len(columns) :]
    return [
        torch.stack(column)
        if column
        else torch.empty(0, *(sizes or ()), dtype=DTYPES.get(kind), device=device_of(like))
        for column, (kind, sizes) in zip(columns, kinds, strict=True)
    ]


def _while(
    body: Body,
    limit: Value,
    condition: Value,
    state: list[Value],
    captured: tuple[Value, ...],
    like: Tensor | None,
) -> tuple[Value, ...]:
    end = to_tensor(2**62 if limit is None else limit, like).reshape(())
    going = to_tensor(True if condition is None else condition, like).reshape(())

    def goes_on(count: Tensor, end: Tensor, going: Tensor, *rest: Value) -> Tensor:
        return going & (count < end)

    def step(count: Tensor, end: Tensor, going: Tensor, *rest: Value) -> tuple[Any, ...]:
        goes, *results = body(count, going, *rest)
        held = [_laid_out(result) for result in results]
        kept = [value.clone() if is_tensor(value) else value for value in rest[len(held) :]]
        return (count + 1, end.clone(), to_tensor(goes, count).clone(), *held, *kept)

    held = [_laid_out(value) if is_tensor(value) else value for value in state]
    first = (torch.zeros_like(end), end, going, *held, *captured)
    result = torch.while_loop(goes_on, step, first)
    return tuple(result[3 : 3 + len(state)])


def _laid_out(value: Tensor) -> Tensor:
    """A copy that lies row by row: torch wants the state of a loop to lie alike at each run."""
    return value.clone(memory_format=torch.contiguous_format)


@op("Scan")
def scan(
    bodies: tuple[Body],
    inputs: tuple[Value, ...],
    captured: tuple[Value, ...],
    *,
    num_scan_inputs: int,
    scan_input_axes: tuple[int, ...] = (),
    scan_input_directions: tuple[int, ...] = (),
    scan_output_axes: tuple[int, ...] = (),
    scan_output_directions: tuple[int, ...] = (),
    directions: tuple[int, ...] = (),
    outputs: int,
    opset: int,
    stacked: tuple[_Result, ...],
) -> tuple[Value, ...]:
    """A body run once for each slice of its inputs; results are stacked.

    Raises:
        InputError: before opset 9, whose Scan is another operator.
    """
    if opset < 9:
        raise InputError("Scan before opset 9 has a batch axis: convert the model to opset 13")
    (body,), state = bodies, list(inputs[:-num_scan_inputs])
    axes = scan_input_axes or (0,) * num_scan_inputs
    back = scan_input_directions or (0,) * num_scan_inputs
    given = [
        torch.flip(x.movedim(axis, 0), (0,)) if turned else x.movedim(axis, 0)
        for x, axis, turned in zip(inputs[-num_scan_inputs:], axes, back, strict=True)
    ]
    if torch.compiler.is_compiling():
        state, columns = _traced_scan(body, state, given, captured)
    else:
        state, lists = _python_scan(body, state, given, captured, outputs - len(state))
        columns = _stack(lists, stacked, given[0])
    out_axes = scan_output_axes or (0,) * len(columns)
    out_back = scan_output_directions or (0,) * len(columns)
    joined = [
        (torch.flip(results, (0,)) if turned else results).movedim(0, axis)
        for results, axis, turned in zip(columns, out_axes, out_back, strict=True)
    ]
    return (*state, *joined)


def _python_scan(
    body: Body,
    state: list[Tensor],
    given: list[Tensor],
    captured: tuple[Value, ...],
    count: int,
) -> tuple[list[Tensor], list[list[Tensor]]]:
    columns: list[list[Tensor]] = [[] for _ in range(count)]
    for slices in zip(*given, strict=True):
        results = body(*state, *slices, *captured)
        state = list(results[: len(state)])
        for column, result in zip(columns, results[len(state) :], strict=True):
            column.append(result)
    return state, columns


def _traced_scan(
    body: Body, state: list[Tensor], given: list[Tensor], captured: tuple[Value, ...]
) -> tuple[list[Tensor], list[Tensor]]:
    """The same as torch's own operator, whose length may be a dynamic shape."""

    def step(carried: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        results = [result.clone() for result in body(*carried, *slices, *captured)]
        return results[: len(carried)], results[len(carried) :]

    # A state that no slice changes still needs memory of its own.
    carried, stacked = torch_scan(step, [value.clone() for value in state], given)
    return list(carried), list(stacked)

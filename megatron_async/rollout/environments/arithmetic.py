"""Whether arithmetic that a policy asks for can be computed in no time, decided before it is.

A benchmark's calculator takes what it is given: `9**9**9` has 370 million digits, is computed in one step of the
interpreter that nothing interrupts, and stops every episode of the process for ever.

Invariants
- What is let through is computed in milliseconds and kilobytes.
- Only results that no honest call has are refused: `LARGEST_BITS` bits are ten thousand digits, of which no benchmark's
  answer can show even half.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from typing import Any

LARGEST_BITS = 2**15
"""Bits of the largest power."""
LONGEST_EXPRESSION = 4096
"""Characters of the longest expression."""

_AS_A_FLOAT = "int too large to convert to float"
"""What Python says once such a number is computed: a calculator's result becomes a float."""
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


class TooLarge(ValueError):
    """The result, or something on the way to it, is too large to be computed."""


def refuse_power(base: Any, exponent: Any) -> None:
    """Raises TooLarge for a power of whole numbers that is beyond `LARGEST_BITS` for certain."""
    if not isinstance(base, int) or not isinstance(exponent, int) or abs(base) < 2 or exponent < 2:
        return
    if (base.bit_length() - 1) * exponent > LARGEST_BITS:
        raise TooLarge(_AS_A_FLOAT)


def refuse_expression(text: str) -> None:
    """Raises TooLarge if evaluating `text`, an expression of numbers and + - * / // **, would take long.

    An expression that is none, or that fails, is left to whoever evaluates it: it fails there too, at the same place.
    """
    if len(text) > LONGEST_EXPRESSION:
        raise TooLarge(f"an expression of {len(text)} characters; at most {LONGEST_EXPRESSION} are evaluated")
    try:
        tree = ast.parse(text.lstrip(" \t"), mode="eval")
    except (RecursionError, MemoryError) as error:  # the tree is too deep, which need not keep it from being evaluated
        raise TooLarge("an expression that is nested too deeply") from error
    except (SyntaxError, ValueError):
        return
    try:
        _evaluate(tree.body)
    except (ArithmeticError, TypeError):
        return


def _evaluate(root: ast.expr) -> None:
    """Every operation in the order of the interpreter, each looked at before it is done."""
    values: list[Any] = []
    for node in _in_order(root):
        if isinstance(node, ast.Constant):
            values.append(node.value)
        elif isinstance(node, ast.UnaryOp):
            value = values.pop()
            values.append(-value if isinstance(node.op, ast.USub) else +value)
        elif isinstance(node, ast.BinOp):
            right, left = values.pop(), values.pop()
            values.append(_operate(node.op, left, right))
        elif isinstance(node, ast.Tuple):  # only (): there are no commas
            values.append(())
        else:  # a call of a number: the interpreter raises TypeError once the arguments are there
            raise TypeError(f"{type(node).__name__} in an expression")


def _operate(kind: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(kind, ast.Pow):
        refuse_power(left, right)
    if isinstance(kind, ast.Mult):
        _refuse_product(left, right)
    return _OPERATORS[type(kind)](left, right)


def _refuse_product(left: Any, right: Any) -> None:
    if not isinstance(left, int) or not isinstance(right, int):
        return
    if left.bit_length() + right.bit_length() > 2 * LARGEST_BITS:
        raise TooLarge(_AS_A_FLOAT)


def _in_order(root: ast.expr) -> Iterator[ast.AST]:
    """Operands before what is done with them, from left to right; no recursion: sums may have thousands of terms."""
    waiting: list[tuple[ast.AST, bool]] = [(root, False)]
    while waiting:
        node, ready = waiting.pop()
        children = [] if ready else [part for part in ast.iter_child_nodes(node) if _counts(part)]
        if not children:
            yield node
            continue
        waiting.append((node, True))
        waiting.extend((child, False) for child in reversed(children))


def _counts(part: ast.AST) -> bool:
    return not isinstance(part, ast.operator | ast.unaryop | ast.expr_context)

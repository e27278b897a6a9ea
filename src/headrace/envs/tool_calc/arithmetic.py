"""The calculator: exact arithmetic on what a model wrote, in bounded time and memory.

Nothing is evaluated as code: an expression may hold digits, operators and brackets only, and numbers that grow past
`BITS` are refused before they are computed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from headrace.data.errors import InvalidInput, shown

LONGEST = 200
BITS = 1000
ALLOWED = re.compile(r"[0-9+\-*/%(). ]*", re.ASCII)

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> Fraction:
    """The exact value of an expression. Raises `InvalidInput` for what is none, or is too large."""
    if len(expression) > LONGEST:
        raise InvalidInput(f"an expression has at most {LONGEST} characters, not {len(expression)}")
    if not ALLOWED.fullmatch(expression):
        raise InvalidInput(f"an expression holds digits and + - * / // % ** ( ) . only, not {shown(expression)}")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise InvalidInput(f"no arithmetic expression: {shown(expression)}") from None
    except ZeroDivisionError:
        raise InvalidInput(f"division by zero in {shown(expression)}") from None


def written(value: Fraction) -> str:
    """A number as people write it: whole, or with as many decimals as a float has."""
    return str(value.numerator) if value.denominator == 1 else repr(float(value))


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _bounded(Fraction(OPERATORS[type(op)](_value(left), _value(right))))
    raise InvalidInput(f"only numbers and + - * / // % ** ( ) are known, not {type(node).__name__}")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise InvalidInput(f"an exponent must be whole, not {written(exponent)}")
    if _bits(base) > 1 and _bits(base) * abs(exponent.numerator) > BITS:
        raise InvalidInput("the result is too large")
    return Fraction(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > BITS:
        raise InvalidInput("the result is too large")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())

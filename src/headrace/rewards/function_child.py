"""The process in which blocking rules and users' functions run: what hangs or crashes there is ended, and nobody else
notices.

It is told on stdin what to load, says on stdout what that is, and then answers calls. A function that is not
asynchronous is called in the main thread, one call at a time, so that signals work as in any program. What the function
itself prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from headrace.data.errors import InvalidInput, shown
from headrace.files import import_file, nearest, put_on_path
from headrace.processes import end_with_parent
from headrace.rewards.rules import made
from headrace.rewards.sample import RewardFailure, Sample, score_of

#: Before each message: its length in bytes.
LENGTH = struct.Struct("<I")
#: The parameter by which a function shows that it is one of verl's: `compute_score(data_source, solution_str,
#: ground_truth, extra_info)`.
VERL = "solution_str"


class CalleeSpec(msgspec.Struct, frozen=True):
    """What a process is to call: a rule with its options, or `FILE.py:FUNCTION`."""

    function: str = ""
    rule: str = ""
    options: dict[str, Any] = {}


class CalleeKind(msgspec.Struct, frozen=True):
    """What was loaded, or why nothing was."""

    asynchronous: bool = False
    error: str = ""


class FunctionCall(msgspec.Struct, frozen=True):
    """Samples to be scored by one call; `cancel` ends the call of this number."""

    number: int
    samples: list[Sample] = []
    batch: bool = False
    cancel: bool = False


class FunctionAnswer(msgspec.Struct, frozen=True):
    """What came of a call: for each sample its score, or a failure's reason and detail; for all of them where the call
    itself failed."""

    number: int
    scores: list[dict[str, Any] | list[Any]] = []
    failure: list[Any] | None = None


def main() -> None:
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to act on
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that nothing limits its time: this process is
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    spec = read(calls, CalleeSpec)
    if spec is None:
        return
    try:
        function, asynchronous = loaded(spec)
    except Exception as error:
        write(answers, encoded(CalleeKind(error=str(error) if isinstance(error, InvalidInput) else described(error))))
        return
    write(answers, encoded(CalleeKind(asynchronous=asynchronous)))
    if asynchronous:
        asyncio.run(_serve(function, calls, answers))
        return
    while (call := read(calls, FunctionCall)) is not None:
        try:
            answer = _answer(call, function(call.samples if call.batch else call.samples[0]))
        except Exception as error:
            answer = _failed(call, error)
        write(answers, _encoded_answer(answer))


async def _serve(function: Callable[..., Any], calls: BinaryIO, answers: BinaryIO) -> None:
    """Answers calls of an asynchronous function, as many at once as come in."""
    running: dict[int, asyncio.Task[None]] = {}

    async def answered(call: FunctionCall) -> None:
        try:
            answer = _answer(call, await function(call.samples if call.batch else call.samples[0]))
        except asyncio.CancelledError:
            answer = FunctionAnswer(call.number)  # nobody waits for more than a word
        except Exception as error:
            answer = _failed(call, error)
        del running[call.number]
        write(answers, _encoded_answer(answer))

    while (call := await asyncio.to_thread(read, calls, FunctionCall)) is not None:
        if not call.cancel:
            running[call.number] = asyncio.create_task(answered(call))
        elif call.number in running:
            running[call.number].cancel()


def loaded(spec: CalleeSpec) -> tuple[Callable[..., Any], bool]:
    """What is to be called, and whether it is asynchronous. Raises whatever its import raises."""
    if spec.rule:
        return made(spec.rule, spec.options).score, False
    function = function_of(spec.function)
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # an object of a class whose call is a coroutine
    )
    if VERL in inspect.signature(function).parameters:
        return _as_verl_calls(function), asynchronous
    return function, asynchronous


def function_of(use: str) -> Callable[..., Any]:
    """The function that `FILE.py:FUNCTION` or `package.module:FUNCTION` names; raises `InvalidInput` where there is
    none."""
    where, _, name = use.rpartition(":")
    if where.endswith(".py"):
        path = Path(where)
        put_on_path(path.parent)
        module = import_file(path, path.stem)
    else:
        module = importlib.import_module(where)
    found = getattr(module, name, None)
    if not callable(found):
        near = nearest(name, [known for known, one in vars(module).items() if callable(one)])
        raise InvalidInput(f"{where} has no function {name!r}{near}")
    return found  # type: ignore[no-any-return]


def _as_verl_calls(function: Callable[..., Any]) -> Callable[[Sample], Any]:
    def called(sample: Sample) -> Any:
        extra = sample.metadata.get("extra_info")
        return function(
            data_source=sample.data_source,
            solution_str=sample.text,
            ground_truth=sample.ground_truth,
            extra_info=extra if isinstance(extra, dict) else {},
        )

    return called


def _answer(call: FunctionCall, returned: Any) -> FunctionAnswer:
    if not call.batch:
        return FunctionAnswer(call.number, [_scored(returned)])
    if isinstance(returned, str | dict) or not hasattr(returned, "__len__") or not hasattr(returned, "__iter__"):
        raise RewardFailure(f"it returned {shown(returned)}; a function of a batch returns a list", "wrong_type")
    if len(returned) != len(call.samples):
        raise RewardFailure(f"it returned {len(returned)} scores for {len(call.samples)} samples", "wrong_type")
    return FunctionAnswer(call.number, [_scored(one) for one in returned])


def _scored(returned: Any) -> dict[str, Any] | list[Any]:
    try:
        found = score_of(returned)
    except RewardFailure as failure:
        return [failure.reason, failure.detail, failure.again]
    return {"value": found.value, "parts": found.parts, "info": found.info}


def _failed(call: FunctionCall, error: Exception) -> FunctionAnswer:
    if isinstance(error, RewardFailure):
        detail = error.detail.encode(errors="backslashreplace").decode()  # a user's may hold half of a surrogate pair
        return FunctionAnswer(call.number, failure=[error.reason, detail, error.again])
    return FunctionAnswer(call.number, failure=["error", f"it raised {described(error)}", True])


def _encoded_answer(answer: FunctionAnswer) -> bytes:
    """An answer as a message. A score that has no form on the wire, such as for an integer beyond 64 bits or half of a
    surrogate pair, is the failure of its sample alone."""
    try:
        return encoded(answer)
    except Exception:  # also what an object raises whose text is asked for
        return encoded(FunctionAnswer(answer.number, [_sendable(one) for one in answer.scores], answer.failure))


def _sendable(outcome: dict[str, Any] | list[Any]) -> dict[str, Any] | list[Any]:
    """A score's or a failure's form; where it cannot be encoded, the failure that says for which field."""
    if isinstance(outcome, list):
        return outcome
    name = "info"
    try:
        for name, value in (*outcome["parts"].items(), *outcome["info"].items()):
            msgspec.msgpack.encode({name: value}, enc_hook=_plain)
    except Exception as error:
        why = f"{type(error).__name__}: {shown(str(error), 300)}"
        return ["wrong_type", f"it returned {shown(name)}, which cannot be sent: {why}", False]
    return outcome


def described(error: BaseException) -> str:
    """An error as one line: its kind, its words, and the line of the user's that raised it."""
    at, line = error.__traceback__, ""
    while at is not None:
        code = at.tb_frame.f_code
        line = f" ({Path(code.co_filename).name}, line {at.tb_lineno})"
        at = at.tb_next
    return f"{type(error).__name__}: {shown(str(error), 300)}{line}"


def encoded(message: msgspec.Struct) -> bytes:
    """A message with its length; arrays of numpy's are written as lists, and what else has no form on the wire as
    text."""
    body = msgspec.msgpack.encode(message, enc_hook=_plain)
    return LENGTH.pack(len(body)) + body


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def read(stream: BinaryIO, kind: type[Any]) -> Any:
    """The next message; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return msgspec.msgpack.decode(stream.read(LENGTH.unpack(head)[0]), type=kind)


def write(stream: BinaryIO, message: bytes) -> None:
    stream.write(message)
    stream.flush()


if __name__ == "__main__":
    main()

"""Flows by name: those that ship, those that `@register` named, and those that a configuration targets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.data.errors import InvalidInput, shown
from headrace.files import nearest
from headrace.flows import turns
from headrace.flows.flow import FLOWS, AgentFlowBase
from headrace.flows.gateway_client import GatewayClient
from headrace.targets import load_target

#: Those that ship are registered once their module is imported.
SHIPPED = (turns.SingleTurnFlow,)


def flow_named(name: str) -> type[AgentFlowBase]:
    """The flow that was registered by a name. Raises `InvalidInput`, with the names that are known."""
    if name not in FLOWS:
        hint = nearest(name, FLOWS) or f"; known: {', '.join(sorted(FLOWS))}"
        raise InvalidInput(f"there is no flow {name!r}{hint}. One of your own needs _target_: file.py:Class")
    return FLOWS[name]


def flow_of(spec: str | Mapping[str, Any], gateway: GatewayClient, base: Path, **common: Any) -> AgentFlowBase:
    """The flow that `agent.flow` says: a registered name, a target (`file.py:Class`), or a mapping of `name` or
    `_target_` with the flow's own options. `common` are the options of every flow, which the mapping may override.
    Raises `InvalidInput` for a flow or an option that there is not."""
    given = {"name": spec} if isinstance(spec, str) else dict(spec)
    name, target = given.pop("name", None), given.pop("_target_", None)
    if target is None and isinstance(name, str) and ":" in name:
        target = name
    kind = load_target(str(target), base) if target is not None else None
    if kind is None:
        if not isinstance(name, str):
            raise InvalidInput(f"agent.flow: give a name or a _target_, not {shown(dict(given))}")
        kind = flow_named(name)
    if not (isinstance(kind, type) and issubclass(kind, AgentFlowBase)):
        raise InvalidInput(f"agent.flow: {target} is no class of a flow: it should inherit AgentFlowBase")
    if inspect.isabstract(kind):
        raise InvalidInput(f"agent.flow: {target or name} lacks {', '.join(sorted(kind.__abstractmethods__))}")
    options = {**common, **given}
    known = _options(kind)
    for option in options:
        if known is not None and option not in known:
            if option in given:
                hint = nearest(option, known) or f"; known: {', '.join(sorted(known))}"
                raise InvalidInput(f"agent.flow: {kind.__name__} has no option {option!r}{hint}")
            raise InvalidInput(f"agent.flow: {kind.__name__}.__init__ must take **options, for {option!r} among others")
    try:
        return kind(gateway, **options)
    except TypeError as error:
        raise InvalidInput(f"agent.flow: {kind.__name__} cannot be made: {error}") from error


def _options(kind: type[AgentFlowBase]) -> set[str] | None:
    """The options that a flow's class takes, its bases' included where it hands on `**options`; None for any."""
    found: set[str] = set()
    for one in kind.__mro__:
        init = vars(one).get("__init__")
        if init is None:
            continue
        parameters = list(inspect.signature(init).parameters.values())[2:]
        found |= {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return found
    return None

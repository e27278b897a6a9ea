"""The matrix of routes and keys: which key opens which route, held against an application's own list of routes.

A table names every route with who may call it. A route that an application has and its table has not fails the test
that walks them, and so does a row without a route: whoever adds a route says who may call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

#: What is tried on a route that names no methods; those that it does not take are 405 for everybody.
USUAL_METHODS = ("GET", "POST", "DELETE")

Door = tuple[str, str]

#: What the dashboard's page asks for.
DASHBOARD_VIEWS = (
    *("overview", "about", "curves", "survivors", "choices", "trajectories", "groups"),
    *("trajectory", "conversation", "tokens", "consumption", "why", "group", "comparison", "answers", "search"),
    *("export", "live"),
)
#: The dashboard's routes that are everybody's: the page's files, which hold nothing of anybody's, and its login; and
#: those that need the key of who may see and change everything.
DASHBOARD_OPEN = (
    *("GET /dashboard", "GET /dashboard/{name:path}"),
    *(f"POST /dashboard/api/{name}" for name in ("login", "logout")),
)
DASHBOARD_CLOSED = (
    *(f"GET /dashboard/api/{name}" for name in DASHBOARD_VIEWS),
    *(f"POST /dashboard/api/{name}" for name in ("curate", "undo")),
)


class Opens(IntEnum):
    """What a route asks for, and what a key opens: each what those before it open."""

    EVERYBODY = 0
    AGENT = 1
    REWARD = 2
    ADMIN = 3


def table(rows: Mapping[Opens, Iterable[str]]) -> dict[Door, Opens]:
    """Rows such as `POST /pause`, by who may call them, as a table by method and path."""
    found: dict[Door, Opens] = {}
    for role, lines in rows.items():
        for line in lines:
            method, path = line.split(" ")
            assert (method, path) not in found, f"{line} stands twice in the table"
            found[method, path] = role
    return found


def doors(routes: Iterable[Any]) -> list[Door]:
    """Every method and path that an application has."""
    found = []
    for route in routes:
        assert hasattr(route, "methods"), f"{route} is of a kind that is not looked at here"
        found += [(method, route.path) for method in sorted(route.methods or USUAL_METHODS) if method != "HEAD"]
    return found


def check_complete(routes: Iterable[Any], known: Mapping[Door, Opens]) -> None:
    """Every route with methods of its own has a row, and every row its route. Those that take any method have one for
    each that they do take."""
    routes = list(routes)
    there = doors(routes)
    any_method = {route.path for route in routes if not route.methods}
    missing = [door for door in there if door not in known and door[1] not in any_method]
    missing += [("?", path) for path in any_method if not any(path == named for _, named in known)]
    assert not missing, f"say in the table who may call {missing}"
    stale = sorted(known.keys() - set(there))
    assert not stale, f"the table names routes that are not there: {stale}"

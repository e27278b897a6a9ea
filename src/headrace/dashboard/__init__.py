"""The dashboard: one page on what a pool holds.

The data side (`source`, `index`, `follow`, `detail`, `figures`, `dashboard`) knows no HTTP; `routes`, `login` and
`live` serve it, as part of any application (`add_dashboard`) or of one of its own.
"""

from __future__ import annotations

from typing import Literal

#: Whether people may curate on a server's dashboard.
DashboardMode = Literal["edit", "read-only"]
#: What the servers' flag `--dashboard` says of itself.
DASHBOARD_HELP = "what people may do on the page under /dashboard: curate steps (edit), or look alone (read-only)"

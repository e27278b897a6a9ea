"""The dashboard: one page on what a pool holds.

The data side (`source`, `index`, `follow`, `detail`, `figures`, `dashboard`) knows no HTTP; `routes`, `login` and
`live` serve it.
"""

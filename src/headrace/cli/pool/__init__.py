"""`headrace pool`: commands that run a pool (`run`), read one (`read`), and maintain a journal (`journal`)."""

from __future__ import annotations

from headrace.commands import group

PAGE = """\
Start, read and look after a pool.

TARGET is a journal's folder (read as it lies there; no pool may have it open), http://HOST:PORT or
ray-actor://NAME?namespace=NAMESPACE."""

pool_app = group(
    "pool",
    PAGE,
    {
        "serve": ("headrace.cli.pool.run:serve_app", "run a pool as an HTTP service"),
        "start": ("headrace.cli.pool.run:start_app", "run a pool as a detached Ray actor"),
        "stop": ("headrace.cli.pool.run:stop_app", "end a Ray actor's pool; its journal stays"),
        "stats": ("headrace.cli.pool.read:stats_app", "the ledger and the queues"),
        "ls": ("headrace.cli.pool.read:ls_app", "list groups, trajectories or steps"),
        "show": ("headrace.cli.pool.read:show_app", "one trajectory: its tree, steps and rewards"),
        "export": ("headrace.cli.pool.read:export_app", "write steps or sequences to Parquet or JSONL"),
        "verify": ("headrace.cli.pool.journal:verify_app", "check a journal and say what was found"),
        "repair": ("headrace.cli.pool.journal:repair_app", "put what reads back of a damaged journal in its place"),
        "compact": ("headrace.cli.pool.journal:compact_app", "rewrite a journal as what lives"),
        "backup": ("headrace.cli.pool.journal:backup_app", "copy a journal to an empty folder"),
    },
)

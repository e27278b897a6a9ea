"""`atroposlib.frontend.jsonl2html`."""

from __future__ import annotations

from pathlib import Path

from headrace.envs.files import write_page


def generate_html(input_path: str, output_path: str | None = None) -> None:
    """Writes the HTML page of a file of groups; by default beside it."""
    write_page(Path(input_path), None if output_path is None else Path(output_path))

"""A run's reward curve as SVG: training batches and their mean, and the held-out problems.

python examples/smollm2/curve.py runs/smollm2 curve.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 880, 400, 56, 20, 44, 48
#: Steps that the mean goes over.
WINDOW = 10


def main() -> None:
    run, into = Path(sys.argv[1]), Path(sys.argv[2])
    into.write_text(curve(rows(run / "trainer" / "metrics.jsonl"), rows(run / "validation.jsonl")))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def curve(steps: list[dict[str, Any]], validations: list[dict[str, Any]]) -> str:
    steps = [row for row in steps if row.get("reward") is not None]
    last = max([row["step"] for row in steps] + [row["version"] for row in validations], default=1)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(reward: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - reward)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="13" fill="#52606d"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(LEFT, 26, "SmolLM2-135M-Instruct, chain_sum: share of right answers"),
    ]
    for tenth in range(0, 11, 2):
        parts.append(_line([(LEFT, y(tenth / 10)), (WIDTH - RIGHT, y(tenth / 10))], "#e4e7eb", 1))
        parts.append(_text(LEFT - 8, y(tenth / 10) + 4, f"{tenth / 10:.1f}", "end"))
    apart = next(n for n in (1, 5, 10, 20, 50, 100, 200, 500, last) if last / n <= 10)
    parts += [_text(x(step), HEIGHT - BOTTOM + 20, str(step), "middle") for step in range(0, last + 1, apart)]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "step (policy version)", "middle"))
    parts += [_dot(x(row["step"]), y(row["reward"]), 1.8, "#a9c9e4") for row in steps]
    parts.append(_line([(x(step), y(mean)) for step, mean in _means(steps)], "#1769aa", 2.5))
    points = [(x(row["version"]), y(row["reward"])) for row in sorted(validations, key=lambda row: row["version"])]
    parts += [_line(points, "#c05621", 1.5), *(_dot(a, b, 4, "#c05621") for a, b in points)]
    parts.append(_legend(0, "#1769aa", f"training batches (temperature 1), mean of {WINDOW}"))
    parts.append(_legend(1, "#c05621", "held-out problems (temperature 0)"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _means(steps: list[dict[str, Any]]) -> list[tuple[int, float]]:
    found = []
    for at in range(len(steps)):
        window = [row["reward"] for row in steps[max(at + 1 - WINDOW, 0) : at + 1]]
        found.append((steps[at]["step"], sum(window) / len(window)))
    return found


def _line(points: list[tuple[float, float]], colour: str, width: float) -> str:
    written = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline points="{written}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _dot(a: float, b: float, radius: float, colour: str) -> str:
    return f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{radius}" fill="{colour}"/>'


def _text(a: float, b: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{a:.1f}" y="{b:.1f}" text-anchor="{anchor}">{text}</text>'


def _legend(number: int, colour: str, text: str) -> str:
    a, b = WIDTH - RIGHT - 330, HEIGHT - BOTTOM - 40 + 20 * number
    return _dot(a, b - 4, 4, colour) + _text(a + 12, b, text)


if __name__ == "__main__":
    main()

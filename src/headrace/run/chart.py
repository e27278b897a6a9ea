"""A curve of rewards as a picture: laid out once as lines, dots and text (`chart`), then written as SVG or as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

from headrace.run.progress import WINDOW, averaged, bounds

WIDTH, HEIGHT = 960, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 52, 52
INK, GREY, FAINT, BLUE, GREEN = "#1f2933", "#7b8794", "#e4e7eb", "#1769aa", "#2f855a"
#: A PNG is drawn so many times as large and made smaller, which smooths its edges.
SMOOTH = 2


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A polyline."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class ChartDot:
    """A filled circle."""

    x: float
    y: float
    colour: str
    radius: float = 2.0


@dataclass(frozen=True, slots=True)
class ChartText:
    """A text; `anchor` says which of its ends is at x."""

    x: float
    y: float
    text: str
    colour: str = GREY
    size: int = 14
    anchor: Literal["start", "middle", "end"] = "start"


ChartMark = ChartLine | ChartDot | ChartText


def chart(
    rewards: Sequence[float],
    title: str,
    *,
    goal: float | None = None,
    held_out: Sequence[tuple[int, float]] = (),
    window: int = WINDOW,
) -> list[ChartMark]:
    """The marks of a curve: every step's reward as a dot, the mean of `window` steps as a line, a `goal` as a dashed
    one, and scores on held-out data as (step, reward). Without rewards there are no dots, and no line."""
    steps = max([len(rewards), 2, *(step for step, _ in held_out)])
    low, high = bounds([*rewards, *(reward for _, reward in held_out)])

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (max(step, 1) - 1) / (steps - 1)

    def y(reward: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - reward) / (high - low)

    marks: list[ChartMark] = [ChartText(LEFT, 30, title, INK, 18)]
    for fifth in range(6):
        at = low + (high - low) * fifth / 5
        marks.append(ChartLine(((LEFT, y(at)), (WIDTH - RIGHT, y(at))), FAINT))
        marks.append(ChartText(LEFT - 10, y(at) + 5, f"{at:.3g}" if high - low > 1 else f"{at:.1f}", anchor="end"))
    for step in _ticks(steps):
        marks.append(ChartText(x(step), HEIGHT - BOTTOM + 22, str(step), anchor="middle"))
    marks.append(ChartText((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "training step", anchor="middle"))
    if goal is not None:
        marks.append(ChartLine(((LEFT, y(goal)), (WIDTH - RIGHT, y(goal))), GREEN, 1.5, dashed=True))
        marks.append(ChartText(LEFT + 8, y(goal) + 18, f"learned: {goal}", GREEN))
    marks += [ChartDot(x(step), y(reward), "#a9c9e4") for step, reward in enumerate(rewards, 1)]
    curve = tuple((x(step), y(reward)) for step, reward in enumerate(averaged(rewards, window), 1))
    if curve:
        marks.append(ChartLine(curve, BLUE, 2.5))
    if held_out:
        marks.append(ChartLine(tuple((x(step), y(reward)) for step, reward in held_out), GREEN, 1.5))
        marks += [ChartDot(x(step), y(reward), GREEN, 5.0) for step, reward in held_out]
        marks.append(ChartText(WIDTH - RIGHT, 30, "green: held-out data", GREEN, anchor="end"))
    return marks


def _ticks(steps: int) -> list[int]:
    """Round numbers, about eight of them."""
    apart = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, steps) if steps / n <= 10)
    return [1, *range(apart, steps + 1, apart)] if apart > 1 else list(range(1, steps + 1))


def write_png(marks: Sequence[ChartMark], path: Path) -> None:
    """Draws the marks into a PNG file."""
    scale = 2 * SMOOTH  # twice as fine as the SVG's units
    image = Image.new("RGB", (WIDTH * scale, HEIGHT * scale), "white")
    draw = ImageDraw.Draw(image)
    anchors = {"start": "ls", "middle": "ms", "end": "rs"}
    for mark in marks:
        match mark:
            case ChartLine():
                points = [(x * scale, y * scale) for x, y in mark.points]
                width = round(mark.width * scale)
                for piece in _dashes(points, 10 * scale) if mark.dashed else [points]:
                    draw.line(piece, fill=mark.colour, width=width, joint="curve")
            case ChartDot():
                x, y, r = mark.x * scale, mark.y * scale, mark.radius * scale
                draw.ellipse((x - r, y - r, x + r, y + r), fill=mark.colour)
            case ChartText():
                font = ImageFont.load_default(mark.size * scale)
                at = (mark.x * scale, mark.y * scale)
                draw.text(at, mark.text, fill=mark.colour, font=font, anchor=anchors[mark.anchor])
    image.resize((WIDTH * 2, HEIGHT * 2), Image.Resampling.LANCZOS).save(path)


def _dashes(points: list[tuple[float, float]], length: float) -> list[list[tuple[float, float]]]:
    """A horizontal line in pieces, with gaps of two thirds of their length."""
    (left, y), (right, _) = points[0], points[-1]
    starts = [left + n * length for n in range(int((right - left) / length) + 1)]
    return [[(start, y), (min(start + 0.6 * length, right), y)] for start in starts]

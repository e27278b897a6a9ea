"""The report of a run: a picture of its reward curve, and one self-contained HTML page.

The curve is laid out once as lines, dots and text (`chart`), then written as SVG or as PNG.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from PIL import Image, ImageDraw, ImageFont

from headrace.demo import games
from headrace.demo.games import Game, first_games, last_games
from headrace.demo.progress import METRICS, DemoProgress, FirstAndLast, RecordedCall, RecordedGame, averaged
from headrace.demo.recipe import LEARNED_REWARD, LEARNED_STEPS
from headrace.demo.stack import TRAINER_CONFIG, DemoSettings
from headrace.demo.tasks import TASKS, NumberTask

PAGE, PICTURE = "report.html", "reward.png"
#: Games that are shown of the first ones, and of the last ones.
SHOWN_GAMES = 6
TIMES = {
    "wait": "waiting for games",
    "learn": "learning",
    "publish": "publishing weights",
    "checkpoint": "writing checkpoints",
}

STYLE = """
body { font: 16px/1.5 sans-serif; color: #1f2933; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top }
th { color: #7b8794; font-weight: normal } .number { text-align: right }
.bar { background: #1769aa; height: .8rem } .games { display: flex; gap: 3rem; flex-wrap: wrap }
.win { color: #2f855a } .loss { color: #b83232 } pre { background: #f5f7fa; padding: 1rem; overflow: auto }
code { background: #f5f7fa; padding: 0 .2rem } .note { color: #7b8794 } summary { cursor: pointer }
.call { display: flex; flex-wrap: wrap; gap: .25rem; margin: .5rem 0; align-items: stretch }
.token { background: #f5f7fa; border-radius: .2rem; padding: .1rem .4rem; text-align: center; font: 14px/1.4 monospace }
.token small { display: block; color: #7b8794; font-size: 11px }
.sampled { background: #1769aa; color: #ffffff } .sampled small { color: #d9e8f5 }
"""


def write_report(
    run: Path,
    settled: DemoSettings,
    progress: DemoProgress,
    verdict: Mapping[str, Any],
    cpu_s: Mapping[str, float],
    recorded: FirstAndLast,
) -> Path:
    """Writes the page and the picture into the run's folder; returns the page's path."""
    task = TASKS[settled.task]
    marks = chart(progress.rewards, f"{task.name}: reward by training step, and the mean of {LEARNED_STEPS}")
    write_png(marks, run / PICTURE)
    times = {words: sum(row.get("times", {}).get(name, 0.0) for row in progress.rows) for name, words in TIMES.items()}
    vocabulary = _vocabulary(Path(settled.model) if settled.model is not None else run / "model")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Headrace demo</title><style>{STYLE}</style>",
        f"<h1>Headrace demo: {escape(task.name)}</h1>",
        f"<p>{_outcome(progress, verdict)}",
        svg(marks),
        _facts(verdict),
        "<h2>The game</h2>",
        _rules(task, len(vocabulary)),
        "<h2>Games</h2><div class=games>",
        _games("before", first_games(run, SHOWN_GAMES)),
        _games("after", last_games(run, SHOWN_GAMES)),
        "</div>",
        "<h2>Tokens and their log-probs</h2>",
        *_tokens(recorded, vocabulary),
        "<h2>Where the time went</h2>",
        _bars("seconds of CPU by process", cpu_s),
        _bars("seconds of the trainer's loop", times),
        "<h2>Where to look</h2>",
        _places(run, recorded),
        "<h2>The trainer's configuration</h2>",
        f"<pre>{escape((run / TRAINER_CONFIG).read_text())}</pre></html>",
    ]
    (run / PAGE).write_text("\n".join(parts))
    return run / PAGE


def _outcome(progress: DemoProgress, verdict: Mapping[str, Any]) -> str:
    said = "Learned" if progress.learned else "Not learned yet"
    reward = f"{verdict['reward_end']:.3f}" if verdict["reward_end"] is not None else "unknown"
    return (
        f"{said}: the mean reward of the last {LEARNED_STEPS} steps is {reward}, after {verdict['steps']} steps, "
        f"{verdict['calls']:,} calls and {verdict['seconds']:.0f} s. {LEARNED_REWARD} counts as learned."
    )


def _rules(task: NumberTask, words: int) -> str:
    """The game, what perfect play is, and what random play gets."""
    numbers, guesses = task.numbers, task.guesses
    opening = task.game(seed=0, group=0).messages[0]["content"]
    perfect = min(1.0, (2**guesses - 1) / numbers)
    rows = [
        ("perfect play: binary search, the middle of what is left", perfect),
        ("at random among the numbers, none of them twice", min(1.0, guesses / numbers)),
    ]
    if words:
        chance = sum(((numbers - 1) / words) ** turn / words for turn in range(guesses))
        rows.append((f"at random among the {words} tokens of its vocabulary, as it begins", chance))
    table = "".join(f"<tr><td>{player}<td class=number>{reward:.2f}" for player, reward in rows)
    return (
        f"<p>A number from 1 to {numbers} is hidden. The player has {guesses} guesses, and each that misses is "
        "answered &ldquo;higher&rdquo; or &ldquo;lower&rdquo;. A reply that is no such number ends the game. The "
        "reward is 1 for a hit and 0 for everything else. The player is told none of this: a conversation begins with "
        f"&ldquo;{escape(opening)}&rdquo;, and all that it ever learns from is the reward."
        f"<table><tr><th>a player's mean reward<th></tr>{table}</table>"
    )


def _facts(verdict: Mapping[str, Any]) -> str:
    shown = {name: value for name, value in verdict.items() if name not in ("task", "report")}
    rows = (f"<tr><th>{name.replace('_', ' ')}<td>{_number(value)}" for name, value in shown.items())
    return f"<table>{''.join(rows)}</table>"


def _games(when: str, told: Iterable[Game]) -> str:
    rows = []
    for game in told:
        turns = [f"<b>{escape(turn.guess.strip()) or '∅'}</b> {escape(turn.answer)}" for turn in game.turns()]
        kind = "win" if game.won else "loss"
        rows.append(f"<tr><td class=number>{game.hidden}<td>{', '.join(turns)}<td class={kind}>{game.reward:g}")
    return f"<table><tr><th>hidden<th>{when}: guesses in bold<th>reward</tr>{''.join(rows)}</table>"


def _tokens(recorded: FirstAndLast, vocabulary: Mapping[int, str]) -> list[str]:
    """Two games as the pool recorded them, call by call."""

    def name(token: int) -> str:
        return vocabulary.get(token, str(token)).replace("\n", "⏎")

    found = {"One of the first games": recorded.first, "One of the last games": recorded.last}
    shown = [_recorded(when, game, name) for when, game in found.items() if game is not None]
    if not shown:
        return ["<p class=note>The pool had neither a first nor a last game any more when it was asked."]
    return [
        "<p>A guess is one call. Grey is what the server was given, with its token ids; blue is what it sampled, with "
        "the log-prob that was recorded for it: the trainer's ratios are taken against it.",
        *shown,
    ]


def _recorded(when: str, game: RecordedGame, name: Callable[[int], str]) -> str:
    turns = zip(game.calls, game.game.turns(), strict=False)
    calls = "".join(_call(call, turn.answer, name) for call, turn in turns)
    return f"<h3>{when}: {game.game.hidden} is hidden <code>{escape(game.trajectory_uid)}</code></h3>{calls}"


def _call(call: RecordedCall, answer: str, name: Callable[[int], str]) -> str:
    prompt = [f"<span class=token>{escape(name(token))}<small>{token}</small></span>" for token in call.prompt_ids]
    sampled = [
        f"<span class='token sampled'>{escape(name(token))}<small>{token}</small>"
        f"<small>log-prob {log_prob:.3f}, p {math.exp(log_prob):.2f}</small></span>"
        for token, log_prob in zip(call.response_ids, call.log_probs, strict=False)
    ]
    note = f"<span class=note>policy version {call.policy_version}; answered: {escape(answer)}</span>"
    return f"<div class=call>{''.join(prompt)}{''.join(sampled)}{note}</div>"


def _vocabulary(model: Path) -> dict[int, str]:
    """The tokens of a checkpoint by id; none where it has no `tokenizer.json`."""
    from tokenizers import Tokenizer

    file = model / "tokenizer.json"
    return {at: word for word, at in Tokenizer.from_file(str(file)).get_vocab().items()} if file.exists() else {}


def _places(run: Path, recorded: FirstAndLast) -> str:
    """What is in the run's folder, and the commands that read it."""
    journal = shlex.quote(str(run / "journal"))
    look = [f"headrace pool stats {journal}"]
    if recorded.last is not None:
        look.append(f"headrace pool show {journal} {shlex.quote(recorded.last.trajectory_uid)}")
    places = {
        "journal": "the pool: what was recorded, and what became of it; "
        + ", ".join(f"<code>{c}</code>" for c in look),
        "logs": "what each process said",
        f"trainer/{METRICS}": "one line a step, with everything that was measured",
        "trainer": "checkpoints, which <code>headrace demo --resume</code> goes on from",
        TRAINER_CONFIG: "the trainer's configuration, for <code>headrace train</code>",
        games.GAMES_FILE: "one game of every group",
    }
    rows = "".join(f"<tr><td><a href='{name}'>{name}</a><td>{words}" for name, words in places.items())
    return f"<p>Everything of this run is in <code>{escape(str(run))}</code>.<table>{rows}</table>"


def _bars(what: str, values: Mapping[str, float]) -> str:
    most = max([*values.values(), 1e-9])
    rows = (
        f"<tr><td>{escape(name)}<td class=number>{value:.1f}"
        f"<td><div class=bar style='width:{20 * value / most:.2f}rem'></div>"
        for name, value in values.items()
    )
    return f"<table><tr><th>{what}<th><th></tr>{''.join(rows)}</table>"


def _number(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


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


def chart(rewards: Sequence[float], title: str) -> list[ChartMark]:
    """The marks of a curve: every step's reward as a dot, and the moving average as a line."""
    steps = max(len(rewards), 2)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - 1) / (steps - 1)

    def y(reward: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - reward)

    marks: list[ChartMark] = [ChartText(LEFT, 30, title, INK, 18)]
    for tenth in range(0, 11, 2):
        marks.append(ChartLine(((LEFT, y(tenth / 10)), (WIDTH - RIGHT, y(tenth / 10))), FAINT))
        marks.append(ChartText(LEFT - 10, y(tenth / 10) + 5, f"{tenth / 10:.1f}", anchor="end"))
    for step in _ticks(steps):
        marks.append(ChartText(x(step), HEIGHT - BOTTOM + 22, str(step), anchor="middle"))
    marks.append(ChartText((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "training step", anchor="middle"))
    marks.append(ChartLine(((LEFT, y(LEARNED_REWARD)), (WIDTH - RIGHT, y(LEARNED_REWARD))), GREEN, 1.5, dashed=True))
    marks.append(ChartText(LEFT + 8, y(LEARNED_REWARD) + 18, f"learned: {LEARNED_REWARD}", GREEN))
    marks += [ChartDot(x(step), y(reward), "#a9c9e4") for step, reward in enumerate(rewards, 1)]
    curve = tuple((x(step), y(reward)) for step, reward in enumerate(averaged(rewards), 1))
    return [*marks, ChartLine(curve, BLUE, 2.5)]


def _ticks(steps: int) -> list[int]:
    """Round numbers, about eight of them."""
    apart = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, steps) if steps / n <= 10)
    return [1, *range(apart, steps + 1, apart)] if apart > 1 else list(range(1, steps + 1))


def svg(marks: Sequence[ChartMark]) -> str:
    """The marks as an SVG document."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for mark in marks:
        match mark:
            case ChartLine():
                points = " ".join(f"{x:.1f},{y:.1f}" for x, y in mark.points)
                dashes = ' stroke-dasharray="6 4"' if mark.dashed else ""
                parts.append(
                    f'<polyline points="{points}" fill="none" stroke="{mark.colour}" '
                    f'stroke-width="{mark.width}" stroke-linejoin="round"{dashes}/>'
                )
            case ChartDot():
                parts.append(f'<circle cx="{mark.x:.1f}" cy="{mark.y:.1f}" r="{mark.radius}" fill="{mark.colour}"/>')
            case ChartText():
                parts.append(
                    f'<text x="{mark.x:.1f}" y="{mark.y:.1f}" fill="{mark.colour}" font-size="{mark.size}" '
                    f'text-anchor="{mark.anchor}">{escape(mark.text)}</text>'
                )
    return "\n".join([*parts, "</svg>"])


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

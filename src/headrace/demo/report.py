"""What is left of a run: a picture of its curve, and one page that needs nothing beside itself."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from headrace.demo import games
from headrace.demo.chart import chart, svg, write_png
from headrace.demo.games import Game, first_games, last_games
from headrace.demo.progress import METRICS, Progress
from headrace.demo.recipe import BAR, WINDOW
from headrace.demo.recorded import Both, Call, RecordedGame
from headrace.demo.stack import CONFIG, Settled
from headrace.demo.tasks import TASKS, NumberTask

__all__ = ["write_report"]

PAGE, PICTURE = "report.html", "reward.png"
#: Games that are shown of the first ones, and of the last ones.
SHOWN = 6
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
    settled: Settled,
    progress: Progress,
    verdict: Mapping[str, Any],
    cpu_s: Mapping[str, float],
    recorded: Both,
) -> Path:
    """Writes both into the run's folder and returns the page's path."""
    task = TASKS[settled.task]
    marks = chart(progress.rewards, f"{task.name}: reward by training step, and the mean of {WINDOW}")
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
        _games("before", first_games(run, SHOWN)),
        _games("after", last_games(run, SHOWN)),
        "</div>",
        "<h2>Tokens and their log-probs</h2>",
        *_tokens(recorded, vocabulary),
        "<h2>Where the time went</h2>",
        _bars("seconds of CPU by process", cpu_s),
        _bars("seconds of the trainer's loop", times),
        "<h2>Where to look</h2>",
        _places(run, recorded),
        "<h2>The trainer's configuration</h2>",
        f"<pre>{escape((run / CONFIG).read_text())}</pre></html>",
    ]
    (run / PAGE).write_text("\n".join(parts))
    return run / PAGE


def _outcome(progress: Progress, verdict: Mapping[str, Any]) -> str:
    said = "Learned" if progress.learned else "Not learned yet"
    reward = f"{verdict['reward_end']:.3f}" if verdict["reward_end"] is not None else "unknown"
    return (
        f"{said}: the mean reward of the last {WINDOW} steps is {reward}, after {verdict['steps']} steps, "
        f"{verdict['calls']:,} calls and {verdict['seconds']:.0f} s. {BAR} counts as learned."
    )


def _rules(task: NumberTask, words: int) -> str:
    """What is played, what perfect play is, and what chance gets."""
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


def _tokens(recorded: Both, vocabulary: Mapping[int, str]) -> list[str]:
    """Two games as the pool had them, call by call."""

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


def _call(call: Call, answer: str, name: Callable[[int], str]) -> str:
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


def _places(run: Path, recorded: Both) -> str:
    """What lies in the run's folder, and the commands that read it."""
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
        CONFIG: "the trainer's configuration, for <code>headrace train</code>",
        games.FILE: "one game of every group",
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

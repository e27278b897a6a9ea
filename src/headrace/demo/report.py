"""The report of the demo: the page of a run, with the game, games before and after, and the tokens of two of them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from headrace.demo import games
from headrace.demo.games import Game, first_games, last_games
from headrace.demo.progress import DemoProgress, FirstAndLast, RecordedCall, RecordedGame
from headrace.demo.recipe import LEARNED_REWARD, LEARNED_STEPS
from headrace.demo.services import DemoSettings
from headrace.demo.tasks import TASKS, NumberTask
from headrace.run.chart import chart, svg
from headrace.run.progress import METRICS
from headrace.run.report import bars, facts, loop_times, places, write_page
from headrace.run.services import TRAINER_FILE

#: Games that are shown of the first ones, and of the last ones.
SHOWN_GAMES = 6


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
    curve = f"{task.name}: reward by training step, and the mean of {LEARNED_STEPS}"
    marks = chart(progress.rewards, curve, goal=LEARNED_REWARD)
    vocabulary = _vocabulary(Path(settled.model) if settled.model is not None else run / "model")
    parts = [
        f"<p>{_outcome(progress, verdict)}",
        svg(marks),
        facts(verdict, leave_out=("task", "report")),
        "<h2>The game</h2>",
        _rules(task, len(vocabulary)),
        "<h2>Games</h2><div class=games>",
        _games("before", first_games(run, SHOWN_GAMES)),
        _games("after", last_games(run, SHOWN_GAMES)),
        "</div>",
        "<h2>Tokens and their log-probs</h2>",
        *_tokens(recorded, vocabulary),
        "<h2>Where the time went</h2>",
        bars("seconds of CPU by process", cpu_s),
        bars("seconds of the trainer's loop", loop_times(progress)),
        "<h2>Where to look</h2>",
        _places(run, recorded),
        "<h2>The trainer's configuration</h2>",
        f"<pre>{escape((run / TRAINER_FILE).read_text())}</pre>",
    ]
    return write_page(run, f"Headrace demo: {task.name}", marks, parts)


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
    found = {
        "journal": "the pool: what was recorded, and what became of it; "
        + ", ".join(f"<code>{c}</code>" for c in look),
        "logs": "what each process said",
        f"trainer/{METRICS}": "one line a step, with everything that was measured",
        "trainer": "checkpoints, which <code>headrace demo --resume</code> goes on from",
        TRAINER_FILE: "the trainer's configuration, for <code>headrace train</code>",
        games.GAMES_FILE: "one game of every group",
    }
    return places(run, found)

"""The report of the demo: that of a run, with the game, games before and after, and the tokens of two of them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.dashboard.about import About, AboutCall, AboutSection, AboutTable, AboutToken, Cell
from headrace.demo import games
from headrace.demo.games import Game, first_games, last_games
from headrace.demo.progress import DemoProgress, FirstAndLast, RecordedCall, RecordedGame
from headrace.demo.recipe import LEARNED_REWARD, LEARNED_STEPS
from headrace.demo.services import DemoSettings
from headrace.demo.tasks import TASKS, NumberTask
from headrace.run.chart import chart
from headrace.run.report import facts, places, quoted, times, trainer_configuration, write_pages
from headrace.run.services import JOURNAL, TRAINER_FILE

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
    sections = [
        _rules(task, len(vocabulary)),
        AboutSection(
            "Games",
            tables=[_games("before", first_games(run, SHOWN_GAMES)), _games("after", last_games(run, SHOWN_GAMES))],
        ),
        *_tokens(recorded, vocabulary),
        facts(verdict, leave_out=("task", "report")),
        times(progress, cpu_s),
        _places(run, recorded),
        trainer_configuration(run),
    ]
    return write_pages(run, About(f"Headrace demo: {task.name}", _outcome(progress, verdict), sections), marks)


def _outcome(progress: DemoProgress, verdict: Mapping[str, Any]) -> str:
    said = "Learned" if progress.learned else "Not learned yet"
    reward = f"{verdict['reward_end']:.3f}" if verdict["reward_end"] is not None else "unknown"
    return (
        f"{said}: the mean reward of the last {LEARNED_STEPS} steps is {reward}, after {verdict['steps']} steps, "
        f"{verdict['calls']:,} calls and {verdict['seconds']:.0f} s. {LEARNED_REWARD} counts as learned."
    )


def _rules(task: NumberTask, words: int) -> AboutSection:
    """The game, what perfect play is, and what random play gets."""
    numbers, guesses = task.numbers, task.guesses
    opening = task.game(seed=0, group=0).messages[0]["content"]
    rows: list[list[Cell]] = [
        ["perfect play: binary search, the middle of what is left", min(1.0, (2**guesses - 1) / numbers)],
        ["at random among the numbers, none of them twice", round(min(1.0, guesses / numbers), 2)],
    ]
    if words:
        chance = sum(((numbers - 1) / words) ** turn / words for turn in range(guesses))
        rows.append([f"at random among the {words} tokens of its vocabulary, as it begins", round(chance, 2)])
    said = (
        f"A number from 1 to {numbers} is hidden. The player has {guesses} guesses, and each that misses is answered "
        "“higher” or “lower”. A reply that is no such number ends the game. The reward is 1 for a hit and 0 for "
        f"everything else. The player is told none of this: a conversation begins with “{opening}”, and all that it "
        "ever learns from is the reward."
    )
    return AboutSection("The game", [said], [AboutTable(["a player's mean reward", ""], rows)])


def _games(when: str, told: Iterable[Game]) -> AboutTable:
    rows: list[list[Cell]] = [
        [game.hidden, ", ".join(f"{turn.guess.strip() or '∅'} {turn.answer}" for turn in game.turns()), game.reward]
        for game in told
    ]
    return AboutTable(["hidden", f"{when}: guesses, and what they were answered", "reward"], rows)


def _tokens(recorded: FirstAndLast, vocabulary: Mapping[int, str]) -> list[AboutSection]:
    """Two games as the pool recorded them, call by call."""

    def name(token: int) -> str:
        return vocabulary.get(token, str(token)).replace("\n", "⏎")

    title = "Tokens and their log-probs"
    found = {"one of the first games": recorded.first, "one of the last games": recorded.last}
    shown = [_recorded(when, game, name) for when, game in found.items() if game is not None]
    if not shown:
        return [AboutSection(title, ["The pool had neither a first nor a last game any more when it was asked."])]
    said = (
        "A guess is one call. Pale is what the server was given; coloured is what it sampled, with the log-prob that "
        "was recorded for it: the trainer's ratios are taken against it."
    )
    return [AboutSection(title, [said]), *shown]


def _recorded(when: str, game: RecordedGame, name: Callable[[int], str]) -> AboutSection:
    turns = zip(game.calls, game.game.turns(), strict=False)
    calls = [_call(call, turn.answer, name) for call, turn in turns]
    return AboutSection(f"{when}: {game.game.hidden} is hidden".capitalize(), [game.trajectory_uid], calls=calls)


def _call(call: RecordedCall, answer: str, name: Callable[[int], str]) -> AboutCall:
    sampled = list(zip(call.response_ids, call.log_probs, strict=False))
    tokens = [AboutToken(token, name(token)) for token in call.prompt_ids]
    tokens += [AboutToken(token, name(token), log_prob) for token, log_prob in sampled]
    chances = ", ".join(f"log-prob {log_prob:.3f}, p {math.exp(log_prob):.2f}" for _, log_prob in sampled)
    return AboutCall(tokens, f"{chances}; policy version {call.policy_version}; answered: {answer}")


def _vocabulary(model: Path) -> dict[int, str]:
    """The tokens of a checkpoint by id; none where it has no `tokenizer.json`."""
    from tokenizers import Tokenizer

    file = model / "tokenizer.json"
    return {at: word for word, at in Tokenizer.from_file(str(file)).get_vocab().items()} if file.exists() else {}


def _places(run: Path, recorded: FirstAndLast) -> AboutSection:
    """What is in the run's folder, and the commands that read it."""
    journal = quoted(run / JOURNAL)
    look = f"headrace pool stats {journal}"
    if recorded.last is not None:
        look += f"; headrace pool show {journal} {shlex.quote(recorded.last.trajectory_uid)}"
    more = {
        TRAINER_FILE: ("the trainer's configuration", f"headrace train {quoted(run / TRAINER_FILE)}"),
        games.GAMES_FILE: ("one game of every group", ""),
    }
    return places(run, look, "headrace demo --resume", more)

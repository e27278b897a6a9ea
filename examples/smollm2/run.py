"""The whole system on one machine: engine, gateway with its pool, trainer and agents; validations; the curve.

    python examples/smollm2/run.py --model runs/smollm2/model --run runs/smollm2

Each part is an ordinary command with a log of its own in RUN/logs, and knows the others by address only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from curve import curve, rows

from headrace.processes import Child, Processes

HERE = Path(__file__).parent
#: How long the gateway may take to load its tokenizer and to probe the engine.
READY_S = 60
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "reasoning_gym", "aiohttp", "fastapi", "msgspec")


def main() -> None:
    given = argparse.ArgumentParser(description="Train SmolLM2-135M on one machine.")
    given.add_argument("--model", type=Path, required=True, help="the checkpoint that model.py made")
    given.add_argument("--run", type=Path, required=True, help="folder for logs, checkpoints and metrics")
    given.add_argument("--steps", type=int, default=220)
    given.add_argument("--seconds", type=float, default=1e9, help="end training after so long, with a checkpoint")
    given.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint")
    given.add_argument("--validate-every", type=int, default=50, help="steps between validations")
    given.add_argument("--problems", type=int, default=400, help="held-out problems")
    given.add_argument("--max-tokens", type=int, default=64, help="of a reply")
    given.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of engine and trainer")
    given.add_argument("--device", default="cuda")
    given.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="in train.yaml")
    options = given.parse_args()
    options.run = options.run.absolute()
    (options.run / "logs").mkdir(parents=True, exist_ok=True)
    with Processes(options.run / "logs") as processes:
        Run(options, processes).run()


class Run:
    def __init__(self, options: argparse.Namespace, processes: Processes) -> None:
        self.options, self.processes, self.folder = options, processes, options.run
        self.config: dict[str, Any] = yaml.safe_load((HERE / "train.yaml").read_text())
        self.gateway = ""

    def run(self) -> None:
        options, began = self.options, time.monotonic()
        self._configured()
        batch, rollouts = self.config["pool"]["batch_size"], self.config["pool"]["n_rollouts"]
        engine = self.processes.start(
            *("engine", "headrace", "engine", "--model", options.model, "--port", 0, "--device", options.device),
            *("--dtype", options.dtype, "--max-model-len", self.config["max_length"], "--prefix-cache-mb", 0),
            *("--max-num-seqs", batch * rollouts, "--logprobs-mode", "processed_logprobs"),
        ).ready("engine")
        gateway = self.processes.start(
            *("gateway", "headrace", "serve", "--vllm-addresses", engine, "--tokenizer-path", options.model, "--open"),
            *("--host", "127.0.0.1", "--port", 0, "--journal", self.folder / "journal", "--durability", "os"),
            *("--channel", f"train:n_rollouts={rollouts},group_timeout_s=300", "--channel", "val:n_rollouts=1"),
        )
        self.gateway = gateway.ready("gateway")
        self._answers(gateway)
        print(f"engine {engine}, gateway {self.gateway}, {time.monotonic() - began:.0f} s", flush=True)
        for section in ("pool", "sync"):
            self.config[section]["address" if section == "pool" else "gateway"] = self.gateway
        config = self.folder / "train.yaml"
        config.write_text(yaml.safe_dump(self.config, sort_keys=False))
        trainer = self.processes.start(
            *("trainer", "headrace", "train", config), *(["--resume"] if options.resume else [])
        )
        self._published(trainer)
        if not options.resume:
            self._wait(self._validation())
        done = len(rows(self.folder / "trainer" / "metrics.jsonl"))
        agents = self._agents(
            *("agents", "--ahead", batch, "--rollouts", rollouts, "--at-once", batch * rollouts),
            *("--first", done * batch),
        )
        self._watch(trainer, began)
        for child in (agents, trainer):
            self.processes.end(child)
        self._wait(self._validation())
        self._tell(time.monotonic() - began)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _configured(self) -> None:
        options = self.options
        self.config |= {"model": str(options.model), "run": str(self.folder / "trainer"), "steps": options.steps}
        self.config |= {"device": options.device, "dtype": options.dtype}
        for change in options.set:
            name, _, value = change.partition("=")
            section, _, field = name.partition(".")
            self.config[section][field] = yaml.safe_load(value)

    def _agents(self, name: str, *more: Any) -> Child:
        given = ("--address", self.gateway, "--run", self.folder, "--problems", self.options.problems)
        # A module's name to `python -m`: the example's folder is on its path.
        env = {"PYTHONPATH": ":".join([str(HERE), *sys.path[1:]])}
        return self.processes.start(name, "agents", *given, "--max-tokens", self.options.max_tokens, *more, env=env)

    def _validation(self) -> Child:
        return self._agents("validation", "--validate")

    def _wait(self, child: Child) -> None:
        while child.code() is None:
            time.sleep(0.05)
        if child.code():
            child.check()
        print(child.said().strip(), flush=True)

    def _answers(self, child: Child) -> None:
        """Waits until the gateway has its tokenizer and has probed the engine: it listens before that."""
        give_up = time.monotonic() + READY_S
        while time.monotonic() < give_up:
            try:
                with urllib.request.urlopen(f"{self.gateway}/ready", timeout=10):
                    return
            except (urllib.error.URLError, TimeoutError):
                child.check()
                time.sleep(0.1)
        raise SystemExit(f"the gateway was not ready within {READY_S} s:\n{child.said()}")

    def _published(self, trainer: Child) -> None:
        """Waits until the engine has the trainer's weights. Before that a resumed run would sample from the first ones,
        and nothing would tell them apart."""
        while "trainer ready at step" not in trainer.said():
            trainer.check()
            time.sleep(0.1)

    def _watch(self, trainer: Child, began: float) -> None:
        """Until the trainer has ended, or the time is up."""
        seen, metrics = 0, self.folder / "trainer" / "metrics.jsonl"
        validated, validation = None, None
        while trainer.code() is None and time.monotonic() - began < self.options.seconds:
            time.sleep(0.25)
            for child in self.processes.children:
                if child.code():
                    child.check()
            lines = rows(metrics)
            for row in lines[seen:]:
                print(_said(row), flush=True)
            seen = len(lines)
            at = lines[-1]["step"] // self.options.validate_every if lines else 0
            if validated is None:
                validated = at
            if at > validated and (validation is None or validation.code() is not None):
                validated, validation = at, self._validation()
        if validation is not None:
            self._wait(validation)

    # -- telling -------------------------------------------------------------------------------------------------------

    def _tell(self, seconds: float) -> None:
        steps, validations = rows(self.folder / "trainer" / "metrics.jsonl"), rows(self.folder / "validation.jsonl")
        (self.folder / "curve.svg").write_text(curve(steps, validations))
        (self.folder / "versions.json").write_text(json.dumps(_versions(), indent=2))
        print(
            json.dumps(
                {
                    "steps": len(steps),
                    "seconds": round(seconds, 1),
                    "held_out_start": validations[0]["reward"],
                    "held_out_end": validations[-1]["reward"],
                    "curve": str(self.folder / "curve.svg"),
                }
            )
        )


def _said(row: dict[str, Any]) -> str:
    times = {name: round(value, 2) for name, value in row.get("times", {}).items()}
    names = ("loss", "entropy", "kl", "clip_fraction", "staleness_mean", "ratio_first_max", "grad_norm", "tokens_s")
    some = ", ".join(f"{name} {row[name]:.4g}" for name in names if row.get(name) is not None)
    length = row["tokens"] / max(row["sequences"], 1)
    gap, hold = row.get("logprob_gap_max"), (row.get("sync") or {}).get("hold_ms")
    return (
        f"step {row['step']}: reward {row['reward']:.3f}, length {length:.0f}, {some}, gap {gap}, hold {hold}, {times}"
    )


def _versions() -> dict[str, str]:
    import platform

    import torch

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(0), "cuda": str(torch.version.cuda)}
    return found


if __name__ == "__main__":
    main()

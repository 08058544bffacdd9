"""What forks/overlap.py saves where sites answer slowly: seconds a step, next to those of mgrpo.py.

    python tests/tools/slow_sites.py --model runs/bc --longest 0.5

Both train on the same tasks of the sandbox, one after the other, at a learning rate so small that the weights
stay what they were: so both play the same episodes and train on the same tokens. Each answer of the sites is held
back by a random time, 0 to LONGEST seconds.

What overlaps is a step's training and the next step's wait for its episodes, so these two are added: the time
from one batch to the next. The first wait and the last training, which overlap with nothing, are left out.
"""
import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from worlds import sandbox
from worlds.sandbox.server import Handler, Server

SCRIPTS = ("mgrpo.py", "forks/overlap.py")


@contextlib.contextmanager
def slow_sites(longest: float):
    """Serves the sandbox from this process; each answer takes 0 to `longest` seconds more. Yields {SITE: address}."""
    class Slow(Handler):
        def answer(self):
            time.sleep(random.uniform(0, longest))
            super().answer()

    server = Server()
    server.RequestHandlerClass = Slow
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.sites
    finally:
        server.shutdown()
        server.server_close()


def seconds_a_step(lines: list[dict]) -> dict[str, float]:
    """{"trains": mean seconds of a step's updates, "waits": and then for the next step's episodes}."""
    n = len(lines) - 1
    trains = sum(line["seconds_train"] for line in lines[:-1])
    waits = sum(line["seconds_rollout"] for line in lines[1:])
    return {"trains": trains / n, "waits": waits / n}


def train(script: str, tasks: Path, out: Path, sites: dict, args) -> list[dict]:
    """Runs a script; returns the lines of its metrics.jsonl."""
    arguments = {"--model": args.model, "--tasks": tasks, "--out": out, "--steps": args.steps,
                 "--batch": args.batch, "--G": args.G, "--seed": args.seed, "--lr": 1e-12}
    command = [sys.executable, ROOT / script, "--no-resume"]
    for flag, value in arguments.items():
        command += [flag, value]
    subprocess.run([*map(str, command)], env=os.environ | sites, check=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/bc")
    parser.add_argument("--longest", type=float, default=0.5, help="seconds that an answer takes at most")
    parser.add_argument("--steps", type=int, default=4, help="at least 2")
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--G", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    totals = []
    with tempfile.TemporaryDirectory() as folder, slow_sites(args.longest) as sites:
        tasks = Path(folder) / "tasks.json"
        tasks.write_text(json.dumps(sandbox.tasks("train", args.steps * args.batch)))
        for script in SCRIPTS:
            lines = train(script, tasks, Path(folder) / Path(script).stem, sites, args)
            seconds = seconds_a_step(lines)
            totals.append(seconds["waits"] + seconds["trains"])
            print(f"{script}: a step trains {seconds['trains']:.1f} s and then waits {seconds['waits']:.1f} s "
                  "for the next episodes")
    print(f"overlap.py takes {totals[1] / totals[0]:.2f} times as long a step as mgrpo.py")


if __name__ == "__main__":
    main()

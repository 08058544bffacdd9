"""Times a speed run: from an empty folder to 80% greedy success on sandbox:dev (assets/speedrun.md has the rules).

    python tests/tools/speedrun.py --seed 41
    python tests/tools/speedrun.py --seed 41 --clone "bc.py --epochs 6" --train "mgrpo.py --lr 4e-4"

--clone and --train are the commands that run, one after the other; --seed, --model and --out are added to them.
The clock starts with the first one and stops when an evaluation of the second has reached the target; the rest of
the run is ended. Prints one line for each evaluation. The proof is what it prints and OUT/r1/metrics.jsonl.
"""
import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TARGET = 0.8
CLONE = "bc.py"
TRAIN = "mgrpo.py --held-out sandbox:dev --held-out-every 2"


def start(command: str, log) -> subprocess.Popen:
    """A script of this project, with its output in `log`."""
    script, *flags = shlex.split(command)
    return subprocess.Popen([sys.executable, str(ROOT / script), *flags], stdout=log, stderr=log, cwd=ROOT)


def evaluations(metrics: Path) -> list[tuple[int, float]]:
    """(steps done, success on the held-out tasks) of every evaluation on record so far."""
    if not metrics.exists():
        return []
    found = []
    for line in metrics.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # still being written
        row = json.loads(line)
        if "held_out_success" in row:
            found.append((row["step"] + 1, row["held_out_success"]))
    return found


def wait_for_target(training: subprocess.Popen, metrics: Path, begin: float) -> float | None:
    """Minutes until the target was reached; None if the run ended before."""
    printed = 0
    while True:
        ended = training.poll() is not None  # asked first: what it wrote before it ended is read below
        minutes = (time.monotonic() - begin) / 60
        for steps, success in evaluations(metrics)[printed:]:
            print(f"{minutes:6.2f} minutes, {steps:2d} steps: {success:.1%} of sandbox:dev", flush=True)
            printed += 1
            if success >= TARGET:
                return minutes
        if ended:
            return None
        time.sleep(0.2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--clone", default=CLONE)
    parser.add_argument("--train", default=TRAIN)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or ROOT / f"runs/speedrun-{args.seed}"
    if out.exists():
        sys.exit(f"{out} exists: a speed run starts from an empty folder; remove it or use another --out.")
    out.mkdir(parents=True)
    clone = f"{args.clone} --seed {args.seed} --out {out}/bc"
    train = f"{args.train} --seed {args.seed} --model {out}/bc --out {out}/r1"
    commands = f"{clone}\n{train}".replace(f"{ROOT}/", "")  # the printout is a proof, and may be published
    print(f"{os.cpu_count()} cores of {platform.machine()}, seed {args.seed}\n{commands}", flush=True)

    begin = time.monotonic()
    with open(out / "log", "w") as log:
        if start(clone, log).wait() != 0:
            sys.exit(f"the clone failed; {out}/log says why.")
        print(f"{(time.monotonic() - begin) / 60:6.2f} minutes: cloned", flush=True)
        training = start(train, log)
        try:
            minutes = wait_for_target(training, out / "r1/metrics.jsonl", begin)
        finally:
            training.terminate()
            training.wait()
    if minutes is None:
        sys.exit(f"the run ended below {TARGET:.0%}; {out}/log has it.")
    print(f"{TARGET:.0%} after {minutes:.1f} minutes")


if __name__ == "__main__":
    main()

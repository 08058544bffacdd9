"""Prints what `make table SEED=N` and `make experiments SEED=N` have measured, as Markdown.

    python tests/table.py                       # every seed under assets/results/experiments
    python tests/table.py --cost RUN            # what a run took, as JSON: episodes played, minutes

Success in percent, greedy, with Wilson's 95% interval for one seed and Student's t over several.
Minutes are a method's own, after the clone: rollouts and updates, without start-up and saving.
The paper's filtered cloning and AWR learned offline, from episodes of WebRL's; ours play their own.
"""
import argparse
import json
import math
import statistics
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "assets/results/experiments"
# The last column: {file: (name, success on WebArena-Lite in arXiv 2505.16421, in percent)}
METHODS = {
    "the paper, Llama-3.1-8B": {
        "bc": ("behavior cloning", "20.6"), "filtered": ("filtered cloning", "23.0"),
        "awr": ("AWR", "28.5"), "digirl": ("DigiRL", "30.3"), "webrl": ("WebRL", "42.4"),
        "tsr": ("TSR", ""), "r1": ("M-GRPO", "44.8"), "credit": ("M-GRPO, turn credit", "")},
    "the paper, Qwen2.5-3B": {  # R1-Zero is read off its Figure 4
        "base": ("base", "6.1"), "zero": ("base, M-GRPO (R1-Zero)", "4.8"),
        "bc": ("behavior cloning", "20.0"), "r1": ("M-GRPO", "33.9"),
        "cot-bc": ("long thoughts, cloning", "24.5"), "cot": ("long thoughts, M-GRPO", "30.3"),
        "nothink-bc": ("no thoughts, cloning", ""), "nothink": ("no thoughts, M-GRPO", ""),
        "whole-bc": ("no compression, cloning", ""), "whole": ("no compression, M-GRPO", "")}}
SPLITS = {"sandbox:test": "Unseen instances of the training templates",
          "sandbox:test-unseen": "Unseen templates",
          "sandbox:test/28:100": "The log-out trap, template 28"}
T95 = (12.706, 4.303, 3.182, 2.776)  # Student's t for 2, 3, 4 and 5 seeds


def cost(run: Path) -> dict:
    """Episodes that the policy played and minutes, over a run's folder and the folders in it."""
    lines = lambda name: sum((path.read_text().splitlines() for path in run.rglob(name)), [])
    steps = map(json.loads, lines("metrics.jsonl"))
    seconds = sum(step.get("seconds_rollout", 0) + step.get("seconds_train", 0) for step in steps)
    timed = sum(map(float, lines("seconds")))  # the Makefile's, of runs without such metrics
    minutes = round((seconds + timed) / 60, 1)
    return {"episodes": len(lines("trajectories.jsonl")), "minutes": minutes}


def mean_cell(figures: list[dict]) -> str:
    """Mean success over seeds with its interval; one seed keeps its own."""
    if len(figures) == 1:
        return cell(figures[0])
    rates = [figure["success_rate"] for figure in figures]
    mean = statistics.mean(rates)
    half = T95[len(rates) - 2] * statistics.stdev(rates) / math.sqrt(len(rates))
    return cell({"success_rate": mean, "ci95": (max(0, mean - half), min(1, mean + half))})


def cell(figure: dict) -> str:
    shares = figure["success_rate"], *figure["ci95"]
    return "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * share for share in shares))


def read(results: Path) -> dict:
    """{seed: {method: {"splits": {split: figures}, "episodes": N, "minutes": N}}}"""
    seeds = {}
    for folder in sorted(results.glob("seed*")):
        seeds[folder.name.removeprefix("seed")] = methods = {}
        for name in {name for methods in METHODS.values() for name in methods}:
            if (path := folder / f"{name}.json").exists():
                taken = json.loads((folder / f"{name}-cost.json").read_text())
                methods[name] = {"splits": json.loads(path.read_text())["splits"]} | taken
    return seeds


def table(seeds: dict, split: str, last: str) -> str:
    """One row a method, one column a seed; empty where nothing was run. last: a key of METHODS."""
    head, rows = ["method", *(f"seed {seed}" for seed in seeds), "mean"], []
    costs = ["minutes", "episodes"] if split == "sandbox:test" else []
    for name, (title, paper) in METHODS[last].items():
        runs = [methods.get(name) for methods in seeds.values()]
        figures = [run["splits"][split] if run else None for run in runs]
        done = [figure for figure in figures if figure]
        row = [title, *(cell(figure) if figure else "" for figure in figures)]
        row.append(mean_cell(done) if done else "")
        row += [", ".join(f"{run[key]:.0f}" for run in runs if run) for key in costs]
        rows.append(row + [paper] * bool(costs))
    head += costs + [last] * bool(costs)
    rows = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS, help="with seedN folders")
    parser.add_argument("--cost", type=Path, metavar="RUN", help="print what this run took instead")
    args = parser.parse_args()
    if args.cost:
        return print(json.dumps(cost(args.cost)))
    seeds = read(args.results)
    for split, title in SPLITS.items():
        for last in METHODS:
            print(f"{title} (`{split}`):\n\n{table(seeds, split, last)}\n")


if __name__ == "__main__":
    main()

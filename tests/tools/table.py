"""Prints what `make table SEED=N` and `make experiments SEED=N` have measured, as Markdown.

    python tests/tools/table.py                       # every seed under assets/results/experiments
    python tests/tools/table.py --templates           # gains over cloning, with templates as clusters
    python tests/tools/table.py --paired              # differences to M-GRPO, seed by seed
    python tests/tools/table.py --cost RUN            # what a run took, as JSON: episodes played, minutes

Success in percent, greedy, mean over the seeds: 95% interval by Student's t, of one seed Wilson's.
Minutes are a method's own, after the clone: rollouts and updates; for cloning, whole commands.
The paper's filtered cloning and AWR learned offline; ours play their own episodes.
"""
import argparse
import json
import math
import statistics
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "assets/results/experiments"
# {last column: {file: (name, success on WebArena-Lite in arXiv 2505.16421, in percent)}}
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
SPLITS = {"sandbox:test": "unseen instances", "sandbox:test-unseen": "unseen templates",
          "sandbox:test/28:100": "log-out trap"}
# Student's t: 2 to 19 seeds or templates
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
       2.110, 2.101)


def cost(run: Path) -> dict:
    """Episodes that the policy played and minutes, over a run's folder and the folders in it."""
    lines = lambda name: sum((path.read_text().splitlines() for path in run.rglob(name)), [])
    steps = map(json.loads, lines("metrics.jsonl"))
    seconds = sum(step.get("seconds_rollout", 0) + step.get("seconds_train", 0) for step in steps)
    timed = sum(map(float, lines("seconds")))  # the Makefile's, of runs without such metrics
    minutes = round((seconds + timed) / 60, 1)
    return {"episodes": len(lines("trajectories.jsonl")), "minutes": minutes}


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean of two or more values and the ends of its 95% interval by Student's t."""
    mean = statistics.mean(values)
    half = T95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def cell(figures: list[dict]) -> str:
    """Mean success over seeds with its interval; one seed keeps its own."""
    rates = [figure["success_rate"] for figure in figures]
    mean, (low, high) = rates[0], figures[0]["ci95"]
    if len(rates) > 1:
        mean, low, high = interval(rates)
    return f"{100 * mean:.1f} [{100 * max(0, low):.1f}, {100 * min(1, high):.1f}]"


def read(results: Path) -> dict:
    """{method: [{"seed": text, "splits": {split: figures}, "episodes": N, "minutes": N}]}"""
    runs = {name: [] for methods in METHODS.values() for name in methods}
    for name, done in runs.items():
        for path in sorted(results.glob(f"seed*/{name}.json")):
            taken = json.loads(path.with_name(f"{name}-cost.json").read_text())
            splits = json.loads(path.read_text())["splits"]
            done.append({"seed": path.parent.name[4:], "splits": splits} | taken)
    return runs


def table(runs: dict, last: str) -> str:
    """One row a method; empty where nothing was run. last: a key of METHODS."""
    rows = [["method", "seeds", *SPLITS.values(), "minutes", "episodes", last]]
    rows.append(["---"] * len(rows[0]))
    for name, (title, paper) in METHODS[last].items():
        row = [title, "", *[""] * len(SPLITS), "", "", paper]
        if done := runs[name]:
            row[1] = ", ".join(run["seed"] for run in done)
            row[2:-3] = [cell([run["splits"][split] for run in done]) for split in SPLITS]
            minutes, episodes = (statistics.mean(run[key] for run in done) for key in ("minutes", "episodes"))
            row[-3:-1] = f"{minutes:.1f}", f"{episodes:.0f}"
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def by_template(done: list[dict], split: str) -> dict[str, float]:
    """{template: success on the split, mean over the seeds}"""
    rates = {}
    for run in done:
        for figures in run["splits"][split]["per_template"].values():
            rates.setdefault(figures["template"], []).append(figures["success_rate"])
    return {template: statistics.mean(values) for template, values in rates.items()}


def templates(runs: dict, last: str = "the paper, Llama-3.1-8B") -> str:
    """Each method's gain over the clone: points, mean over templates with its interval; then the unseen templates.

    Tasks of one template succeed and fail together, so the interval takes templates as clusters.
    """
    splits = [split for split in SPLITS if "/" not in split]
    names = list(by_template(runs["bc"], "sandbox:test-unseen"))
    rows = [["method", *(f"gain, {SPLITS[split]}" for split in splits), *names]]
    rows.append(["---"] * len(rows[0]))
    for method, (title, _) in METHODS[last].items():
        if not runs[method]:
            continue
        row = [title]
        for split in splits:
            clone = by_template(runs["bc"], split)
            rates = by_template(runs[method], split)
            gains = [100 * (rates[template] - clone[template]) for template in clone]
            row.append("{:.1f} [{:.1f}, {:.1f}]".format(*interval(gains)))
        unseen = by_template(runs[method], "sandbox:test-unseen")
        rows.append(row + [f"{100 * unseen[name]:.0f}" for name in names])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def paired(runs: dict, last: str = "the paper, Llama-3.1-8B") -> str:
    """Each method's success minus M-GRPO's, in points: mean of the differences within a seed, its interval over seeds.

    Behind the semicolon the same differences with templates as clusters: mean and interval over the templates' means.
    """
    splits = [split for split in SPLITS if "/" not in split]
    rows = [["method minus M-GRPO", "seeds", *(SPLITS[split] for split in splits)]]
    rows.append(["---"] * len(rows[0]))
    ours = {run["seed"]: run for run in runs["r1"]}
    for method, (title, _) in METHODS[last].items():
        theirs = [run for run in runs[method] if run["seed"] in ours]
        if method == "r1" or len(theirs) < 2:
            continue
        row = [title, ", ".join(run["seed"] for run in theirs)]
        for split in splits:
            rate = lambda run: run["splits"][split]["success_rate"]
            over_seeds = [100 * (rate(run) - rate(ours[run["seed"]])) for run in theirs]
            mine = by_template([ours[run["seed"]] for run in theirs], split)
            rates = by_template(theirs, split)
            over_templates = [100 * (rates[template] - mine[template]) for template in mine]
            row.append("; ".join("{:.1f} [{:.1f}, {:.1f}]".format(*interval(values))
                                 for values in (over_seeds, over_templates)))
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS, help="with seedN folders")
    parser.add_argument("--templates", action="store_true", help="gains over cloning instead, by template")
    parser.add_argument("--paired", action="store_true", help="differences to M-GRPO within each seed instead")
    parser.add_argument("--cost", type=Path, metavar="RUN", help="print what this run took instead")
    args = parser.parse_args()
    if args.cost:
        return print(json.dumps(cost(args.cost)))
    runs = read(args.results)
    if args.templates:
        return print(templates(runs))
    if args.paired:
        return print(paired(runs))
    print("\n\n".join(table(runs, last) for last in METHODS))


if __name__ == "__main__":
    main()

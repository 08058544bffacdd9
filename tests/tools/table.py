"""Prints what `make table`, `make experiments` and `make forks` (with SEED=N) have measured, as Markdown.

    python tests/tools/table.py                       # every seed under assets/results/experiments
    python tests/tools/table.py --templates           # gains over cloning, with templates as clusters
    python tests/tools/table.py --paired              # differences to M-GRPO, seed by seed
    python tests/tools/table.py --short               # the README's table: means, and differences to M-GRPO
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

# {last column: {file: (name, what the last column says of it)}}. The paper's figures are success on
# WebArena-Lite in arXiv 2505.16421, in percent; R1-Zero's is read off its Figure 4.
COMPARED = "the paper, Llama-3.1-8B"
ABLATIONS = "the paper, Qwen2.5-3B"
LATER = "arXiv"
METHODS = {
    COMPARED: {
        "bc": ("behavior cloning", "20.6"),
        "filtered": ("filtered cloning", "23.0"),
        "awr": ("AWR", "28.5"),
        "digirl": ("DigiRL", "30.3"),
        "webrl": ("WebRL", "42.4"),
        "tsr": ("TSR", ""),
        "r1": ("M-GRPO", "44.8"),
        "credit": ("M-GRPO, turn credit", ""),
    },
    ABLATIONS: {
        "base": ("base", "6.1"),
        "zero": ("base, M-GRPO (R1-Zero)", "4.8"),
        "bc": ("behavior cloning", "20.0"),
        "r1": ("M-GRPO", "33.9"),
        "cot-bc": ("long thoughts, cloning", "24.5"),
        "cot": ("long thoughts, M-GRPO", "30.3"),
        "nothink-bc": ("no thoughts, cloning", ""),
        "nothink": ("no thoughts, M-GRPO", ""),
        "whole-bc": ("no compression, cloning", ""),
        "whole": ("no compression, M-GRPO", ""),
        "norm-paper": ("M-GRPO, --loss-norm paper", ""),
        "norm-constant": ("M-GRPO, --loss-norm constant", ""),
    },
    LATER: {
        "dr_grpo": ("Dr. GRPO", "2503.20783"),
        "maxrl": ("MaxRL", "2602.02710"),
        "raft": ("RAFT", "2504.11343"),
        "dapo": ("DAPO", "2503.14476"),
        "gspo": ("GSPO", "2507.18071"),
        "cispo": ("CISPO", "2506.13585"),
        "masked": ("masked failures", "2512.02556"),
        "checklist": ("checklist rewards", "2602.12268"),
        "critic": ("critic", "1707.06347"),
        "feedback": ("feedback of the world", "2605.24517"),
        "overlap": ("overlap", "2410.18252"),
    },
}
SPLITS = {
    "sandbox:test": "unseen instances",
    "sandbox:test-unseen": "unseen templates",
    "sandbox:test/28:100": "log-out trap",
}
OF_MANY_TEMPLATES = ["sandbox:test", "sandbox:test-unseen"]
TESTED = ("sandbox:test", "sandbox:dev")  # how the splits begin that only test a policy
# Student's t: 2 to 19 seeds or templates
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
       2.110, 2.101)


def lines_below(folder: Path, name: str) -> list[str]:
    """The lines of all files of that name, in the folder and the folders in it."""
    lines = []
    for path in folder.rglob(name):
        lines += path.read_text().splitlines()
    return lines


def cost(run: Path) -> dict:
    """Episodes that the policy played to learn from, and minutes, over a run's folder and the folders in it."""
    seconds = 0.0
    for line in lines_below(run, "metrics.jsonl"):
        step = json.loads(line)
        seconds += step.get("seconds_rollout", 0) + step.get("seconds_train", 0)
    for line in lines_below(run, "seconds"):  # the Makefile's, of runs without such metrics
        seconds += float(line)
    episodes = 0
    for line in lines_below(run, "trajectories.jsonl"):
        split = json.loads(line).get("split", "")
        if not split.startswith(TESTED):  # `make demo` tests a policy in the policy's own folder
            episodes += 1
    return {"episodes": episodes, "minutes": round(seconds / 60, 1)}


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean of two or more values and the ends of its 95% interval by Student's t."""
    mean = statistics.mean(values)
    half = T95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def shown(values: list[float]) -> str:
    """Points: mean [low, high]."""
    mean, low, high = interval(values)
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def success(figures: list[dict]) -> str:
    """Mean success over seeds with its interval; one seed keeps its own."""
    rates = [figure["success_rate"] for figure in figures]
    if len(rates) > 1:
        mean, low, high = interval(rates)
    else:
        mean = rates[0]
        low, high = figures[0]["ci95"]
    return f"{100 * mean:.1f} [{100 * max(0, low):.1f}, {100 * min(1, high):.1f}]"


def markdown(rows: list[list[str]]) -> str:
    """A table; the first row is its head."""
    head, *body = rows
    ruled = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in ruled)


def read(results: Path) -> dict:
    """{method: [{"seed": text, "splits": {split: figures}, "episodes": N, "minutes": N}]}"""
    runs = {}
    for methods in METHODS.values():
        for name in methods:
            runs[name] = []
            for path in sorted(results.glob(f"seed*/{name}.json")):
                seed = path.parent.name.removeprefix("seed")
                splits = json.loads(path.read_text())["splits"]
                taken = json.loads(path.with_name(f"{name}-cost.json").read_text())
                runs[name].append({"seed": seed, "splits": splits} | taken)
    return runs


def seeds(done: list[dict]) -> str:
    return ", ".join(run["seed"] for run in done)


def table(runs: dict, last: str) -> str:
    """One row a method; empty where nothing was run. last: a key of METHODS."""
    rows = [["method", "seeds", *SPLITS.values(), "minutes", "episodes", last]]
    for name, (title, of_the_last) in METHODS[last].items():
        done = runs[name]
        measured = [""] * (len(SPLITS) + 2)
        if done:
            measured = [success([run["splits"][split] for run in done]) for split in SPLITS]
            measured.append(f"{statistics.mean(run['minutes'] for run in done):.1f}")
            measured.append(f"{statistics.mean(run['episodes'] for run in done):.0f}")
        rows.append([title, seeds(done), *measured, of_the_last])
    return markdown(rows)


def by_template(done: list[dict], split: str) -> dict[str, float]:
    """{template: success on the split, mean over the seeds}"""
    rates = {}
    for run in done:
        for figures in run["splits"][split]["per_template"].values():
            rates.setdefault(figures["template"], []).append(figures["success_rate"])
    return {template: statistics.mean(values) for template, values in rates.items()}


def template_gains(theirs: list[dict], ours: list[dict], split: str) -> list[float]:
    """Success of the first minus that of the second, in points, one number a template."""
    rates = by_template(theirs, split)
    baseline = by_template(ours, split)
    return [100 * (rates[template] - baseline[template]) for template in baseline]


def by_seed(done: list[dict]) -> dict[str, dict]:
    """{seed: run}"""
    return {run["seed"]: run for run in done}


def mean_success(done: list[dict], split: str) -> float:
    """In percent, over the seeds."""
    return 100 * statistics.mean(run["splits"][split]["success_rate"] for run in done)


def seed_gains(theirs: list[dict], ours: list[dict], split: str) -> list[float]:
    """Success of the first minus that of the second, in points, one number a seed."""
    gains = []
    for their, our in zip(theirs, ours):
        difference = their["splits"][split]["success_rate"] - our["splits"][split]["success_rate"]
        gains.append(100 * difference)
    return gains


def templates(runs: dict) -> str:
    """Each method's gain over the clone: points, mean over templates with its interval; then the unseen templates.

    Tasks of one template succeed and fail together, so the interval takes templates as clusters.
    """
    names = list(by_template(runs["bc"], "sandbox:test-unseen"))
    gains = [f"gain, {SPLITS[split]}" for split in OF_MANY_TEMPLATES]
    rows = [["method", *gains, *names]]
    for method, (title, _) in METHODS[COMPARED].items():
        if not runs[method]:
            continue
        row = [title]
        for split in OF_MANY_TEMPLATES:
            row.append(shown(template_gains(runs[method], runs["bc"], split)))
        unseen = by_template(runs[method], "sandbox:test-unseen")
        row += [f"{100 * unseen[name]:.0f}" for name in names]
        rows.append(row)
    return markdown(rows)


def paired(runs: dict) -> str:
    """Each method's success minus M-GRPO's, in points: mean of the differences within a seed, its interval over seeds.

    Behind the semicolon the same differences with templates as clusters: mean and interval over the templates' means.
    """
    rows = [["method minus M-GRPO", "seeds", *(SPLITS[split] for split in OF_MANY_TEMPLATES)]]
    mgrpo = by_seed(runs["r1"])
    for method, (title, _) in (METHODS[COMPARED] | METHODS[LATER]).items():
        theirs = [run for run in runs[method] if run["seed"] in mgrpo]
        if method == "r1" or len(theirs) < 2:
            continue
        ours = [mgrpo[run["seed"]] for run in theirs]
        row = [title, seeds(theirs)]
        for split in OF_MANY_TEMPLATES:
            over_seeds = seed_gains(theirs, ours, split)
            over_templates = template_gains(theirs, ours, split)
            row.append(f"{shown(over_seeds)}; {shown(over_templates)}")
        rows.append(row)
    return markdown(rows)


def short(runs: dict) -> str:
    """The paper's methods, one row each: mean success over its seeds, and the difference to M-GRPO with these seeds."""
    head = ["method", "seeds"]
    for split in OF_MANY_TEMPLATES:
        head += [SPLITS[split], "minus M-GRPO"]
    rows = [[*head, SPLITS["sandbox:test/28:100"], "paper"]]
    mgrpo = by_seed(runs["r1"])
    for method, (title, of_the_paper) in METHODS[COMPARED].items():
        theirs = [run for run in runs[method] if run["seed"] in mgrpo]
        if len(theirs) < 2:
            continue
        ours = [mgrpo[run["seed"]] for run in theirs]
        row = [title, str(len(theirs))]
        for split in OF_MANY_TEMPLATES:
            row.append(f"{mean_success(theirs, split):.1f}")
            if method == "r1":
                row.append("")
            else:
                row.append(shown(seed_gains(theirs, ours, split)))
        row.append(f"{mean_success(theirs, 'sandbox:test/28:100'):.0f}")
        row.append(of_the_paper or "–")
        rows.append(row)
    return markdown(rows)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS, help="with seedN folders")
    parser.add_argument("--templates", action="store_true", help="gains over cloning instead, by template")
    parser.add_argument("--paired", action="store_true", help="differences to M-GRPO within each seed instead")
    parser.add_argument("--short", action="store_true", help="means and differences to M-GRPO instead, one row a method")
    parser.add_argument("--cost", type=Path, metavar="RUN", help="print what this run took instead")
    args = parser.parse_args()

    if args.cost:
        print(json.dumps(cost(args.cost)))
        return
    runs = read(args.results)
    if args.templates:
        print(templates(runs))
    elif args.paired:
        print(paired(runs))
    elif args.short:
        print(short(runs))
    else:
        print("\n\n".join(table(runs, last) for last in METHODS))


if __name__ == "__main__":
    main()

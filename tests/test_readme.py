"""The README keeps its word: what it names exists, what it tells a reader to type works."""
import ast
import importlib
import json
import os
import re
import runpy
import subprocess
import sys

import curves
import fork_lines
import packing
import pytest
import reading_cost
import table
from conftest import ROOT

import bc
import mgrpo

README = (ROOT / "README.md").read_text()
FILES = ["model", "compress", "rollout", "evaluate", "bc", "mgrpo"]
COMMANDS = re.findall(r"^    .*?\b((?:\w+/)*\w+\.py) +(.*?)(?: +#.*)?$", README, re.MULTILINE)


def test_every_name_in_the_map_from_the_paper_exists():
    section = README.split("| in the paper | in the code |")[1].split("\n\n")[0]
    names = re.findall(r"`(\w+)\.(\w+)`", section)
    assert len(names) > 12
    for module, name in names:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_the_reading_order_lists_the_six_files_in_the_order_of_their_imports():
    assert re.findall(r"^\| `(\w+)\.py` \|", README, re.MULTILINE) == FILES


def test_every_file_that_the_documents_name_exists():
    for document in (ROOT / "README.md", ROOT / "forks/README.md", *(ROOT / "assets").glob("*.md")):
        for name in re.findall(r"`((?:assets|forks|tests|worlds)/[\w./-]*)`", document.read_text()):
            made_by_the_reader = ("forks/short.py", "forks/mine.py")
            assert name in made_by_the_reader or (ROOT / name).exists(), f"{document.name}: {name}"


def anchors(path) -> set[str]:
    """The names under which a page's headings can be linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_or_a_heading():
    links = 0
    for page in (ROOT / "README.md", ROOT / "forks/README.md", *(ROOT / "assets").glob("*.md")):
        for link in re.findall(r"\]\((?!http)([^)\s]+)\)", page.read_text()):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists() and (not anchor or anchor in anchors(target)), f"{page.name}: {link}"
            links += 1
    assert links > 20


def test_the_page_of_forks_is_held_to_the_files():
    """Every fork has a section with its number of code lines, what it replaces, and its command.

    A reader's own forks may stand beside them.
    """
    page = (ROOT / "forks/README.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    counted = fork_lines.fork_lines()
    assert f"({counted.pop('shared')} lines)" in page
    tracked = subprocess.run(["git", "ls-files", "forks"], cwd=ROOT, capture_output=True, text=True).stdout
    ours = [name for name in counted if f"forks/{name}.py\n" in tracked or not tracked]
    assert list(sections) == ours  # in the order of the alphabet
    for name, text in sections.items():
        said = re.search(r"^Lines: (\d+)\. Replaces: (.*?)\. Sources?: ", text.strip())
        assert int(said[1]) == counted[name], name
        assert f"python forks/{name}.py " in text, name
        values = vars(importlib.import_module(f"forks.{name}")).values()
        methods = [value for value in values if isinstance(value, type) and issubclass(value, mgrpo.MGRPO)]
        if not methods:  # a fork of bc.py
            assert hasattr(bc, said[2].strip("`")), name
            continue
        method = methods[0]
        replaced = sorted(key for key in vars(method) if key in vars(mgrpo.MGRPO) and callable(getattr(method, key)))
        assert said[2] == ", ".join(f"`{key}`" for key in replaced if key != "__init__"), name


def imported_modules(path) -> dict[str, set[str]]:
    """{module: names} of what a file imports from the top level of this repository."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name.partition(".")[0], set()).add("*")
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.setdefault(node.module.partition(".")[0], set()).update(alias.name for alias in node.names)
    return found


def test_no_file_imports_upward():
    """run.py is at the bottom, and each of the six imports only files above it in the README, run.py and worlds/."""
    ours = {*FILES, "run", "worlds", "forks"}
    assert not imported_modules(ROOT / "run.py").keys() & ours
    for i, name in enumerate(FILES):
        allowed = {*FILES[:i], "run", "worlds"}
        assert imported_modules(ROOT / f"{name}.py").keys() & ours <= allowed, name


def test_worlds_is_a_leaf():
    """worlds/ imports none of the six files, and of run.py only what files and progress need."""
    helpers = {"print0", "ticker", "ignore", "reading", "writing", "read_json"}
    for path in (ROOT / "worlds").rglob("*.py"):
        imported = imported_modules(path)
        assert not imported.keys() & {*FILES, "forks"}, path
        assert imported.get("run", set()) <= helpers, path


def test_every_flag_of_every_command_exists(monkeypatch, capsys):
    assert len(COMMANDS) >= 10
    for script in {script for script, _ in COMMANDS if script != "site.py"}:  # that is the reader's own
        monkeypatch.setattr(sys, "argv", [script, "--help"])
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        shown = capsys.readouterr().out
        for arguments in [arguments for name, arguments in COMMANDS if name == script]:
            for flag in re.findall(r"(?<!\S)--[a-z-]+", arguments):
                assert re.search(rf"{flag}\b", shown), f"{script} has no {flag}"


def test_every_make_target_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_recipes_for_a_site_and_a_fork_of_ones_own(checkpoint, tmp_path):
    """As they stand in the README, but for the size of the runs: tasks written, validated, trained on, forked."""
    blocks = re.findall(r"```\w+\n(.*?)```", README, re.DOTALL)
    site = next(block for block in blocks if "ThreadingHTTPServer" in block)
    tasks = next(block for block in blocks if "required_contents" in block and "import json" in block)
    fork = next(block for block in blocks if "mgrpo.MGRPO" in block)
    for name, text in (("bakery/site.py", site), ("bakery/tasks.py", tasks), ("forks/short.py", fork)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    run = lambda *command: subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=ROOT,
                                          timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert run(tmp_path / "bakery/tasks.py").returncode == 0
    for split, n in (("train", 24), ("test", 8)):
        assert f"{n} usable tasks, 0 broken rows" in run("evaluate.py", "--validate", tmp_path / f"bakery/{split}.json").stdout
    small = ["--model", checkpoint, "--tasks", tmp_path / "bakery/train.json", "--batch", 2, "--G", 2, "--max-turns", 2,
             "--max-new-tokens", 8, "--concurrency", 2, "--steps", 1]
    done = run("mgrpo.py", *small, "--out", tmp_path / "run")
    forked = run(tmp_path / "forks/short.py", *small, "--out", tmp_path / "short")
    assert done.returncode == 0, done.stderr
    assert forked.returncode == 0, forked.stderr
    assert len((tmp_path / "short/metrics.jsonl").read_text().splitlines()) == 1
    played = [json.loads(line) for line in (tmp_path / "run/trajectories.jsonl").read_text().splitlines()]
    assert len(played) == 4 and all("<a>barley " in episode["turns"][0]["observation"] for episode in played)


@pytest.mark.parametrize("figure, folder", [("training", "experiments"), ("language_model", "smollm2/miniwob")])
def test_the_curves_are_drawn_from_the_raw_figures(figure, folder):
    raw = sorted((ROOT / "assets/results" / folder).glob("seed3?/r1-metrics.jsonl"))
    assert raw and curves.draw(raw) == (ROOT / f"assets/{figure}.svg").read_text()


def test_the_training_curves_open_with_held_out_success(tmp_path):
    """Every run, their mean and band, from the clones' figure on; base, clone and filtered cloning beside them."""
    for seed, rates in enumerate([(0.5, 0.7), (0.6, 0.9)]):
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        line = dict(success_rate=0.5, response_tokens=16, turns=3)
        lines = [line | {"step": step} for step in range(4)]
        for step, rate in zip((1, 3), rates):
            lines[step] |= {"held_out": "sandbox:dev:60", "held_out_success": rate}
        (folder / "r1-metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        for name, rate in (("base", 0.1), ("bc", (0.3, 0.5)[seed]), ("filtered", (0.55, 0.65)[seed])):
            splits = {"sandbox:test": {"success_rate": 1.0}, "sandbox:dev:60": {"success_rate": rate}}
            (folder / f"{name}.json").write_text(json.dumps({"splits": splits}))
    svg = curves.draw(sorted(tmp_path.glob("*/r1-metrics.jsonl")))
    number = r"(-?[\d.]+)"
    left, bottom, right = map(float, re.search(rf'class="axis" d="M{number} {number}H{number}"', svg).groups())
    top = min(float(y) for y in re.findall(rf'class="grid" d="M{left:.0f} {number}H', svg))

    def points(kind):
        """[[(step, value)]] of the lines of this kind that are in the panel on the left."""
        lines = []
        for text in re.findall(f'class="{kind}" points="(.*?)"', svg):
            pairs = [[float(part) for part in pair.split(",")] for pair in text.split()]
            if pairs[0][0] <= right:
                lines.append([((x - left) / (right - left) * 4.4, (bottom - y) / (bottom - top)) for x, y in pairs])
        return lines

    def at_steps_0_2_4(*rates):
        return [pytest.approx(point, abs=2e-3) for point in zip((0, 2, 4), rates)]

    assert points("mean") == [at_steps_0_2_4(0.4, 0.55, 0.8)]
    assert points("run") == [at_steps_0_2_4(0.3, 0.5, 0.7), at_steps_0_2_4(0.5, 0.6, 0.9)]
    [band] = points("band")
    assert band[:3] == at_steps_0_2_4(0.3, 0.5, 0.7) and band[:2:-1] == at_steps_0_2_4(0.5, 0.6, 0.9)
    for name in ("base: 10%", "after cloning: 40%", "M-GRPO: 80%", "filtered cloning: 60%"):
        assert f">{name}</text>" in svg
    low, high = re.search(rf'class="other" d="M{number} {number}V{number}"', svg).groups()[1:]
    assert [(bottom - float(y)) / (bottom - top) for y in (low, high)] == pytest.approx([0.55, 0.65], abs=2e-3)
    assert svg.count('<path class="level"') == 2 and svg.count("<polyline") == 3 + len(curves.SAMPLED)
    assert "of them" not in svg
    (tmp_path / "seed1/filtered.json").unlink()
    svg = curves.draw(sorted(tmp_path.glob("*/r1-metrics.jsonl")))
    assert ">filtered cloning: 55%</text>" in svg and "filtered cloning: 1 of them" in svg
    assert ">one run</text>" in curves.draw([tmp_path / "seed0/r1-metrics.jsonl"])


def test_a_speed_run_stops_its_clock_and_the_training_at_the_target(tmp_path):
    """Each evaluation is printed once, a half-written line is left for later, and no run goes on in the background."""
    train = tmp_path / "train.py"
    train.write_text("import os, pathlib, sys, time\n"
                     "out = pathlib.Path(sys.argv[-1]); out.mkdir()\n"
                     "(out / 'pid').write_text(str(os.getpid()))\n"
                     "file = open(out / 'metrics.jsonl', 'w', buffering=1)\n"
                     "file.write('{\"step\": 0, \"loss\": 1.0}\\n{\"step\": 1, \"held_out_success\": 0.75}\\n')\n"
                     "file.write('{\"step\": 3, \"held_out'); file.flush(); time.sleep(0.7)\n"
                     "file.write('_success\": 0.8}\\n'); time.sleep(60)\n")
    clone = tmp_path / "clone.py"
    clone.write_text("")
    command = [sys.executable, "tests/tools/speedrun.py", "--seed", "5", "--out", tmp_path / "out"]
    done = subprocess.run([*command, "--clone", str(clone), "--train", str(train)], cwd=ROOT, capture_output=True, text=True,
                          timeout=50)
    assert done.returncode == 0, done.stderr
    evaluated = [line.split(", ")[1] for line in done.stdout.splitlines() if "sandbox:dev" in line]
    assert evaluated == [" 2 steps: 75.0% of sandbox:dev", " 4 steps: 80.0% of sandbox:dev"]
    assert "80% after 0.0 minutes" in done.stdout
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "out/r1/pid").read_text()), 0)

    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 1 and "starts from an empty folder" in again.stderr


def test_a_speed_run_that_ends_below_the_target_or_has_no_clone_says_so(tmp_path):
    train, fails = tmp_path / "train.py", tmp_path / "fails.py"
    train.write_text("import pathlib, sys\n"
                     "out = pathlib.Path(sys.argv[-1]); out.mkdir()\n"
                     "(out / 'metrics.jsonl').write_text('{\"step\": 1, \"held_out_success\": 0.79}\\n')\n")
    fails.write_text("raise SystemExit('no browser')")
    cases = ((train, " 2 steps: 79.0%", "the run ended below 80%"), (fails, "", "the clone failed"))
    for clone, printed, said in cases:
        out = tmp_path / clone.stem
        command = [sys.executable, "tests/tools/speedrun.py", "--seed", "5", "--out", out, "--clone", str(clone), "--train", str(train)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
        assert done.returncode == 1 and printed in done.stdout
        assert said in done.stderr and str(out / "log") in done.stderr


def test_no_two_names_of_lines_overlap():
    panel = curves.Panel(left=0, top=0, width=100, height=60, x_low=0, x_high=4, y_low=0, y_high=1.0)
    svg = curves.names(panel, [(0.02, "a", "run"), (0.0, "b", "run"), (0.01, "c", "mean"), (1.0, "d", "other")])
    heights = [float(y) for y in re.findall(r' y="([\d.]+)"', "".join(svg))]
    assert all(below - above >= curves.LINE_HEIGHT for above, below in zip(heights, heights[1:]))
    assert max(heights) <= panel.height + 4 and [line[-8] for line in svg] == list("dacb")


def test_the_picture_of_packing_shows_what_pack_writes(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["packing.py", "--out", str(tmp_path / "packing.svg")])
    packing.main()
    svg = (tmp_path / "packing.svg").read_text()
    assert svg == (ROOT / "assets/packing.svg").read_text()
    for kind in (kind for kind, _ in packing.LEGEND):
        assert f'<rect class="{kind}"' in svg


def test_gains_by_template_are_those_of_the_raw_figures():
    earlier = (ROOT / "assets/earlier.md").read_text()
    former = ROOT / "assets/results/earlier/experiments-former-base"
    rows = table.templates(table.read(former)).splitlines()[2:]
    assert len(rows) == 8 and all(row in earlier for row in rows)


def test_paired_differences_are_those_of_the_raw_figures():
    results = (ROOT / "assets/results.md").read_text()
    rows = table.paired(table.read(table.RESULTS)).splitlines()[2:]
    assert rows and all(row in results for row in rows)


def test_the_cost_of_reading_is_counted_line_by_line(tmp_path):
    (tmp_path / "model.py").write_text('"""Opening, not code."""\nimport math\n')
    (tmp_path / "bc.py").write_text(
        '"""Opening."""\nfrom model import a, b\n\n# a comment\ndef f(x):\n    """Docstring."""\n'
        "    y = (lambda z: z)(x) if x else [i for i in x for _ in i]  # no comment line\n"
        "    a, b = x, y\n    return g(1, 2, 3, 4, 5) if (n := x) else None\n")
    cost = reading_cost.measure(tmp_path / "bc.py", tmp_path)
    assert (cost.lines, cost.code_lines, cost.comment_lines) == (9, 5, 1)
    assert (cost.lambdas, cost.nested, cost.walrus, cost.conditional, cost.pairs, cost.long_calls) == (1, 1, 1, 2, 1, 1)
    assert cost.own_names == 2
    assert reading_cost.measure(tmp_path / "model.py", tmp_path).code_tokens == 2

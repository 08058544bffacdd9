"""The README keeps its word: what it names exists, what it tells a reader to type works."""
import importlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import time
from urllib.error import URLError
from urllib.request import urlopen

import curves
import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()
FILES = ["model", "compress", "rollout", "evaluate", "bc", "mgrpo"]
COMMANDS = re.findall(r"^    .*?\b((?:\w+/)*\w+\.py) +(.*?)(?: +#.*)?$", README, re.MULTILINE)


def test_every_name_in_the_map_from_the_paper_exists():
    section = README.split("| in the paper | in the code |")[1].split("\n\n")[0]
    names = re.findall(r"`(\w+)\.(\w+)`", section)
    assert len(names) > 12
    for module, name in names:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_the_files_stay_as_short_as_the_readme_promises():
    assert re.findall(r"^\| `(\w+)\.py` \|", README, re.MULTILINE) == FILES
    longest = int(re.search(r"No file is longer than (\d+) lines", README)[1])
    for name in FILES:
        assert len((ROOT / f"{name}.py").read_text().splitlines()) <= longest, name
    assert len(README.split()) <= 2000


def test_every_link_leads_to_a_file():
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert links and all((ROOT / link).exists() for link in links)


def test_worlds_is_a_leaf():
    """worlds/ imports none of the six files, and each of these imports only files above it."""
    imported = lambda path: set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
    for path in (ROOT / "worlds").rglob("*.py"):
        assert not imported(path) & set(FILES), path
    for i, name in enumerate(FILES):
        assert not imported(ROOT / f"{name}.py") & set(FILES[i:]), name


def test_every_flag_of_every_command_exists(monkeypatch, capsys):
    assert len(COMMANDS) >= 10
    for script in {script for script, _ in COMMANDS}:
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


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_the_recipe_for_a_site_of_ones_own(checkpoint, tmp_path):
    """As it stands in the README, but for the port and the size of the run: served, validated, trained for two steps."""
    port = str(free_port())
    blocks = re.findall(r"```\w+\n(.*?)```", README, re.DOTALL)
    server = next(block for block in blocks if "ThreadingHTTPServer" in block)
    tasks = next(block for block in blocks if "reference_answers" in block)
    assert len(server.splitlines()) + len(tasks.splitlines()) <= 30
    for name, text in (("bakery.py", server), ("tasks.json", tasks)):
        (tmp_path / name).write_text(text.replace("7770", port))
    run = lambda *command: subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=ROOT,
                                          timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    process = subprocess.Popen([sys.executable, tmp_path / "bakery.py"], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                assert b"Monday" in urlopen(f"http://127.0.0.1:{port}/", timeout=5).read()
                break
            except URLError:
                pass
        assert "2 usable tasks, 0 broken rows" in run("evaluate.py", "--validate", tmp_path / "tasks.json").stdout
        done = run("mgrpo.py", "--model", checkpoint, "--tasks", tmp_path / "tasks.json", "--out", tmp_path / "run", "--steps", 2,
                   "--batch", 2, "--G", 2, "--max-turns", 2, "--max-new-tokens", 8, "--concurrency", 2)
    finally:
        process.kill()
        process.wait()
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    played = [json.loads(line) for line in (tmp_path / "run/trajectories.jsonl").read_text().splitlines()]
    assert len(played) == 8 and all("Opening hours" in episode["turns"][0]["observation"] for episode in played)


def test_the_curves_are_drawn_from_the_raw_figures():
    raw = sorted((ROOT / "assets/results").glob("demo-seed1?/r1-metrics.jsonl"))
    assert len(raw) == 3 and curves.draw(raw) == (ROOT / "assets/training.svg").read_text()


def test_the_training_curves_open_with_held_out_success(tmp_path):
    """The mean of the runs with their range around it, from the clones' figure on; base and clone as dashed lines."""
    for seed, rates in enumerate([(0.5, 0.7), (0.6, 0.9)]):
        folder = tmp_path / f"demo-seed{seed}"
        folder.mkdir()
        line = dict(success_rate=0.5, response_tokens=16, turns=3)
        lines = [line | {"step": step} for step in range(4)]
        for step, rate in zip((1, 3), rates):
            lines[step]["held_out_success"] = rate
        (folder / "r1-metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        for name, rate in (("base", 0.1), ("bc", (0.3, 0.5)[seed])):
            (folder / f"{name}-dev.json").write_text(json.dumps({"success_rate": rate}))
    svg = curves.draw(sorted(tmp_path.glob("*/r1-metrics.jsonl")))
    at = lambda x, y: f"{curves.LEFT + 200 * x:.1f},{56 + 130 * (1 - y):.1f}"
    assert f'points="{at(0, 0.4)} {at(0.5, 0.55)} {at(1, 0.8)}"' in svg  # steps 0, 2 and 4 of 4
    assert f'points="{at(0, .3)} {at(.5, .5)} {at(1, .7)} {at(1, .9)} {at(.5, .6)} {at(0, .5)}"' in svg
    assert "base 10%" in svg and "BC 40%" in svg and svg.count("stroke-dasharray") == 2 and svg.count("<polyline") == 7

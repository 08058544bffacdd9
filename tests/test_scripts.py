"""Each script as a user runs it: a subprocess, small sizes, two ranks under torchrun, and what it says to bad input."""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import permutations

import pytest
import torch
from conftest import ROOT

from worlds import sandbox
from evaluate import Run
from model import load
from worlds.sandbox import tasks

ENV = os.environ | {"OMP_NUM_THREADS": "1"}
SMALL = ["--max-turns", "2", "--max-new-tokens", "8", "--max-context", "1200", "--concurrency", "4"]
METRICS = """step reward success_rate turns response_tokens trajectory_tokens kl clip_frac entropy logp_gap grad_norm groups_kept
env_errors truncated invalid_actions seconds_rollout seconds_train tokens_per_second""".split()


def script(name, *arguments, ranks=0, env=ENV):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks)] if ranks else []
    return subprocess.run([sys.executable, *launcher, str(ROOT / name), *map(str, arguments)], capture_output=True, text=True,
                          cwd=ROOT, env=env, timeout=300)


@pytest.fixture(scope="module")
def cloned(checkpoint, tmp_path_factory):
    """bc.py's output, which the other scripts start from."""
    out = tmp_path_factory.mktemp("runs") / "bc"
    done = script("bc.py", "--model", checkpoint, "--out", out, "--demos", 3, "--epochs", 1, "--batch", 4, "--max-context", 4000)
    assert done.returncode == 0, done.stderr
    return out


def test_bc_records_demonstrations_and_leaves_a_checkpoint(cloned):
    records = [json.loads(line) for line in (cloned / "demos.jsonl").read_text().splitlines()]
    assert len(records) == 3 and all(r["reward"] == 1 for r in records)
    run = json.loads((cloned / "config.json").read_text())["run"]
    assert run["demos"] == 3 and run["torch"] == torch.__version__ and "commit" in run and "device" in run and run["seed"] == 0
    assert load(cloned) and (cloned / "tokenizer.json").exists() and (cloned / "agent.json").exists()


@pytest.mark.parametrize("ranks, more", [(0, []), (2, []), (2, ["--replicas", 2])])
def test_mgrpo_runs_logs_and_saves(cloned, tmp_path, ranks, more):
    done = script("mgrpo.py", "--model", cloned, "--out", tmp_path / "rl", "--steps", 2, "--batch", 2, "--G", 2, "--beta", 0.01, *SMALL,
                  *more, ranks=ranks)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "rl/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1] and all(set(METRICS) <= set(line) for line in lines)
    assert load(tmp_path / "rl") and (tmp_path / "rl/report.html").exists()
    played = [json.loads(line) for line in (tmp_path / "rl/trajectories.jsonl").read_text().splitlines()]
    assert len(played) == 8 and all(len(t["turns"]) <= 2 for t in played)


@pytest.fixture(scope="module")
def lock_step(tmp_path_factory):
    """train(out, *arguments): mgrpo.py on tasks that the small base solves now and then, bit for bit the same in every run."""
    places = "kitchen garden office music sports travel".split()
    wanted = [{"sites": ["shopping"], "task_id": i, "world": i, "start_url": "__SHOPPING__", "require_login": False,
               "storage_state": None, "intent": f"point at {a} else at {b}", "intent_template_id": 1,
               "eval": {"eval_types": ["url_match"], "reference_answers": None, "program_html": [], "url_note": "EXACT",
                        "reference_url": f"__SHOPPING__/category/{a}"}} for i, (a, b) in enumerate(permutations(places, 2))]
    path = tmp_path_factory.mktemp("tasks") / "tasks.json"
    path.write_text(json.dumps(wanted))
    with sandbox.start() as urls:
        yield lambda out, *more, name="mgrpo.py", first=(), ranks=0: script(
            name, *first, "--model", ROOT / "worlds/base", "--tasks", path, "--out", out, "--batch", 4, "--G", 4, "--max-turns", 1,
            "--max-new-tokens", 32, "--temperature", 1, "--deterministic", *more, ranks=ranks, env=ENV | urls)


def outcome(out):
    """(weights, metrics but for times, which episode stands where on record) of a run."""
    lines, played = ([json.loads(line) for line in (out / name).read_text().splitlines()]
                     for name in ("metrics.jsonl", "trajectories.jsonl"))
    return ({name: weight.tolist() for name, weight in load(out).state_dict().items()},
            [{k: v for k, v in line.items() if "second" not in k} for line in lines],
            [(t["step"], t["task_id"], t["member"], t["reward"]) for t in played])


def test_a_resumed_run_equals_one_that_never_stopped(lock_step, tmp_path):
    """Bit for bit, in lock-step. The row of a step that was never saved, and half a line, are forgotten."""
    assert lock_step(tmp_path / "whole", "--steps", 4, "--no-decay").returncode == 0
    assert lock_step(tmp_path / "parts", "--steps", 2, "--no-decay").returncode == 0
    with open(tmp_path / "parts/metrics.jsonl", "a") as file:
        file.write('{"step": 2, "reward": 1.0}\n{"step": 3, "rew')
    done = lock_step(tmp_path / "parts", "--steps", 4, "--no-decay", "--max-tokens", 9000)
    assert done.returncode == 0 and "goes on at step 3" in done.stdout, done.stderr
    other = lock_step(tmp_path / "parts", "--steps", 5, "--no-decay", "--eps", 0.3)
    assert other.returncode != 0 and "eps 0.2, not 0.3" in other.stderr and "--no-resume" in other.stderr
    whole, parts = outcome(tmp_path / "whole"), outcome(tmp_path / "parts")
    assert whole == parts and [row["step"] for row in whole[1]] == [0, 1, 2, 3]
    assert all(row["groups_kept"] for row in whole[1][1:])  # there was something to resume: every step trained


def killed(phase, step, delay, victim, *arguments):
    """What the next test runs of this file: mgrpo.py, with SIGKILL for one rank so many seconds into a phase of a step."""
    import mgrpo
    now = []

    def armed(name, function):
        def wrapped(*given, **named):
            now[:] = [given[3]] if name == "rollout" else now  # collect(model, chat, tasks, step, ...)
            if (name, now) == (phase, [int(step)]) and mgrpo.rank() == int(victim):
                threading.Timer(float(delay), os.kill, (os.getpid(), signal.SIGKILL)).start()
            return function(*given, **named)
        return wrapped

    for name, function in (("rollout", "collect"), ("update", "update"), ("save", "save"), ("save", "save_training")):
        setattr(mgrpo, function, armed(name, getattr(mgrpo, function)))
    sys.argv = ["mgrpo.py", *arguments]
    mgrpo.command_line(mgrpo.main, mgrpo.parse_args)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_sigkill_at_any_moment_costs_nothing_but_time(lock_step, tmp_path, ranks):
    """Ten runs of six steps, each killed in one of steps 2 to 5 and begun again, against one that was not."""
    size = ("--steps", 6, "--save-every", 2)
    done = lock_step(tmp_path / "whole", *size, ranks=ranks)
    assert done.returncode == 0, done.stderr
    whole = outcome(tmp_path / "whole")
    for seed in range(10):
        rng = random.Random(seed)
        phase, longest = [("rollout", 1.0), ("update", 0.2), ("save", 0.05)][seed % 3]
        step = rng.choice([1, 3]) if phase == "save" else rng.randrange(1, 5)
        kill = (phase, step, rng.uniform(0, longest), rng.randrange(max(ranks, 1)))
        done = lock_step(tmp_path / str(seed), *size, name=__file__, first=kill, ranks=ranks)
        assert done.returncode != 0 and (ranks or done.returncode == -signal.SIGKILL), (kill, done.stderr)
        done = lock_step(tmp_path / str(seed), *size, ranks=ranks)
        assert done.returncode == 0, (kill, done.stderr)
        assert outcome(tmp_path / str(seed)) == whole, kill


@pytest.mark.slow
def test_when_a_rank_dies_the_others_end_and_say_so_and_the_same_command_goes_on(lock_step, tmp_path):
    size = ("--steps", 6, "--save-every", 2)
    began = time.monotonic()
    done = lock_step(tmp_path, *size, name=__file__, first=("rollout", 3, 0.1, 1), ranks=2)
    assert time.monotonic() - began < 120 and done.returncode != 0
    assert "mgrpo.py: rank 0 lost another rank; the same command goes on" in done.stderr and "gloo" not in done.stderr
    done = lock_step(tmp_path, *size, ranks=2)
    assert done.returncode == 0 and "goes on at step 3" in done.stdout, done.stderr


def test_evaluate_writes_a_summary_and_a_report(cloned, tmp_path):
    done = script("evaluate.py", "--model", cloned, "--tasks", "sandbox:test:3", "--out", tmp_path, *SMALL)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["n"] == 3 and len(summary["ci95"]) == 2 and "per_site" in summary and (tmp_path / "report.html").exists()


def test_two_ranks_make_the_steps_that_one_rank_makes(checkpoint, tmp_path):
    runs = []
    for ranks in (1, 2):
        done = script("tests/two_ranks.py", checkpoint, tmp_path / f"{ranks}.pt", ranks=ranks)
        assert done.returncode == 0, done.stderr
        runs.append(torch.load(tmp_path / f"{ranks}.pt", weights_only=True))
    one, two = runs
    for a, b in zip(one["metrics"], two["metrics"], strict=True):
        for key in ("loss", "grad_norm", "kl", "logp_gap", "entropy"):
            assert a[key] == pytest.approx(b[key], rel=1e-5), key
    for name, weight in one["state"].items():
        torch.testing.assert_close(two["state"][name], weight, atol=1e-6, rtol=1e-5)


def test_a_gpus_precision_holds_in_rollout_training_and_evaluation(checkpoint, tmp_path):
    """On CPUs, with the bfloat16 that `shard` chooses on GPUs: masters stay float32, all three compute in bfloat16."""
    done = script("tests/two_ranks.py", "bfloat16", checkpoint, tmp_path / "gaps.pt", ranks=2)
    assert done.returncode == 0, done.stderr
    said = torch.load(tmp_path / "gaps.pt", weights_only=True)
    assert said["cache"] == torch.bfloat16 and said["master"] == torch.float32
    assert 1e-6 < max(said["sampling"]) < 1e-2  # below: float32, where the same sums in another order differ by 1e-7
    assert max(said["evaluation"]) < 1e-6


@pytest.mark.parametrize("name, arguments, says", [
    ("mgrpo.py", ["--model", "runs/nowhere"], ["runs/nowhere", "config.json"]),
    ("bc.py", ["--model", "/no/such/dir"], ["/no/such/dir"]),
    ("bc.py", ["--data", "/no/such.jsonl"], ["/no/such.jsonl"]),
    ("mgrpo.py", ["--loss-norm", "mean"], ["--loss-norm", "paper, token or constant"]),
    ("mgrpo.py", ["--observation", "screenshot"], ["--observation screenshot", "compact"]),
    ("mgrpo.py", ["--model", "worlds/base", "--tasks", "sandbox:train:5"], ["--batch 24", "5 tasks"]),
    ("bc.py", ["--max-context", "100", "--max-new-tokens", "10", "--data", "assets/episode.jsonl"], ["fits --max-context 100"]),
    ("evaluate.py", ["--model", "runs/nowhere"], ["runs/nowhere"]),
    ("evaluate.py", ["--observation", "screenshot"], ["--observation screenshot", "compact"]),
])
def test_bad_input_is_one_sentence(name, arguments, says, tmp_path):
    done = script(name, *arguments, "--out", tmp_path / "x")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    for word in says:
        assert word in done.stderr


@pytest.mark.parametrize("arguments", [["mgrpo.py", "--model", "RUN"], ["bc.py", "--data", "RUN/trajectories.jsonl"]])
def test_a_new_run_does_not_empty_the_directory_that_it_begins_from(arguments, checkpoint, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(checkpoint, run)
    earned = (ROOT / "assets/episode.jsonl").read_text()
    (run / "trajectories.jsonl").write_text(earned)
    done = script(*(argument.replace("RUN", str(run)) for argument in arguments), "--out", run)
    assert done.returncode != 0 and "where a new run begins with nothing" in done.stderr and "Traceback" not in done.stderr
    assert (run / "trajectories.jsonl").read_text() == earned


def test_an_unreachable_site_is_one_sentence(cloned, tmp_path):
    (tmp_path / "tasks.json").write_text(json.dumps([tasks("test", 1)[0]]))
    done = script("mgrpo.py", "--model", cloned, "--tasks", tmp_path / "tasks.json", "--out", tmp_path / "x",
                  env=ENV | {"SHOPPING": "http://127.0.0.1:9", "REDDIT": "http://127.0.0.1:9"})
    assert done.returncode != 0 and "Traceback" not in done.stderr and "cannot reach http://127.0.0.1:9" in done.stderr


def test_no_chromium_is_one_sentence(cloned, tmp_path):
    done = script("evaluate.py", "--model", cloned, "--tasks", "sandbox:test:1", "--out", tmp_path,
                  env=ENV | {"PATH": "", "PLAYWRIGHT_BROWSERS_PATH": str(tmp_path)})
    assert done.returncode != 0 and "Traceback" not in done.stderr and "playwright install" in done.stderr


def test_a_directory_in_use_or_not_writable_is_one_sentence(cloned, tmp_path):
    """Two runs in one directory would spoil each other's records."""
    (tmp_path / "file").write_text("")
    done = script("mgrpo.py", "--model", cloned, *SMALL, "--out", tmp_path / "file/x")
    assert done.returncode != 0 and "Traceback" not in done.stderr and "cannot write" in done.stderr
    run = Run(tmp_path / "x", {})
    run.claim()
    run.write({"step": 0})
    done = script("mgrpo.py", "--model", cloned, *SMALL, "--out", tmp_path / "x")
    assert done.returncode != 0 and "Traceback" not in done.stderr and f"in use by process {os.getpid()}" in done.stderr
    assert [file.name for file in sorted((tmp_path / "x").iterdir())] == ["lock", "metrics.jsonl"]


if __name__ == "__main__":
    killed(*sys.argv[1:])

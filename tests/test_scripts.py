"""The scripts as a user runs them: small sizes, two ranks under torchrun, signals, kills, and bad input."""
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import permutations
from pathlib import Path

import pytest
import torch
from conftest import ROOT, tiny_model
from test_mgrpo import TASKS, even_tasks_teach
from two_ranks import groups, sample_in_bfloat16, train_policy

import bc
import evaluate
import mgrpo
import run as runs
from compress import Chat
from evaluate import Environment
from forks import critic
from model import full_state, load, load_tokenizer, shard
from run import Run, gather, init_dist, rank, world_size
from worlds.sandbox import tasks

ENV = os.environ | {"OMP_NUM_THREADS": "1"}
SMALL = ["--max-turns", "2", "--max-new-tokens", "8", "--max-context", "1200", "--concurrency", "4"]
METRICS = """step reward success_rate turns response_tokens trajectory_tokens loss kl clip_frac entropy logp_gap
grad_norm groups_kept env_errors env_retries exited truncated invalid_actions failed_actions pages_cut skipped change
tokens_trained seconds_rollout seconds_train tokens_per_second""".split()
# What the end of each script gives to command_line.
SCRIPTS = {"bc.py": (bc, {"paper": bc.PAPER}, None), "mgrpo.py": (mgrpo, {"paper": mgrpo.PAPER}, "runs/bc"),
           "evaluate.py": (evaluate, {}, evaluate.checkpoint_of)}


def command(name, *arguments, ranks=0):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks)] if ranks else []
    return [sys.executable, *launcher, str(ROOT / name), *map(str, arguments)]


def script(name, *arguments, ranks=0, env=ENV):
    return subprocess.run(command(name, *arguments, ranks=ranks), capture_output=True, text=True, cwd=ROOT,
                          env=env, timeout=300)


def run_here(name, *arguments, **env):
    """The same in this process, which spares the import of torch."""
    module, presets, start = SCRIPTS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr("sys.argv", [name, *map(str, arguments)])
        for key, value in env.items():
            patch.setenv(key, value)
        module.main(runs.parse_args(module.Config, module.__doc__, presets, start))


def refusal(name, *arguments, **env) -> str:
    """The sentence with which a script refuses its arguments."""
    with pytest.raises(ValueError) as refused:
        run_here(name, *arguments, **env)
    return str(refused.value)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def cloned(checkpoint, tmp_path_factory):
    """bc.py's output, which the other scripts start from."""
    out = tmp_path_factory.mktemp("runs") / "bc"
    done = script("bc.py", "--model", checkpoint, "--out", out, "--demos", 3, "--epochs", 1, "--batch", 4,
                  "--max-context", 4000)
    assert done.returncode == 0, done.stderr
    return out


def test_bc_records_demonstrations_and_leaves_a_checkpoint(cloned):
    records = read(cloned / "demos.jsonl")
    assert len(records) == 3 and all(r["success"] == r["reward"] == 1 for r in records)
    run = json.loads((cloned / "config.json").read_text())["run"]
    assert run["demos"] == 3 and run["torch"] == torch.__version__ and run["seed"] == 0
    assert "commit" in run and "device" in run
    assert load(cloned) and (cloned / "tokenizer.json").exists() and (cloned / "agent.json").exists()


@pytest.mark.slow
def test_two_ranks_record_the_demonstrations_of_one_and_train_adapters(cloned, checkpoint, tmp_path):
    done = script("bc.py", "--model", checkpoint, "--out", tmp_path, "--demos", 3, "--epochs", 1, "--batch", 4,
                  "--max-context", 4000, "--lora", 4, ranks=2)
    assert done.returncode == 0, done.stderr
    said = lambda path: [(r["task_id"], [turn["response"] for turn in r["turns"]]) for r in read(path)]
    assert said(tmp_path / "demos.jsonl") == said(cloned / "demos.jsonl") and load(tmp_path)


@pytest.mark.parametrize("ranks, more", [
    (0, []), (2, ["--held-out", "sandbox:dev:2", "--held-out-every", 2])])
def test_mgrpo_runs_logs_and_saves(cloned, tmp_path, ranks, more):
    arguments = ["--model", cloned, "--out", tmp_path, "--steps", 2, "--batch", 2, "--G", 2, "--beta", 0.01,
                 *SMALL]
    if ranks:
        done = script("mgrpo.py", *arguments, *more, ranks=ranks)
        assert done.returncode == 0, done.stderr
        shown = [done.stdout.count(what) for what in (f"report: {tmp_path}/report.html (", "  held out: 1/1 episodes (100%)")]
        assert shown == [1, int("--held-out" in more)]  # by one rank
    else:
        run_here("mgrpo.py", *arguments)
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1] and all(set(METRICS) <= set(line) for line in lines)
    assert load(tmp_path) and (tmp_path / "report.html").exists()
    played = read(tmp_path / "trajectories.jsonl")
    assert len(played) == 8 and all(len(t["turns"]) <= 2 for t in played)


def test_evaluate_writes_a_summary_and_a_report(cloned, tmp_path):
    done = script("evaluate.py", "--model", cloned, "--tasks", "sandbox:test:3", "--out", tmp_path, *SMALL)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["n"] == 3 and len(summary["ci95"]) == 2 and "per_site" in summary
    assert (tmp_path / "report.html").exists()


# ---------------------------------------------------------------------------- runs that stop and continue


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory, sandbox_sites):
    """Arguments of mgrpo.py on tasks that the small base solves now and then.

    With one episode after the other, two runs are equal bit for bit.
    """
    places = "kitchen garden office music sports travel".split()
    wanted = [{"sites": ["shopping"], "task_id": i, "world": i, "start_url": "__SHOPPING__",
               "require_login": False, "storage_state": None, "intent": f"point at {a} else at {b}",
               "intent_template_id": 1, "eval": {
                   "eval_types": ["url_match"], "reference_answers": None, "program_html": [],
                   "url_note": "EXACT", "reference_url": f"__SHOPPING__/category/{a}"}}
              for i, (a, b) in enumerate(permutations(places, 2))]
    path = tmp_path_factory.mktemp("tasks") / "tasks.json"
    path.write_text(json.dumps(wanted))
    return ["--model", ROOT / "worlds/base", "--tasks", path, "--batch", 4, "--G", 4, "--max-turns", 1,
            "--max-new-tokens", 32, "--temperature", 1, "--lr", 2e-4, "--concurrency", 1]


def outcome(out):
    """(weights, metrics but for times, which episode stands where on record) of a run."""
    lines, played = read(out / "metrics.jsonl"), read(out / "trajectories.jsonl")
    return ({name: weight.tolist() for name, weight in load(out).state_dict().items()},
            [{k: v for k, v in line.items() if "second" not in k} for line in lines],
            [(t["step"], t["task_id"], t["member"], t["success"]) for t in played])


@pytest.mark.parametrize("signals", [[(2, signal.SIGINT)], pytest.param(
    [(2, signal.SIGTERM), (3, signal.SIGINT)], marks=pytest.mark.slow)])
def test_a_signal_ends_a_run_without_a_traceback_and_the_same_command_continues_it(
        one_by_one, sandbox_sites, tmp_path, signals):
    """Bit for bit, against a run that was left alone. Each signal comes after that step's line.

    Rows of a step that was never saved, and half a line, are forgotten.
    """
    steps = signals[-1][0] + 1
    run_here("mgrpo.py", *one_by_one, "--steps", steps, "--out", tmp_path / "whole", **sandbox_sites)
    out = tmp_path / "parts"
    same = command("mgrpo.py", *one_by_one, "--steps", steps, "--out", out)
    env = ENV | sandbox_sites
    for step, number in signals:
        process = subprocess.Popen(same, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, start_new_session=True)
        while f"step {step}/{steps}" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        os.killpg(process.pid, number)  # as a terminal does: the browser hears it as well
        _, complaint = process.communicate(timeout=60)
        assert process.returncode == -number and complaint == ""
        with open(out / "metrics.jsonl", "a") as file:
            file.write('{"step": 3, "loss": 1.0}\n{"step": 3, "lo')
    done = subprocess.run(same, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    first = step, step + 1  # the last step may have been saved or not
    assert done.returncode == 0 and any(f"from step {i} on" in done.stdout for i in first), done.stderr
    other = refusal("mgrpo.py", *one_by_one, "--steps", 9, "--eps", 0.3, "--out", out, **sandbox_sites)
    assert f"steps {steps}, not 9" in other and "eps 0.2, not 0.3" in other and "--no-resume" in other
    whole, parts = outcome(tmp_path / "whole"), outcome(out)
    assert whole == parts and [row["step"] for row in whole[1]] == list(range(steps))
    assert all(row["groups_kept"] for row in whole[1][1:])  # every step after the first trained


def killed(phase, step, delay, victim, *arguments):
    """What the next tests run of this file: mgrpo.py, with SIGKILL for a rank some seconds into a phase."""
    now = []

    def armed(name, function):
        def wrapped(*given, **named):
            if name == "rollout":
                now[:] = [given[3]]  # collect's step
            if (name, now) == (phase, [int(step)]) and rank() == int(victim):
                threading.Timer(float(delay), os.kill, (os.getpid(), signal.SIGKILL)).start()
            return function(*given, **named)
        return wrapped

    for name, place, function in (("rollout", mgrpo.MGRPO, "collect"), ("update", mgrpo, "update"),
                                  ("save", mgrpo, "save"), ("save", runs, "save_state")):
        setattr(place, function, armed(name, getattr(place, function)))
    sys.argv = ["mgrpo.py", *arguments]
    runs.command_line(mgrpo.main, mgrpo.Config, mgrpo.__doc__, {"paper": mgrpo.PAPER}, "runs/bc")


@pytest.fixture
def six_steps(one_by_one, sandbox_sites):
    """six_steps(out, ranks, kill): mgrpo.py as a process, six steps, a save every second one."""
    def run(out, ranks, kill=()):
        name, first = (__file__, kill) if kill else ("mgrpo.py", ())
        return script(name, *first, *one_by_one, "--out", out, "--steps", 6, "--save-every", 2, ranks=ranks,
                      env=ENV | sandbox_sites)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_sigkill_at_any_moment_costs_nothing_but_time(six_steps, tmp_path, ranks):
    """Ten runs, each killed in one of steps 2 to 5 and started again, against one that was left alone."""
    done = six_steps(tmp_path / "whole", ranks)
    assert done.returncode == 0, done.stderr
    whole = outcome(tmp_path / "whole")
    for seed in range(10):
        rng = random.Random(seed)
        phase, longest = [("rollout", 1.0), ("update", 0.2), ("save", 0.05)][seed % 3]
        step = rng.choice([1, 3]) if phase == "save" else rng.randrange(1, 5)
        kill = (phase, step, rng.uniform(0, longest), rng.randrange(max(ranks, 1)))
        done = six_steps(tmp_path / str(seed), ranks, kill)
        assert done.returncode != 0 and (ranks or done.returncode == -signal.SIGKILL), (kill, done.stderr)
        done = six_steps(tmp_path / str(seed), ranks)
        assert done.returncode == 0, (kill, done.stderr)
        assert outcome(tmp_path / str(seed)) == whole, kill


@pytest.mark.slow
def test_when_a_rank_dies_the_others_end_and_say_so_and_the_same_command_continues(six_steps, tmp_path):
    began = time.monotonic()
    done = six_steps(tmp_path, 2, kill=("rollout", 3, 0.1, 1))
    assert time.monotonic() - began < 120 and done.returncode != 0
    said = re.findall("mgrpo.py: .*", done.stderr)  # by rank 0, unless torchrun ends it before it notices
    assert said in ([], ["mgrpo.py: rank 0 lost another rank; run the same command again."])
    assert "gloo" not in done.stderr and "Signal 9 (SIGKILL)" in done.stderr  # torchrun names what happened
    done = six_steps(tmp_path, 2)
    assert done.returncode == 0 and "from step 3 on" in done.stdout, done.stderr


# ------------------------------------------------------------------------------------------ several ranks


def on_ranks(checkpoint, out):
    """What torchrun runs of this file: four checks in one launch, results to files in `out`."""
    torch.set_num_threads(1)
    train_policy(checkpoint, f"{out}/policy.pt")
    unequal_work(checkpoint, f"{out}/unequal.json")
    train_critic(checkpoint, f"{out}/critic.pt")
    sample_in_bfloat16(checkpoint, f"{out}/bfloat16.pt")
    sys.stdout.flush()
    os._exit(0)  # as run.command_line ends a rank


def unequal_work(checkpoint, out):
    """Ranks with unequal work, down to none, in collect and in update."""
    device, chat, forwards = init_dist(), Chat(load_tokenizer(checkpoint), "You browse the web."), []
    mgrpo.rollout = even_tasks_teach(chat)
    model = shard(tiny_model(vocab_size=chat.tokenizer.get_vocab_size()))
    model.register_forward_hook(lambda *_: forwards.append(0))
    optimizer, lines = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch, seed in ((5, 0), (1, 1)):
        cfg = mgrpo.Config(batch=batch, G=2, seed=seed, max_tokens=60)
        method = mgrpo.MGRPO(cfg, chat, model, None, optimizer, device)
        nowhere = Environment({}, "", cfg)
        episodes = method.collect(method.choose_tasks(TASKS, 0), nowhere, 0)
        forwards.clear()
        rows, metrics = method.learn_from(episodes, 0)
        mine = len({id(row.tau) for row in rows}) // cfg.G  # groups of this rank
        metrics |= evaluate.figures(gather(episodes)) | mgrpo.update(method, rows)
        lines.append({"mine": mine, "forwards": len(forwards), **metrics})
    everyone = gather([lines])
    if rank() == 0:
        Path(out).write_text(json.dumps(everyone))


def train_critic(checkpoint, out):
    """Two steps of two updates with forks/critic.py, on three ragged groups; a second rank has one of them."""
    device, chat = init_dist(), Chat(load_tokenizer(checkpoint), "You browse the web.")
    model = shard(tiny_model(vocab_size=chat.tokenizer.get_vocab_size()))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    method = critic.Critic(critic.Config(G=3, max_tokens=300, clip=1e9), chat, model, None, optimizer, device)
    head = model.heads["value"]
    torch.nn.init.normal_(head[2].weight, generator=torch.Generator().manual_seed(0))
    lines = []
    for step in range(2):
        episodes = [tau for group in groups(chat, step)[:3][rank()::world_size()] for tau in group]
        rows, _ = method.learn_from(episodes, step)
        lines += [mgrpo.update(method, rows) for _ in range(2)]
    state = full_state(model) | {f"head.{name}": weight.clone() for name, weight in head.state_dict().items()}
    if rank() == 0:
        torch.save({"state": state, "metrics": lines}, out)


@pytest.fixture(scope="module")
def two_ranks(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    done = script("tests/test_scripts.py", "ranks", checkpoint, out, ranks=2)
    assert done.returncode == 0, done.stderr
    return out


def test_two_ranks_make_the_steps_that_one_rank_makes(checkpoint, two_ranks, tmp_path):
    train_policy(checkpoint, tmp_path / "1.pt")
    one, two = (torch.load(path, weights_only=True) for path in (tmp_path / "1.pt", two_ranks / "policy.pt"))
    for a, b in zip(one["metrics"], two["metrics"], strict=True):
        for key in ("loss", "grad_norm", "kl", "logp_gap", "entropy", "clip_frac"):
            assert a[key] == pytest.approx(b[key], rel=1e-5), key
    for name, weight in one["state"].items():
        torch.testing.assert_close(two["state"][name], weight, atol=1e-6, rtol=1e-5)


def test_two_ranks_train_policy_and_critic_jointly_as_one_rank_does(checkpoint, two_ranks, tmp_path):
    """A fork's head lies outside FSDP, and its gradient runs on into the policy's sharded layers."""
    train_critic(checkpoint, tmp_path / "1.pt")
    one, two = (torch.load(path, weights_only=True) for path in (tmp_path / "1.pt", two_ranks / "critic.pt"))
    for a, b in zip(one["metrics"], two["metrics"], strict=True):
        for key in ("loss", "grad_norm", "logp_gap", "entropy", "value_loss"):
            assert a[key] == pytest.approx(b[key], rel=1e-5), key
    for name, weight in one["state"].items():
        # One rank's micro-batches share more of their histories. That rounds otherwise, and Adam magnifies
        # it where a gradient is nearly 0.
        torch.testing.assert_close(two["state"][name], weight, atol=1e-5, rtol=1e-5)
    assert one["metrics"][0]["value_loss"] > one["metrics"][1]["value_loss"]  # it learned


@pytest.mark.slow
def test_eight_ranks_share_the_steps_of_one_though_some_have_no_group(checkpoint, tmp_path):
    train_policy(checkpoint, tmp_path / "1.pt")
    done = script("tests/two_ranks.py", checkpoint, tmp_path / "8.pt", ranks=8)
    assert done.returncode == 0, done.stderr
    one, eight = (torch.load(tmp_path / name, weights_only=True) for name in ("1.pt", "8.pt"))
    for a, b in zip(one["metrics"], eight["metrics"], strict=True):
        for key in ("loss", "grad_norm", "kl", "logp_gap", "entropy"):
            assert a[key] == pytest.approx(b[key], rel=1e-5), key


def test_ranks_with_unequal_work_run_equally_many_forwards_and_agree(two_ranks):
    first, second = json.loads((two_ranks / "unequal.json").read_text())
    for a, b in zip(first, second, strict=True):
        assert a["forwards"] == b["forwards"] > 0 and a["loss"] == b["loss"]
        assert a["groups_kept"] == b["groups_kept"] == a["mine"] + b["mine"]
    assert (first[1]["mine"], second[1]["mine"]) == (1, 0)


def test_a_gpus_precision_holds_in_rollout_training_and_evaluation(two_ranks):
    """On CPUs, with the bfloat16 that `shard` chooses on GPUs: float32 masters, bfloat16 computations."""
    said = torch.load(two_ranks / "bfloat16.pt", weights_only=True)
    assert said["cache"] == torch.bfloat16 and said["master"] == torch.float32
    assert 1e-6 < max(said["sampling"]) < 1e-2  # below: float32, where sums in another order differ by 1e-7
    assert max(said["evaluation"]) < 1e-6


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("name, arguments, says", [
    ("mgrpo.py", ["--model", "runs/nowhere"], ["runs/nowhere"]),
    ("bc.py", ["--model", "/no/such/dir"], ["/no/such/dir"]),
    ("bc.py", ["--data", "/no/such.jsonl"], ["/no/such.jsonl"]),
    ("mgrpo.py", ["--precision", "half"], ["--precision half", "float32 or bfloat16"]),
    ("mgrpo.py", ["--loss-norm", "mean"], ["--loss-norm mean", "paper, token or constant"]),
    ("mgrpo.py", ["--model", "worlds/base", "--tasks", "sandbox:train:5"], ["--batch 24", "5 tasks"]),
    ("bc.py", ["--max-context", "100", "--max-new-tokens", "10", "--data", "assets/episode.jsonl"],
     ["fits --max-context 100"]),
    ("evaluate.py", ["--model", "runs/nowhere"], ["runs/nowhere"]),
    ("evaluate.py", ["--model", "worlds/base", "--max-context", "66"], ["--max-context 66", "no room for a page"]),
    ("mgrpo.py", ["--batch", "0"], ["--batch 0", "at least 1"]),
    ("mgrpo.py", ["--steps", "0"], ["--steps 0", "at least 1"]), ("mgrpo.py", ["--G", "1"], ["--G 1", "at least 2"]),
    ("bc.py", ["--concurrency", "0"], ["--concurrency 0"]),
    ("evaluate.py", ["--max-turns", "5,0"], ["--max-turns [5, 0]"]),
])
def test_bad_input_is_one_sentence(name, arguments, says, tmp_path):
    sentence = refusal(name, *arguments, "--out", tmp_path / "x")
    assert all(word in sentence for word in says) and "\n" not in sentence


def test_the_command_line_prints_this_sentence_alone(tmp_path):
    done = script("mgrpo.py", "--loss-norm", "mean", "--out", tmp_path / "x")
    assert done.stderr == "mgrpo.py: --loss-norm mean: use paper, token or constant.\n"
    assert done.returncode == 1


@pytest.mark.parametrize("name, arguments, says", [
    ("infinity_experts.py", ["nowhere"], "clone https://"), ("pictures.py", ["runs/nowhere"], "run make demo"),
    ("reading.py", ["worlds/base", "--n", "1"], "--n 1: give at least 2")])
def test_bad_input_of_a_tool_is_one_sentence(name, arguments, says):
    done = script(f"tests/tools/{name}", *arguments)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert re.match(f"{name}: .*({says})", done.stderr)


@pytest.mark.parametrize("name, flag, path", [("mgrpo.py", "--model", "."),
                                              ("bc.py", "--data", "trajectories.jsonl")])
def test_a_new_run_does_not_empty_the_directory_that_it_starts_from(name, flag, path, checkpoint, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(checkpoint, run)
    earned = (ROOT / "assets/episode.jsonl").read_text()
    (run / "trajectories.jsonl").write_text(earned)
    assert "which a new run overwrites" in refusal(name, flag, run / path, "--out", run)
    assert (run / "trajectories.jsonl").read_text() == earned


def test_an_unreachable_site_is_one_sentence(checkpoint, tmp_path):
    (tmp_path / "tasks.json").write_text(json.dumps([tasks("test", 1)[0]]))
    nobody = "http://127.0.0.1:9"
    sentence = refusal("mgrpo.py", "--model", checkpoint, "--tasks", tmp_path / "tasks.json",
                       "--out", tmp_path / "x", SHOPPING=nobody, REDDIT=nobody)
    assert f"cannot reach {nobody}" in sentence and "\n" not in sentence


def test_no_chromium_is_one_sentence(checkpoint, tmp_path):
    sentence = refusal("evaluate.py", "--model", checkpoint, "--tasks", "sandbox:test:1", "--out", tmp_path,
                       *SMALL, PATH="", PLAYWRIGHT_BROWSERS_PATH=str(tmp_path))
    assert "playwright install" in sentence and "\n" not in sentence


def test_a_directory_in_use_or_not_writable_is_one_sentence(checkpoint, tmp_path):
    """Two runs in one directory would mix their records."""
    (tmp_path / "file").write_text("")
    assert "cannot write" in refusal("mgrpo.py", "--model", checkpoint, *SMALL, "--out", tmp_path / "file/x")
    run = Run(tmp_path / "x", {})
    run.claim()
    run.write({"step": 0})
    sentence = refusal("mgrpo.py", "--model", checkpoint, *SMALL, "--out", tmp_path / "x")
    assert f"in use by process {os.getpid()}" in sentence
    assert [file.name for file in sorted((tmp_path / "x").iterdir())] == ["lock", "metrics.jsonl"]


if __name__ == "__main__":
    on_ranks(*sys.argv[2:]) if sys.argv[1] == "ranks" else killed(*sys.argv[1:])

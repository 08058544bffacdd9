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
from conftest import ROOT, pointing_task, tiny_model
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
from run import RunDirectory, gather, init_dist, rank, world_size
from worlds.sandbox import tasks

ENV = os.environ | {"OMP_NUM_THREADS": "1"}
SMALL = [
    "--max-turns", "2",
    "--max-new-tokens", "8",
    "--max-context", "1200",
    "--concurrency", "4",
]
CLONING = [
    "--demos", 3,
    "--epochs", 1,
    "--batch", 4,
    "--max-context", 4000,
]
METRICS = """step reward success_rate turns response_tokens trajectory_tokens loss kl clip_frac entropy logp_gap
grad_norm groups_kept env_errors env_retries exited truncated invalid_actions failed_actions pages_cut skipped change
tokens_packed seconds_rollout seconds_train tokens_per_second""".split()
# What the end of each script gives to command_line.
SCRIPTS = {
    "bc.py": (bc, {"paper": bc.PAPER}, None),
    "mgrpo.py": (mgrpo, {"paper": mgrpo.PAPER}, "runs/bc"),
    "evaluate.py": (evaluate, {}, evaluate.checkpoint_of),
}


def command(name, *arguments, ranks=0):
    launcher = []
    if ranks:
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    path = str(ROOT / name)
    written = map(str, arguments)
    return [sys.executable, *launcher, path, *written]


def run_to_its_end(given, env=ENV):
    """Runs a command until it ends; what it printed and how it ended."""
    return subprocess.run(given, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1200)


def script(name, *arguments, ranks=0, env=ENV):
    given = command(name, *arguments, ranks=ranks)
    return run_to_its_end(given, env)


def run_here(name, *arguments, **env):
    """The same in this process, which spares the import of torch."""
    module, presets, start = SCRIPTS[name]
    written = map(str, arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr("sys.argv", [name, *written])
        for key, value in env.items():
            patch.setenv(key, value)
        cfg = runs.parse_args(module.Config, module.__doc__, presets, start)
        module.main(cfg)


def refusal(name, *arguments, **env) -> str:
    """The sentence with which a script refuses its arguments."""
    with pytest.raises(ValueError) as refused:
        run_here(name, *arguments, **env)
    return str(refused.value)


def read(path) -> list[dict]:
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines]


def read_json(path) -> dict:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def cloned(checkpoint, tmp_path_factory):
    """bc.py's output, which the other scripts start from."""
    out = tmp_path_factory.mktemp("runs") / "bc"
    done = script("bc.py", "--model", checkpoint, "--out", out, *CLONING)
    assert done.returncode == 0, done.stderr
    return out


def test_bc_records_demonstrations_and_leaves_a_checkpoint(cloned):
    records = read(cloned / "demos.jsonl")
    assert len(records) == 3
    for record in records:
        assert record["success"] == 1
        assert record["reward"] == 1

    run = read_json(cloned / "config.json")["run"]
    assert run["demos"] == 3
    assert run["torch"] == torch.__version__
    assert run["seed"] == 0
    assert "commit" in run
    assert "device" in run

    assert load(cloned)
    assert (cloned / "tokenizer.json").exists()
    assert (cloned / "agent.json").exists()


def responses_by_task(path) -> list:
    """[(task, its responses)] of the episodes on record."""
    found = []
    for record in read(path):
        responses = [turn["response"] for turn in record["turns"]]
        found.append((record["task_id"], responses))
    return found


@pytest.mark.slow
def test_two_ranks_record_the_demonstrations_of_one_and_train_adapters(cloned, checkpoint, tmp_path):
    arguments = ["--model", checkpoint, "--out", tmp_path, *CLONING, "--lora", 4]
    done = script("bc.py", *arguments, ranks=2)
    assert done.returncode == 0, done.stderr

    by_two = responses_by_task(tmp_path / "demos.jsonl")
    by_one = responses_by_task(cloned / "demos.jsonl")
    assert by_two == by_one
    assert load(tmp_path)


@pytest.mark.parametrize("ranks, more", [
    (0, []),
    (2, ["--held-out", "sandbox:dev:2", "--held-out-every", 2]),
])
def test_mgrpo_runs_logs_and_saves(cloned, tmp_path, ranks, more):
    arguments = [
        "--model", cloned,
        "--out", tmp_path,
        "--steps", 2,
        "--batch", 2,
        "--G", 2,
        "--beta", 0.01,
        *SMALL,
    ]
    if ranks:
        done = script("mgrpo.py", *arguments, *more, ranks=ranks)
        assert done.returncode == 0, done.stderr
        # By one rank, not by both.
        reports = done.stdout.count(f"report: {tmp_path}/report.html (")
        assert reports == 1
        evaluations = done.stdout.count("  held out: 1/1 episodes (100%)")
        assert evaluations == int("--held-out" in more)
    else:
        run_here("mgrpo.py", *arguments)

    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1]
    for line in lines:
        assert set(METRICS) <= set(line)

    assert load(tmp_path)
    assert (tmp_path / "report.html").exists()

    played = read(tmp_path / "trajectories.jsonl")
    assert len(played) == 8
    for episode in played:
        assert len(episode["turns"]) <= 2


def test_evaluate_writes_a_summary_and_a_report(cloned, tmp_path):
    arguments = ["--model", cloned, "--tasks", "sandbox:test:3", "--out", tmp_path, *SMALL]
    done = script("evaluate.py", *arguments)
    assert done.returncode == 0, done.stderr

    summary = read_json(tmp_path / "summary.json")
    assert summary["n"] == 3
    assert len(summary["ci95"]) == 2
    assert "per_site" in summary
    assert (tmp_path / "report.html").exists()


# ---------------------------------------------------------------------------- runs that stop and continue


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory, sandbox_sites):
    """Arguments of mgrpo.py on tasks that the small base solves now and then.

    With one episode after the other, two runs are equal bit for bit.
    """
    places = "kitchen garden office music sports travel".split()
    wanted = []
    for number, (place, other) in enumerate(permutations(places, 2)):
        wanted.append(pointing_task(number, place, other))
    path = tmp_path_factory.mktemp("tasks") / "tasks.json"
    path.write_text(json.dumps(wanted))
    return [
        "--model", ROOT / "worlds/base",
        "--tasks", path,
        "--batch", 4,
        "--G", 4,
        "--max-turns", 1,
        "--max-new-tokens", 32,
        "--temperature", 1,
        "--lr", 2e-4,
        "--concurrency", 1,
    ]


def without_times(line) -> dict:
    """A line of metrics.jsonl, but for what differs between equal runs."""
    return {key: value for key, value in line.items() if "second" not in key}


def outcome(out):
    """(weights, metrics but for times, which episode stands where on record) of a run."""
    lines = read(out / "metrics.jsonl")
    metrics = [without_times(line) for line in lines]

    played = []
    for episode in read(out / "trajectories.jsonl"):
        row = (episode["step"], episode["task_id"], episode["member"], episode["success"])
        played.append(row)

    weights = {}
    for name, weight in load(out).state_dict().items():
        weights[name] = weight.tolist()
    return weights, metrics, played


def start_in_background(given, env):
    """A process with a session of its own, as a terminal gives one to a command."""
    return subprocess.Popen(given, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, start_new_session=True)


def wait_for(process, words):
    """Reads what a process prints up to a line with these words."""
    line = ""
    while words not in line:
        line = process.stdout.readline()
        assert line, process.stderr.read()


# [(step, signal)]. The signal comes after the step's line.
ONCE = [(2, signal.SIGINT)]
TWICE = [(2, signal.SIGTERM), (3, signal.SIGINT)]


@pytest.mark.parametrize("signals", [ONCE, pytest.param(TWICE, marks=pytest.mark.slow)])
def test_a_signal_ends_a_run_without_a_traceback_and_the_same_command_continues_it(
        one_by_one, sandbox_sites, tmp_path, signals):
    """Bit for bit, against a run that was left alone.

    Rows of a step that was never saved, and half a line, are forgotten.
    """
    last, _ = signals[-1]
    steps = last + 1
    arguments = [*one_by_one, "--steps", steps]
    run_here("mgrpo.py", *arguments, "--out", tmp_path / "whole", **sandbox_sites)
    out = tmp_path / "parts"
    same = command("mgrpo.py", *arguments, "--out", out)
    env = ENV | sandbox_sites

    for step, number in signals:
        process = start_in_background(same, env)
        wait_for(process, f"step {step}/{steps}")
        os.killpg(process.pid, number)  # as a terminal does: the browser hears it as well
        _, complaint = process.communicate(timeout=600)
        assert process.returncode == -number
        assert complaint == ""
        with open(out / "metrics.jsonl", "a") as file:
            file.write('{"step": 3, "loss": 1.0}\n')
            file.write('{"step": 3, "lo')

    done = run_to_its_end(same, env)
    assert done.returncode == 0, done.stderr
    # The last step may have been saved or not.
    repeated = f"from step {last} on" in done.stdout
    saved_in_time = f"from step {last + 1} on" in done.stdout
    assert repeated or saved_in_time, done.stderr

    other = refusal("mgrpo.py", *one_by_one, "--steps", 9, "--eps", 0.3, "--out", out, **sandbox_sites)
    assert f"steps {steps}, not 9" in other
    assert "eps 0.2, not 0.3" in other
    assert "--no-resume" in other

    whole = outcome(tmp_path / "whole")
    parts = outcome(out)
    assert whole == parts
    _, metrics, _ = whole
    assert [row["step"] for row in metrics] == list(range(steps))
    for row in metrics[1:]:
        assert row["groups_kept"]  # every step after the first trained


def killed(phase, step, delay, victim, *arguments):
    """What the next tests run of this file: mgrpo.py, with SIGKILL for a rank some seconds into a phase."""
    now = None  # the step

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def armed(name, function):
        def wrapped(*given, **named):
            nonlocal now
            if name == "rollout":
                now = given[3]  # collect's step
            if name == phase and now == int(step) and rank() == int(victim):
                threading.Timer(float(delay), kill).start()
            return function(*given, **named)
        return wrapped

    mgrpo.MGRPO.collect = armed("rollout", mgrpo.MGRPO.collect)
    mgrpo.MGRPO.update = armed("update", mgrpo.MGRPO.update)
    mgrpo.save = armed("save", mgrpo.save)
    runs.save_state = armed("save", runs.save_state)
    sys.argv = ["mgrpo.py", *arguments]
    _, presets, start = SCRIPTS["mgrpo.py"]
    runs.command_line(mgrpo.main, mgrpo.Config, mgrpo.__doc__, presets, start)


@pytest.fixture
def six_steps(one_by_one, sandbox_sites):
    """six_steps(out, ranks, kill): mgrpo.py as a process, six steps, a save every second one.

    With kill, the first four arguments of `killed`, a rank dies.
    """
    env = ENV | sandbox_sites

    def run(out, ranks, kill=()):
        name = "mgrpo.py"
        if kill:
            name = __file__
        arguments = [*one_by_one, "--out", out, "--steps", 6, "--save-every", 2]
        return script(name, *kill, *arguments, ranks=ranks, env=env)
    return run


# (where it is killed, at most so many seconds after that has begun)
PHASES = [("rollout", 1.0), ("update", 0.2), ("save", 0.05)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_sigkill_at_any_moment_costs_nothing_but_time(six_steps, tmp_path, ranks):
    """Ten runs, each killed in one of steps 2 to 5 and started again, against one that was left alone."""
    done = six_steps(tmp_path / "whole", ranks)
    assert done.returncode == 0, done.stderr
    whole = outcome(tmp_path / "whole")

    for seed in range(10):
        out = tmp_path / str(seed)
        rng = random.Random(seed)
        phase, longest = PHASES[seed % 3]
        if phase == "save":
            step = rng.choice([1, 3])
        else:
            step = rng.randrange(1, 5)
        delay = rng.uniform(0, longest)
        victim = rng.randrange(max(ranks, 1))
        kill = (phase, step, delay, victim)

        done = six_steps(out, ranks, kill)
        assert done.returncode != 0, (kill, done.stderr)
        if not ranks:  # torchrun ends with a status of its own
            assert done.returncode == -signal.SIGKILL, (kill, done.stderr)

        done = six_steps(out, ranks)
        assert done.returncode == 0, (kill, done.stderr)
        assert outcome(out) == whole, kill


@pytest.mark.slow
def test_when_a_rank_dies_the_others_end_and_say_so_and_the_same_command_continues(six_steps, tmp_path):
    began = time.monotonic()
    done = six_steps(tmp_path, 2, kill=("rollout", 3, 0.1, 1))
    took = time.monotonic() - began
    assert took < 120
    assert done.returncode != 0

    said = re.findall("mgrpo.py: .*", done.stderr)  # by rank 0, unless torchrun ends it before it notices
    assert said in ([], ["mgrpo.py: rank 0 lost another rank; run the same command again."])
    assert "gloo" not in done.stderr
    assert "Signal 9 (SIGKILL)" in done.stderr  # torchrun names what happened

    done = six_steps(tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert "from step 3 on" in done.stdout, done.stderr


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
    device = init_dist()
    chat = Chat(load_tokenizer(checkpoint), "You browse the web.")
    mgrpo.rollout = even_tasks_teach(chat)
    model = shard(tiny_model(vocab_size=chat.tokenizer.get_vocab_size()))
    forwards = []

    def count(*_):
        forwards.append(0)

    model.register_forward_hook(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lines = []
    # Five tasks for two ranks, then one task, of which one rank has none.
    for batch, seed in ((5, 0), (1, 1)):
        cfg = mgrpo.Config(batch=batch, G=2, seed=seed, max_tokens=60)
        method = mgrpo.MGRPO(cfg, chat, model, None, optimizer, device)
        nowhere = Environment({}, "", cfg)
        chosen = method.choose_tasks(TASKS, 0)
        episodes = method.collect(chosen, nowhere, 0)
        forwards.clear()
        rows, metrics = method.training_rows(episodes, 0)
        trained = {id(row.tau) for row in rows}
        mine = len(trained) // cfg.G  # groups of this rank
        metrics |= evaluate.episode_metrics(gather(episodes))
        metrics |= method.update(rows)
        line = {"mine": mine, "forwards": len(forwards)}
        lines.append(line | metrics)
    everyone = gather([lines])
    if rank() == 0:
        Path(out).write_text(json.dumps(everyone))


def train_critic(checkpoint, out):
    """Two steps of two updates with forks/critic.py, on three ragged groups; a second rank has one of them."""
    device = init_dist()
    chat = Chat(load_tokenizer(checkpoint), "You browse the web.")
    model = shard(tiny_model(vocab_size=chat.tokenizer.get_vocab_size()))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    cfg = critic.Config(G=3, max_tokens=300, max_grad_norm=1e9)
    method = critic.Critic(cfg, chat, model, None, optimizer, device)
    head = model.fork_heads["value"]
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(head[2].weight, generator=generator)

    lines = []
    for step in range(2):
        three = groups(chat, step)[:3]
        mine = three[rank()::world_size()]
        episodes = []
        for group in mine:
            episodes += group
        rows, _ = method.training_rows(episodes, step)
        for _ in range(2):
            lines.append(method.update(rows))

    state = full_state(model)
    for name, weight in head.state_dict().items():
        state[f"head.{name}"] = weight.clone()
    if rank() == 0:
        torch.save({"state": state, "metrics": lines}, out)


@pytest.fixture(scope="module")
def two_ranks(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    done = script("tests/test_scripts.py", "ranks", checkpoint, out, ranks=2)
    assert done.returncode == 0, done.stderr
    return out


def saved(path) -> dict:
    return torch.load(path, weights_only=True)


def assert_metrics_agree(one, several, keys):
    """The updates of one rank, and those of several, with the same figures."""
    for a, b in zip(one["metrics"], several["metrics"], strict=True):
        for key in keys:
            assert a[key] == pytest.approx(b[key], rel=1e-5), key


def test_two_ranks_make_the_steps_that_one_rank_makes(checkpoint, two_ranks, tmp_path):
    train_policy(checkpoint, tmp_path / "1.pt")
    one = saved(tmp_path / "1.pt")
    two = saved(two_ranks / "policy.pt")
    assert_metrics_agree(one, two, ("loss", "grad_norm", "kl", "logp_gap", "entropy", "clip_frac"))
    for name, weight in one["state"].items():
        torch.testing.assert_close(two["state"][name], weight, atol=1e-6, rtol=1e-5)


def test_two_ranks_train_policy_and_critic_jointly_as_one_rank_does(checkpoint, two_ranks, tmp_path):
    """A fork's head lies outside FSDP, and its gradient runs on into the policy's sharded layers."""
    train_critic(checkpoint, tmp_path / "1.pt")
    one = saved(tmp_path / "1.pt")
    two = saved(two_ranks / "critic.pt")
    assert_metrics_agree(one, two, ("loss", "grad_norm", "logp_gap", "entropy", "value_loss"))
    for name, weight in one["state"].items():
        # One rank's micro-batches share more of their histories. That rounds otherwise, and Adam magnifies
        # it where a gradient is nearly 0.
        torch.testing.assert_close(two["state"][name], weight, atol=1e-5, rtol=1e-5)
    losses = [update["value_loss"] for update in one["metrics"]]
    assert losses[0] > losses[1]  # it learned


@pytest.mark.slow
def test_eight_ranks_share_the_steps_of_one_though_some_have_no_group(checkpoint, tmp_path):
    train_policy(checkpoint, tmp_path / "1.pt")
    done = script("tests/two_ranks.py", checkpoint, tmp_path / "8.pt", ranks=8)
    assert done.returncode == 0, done.stderr
    one = saved(tmp_path / "1.pt")
    eight = saved(tmp_path / "8.pt")
    assert_metrics_agree(one, eight, ("loss", "grad_norm", "kl", "logp_gap", "entropy"))


def test_ranks_with_unequal_work_run_equally_many_forwards_and_agree(two_ranks):
    first, second = read_json(two_ranks / "unequal.json")
    for a, b in zip(first, second, strict=True):
        assert a["forwards"] == b["forwards"]
        assert b["forwards"] > 0
        assert a["loss"] == b["loss"]
        assert a["groups_kept"] == b["groups_kept"]
        assert b["groups_kept"] == a["mine"] + b["mine"]
    assert first[1]["mine"] == 1
    assert second[1]["mine"] == 0


def test_a_gpus_precision_holds_in_rollout_training_and_evaluation(two_ranks):
    """On CPUs, with the bfloat16 that `shard` chooses on GPUs: float32 masters, bfloat16 computations."""
    said = saved(two_ranks / "bfloat16.pt")
    assert said["cache"] == torch.bfloat16
    assert said["master"] == torch.float32
    largest = max(said["sampling"])
    assert 1e-6 < largest < 1e-2  # below: float32, where sums in another order differ by 1e-7
    assert max(said["evaluation"]) < 1e-6


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("name, arguments, says", [
    ("mgrpo.py", ["--model", "runs/nowhere"], ["runs/nowhere"]),
    ("bc.py", ["--model", "/no/such/dir"], ["/no/such/dir"]),
    ("bc.py", ["--data", "/no/such.jsonl"], ["/no/such.jsonl"]),
    ("mgrpo.py", ["--precision", "half"], ["--precision half", "float32 or bfloat16"]),
    ("mgrpo.py", ["--loss-norm", "mean"], ["--loss-norm mean", "paper, token or constant"]),
    (
        "mgrpo.py",
        ["--model", "worlds/base", "--tasks", "sandbox:train:5"],
        ["--batch 24", "5 tasks"],
    ),
    (
        "bc.py",
        ["--max-context", "100", "--max-new-tokens", "10", "--data", "assets/episode.jsonl"],
        ["fits --max-context 100"],
    ),
    ("evaluate.py", ["--model", "runs/nowhere"], ["runs/nowhere"]),
    (
        "evaluate.py",
        ["--model", "worlds/base", "--max-context", "66"],
        ["--max-context 66", "no room for a page"],
    ),
    ("mgrpo.py", ["--batch", "0"], ["--batch 0", "at least 1"]),
    ("mgrpo.py", ["--steps", "0"], ["--steps 0", "at least 1"]),
    ("mgrpo.py", ["--G", "1"], ["--G 1", "at least 2"]),
    ("bc.py", ["--concurrency", "0"], ["--concurrency 0"]),
    ("evaluate.py", ["--max-turns", "5,-1"], ["--max-turns [5, -1]"]),
    ("mgrpo.py", ["--lr", "nan"], ["--lr nan", "at least 0"]),
    ("bc.py", ["--epochs", "nan"], ["--epochs nan", "more than 0"]),
])
def test_bad_input_is_one_sentence(name, arguments, says, tmp_path):
    sentence = refusal(name, *arguments, "--out", tmp_path / "x")
    for word in says:
        assert word in sentence
    assert "\n" not in sentence


def test_the_command_line_prints_this_sentence_alone(tmp_path):
    done = script("mgrpo.py", "--loss-norm", "mean", "--out", tmp_path / "x")
    assert done.stderr == "mgrpo.py: --loss-norm mean: use paper, token or constant.\n"
    assert done.returncode == 1


@pytest.mark.parametrize("name, arguments, says", [
    ("infinity_experts.py", ["nowhere"], "clone https://"),
    ("pictures.py", ["runs/nowhere"], "run make demo"),
    ("reading.py", ["worlds/base", "--n", "1"], "--n 1: give at least 2"),
])
def test_bad_input_of_a_tool_is_one_sentence(name, arguments, says):
    done = script(f"tests/tools/{name}", *arguments)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert re.match(f"{name}: .*({says})", done.stderr)


def test_every_tool_can_be_imported():
    """bench.py once named a class that the tests had renamed. infinity.py and browsergym_steps.py need a clone."""
    program = f"""
import sys
from importlib import import_module
from pathlib import Path
tools = Path({str(ROOT / 'tests/tools')!r})
sys.path[:0] = [str(tools), str(tools.parent), str(tools.parents[1])]
import run
for tool in sorted(tools.glob("*.py")):
    if tool.stem not in ("infinity", "browsergym_steps"):
        import_module(tool.stem)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_benchmark_measures_a_training_step():
    """Its warm-up once asked for the log-prob of a row's first token."""
    done = script("tests/tools/bench.py", "train_step", "--checkpoint", "worlds/base", "--tokens", "1500")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["seconds"] > 0
    assert measured["bytes"] > 0


@pytest.mark.parametrize("name, flag, path", [
    ("mgrpo.py", "--model", "."),
    ("bc.py", "--data", "trajectories.jsonl"),
])
def test_a_new_run_does_not_empty_the_directory_that_it_starts_from(name, flag, path, checkpoint, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(checkpoint, run)
    earned = (ROOT / "assets/episode.jsonl").read_text()
    (run / "trajectories.jsonl").write_text(earned)

    sentence = refusal(name, flag, run / path, "--out", run)
    assert "which a new run overwrites" in sentence
    assert (run / "trajectories.jsonl").read_text() == earned


def test_an_unreachable_site_is_one_sentence(checkpoint, tmp_path):
    [task] = tasks("test", 1)
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([task]))
    nobody = "http://127.0.0.1:9"
    arguments = ["--model", checkpoint, "--tasks", path, "--out", tmp_path / "x"]

    sentence = refusal("mgrpo.py", *arguments, SHOPPING=nobody, REDDIT=nobody)

    assert f"cannot reach {nobody}" in sentence
    assert "\n" not in sentence


def test_no_chromium_is_one_sentence(checkpoint, tmp_path):
    arguments = ["--model", checkpoint, "--tasks", "sandbox:test:1", "--out", tmp_path, *SMALL]
    sentence = refusal("evaluate.py", *arguments, PATH="", PLAYWRIGHT_BROWSERS_PATH=str(tmp_path))
    assert "playwright install" in sentence
    assert "\n" not in sentence


def test_a_directory_in_use_or_not_writable_is_one_sentence(checkpoint, tmp_path):
    """Two runs in one directory would mix their records."""
    arguments = ["--model", checkpoint, *SMALL]

    (tmp_path / "file").write_text("")
    sentence = refusal("mgrpo.py", *arguments, "--out", tmp_path / "file/x")
    assert "cannot write" in sentence

    run = RunDirectory(tmp_path / "x", {})
    run.claim()
    run.write_metrics({"step": 0})
    sentence = refusal("mgrpo.py", *arguments, "--out", tmp_path / "x")
    assert f"in use by process {os.getpid()}" in sentence
    files = sorted((tmp_path / "x").iterdir())
    assert [file.name for file in files] == ["lock", "metrics.jsonl"]


if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        on_ranks(*sys.argv[2:])
    else:
        killed(*sys.argv[1:])

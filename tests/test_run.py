"""What a script needs besides learning: a run's directory, resuming, the report's data, progress, the command line."""
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, tiny_model
from torch.nn import ModuleDict

import run as runs
from evaluate import SiteSettings
from run import all_max, command_line, init_dist, parse_args, rank, start_run, ticker


@dataclass
class Knobs(SiteSettings):
    """Every knob is a flag; the comment behind it is its --help."""
    model: str | None = None      # where it starts
    out: str = "runs/x"
    steps: int = 4
    lr: float | None = None       # 5% of what is usual
    decay: bool = True
    max_turns: int = 3
    paper: bool = False           # the paper's values
    resume: bool = True
    force: bool = False


# ---------------------------------------------------------------------------- a run's directory


def start(path, first=0):
    start_run(Knobs(out=str(path)), "cpu", {"model_type": "qwen2"}, first).lock.close()


def test_a_run_that_starts_over_leaves_no_state_to_resume(tmp_path):
    (tmp_path / "state" / "00001").mkdir(parents=True)
    start(tmp_path, first=2)
    assert (tmp_path / "state" / "00001").exists()
    start(tmp_path)
    assert not (tmp_path / "state").exists()


def test_a_run_that_starts_over_leaves_nothing_that_an_earlier_one_has_earned(tmp_path):
    """--no-resume once left OUT/best, summary.json and the old figures in the report."""
    for directory in ("best", "step-00010", "screenshots"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "file").touch()
    for file in ("summary.json", "summary-dev.json", "metrics.jsonl", "trajectories.jsonl", "report.html"):
        (tmp_path / file).write_text("")
    (tmp_path / "demos.jsonl").touch()  # takes minutes to record, and is checked before it is used again
    start(tmp_path, first=1)
    assert (tmp_path / "best/file").exists() and (tmp_path / "summary.json").exists()
    start(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "demos.jsonl", "lock"]


def test_a_run_that_goes_on_drops_the_rows_that_come_again(tmp_path):
    rows = [{"step": step} for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "l')
    start(tmp_path, first=2)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == rows[:2]


def test_a_run_does_not_overwrite_what_it_starts_from(tmp_path):
    cfg = Knobs(model=str(tmp_path), out=str(tmp_path))
    with pytest.raises(ValueError, match="--model .* is in --out"):
        start_run(cfg, "cpu", {}, first=0)


def test_two_runs_cannot_share_a_directory(tmp_path):
    first = runs.Run(tmp_path, {})
    first.claim()
    with pytest.raises(ValueError, match=f"{tmp_path} is in use by process {os.getpid()}"):
        runs.Run(tmp_path, {}).claim()
    first.lock.close()
    runs.Run(tmp_path, {}).claim()


def test_a_state_is_deleted_as_a_whole(tmp_path, monkeypatch):
    (tmp_path / "state" / "00001").mkdir(parents=True)
    monkeypatch.setattr(runs.shutil, "rmtree", lambda *_, **__: None)  # killed before it has deleted anything
    runs.forget(tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_metrics_hold_no_nan(tmp_path):
    runs.Run(tmp_path, {}).write({"loss": float("nan"), "change": [float("inf"), 0.1]})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"loss": None, "change": [None, 0.1]}


def test_a_file_of_a_run_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    run = runs.Run(tmp_path, {})
    run.replace("summary.json", {"n": 1})
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="cannot write .*summary.json"):
        patched.setattr(runs.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        run.replace("summary.json", {"n": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"n": 1}


def test_a_damaged_file_is_one_sentence_that_names_it(tmp_path):
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"cannot use .*a\.json: it holds \[1\], not an object"):
        runs.read_json(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"cannot use .*b\.json: FileNotFoundError"):
        runs.read_json(tmp_path / "b.json")


# ------------------------------------------------------------------------------------- resuming


@pytest.fixture
def stopped(tmp_path):
    """(settings, model, optimizer) of a run that was saved after its second step, from a checkpoint on disk."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"some weights")
    cfg = Knobs(model=str(base), out=str(tmp_path / "run"), steps=4, lr=0.1)
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    runs.save_state(cfg, model, optimizer, step=2, weights=runs.fingerprint(cfg.model))
    return cfg, model, optimizer


def test_a_run_continues_with_the_step_after_the_last_save(stopped):
    assert runs.resume(*stopped, may_change=set()) == 2


def test_without_a_state_or_without_resume_a_run_begins_at_its_first_step(stopped, tmp_path):
    cfg, model, optimizer = stopped
    assert runs.resume(replace(cfg, resume=False), model, optimizer, may_change=set()) == 0
    assert runs.resume(replace(cfg, out=str(tmp_path / "other")), model, optimizer, may_change=set()) == 0


def test_a_run_refuses_to_go_on_with_other_settings(stopped):
    cfg, model, optimizer = stopped
    other = replace(cfg, lr=0.2, steps=6)
    with pytest.raises(ValueError, match=r"holds a run with steps 4, not 6; lr 0\.1, not 0\.2.*--force") as refused:
        runs.resume(other, model, optimizer, may_change=set())
    assert cfg.out in str(refused.value)
    assert runs.resume(replace(other, force=True), model, optimizer, may_change=set()) == 2
    assert runs.resume(replace(cfg, steps=6), model, optimizer, may_change={"steps"}) == 2
    faster = replace(cfg, concurrency=3, timeout=1.0, screenshots=4, browser="ws://there")  # where and how fast it runs
    assert runs.resume(faster, model, optimizer, may_change=set()) == 2


def test_a_run_refuses_to_go_on_from_a_checkpoint_that_was_rewritten(stopped):
    """The reference policy is read from --model again: it once changed silently when that had been trained anew."""
    cfg, model, optimizer = stopped
    (runs.Path(cfg.model) / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ValueError, match=f"other weights in {cfg.model}"):
        runs.resume(cfg, model, optimizer, may_change=set())
    assert runs.resume(replace(cfg, force=True), model, optimizer, may_change=set()) == 2


def test_a_state_of_another_model_is_refused(stopped):
    cfg, _, _ = stopped
    other = tiny_model()
    other.heads["value"] = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="it belongs to another model"):
        runs.resume(cfg, other, torch.optim.AdamW(ModuleDict(other.heads).parameters()), may_change=set())


# ------------------------------------------------------------------------------- the report's data


def test_the_newest_rows_are_read_and_the_others_counted(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    assert runs.newest(path) == ([], 0)
    with open(path, "w") as file:
        file.writelines(json.dumps({"task_id": i, "text": "x" * 100, "logp": float("nan")}) + "\n" for i in range(2100))
        file.write('{"task_id": 2100, "te')  # a run that is being written
    rows, left_out = runs.newest(path)
    assert [rows[0]["task_id"], rows[-1]["task_id"], len(rows) + left_out] == [101, 2099, 2101]
    assert rows[0]["logp"] is None  # JSON knows no NaN
    rows, left_out = runs.newest(path, size=10_000)  # it begins within a line
    assert rows and rows[-1]["task_id"] == 2099 and len(rows) + left_out == 2101 and len(json.dumps(rows)) < 12_000


def test_old_pictures_are_left_out_when_there_are_too_many(tmp_path):
    for name in "abcd":
        (tmp_path / name).write_bytes(b"12345")
    records = [{"turns": [{"shot": {"file": "a"}}, {"shot": {"file": "b"}}]},
               {"turns": [{"shot": {"file": "c"}}, {}, {"shot": {"file": "gone"}}, {"shot": {"file": "d"}}]}]
    runs.embed(records, tmp_path, room=16)
    assert [["jpeg" in turn.get("shot", {}) for turn in record["turns"]] for record in records] == [
        [True, False], [True, False, False, True]]
    assert base64.b64decode(records[1]["turns"][0]["shot"]["jpeg"]) == b"12345"


def test_a_report_needs_a_directory(tmp_path):
    with pytest.raises(ValueError, match="no run at .*nowhere; give --out"):
        runs.report(tmp_path / "nowhere")
    assert runs.report(tmp_path) == tmp_path / "report.html"
    assert runs.with_size(tmp_path / "report.html").startswith(f"report: {tmp_path}/report.html (0.")


def test_the_data_of_a_report_cannot_end_the_element_that_it_stands_in(tmp_path):
    hostile = {"turns": [], "intent": "</script><script>alert(1)</script>"}
    runs.Run(tmp_path, {}).append("trajectories.jsonl", [hostile])
    html = runs.report(tmp_path).read_text()
    assert "alert(1)" in html and "</script><script>alert" not in html


# ---------------------------------------------------------------------------------------- progress


def test_progress_is_one_line_on_a_terminal_and_plain_lines_elsewhere(monkeypatch, capsys):
    lines = ["1/3 episodes (33%), success 0%", "2/3 episodes (66%), success 50%", "3/3 episodes (100%), success 33%"]
    tick = ticker("test: ")
    [tick(line) for line in lines]
    assert capsys.readouterr().out == f"test: {lines[0]}\ntest: {lines[2]}\n"  # the second came too soon
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "24")
    clock = iter((0.0, 0.3, 0.4))
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    tick = ticker("test: ")
    [tick(line) for line in lines]
    first, second = (f"\r\033[Ktest: {line}"[:4 + 23] for line in lines[:2])  # as wide as the terminal
    assert capsys.readouterr().out == f"{first}{second}\r\033[Ktest: {lines[2]}\n"


def test_only_rank_0_prints(monkeypatch, capsys):
    monkeypatch.setattr(runs, "rank", lambda: 1)
    runs.print0("a line")
    ticker()("progress (100%)")
    assert capsys.readouterr().out == ""


# --------------------------------------------------------------------------------------- the command line


def parsed(monkeypatch, *arguments, presets={}, start="", kind=Knobs):
    monkeypatch.setattr(sys, "argv", ["x.py", *map(str, arguments)])
    return parse_args(kind, "what it does", presets, start)


def test_help_shows_each_knobs_comment_and_default(monkeypatch, capsys):
    says = ["what it does", "5% of what is usual (default: None)", "responses per episode (default: 3)",
            "the paper's values", "WebArena's reset server", "--no-decay", "--lr FLOAT", "--model STR"]
    with pytest.raises(SystemExit) as end:
        parsed(monkeypatch, "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and all(text in shown for text in says), shown


def test_what_is_found_later_is_none_until_it_is_given(monkeypatch):
    assert (parsed(monkeypatch).lr, parsed(monkeypatch, "--lr", "2e-5").lr) == (None, 2e-5)
    assert parsed(monkeypatch).judge_url is None and parsed(monkeypatch, "--judge-url", "http://j").judge_url == "http://j"


def test_the_command_line_beats_a_preset_beats_the_checkpoint_beats_the_class(monkeypatch, tmp_path):
    run = {"max_turns": 4, "max_context": 900, "max_new_tokens": 50, "viewport_only": True, "lr": 7.0}
    (tmp_path / "config.json").write_text(json.dumps({"run": run}))
    presets = {"paper": {"max_turns": 15, "max_context": 16384}}
    cfg = parsed(monkeypatch, "--model", tmp_path, "--paper", "--max-turns", 9, presets=presets)
    assert (cfg.max_turns, cfg.max_context, cfg.max_new_tokens, cfg.lr) == (9, 16384, 50, None) and cfg.viewport_only
    assert parsed(monkeypatch, presets=presets, start=str(tmp_path)).max_turns == 4
    assert not parsed(monkeypatch, "--model", tmp_path, "--no-viewport-only").viewport_only
    assert parsed(monkeypatch, "--model", "someone/elses-model").max_turns == 3
    assert parsed(monkeypatch, "--model", tmp_path, start=None).max_turns == 3  # bc.py only starts from it
    assert parsed(monkeypatch, "--model", tmp_path, start=lambda known: known.model).max_turns == 4
    assert parsed(monkeypatch, "--model", tmp_path, start=lambda known: None).max_turns == 3


def test_an_evaluation_as_model_names_the_policy_that_it_played(monkeypatch, tmp_path):
    """It once said that --max-turns is no number: an evaluation has a list of them."""
    (tmp_path / "config.json").write_text(json.dumps({"run": {"script": "evaluate.py", "max_turns": [5, 10], "model": "runs/x"}}))
    with pytest.raises(ValueError, match="is an evaluation and holds no weights; it played runs/x"):
        parsed(monkeypatch, "--model", tmp_path)


@pytest.mark.parametrize("flag", ["--max-turns", "--concurrency", "--steps"])
def test_a_count_is_at_least_one(flag, monkeypatch):
    with pytest.raises(ValueError, match=f"{flag} 0: give at least 1"):
        parsed(monkeypatch, flag, 0)


def said_at_the_end(main, monkeypatch, capsys, *arguments) -> str:
    """The line that a script's main ends with; its status is not 0."""
    monkeypatch.setattr(sys, "argv", ["x.py", *arguments])
    with pytest.raises(SystemExit) as end:
        command_line(main, Knobs, "")
    assert end.value.code
    return end.value.code if isinstance(end.value.code, str) else capsys.readouterr().err.splitlines()[-1]


def test_what_a_user_can_fix_is_one_sentence_and_a_status(monkeypatch, capsys):
    def refuse(cfg):
        raise ValueError(f"--lr {cfg.lr} is too large.")

    assert said_at_the_end(refuse, monkeypatch, capsys, "--lr", "3.5") == "x.py: --lr 3.5 is too large."
    said = said_at_the_end(lambda cfg: open("no/such/file"), monkeypatch, capsys)
    assert said.startswith("x.py: ") and "no/such/file" in said
    assert "--lr" in said_at_the_end(refuse, monkeypatch, capsys, "--lr", "fast")


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(ZeroDivisionError):
        command_line(lambda cfg: 1 / 0, Knobs, "")
    with pytest.raises(RuntimeError, match="inconsistent"):
        command_line(lambda cfg: torch.zeros(2) @ torch.zeros(3), Knobs, "")


# ------------------------------------------------------------------------------- signals and lost ranks


def start_ranks(*command, **pipes):
    """A script's processes on two ranks, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    return [subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env | {"RANK": str(i)}, text=True, **pipes)
            for i in range(2)]


def wait_for_rank_1(cfg):
    """The next test runs it on two ranks: rank 0 waits in a collective for rank 1, which waits for its input."""
    init_dist()
    all_max(0)
    print("ready", flush=True)
    if rank() == 1:
        sys.stdin.read()
    all_max(0)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_a_rank_that_waits_for_another_at_once(number):
    """Python's own handler for Ctrl-C could not run there. The other rank says that it has lost this one."""
    ranks = start_ranks(__file__, **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE))
    assert [process.stdout.readline() for process in ranks] == ["ready\n"] * 2
    time.sleep(0.3)  # until rank 0 waits
    ranks[0].send_signal(number)
    assert ranks[0].communicate(timeout=10)[1] == "" and ranks[0].returncode == -number
    assert "rank 1 lost another rank" in ranks[1].communicate(timeout=10)[1] and ranks[1].returncode == 1


def test_a_script_runs_without_a_stdout():
    silent = "import run, sys, test_run; assert not sys.stdout; run.command_line(print, test_run.Knobs, '')"
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, silent], cwd=ROOT, capture_output=True,
                          env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"})
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_signal_ends_a_script_whose_stderr_nobody_reads():
    """`mgrpo.py 2>&1 | tee log`, and Ctrl-C, which ends tee first."""
    waiting = ("import run, sys, test_run; "
               "run.command_line(lambda cfg: (print('ready'), sys.stdin.read()), test_run.Knobs, '')")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", waiting], cwd=ROOT, **pipes,
                               env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"})
    assert process.stdout.readline() == b"ready\n"
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == -signal.SIGINT
    process.stdin.close()
    process.stdout.close()


if __name__ == "__main__":
    command_line(wait_for_rank_1, Knobs, "")

"""What a script needs besides learning: a run's directory, resuming, the report's data, progress, the command line."""
import base64
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, tiny_model
from torch.nn import ModuleDict

import bc
import evaluate
import mgrpo
import run as runs
from evaluate import SiteSettings
from forks import critic, gigpo, webrl
from run import all_max, command_line, init_dist, open_run, parse_args, rank, ticker


@dataclass
class Knobs(SiteSettings):
    """Every knob is a flag; the comment after it is its help text."""
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
    cfg = Knobs(out=str(path))
    run = open_run(cfg, "cpu", first)
    run.begin({"model_type": "qwen2"}, first)
    run.lock.close()


def test_a_run_that_starts_over_leaves_no_state_to_resume(tmp_path):
    saved = tmp_path / "state" / "00001"
    saved.mkdir(parents=True)
    start(tmp_path, first=2)
    assert saved.exists()
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
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    (tmp_path / "step-notes").mkdir()  # a person's
    (tmp_path / "models.safetensors").touch()

    start(tmp_path, first=1)
    assert (tmp_path / "best/file").exists()
    assert (tmp_path / "summary.json").exists()

    start(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["config.json", "demos.jsonl", "lock", "models.safetensors", "step-notes"]


def test_a_run_that_goes_on_drops_the_rows_that_come_again(tmp_path):
    rows = [{"step": step} for step in range(4)]
    lines = [json.dumps(row) + "\n" for row in rows]
    lines.append('{"step": 4, "l')  # killed while it was writing
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(lines))

    start(tmp_path, first=2)

    kept = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert kept == rows[:2]


def test_a_run_does_not_overwrite_what_it_starts_from(tmp_path):
    cfg = Knobs(model=str(tmp_path), out=str(tmp_path))
    with pytest.raises(ValueError, match="--model .* is in --out"):
        open_run(cfg, "cpu", first_step=0)

    # Nor the weights under the adapters that it starts from.
    adapter = tmp_path / "lora" / "adapter"
    adapter.mkdir(parents=True)
    base = tmp_path / "base"
    base.mkdir()
    frozen = {"base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(frozen))
    cfg = Knobs(model=str(tmp_path / "lora"), out=str(base))
    with pytest.raises(ValueError, match="--model.s frozen weights .* is in --out"):
        open_run(cfg, "cpu", first_step=0)

    # Nor what lies deeper, such as data in OUT/best.
    cfg = Knobs(model=str(adapter), out=str(tmp_path))
    with pytest.raises(ValueError, match="--model .* is in --out"):
        open_run(cfg, "cpu", first_step=0)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "metrics.jsonl", "best", "state", "step-00005",
                                  "demos.jsonl", "agent.json", "generation_config.json", "chat_template.jinja"])
def test_a_new_run_does_not_touch_what_no_run_has_written(tmp_path, name):
    mine = tmp_path / name
    if "." in name:
        mine.write_text("{}")
    else:
        mine.mkdir()
        (mine / "work").touch()

    with pytest.raises(ValueError, match=f"{tmp_path} is not the directory of a run, and {name} in it would be lost"):
        open_run(Knobs(out=str(tmp_path)), "cpu", first_step=0)
    assert list(tmp_path.iterdir()) == [mine]

    # Other files stay, and a run may be written beside them.
    mine.rename(tmp_path / "mine")
    start(tmp_path)
    assert (tmp_path / "mine").exists()


def test_a_link_to_itself_is_no_directory(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ValueError, match=f"cannot write {loop}"):
        start(loop)


def test_a_run_needs_a_directory():
    with pytest.raises(ValueError, match="--out: name a directory"):
        open_run(Knobs(out=""), "cpu", first_step=0)


def test_two_runs_cannot_share_a_directory(tmp_path):
    first = runs.RunDirectory(tmp_path, {})
    first.claim()
    with pytest.raises(ValueError, match=f"{tmp_path} is in use by process {os.getpid()}"):
        runs.RunDirectory(tmp_path, {}).claim()
    first.lock.close()
    runs.RunDirectory(tmp_path, {}).claim()


def test_a_state_is_deleted_as_a_whole(tmp_path, monkeypatch):
    def rmtree(*_, **__):
        pass  # killed before it has deleted anything

    state = tmp_path / "state"
    (state / "00001").mkdir(parents=True)
    monkeypatch.setattr(runs.shutil, "rmtree", rmtree)
    runs.delete_directory(state)
    assert not state.exists()


def test_metrics_hold_no_nan(tmp_path):
    run = runs.RunDirectory(tmp_path, {})
    run.write_metrics({"loss": float("nan"), "change": [float("inf"), 0.1]})
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert written == {"loss": None, "change": [None, 0.1]}


def test_a_file_of_a_run_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("killed")

    run = runs.RunDirectory(tmp_path, {})
    run.replace("summary.json", {"n": 1})
    with monkeypatch.context() as patched:
        patched.setattr(runs.Path, "replace", fail)
        with pytest.raises(ValueError, match="cannot write .*summary.json"):
            run.replace("summary.json", {"n": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"n": 1}


def test_what_a_killed_process_was_writing_is_removed_by_the_next_one(tmp_path):
    for name in ("report.html.123.tmp", "summary.json.9.tmp", "demos.jsonl.77.tmp", "thesis.tmp"):
        (tmp_path / name).write_text("half of it")
    runs.RunDirectory(tmp_path, {}).claim()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["lock", "thesis.tmp"]  # one is not ours


def test_a_damaged_line_is_named_with_its_number(tmp_path):
    rows = tmp_path / "trajectories.jsonl"
    rows.write_text('{"split": "a"}\nnot JSON\n')
    with pytest.raises(ValueError, match=f"cannot use {rows}, line 2 .repair or delete it"):
        runs.keep_lines(rows, lambda row: True)
    rows.write_text('{"split": "a"}\n{"split": "b"}\n{"spl')
    runs.keep_lines(rows, lambda row: row["split"] == "b")
    assert rows.read_text() == '{"split": "b"}\n'


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
    runs.save_state(cfg, model, optimizer, step=2, inputs=runs.inputs_of(cfg))
    return cfg, model, optimizer


def test_a_run_continues_with_the_step_after_the_last_save(stopped):
    assert runs.resume(*stopped, may_change=set()) == 2


@pytest.mark.parametrize("extra, says", [
    (None, "TypeError"), ({}, "KeyError: 'step'"), ({"step": -1}, "state.json has step -1"),
    ({"step": 1.5}, "state.json has step 1.5"), ({"step": True}, "state.json has step True")])
def test_a_state_without_a_step_is_refused(extra, says, stopped):
    """It passed as no state at all, and a new run would have cleared the directory."""
    cfg, model, optimizer = stopped
    file = Path(cfg.out) / "state/00001/state.json"
    file.write_text(json.dumps({"parts": 1, "extra": extra}))
    with pytest.raises(ValueError, match=f"state/00001 \\(--no-resume starts over\\): .*{says}"):
        runs.resume(cfg, model, optimizer, may_change=set())


def test_frozen_weights_and_buffers_of_a_fork_are_saved(stopped):
    """Such as a moving average of the policy. They have no moments."""
    cfg, model, optimizer = stopped

    def with_memory(value):
        head = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
        head.weight.fill_(value)
        head.register_buffer("seen", torch.tensor([value, 2 * value]))
        model.fork_heads["memory"] = head
        return head

    with_memory(3.0)
    runs.save_state(cfg, model, optimizer, step=3, inputs=runs.inputs_of(cfg))
    assert not [name for name in runs.training_tensors(model, optimizer) if name.startswith("memory.weight/")]
    restored = with_memory(0.0)
    assert runs.resume(cfg, model, optimizer, may_change=set()) == 3
    assert (restored.weight.item(), restored.seen.tolist()) == (3.0, [3.0, 6.0])


def test_a_directory_that_is_a_link_goes_without_what_it_leads_to(tmp_path):
    """Somebody has put state/ on a larger disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "kept").touch()
    (tmp_path / "state").symlink_to(disk)
    for _ in range(2):
        runs.delete_directory(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]

    (tmp_path / "best").symlink_to(disk)
    for _ in range(2):
        (tmp_path / "best.new").mkdir()
        runs.swap_directory(tmp_path / "best", tmp_path / "best.new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "disk"]
    assert (disk / "kept").exists()


def test_without_a_state_or_without_resume_a_run_begins_at_its_first_step(stopped, tmp_path):
    cfg, model, optimizer = stopped
    anew = replace(cfg, resume=False)
    elsewhere = replace(cfg, out=str(tmp_path / "other"))
    assert runs.resume(anew, model, optimizer, may_change=set()) == 0
    assert runs.resume(elsewhere, model, optimizer, may_change=set()) == 0


def test_a_run_refuses_to_go_on_with_other_settings(stopped):
    cfg, model, optimizer = stopped
    other = replace(cfg, lr=0.2, steps=6)
    differences = r"holds a run with steps 4, not 6; lr 0\.1, not 0\.2.*--force"
    with pytest.raises(ValueError, match=differences) as refused:
        runs.resume(other, model, optimizer, may_change=set())
    assert cfg.out in str(refused.value)

    forced = replace(other, force=True)
    assert runs.resume(forced, model, optimizer, may_change=set()) == 2

    longer = replace(cfg, steps=6)
    assert runs.resume(longer, model, optimizer, may_change={"steps"}) == 2

    # Where and how fast it runs.
    faster = replace(cfg, concurrency=3, timeout=1.0, screenshots=4, browser="ws://there")
    assert runs.resume(faster, model, optimizer, may_change=set()) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "agent.json", "adapter/adapter_model.safetensors"])
def test_a_run_refuses_to_go_on_from_a_checkpoint_that_was_rewritten(stopped, name):
    """The reference policy is read from --model again: it once changed silently when that had been trained anew."""
    cfg, model, optimizer = stopped
    rewritten = runs.Path(cfg.model) / name
    rewritten.parent.mkdir(exist_ok=True)
    rewritten.write_bytes(b"other weights, or another prompt")
    with pytest.raises(ValueError, match=f"other weights, adapters or agent.json in {cfg.model}"):
        runs.resume(cfg, model, optimizer, may_change=set())

    forced = replace(cfg, force=True)
    assert runs.resume(forced, model, optimizer, may_change=set()) == 2


def test_a_knob_that_was_added_since_a_run_began_does_not_stop_it(stopped):
    cfg, model, optimizer = stopped
    [newest] = runs.saved_states(runs.Path(cfg.out) / "state")
    file = newest / "state.json"
    state = json.loads(file.read_text())
    del state["extra"]["config"]["lr"]
    file.write_text(json.dumps(state))
    assert runs.resume(cfg, model, optimizer, may_change=set()) == 2


def test_states_that_cannot_be_listed_are_not_called_missing(tmp_path):
    """Of a state/ without permission, which root cannot test, we said "no state/ to go on from. Give --no-resume"."""
    assert runs.saved_states(tmp_path / "state") == []
    (tmp_path / "state").touch()
    with pytest.raises(OSError, match="state"):
        runs.saved_states(tmp_path / "state")


def test_a_copy_beside_the_training_states_is_neither_read_nor_removed(stopped):
    cfg, model, optimizer = stopped
    state = runs.Path(cfg.out) / "state"
    [newest] = runs.saved_states(state)
    copy = state / f"{newest.name}.bak"
    copy.mkdir()
    assert runs.resume(cfg, model, optimizer, may_change=set()) == 2
    runs.save_state(cfg, model, optimizer, step=3, inputs=runs.inputs_of(cfg))
    assert runs.resume(cfg, model, optimizer, may_change=set()) == 3
    assert copy.exists()


def test_a_run_refuses_to_go_on_by_another_method(stopped):
    """mgrpo.py's run once went on as a fork's, and Adam's momentum as Muon's."""
    cfg, model, optimizer = stopped
    runs.save_state(cfg, model, optimizer, step=2, inputs=runs.inputs_of(cfg), method_name="MGRPO")
    assert runs.resume(cfg, model, optimizer, may_change=set(), method_name="MGRPO") == 2
    with pytest.raises(ValueError, match="the method MGRPO, not Short"):
        runs.resume(cfg, model, optimizer, may_change=set(), method_name="Short")


def test_a_run_refuses_to_go_on_with_other_demonstrations(tmp_path):
    """A file that had become shorter once ended cloning early, with a checkpoint that looked finished."""
    data = tmp_path / "demos.jsonl"
    data.write_text("one\ntwo\n")
    cfg = bc.Config(model="none", data=str(data), out=str(tmp_path / "run"))
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    runs.save_state(cfg, model, optimizer, step=2, inputs=runs.inputs_of(cfg))
    assert runs.resume(cfg, model, optimizer, may_change=set()) == 2
    data.write_text("one\n")
    with pytest.raises(ValueError, match=f"other demonstrations in {data}"):
        runs.resume(cfg, model, optimizer, may_change=set())


@pytest.mark.parametrize("name", ["state", "state.old", "best.old", "step-00004", "step-00004.old", "adapter.old",
                                  "screenshots.old", "unfinished.old"])
def test_a_new_run_deletes_what_a_killed_one_was_deleting(name, tmp_path):
    """A training state of a 3B model has 37 GB."""
    (tmp_path / name).mkdir()
    runs.RunDirectory(tmp_path, {}).clear()
    assert not (tmp_path / name).exists()


def test_a_run_that_cannot_be_cleared_is_not_called_unharmed(tmp_path, monkeypatch):
    """Its training state may be gone when its best checkpoint turns out to be in use."""
    (tmp_path / "best").mkdir()

    def busy(_):
        raise OSError("best is in use")

    monkeypatch.setattr(runs, "delete_directory", busy)
    with pytest.raises(ValueError, match=f"cannot clear {tmp_path}: best is in use; a part of the earlier run may be gone"):
        runs.RunDirectory(tmp_path, {}).clear()


def test_a_run_refuses_to_go_on_with_other_tasks(tmp_path):
    """Of two files with one name, each counts."""
    files = [tmp_path / name / "tasks.json" for name in ("one", "two")]
    for file in files:
        file.parent.mkdir()
        file.write_text(f"the tasks of {file}")
    spec = ",".join(["sandbox:train", *map(str, files)])
    cfg = mgrpo.Config(model="none", tasks=spec, out=str(tmp_path / "run"))
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    began_with = runs.open_run(cfg, "cpu", 0).inputs
    runs.save_state(cfg, model, optimizer, step=2, inputs=began_with)
    assert runs.resume(cfg, model, optimizer, may_change=set()) == 2

    for file in files:
        before = file.read_text()
        file.write_text("others")
        with pytest.raises(ValueError, match=f"other tasks in {spec}, which have been rewritten or removed"):
            runs.resume(cfg, model, optimizer, may_change=set())
        file.write_text(before)
    assert runs.resume(cfg, model, optimizer, may_change=set()) == 2


def test_a_comma_belongs_to_the_name_of_demonstrations(tmp_path):
    """Only --tasks names several files."""
    file = tmp_path / "demos, old.jsonl"
    file.write_text("{}")
    cfg = SimpleNamespace(model="none", data=str(file))
    before = runs.inputs_of(cfg)
    file.write_text("{} ")
    assert runs.inputs_of(cfg) != before


def test_every_byte_of_a_task_file_counts(tmp_path):
    """Of weights, which are gigabytes, only both ends are read."""
    file = tmp_path / "tasks.json"
    text = bytearray(3_000_000)
    file.write_bytes(text)
    before = runs.fingerprint(file)
    text[1_500_000] = 1
    file.write_bytes(text)
    assert runs.fingerprint(file) != before


def test_a_state_of_another_model_is_refused(stopped):
    cfg, _, _ = stopped
    other = tiny_model()
    other.fork_heads["value"] = torch.nn.Linear(2, 1)
    its_heads = ModuleDict(other.fork_heads)
    optimizer = torch.optim.AdamW(its_heads.parameters())
    with pytest.raises(ValueError, match="it belongs to another model"):
        runs.resume(cfg, other, optimizer, may_change=set())


# ------------------------------------------------------------------------------- the report's data


def test_the_newest_rows_are_read_and_the_others_counted(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    assert runs.last_lines(path) == ([], 0)
    with open(path, "w") as file:
        for i in range(2100):
            row = {"task_id": i, "text": "x" * 100, "logp": float("nan")}
            file.write(json.dumps(row) + "\n")
        file.write('{"task_id": 2100, "te')  # a run that is being written

    rows, left_out = runs.last_lines(path)
    assert rows[0]["task_id"] == 101
    assert rows[-1]["task_id"] == 2099
    assert len(rows) + left_out == 2101
    assert rows[0]["logp"] is None  # JSON knows no NaN

    rows, left_out = runs.last_lines(path, size=10_000)  # it begins within a line
    assert rows
    assert rows[-1]["task_id"] == 2099
    assert len(rows) + left_out == 2101
    assert len(json.dumps(rows)) < 12_000


def test_old_pictures_are_left_out_when_there_are_too_many(tmp_path):
    for name in "abcd":
        (tmp_path / name).write_bytes(b"12345")

    def turn(file):
        return {"shot": {"file": file}}

    older = {"turns": [turn("a"), turn("b")]}
    newer = {"turns": [turn("c"), {}, turn("gone"), turn("d")]}
    runs.embed_screenshots([older, newer], tmp_path, room=16)

    def pictured(record):
        return ["jpeg" in turn.get("shot", {}) for turn in record["turns"]]

    assert pictured(older) == [True, False]
    assert pictured(newer) == [True, False, False, True]
    jpeg = newer["turns"][0]["shot"]["jpeg"]
    assert base64.b64decode(jpeg) == b"12345"


def test_a_report_needs_a_run(tmp_path):
    """--out assets would replace the page that all reports are made of."""
    with pytest.raises(ValueError, match="nowhere holds no results of a run; give --out"):
        runs.report(tmp_path / "nowhere")
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(ValueError, match=f"{tmp_path} holds no results of a run; give --out"):
        runs.report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "mine"

    (tmp_path / "metrics.jsonl").write_text("")
    assert runs.report(tmp_path) == tmp_path / "report.html"
    assert runs.with_size(tmp_path / "report.html").startswith(f"report: {tmp_path}/report.html (0.")


def test_the_data_of_a_report_cannot_end_the_element_that_it_stands_in(tmp_path):
    hostile = {"turns": [], "intent": "</script><script>alert(1)</script>"}
    runs.RunDirectory(tmp_path, {}).append("trajectories.jsonl", [hostile])
    html = runs.report(tmp_path).read_text()
    assert "alert(1)" in html
    assert "</script><script>alert" not in html


# ---------------------------------------------------------------------------------------- progress


def test_progress_is_one_line_on_a_terminal_and_plain_lines_elsewhere(monkeypatch, capsys):
    lines = [
        "1/3 episodes (33%), success 0%",
        "2/3 episodes (66%), success 50%",
        "3/3 episodes (100%), success 33%",
    ]
    def show(tick):
        for line in lines:
            tick(line, last=line == lines[-1])

    show(ticker("test: "))
    shown = capsys.readouterr().out
    assert shown == f"test: {lines[0]}\ntest: {lines[2]}\n"  # the second came too soon

    # On a terminal of 24 columns. A line leaves the last column free.
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "24")
    clock = iter((0.0, 0.3, 0.4))

    def monotonic():
        return next(clock)

    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=monotonic))
    show(ticker("test: "))
    rewrite = "\r\033[K"
    first = f"test: {lines[0]}"[:23]
    second = f"test: {lines[1]}"[:23]
    last = f"test: {lines[2]}\n"
    shown = capsys.readouterr().out
    assert shown == rewrite + first + rewrite + second + rewrite + last


def test_only_rank_0_prints(monkeypatch, capsys):
    monkeypatch.setattr(runs, "rank", lambda: 1)
    runs.print0("a line")
    ticker()("progress", last=True)
    assert capsys.readouterr().out == ""


# --------------------------------------------------------------------------------------- the command line


def parsed(monkeypatch, *arguments, presets={}, start="", kind=Knobs):
    command = ["x.py"]
    command += [str(argument) for argument in arguments]
    monkeypatch.setattr(sys, "argv", command)
    return parse_args(kind, "what it does", presets, start)


def test_help_shows_each_knobs_comment_and_default(monkeypatch, capsys):
    says = [
        "what it does",
        "5% of what is usual (default: None)",
        "responses per episode (default: 3)",
        "the paper's values",
        "WebArena's reset server",
        "--no-decay",
        "--lr FLOAT",
        "--model STR",
    ]
    with pytest.raises(SystemExit) as end:
        parsed(monkeypatch, "--help")
    assert end.value.code == 0

    shown = " ".join(capsys.readouterr().out.split())
    for text in says:
        assert text in shown


class Forgot(Knobs):
    """Without @dataclass."""
    keep: float = 0.95


@dataclass
class Shares(Knobs):
    shares: list[float] = None


@dataclass
class Written(Knobs):
    """As `from __future__ import annotations` leaves a fork's types: as text."""
    keep: "float | None" = None  # what each response leaves
    names: "list[int]" = None


def test_the_config_of_a_fork_of_ones_own(monkeypatch):
    """Its flags were lost, its list of numbers was cut into letters, its types as text ended in a traceback."""
    cfg = parsed(monkeypatch, "--keep", "0.5", "--names", "1,2", kind=Written)
    assert cfg.keep == 0.5
    assert cfg.names == [1, 2]
    with pytest.raises(TypeError, match="Forgot needs @dataclass"):
        parsed(monkeypatch, kind=Forgot)
    with pytest.raises(TypeError, match="shares: a flag is .* not list.float."):
        parsed(monkeypatch, kind=Shares)


def test_paper_is_refused_where_its_values_are_not_known(monkeypatch):
    """It was recorded as true, with the defaults."""
    with pytest.raises(ValueError, match="--paper: this script does not know the paper's values"):
        parsed(monkeypatch, "--paper")
    assert parsed(monkeypatch, "--paper", presets={"paper": {"steps": 40}}).steps == 40


def test_what_is_found_later_is_none_until_it_is_given(monkeypatch):
    assert parsed(monkeypatch).lr is None
    assert parsed(monkeypatch, "--lr", "2e-5").lr == 2e-5
    assert parsed(monkeypatch).judge_url is None
    assert parsed(monkeypatch, "--judge-url", "http://j").judge_url == "http://j"


def test_the_command_line_beats_a_preset_beats_the_checkpoint_beats_the_class(monkeypatch, tmp_path):
    run = {
        "max_turns": 4,
        "max_context": 900,
        "max_new_tokens": 50,
        "viewport_only": True,
        "lr": 7.0,
    }
    (tmp_path / "config.json").write_text(json.dumps({"run": run}))
    presets = {"paper": {"max_turns": 15, "max_context": 16384}}

    cfg = parsed(monkeypatch, "--model", tmp_path, "--paper", "--max-turns", 9, presets=presets)
    assert cfg.max_turns == 9
    assert cfg.max_context == 16384
    assert cfg.max_new_tokens == 50
    assert cfg.lr is None
    assert cfg.viewport_only

    def model_of(known):
        return known.model

    def none(known):
        return None

    def max_turns(*arguments, **more):
        return parsed(monkeypatch, *arguments, **more).max_turns

    assert max_turns(presets=presets, start=str(tmp_path)) == 4
    assert not parsed(monkeypatch, "--model", tmp_path, "--no-viewport-only").viewport_only
    assert max_turns("--model", "someone/elses-model") == 3
    assert max_turns("--model", tmp_path, start=None) == 3  # bc.py only starts from it
    assert max_turns("--model", tmp_path, start=model_of) == 4
    assert max_turns("--model", tmp_path, start=none) == 3


@pytest.mark.parametrize("run, says", [
    (3, "its run is 3, not an object"),
    ({"viewport_only": "no"}, "its run has viewport_only 'no'"),  # a text is true: pages lost what is below the window
    ({"max_turns": None}, "its run has max_turns None"),
    ({"max_context": 0}, "its run has max_context 0"),
    ({"max_turns": True}, "its run has max_turns True"),
])
def test_a_checkpoints_odd_settings_are_refused_by_its_name(run, says, monkeypatch, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "run": run}))
    with pytest.raises(ValueError, match=f"cannot use {config}: {says}"):
        parsed(monkeypatch, "--model", tmp_path, start="runs/bc")


def test_a_byte_order_mark_is_no_damage(tmp_path):
    (tmp_path / "agent.json").write_text('{"think": false}', encoding="utf-8-sig")
    assert runs.read_json(tmp_path / "agent.json") == {"think": False}


def test_an_evaluation_as_model_names_the_policy_that_it_played(monkeypatch, tmp_path):
    """It once said that --max-turns is no number: an evaluation has a list of them."""
    run = {"script": "evaluate.py", "max_turns": [5, 10], "model": "runs/x"}
    (tmp_path / "config.json").write_text(json.dumps({"run": run}))
    with pytest.raises(ValueError, match="is an evaluation and holds no weights; it played runs/x"):
        parsed(monkeypatch, "--model", tmp_path)


@pytest.mark.parametrize("flag, value, message", [
    ("--warmup", "3", "it is a share of the steps, from 0 to 1"),  # a habit: warm-up in steps
    ("--warmup", "-0.1", "it is a share of the steps, from 0 to 1"),
    ("--lr", "-0.001", "give at least 0"),
    ("--lr", "inf", "give a finite number"),
    ("--timeout", "inf", "give the seconds that a page may take, from above 0 to 1e6"),  # no page would open
    ("--max-page-chars", "-5", "give at least 1"),
    ("--max-new-tokens", "0", "give at least 1"),
    ("--warmup", "nan", "give a finite number"),
    ("--epochs", "inf", "give a finite number"),
    ("--demos", "0", "give at least 1"),
    ("--lora", "-3", "give at least 0"),
    ("--max-grad-norm", "0", "give more than 0"),  # elsewhere it means that nothing is clipped; here nothing would train
])
def test_a_number_out_of_its_range_is_refused(flag, value, message, monkeypatch):
    with pytest.raises(ValueError, match=f"{flag} {value}: {message}"):
        parsed(monkeypatch, flag, value, kind=bc.Config)


def test_a_temperature_at_which_logits_overflow_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="--temperature 1e-40: give at least 0.01"):
        parsed(monkeypatch, "--temperature", "1e-40", kind=mgrpo.Config)
    assert parsed(monkeypatch, "--temperature", "0", kind=evaluate.Config).temperature == 0
    assert parsed(monkeypatch, "--temperature", "0.01", kind=evaluate.Config).temperature == 0.01


@pytest.mark.parametrize("flag, value", [("--eps", "1e+300"), ("--lr", "1e+38"), ("--lr", "-inf")])
def test_a_number_that_float32_cannot_compute_with_is_refused(flag, value, monkeypatch):
    """torch raised RuntimeError in the first update, after a step's episodes had been played."""
    with pytest.raises(ValueError, match=f"{flag} {re.escape(value)}: give"):
        parsed(monkeypatch, f"{flag}={value}", kind=mgrpo.Config)


def test_a_limit_may_be_infinite(monkeypatch):
    assert parsed(monkeypatch, "--eps", "inf", kind=mgrpo.Config).eps == math.inf


def test_an_empty_value_is_refused_where_it_would_stand_for_none(monkeypatch):
    """evaluate.py --model "$M", with M not set, once played runs/mgrpo."""
    with pytest.raises(ValueError, match="--model is empty; give a value, or leave it out"):
        parsed(monkeypatch, "--model", "", kind=evaluate.Config)
    assert parsed(monkeypatch, "--allow", "", kind=evaluate.Config).allow == ""  # its default


@pytest.mark.parametrize("fork, flag, value, message", [
    (critic, "--head-lr", "-0.001", "give more than 0"),
    (critic, "--head-lr", "0", "give more than 0"),
    (critic, "--value-weight", "inf", "give a finite number"),
    (webrl, "--head-updates", "-1", "give at least 1"),  # the heads never learned, without a word
    (webrl, "--outcome-updates", "0", "give at least 1"),
    (gigpo, "--turn-credit", "inf", "give a finite number"),  # nothing was trained, and the run ended with "saved"
    (gigpo, "--save-every", "-3", "give at least 0"),
    (gigpo, "--max-tokens", "0", "give at least 1"),
])
def test_a_number_of_a_fork_out_of_its_range_is_refused(fork, flag, value, message, monkeypatch):
    with pytest.raises(ValueError, match=f"{flag} {value}: {message}"):
        parsed(monkeypatch, flag, value, kind=fork.Config)


def test_an_evaluation_may_ask_what_passes_when_nobody_acts(monkeypatch):
    assert parsed(monkeypatch, "--max-turns", "0,5", kind=evaluate.Config).max_turns == [0, 5]
    with pytest.raises(ValueError, match=r"--max-turns \[-1\]: give at least 0"):
        parsed(monkeypatch, "--max-turns=-1", kind=evaluate.Config)


@pytest.mark.parametrize("flag", ["--max-turns", "--concurrency", "--steps"])
def test_a_count_is_at_least_one(flag, monkeypatch):
    with pytest.raises(ValueError, match=f"{flag} 0: give at least 1"):
        parsed(monkeypatch, flag, 0)


def said_at_the_end(main, monkeypatch, capsys, *arguments) -> str:
    """The line that a script's main ends with; its status is not 0."""
    monkeypatch.setattr(sys, "argv", ["x.py", *arguments])
    with pytest.raises(SystemExit) as end:
        command_line(main, Knobs, "")
    code = end.value.code
    assert code
    if isinstance(code, str):
        return code
    return capsys.readouterr().err.splitlines()[-1]


def test_what_a_user_can_fix_is_one_sentence_and_a_status(monkeypatch, capsys):
    def refuse(cfg):
        raise ValueError(f"--lr {cfg.lr} is too large.")

    def open_nothing(cfg):
        open("no/such/file")

    said = said_at_the_end(refuse, monkeypatch, capsys, "--lr", "3.5")
    assert said == "x.py: --lr 3.5 is too large."

    said = said_at_the_end(open_nothing, monkeypatch, capsys)
    assert said.startswith("x.py: ")
    assert "no/such/file" in said

    said = said_at_the_end(refuse, monkeypatch, capsys, "--lr", "fast")
    assert "--lr" in said


def test_a_bug_keeps_its_traceback(monkeypatch):
    def divide(cfg):
        return 1 / 0

    def multiply(cfg):
        return torch.zeros(2) @ torch.zeros(3)

    def unpack(cfg):  # a ValueError as well, but Python's: its one sentence names neither file nor line
        first, rest = (1, 2, 3)

    def match(cfg):
        return torch.tensor([[1], [1, 2]])

    def draw(cfg):  # raised in the standard library's own code
        return random.sample([1], 2)

    def load(cfg):  # and in torch's
        return torch.utils.data.DataLoader([1], batch_size=-1)

    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(ZeroDivisionError):
        command_line(divide, Knobs, "")
    with pytest.raises(RuntimeError, match="inconsistent"):
        command_line(multiply, Knobs, "")
    for bug in (unpack, match, draw, load):
        with pytest.raises(ValueError):
            command_line(bug, Knobs, "")


# ------------------------------------------------------------------------------- signals and lost ranks


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def start_ranks(*command, **pipes):
    """A script's processes on two ranks, as torchrun starts them."""
    free = socket.socket()
    free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so rank 0 may listen there, and nobody else gets the port
    free.bind(("127.0.0.1", 0))
    _, port = free.getsockname()
    env = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    ranks = []
    for number in range(2):
        its_env = env | {"RANK": str(number)}
        ranks.append(subprocess.Popen([sys.executable, *command], cwd=ROOT, env=its_env, text=True, **pipes))
    ranks[0].port = free  # kept until the ranks are forgotten: the port stays theirs
    return ranks


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
    ranks = start_ranks(__file__, **PIPES)
    for process in ranks:
        assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)  # until rank 0 waits

    signalled, other = ranks
    signalled.send_signal(number)
    _, said = signalled.communicate(timeout=120)
    assert said == ""
    assert signalled.returncode == -number

    _, said = other.communicate(timeout=120)
    assert "rank 1 lost another rank" in said
    assert other.returncode == 1


def env_for_imports() -> dict:
    """The environment of a process that imports run.py and this file."""
    return os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}


def test_a_script_runs_without_a_stdout():
    code = "import run, sys, test_run; assert not sys.stdout; run.command_line(print, test_run.Knobs, '')"
    without_stdout = 'exec "$0" -c "$1" >&-'
    command = ["sh", "-c", without_stdout, sys.executable, code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, env=env_for_imports())
    assert done.returncode == 0
    assert done.stderr == b""


def test_a_script_whose_log_nobody_reads_any_more_goes_on(tmp_path):
    """`mgrpo.py | head`: the next line ended the run, and a step that had been played was lost."""
    done = tmp_path / "done"
    code = (f"import run, test_run; run.command_line(lambda cfg: [run.print0('x' * 9999) for _ in range(99)] and "
            f"open('{done}', 'w').close(), test_run.Knobs, '')")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env_for_imports(), **PIPES)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=600) == 0
    assert process.stderr.read() == b""
    assert done.exists()
    process.stdin.close()
    process.stderr.close()


def test_a_name_with_half_a_surrogate_can_be_printed():
    code = "import run, test_run; run.command_line(lambda cfg: run.print0('split \\ud800'), test_run.Knobs, '')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, env=env_for_imports())
    assert done.stdout == b"split \\ud800\n"
    assert done.returncode == 0


def test_a_signal_ends_a_script_whose_stderr_nobody_reads():
    """`mgrpo.py 2>&1 | tee log`, and Ctrl-C, which ends tee first."""
    code = ("import run, sys, test_run; "
            "run.command_line(lambda cfg: (print('ready'), sys.stdin.read()), test_run.Knobs, '')")
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=ROOT, env=env_for_imports(), **PIPES)
    assert process.stdout.readline() == b"ready\n"
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == -signal.SIGINT
    process.stdin.close()
    process.stdout.close()


if __name__ == "__main__":
    command_line(wait_for_rank_1, Knobs, "")


def test_of_two_training_states_the_newer_one_counts(stopped):
    """A kill between the arrival of the newer and the removal of the older leaves both."""
    cfg, model, optimizer = stopped
    state = runs.Path(cfg.out) / "state"
    [older] = runs.saved_states(state)
    newer = state / "00009"
    shutil.copytree(older, newer)
    saved = json.loads((newer / "state.json").read_text())
    saved["extra"]["step"] = 3
    (newer / "state.json").write_text(json.dumps(saved))

    assert runs.resume(cfg, model, optimizer, may_change=set()) == 3
    runs.save_state(cfg, model, optimizer, step=4, inputs=runs.inputs_of(cfg))
    assert runs.resume(cfg, model, optimizer, may_change=set()) == 4
    assert [path.name for path in state.iterdir()] == ["00010"]


def test_both_ends_of_weights_count_and_their_size(tmp_path):
    file = tmp_path / "model.safetensors"
    seen = set()
    for size, changed in ((3_000_000, None), (3_000_000, 0), (3_000_000, 2_999_999), (3_000_001, None)):
        weights = bytearray(size)
        if changed is not None:
            weights[changed] = 1
        file.write_bytes(weights)
        seen.add(runs.fingerprint(tmp_path)[file.name])
    assert len(seen) == 4


@pytest.mark.parametrize("changes", [
    {"seed": 1},
    {"temperature": 0.9},
    {"max_turns": 3},
    {"max_new_tokens": 9},
    {"max_context": 999},
    {"viewport_only": True},
    {"max_page_chars": 999},
    {"batch": 3},
    {"loss_norm": "paper"},
])
def test_what_decides_the_result_must_stay_as_it_was(changes):
    cfg = mgrpo.Config(model="none")
    saved = {"config": asdict(cfg), "inputs": runs.inputs_of(cfg), "method": "MGRPO"}
    assert runs.differences(cfg, saved, runs.PLACE_AND_PACE, "MGRPO") == []
    [difference] = runs.differences(replace(cfg, **changes), saved, runs.PLACE_AND_PACE, "MGRPO")
    assert difference.startswith(*changes)

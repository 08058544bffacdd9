"""Demonstrations to rows, rows to a policy."""
import contextlib
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import pad, tiny_model

import bc
import evaluate
import rollout
from bc import (Config, batches, lr_by_size, read_demonstrations, record_demonstrations,
                warmup_cosine)
from compress import Chat, Trajectory, replay, trajectory_rows
from model import load, load_tokenizer, token_logprobs
from run import RunDirectory
from worlds import sandbox, webarena
from worlds.webarena import WebRLPage

FIRST = {
    "url": "http://x/",
    "observation": "<a>red lamp <5></a>",
    "response": '# Element: red lamp <5>\ndo(action="Click", element="5")',
}
LAST = {
    "url": "http://x/2",
    "observation": "<p>in the cart</p>",
    "response": 'exit(message="done")',
}
RECORD = {
    "task_id": 3,
    "sites": ["shopping"],
    "intent": "add the red lamp to the cart",
    "success": 1.0,
    "reward": 1.0,
    "turns": [FIRST, LAST],
}


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Chat(tokenizer, "You browse the web.", think=False)


def rows_of(record, chat):
    """The training rows of a demonstration, one a turn."""
    return trajectory_rows(chat, replay(chat, record))


def write(path, *records):
    lines = [json.dumps(record) + "\n" for record in records]
    path.write_text("".join(lines))
    return path


# -------------------------------------------------------------------------------- rows, and learning them


def test_only_the_response_and_its_end_of_turn_are_trained(chat):
    rows = rows_of(RECORD, chat)
    for row, turn in zip(rows, RECORD["turns"], strict=True):
        trained = row.ids[-row.n_action:]
        before = row.ids[:-row.n_action]
        assert chat.decode(trained) == turn["response"]
        assert trained[-1] == chat.end_id
        assert turn["observation"] in chat.tokenizer.decode(before)


def test_a_forced_end_of_turn_is_not_learned(chat):
    cut = FIRST | {"response": "go on and", "truncated": True}
    row, last = rows_of(RECORD | {"turns": [cut, LAST]}, chat)

    trained = row.ids[-row.n_action:]
    assert chat.decode(trained) == "go on and"
    assert row.ids[-1] != chat.end_id

    # It is closed in the history: system, user, response; then the page.
    history = last.ids[:last.n_context]
    assert history.count(chat.end_id) == 4


def test_behavior_cloning_learns_its_demonstrations(chat):
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    rows = rows_of(RECORD, chat)
    lines = []
    cfg = Config(epochs=60, batch=2, lr=1e-2, save_every=0)  # else it leaves a state in runs/bc
    optimizer = torch.optim.AdamW(model.parameters())
    directory = SimpleNamespace(write_metrics=lines.append)

    bc.clone(model, optimizer, [rows], cfg, device="cpu", directory=directory)

    assert lines[0]["loss"] > 3
    assert lines[-1]["loss"] < 0.1
    tokens_BT, action_BT = pad(rows)
    logp_N, _, _ = token_logprobs(model, tokens_BT, action_BT)
    assert logp_N.mean() > -0.1


def test_every_pass_holds_every_response_once_and_keeps_a_trajectory_together():
    dataset = []
    for tau in range(20):
        turns = 1 + tau % 4
        dataset.append([(tau, t) for t in range(turns)])
    in_order = sum(dataset, [])  # 50 responses

    seen = []
    for batch in batches(dataset, 20, Config(batch=5)):
        seen += batch

    first_pass = seen[:50]
    second_pass = seen[50:]
    assert len(seen) == 100
    assert sorted(first_pass) == in_order
    assert sorted(second_pass) == in_order
    assert first_pass != second_pass
    assert second_pass != in_order
    for i, (tau, t) in enumerate(seen):
        if t > 0:
            assert seen[i - 1] == (tau, t - 1)


def test_another_seed_shows_demonstrations_in_another_order():
    dataset = [[number] for number in range(30)]
    first, second = (next(batches(dataset, 1, Config(batch=30, seed=seed))) for seed in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)


def test_a_pretrained_language_model_gets_a_smaller_learning_rate():
    """1e-3 destroys one: SmolLM2's loss went from 1.87 to 3.58."""
    small = torch.nn.Linear(1000, 1000)
    large = torch.nn.Linear(4000, 4000, device="meta")

    def rate(model, lora):
        model.lora = lora
        return lr_by_size(model, small=1e-3, large=2e-5)

    assert rate(small, lora=0) == 1e-3
    assert rate(large, lora=0) == 2e-5

    # Adapters start at 0 and bear more.
    assert rate(small, lora=4) == pytest.approx(1e-2)
    assert rate(large, lora=4) == pytest.approx(2e-4)


def test_recompute_reaches_the_model(checkpoint):
    for recompute in (False, True):
        _, model = bc.open_policy(Config(model=str(checkpoint), recompute=recompute), torch.device("cpu"))
        assert model.recompute == recompute


@pytest.fixture
def clone(checkpoint, tmp_path, monkeypatch):
    """clone(out, clone_batch): the whole script on RECORD, 12 steps; returns how many it made."""
    demonstrations = write(tmp_path / "demos.jsonl", RECORD)

    def clone(out, clone_batch, **changes):
        made = []

        def counted(*args, **more):
            made.append(0)
            return clone_batch(len(made), *args, **more)

        monkeypatch.setattr(bc, "clone_batch", counted)
        settings = dict(
            model=str(checkpoint),
            data=str(demonstrations),
            out=str(tmp_path / out),
            epochs=6,
            batch=1,
            save_every=3,
        )
        settings.update(changes)
        with contextlib.suppress(KeyboardInterrupt):
            bc.main(Config(**settings))
        text = (tmp_path / out / "metrics.jsonl").read_text()
        clone.lines = [json.loads(line) for line in text.splitlines()]
        return len(made)

    return clone


@pytest.mark.parametrize("lora", [0, 4])
def test_an_interrupted_run_continues_as_if_nothing_had_happened(clone, tmp_path, lora):
    """Bit for bit; an interruption costs the steps since the last save."""
    clone_batch = bc.clone_batch

    def interrupted(made, *args, **more):
        if made == 6:
            raise KeyboardInterrupt
        return clone_batch(*args, **more)

    def as_it_is(made, *args, **more):
        return clone_batch(*args, **more)

    def timeless(line):
        return {key: value for key, value in line.items() if "second" not in key}

    def weights(out):
        state = load(tmp_path / out).state_dict()
        return {name: weight.tolist() for name, weight in state.items()}

    assert clone("whole", as_it_is, lora=lora) == 12
    whole = [timeless(line) for line in clone.lines]

    assert clone("parts", interrupted, lora=lora) == 6
    assert clone("parts", as_it_is, lora=lora) == 12 - 3
    parts = [timeless(line) for line in clone.lines]

    assert parts == whole
    assert weights("parts") == weights("whole")
    assert not (tmp_path / "parts/state").exists()


def test_a_cloning_that_starts_over_leaves_the_old_policy_until_it_trains_and_then_not_at_all(clone, tmp_path):
    """mgrpo.py once trained on the weights of the clone before, under the config.json of an interrupted new one."""
    clone_batch = bc.clone_batch

    def as_it_is(made, *args, **more):
        return clone_batch(*args, **more)

    def interrupted(made, *args, **more):
        if made == 2:
            raise KeyboardInterrupt
        return clone_batch(*args, **more)

    def files():
        kept = {}
        for name in ("model.safetensors", "config.json", "metrics.jsonl", "agent.json"):
            kept[name] = (tmp_path / "x" / name).read_bytes()
        return kept

    clone("x", as_it_is)
    before = files()
    with pytest.raises(ValueError, match="cannot use"):
        clone("x", as_it_is, data=str(tmp_path / "no such file"), seed=5)
    assert files() == before
    clone("x", interrupted)
    assert not (tmp_path / "x/model.safetensors").exists()


def test_a_context_beyond_the_models_positions_is_refused_before_anything_is_written(checkpoint, tmp_path):
    cfg = Config(model=str(checkpoint), out=str(tmp_path / "x"), max_context=5000)
    with pytest.raises(ValueError, match="--max-context 5000: the model knows 4096 positions"):
        bc.main(cfg)
    assert not (tmp_path / "x").exists()


def test_a_gradient_that_is_not_finite_makes_no_step(chat):
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    row, _ = rows_of(RECORD, chat)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}

    def unchanged():
        now = model.state_dict()
        return all(torch.equal(before[name], now[name]) for name in now)

    def step():
        _, _, skipped = bc.clone_batch(model, optimizer, [row], Config(), "cpu")
        return skipped

    for poison in (float("nan"), float("inf")):
        def poisoned(gradient):
            return gradient * poison

        hook = model.model.norm.weight.register_hook(poisoned)
        assert step()
        assert unchanged()
        assert not optimizer.state
        assert all(p.grad is None for p in model.parameters())
        hook.remove()

    assert not step()
    assert not unchanged()


def test_skipped_steps_are_said_and_on_record(clone, capsys):
    clone_batch = bc.clone_batch
    bad = {2, 4, 5, 7, 8, 9}

    def poisoned(gradient):
        return gradient * float("nan")

    def spoiled(made, model, *args, **more):
        if made not in bad:
            return clone_batch(model, *args, **more)
        hook = model.model.norm.weight.register_hook(poisoned)
        loss, norm, skipped = clone_batch(model, *args, **more)
        hook.remove()
        if made == 5:
            loss = float("nan")
        return loss, norm, skipped

    assert clone("x", spoiled) == 12

    for line, made in zip(clone.lines, range(1, 13), strict=True):
        is_bad = made in bad
        assert line["skipped"] == int(is_bad)
        assert (line["grad_norm"] is None) == is_bad
    without_loss = [line["step"] for line in clone.lines if line["loss"] is None]
    assert without_loss == [4]
    assert capsys.readouterr().out.count("no update") == 6


def test_without_lr_a_small_model_clones_at_its_own(clone, tmp_path):
    clone_batch = bc.clone_batch
    clone("x", lambda made, *given, **more: clone_batch(*given, **more), lr=None, epochs=1)
    assert json.loads((tmp_path / "x/config.json").read_text())["run"]["lr"] == 5e-4


def test_every_step_of_cloning_has_the_learning_rate_of_the_schedule(clone):
    clone_batch = bc.clone_batch
    rates = []

    def look(made, model, optimizer, *given, **more):
        rates.append(optimizer.param_groups[0]["lr"])
        return clone_batch(model, optimizer, *given, **more)

    assert clone("x", look, lr=0.01, warmup=0.25) == 12
    expected = [warmup_cosine(step, 12, Config(lr=0.01, warmup=0.25)) for step in range(12)]
    assert rates == pytest.approx(expected)


def test_the_learning_rate_rises_and_falls():
    cfg = Config(lr=1.0, warmup=0.05)
    rates = [warmup_cosine(step, 100, cfg) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == 1.0
    assert rates[4] == 1.0
    assert rates[-1] < 0.01
    falling = rates[5:]
    assert falling == sorted(falling, reverse=True)


def test_the_cosine_ends_where_a_further_step_would_have_rate_0():
    assert warmup_cosine(40, 40, Config(lr=1.0, warmup=0.25)) == pytest.approx(0)
    assert warmup_cosine(25, 40, Config(lr=1.0, warmup=0.25)) == pytest.approx(0.5)


# ------------------------------------------------------------------------------ files of demonstrations


@pytest.mark.parametrize("text, says", [
    ("{", "line 1"),
    ('{"turns": [{}], "intent": "x"}', "line 1"),
    ("", "no successful"),
    (json.dumps(RECORD) + "\n" + json.dumps(RECORD | {"turns": 3}), "line 2"),
    (json.dumps(RECORD | {"success": 0.0}), "no successful"),
    ("[1]", "row 0"),
    ('"a"', "line 1"),
    ('[{"conversations": [{"value": "hi"}, {"value": "ho"}]}]', "row 0.*WebRL"),
    (json.dumps(RECORD | {"intent": 7}), "line 1.*the intent is not text"),
    (json.dumps(RECORD | {"turns": [RECORD["turns"][0] | {"observation": ["a"]}]}), "line 1.*turn 1 is not text"),
])
def test_files_that_hold_no_demonstrations_are_named(chat, tmp_path, text, says):
    path = tmp_path / "d.jsonl"
    if text:
        text += "\n"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}.*{says}"):
        read_demonstrations(str(path), chat)


def test_a_last_line_that_a_killed_run_was_writing_is_left_out(chat, tmp_path, capsys):
    path = tmp_path / "trajectories.jsonl"
    line = json.dumps(RECORD)
    path.write_text(f"{line}\n{line}\n{line[:40]}")
    assert len(read_demonstrations(str(path), chat)) == 2
    assert "its last line is cut off and left out" in capsys.readouterr().out
    path.write_text(f"{line}\n{line}")  # written by hand, without a line's end
    assert len(read_demonstrations(str(path), chat)) == 2
    path.write_text(f"{line}\n" + '{"a":' * 99_999)
    assert len(read_demonstrations(str(path), chat)) == 1
    path.write_text(line[:40])
    with pytest.raises(ValueError, match="line 1"):
        read_demonstrations(str(path), chat)


def test_only_successes_are_cloned_whatever_the_reward(chat, tmp_path, capsys):
    """Records of older versions hold the success as their reward, and no "success"."""
    failed = RECORD | {"success": 0.0}
    broken = RECORD | {"success": 0.0, "status": "env_error"}
    old = dict(RECORD)
    del old["success"]
    scripted = dict(old)
    del scripted["reward"]
    path = write(
        tmp_path / "d.jsonl",
        RECORD,
        failed,
        broken,
        RECORD | {"reward": 0.4},
        RECORD | {"reward": -0.3},
        old,
        old | {"reward": 0.0},  # failed as well
        scripted,
    )

    assert len(read_demonstrations(str(path), chat)) == 5

    said = capsys.readouterr().out
    assert "2 (no success)" in said
    assert "1 (environment error)" in said


def test_episodes_of_other_splits_are_left_out_and_counted(chat, tmp_path, capsys):
    """An evaluation into the directory of a training run adds episodes of test tasks to the same file."""
    def of(split, task_id):
        return RECORD | {"split": split, "task_id": task_id}

    path = write(
        tmp_path / "d.jsonl",
        of("train", 0),
        of("sandbox:test", 1),
        of("sandbox:test", 2),
        RECORD,  # it names no split, and is a demonstration of any
        of("sandbox:test", 4) | {"success": 0.0},
        of("sandbox:dev within 5 turns", 5),
    )

    def tasks(*split):
        demonstrations = read_demonstrations(path, chat, *split)
        return [tau.task["task_id"] for tau in demonstrations]

    assert tasks() == [0, 3]
    said = capsys.readouterr().out
    assert "3 (split sandbox:test, not --data-split train)" in said
    assert "1 (split sandbox:dev within 5 turns" in said

    assert tasks("sandbox:test") == [1, 2, 3]
    said = capsys.readouterr().out
    assert "1 (no success)" in said
    assert "1 (split train, not --data-split sandbox:test)" in said

    assert tasks("train,sandbox:test") == [0, 1, 2, 3]
    assert tasks("dev,train") == [0, 3]


def test_a_task_file_is_no_file_of_demonstrations(chat, tmp_path):
    path = tmp_path / "tasks.json"
    task = {"task_id": 0, "intent": "order rye", "eval": {}}
    path.write_text(json.dumps([task]))
    with pytest.raises(ValueError, match="tasks.json, row 0: this is a task, not a demonstration"):
        bc.read_demonstrations(path, chat)


def test_the_script_clones_the_chosen_split(chat, checkpoint, tmp_path, capsys):
    of_test = RECORD | {"split": "sandbox:test"}
    of_train = RECORD | {"split": "train"}
    path = write(tmp_path / "d.jsonl", of_test, of_train, of_test)

    def clone(split):
        cfg = Config(
            model=str(checkpoint),
            data=str(path),
            data_split=split,
            out=str(tmp_path / split),
            batch=1,
            epochs=1,
        )
        bc.main(cfg)
        return capsys.readouterr().out

    said = clone("train")
    assert "1 demonstrations, 2 responses to learn" in said
    assert said.endswith(f"next: python mgrpo.py --model {tmp_path}/train --tasks TASKS\n")
    assert "2 demonstrations, 4 responses to learn" in clone("sandbox:test")
    with pytest.raises(ValueError, match="holds no successful trajectory"):
        clone("dev")


def test_config_json_names_the_precision_of_the_weights_next_to_it(clone, checkpoint, tmp_path):
    """Of float32 weights whose config.json says bfloat16: from the first step on, also when the command is repeated."""
    start = tmp_path / "start"
    shutil.copytree(checkpoint, start)
    config = json.loads((start / "config.json").read_text())
    names = [key for key in ("dtype", "torch_dtype") if key in config]
    assert names
    config.update(dict.fromkeys(names, "bfloat16"))
    (start / "config.json").write_text(json.dumps(config))

    def precision():
        text = (tmp_path / "x/config.json").read_text()
        written = json.loads(text)
        return {written[name] for name in names}

    clone_batch = bc.clone_batch
    seen = []

    def look(made, *args, **more):
        seen.append(precision())
        return clone_batch(*args, **more)

    for _ in range(2):
        clone("x", look, model=str(start))
        seen.append(precision())

    assert seen == [{"float32"}] * 26


def test_blank_lines_and_a_byte_order_mark_are_no_demonstrations(chat, tmp_path):
    path = tmp_path / "d.jsonl"

    def count(text):
        path.write_text(text, encoding="utf-8")
        return len(read_demonstrations(str(path), chat))

    mark = "\ufeff"
    other = RECORD | {"intent": "one\u2028two"}  # str.splitlines would break this line
    lines = [
        json.dumps(RECORD),
        "",
        json.dumps(other, ensure_ascii=False),
        "  ",
    ]
    assert count(mark + "\r\n".join(lines)) == 2
    assert count(mark + " " + json.dumps([RECORD, RECORD])) == 2


def rows_that_train(clone, out, **changes):
    """The rows of one pass of the script."""
    clone_batch = bc.clone_batch
    seen = []

    def look(made, model, optimizer, batch, *given, **more):
        seen.extend(batch)
        return clone_batch(model, optimizer, batch, *given, **more)

    clone(out, look, epochs=1, **changes)
    return seen


def test_a_demonstration_that_brings_its_prompt_is_learned_under_it(clone, checkpoint, tmp_path):
    """The exercises that pre-train worlds/base are such."""
    agent = {"system": "Answer at once.", "think": False, "compress": False}
    path = write(tmp_path / "own.jsonl", RECORD | {"agent": agent})
    first, second = rows_that_train(clone, "x", data=str(path))
    tokenizer = load_tokenizer(checkpoint)
    for row in (first, second):
        assert "Answer at once." in tokenizer.decode(row.ids)
    longer = max(first, second, key=lambda row: len(row.ids))
    assert RECORD["turns"][0]["observation"] in tokenizer.decode(longer.ids)  # pages of the past stay


def test_a_response_is_learned_if_its_row_just_fits_and_else_left_out(clone):
    lengths = sorted(len(row.ids) for row in rows_that_train(clone, "whole"))
    shorter, longer = lengths

    def learned(limit):
        rows = rows_that_train(clone, f"at-most-{limit}", max_context=limit, batch=2)
        return sorted(len(row.ids) for row in rows)

    assert learned(longer) == [shorter, longer]
    assert learned(longer - 1) == [shorter]


# ---------------------------------------------------------------------------- recording demonstrations


@pytest.fixture
def record(tokenizer, tmp_path, monkeypatch, sandbox_sites, run):
    """record(think, **changes): the lines of record_demonstrations; record.plays counts recordings."""
    def start():
        return contextlib.nullcontext(sandbox_sites)

    monkeypatch.setattr(sandbox, "start", start)
    monkeypatch.setattr(bc.asyncio, "run", run)
    play = rollout.play

    def counted(*args, **more):
        record.plays += 1
        return play(*args, **more)

    monkeypatch.setattr(rollout, "play", counted)

    def record(think=True, **changes):
        cfg = replace(Config(out=str(tmp_path), demos=1, max_context=100_000), **changes)
        chat = Chat(tokenizer, "You browse.", think=think)
        record_demonstrations(chat, cfg, RunDirectory(tmp_path, {}), "d.jsonl")
        text = (tmp_path / "d.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    record.plays = 0
    return record


def test_experts_of_any_split_demonstrate_with_long_chains_of_thought(record):
    split = "full-test-unseen-easy"
    [task] = sandbox.tasks(split, 1)

    [recorded] = record(split=split, cot=True)

    assert recorded["intent"] == task["intent"]
    for turn in recorded["turns"]:
        thought, _, _ = turn["response"].partition("</think>")
        assert f": {task['intent']} . " in thought
        sentences = thought.split(" . ")
        assert len(sentences) >= 4


def test_the_experts_are_scored_by_the_score_that_a_fork_puts_in_its_place(record, monkeypatch):
    """bc.py once kept the original. A replaced score decides the success; the reward is the same here."""
    [recorded] = record()
    assert recorded["success"] == 1
    asked = []

    async def never(task, answer, page, *_, **__):
        asked.append(task["task_id"])
        return 0.0

    monkeypatch.setattr(evaluate, "score", never)
    with pytest.raises(ValueError, match="1 of 1 demonstrations failed"):
        record(viewport_only=True)
    [task] = sandbox.tasks("train", 1)
    assert asked == [task["task_id"]]


def test_demonstrations_are_recorded_again_for_another_prompt_or_other_pages(record, capsys):
    def thinks(think, **changes):
        [recorded] = record(think, **changes)
        return "<think>" in recorded["turns"][0]["response"]

    assert thinks(True)
    assert record.plays == 1
    assert "is there already" not in capsys.readouterr().out
    assert thinks(True)
    assert record.plays == 1
    assert "d.jsonl is there already; delete it to record the demonstrations again" in capsys.readouterr().out

    # another prompt
    assert not thinks(False)
    assert record.plays == 2

    # other pages
    assert not thinks(False, viewport_only=True)
    assert record.plays == 3
    assert not thinks(False, viewport_only=True)
    assert record.plays == 3

    # another model, whose tokenizer may cut pages elsewhere
    assert not thinks(False, viewport_only=True, model="another")
    assert record.plays == 4


def test_responses_that_the_policy_could_not_say_are_counted(clone, capsys):
    limit = min(row.n_action for row in rows_that_train(clone, "x")) - 1
    assert "warning" not in capsys.readouterr().out
    rows_that_train(clone, "y", max_new_tokens=limit)
    assert f"warning: 2 of them are longer than --max-new-tokens {limit}" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [
    {"text_only": True},
    {"max_page_chars": 999},
    {"max_context": 999},
    {"max_new_tokens": 99},
])
def test_demonstrations_of_other_pages_or_sizes_are_recorded_again(changes, chat, tmp_path, monkeypatch):
    plays = []

    async def record(act, chat, tasks, **_):
        plays.append(tasks)
        return [Trajectory(task, success=1.0) for task in tasks]

    monkeypatch.setattr(rollout, "play", record)
    sites = dict.fromkeys(webarena.HOSTS, "http://127.0.0.1:1")
    monkeypatch.setattr(sandbox, "start", lambda: contextlib.nullcontext(sites))
    for more in ({}, {}, changes, changes):
        cfg = Config(out=str(tmp_path), demos=2, **more)
        record_demonstrations(chat, cfg, RunDirectory(tmp_path, {}), "demos.jsonl")
    assert len(plays) == 2


def test_demonstrations_are_on_record_in_the_order_of_their_tasks(chat, tmp_path, monkeypatch):
    """Ranks gather theirs in another order; the next command would record them all again."""
    async def record(act, chat, tasks, **_):
        return [Trajectory(task, success=1.0) for task in reversed(tasks)]

    monkeypatch.setattr(rollout, "play", record)
    sites = dict.fromkeys(webarena.HOSTS, "http://127.0.0.1:1")
    monkeypatch.setattr(sandbox, "start", lambda: contextlib.nullcontext(sites))
    record_demonstrations(chat, Config(demos=3), RunDirectory(tmp_path, {}), "demos.jsonl")
    found = [json.loads(line)["task_id"] for line in (tmp_path / "demos.jsonl").read_text().splitlines()]
    assert found == [task["task_id"] for task in sandbox.tasks("train", 3)]


# ------------------------------------------------------------------------------------------ WebRL's files


ASK = ("Round {}\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n{}\n\n"
       "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n")
SALES = """<html data-bbox="0,0,1280,720"><body data-bbox="0,0,1280,968"><div data-bbox="0,0,88,721">
<ul data-bbox="0,75,88,646"> <span id="1" data-bbox="14,112,60,13"> Sales </span>
<button id="2" type="button" title="Close" data-bbox="548,305,18,17"> </button>
</ul> Totals 5 &lt; 6 <input id="7" type="text" placeholder="Search" data-value="red" data-bbox="1,1,1,1">
<input id="8" type="checkbox" title="All" data-status="not-checked"> </input>
<select id="9" title="Period" data-text="Day"> <option> Day </option> <option> Year </option> </select>
</div> </body></html>"""


def webrl(task, *said, page=SALES):
    """The row of the last of these responses, its history flattened as WebRL's file has it."""
    prompt = f"Task Instruction: {task}\n\n"
    for i, text in enumerate(said[:-1]):
        shown = task
        if i > 0:
            shown = "** Simplified html **"
        prompt += ASK.format(i, shown) + text + "\n\n"
    prompt += ASK.format(len(said) - 1, page)
    human = {"from": "human", "value": prompt}
    gpt = {"from": "gpt", "value": said[-1]}
    return {"conversations": [human, gpt]}


CLICK = '# Element: the menu\ndo(action="Click", element="1")'
TYPE = 'do(action="Type", argument="x", element="7")'
EXIT = "exit(message='5')"


def test_webrls_steps_become_trajectories_again_and_the_rest_is_counted(tmp_path, chat, capsys):
    """Shuffled. The second task's first step is missing: its page is unknown, its response not learned."""
    elsewhere = CLICK.replace('"1"', '"99"')
    mixed = [
        webrl("a", CLICK, TYPE, EXIT),
        webrl("b", CLICK, EXIT),
        webrl("a", CLICK),
        webrl("a", CLICK, TYPE),
        webrl("a", "I think so"),
        webrl("a", elsewhere),
    ]
    path = tmp_path / "sft.json"
    path.write_text(json.dumps(mixed))

    one, two = read_demonstrations(str(path), chat)

    assert [turn.response for turn in one.turns] == [CLICK, TYPE, EXIT]
    assert one.task["intent"] == "a"
    for turn in one.turns:
        assert turn.observation.startswith("<span>Sales <1></span>")
    unknown = [turn.observation == "** Simplified html **" for turn in two.turns]
    assert unknown == [True, False]

    left_out, made, *_ = capsys.readouterr().out.splitlines()
    assert "1 (no action can be read" in left_out
    assert "1 (acts on an element" in left_out
    assert "4 of 6 steps make up 2" in made

    [last] = trajectory_rows(chat, two)
    assert chat.decode(last.ids).count("** Simplified html **") == 1


def test_a_response_whose_page_is_missing_is_not_learned(tmp_path, chat, checkpoint, capsys):
    path = tmp_path / "sft.json"
    path.write_text(json.dumps([webrl("b", CLICK, EXIT)]))
    cfg = Config(
        model=str(checkpoint),
        data=str(path),
        out=str(tmp_path / "x"),
        batch=1,
        epochs=1,
    )
    bc.main(cfg)
    assert "1 demonstrations, 1 responses to learn" in capsys.readouterr().out


def test_webrls_pages_are_rewritten_as_a_rollout_shows_them():
    first, second = WebRLPage(SALES).text.splitlines()
    assert first == "<span>Sales <1></span> <button>Close <2></button>"
    assert second == (
        "Totals 5 &lt; 6 <input>Search <7> = red</input> <checkbox>All <8> = off</checkbox> "
        "<select>Period <9> = Day (Day | Year)</select>"
    )

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
from compress import Chat, replay, trajectory_rows
from model import load, token_logprobs
from run import Run
from worlds import sandbox
from worlds.webarena import WebRLPage

TURNS = [{"url": "http://x/", "observation": "<a>red lamp <5></a>",
          "response": '# Element: red lamp <5>\ndo(action="Click", element="5")'},
         {"url": "http://x/2", "observation": "<p>in the cart</p>", "response": 'exit(message="done")'}]
RECORD = {"task_id": 3, "sites": ["shopping"], "intent": "add the red lamp to the cart", "success": 1.0,
          "reward": 1.0, "turns": TURNS}


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Chat(tokenizer, "You browse the web.", think=False)


def test_only_the_response_and_its_end_of_turn_are_trained(chat):
    for row, turn in zip(trajectory_rows(chat, replay(chat, RECORD)), RECORD["turns"], strict=True):
        trained = row.ids[-row.n_action:]
        assert chat.decode(trained) == turn["response"] and trained[-1] == chat.end_id
        assert turn["observation"] in chat.tokenizer.decode(row.ids[:-row.n_action])


def test_a_forced_end_of_turn_is_not_learned(chat):
    cut = dict(RECORD["turns"][0], response="go on and", truncated=True)
    row, last = trajectory_rows(chat, replay(chat, RECORD | {"turns": [cut, RECORD["turns"][1]]}))
    assert chat.decode(row.ids[-row.n_action:]) == "go on and" and row.ids[-1] != chat.end_id
    assert last.ids[:last.n_context].count(chat.end_id) == 4  # closed in the history: system, user, response; then the page


def test_behavior_cloning_learns_its_demonstrations(chat):
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    dataset, lines = [trajectory_rows(chat, replay(chat, RECORD))], []
    cfg = Config(epochs=60, batch=2, lr=1e-2, save_every=0)  # else it leaves a state in runs/bc
    optimizer = torch.optim.AdamW(model.parameters())
    bc.clone(model, optimizer, dataset, cfg, device="cpu", directory=SimpleNamespace(write=lines.append))
    assert lines[0]["loss"] > 3 and lines[-1]["loss"] < 0.1
    logp, _, _ = token_logprobs(model, *pad(dataset[0]))
    assert logp.mean() > -0.1


def test_every_pass_holds_every_response_once_and_keeps_a_trajectory_together():
    dataset = [[(tau, t) for t in range(1 + tau % 4)] for tau in range(20)]  # 50 responses
    seen = [row for batch in batches(dataset, 20, Config(batch=5)) for row in batch]
    assert len(seen) == 100 and sorted(seen[:50]) == sorted(seen[50:]) == sum(dataset, [])
    assert seen[:50] != seen[50:] != sum(dataset, [])
    assert all(seen[i - 1] == (tau, t - 1) for i, (tau, t) in enumerate(seen) if t)


def test_a_pretrained_language_model_gets_a_smaller_learning_rate():
    """1e-3 destroys one: SmolLM2's loss went from 1.87 to 3.58."""
    small, large = torch.nn.Linear(1000, 1000), torch.nn.Linear(4000, 4000, device="meta")
    rates = lambda: [lr_by_size(model, small=1e-3, large=2e-5) for model in (small, large)]
    small.lora = large.lora = 0
    assert rates() == [1e-3, 2e-5]
    small.lora = large.lora = 4  # adapters start at 0 and bear more
    assert rates() == pytest.approx([1e-2, 2e-4])


@pytest.fixture
def clone(checkpoint, tmp_path, monkeypatch):
    """clone(out, clone_batch): the whole script on RECORD, 12 steps; returns how many it made."""
    (tmp_path / "demos.jsonl").write_text(json.dumps(RECORD) + "\n")

    def clone(out, clone_batch, **changes):
        made = []

        def counted(*args, **more):
            made.append(0)
            return clone_batch(len(made), *args, **more)
        monkeypatch.setattr(bc, "clone_batch", counted)
        cfg = Config(**dict(model=str(checkpoint), data=str(tmp_path / "demos.jsonl"), out=str(tmp_path / out),
                            epochs=6, batch=1, save_every=3) | changes)
        with contextlib.suppress(KeyboardInterrupt):
            bc.main(cfg)
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

    def outcome(out):
        timeless = [{k: v for k, v in line.items() if "second" not in k} for line in clone.lines]
        return timeless, {name: weight.tolist() for name, weight in load(tmp_path / out).state_dict().items()}
    assert clone("whole", as_it_is, lora=lora) == 12
    whole = outcome("whole")
    assert clone("parts", interrupted, lora=lora) == 6
    assert clone("parts", as_it_is, lora=lora) == 12 - 3
    assert outcome("parts") == whole and not (tmp_path / "parts/state").exists()


def test_a_gradient_that_is_not_finite_makes_no_step(chat):
    model, (row, _) = tiny_model(vocab_size=chat.tokenizer.get_vocab_size()), trajectory_rows(chat, replay(chat, RECORD))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    same = lambda: all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    step = lambda: bc.clone_batch(model, optimizer, [row], Config(), "cpu")
    for poison in (float("nan"), float("inf")):
        hook = model.model.norm.weight.register_hook(lambda gradient: gradient * poison)
        loss, _, skipped = step()
        assert skipped and same() and not optimizer.state and all(p.grad is None for p in model.parameters())
        hook.remove()
    assert not step()[2] and not same()


def test_skipped_steps_are_said_and_on_record(clone, capsys):
    clone_batch, bad = bc.clone_batch, {2, 4, 5, 7, 8, 9}

    def spoiled(made, model, *args, **more):
        factor = float("nan") if made in bad else 1.0
        hook = model.model.norm.weight.register_hook(lambda gradient: gradient * factor)
        loss, norm, skipped = clone_batch(model, *args, **more)
        hook.remove()
        return (float("nan"), norm, skipped) if made == 5 else (loss, norm, skipped)
    assert clone("x", spoiled) == 12
    assert [line["skipped"] for line in clone.lines] == [int(i in bad) for i in range(1, 13)]
    assert [line["grad_norm"] is None for line in clone.lines] == [i in bad for i in range(1, 13)]
    assert [line["step"] for line in clone.lines if line["loss"] is None] == [4]
    assert capsys.readouterr().out.count("no update") == 6


def test_the_learning_rate_rises_and_falls():
    rates = [warmup_cosine(step, 100, Config(lr=1.0, warmup=0.05)) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and max(rates) == 1.0 and rates[4] == 1.0 and rates[-1] < 0.01
    assert rates[5:] == sorted(rates[5:], reverse=True)


@pytest.mark.parametrize("text, says", [
    ("{", "line 1"), ('{"turns": [{}], "intent": "x"}', "line 1"), ("", "no successful"),
    (json.dumps(RECORD) + "\n" + json.dumps(RECORD | {"turns": 3}), "line 2"),
    (json.dumps(RECORD | {"success": 0.0}), "no successful"), ("[1]", "row 0"), ('"a"', "line 1"),
    ('[{"conversations": [{"value": "hi"}, {"value": "ho"}]}]', "row 0.*WebRL")])
def test_files_that_hold_no_demonstrations_are_named(chat, tmp_path, text, says):
    path = tmp_path / "d.jsonl"
    path.write_text(text + "\n" if text else "")
    with pytest.raises(ValueError, match=f"{path}.*{says}"):
        read_demonstrations(str(path), chat)


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_only_successes_are_cloned_whatever_the_reward(chat, tmp_path, capsys):
    """Records of older versions hold the success as their reward, and no "success"."""
    failed, broken = RECORD | {"success": 0.0}, RECORD | {"success": 0.0, "status": "env_error"}
    priced = RECORD | {"reward": 0.4}, RECORD | {"reward": -0.3}
    old = {key: value for key, value in RECORD.items() if key != "success"}
    scripted = {key: value for key, value in old.items() if key != "reward"}
    path = write(tmp_path / "d.jsonl", RECORD, failed, broken, *priced, old, old | {"reward": 0.0}, scripted)
    assert len(read_demonstrations(str(path), chat)) == 5
    said = capsys.readouterr().out
    assert "2 (no success)" in said and "1 (environment error)" in said


def test_episodes_of_other_splits_are_left_out_and_counted(chat, tmp_path, capsys):
    """An evaluation into the directory of a training run adds episodes of test tasks to the same file."""
    of = lambda split, task_id: RECORD | {"split": split, "task_id": task_id}
    path = write(tmp_path / "d.jsonl", of("train", 0), of("sandbox:test", 1), of("sandbox:test", 2), RECORD,
                 of("sandbox:test", 4) | {"success": 0.0}, of("sandbox:dev within 5 turns", 5))
    tasks = lambda *more: [tau.task["task_id"] for tau in read_demonstrations(path, chat, *more)]
    assert tasks() == [0, 3]  # RECORD, which names no split, is a demonstration
    said = capsys.readouterr().out
    assert "3 (split sandbox:test, not --data-split train)" in said and "1 (split sandbox:dev within 5 turns" in said
    assert tasks("sandbox:test") == [1, 2, 3]
    said = capsys.readouterr().out
    assert "1 (no success)" in said and "1 (split train, not --data-split sandbox:test)" in said


def test_a_task_file_is_no_file_of_demonstrations(chat, tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([{"task_id": 0, "intent": "order rye", "eval": {}}]))
    with pytest.raises(ValueError, match="tasks.json, row 0: this is a task, not a demonstration"):
        bc.read_demonstrations(path, chat)


def test_the_script_clones_the_chosen_split(chat, checkpoint, tmp_path, capsys):
    path = write(tmp_path / "d.jsonl", RECORD | {"split": "sandbox:test"}, RECORD | {"split": "train"},
                 RECORD | {"split": "sandbox:test"})
    cfg = Config(model=str(checkpoint), data=str(path), batch=1, epochs=1)
    for split, found in (("train", 1), ("sandbox:test", 2)):
        bc.main(replace(cfg, data_split=split, out=str(tmp_path / split)))
        assert f"{found} demonstrations, {2 * found} responses to learn" in capsys.readouterr().out
    with pytest.raises(ValueError, match="holds no successful trajectory"):
        bc.main(replace(cfg, data_split="dev", out=str(tmp_path / "dev")))


def test_config_json_names_the_precision_of_the_weights_next_to_it(clone, checkpoint, tmp_path):
    """Of float32 weights whose config.json says bfloat16: from the first step on, also when the command is repeated."""
    start, seen = tmp_path / "start", []
    shutil.copytree(checkpoint, start)
    config = json.loads((start / "config.json").read_text())
    names = [key for key in ("dtype", "torch_dtype") if key in config]
    (start / "config.json").write_text(json.dumps(config | dict.fromkeys(names, "bfloat16")))
    precision = lambda: {json.loads((tmp_path / "x/config.json").read_text())[name] for name in names}
    clone_batch = bc.clone_batch

    def look(made, *args, **more):
        seen.append(precision())
        return clone_batch(*args, **more)
    for _ in range(2):
        clone("x", look, model=str(start))
        seen.append(precision())
    assert names and seen == [{"float32"}] * 26


def test_blank_lines_and_a_byte_order_mark_are_no_demonstrations(chat, tmp_path):
    other = RECORD | {"intent": "one\u2028two"}  # str.splitlines would break this line
    lines = [json.dumps(RECORD), "", json.dumps(other, ensure_ascii=False), "  "]
    for text in ("\ufeff" + "\r\n".join(lines), "\ufeff " + json.dumps([RECORD, RECORD])):
        (tmp_path / "d.jsonl").write_text(text, encoding="utf-8")
        assert len(read_demonstrations(str(tmp_path / "d.jsonl"), chat)) == 2


@pytest.fixture
def record(tokenizer, tmp_path, monkeypatch, sandbox_sites, run):
    """record(think, **changes): the lines of record_demonstrations; record.plays counts recordings."""
    monkeypatch.setattr(sandbox, "start", lambda: contextlib.nullcontext(sandbox_sites))
    monkeypatch.setattr(bc.asyncio, "run", run)

    play = rollout.play

    def counted(*args, **more):
        record.plays += 1
        return play(*args, **more)
    monkeypatch.setattr(rollout, "play", counted)

    def record(think=True, **changes):
        cfg = replace(Config(out=str(tmp_path), demos=1, max_context=100_000), **changes)
        chat = Chat(tokenizer, "You browse.", think=think)
        record_demonstrations(chat, cfg, Run(tmp_path, {}), "d.jsonl")
        return [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    record.plays = 0
    return record


def test_experts_of_any_split_demonstrate_with_long_chains_of_thought(record):
    recorded, = record(split="full-test-unseen-easy", cot=True)
    assert recorded["intent"] == sandbox.tasks("full-test-unseen-easy", 1)[0]["intent"]
    for turn in recorded["turns"]:
        thought = turn["response"].split("</think>")[0]
        assert f": {recorded['intent']} . " in thought and len(thought.split(" . ")) >= 4


def test_the_experts_are_scored_by_the_score_that_a_fork_puts_in_its_place(record, monkeypatch):
    """bc.py once kept the original. A replaced score decides the success; the reward is the same here."""
    assert record()[0]["success"] == 1
    asked = []

    async def never(task, answer, page, *_, **__):
        asked.append(task["task_id"])
        return 0.0
    monkeypatch.setattr(evaluate, "score", never)
    with pytest.raises(ValueError, match="1 of 1 demonstrations failed"):
        record(viewport_only=True)
    assert asked == [sandbox.tasks("train", 1)[0]["task_id"]]


def test_demonstrations_are_recorded_again_for_another_prompt_or_other_pages(record):
    viewport = {"viewport_only": True}
    for think, more, plays in ((True, {}, 1), (True, {}, 1), (False, {}, 2), (False, viewport, 3),
                               (False, viewport, 3)):
        recorded, = record(think, **more)
        assert ("<think>" in recorded["turns"][0]["response"]) == think and record.plays == plays


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
    asked = f"Task Instruction: {task}\n\n"
    for i, text in enumerate(said[:-1]):
        asked += ASK.format(i, "** Simplified html **" if i else task) + text + "\n\n"
    return {"conversations": [{"from": "human", "value": asked + ASK.format(len(said) - 1, page)},
                              {"from": "gpt", "value": said[-1]}]}


CLICK = '# Element: the menu\ndo(action="Click", element="1")'
TYPE = 'do(action="Type", argument="x", element="7")'
EXIT = "exit(message='5')"


def test_webrls_steps_become_trajectories_again_and_the_rest_is_counted(tmp_path, chat, capsys):
    """Shuffled. The second task's first step is missing: its page is unknown, its response not learned."""
    mixed = [webrl("a", CLICK, TYPE, EXIT), webrl("b", CLICK, EXIT), webrl("a", CLICK),
             webrl("a", CLICK, TYPE), webrl("a", "I think so"), webrl("a", CLICK.replace('"1"', '"99"'))]
    path = tmp_path / "sft.json"
    path.write_text(json.dumps(mixed))
    one, two = read_demonstrations(str(path), chat)
    said = capsys.readouterr().out.splitlines()
    assert [turn.response for turn in one.turns] == [CLICK, TYPE, EXIT] and one.task["intent"] == "a"
    assert all(turn.observation.startswith("<span>Sales <1></span>") for turn in one.turns)
    assert [turn.observation == "** Simplified html **" for turn in two.turns] == [True, False]
    assert "1 (no action can be read" in said[0] and "1 (acts on an element" in said[0]
    assert "4 of 6 steps make up 2" in said[1]
    [last] = trajectory_rows(chat, two)
    assert chat.decode(last.ids).count("** Simplified html **") == 1


def test_a_response_whose_page_is_missing_is_not_learned(tmp_path, chat, checkpoint, capsys):
    (tmp_path / "sft.json").write_text(json.dumps([webrl("b", CLICK, EXIT)]))
    bc.main(Config(model=str(checkpoint), data=str(tmp_path / "sft.json"), out=str(tmp_path / "x"),
                   batch=1, epochs=1))
    assert "1 demonstrations, 1 responses to learn" in capsys.readouterr().out


def test_webrls_pages_are_rewritten_as_a_rollout_shows_them():
    assert WebRLPage(SALES).text.splitlines() == [
        "<span>Sales <1></span> <button>Close <2></button>",
        "Totals 5 &lt; 6 <input>Search <7> = red</input> <checkbox>All <8> = off</checkbox> "
        "<select>Period <9> = Day (Day | Year)</select>"]

"""Demonstrations to rows, rows to a policy."""
import json
import signal
from dataclasses import replace

import pytest
import torch
from conftest import tiny_model

import bc
from worlds import sandbox
from bc import Config, learning_rate, read_demonstrations, record, train
from compress import Chat, pad, replay, rows
from model import load, token_logprobs
from rollout import play
from worlds.webarena import Page

RECORD = {"task_id": 3, "sites": ["shopping"], "intent": "add the red lamp to the cart", "reward": 1.0, "turns": [
    {"url": "http://x/", "observation": "<a>red lamp 5</a>",
     "response": '# Element: red lamp 5\ndo(action="Click", element="5")'},
    {"url": "http://x/2", "observation": "<p>in the cart</p>", "response": 'exit(message="done")'}]}


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Chat(tokenizer, "You browse the web.", think=False)


def test_loss_falls_on_the_response_and_its_end_of_turn_alone(chat):
    for row, turn in zip(rows(chat, replay(chat, RECORD)), RECORD["turns"], strict=True):
        trained = row.ids[-row.n_action:]
        assert chat.decode(trained) == turn["response"] and trained[-1] == chat.end_id
        assert turn["observation"] in chat.tokenizer.decode(row.ids[:-row.n_action])


def test_an_end_that_was_forced_is_not_learnt(chat):
    cut = dict(RECORD["turns"][0], response="go on and", truncated=True)
    row, last = rows(chat, replay(chat, RECORD | {"turns": [cut, RECORD["turns"][1]]}))
    assert chat.decode(row.ids[-row.n_action:]) == "go on and" and row.ids[-1] != chat.end_id
    assert last.ids[:last.prefix].count(chat.end_id) == 3  # in the history it is closed: system, user, response


def test_behavior_cloning_learns_its_demonstrations(chat):
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    dataset, lines = rows(chat, replay(chat, RECORD)), []
    train(model, torch.optim.AdamW(model.parameters()), dataset, Config(epochs=60, batch=2, lr=1e-2), torch.device("cpu"), print,
          lines.append)
    assert lines[0]["loss"] > 3 and lines[-1]["loss"] < 0.1
    logp, _ = token_logprobs(model, *pad(dataset))
    assert logp.mean() > -0.1


@pytest.mark.parametrize("end, goes_on_at", [(signal.SIGTERM, 4), (KeyboardInterrupt, 3)])
def test_cloning_that_was_stopped_goes_on_as_if_it_had_not_been(checkpoint, tmp_path, monkeypatch, end, goes_on_at):
    """Bit for bit. A signal saves first; whatever else ends it costs the steps since the last save."""
    (tmp_path / "demos.jsonl").write_text(json.dumps(RECORD) + "\n")
    began, train_step = [], bc.train_step

    def run(out, stop_at=None):
        def step(*arguments):
            began.append(len(began))
            if len(began) - 1 == stop_at:
                if end is KeyboardInterrupt:
                    raise end
                signal.raise_signal(end)
            return train_step(*arguments)
        began.clear()
        monkeypatch.setattr(bc, "train_step", step)
        try:
            bc.main(Config(model=str(checkpoint), data=str(tmp_path / "demos.jsonl"), out=str(tmp_path / out), epochs=6, batch=1,
                           save_every=3))
        except (SystemExit, KeyboardInterrupt) as left:
            return getattr(left, "code", None)

    def outcome(out):
        lines = [json.loads(line) for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]
        return ([{k: v for k, v in line.items() if "second" not in k} for line in lines],
                {name: weight.tolist() for name, weight in load(tmp_path / out).state_dict().items()})

    run("whole")
    assert run("parts", stop_at=goes_on_at - (end is signal.SIGTERM)) == (128 + end if end is signal.SIGTERM else None)
    run("parts")
    assert len(began) == 12 - goes_on_at and outcome("parts") == outcome("whole")
    assert not (tmp_path / "parts/state").exists()


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate(step, 100, Config(lr=1.0, warmup=0.05)) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and max(rates) == 1.0 and rates[4] == 1.0 and rates[-1] < 0.01
    assert rates[5:] == sorted(rates[5:], reverse=True)


@pytest.mark.parametrize("text, says", [("{", "line 1"), ('{"turns": [{}], "intent": "x"}', "line 1"), ("", "no successful"),
                                        (json.dumps(RECORD | {"reward": 0.0}), "no successful"), ("[1]", "row 0"),
                                        ('[{"conversations": [{"value": "hi"}, {"value": "ho"}]}]', "row 0.*WebRL")])
def test_files_that_are_no_demonstrations_are_named(tmp_path, text, says):
    path = tmp_path / "d.jsonl"
    path.write_text(text + "\n" if text else "")
    with pytest.raises(ValueError, match=says):
        read_demonstrations(str(path))


def test_only_successes_are_cloned(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(RECORD) + "\n" + json.dumps(RECORD | {"reward": 0.0}) + "\n")
    assert len(read_demonstrations(str(path))) == 1


def test_demonstrations_of_any_split_with_long_chains_of_thought(tokenizer, tmp_path):
    cfg = Config(out=str(tmp_path), split="full-test-unseen-easy", demos=1, cot=True, max_context=100_000)
    with sandbox.start() as urls:
        recorded, = record(Chat(tokenizer, "You browse the web."), cfg, urls, print)
    assert recorded["intent"] == sandbox.tasks("full-test-unseen-easy", 1)[0]["intent"]
    assert all(f"the task is to do this : {recorded['intent']}" in turn["response"] for turn in recorded["turns"])
    assert [path.name for path in tmp_path.iterdir()] == ["demos-cot.jsonl"]  # not taken for short ones later


def test_blank_lines_and_a_byte_order_mark_are_no_demonstrations(tmp_path):
    for text in (f"\ufeff{json.dumps(RECORD)}\n\n{json.dumps(RECORD)}\n\n", f"\ufeff{json.dumps([RECORD, RECORD])}"):
        (tmp_path / "d.jsonl").write_text(text, encoding="utf-8")
        assert len(read_demonstrations(str(tmp_path / "d.jsonl"))) == 2


def test_demonstrations_are_recorded_again_for_another_prompt_or_other_pages(tokenizer, tmp_path, monkeypatch):
    plays, cfg = [], Config(out=str(tmp_path), demos=1, max_context=100_000)
    monkeypatch.setattr(bc, "play", lambda *args, **more: plays.append(1) or play(*args, **more))
    with sandbox.start() as urls:
        for think, more in ((True, {}), (True, {}), (False, {}), (False, {"viewport_only": True}), (False, {"viewport_only": True})):
            recorded, = record(Chat(tokenizer, "You browse.", think=think), replace(cfg, **more), urls, print)
            assert ("<think>" in recorded["turns"][0]["response"]) == think
    assert len(plays) == 3


ASK = "Round {}\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n{}\n\n<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n"
SALES = """<html data-bbox="0,0,1280,720"><body data-bbox="0,0,1280,968"><div data-bbox="0,0,88,721"> <ul data-bbox="0,75,88,646">
<span id="1" data-bbox="14,112,60,13"> Sales </span> <button id="2" type="button" title="Close" data-bbox="548,305,18,17"> </button>
</ul> Totals 5 &lt; 6 <input id="7" type="text" placeholder="Search" data-value="red" data-bbox="1,1,1,1"> <input id="8"
type="checkbox" title="All" data-status="not-checked"> </input> <select id="9" title="Period" data-text="Day"> <option> Day </option>
<option> Year </option> </select> </div> </body></html>"""


def webrl(task, *said, page=SALES):
    """The row of the last of these responses, its history flattened as WebRL's file has it."""
    asked = f"Task Instruction: {task}\n\n"
    for i, text in enumerate(said[:-1]):
        asked += ASK.format(i, "** Simplified html **" if i else task) + text + "\n\n"
    return {"conversations": [{"from": "human", "value": asked + ASK.format(len(said) - 1, page)},
                              {"from": "gpt", "value": said[-1]}]}


CLICK, TYPE, EXIT = '# Element: the menu\ndo(action="Click", element="1")', 'do(action="Type", argument="x", element="7")', "exit(message='5')"


def test_webrls_steps_become_trajectories_again_and_the_rest_is_counted(tmp_path, chat):
    """Shuffled; of the second task the first step is missing, so its page is not known and its response not learnt."""
    rows_ = [webrl("a", CLICK, TYPE, EXIT), webrl("b", CLICK, EXIT), webrl("a", CLICK), webrl("a", CLICK, TYPE),
             webrl("a", "I think so"), webrl("a", CLICK.replace('"1"', '"99"'))]
    path, said = tmp_path / "sft.json", []
    path.write_text(json.dumps(rows_))
    one, two = read_demonstrations(str(path), said.append)
    assert [t["response"] for t in one["turns"]] == [CLICK, TYPE, EXIT] and one["intent"] == "a"
    assert all(t["observation"].startswith("<span>Sales 1</span>") for t in one["turns"])
    assert [t["observation"] is None for t in two["turns"]] == [True, False]
    assert "1 (no action can be read" in said[0] and "1 (acts on an element" in said[0] and "4 of 6 steps make up 2" in said[1]
    learnt, contexts = rows(chat, replay(chat, two)), [t["observation"] is not None for t in two["turns"]]
    assert chat.decode(learnt[1].ids).count("** Simplified html **") == 1 and sum(contexts) == 1


def test_webrls_pages_are_rewritten_as_a_rollout_shows_them():
    assert Page(SALES).text.splitlines() == [
        "<span>Sales 1</span> <button>Close 2</button>",
        "Totals 5 &lt; 6 <input>Search 7 = red</input> <checkbox>All 8 = off</checkbox> <select>Period 9 = Day (Day | Year)</select>"]

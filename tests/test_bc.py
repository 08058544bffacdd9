"""Demonstrations to rows, rows to a policy."""
import json

import pytest
import torch
from conftest import tiny_model

import sandbox
from bc import Config, learning_rate, read_demonstrations, record, train
from compress import Chat, pad, replay, rows
from model import token_logprobs

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


def test_behavior_cloning_learns_its_demonstrations(chat):
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    dataset, lines = rows(chat, replay(chat, RECORD)), []
    train(model, dataset, Config(epochs=60, batch=2, lr=1e-2), torch.device("cpu"), print, lines.append)
    assert lines[0]["loss"] > 3 and lines[-1]["loss"] < 0.1
    logp, _ = token_logprobs(model, *pad(dataset))
    assert logp.mean() > -0.1


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate(step, 100, Config(lr=1.0, warmup=0.05)) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and max(rates) == 1.0 and rates[4] == 1.0 and rates[-1] < 0.01
    assert rates[5:] == sorted(rates[5:], reverse=True)


@pytest.mark.parametrize("text, says", [("{", "line 1"), ('{"turns": [{}], "intent": "x"}', "line 1"), ("", "no successful"),
                                        (json.dumps(RECORD | {"reward": 0.0}), "no successful"), ("[1]", "line 1")])
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

"""The small base's vocabulary and exercises."""
import json
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from compress import PLACEHOLDER, Chat, replay, trajectory_rows
from model import load
from rollout import parse
from worlds import sandbox
from worlds.sandbox import exercises as ex
from worlds.sandbox import experts, vocabulary, weights, writing
from worlds.sandbox.websites import Visit

BASE = Path(ex.__file__).parent.parent / "base"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(BASE / "tokenizer.json"))


@pytest.mark.parametrize("text", ["", " ", "red lamp 12", "  two  spaces\n\n\tand a tab ", "Ünïcödé 日本語 🙂", "a<b>c</d >&amp;<|im_end|>",
                                  "\x00\x7f", "x" * 300, '<a>order 17 <7></a> $178 | 007', 'do(action="Click", element="5")',
                                  '# Element: a 1\n# Note: b'])
def test_any_text_comes_back_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_word_carries_its_space_and_numbers_stand_alone(tokenizer):
    shown = [tokenizer.decode([i]) for i in tokenizer.encode("<a>red lamp <12></a> $178\n").ids]
    assert shown == ["<a>", "red ", "lamp ", "<12>", "</a> ", "$", "17", "8", "\n"]


def test_the_committed_tokenizer_is_what_the_code_builds(tokenizer):
    assert json.loads(vocabulary.tokenizer().to_str()) == json.loads(tokenizer.to_str())


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A checkpoint that has learned nothing yet."""
    path = tmp_path_factory.mktemp("exercises") / "start"
    vocabulary.write_base(path, seed=0)
    return path


def test_a_new_base_has_the_committed_files_and_overwrites_nothing(start):
    for name in ("tokenizer.json", "tokenizer_config.json", "agent.json", "config.json"):
        new, committed = (json.loads((path / name).read_text()) for path in (start, BASE))
        assert new.items() <= committed.items()  # the committed config.json also says how it was trained
    with pytest.raises(FileExistsError):
        vocabulary.write_base(start)


def test_initial_weights_depend_on_the_seed_alone():
    first, again, other = weights.initial_weights(50, 1), weights.initial_weights(50, 1), weights.initial_weights(50, 2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_weights_start_as_gpt2s_do(start):
    """Nothing is laid out by hand: normal with 0.02, smaller where a block writes into the residual stream."""
    for name, weight in load(start).state_dict().items():
        expected = 0.02 / 12 ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        if name.endswith("bias"):
            assert not weight.any()
        elif "norm" in name:
            assert (weight == 1).all()
        else:
            assert abs(weight.std() / expected - 1) < 0.02 and abs(weight.mean()) < 0.05 * expected, name


def test_an_id_is_one_token_right_behind_its_name(tokenizer):
    """With a token between name and id, a model of this size does not learn to look ids up."""
    for line in ("<a>red lamp {}</a>", "# Element: red lamp {}\n"):
        shown = [tokenizer.decode([i]) for i in tokenizer.encode(line.format(vocabulary.ID.format(12))).ids]
        assert shown[shown.index("lamp ") + 1] == vocabulary.ID.format(12)
    assert tokenizer.decode(tokenizer.encode(vocabulary.with_id("red lamp", 1234)).ids) == "red lamp <1234>"


def turns_in(manner, count=60, **how):
    rng = Random(f"manner {manner}")
    records = [ex.exercise(rng, manner=manner, **how) for _ in range(count)]
    return [(record, turn) for record in records for turn in record["turns"]]


def test_a_row_says_how_it_is_written():
    for manner in vocabulary.MANNERS:
        for compress in (True, False):
            (record, _), *_ = turns_in(manner, 1, kind="visit", compress=compress)
            assert record["agent"] == vocabulary.agent(manner, compress)
    systems = [agent["system"] for agent in vocabulary.MANNERS.values()]
    assert len(set(systems)) == 3


def test_the_manners_think_as_they_say():
    """The same page, the same action; only the thought differs."""
    for _, turn in turns_in("none"):
        assert turn["response"].startswith(("# ", "exit(", "do(")) and "think" not in turn["response"]
    for record, turn in turns_in("long", 200):
        thought = re.match(r"<think>(.*)</think><answer>.*</answer>$", turn["response"], re.DOTALL)[1]
        assert len(thought.split(" . ")) >= 4
    visit = Visit(Random(3))
    for manner in ("short", "none", "long"):
        turns = ex.record(Random(0), "visit", visit.task, visit.moments, manner)["turns"]
        assert [parse(turn["response"]) for turn in turns] == [parse(moment.action) for moment in visit.moments]
        if manner == "long":
            assert all(f"{moment.thought}</think>" in turn["response"] for turn, moment in zip(turns, visit.moments))


def test_long_thoughts_are_long_and_say_what_is_there_and_what_is_missing(tokenizer):
    lengths = []
    for record, turn in turns_in("long", 200):
        lengths.append(len(tokenizer.encode(turn["response"].split("</think>")[0]).ids))
    lengths.sort()
    assert 60 <= lengths[len(lengths) // 2] <= 140 and lengths[-len(lengths) // 20] <= 180
    moment = writing.Moment("title: shop\n<a>red lamp <1></a>", "click red lamp", "", "buy red lamp in kitchen", ["red lamp", "kitchen"])
    thought = writing.Voice(Random(0)).think(moment, ["click home", "click shop", "click more"])
    parts = thought.split(" . ")
    assert len(parts) == 7 and parts[0].endswith("buy red lamp in kitchen") and parts[2].endswith("shop")
    assert "red lamp" in parts[3] and "kitchen" not in parts[3] and "kitchen" in parts[4] and "red lamp" not in parts[4]
    assert parts[5].endswith("click shop , click more") and parts[6].endswith(": click red lamp")


def test_every_word_of_a_long_thought_is_one_token(tokenizer):
    words = " ".join(wording for wordings in writing.WORDINGS.values() for wording in wordings).split()
    words += " ".join(agent["system"].strip(".") for agent in vocabulary.MANNERS.values()).replace(".", "").split()
    assert not [word for word in words if word.isalpha() and len(tokenizer.encode(word + " ").ids) > 1]


def test_pages_stay_in_whole_histories_and_leave_compressed_ones(tokenizer):
    """bc.py scores a row as its own agent.json would have it, whatever the checkpoint's says."""
    chat = Chat(tokenizer, "the checkpoint's", think=True, compress=True)
    record = next(record for record, _ in turns_in("none", 20, kind="visit") if len(record["turns"]) > 2)
    page = next(turn["observation"] for turn in record["turns"] if turn["observation"])
    for compress in (True, False):
        record["agent"] = vocabulary.agent("none", compress)
        trajectory = replay(chat, record)
        last = tokenizer.decode(trajectory_rows(chat.of_record(trajectory.task), trajectory)[-1].ids, skip_special_tokens=False)
        assert "Do not think." in last and "the checkpoint's" not in last
        assert (page in last) is not compress and (PLACEHOLDER in last) is compress
    del record["agent"]
    assert chat.of_record(replay(chat, record).task) is chat


def test_every_word_of_every_instruction_is_one_token(tokenizer):
    intents = [task["intent"] for split in ("train", "test", "test-unseen") for task in sandbox.tasks(split)]
    broken = {word for intent in intents for word in re.findall("[a-z]+", intent) for form in (word, word + " ")
              if len(tokenizer.encode(form).ids) > 1}
    assert not broken, "add them to vocabulary.OTHER and train the base again"


def test_responses_name_what_is_on_the_page():
    """What is called by id carries that name and id on the page. What is answered stands there or in the task."""
    for record in islice(ex.exercises(7, visits=0), 300):
        for turn, kind in zip(record["turns"], record["template"].split("+"), strict=True):
            assert_named_on_its_page(turn)
            if kind in ex.FULL:
                call = parse(turn["response"])
                if kind in ("fact", "beside", "value"):
                    assert call.argument in turn["observation"]
                elif call.argument is not None and kind != "present":
                    assert call.argument in record["intent"]


def assert_named_on_its_page(turn):
    for name, number in re.findall(rf"# Element: (.*) {vocabulary.ID.format('(.+)')}$", turn["response"], re.M):
        assert re.search(rf">{re.escape(vocabulary.with_id(name, number))}( = [^<]*)?</", turn["observation"])


def test_visits_act_on_their_pages_and_end_with_an_answer():
    counted = Counter()
    for record in islice(ex.exercises(8, visits=1), 300):
        for turn in record["turns"]:
            if turn["observation"] is None:  # a slip stands in the history and is not learned
                counted["slips"] += 1
            else:
                assert_named_on_its_page(turn)
        last = parse(record["turns"][-1]["response"])
        counted[last.argument if last.argument in ("done", "N/A") else "read"] += 1
        assert last.name == "exit" and len(record["turns"]) <= 16
        if last.argument not in ("done", "N/A"):
            page = record["turns"][-1]["observation"]
            assert last.argument in page or "list" in record["intent"] or "first page" in record["intent"]
    assert min(counted[kind] for kind in ("slips", "done", "N/A", "read")) > 15


def test_same_seed_same_rows_and_no_task_among_them():
    rows = list(islice(ex.exercises(3), 400))
    assert rows == list(islice(ex.exercises(3), 400)) != list(islice(ex.exercises(4), 400))
    tasks = [task for split in ("full-train", "full-test-unseen") for task in sandbox.tasks(split)]
    pattern = lambda task: re.sub(r"\\{\\{\w+\\}\\}", ".+", re.escape(task["intent_template"]))
    assert all(re.fullmatch(pattern(task), task["intent"]) for task in tasks[:50])
    assert not [row["intent"] for row in rows for each in set(map(pattern, tasks)) if re.search(each, row["intent"])]


@pytest.mark.parametrize("phrase", [r"all is done", r".+ is in .+ so click .+", r".+ is not here so click .+",
                                    r"click .+", r"type .+ into .+", r"choose .+ as .+", r"search for .+"])
def test_experts_think_in_the_phrases_of_the_exercises(phrase):
    """In words of their own, cloning undid the reading: 47% instead of 60%."""
    rng = Random("phrases")
    thoughts = [moment.thought for _ in range(200) for moment in Visit(rng).moments]
    assert any(re.fullmatch(phrase, thought) for thought in thoughts)
    source = re.sub(r"\{[^}]*\}", "x", Path(experts.__file__).read_text())
    assert any(re.fullmatch(phrase, text) for text in re.findall('"([^"]*)"', source))

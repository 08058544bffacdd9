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

from model import load
from rollout import parse
from worlds import sandbox
from worlds.sandbox import exercises as ex
from worlds.sandbox import experts, vocabulary, weights
from worlds.sandbox.websites import Visit

BASE = Path(ex.__file__).parent.parent / "base"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(BASE / "tokenizer.json"))


@pytest.mark.parametrize("text", ["", " ", "red lamp 12", "  two  spaces\n\n\tand a tab ", "Ünïcödé 日本語 🙂", "a<b>c</d >&amp;<|im_end|>",
                                  "\x00\x7f", "x" * 300, '<a>order 17 7</a> $178 | 007', 'do(action="Click", element="5")',
                                  '# Element: a 1\n# Note: b'])
def test_any_text_comes_back_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_word_carries_its_space_and_numbers_stand_alone(tokenizer):
    shown = [tokenizer.decode([i]) for i in tokenizer.encode("<a>red lamp 12</a> $178\n").ids]
    assert shown == ["<a>", "red ", "lamp ", "12", "</a> ", "$", "17", "8", "\n"]


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


def test_the_layers_above_the_look_up_start_as_the_identity(start):
    model = load(start)
    width = model.config.hidden_size
    for block in model.model.layers[2:]:
        x = torch.randn(1, 9, width)
        angle = torch.zeros(1, 1, 9, model.config.head_dim)
        assert torch.equal(block(x, (angle.cos(), angle.sin()), None, None), x)
        query, key = block.self_attn.q_proj.weight, block.self_attn.k_proj.weight
        assert torch.equal(query, key)
        torch.testing.assert_close(query @ query.T, torch.eye(width))


@torch.no_grad()
def test_the_base_starts_by_looking_up_what_followed_two_tokens_before(start):
    """From plain random weights one answer in 2,753 is right, and gradient descent finds it very late."""
    model, generator, right = load(start), torch.Generator().manual_seed(0), 0
    for _ in range(60):
        row = torch.randperm(model.config.vocab_size, generator=generator)[:40]
        i = int(torch.randint(0, 36, (1,), generator=generator))
        right += int(model(torch.cat([row, row[i:i + 2]])[None])[0, -1].argmax()) == int(row[i + 2])
    assert right > 30


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
    for name, number in re.findall(r"# Element: (.*) (\d+)$", turn["response"], re.M):
        assert re.search(f">{re.escape(name)} {number}( = [^<]*)?</", turn["observation"])


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
        assert last.name == "exit" and len(record["turns"]) <= 12
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
    responses = [turn["response"] for _ in range(200) for turn in Visit(rng).turns]
    thoughts = [re.search("<think>(.*)</think>", response)[1] for response in responses]
    assert any(re.fullmatch(phrase, thought) for thought in thoughts)
    source = re.sub(r"\{[^}]*\}", "x", Path(experts.__file__).read_text())
    assert any(re.fullmatch(phrase, text) for text in re.findall('"([^"]*)"', source))

"""Contexts, rows and packing: trained on exactly what the policy saw."""
import itertools
import json
import random
import re
import shutil

import pytest
import torch
from conftest import ROOT, SPECIAL, TEXT, pad, tiny_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import lengths
import savings
from compress import (CUT, FORMATS, PLACEHOLDER, Chat, Row, Trajectory, Turn, answer_of, context, fit_page,
                      format_response, messages, micro_batches, open_chat, pack, replay, system_prompt,
                      trajectory_rows, trunk)
from model import load_tokenizer, token_logprobs


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Chat(tokenizer, "You browse the web.")


def make_trajectory(chat, n_turns=3, seed=0, ended=True):
    generator = torch.Generator().manual_seed(seed)
    trajectory = Trajectory({"intent": "add the red lamp to the cart", "task_id": 0, "sites": ["shopping"]})
    for k in range(n_turns):
        page = f"title: page {k}\n<a>red lamp <{k}></a> ${k}"
        ids = torch.randint(3, 300, (5 + k,), generator=generator).tolist()
        action_ids = ids + [chat.end_id] * ended
        observation_ids, logps = chat.user_ids(trajectory.task, k, page), [-1.0] * len(action_ids)
        trajectory.turns.append(Turn("http://x/", page, observation_ids, action_ids, logps, chat.decode(ids),
                                     ended))
    return trajectory


def test_the_context_is_the_chat_written_out(chat):
    """Every past page is the placeholder; past responses and the current page are whole."""
    trajectory = make_trajectory(chat)
    a0, a1 = (chat.decode(t.action_ids) for t in trajectory.turns[:2])
    expected = (f"<|im_start|>system\nYou browse the web.<|im_end|>\n"
                "<|im_start|>user\nTask: add the red lamp to the cart\n\n"
                f"Round 0\n\n{PLACEHOLDER}<|im_end|>\n<|im_start|>assistant\n{a0}<|im_end|>\n"
                f"<|im_start|>user\nRound 1\n\n{PLACEHOLDER}<|im_end|>\n"
                f"<|im_start|>assistant\n{a1}<|im_end|>\n"
                "<|im_start|>user\nRound 2\n\ntitle: page 2\n<a>red lamp <2></a> $2<|im_end|>\n"
                "<|im_start|>assistant\n")
    assert chat.tokenizer.decode(context(chat, trajectory, 2), skip_special_tokens=False) == expected


def test_thoughts_are_the_familys_own_tokens_where_we_write_them_and_never_on_a_page():
    """Qwen3 has tokens for <think> and </think>: a policy samples those, and a page must not contain them."""
    chat = Chat(family_tokenizer("qwen3"), "Write <think> first </think>.")
    tags = [chat.tokenizer.token_to_id(tag) for tag in ("<think>", "</think>")]
    text = "<think>hm</think><answer>exit()</answer>"
    ids = chat.encode(text, ours=True)
    assert [i for i in ids if i in tags] == tags and chat.decode(ids) == text
    record = {"intent": text, "task_id": 0, "sites": [],
              "turns": [{"url": "", "observation": text, "response": text}]}
    row, = trajectory_rows(chat, replay(chat, record))
    assert [i for i in row.ids if i in tags] == tags * 2
    assert [i for i in row.ids[-row.n_action:] if i in tags] == tags
    plain = Chat(family_tokenizer("qwen2.5"), "")
    assert plain.encode(text, ours=True) == plain.encode(text)


def test_truncation_and_padding_set_in_a_tokenizer_file_are_ignored(checkpoint, tmp_path):
    """Trainers leave such files behind. They would cut a page in silence, or fill it with control tokens."""
    shutil.copytree(checkpoint, tmp_path / "c")
    tokenizer = load_tokenizer(tmp_path / "c")
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(tmp_path / "c/tokenizer.json"))
    page = "lamp 7 " * 30
    for opened in (Tokenizer.from_file(str(tmp_path / "c/tokenizer.json")), load_tokenizer(tmp_path / "c")):
        assert Chat(opened, "").encode(page) == Chat(load_tokenizer(checkpoint), "").encode(page)
    assert load_tokenizer(tmp_path / "c").encode(page).ids == load_tokenizer(checkpoint).encode(page).ids


@pytest.mark.parametrize("compress", [True, False])
def test_messages_for_a_remote_model_say_what_a_checkpoint_reads(chat, compress):
    chat = Chat(chat.tokenizer, chat.system, compress=compress)
    for n in (1, 3):
        trajectory = make_trajectory(chat, n)
        *said, last = [(m["role"], m["content"]) for m in messages(chat, trajectory)]
        ids = sum((chat.message(*one) for one in [*said, last]), chat.control(chat.format.begin))
        ids += chat.opening("assistant")
        decode = lambda ids: chat.tokenizer.decode(ids, skip_special_tokens=False)
        assert decode(ids) == decode(context(chat, trajectory, n - 1))


def random_history(number: int):
    """(messages, trajectory) of a few turns; contents begin and end with all sorts of white space."""
    draw = random.Random(number)
    pieces = ["lamp", "Orders 7", "<a>", "</a>", " ", "\n", "\n\n", "\t", "$24", "née", "日本", "🙂", "{{x}}"]
    text = lambda: "".join(draw.choices(pieces, k=draw.randint(1, 6)))
    system, tau, messages = "You" + text(), Trajectory({"intent": text(), "task_id": 0, "sites": []}), []
    for k in range(draw.randint(1, 4)):
        page, response, intent = text(), f"go {text()}.", f"Task: {tau.task['intent']}\n\n" if k == 0 else ""
        tau.turns.append(Turn("", page, [], [], [], response))
        messages += [{"role": "user", "content": f"{intent}Round {k}\n\n{PLACEHOLDER}"},
                     {"role": "assistant", "content": response}]
    messages[-2]["content"] = messages[-2]["content"].replace(PLACEHOLDER, page)
    return [{"role": "system", "content": system}, *messages[:-1]], tau


def test_a_tokenizer_of_no_known_family_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<|im_start|>": 1}, unk_token="a"))
    with pytest.raises(ValueError, match="neither Qwen .* nor Llama 3 .*; use an instruct checkpoint"):
        Chat(tokenizer, "")


@pytest.mark.parametrize("family, number", [("qwen2.5", 0), ("qwen3", 0), ("llama3.1", 1), ("llama3", 2)])
def test_a_family_is_known_by_its_control_tokens(family, number):
    assert Chat(family_tokenizer(family), "").format is FORMATS[number]


@pytest.mark.parametrize("family", ["qwen2.5", "llama3.1"])
def test_prompts_equal_the_checkpoints_own_templates(family):
    """Id for id on 200 random histories; chat_templates.json says where the expected strings come from."""
    tokenizer = family_tokenizer(family)
    expected = json.loads((ROOT / "tests/fixtures/chat_templates.json").read_text())[family]
    for number, string in zip(range(200), expected, strict=True):
        messages, tau = random_history(number)
        chat = Chat(tokenizer, messages[0]["content"])
        for k, turn in enumerate(tau.turns):
            turn.observation_ids = chat.user_ids(tau.task, k, turn.observation)
            turn.action_ids = chat.encode(turn.response) + [chat.end_id]
        ids = tokenizer.encode(string, add_special_tokens=False).ids
        assert context(chat, tau, len(tau.turns) - 1) == ids, number


def test_sampled_ids_are_kept_even_where_encoding_again_would_change_them(chat):
    trajectory = make_trajectory(chat)
    odd = [chat.tokenizer.token_to_id(c) for c in "lamp"] + [chat.end_id]  # no encoder writes single letters
    assert chat.encode("lamp") != odd[:-1]
    trajectory.turns[0].action_ids = odd
    ids = context(chat, trajectory, 1)
    assert any(ids[i:i + 5] == odd for i in range(len(ids)))


def test_a_forced_end_of_turn_is_context_but_never_trained(chat):
    trajectory = make_trajectory(chat, ended=False)
    for t, row in enumerate(trajectory_rows(chat, trajectory)):
        trained = row.ids[-row.n_action:]
        assert trained == trajectory.turns[t].action_ids and chat.end_id not in trained
    after = trunk(chat, trajectory, 1)
    assert after[-1 - len(chat.encode("\n"))] == chat.end_id


def test_perturbing_one_page_token_changes_the_next_actions_logprob(chat):
    """The released trainer hid the pages from attention by using the loss mask as attention mask."""
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    for perturbed in range(3):
        samples = trajectory_rows(chat, make_trajectory(chat))
        before = token_logprobs(model, **pack(samples))[0].split([row.n_action for row in samples])
        row = samples[perturbed]
        alone = token_logprobs(model, *pad([row]))[0]
        row.ids[row.n_context - 8] += 1
        after = token_logprobs(model, **pack(samples))[0].split([row.n_action for row in samples])
        assert (token_logprobs(model, *pad([row]))[0] - alone).abs().min() > 1e-4
        for i in range(3):  # no other turn saw that page
            moved = (after[i] - before[i]).abs()
            assert moved.min() > 1e-4 if i == perturbed else moved.max() < 1e-5


def test_masks_come_from_recorded_lengths_not_from_token_values(chat):
    trajectory = make_trajectory(chat)
    trajectory.turns[1].action_ids = [0, chat.end_id, 0, chat.end_id]  # pad id and end id in a response
    samples = trajectory_rows(chat, trajectory)
    tokens, action = pad(samples)
    assert action.sum(1).tolist() == [len(t.action_ids) for t in trajectory.turns]
    assert tokens[1][action[1]].tolist() == [0, chat.end_id, 0, chat.end_id]
    packed = pack(samples)
    trained = packed["tokens_BT"][packed["action_BT"]].tolist()
    assert trained == [i for turn in trajectory.turns for i in turn.action_ids]


def test_the_head_runs_on_action_tokens_alone(chat):
    """Logits of whole pages never exist; those of responses only `chunk` at a time."""
    model, sizes = tiny_model(vocab_size=chat.tokenizer.get_vocab_size()), []
    samples = trajectory_rows(chat, make_trajectory(chat))
    head = model.logits
    model.logits = lambda x: sizes.append(x.shape[:-1].numel()) or head(x)
    with torch.no_grad():
        token_logprobs(model, **pack(samples), chunk=10)
    assert sum(sizes) == sum(row.n_action for row in samples) and max(sizes) == 10


def test_padding_does_not_change_logprobs(chat):
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    samples = [row for seed in range(3) for row in trajectory_rows(chat, make_trajectory(chat, 1 + 2 * seed, seed))]
    together = token_logprobs(model, *pad(samples))[0]
    alone = torch.cat([token_logprobs(model, *pad([row]))[0] for row in samples])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


# The families' added tokens, from their tokenizer files. Qwen's from <tool_call> on are not "special".
QWEN25 = [*SPECIAL, *(f"<|{name}|>" for name in """object_ref_start object_ref_end box_start box_end
    quad_start quad_end vision_start vision_end vision_pad image_pad video_pad""".split()),
    "<tool_call>", "</tool_call>",
    *(f"<|{name}|>" for name in "fim_prefix fim_middle fim_suffix fim_pad repo_name file_sep".split())]
QWEN3 = [*QWEN25, "<tool_response>", "</tool_response>", "<think>", "</think>"]
LLAMA30 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
           *(f"<|reserved_special_token_{i}|>" for i in range(251))]
LLAMA31 = [*LLAMA30[:-3], "<|finetune_right_pad_id|>", "<|eom_id|>", "<|python_tag|>"]
FAMILIES = {"ours": SPECIAL, "qwen2.5": QWEN25, "qwen3": QWEN3, "llama3": LLAMA30, "llama3.1": LLAMA31}
WORDS = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
              r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def family_tokenizer(name: str) -> Tokenizer:
    """A small vocabulary with the family's added tokens, word splitter and normalizer."""
    tokenizer = Tokenizer(models.BPE())
    if name.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(WORDS, "isolated"), by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([*TEXT, *FAMILIES[name] * 3], trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    ordinary = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
    tokenizer.add_tokens([AddedToken(t, special=t not in ordinary, normalized=False) for t in FAMILIES[name]])
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_page_text_never_becomes_a_control_token(family):
    """Every family's special tokens in pages of any family: alone, nested, doubled, split over elements."""
    chat = Chat(family_tokenizer(family), "You browse the web.")
    frame = [i for i in chat.user_ids({"intent": ""}, 0, "") if i in chat.control_ids]
    everyones = sorted({token for tokens in FAMILIES.values() for token in tokens if "reserved" not in token})
    tokens = [*everyones, *(token for token in FAMILIES[family] if "reserved" in token)]
    shapes = ["{0}", "a{0}b", "{0}{0}", "<{0}>", "<|{0}|>", "<|im_{0}start|>", "\n{0}\n", "&lt;{0}",
              "{1}{0}{2}", "{1}</a> <b>{2}</b>", "<a>{1}\n{2}", "{0} {1}"]
    for token, shape, at in itertools.product(tokens, shapes, (1, 5, -1)):
        text = shape.format(token, token[:at], token[at:])
        assert chat.bare_tokenizer.decode(chat.encode(text)) == text
        ids = chat.user_ids({"intent": text}, 0, f"<title>{text}</title>")
        assert [i for i in ids if i in chat.control_ids] == frame, text


@pytest.mark.parametrize("family", FAMILIES)
def test_random_soups_of_control_tokens_stay_text(family):
    chat, draw = Chat(family_tokenizer(family), "You browse the web."), random.Random(0)
    pieces = [piece for token in FAMILIES[family] for piece in (token, token[:3], token[3:], token[:-2])]
    pieces += ["<a>", " ", "\n", "<|", "|>", "é"]
    for _ in range(300):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 12)))
        ids = chat.encode(text)
        assert chat.control_ids.isdisjoint(ids) and chat.bare_tokenizer.decode(ids) == text


def test_a_vocabulary_with_control_tokens_as_ordinary_entries_cannot_be_tricked():
    """There the text is changed instead."""
    words = {w: i for i, w in enumerate(["<|im_end|>", "<|im_start|>", *"<|im_end> \na"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_end|>", "<|im_start|>")])
    chat = Chat(tokenizer, "")
    assert chat.control_ids.isdisjoint(chat.encode("<|im_end|>"))


@pytest.mark.parametrize("budget", [60, 100, 150, 400])
def test_a_page_over_budget_is_cut_at_its_end_with_a_marker(chat, budget):
    trajectory = make_trajectory(chat, 2)
    page = "\n".join(f"<a>red lamp <{i}></a> $24" for i in range(200))
    ids, shown, cut = fit_page(chat, trajectory, page, len(trunk(chat, trajectory, 2)) + budget)
    assert cut and len(ids) <= budget and shown.endswith(CUT) and page.startswith(shown[:-len(CUT)])
    assert ids == chat.user_ids(trajectory.task, 2, shown)
    short = chat.user_ids(trajectory.task, 2, "short")
    assert fit_page(chat, trajectory, "short", 10_000) == (short, "short", False)


def test_a_record_holds_success_and_reward_apart_and_a_replay_knows_the_success(chat):
    """A fork may reward something else than the success, which all statistics count."""
    trajectory = make_trajectory(chat)
    trajectory.success, trajectory.reward = 1.0, -0.4
    record = json.loads(json.dumps(trajectory.to_json(chat, step=3)))
    assert (record["success"], record["reward"], record["step"]) == (1.0, -0.4, 3)
    assert replay(chat, record).success == 1.0
    del record["success"]  # as in demonstrations from elsewhere
    assert replay(chat, record).success == 0.0


def test_a_replay_reads_what_a_record_wrote(chat):
    """Pages, responses and their end; ids are those of the text, which an encoder might write otherwise."""
    trajectory = make_trajectory(chat, 3)
    for k, turn in enumerate(trajectory.turns):
        turn.response, turn.ended = f"go to {k}.", k != 1
        turn.action_ids = chat.encode(turn.response) + [chat.end_id] * turn.ended
        turn.logps = [-1.0] * len(turn.action_ids)
    record = trajectory.to_json(chat)
    assert [turn["context_tokens"] for turn in record["turns"]] == [len(context(chat, trajectory, k)) for k in range(3)]
    again = replay(chat, record)
    for ours, theirs in zip(again.turns, trajectory.turns, strict=True):
        assert ours.observation_ids == theirs.observation_ids and ours.action_ids == theirs.action_ids
        assert (ours.observation, ours.response, ours.ended) == (theirs.observation, theirs.response, theirs.ended)
    record["turns"][0]["observation"] = None  # its page is not known, its response stays
    unknown = replay(chat, record)
    assert unknown.turns[0].observation == PLACEHOLDER and trunk(chat, unknown, 3) == trunk(chat, trajectory, 3)


def test_a_row_is_the_context_and_the_response_id_for_id(chat):
    trajectory = make_trajectory(chat, 4, ended=False)
    for t, row in enumerate(trajectory_rows(chat, trajectory)):
        assert row.ids == context(chat, trajectory, t) + trajectory.turns[t].action_ids
        assert row.n_context == len(context(chat, trajectory, t))


def ragged(chat):
    """Trajectories of 1 to 15 turns, responses and pages of unequal length."""
    episodes = [make_trajectory(chat, n, seed=n, ended=bool(n % 3)) for n in (1, 2, 3, 6, 15)]
    return [row for trajectory in episodes for row in trajectory_rows(chat, trajectory)]


def test_packed_equals_one_row_per_turn(chat):
    """Log-probs, entropies and gradients, float32, 1e-5; the reference runs each turn alone."""
    model, samples = tiny_model(vocab_size=chat.tokenizer.get_vocab_size()), ragged(chat)
    generator = torch.Generator().manual_seed(0)
    weight = {id(row): torch.rand(row.n_action, generator=generator) for row in samples}

    def run(batches, lay_out):
        model.zero_grad()
        found = {}
        for batch in batches:
            logp_N, entropy_N, _ = lay_out(batch)
            (logp_N * torch.cat([weight[id(row)] for row in batch])).sum().div(len(samples)).backward()
            parts = [row.n_action for row in batch]
            both = zip(batch, logp_N.detach().split(parts), entropy_N.split(parts))
            found |= {id(row): pair for row, *pair in both}
        return ([torch.cat([found[id(row)][k] for row in samples]) for k in (0, 1)],
                {name: p.grad.clone() for name, p in model.named_parameters()})

    alone = [[row] for row in samples]
    (logp, entropy), gradient = run(alone, lambda batch: token_logprobs(model, *pad(batch)))
    for budget in (1, 300, 1000, 10**6):
        batches = micro_batches(samples, budget)
        values, packed = run(batches, lambda batch: token_logprobs(model, **pack(batch)))
        torch.testing.assert_close(values, [logp, entropy], atol=1e-5, rtol=1e-5)
        for name in gradient:
            torch.testing.assert_close(packed[name], gradient[name], atol=1e-5, rtol=1e-4,
                                       msg=f"{name}, budget {budget}")


def test_packing_an_episode_writes_its_history_once_and_every_page_and_response_at_its_place(chat):
    trajectory = make_trajectory(chat, 3)
    samples = trajectory_rows(chat, trajectory)
    batch, = micro_batches(samples, 10**6)
    packed = pack(batch)
    action = packed["action_BT"][0].tolist()
    for row, (start, stop, _, _), (ids, positions) in zip(batch, packed["segments"], rebuilt(packed), strict=True):
        assert ids == row.ids and positions == list(range(len(row.ids)))
        before = stop - start - row.n_action
        assert action[start:stop] == [False] * before + [True] * row.n_action
    pages_and_responses = sum(len(turn.observation_ids) + len(turn.action_ids) for turn in trajectory.turns)
    assert packed["tokens_BT"].numel() <= len(trunk(chat, trajectory, 2)) + pages_and_responses


def rebuilt(packed):
    """What each segment sees and is, as (ids, positions): its context, with that one's context, and itself."""
    ids, positions = packed["tokens_BT"][0].tolist(), packed["positions_BT"][0].tolist()
    whole, starts = [], {}
    for start, stop, first, last in packed["segments"]:
        seen = [[], []]
        if first < last:
            seen = starts[first][0] + ids[first:last], starts[first][1] + positions[first:last]
        starts[start] = seen
        whole.append((seen[0] + ids[start:stop], seen[1] + positions[start:stop]))
    return whole


def fewest_ids(rows):
    """Each different beginning of a context once, and of each row what predicts its actions, and these.

    It takes still fewer where one row's actions are part of another's context.
    """
    beginnings = set()
    own = 0
    for row in rows:
        predictor = len(row.ids) - row.n_action - 1
        beginnings |= {tuple(row.ids[:n + 1]) for n in range(predictor)}
        own += 1 + row.n_action
    return len(beginnings) + own


def test_the_example_of_pack():
    a, b, c, d, e, f, g, h = range(8)
    batch = [Row([a, b, c, d], 1), Row([a, b, e, f], 1), Row([a, b, e, g, h], 1)]
    packed = pack(batch)
    assert packed["tokens_BT"][0].tolist() == [a, b, c, d, e, f, g, h]
    assert packed["positions_BT"][0].tolist() == [0, 1, 2, 3, 2, 3, 3, 4]
    assert packed["segments"] == [(0, 4, 0, 0), (4, 6, 0, 2), (6, 8, 4, 5)]
    assert packed["action_BT"][0].tolist() == [False, False, False, True, False, True, False, True]
    for order in itertools.permutations(batch):
        assert micro_batches(list(order), 8) == [batch]
        assert micro_batches(list(order), 7) == [batch[:2], batch[2:]] and micro_batches(list(order), 5) == [[row] for row in batch]


def test_what_rows_have_in_common_is_written_once(chat):
    """Episodes of a group: the same ones, the same pages with other answers, other tasks; never an id more than needed."""
    twins = [trajectory_rows(chat, make_trajectory(chat, 3)) for _ in range(3)]
    for row in twins[1]:  # the same contexts, other responses
        row.ids[-row.n_action:] = [7 + k for k in range(row.n_action)]
    whole = sum(len(row.ids) for row in twins[0] + twins[1] + twins[2])
    random_ids = random.Random(0)
    words = [Row([random_ids.randrange(3) for _ in range(random_ids.randint(2, 9))], 1) for _ in range(300)]
    for row in words:
        row.n_action = random_ids.randint(1, len(row.ids) - 1)
    for rows in (twins[0] + twins[1] + twins[2], ragged(chat), [*twins[0], *ragged(chat)[1:3]], words):
        batch, = micro_batches(rows, 10**6)
        packed = pack(batch)
        for row, (ids, positions) in zip(batch, rebuilt(packed), strict=True):
            assert ids == row.ids and positions == list(range(len(row.ids)))
        action = packed["tokens_BT"][packed["action_BT"]].tolist()
        assert action == [token for row in batch for token in row.ids[-row.n_action:]]
        fewest = fewest_ids(rows)
        assert packed["tokens_BT"].numel() == fewest or rows is words and packed["tokens_BT"].numel() < fewest
    assert fewest_ids(twins[0] + twins[1] + twins[2]) < whole / 2

    # A row without a page, as of a value function: what predicts its action stays its own.
    bare = [Row([*range(10), 20], 1) for _ in range(2)]
    packed = pack(bare)
    assert packed["segments"] == [(0, 11, 0, 0), (11, 13, 0, 9)] and packed["tokens_BT"][0, 11:].tolist() == [9, 20]
    assert micro_batches(bare, 13) == [bare] and len(micro_batches(bare, 12)) == 2


def test_rows_of_a_group_that_share_pages_and_responses_have_the_gradient_of_each_alone(chat):
    """Log-probs and gradients, float32; among them a row that is another's beginning and one twice."""
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    samples = [row for _ in range(2) for row in trajectory_rows(chat, make_trajectory(chat, 3))]
    first = samples[0]
    samples.append(Row(first.ids[:-1], first.n_action - 1))
    samples.append(Row(first.ids + [5, 6], 2))  # as without compression: its context holds a trained response
    weights = [0.3 * i - 1 for i in range(len(samples))]

    def scored(batches, lay_out):
        """(the log-probs in the order of samples, the gradient of their weighted sum)."""
        model.zero_grad()
        found = {}
        for batch in batches:
            logp_N, _, _ = lay_out(batch)
            parts = logp_N.split([row.n_action for row in batch])
            sum(weights[samples.index(row)] * part.sum() for row, part in zip(batch, parts)).backward()
            found |= {samples.index(row): part.detach() for row, part in zip(batch, parts)}
        logps = torch.cat([found[i] for i in range(len(samples))])
        return logps, torch.cat([p.grad.flatten() for p in model.parameters()])

    alone = scored([[row] for row in samples], lambda batch: token_logprobs(model, *pad(batch)))
    for budget in (200, 10**6):
        packed = scored(micro_batches(samples, budget), lambda batch: token_logprobs(model, **pack(batch)))
        torch.testing.assert_close(packed[0], alone[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed[1], alone[1], atol=1e-5, rtol=1e-4)


def test_a_full_batch_is_followed_by_one_that_is_whole_again():
    history = list(range(100))
    later, earlier = Row(history[:90] + [1] * 10, 5), Row(history[:40] + [2] * 10, 5)
    assert micro_batches([later, earlier], 110) == [[earlier, later]]
    assert micro_batches([later, earlier], 109) == [[earlier], [later]]
    assert pack([later])["tokens_BT"][0].tolist() == later.ids


@pytest.mark.parametrize("budget", [150, 400, 1500])
def test_a_trajectory_of_any_length_trains_within_the_budget(chat, budget):
    samples = ragged(chat)
    batches = micro_batches(samples, budget)
    assert sorted(id(row) for batch in batches for row in batch) == sorted(map(id, samples))
    for batch in batches:
        assert pack(batch)["tokens_BT"].numel() <= budget or len(batch) == 1  # a single turn may be longer,
    assert max(len(row.ids) for row in samples) > 400  # as here
    assert len(micro_batches(samples, budget)) < len(samples) or budget == 150


@pytest.mark.parametrize("settings", [{"think": "false"}, {"thinks": False}, {"system": 3}, {"keep_thoughts": True}])
def test_an_agent_json_that_cannot_be_followed_is_refused(chat, tmp_path, settings):
    (tmp_path / "agent.json").write_text(json.dumps(settings))
    chat.tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=f"agent.json: {next(iter(settings))} is .*true or false"):
        open_chat(tmp_path, "")


def test_agent_json_sets_the_chat(chat, tmp_path):
    settings = {"system": "Do it.", "think": False, "compress": False}
    (tmp_path / "agent.json").write_text(json.dumps(settings))
    chat.tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = open_chat(tmp_path, "")
    assert {name: getattr(opened, name) for name in settings} == settings


def test_the_demonstration_prints_how_much_compression_and_packing_save(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["savings.py"])
    savings.main()
    lines = capsys.readouterr().out.splitlines()
    table = [list(map(int, line.split())) for line in lines[3:10]]
    assert [row[0] for row in table] == list(range(7)) and table[0][2] == table[0][3]
    assert all(kept > compressed for _, _, kept, compressed in table[1:])
    assert float(lines[-1].split("(")[1].split()[0]) > 1.5


def test_the_table_of_context_lengths_says_what_the_demonstration_says(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["savings.py"])
    savings.main()
    rows = [list(map(int, line.split())) for line in capsys.readouterr().out.splitlines()[3:10]]
    kept, compressed = [row[2] for row in rows], [row[3] for row in rows]
    monkeypatch.setattr("sys.argv", ["lengths.py", str(ROOT / "assets/episode.jsonl")])
    lengths.main()
    text = capsys.readouterr().out

    def row(name):
        """[episodes, compressed: median, largest, every page kept: median, largest]"""
        return [int(n) for n in re.findall("[0-9]+", re.search(f"^{name} (.*)", text, re.MULTILINE)[1])]
    for turn in (1, 5):
        assert row(f"context at turn {turn}") == [1, *[compressed[turn - 1]] * 2, *[kept[turn - 1]] * 2]
    assert row("largest context") == [1, *[max(compressed)] * 2, *[max(kept)] * 2]
    assert row("all contexts, summed") == [1, *[sum(compressed)] * 2, *[sum(kept)] * 2]
    assert row("       9") == [1, 7, 7, 0, 7] and "context at turn 10" not in text  # its template and turns


def test_the_episode_to_read_is_an_experts_and_comes_from_compact_pages():
    """It once held the gibberish of a policy that had not learned anything."""
    episode, = map(json.loads, (ROOT / "assets/episode.jsonl").read_text().splitlines())
    assert episode["reward"] == 1 and 5 <= len(episode["turns"]) <= 8
    for turn in episode["turns"]:
        assert turn["observation"].startswith("title: ") and turn["action"] and not turn["error"]
    assert len({turn["observation"] for turn in episode["turns"]}) == len(episode["turns"])


@pytest.mark.parametrize("think", [True, False])
def test_answer_of_inverts_format_response(think):
    action = '# Element: red lamp <5>\ndo(action="Click", element="5")'
    assert answer_of(format_response("find the lamp", action, think)) == action


def test_the_answer_is_what_follows_the_thoughts():
    assert answer_of("<think><answer>exit()</answer></think><answer>go_back()</answer>") == "go_back()"
    assert answer_of("<think>so</think>go_forward()") == "go_forward()"
    assert answer_of("so</think>go_forward()") == "go_forward()"  # its template has opened the thought
    assert answer_of('<think>what if\nexit(message="N/A")') is None  # cut in its thought: that acts no more than
    assert answer_of("<think>so</think><answer>exit(") is None  # cut before its end: neither action nor exit


def test_the_system_prompt_lists_the_actions_and_the_tags():
    assert "- a: b" in system_prompt("- a: b", True) and "<think>" in system_prompt("", True)
    assert "<think>" not in system_prompt("", False)

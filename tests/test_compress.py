"""Contexts and rows: trained on exactly what the policy saw."""
import itertools

import pytest
import torch
from conftest import SPECIAL, tiny_model

from compress import (CUT, PLACEHOLDER, Chat, Row, Trajectory, Turn, answer_of, context, fit_page, micro_batches, pad, respond, rows,
                      system_prompt, trunk)
from model import token_logprobs


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Chat(tokenizer, "You browse the web.")


def make_trajectory(chat, n_turns=3, seed=0, ended=True):
    generator = torch.Generator().manual_seed(seed)
    trajectory = Trajectory({"intent": "add the red lamp to the cart", "task_id": 0, "sites": ["shopping"]})
    for k in range(n_turns):
        page = f"<title>page {k}</title>\n<a>red lamp {k}</a> ${k}"
        ids = torch.randint(3, 300, (5 + k,), generator=generator).tolist()
        trajectory.turns.append(Turn("http://x/", page, chat.observation(trajectory.task, k, page),
                                     ids + [chat.end_id] if ended else ids, [-1.0] * (len(ids) + ended), chat.decode(ids), ended))
    return trajectory


def test_the_context_is_the_chat_written_out(chat):
    """All past pages are the placeholder, past responses are whole, the current page is whole."""
    trajectory = make_trajectory(chat)
    a0, a1 = (chat.decode(t.action_ids) for t in trajectory.turns[:2])
    expected = (f"<|im_start|>system\nYou browse the web.<|im_end|>\n"
                f"<|im_start|>user\nTask: add the red lamp to the cart\n\nRound 0\n\n{PLACEHOLDER}<|im_end|>\n"
                f"<|im_start|>assistant\n{a0}<|im_end|>\n"
                f"<|im_start|>user\nRound 1\n\n{PLACEHOLDER}<|im_end|>\n<|im_start|>assistant\n{a1}<|im_end|>\n"
                f"<|im_start|>user\nRound 2\n\n<title>page 2</title>\n<a>red lamp 2</a> $2<|im_end|>\n<|im_start|>assistant\n")
    assert chat.tokenizer.decode(context(chat, trajectory, 2), skip_special_tokens=False) == expected


def test_sampled_ids_are_kept_even_where_encoding_again_would_change_them(chat):
    trajectory = make_trajectory(chat)
    odd = [chat.tokenizer.token_to_id(c) for c in "lamp"] + [chat.end_id]  # letters one by one: no encoder writes it so
    assert chat.encode("lamp") != odd[:-1]
    trajectory.turns[0].action_ids = odd
    ids = context(chat, trajectory, 1)
    assert any(ids[i:i + 5] == odd for i in range(len(ids)))


def test_a_forced_end_of_turn_is_context_but_never_trained(chat):
    trajectory = make_trajectory(chat, ended=False)
    for t, row in enumerate(rows(chat, trajectory)):
        assert row.ids[-row.n_action:] == trajectory.turns[t].action_ids and chat.end_id not in row.ids[-row.n_action:]
    after = trunk(chat, trajectory, 1)
    assert after[-1 - len(chat.encode("\n"))] == chat.end_id


def test_perturbing_one_page_token_changes_the_next_actions_logprob(chat):
    """The released trainer hid the pages from attention by using the loss mask as attention mask."""
    model, trajectory = tiny_model(vocab_size=chat.tokenizer.get_vocab_size()), make_trajectory(chat)
    row = rows(chat, trajectory)[2]
    before = token_logprobs(model, *pad([row]))[0]
    page_token = len(row.ids) - row.n_action - 8
    row.ids[page_token] += 1
    assert (token_logprobs(model, *pad([row]))[0] - before).abs().min() > 1e-4


def test_masks_come_from_recorded_lengths_not_from_token_values(chat):
    trajectory = make_trajectory(chat)
    trajectory.turns[1].action_ids = [0, chat.end_id, 0, chat.end_id]  # the pad id and the end id inside a response
    tokens, action = pad(rows(chat, trajectory))
    assert action.sum(1).tolist() == [len(t.action_ids) for t in trajectory.turns]
    assert tokens[1][action[1]].tolist() == [0, chat.end_id, 0, chat.end_id]


def test_padding_does_not_change_logprobs(chat):
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    samples = [row for seed in range(3) for row in rows(chat, make_trajectory(chat, 1 + 2 * seed, seed))]
    together = token_logprobs(model, *pad(samples))[0]
    alone = torch.cat([token_logprobs(model, *pad([row]))[0] for row in samples])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


FOREIGN = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|fim_prefix|>",
           "<|object_ref_start|>", "<|vision_start|>", "<tool_call>", "</tool_call>", "<|endoftext|>", "<think>", "</answer>"]


def test_page_text_never_becomes_a_control_token(chat):
    for token, shape in itertools.product(SPECIAL + FOREIGN, ["{}", "a{}b", "{0}{0}", "<{}>", "<|im_{}start|>", "\n{}\n", "&lt;{}"]):
        text = shape.format(token)
        ids = chat.encode(text)
        assert chat.control_ids.isdisjoint(ids), text
        assert chat.plain.decode(ids) == text
        observation = chat.observation({"intent": text}, 0, f"<title>{text}</title>")
        assert [i for i in observation if i in chat.control_ids] == [
            chat.tokenizer.token_to_id(s) for s in ("<|im_start|>", "<|im_end|>", "<|im_start|>")]


def test_a_vocabulary_that_spells_control_tokens_cannot_be_tricked():
    """Some tokenizers hold control tokens among their ordinary entries; there the text is changed instead."""
    from tokenizers import AddedToken, Tokenizer, models
    words = {w: i for i, w in enumerate(["<|im_end|>", "<|im_start|>", "<", "|", "i", "m", "_", "e", "n", "d", ">", " ", "\n", "a"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<|im_start|>", special=True)])
    chat = Chat(tokenizer, "")
    assert chat.control_ids.isdisjoint(chat.encode("<|im_end|>"))


@pytest.mark.parametrize("budget", [60, 100, 150, 400])
def test_a_page_over_budget_is_cut_at_its_end_with_a_marker(chat, budget):
    trajectory = make_trajectory(chat, 2)
    page = "\n".join(f"<a>red lamp {i}</a> $24" for i in range(200))
    ids, shown, cut = fit_page(chat, trajectory, page, len(trunk(chat, trajectory, 2)) + budget)
    assert cut and len(ids) <= budget and shown.endswith(CUT) and page.startswith(shown[:-len(CUT)])
    assert ids == chat.observation(trajectory.task, 2, shown)
    assert fit_page(chat, trajectory, "short", 10_000) == (chat.observation(trajectory.task, 2, "short"), "short", False)


def test_micro_batches_hold_every_row_once_within_the_budget():
    samples = [Row(list(range(2 + 7 * i % 50)), 1) for i in range(40)]
    batches = micro_batches(samples, 120)
    assert sorted(id(r) for b in batches for r in b) == sorted(map(id, samples))
    assert all(len(b) * max(len(r.ids) for r in b) <= 120 for b in batches)
    assert [len(b) for b in micro_batches([Row([1] * 500, 1)] * 2, 120)] == [1, 1]  # too long for any batch: alone


@pytest.mark.parametrize("think", [True, False])
def test_answer_of_inverts_respond(think):
    action = '# Element: red lamp 5\ndo(action="Click", element="5")'
    assert answer_of(respond("find the lamp", action, think)) == action


def test_the_answer_is_what_follows_the_thoughts():
    assert answer_of("<think><answer>exit()</answer></think><answer>go_back()</answer>") == "go_back()"
    assert answer_of("<think>so</think>go_forward()") == "go_forward()"
    assert answer_of("<think>so</think><answer>exit(") is None  # cut before its end: no action, and no exit either


def test_the_system_prompt_lists_the_actions_and_the_tags():
    assert "- a: b" in system_prompt("- a: b", True) and "<think>" in system_prompt("", True)
    assert "<think>" not in system_prompt("", False)

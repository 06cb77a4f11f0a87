"""Training of heads: states kept once, gradients of batches, batches that hold every answer."""

import random

import pytest
import torch
import torch.nn.functional as F

from labkit.models.layers import Taps
from labkit.models.weights import load_model
from labkit.shapes import model_shape
from labkit.training import heads
from labkit.training.checkpoints import BLOCK_SIZE, head_shape
from labkit.training.data import Answer
from labkit.training.losses import Losses, SoftCrossEntropy, num_blocks
from labkit.training.states import BatchSize, StateStore, parts_within, state_bytes, state_sizes
from labkit.training.step import GradientSteps
from labkit.training.trainer import Head, make_optimizers

TAPS = (0, 1)


@pytest.fixture(scope="module")
def tiny():
    return load_model(model_shape("tiny"), seed=0)


@pytest.fixture(scope="module")
def answers(tiny):
    draw = random.Random(0)
    tokens = lambda count: [draw.randrange(tiny.shape.vocab_size) for _ in range(count)]  # noqa: E731
    return [Answer(tokens(prompt), tokens(output)) for prompt, output in ((5, 30), (12, 20), (3, 41), (9, 70), (2, 17))]


def test_the_gradient_is_that_of_autograd():
    generator = torch.Generator().manual_seed(0)
    hidden, rows = torch.randn(20, 8, generator=generator), torch.randn(11, 8, generator=generator)
    teacher = torch.randn(20, 11, generator=generator).softmax(dim=-1)
    weight = (torch.rand(20, generator=generator) > 0.3).float()
    mine, reference = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss, right = SoftCrossEntropy.apply(mine, rows, teacher @ rows, teacher.argmax(dim=-1), weight)
    (3 * loss).backward()
    logits = reference @ rows.T
    expected = (F.cross_entropy(logits, teacher, reduction="none") * weight).sum() / weight.sum()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mine.grad, reference.grad)
    agree = (logits.argmax(dim=-1) == teacher.argmax(dim=-1)).float()
    torch.testing.assert_close(right, (agree * weight).sum() / weight.sum())


def test_parts_of_the_rows_add_up(monkeypatch):
    hidden, rows = torch.randn(20, 8), torch.randn(11, 8)
    taught = hidden, rows, torch.randn(20, 8), torch.arange(20) % 11, torch.rand(20)
    whole = SoftCrossEntropy.apply(*taught)
    monkeypatch.setattr("labkit.training.losses._PART_ROWS", 7)
    torch.testing.assert_close(SoftCrossEntropy.apply(*taught), whole)


def test_a_stored_batch_holds_what_the_target_says(tiny, answers):
    sizes = state_sizes(tiny, TAPS, answers)
    vocabulary = torch.arange(0, tiny.shape.vocab_size, 3)
    store = StateStore(tiny, TAPS, answers, sizes, tiny.head_weight[vocabulary])
    empty = len(answers)
    batch = store.batch(torch.tensor([3, 1, empty]), BatchSize(3, 96, 72))
    assert batch.lens.tolist() == [79, 32, 0]
    for row, index in enumerate((3, 1)):
        text = [*answers[index].prompt_ids, *answers[index].output_ids]
        out = torch.empty(1, len(text), (len(TAPS) + 1) * tiny.shape.hidden_size)
        taps = Taps((*TAPS, tiny.shape.num_layers), out)
        tiny.forward(torch.tensor([text]), tiny.new_cache(1, len(text)), backend="reference", taps=taps)
        assert batch.token_ids[row, : len(text)].tolist() == text
        scaled = out[0, :, : -tiny.shape.hidden_size] / sizes
        torch.testing.assert_close(batch.states[row, : len(text)], scaled, atol=1e-3, rtol=1e-3)
        first = len(answers[index].prompt_ids) - 1
        said = out[0, first + 1 : -1, -tiny.shape.hidden_size :]  # entry w speaks of the token at first + w + 2
        probs = (said @ tiny.head_weight[vocabulary].T).softmax(dim=-1)
        expected = probs @ tiny.head_weight[vocabulary]
        torch.testing.assert_close(batch.mean_row[row, : len(probs)], expected, atol=1e-4, rtol=1e-3)
        assert torch.equal(batch.best[row, : len(probs)], probs.argmax(dim=-1))


def test_an_epoch_holds_every_answer_once(answers, tiny):
    store = StateStore(tiny, TAPS, answers, state_sizes(tiny, TAPS, answers), tiny.head_weight[:7])
    seen = []
    for rows, size in store.plan(300, random.Random(1)):
        assert len(rows) == size.num_rows
        for row in rows:
            if row < len(answers):
                seen.append(row)
                assert len(answers[row].prompt_ids) + len(answers[row].output_ids) <= size.width
                assert len(answers[row].output_ids) - 1 <= size.window
    assert sorted(seen) == list(range(len(answers)))


def make_steps(tiny, answers):
    vocabulary = torch.arange(0, tiny.shape.vocab_size, 2)
    rows = tiny.head_weight[vocabulary].clone()
    inside = torch.zeros(tiny.shape.vocab_size, dtype=torch.bool).index_fill_(0, vocabulary, True)
    trained = []
    for layout in ("autoregressive", "block"):
        shape = head_shape(tiny.shape, layout, len(TAPS), len(vocabulary), None)
        generator = torch.Generator().manual_seed(0)
        initial = heads.INIT[layout](shape, len(TAPS), tiny.final_norm_weight, generator)
        parameters = {name: value.clone().requires_grad_() for name, value in initial.items()}
        trained.append(Head(layout, shape, parameters, make_optimizers(parameters)))
    store = StateStore(tiny, TAPS, answers, state_sizes(tiny, TAPS, answers), rows)
    losses = Losses(rows, inside, tiny.embed(torch.tensor(3)).clone())
    return GradientSteps(store, trained, losses, half=False), trained


def test_rows_that_only_fill_a_batch_change_nothing(tiny, answers):
    steps, trained = make_steps(tiny, answers)
    found = []
    for rows, width in (([0, 1], 64), ([0, 1, len(answers)], 96)):
        size = BatchSize(len(rows), width, 32)
        results = steps(rows, size, torch.Generator().manual_seed(4))
        gradients = {name: value.grad.clone() for name, value in trained[0].parameters.items()}
        found.append((results["autoregressive"][0].clone(), gradients))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-4)


def test_both_heads_learn_a_few_answers(tiny, answers):
    steps, trained = make_steps(tiny, answers)
    generator, losses = torch.Generator().manual_seed(4), []
    for _ in range(12):
        results = steps([0, 1, 2], BatchSize(3, 64, 64), generator)
        losses.append({name: loss.item() for name, (loss, _) in results.items()})
        assert [len(right) for _, right in results.values()] == [5, BLOCK_SIZE - 1]
        for head in trained:
            head.learn(1.0)
    assert all(losses[-1][name] < losses[0][name] - 0.01 for name in losses[0])
    assert num_blocks(64) == 10


def test_memory_decides_how_many_parts(tiny, answers):
    sizes = [state_bytes(answer, tiny, len(TAPS)) for answer in answers]
    hidden = tiny.shape.hidden_size * 4
    assert sizes[0] == 35 * (8 + 2 * hidden) + 29 * hidden
    parts = parts_within(sizes[0] + sizes[1], answers, tiny, len(TAPS))
    assert [answer for part in parts for answer in part] == answers
    assert parts[0] == answers[:2]
    assert parts_within(1, answers, tiny, len(TAPS)) == [[answer] for answer in answers]

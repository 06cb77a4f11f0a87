"""Both heads in training on the target's own text: every stage written as whole heads and tried in the real loop."""

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from labkit.errors import InputError
from labkit.experiments.launch import parse_duration
from labkit.models.decoder import Decoder
from labkit.models.identity import model_identity
from labkit.models.tokenizer import Tokenizer
from labkit.provenance import code_digest, digest
from labkit.shapes import ModelShape
from labkit.training import data, heads
from labkit.training.checkpoints import LAYOUTS, head_config, head_shape, write_head
from labkit.training.evaluate import evaluate
from labkit.training.losses import DRAFT_STEPS, Losses
from labkit.training.prompts import make_prompts
from labkit.training.states import BatchSize, StateStore, parts_within, state_sizes
from labkit.training.step import GradientSteps

SETTINGS = ("num_prompts", "max_new_tokens", "max_prompt_len", "num_steps", "tokens_per_batch", "draft_vocab_size")
PRESETS: dict[str, dict[str, Any]] = {
    "full": dict(zip(SETTINGS, (60_000, 320, 700, 40_000, 32_768, 16_384), strict=True)),
    "smoke": dict(zip(SETTINGS, (12, 24, 160, 3, 1024, 2048), strict=True)),
}
PRESETS["full"] |= {"limit": None, "eval_tokens": 256}
PRESETS["smoke"] |= {"limit": 1, "eval_tokens": 12}
_SAMPLED_SHARE, _TEMPERATURE, _LEARNING_RATE = 0.3, 0.8, 2e-3
_PART_PROMPTS = 30_000  # that one seed makes and one file of text holds
_HELD_OUT = 256  # answers that only measure the loss
_STATES_SHARE = 0.6  # of the free memory, for the target's states
_SHOWN_STEPS = 100
_STAGES = (0.05, 0.15, 0.4, 1.0)  # shares of the training after which heads are written and tried
_GENERATION_SHARE = 0.35  # of the budget, at most
_FINAL_RESERVE_S = 45.0  # of the budget, for the last stage's trial


@dataclass
class Head:
    """One head in training."""

    layout: str
    shape: ModelShape
    parameters: heads.Parameters
    optimizers: list[torch.optim.Optimizer]
    losses: list[float] = field(default_factory=list)
    accuracy: list[list[float]] = field(default_factory=list)

    @property
    def net(self) -> heads.Net:
        return heads.NETS[self.layout](self.parameters, self.shape)

    def learn(self, rate: float) -> None:
        """One step along the gradients at `rate` times the learning rate."""
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * _LEARNING_RATE
            optimizer.step()


def make_optimizers(parameters: heads.Parameters) -> list[torch.optim.Optimizer]:
    """Muon (Jordan 2024) for the matrices, in updates as large as AdamW's (Liu et al. 2025); AdamW for the norms."""
    matrices = [value for value in parameters.values() if value.dim() == 2]
    others = [value for value in parameters.values() if value.dim() != 2]
    muon = torch.optim.Muon(matrices, lr=_LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)]


class Trainer:
    """Both heads, the target, and the text."""

    def __init__(self, arguments: argparse.Namespace, decoder: Decoder, tokenizer: Tokenizer):
        given = {name: getattr(arguments, name) for name in SETTINGS if getattr(arguments, name) is not None}
        self.settings: dict[str, Any] = PRESETS[arguments.preset] | given
        self.out, self.seed, self.model = arguments.out, arguments.seed, model_identity(arguments.model)
        self.max_mb: float | None = arguments.max_mb
        self.decoder, self.tokenizer = decoder, tokenizer
        self.device, self.start = decoder.device, time.monotonic()
        self.budget_s = parse_duration(arguments.budget, "--budget")
        # Ragged batches: the split kernel on a GPU, one masked call on a CPU.
        self.backend = arguments.backend or ("triton_split" if self.device.type == "cuda" else "sdpa_masked")
        count = decoder.shape.num_layers
        self.taps = tuple(sorted({min(1, count - 1), max(count // 2 - 1, 0), max(count - 4, 0)}))
        self.rng, self.num_tokens, self.curve = random.Random(self.seed), 0, []  # type: ignore[var-annotated]

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{self.elapsed():6.1f} s] {text}", file=sys.stderr, flush=True)

    def make_text(self) -> None:
        """Prompts, answers, and the draft vocabulary: the tokens that answers hold most often, and the stop tokens."""
        settings, stops, left = self.settings, self.tokenizer.stop_token_ids, self.settings["num_prompts"]
        answers: list[data.Answer] = []
        for seed in range(self.seed, self.seed + -(-left // _PART_PROMPTS)):
            answers += self._text(seed, min(left, _PART_PROMPTS))
            left -= _PART_PROMPTS
        if not answers:
            limit = _GENERATION_SHARE * self.budget_s
            raise InputError(f"--budget: no text within {limit:.0f} s of {self.budget_s:.0f}; wanted more time")
        usable = data.usable(answers)
        if len(usable) < 2:
            found = f"{len(usable)} of {len(answers)} answers have 16 tokens and vary"
            raise InputError(f"--num-prompts: {found}; wanted more prompts")
        self.rng.shuffle(usable)
        count = min(_HELD_OUT, len(usable) // 2)
        self.held_out, self.answers = usable[:count], usable[count:]
        tokens = torch.tensor([token for answer in self.answers for token in answer.output_ids])
        counts = torch.bincount(tokens, minlength=self.decoder.shape.vocab_size)
        counts[list(stops)] = counts.max() + 1
        size = min(settings["draft_vocab_size"], len(counts))
        self.vocabulary = counts.argsort(descending=True, stable=True)[:size].sort().values
        self.coverage = float(counts[self.vocabulary].sum() / counts.sum())
        self.facts: dict[str, Any] = {"num_answers": len(answers)}
        self.facts |= {"num_learnt_answers": len(self.answers), "num_answer_tokens": len(tokens)}
        self.facts |= {"sampled_share": _SAMPLED_SHARE, "sampled_temperature": _TEMPERATURE}
        self.facts["generation_s"] = round(self.elapsed(), 1)
        self.say(f"{len(self.answers)} of {len(answers)} answers to learn from, {len(tokens)} tokens")

    def _text(self, seed: int, num_prompts: int) -> list[data.Answer]:
        """Answers to the prompts of a seed: those of an earlier run, or new ones, which are kept."""
        settings = self.settings | {"num_prompts": num_prompts}
        facts = {name: settings[name] for name in ("num_prompts", "max_new_tokens", "max_prompt_len")}
        facts |= {"target": self.model, "seed": seed, "temperature": _TEMPERATURE, "sampled": _SAMPLED_SHARE}
        stored = Path(self.out) / f"text-{digest(facts)}.npz"
        if stored.exists():
            answers = data.read_answers(stored)
            self.say(f"{len(answers)} answers of an earlier run in {stored.name}")
        elif answers := self._answers(seed, num_prompts):
            data.write_answers(stored, answers)
        return answers

    def _answers(self, seed: int, num_prompts: int) -> list[data.Answer]:
        """What the target answers to the prompts, as far as its share of the budget goes."""
        same: dict[str, Any] = {"seed": seed, "backend": self.backend}
        longest = self.settings["max_prompt_len"]
        prompts = make_prompts(self.decoder, self.tokenizer, num_prompts, max_prompt_len=longest, **same)
        self.say(f"{len(prompts)} prompts, {sum(map(len, prompts))} tokens")
        return data.generate(
            self.decoder,
            prompts,
            max_new_tokens=self.settings["max_new_tokens"],
            stop_token_ids=self.tokenizer.stop_token_ids,
            sampled_share=_SAMPLED_SHARE,
            temperature=_TEMPERATURE,
            deadline=self.start + _GENERATION_SHARE * self.budget_s,
            **same,
        )

    def make_heads(self) -> None:
        """Seeded heads and their optimizers."""
        target, size = self.decoder.shape, len(self.vocabulary)
        vocabulary = self.vocabulary.to(self.device)
        self.head_rows = self.decoder.head_weight[vocabulary].clone()
        in_vocabulary = torch.zeros(target.vocab_size, dtype=torch.bool, device=self.device)
        in_vocabulary[vocabulary] = True
        self.mask_token_id = self.tokenizer.stop_token_ids[-1]
        mask_embedding = self.decoder.embed(torch.tensor(self.mask_token_id, device=self.device)).clone()
        self.losses = Losses(self.head_rows, in_vocabulary, mask_embedding)
        self.state_sizes = state_sizes(self.decoder, self.taps, self.answers)
        self.heads = []
        for layout in LAYOUTS:
            generator = torch.Generator().manual_seed(self.seed)
            shape = head_shape(target, layout, len(self.taps), size, self.max_mb)
            initial = heads.INIT[layout](shape, len(self.taps), self.decoder.final_norm_weight.cpu(), generator)
            parameters = {name: value.to(self.device).requires_grad_() for name, value in initial.items()}
            self.heads.append(Head(layout, shape, parameters, make_optimizers(parameters)))

    def steps(self) -> Iterator[tuple[GradientSteps, list[int], BatchSize]]:
        """Epoch after epoch. Text whose states do not fit into memory together takes turns in parts of its own."""
        limit = _STATES_SHARE * data.free_memory(self.device)
        parts, steps = parts_within(limit, self.answers, self.decoder, len(self.taps)), None
        self.say(f"their states in {len(parts)} part(s)")
        while True:
            for part in parts:
                if steps is None or len(parts) > 1:
                    steps = None  # the states and graphs before go first
                    steps = self._gradient_steps(part)
                for rows, size in steps.store.plan(self.settings["tokens_per_batch"], self.rng):
                    yield steps, rows, size

    def _gradient_steps(self, answers: Sequence[data.Answer]) -> GradientSteps:
        store = StateStore(self.decoder, self.taps, answers, self.state_sizes, self.head_rows)
        return GradientSteps(store, self.heads, self.losses, half=self.decoder.dtype != "float32")

    def train(self) -> None:
        """All steps, or as many as the budget allows; the learning rate falls with whichever is nearer its end."""
        num_steps, source, stages = self.settings["num_steps"], self.steps(), list(_STAGES)
        kept = self._gradient_steps(self.held_out)
        begin, end = self.elapsed(), 0.0
        generator = torch.Generator().manual_seed(self.seed)
        step, done = 0, 0.0
        while done < 1:
            steps, rows, size = next(source)
            step += 1
            if step == 1:  # all states are there now
                begin = self.elapsed()
                end = max(self.budget_s - _FINAL_RESERVE_S, begin + 1)
            done = max(step / num_steps, (self.elapsed() - begin) / (end - begin))
            falling = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
            results = steps(rows, size, generator)
            for head in self.heads:
                head.learn(min(1.0, step / 100) * falling)
            answers = steps.store.answers
            self.num_tokens += sum(len(answers[row].output_ids) for row in rows if row < len(answers))
            if step % _SHOWN_STEPS == 0 or step <= 3:
                for head in self.heads:
                    loss, right = results[head.layout]
                    head.losses.append(round(loss.item(), 4))
                    head.accuracy.append([round(value, 4) for value in right.tolist()])
            if step % (5 * _SHOWN_STEPS) == 0 or step <= 3:
                shown = (f"{head.layout} loss {head.losses[-1]} right {head.accuracy[-1]}" for head in self.heads)
                self.say(f"step {step}: {'; '.join(shown)}")
            if done >= stages[0]:
                stages, start = [share for share in stages if share > done], self.elapsed()
                self.finish_stage(step, self._held_out_losses(kept), final=done >= 1)
                begin = min(begin + self.elapsed() - start, end - 1)  # a trial is no training

    def _held_out_losses(self, kept: GradientSteps) -> dict[str, float]:
        """Mean loss of each head over answers that it did not learn from."""
        generator, found = torch.Generator().manual_seed(self.seed), []
        for rows, size in kept.store.plan(self.settings["tokens_per_batch"], random.Random(self.seed)):
            losses = kept.losses_of(rows, size, generator)
            count = sum(len(self.held_out[row].output_ids) for row in rows if row < len(self.held_out))
            found.append((count, {layout: loss.item() for layout, (loss, _) in losses.items()}))
        total = sum(count for count, _ in found)
        return {name: round(sum(count * loss[name] for count, loss in found) / total, 4) for name in found[0][1]}

    def finish_stage(self, step: int, losses: dict[str, float], *, final: bool) -> None:
        """Write the heads, try them, and write them again with what was found in their cards."""
        self._write(step)
        limit, tokens = self.settings["limit"], self.settings["eval_tokens"]
        if not final:
            limit, tokens = min(6, limit or 6), min(96, tokens)
        folders = {head.layout: self.folder(head) for head in self.heads}
        options = {"max_new_tokens": tokens, "backend": self.backend, "with_ngram": final}  # it learns nothing
        found = evaluate(self.decoder, self.tokenizer, folders, limit=limit, **options)
        stage = {"step": step, "num_trained_tokens": self.num_tokens, "prompts_per_workload": limit or "all"}
        stage |= {"max_new_tokens": tokens, "loss_of_answers_not_trained": losses}
        self.curve.append(stage | {"held_out": found})
        self._write(step)
        for name, groups in found.items():
            shown = {key: value["mean_acceptance_length"] for key, value in groups.items() if isinstance(value, dict)}
            self.say(f"step {step}, {name}, k={groups['num_speculative_tokens']}: {shown}")

    def folder(self, head: Head) -> Path:
        """Where a head is written."""
        return Path(self.out) / f"{self.decoder.name.split('/')[-1]}-{head.layout}"

    def _write(self, step: int) -> None:
        target = self.decoder.shape
        for head in self.heads:
            facts = {"draft_vocab_size": len(self.vocabulary), "mask_token_id": self.mask_token_id}
            config = head_config(head.shape, head.layout, target, self.taps, **facts)
            what = (head.parameters, config, self.vocabulary, self._card(head, step), self.state_sizes)
            write_head(self.folder(head), *what)

    def _card(self, head: Head, step: int) -> dict[str, Any]:
        return {
            "target": self.model,
            "layout": head.layout,
            "num_parameters": sum(value.numel() for value in head.parameters.values()),
            "seed": self.seed,
            "settings": self.settings | {"learning_rate": _LEARNING_RATE, "draft_steps": DRAFT_STEPS},
            "data": self.facts
            | {
                "prompts": "standard library and its reference text, templates, messages written by the target; "
                "none of data/reference/prompts",
                "answers": "by the target in its chat template; cut before over 20% of their 4-grams repeat",
                "draft_vocabulary_coverage": round(self.coverage, 5),
            },
            "num_steps": step,
            "num_trained_tokens": self.num_tokens,
            "seconds": round(self.elapsed(), 1),
            "loss": {"every": _SHOWN_STEPS, "values": head.losses},
            "top1_agreement_by_step": {"every": _SHOWN_STEPS, "values": head.accuracy[-5:]},
            "held_out": [
                stage | {"held_out": {k: v for k, v in stage["held_out"].items() if k in (head.layout, "ngram")}}
                for stage in self.curve
            ],
            "versions": {"torch": torch.__version__, "code": code_digest(["training"])},
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
        }

"""Both heads in training on the target's own text: every stage written as whole heads and tried in the real loop."""

import argparse
import contextlib
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.errors import InputError
from labkit.experiments.launch import parse_duration
from labkit.models.decoder import Decoder
from labkit.models.identity import model_identity
from labkit.models.layers import Taps
from labkit.models.tokenizer import Tokenizer
from labkit.provenance import code_digest, digest
from labkit.shapes import ModelShape
from labkit.training import data, heads
from labkit.training.checkpoints import BLOCK_SIZE, LAYOUTS, head_config, head_shape, write_head
from labkit.training.evaluate import evaluate
from labkit.training.losses import DRAFT_STEPS, Losses
from labkit.training.prompts import make_prompts

SETTINGS = ("num_prompts", "max_new_tokens", "max_prompt_len", "num_steps", "tokens_per_batch", "draft_vocab_size")
PRESETS: dict[str, dict[str, Any]] = {
    "full": dict(zip(SETTINGS, (30_000, 320, 700, 6000, 32_768, 8192), strict=True)),
    "smoke": dict(zip(SETTINGS, (12, 24, 160, 3, 1024, 2048), strict=True)),
}
PRESETS["full"] |= {"limit": None, "eval_tokens": 256}
PRESETS["smoke"] |= {"limit": 1, "eval_tokens": 12}
_SAMPLED_SHARE, _TEMPERATURE, _LEARNING_RATE = 0.3, 0.8, 2e-3
_STAGES = (0.1, 0.25, 0.5, 1.0)  # shares of the training after which heads are written and tried
_GENERATION_SHARE = 0.35  # of the budget, at most
_FINAL_RESERVE_S = 45.0  # of the budget, for the last stage's trial


@dataclass
class Head:
    """One head in training."""

    layout: str
    shape: ModelShape
    parameters: heads.Parameters
    optimizer: torch.optim.AdamW
    losses: list[float] = field(default_factory=list)
    accuracy: list[list[float]] = field(default_factory=list)

    @property
    def net(self) -> heads.Net:
        return heads.NETS[self.layout](self.parameters, self.shape)


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
        self.state_sizes: Tensor | None = None
        self.rng, self.num_tokens, self.curve = random.Random(self.seed), 0, []  # type: ignore[var-annotated]

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{self.elapsed():6.1f} s] {text}", file=sys.stderr, flush=True)

    def make_text(self) -> None:
        """Prompts, answers, and the draft vocabulary: the tokens that answers hold most often, and the stop tokens."""
        settings, stops = self.settings, self.tokenizer.stop_token_ids
        facts = {name: settings[name] for name in ("num_prompts", "max_new_tokens", "max_prompt_len")}
        facts |= {"target": self.model, "seed": self.seed, "temperature": _TEMPERATURE, "sampled": _SAMPLED_SHARE}
        stored = Path(self.out) / f"text-{digest(facts)}.npz"
        if stored.exists():
            answers = data.read_answers(stored)
            self.say(f"{len(answers)} answers of an earlier run in {stored.name}")
        else:
            answers = self._answers(stops)
            if not answers:
                limit = _GENERATION_SHARE * self.budget_s
                raise InputError(f"--budget: no text within {limit:.0f} s of {self.budget_s:.0f}; wanted more time")
            data.write_answers(stored, answers)
        self.answers = data.usable(answers)
        if not self.answers:
            found = f"none of {len(answers)} answers has 16 tokens and varies"
            raise InputError(f"--num-prompts: {found}; wanted more prompts")
        tokens = torch.tensor([token for answer in self.answers for token in answer.output_ids])
        counts = torch.bincount(tokens, minlength=self.decoder.shape.vocab_size)
        counts[list(stops)] = counts.max() + 1
        size = min(settings["draft_vocab_size"], len(counts))
        self.vocabulary = counts.argsort(descending=True, stable=True)[:size].sort().values
        self.coverage = float(counts[self.vocabulary].sum() / counts.sum())
        self.facts: dict[str, Any] = {"num_answers": len(answers)}
        self.facts |= {"num_usable_answers": len(self.answers), "num_answer_tokens": len(tokens)}
        self.facts |= {"sampled_share": _SAMPLED_SHARE, "sampled_temperature": _TEMPERATURE}
        self.facts["generation_s"] = round(self.elapsed(), 1)
        self.say(f"{len(self.answers)} of {len(answers)} answers kept, {len(tokens)} tokens")

    def _answers(self, stops: Sequence[int]) -> list[data.Answer]:
        """What the target answers to the prompts, as far as its share of the budget goes."""
        same: dict[str, Any] = {"seed": self.seed, "backend": self.backend}
        count, longest = self.settings["num_prompts"], self.settings["max_prompt_len"]
        prompts = make_prompts(self.decoder, self.tokenizer, count, max_prompt_len=longest, **same)
        self.say(f"{len(prompts)} prompts, {sum(map(len, prompts))} tokens")
        return data.generate(
            self.decoder,
            prompts,
            max_new_tokens=self.settings["max_new_tokens"],
            stop_token_ids=stops,
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
        self.losses = Losses(self.head_rows, in_vocabulary, mask_embedding, self.rng)
        self.heads = []
        for layout in LAYOUTS:
            generator = torch.Generator().manual_seed(self.seed)
            shape = head_shape(target, layout, len(self.taps), size, self.max_mb)
            initial = heads.INIT[layout](shape, len(self.taps), self.decoder.final_norm_weight.cpu(), generator)
            parameters = {name: value.to(self.device).requires_grad_() for name, value in initial.items()}
            optimizer = torch.optim.AdamW(parameters.values(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
            self.heads.append(Head(layout, shape, parameters, optimizer))

    def batches(self) -> Iterator[list[data.Answer]]:
        """Epoch after epoch, answers of like length together, batches in seeded order."""
        limit = self.settings["tokens_per_batch"]
        while True:
            self.rng.shuffle(self.answers)
            # Length decides the batch, the shuffle which of equal ones share it.
            order = sorted(self.answers, key=lambda answer: (len(answer.prompt_ids) + len(answer.output_ids)) // 16)
            found: list[list[data.Answer]] = [[]]
            for answer in order:
                length = len(answer.prompt_ids) + len(answer.output_ids)
                if found[-1] and (len(found[-1]) + 1) * length > limit:
                    found.append([])
                found[-1].append(answer)
            self.rng.shuffle(found)
            yield from found

    def batch(self, answers: Sequence[data.Answer]) -> heads.Batch:
        """One pass of the target over whole sequences: states, and probabilities over the draft vocabulary."""
        texts = [[*answer.prompt_ids, *answer.output_ids] for answer in answers]
        width = -(-max(map(len, texts)) // 16) * 16
        token_ids = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=self.device)
        first = torch.tensor([len(answer.prompt_ids) - 1 for answer in answers], device=self.device)
        lens = torch.tensor([len(text) for text in texts], device=self.device)
        window = max(max(len(answer.output_ids) for answer in answers) - 1, BLOCK_SIZE)
        hidden, taps = self.decoder.shape.hidden_size, (*self.taps, self.decoder.shape.num_layers)
        size = (len(texts), width, len(taps) * hidden)
        out = torch.empty(size, dtype=self.decoder.activation_dtype, device=self.device)
        cache = self.decoder.new_cache(len(texts), width)
        self.decoder.forward(token_ids, cache, backend="sdpa", logits="last", taps=Taps(taps, out))
        embedded = self.decoder.embed(token_ids).clone()
        places = (first[:, None] + 1 + torch.arange(window, device=self.device)).clamp(max=width - 1)
        final = out[torch.arange(len(texts), device=self.device)[:, None], places, -hidden:]
        teacher = F.linear(final.to(self.head_rows.dtype), self.head_rows).softmax(dim=-1, dtype=torch.float32)
        states = out[..., :-hidden]
        if self.state_sizes is None:  # a few dimensions of the residual stream are a thousand times the others
            valid = torch.arange(width, device=self.device) < lens[:, None]
            self.state_sizes = states[valid].float().square().mean(dim=0).sqrt().clamp(min=1e-4)
        states = (states.float() / self.state_sizes).to(final.dtype)
        return heads.Batch(token_ids, first, lens, embedded, states, teacher.to(final.dtype))

    def train(self) -> None:
        """All steps, or as many as the budget allows; the learning rate falls with whichever is nearer its end."""
        num_steps, source, stages = self.settings["num_steps"], self.batches(), list(_STAGES)
        begin = self.elapsed()
        end = max(self.budget_s - _FINAL_RESERVE_S, begin + 1)
        half = self.decoder.dtype != "float32"
        autocast = torch.autocast(self.device.type, torch.bfloat16) if half else contextlib.nullcontext()
        step, done = 0, 0.0
        while done < 1:
            step, answers = step + 1, next(source)
            batch = self.batch(answers)
            done = max(step / num_steps, (self.elapsed() - begin) / (end - begin))
            falling = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
            rate = _LEARNING_RATE * min(1.0, step / 100) * falling
            for head in self.heads:
                with autocast:
                    loss, right = self.losses(head.net, batch)
                head.optimizer.param_groups[0]["lr"] = rate
                head.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(head.parameters.values(), 1.0)
                head.optimizer.step()
                if step % 20 == 0 or step <= 3:
                    head.losses.append(round(loss.item(), 4))
                    head.accuracy.append([round(value.item(), 4) for value in right])
            self.num_tokens += sum(len(answer.output_ids) for answer in answers)
            if step % 100 == 0 or step <= 3:
                shown = (f"{head.layout} loss {head.losses[-1]} right {head.accuracy[-1]}" for head in self.heads)
                self.say(f"step {step}: {'; '.join(shown)}")
            if done >= stages[0]:
                stages = [share for share in stages if share > done]
                self.finish_stage(step, final=done >= 1)

    def finish_stage(self, step: int, *, final: bool) -> None:
        """Write the heads, try them, and write them again with what was found in their cards."""
        self._write(step)
        limit, tokens = self.settings["limit"], self.settings["eval_tokens"]
        if not final:
            limit, tokens = min(6, limit or 6), min(96, tokens)
        folders = {head.layout: self.folder(head) for head in self.heads}
        options = {"max_new_tokens": tokens, "backend": self.backend, "with_ngram": final}  # it learns nothing
        found = evaluate(self.decoder, self.tokenizer, folders, limit=limit, **options)
        stage = {"step": step, "num_trained_tokens": self.num_tokens, "prompts_per_workload": limit or "all"}
        self.curve.append(stage | {"max_new_tokens": tokens, "held_out": found})
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
            "loss": {"every": 20, "values": head.losses},
            "top1_agreement_by_step": {"every": 20, "values": head.accuracy[-5:]},
            "held_out": [
                stage | {"held_out": {k: v for k, v in stage["held_out"].items() if k in (head.layout, "ngram")}}
                for stage in self.curve
            ],
            "versions": {"torch": torch.__version__, "code": code_digest(["training"])},
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
        }

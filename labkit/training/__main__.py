"""Train an autoregressive and a block head for a target: ``python -m labkit.training --model NAME|DIR --out DIR``.

The target writes the text (`data`; it is kept beside the heads, for a next run with the same settings), both heads
learn from the same passes of it, and each stage of training is tried on the committed prompts, none of which was
trained on. What is on disk is always a whole head: a run that is cut leaves that of its last stage.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from labkit.errors import InputError
from labkit.experiments import common
from labkit.models.tokenizer import load_tokenizer
from labkit.models.weights import load_model
from labkit.training.trainer import PRESETS, SETTINGS, Trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 when both heads are written, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m labkit.training", description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", metavar="DIR|NAME", help="the target")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the heads' folders go")
    parser.add_argument("--preset", choices=PRESETS, default="full", help="smoke: tiny sizes, to try everything")
    parser.add_argument("--budget", default="5m", metavar="TIME", help="time for everything (default 5m)")
    parser.add_argument("--max-mb", type=float, metavar="MB", help="largest file of a head; its MLP gives way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", help="attention of generation and trials (default triton_split on a GPU)")
    parser.add_argument("--dtype", default=None, help="of the target (default bfloat16 on a GPU, else float32)")
    for name in SETTINGS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="in place of the preset's")
    arguments = parser.parse_args(argv)
    try:
        device = common.device()
        dtype = arguments.dtype or ("bfloat16" if device == "cuda" else "float32")
        torch.manual_seed(arguments.seed)
        decoder = load_model(arguments.model, dtype=dtype, device=device)
        trainer = Trainer(arguments, decoder, load_tokenizer(arguments.model))
        trainer.say(f"{decoder.name} in {dtype} on {device}")
        trainer.make_text()
        trainer.make_heads()
        trainer.train()
    except InputError as error:
        print(f"python -m labkit.training: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Drafters by the names that experiments and results use.

``ngram``; ``autoregressive`` or ``block``: the head under ``data/models`` that was trained for the target; a folder: a
published head. ``+tree`` behind a head's name drafts trees, ``+confidence`` stops where the head is unsure.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import InputError
from labkit.paths import DATA

if TYPE_CHECKING:
    from labkit.models.decoder import Decoder
    from labkit.models.target import ModelTarget
    from labkit.speculation import Drafter

SHIPPED = ("autoregressive", "block")
OPTIONS = ("tree", "confidence")
TREE_TOP_K, TREE_NODES, MIN_CONFIDENCE = 4, 16, 0.4


def split_name(name: str) -> tuple[str, str]:
    """Name without its option, and the option or ""."""
    base, plus, option = name.rpartition("+")
    return (base, option) if plus and option in OPTIONS else (name, "")


def num_nodes(name: str, k: int) -> int:
    """Tokens of a draft with k levels: k of a chain; of a tree its nodes, fewer where its levels hold no more."""
    return min(TREE_NODES, TREE_TOP_K + TREE_TOP_K**2 * (k - 1)) if split_name(name)[1] == "tree" else k


def drafter_folder(name: str, target: str) -> Path | None:
    """Folder of a head's weights; None for a drafter without any.

    Raises InputError: no such drafter, n-gram with an option, no head for this target, or a folder without one.
    """
    base, option = split_name(name)
    if base == "ngram" and not option:
        return None
    if base in SHIPPED:
        folder = DATA / "models" / f"{target}-{base}"
        if folder.is_dir():
            return folder
        raise InputError(
            f"drafter {base}: no head for target {target} under data/models; wanted a folder (--draft-model)"
        )
    if base and Path(base).is_dir():
        if missing := [file for file in ("config.json", "*.safetensors") if not any(Path(base).glob(file))]:
            raise InputError(f"drafter {base}: wanted a head's folder with {missing[0]} in it, which is missing")
        return Path(base)
    known = f"ngram, {', '.join(SHIPPED)} or a head's folder, with +{' or +'.join(OPTIONS)} behind a head"
    raise InputError(f"drafter {name!r}: no such name; wanted {known}")


def taps_of(folders: list[Path], decoder: Decoder) -> list[int]:
    """Layers of the target that these heads read. Raises InputError: a head that does not fit the target."""
    from labkit.drafting.checkpoint import read_checkpoint

    return [tap for folder in folders for tap in read_checkpoint(folder, decoder).taps]


def make_drafter(
    name: str,
    folder: Path | None,
    target: ModelTarget | None,
    *,
    temperature: float = 0.0,
    captured_k: int | None = None,
) -> Drafter:
    """The drafter of a name. ``target`` may be None where there is no folder.

    captured_k : capture the drafts of a head, k tokens each, as CUDA graphs: greedy chains and trees of one request.
        ``+confidence`` stays eager: the host looks at it after each token.

    Raises InputError: as `labkit.drafting.checkpoint.read_checkpoint`.
    """
    from labkit.drafting.autoregressive import AutoregressiveDrafter, AutoregressiveHead
    from labkit.drafting.block import BlockDrafter, BlockHead
    from labkit.drafting.captured import CapturedAutoregressive, CapturedBlock
    from labkit.drafting.checkpoint import read_checkpoint
    from labkit.drafting.ngram import NgramDrafter
    from labkit.drafting.tree import TreeShape

    if folder is None or target is None:
        return NgramDrafter()
    option = split_name(name)[1]
    options: dict[str, Any] = {"temperature": temperature}
    options["tree"] = TreeShape(TREE_TOP_K, TREE_NODES) if option == "tree" else None
    options["min_confidence"] = MIN_CONFIDENCE if option == "confidence" else 0.0
    checkpoint = read_checkpoint(folder, target.decoder)
    if captured_k is not None and option != "confidence" and temperature == 0:
        kind = CapturedBlock if checkpoint.layout == "dflash" else CapturedAutoregressive
        return kind.from_folder(folder, target, num_speculative_tokens=captured_k, tree=options["tree"])
    if checkpoint.layout == "dflash":
        return BlockDrafter(BlockHead(checkpoint), target, **options)
    backend = "triton_split" if target.decoder.device.type == "cuda" else "sdpa"
    return AutoregressiveDrafter(AutoregressiveHead(checkpoint), target, backend=backend, **options)

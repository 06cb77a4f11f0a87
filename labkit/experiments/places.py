"""What a run calls its models, drafters and prompt files, and where on this machine those lie."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.models.decoder import Decoder


def by_name(points: list[dict[str, Any]], *, drafters: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Points with folders and files called by what they hold, and where those lie (``local`` of `run_sweep`).

    drafters : whether drafters have weights of their own; those of whole forwards are made of the target.
    """
    from labkit.models.identity import model_identity

    local: dict[str, Any] = {}
    if drafters:
        points, local = _name_drafters(points)
    if (target := points[0].get("target")) and (identity := model_identity(target)) != target:
        local["model_dir"] = str(Path(target).resolve())
        points = [point | {"target": identity} for point in points]
    points, prompt_files = _name_workloads(points)
    return points, local | prompt_files


def model_source(point: Mapping[str, Any]) -> str:
    """What to load for a point: its target by name, or the folder that its identity stands for."""
    return point.get("model_dir") or point["target"]


def prompt_source(point: Mapping[str, Any]) -> str:
    """What to load a point's prompts from: its workload, or the file that its name stands for."""
    return point.get("prompt_files", {}).get(point["workload"], point["workload"])


def draft_folder(point: Mapping[str, Any], drafter: str) -> Path | None:
    """Where the weights of a point's drafter lie on this machine; None: it has none."""
    folder = point.get("draft_dirs", {}).get(drafter)
    return Path(folder) if folder else None


def taps(point: Mapping[str, Any], decoder: Decoder) -> list[int]:
    """Layers of the target that any drafter of the run reads."""
    from labkit.drafting.named import taps_of

    return taps_of([Path(folder) for folder in point.get("draft_dirs", {}).values()], decoder)


def _name_workloads(points: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Points with prompt files called by their name and a digest of what they hold."""
    files = {str(point["workload"]) for point in points if str(point.get("workload", "")).endswith(".jsonl")}
    names = {file: f"{Path(file).stem}@{sha256(Path(file).read_bytes()).hexdigest()[:8]}" for file in files}
    named = [
        point | {"workload": names.get(point["workload"], point["workload"])} if names else point for point in points
    ]
    return named, {"prompt_files": {name: str(Path(file).resolve()) for file, name in names.items()}} if names else {}


def _name_drafters(points: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Points with heads called by what their folders hold, and where those lie."""
    from labkit.drafting.checkpoint import check_checkpoint
    from labkit.drafting.named import drafter_folder, split_name
    from labkit.experiments.common import target_shape
    from labkit.models.identity import model_identity

    names: dict[str, str] = {}
    folders: dict[str, str] = {}
    for name, target in {(point["drafter"], point["target"]) for point in points if point.get("drafter")}:
        folder, option = drafter_folder(name, target), split_name(name)[1]
        names[name] = name
        if folder is not None:
            check_checkpoint(folder, Path(target).name, target_shape(target))
            names[name] = model_identity(str(folder)) + (f"+{option}" if option else "")
            folders[names[name]] = str(folder.resolve())
    named = [point | {"drafter": names[point["drafter"]]} if point.get("drafter") else point for point in points]
    return named, {"draft_dirs": folders} if folders else {}

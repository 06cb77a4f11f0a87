"""What a local model is called in results: a folder by its name and a digest of what it holds, never by its path."""

import hashlib
import json
from pathlib import Path

# Files up to this size are read whole; of larger ones so much from each tensor, twice.
_WHOLE_BYTES, _SAMPLE_BYTES = 64 << 20, 4096


def model_identity(model: str) -> str:
    """``<folder name>@<8 hex digits>`` of a folder; the name of any other model as it is.

    The digest covers configuration, tokenizer and weights: of files beyond 64 MiB the size, the header, and the start
    and the middle of every tensor, which is quick and tells any two trainings apart.
    """
    folder = Path(model)
    if model == "smollm2-135m" or model.startswith("random:") or not folder.is_dir():
        return model
    state = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jinja", ".safetensors")):
        state.update(f"{path.name} {path.stat().st_size} ".encode())
        for part in _parts(path):
            state.update(part)
    return f"{folder.resolve().name}@{state.hexdigest()[:8]}"


def _parts(path: Path) -> list[bytes]:
    if path.suffix != ".safetensors" or path.stat().st_size <= _WHOLE_BYTES:
        return [path.read_bytes()]
    with open(path, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        start, parts = file.tell(), [header]
        spans = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        for begin, end in spans:
            for offset in (begin, (begin + end) // 2):
                file.seek(start + offset)
                parts.append(file.read(min(_SAMPLE_BYTES, end - offset)))
    return parts

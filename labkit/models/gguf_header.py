"""The header of a GGUF file, walked once before anything believes it: every count and size against the file's length.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

import functools
import math
import mmap
import struct
from pathlib import Path

from labkit.errors import InputError

MAX_TENSORS, MAX_FIELDS, MAX_DIMENSIONS, MAX_NESTING = 1 << 16, 1 << 16, 4, 2
MAX_NAME_BYTES, MAX_ELEMENTS = 1 << 16, 1 << 40
_UINT32, _STRING, _ARRAY = 4, 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class _Walker:
    """A place in the file; every read is inside it."""

    def __init__(self, data: mmap.mmap, path: Path):
        self._data, self._path, self.place = data, path, 0

    def fail(self, problem: str) -> InputError:
        return InputError(f"{self._path} must be a whole GGUF file, got {problem} at byte {self.place}")

    def skip(self, num_bytes: int, what: str) -> None:
        if num_bytes > len(self._data) - self.place:
            raise self.fail(f"{what} of {num_bytes} bytes in a file of {len(self._data)}")
        self.place += num_bytes

    def number(self, form: str) -> int:
        begin = self.place
        self.skip(struct.calcsize(form), "a number")
        return int(struct.unpack_from(form, self._data, begin)[0])

    def count(self, most: int, what: str) -> int:
        value = self.number("<Q")
        if value > most:
            raise self.fail(f"{value} {what}, at most {most} are read")
        return value

    def name(self) -> bytes:
        length = self.number("<Q")
        if length > MAX_NAME_BYTES:
            raise self.fail(f"a name of {length} bytes")
        self.skip(length, "a name")
        return self._data[self.place - length : self.place]

    def value(self, kind: int, depth: int = 0) -> None:
        if kind == _STRING:
            self.skip(self.number("<Q"), "a text")
        elif kind == _ARRAY and depth < MAX_NESTING:
            inner, length = self.number("<I"), self.number("<Q")
            if inner in _SCALAR_BYTES:
                self.skip(length * _SCALAR_BYTES[inner], "an array")
                return
            if length > len(self._data) // 8:  # a text or an array takes 8 bytes at least
                raise self.fail(f"an array of {length} entries")
            for _ in range(length):
                self.value(inner, depth + 1)
        elif kind in _SCALAR_BYTES:
            self.skip(_SCALAR_BYTES[kind], "a value")
        else:
            raise self.fail(f"a value of the unknown type {kind}")


def check_header(path: Path) -> None:
    """Raise InputError unless every field, name and tensor of the header lies inside the file. Allocates nothing.

    A tensor's size must follow from its dimensions and type, and its data lie behind the header.
    """
    if not path.stat().st_size:
        raise InputError(f"{path} must be a whole GGUF file, got an empty one")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        walker = _Walker(data, path)
        walker.skip(4, "the mark")
        if data[:4] != b"GGUF" or (version := walker.number("<I")) not in (2, 3):
            raise walker.fail(f"the mark {data[:4]!r}" if data[:4] != b"GGUF" else f"version {version}")
        num_tensors, num_fields = walker.count(MAX_TENSORS, "tensors"), walker.count(MAX_FIELDS, "fields")
        alignment = 32
        for _ in range(num_fields):
            name, kind, begin = walker.name(), walker.number("<I"), walker.place
            walker.value(kind)
            if name == b"general.alignment" and kind == _UINT32:
                alignment = struct.unpack_from("<I", data, begin)[0]
        if alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise walker.fail(f"an alignment of {alignment}")
        end = max([_end_of_tensor(walker, alignment) for _ in range(num_tensors)], default=0)
        start = -(-walker.place // alignment) * alignment
        if start + end > len(data):
            raise walker.fail(f"tensors up to byte {start + end} in a file of {len(data)}")


def _end_of_tensor(walker: _Walker, alignment: int) -> int:
    """Where a tensor ends, bytes from the start of the data."""
    walker.name()
    num_dimensions = walker.number("<I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise walker.fail(f"a tensor of {num_dimensions} dimensions")
    sizes = [walker.number("<Q") for _ in range(num_dimensions)]
    kind, offset, num_elements = walker.number("<I"), walker.number("<Q"), math.prod(sizes)
    block, block_bytes = _blocks().get(kind, (0, 0))
    if not block or not 0 < num_elements <= MAX_ELEMENTS or sizes[0] % block or offset % alignment:
        raise walker.fail(f"a tensor of type {kind}, sizes {sizes}, offset {offset}")
    return offset + num_elements // block * block_bytes


@functools.cache
def _blocks() -> dict[int, tuple[int, int]]:
    """Type -> elements and bytes of one block."""
    from gguf import GGML_QUANT_SIZES

    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}

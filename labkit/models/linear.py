"""Linear layers behind one seam: a callable from ``[rows, in]`` to ``[rows, out]``, by name of how it runs.

Decode and verify read every weight once, so what counts is how near a layout comes to the memory's bandwidth with 1 to
8 rows. That depends on the CPU, hence `choose_linear_backend` times the candidates.
"""

import functools
import hashlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.errors import BackendUnavailable, InputError
from labkit.paths import cache_dir, write_whole
from labkit.provenance import cpu_name
from labkit.shapes import ModelShape
from labkit.timing import sample_rounds

Linear = Callable[[Tensor], Tensor]
LINEAR_BACKENDS = ("torch.linear", "mkldnn-packed", "fbgemm-fp16", "fbgemm-fp16x2")

_FP16_MAX = 65504.0
# 2 ** 11: lifts what half precision leaves of a float32 to the range of another half.
_REST_SCALE = 2048.0
# Up to here the two half-precision products read less than they compute.
_FP16X2_MAX_ROWS = 8
# Models below this many weights in their layers stay in the CPU's caches: nothing to choose.
_TRIAL_MIN_WEIGHTS = 4_000_000
# More float32 bytes than a large last-level cache holds, so that the trial reads memory as a forward does.
_TRIAL_WEIGHTS = 32_000_000
_TRIAL_ROWS = (1, 5)
_TRIAL_ROUNDS = 5


def activation_dtype(linear_backend: str, dtype: str) -> torch.dtype:
    """Dtype of the activations between the layers: FBGEMM takes and returns float32 whatever the weights are."""
    return torch.float32 if linear_backend.startswith("fbgemm") else getattr(torch, dtype)


def make_linear(weight: Tensor, bias: Tensor | None, linear_backend: str) -> Linear:
    """``x @ weight.T + bias`` with `weight` ``[out, in]`` as PyTorch stores it.

    linear_backend : ``"torch.linear"``: as is. ``"mkldnn-packed"``: reordered once for oneDNN. ``"fbgemm-fp16"``:
        16-bit weights as float16 with float32 activations; bfloat16 values below 7.6e-6 move by at most 3e-8.
        ``"fbgemm-fp16x2"``: float32 weights as the sum of two float16, 22 of 24 significant bits, up to 8 rows; above,
        oneDNN's float32.

    Raises InputError: unknown name, or FBGEMM with a weight beyond the range of float16.
    """
    if linear_backend == "torch.linear":
        return PlainLinear(weight, bias)
    if linear_backend == "mkldnn-packed":
        return _mkldnn_packed(weight, bias)
    _check_name(linear_backend)
    largest = weight.abs().max().item()
    if not largest <= _FP16_MAX:
        raise InputError(f"linear_backend {linear_backend!r} needs weights within {_FP16_MAX}, got {largest}")
    return (_fbgemm_fp16 if linear_backend == "fbgemm-fp16" else _fbgemm_fp16x2)(weight, bias)


class PlainLinear:
    """``torch.linear``; its weight ``[out, in]`` and bias stay visible for the captured forward."""

    scale: Tensor | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Float8Linear(PlainLinear):
    """Weights as float8_e4m3fn with a float32 scale per output ``[out]``; activations keep their dtype (W8A16)."""

    scale: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None):
        largest = torch.finfo(torch.float8_e4m3fn).max
        self.scale = (weight.abs().amax(dim=1).float() / largest).clamp(min=1e-12)
        super().__init__((weight.float() / self.scale[:, None]).to(torch.float8_e4m3fn), bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight.float() * self.scale[:, None]).to(x.dtype), self.bias)


def _check_name(linear_backend: str) -> None:
    if linear_backend not in LINEAR_BACKENDS:
        known = ", ".join(LINEAR_BACKENDS)
        raise InputError(f"linear_backend must be 'auto' or one of {known}, got {linear_backend!r}")


def _mkldnn_packed(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    run = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: run(x, packed, bias, "none", [], "")


def _fbgemm_fp16(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())
    # The overload's own __call__ walks the arguments in Python for tracing, which costs more than a small product.
    run = torch.ops.quantized.linear_dynamic_fp16.default._op
    return lambda x: run(x, packed)


def _fbgemm_fp16x2(weight: Tensor, bias: Tensor | None) -> Linear:
    upper = weight.half().float()
    rest = (weight - upper) * _REST_SCALE
    stacked_bias = None if bias is None else torch.cat([bias, torch.zeros_like(bias)])
    halves = _fbgemm_fp16(torch.cat([upper, rest]), stacked_bias)
    many_rows = _mkldnn_packed(weight, bias)
    width = weight.shape[0]

    def run(x: Tensor) -> Tensor:
        if x.shape[0] > _FP16X2_MAX_ROWS:
            return many_rows(x)
        both = halves(x)
        return torch.add(both[:, :width], both[:, width:], alpha=1 / _REST_SCALE)

    return run


def _why_not(linear_backend: str, dtype: str, device: str) -> str:
    """ "" when the backend can run `dtype` on `device`, else the reason."""
    if linear_backend == "torch.linear":
        return ""
    if device != "cpu":
        return "it is for the CPU"
    if linear_backend.startswith("fbgemm") and (linear_backend == "fbgemm-fp16x2") != (dtype == "float32"):
        return f"it does not hold {dtype} weights"
    if linear_backend == "mkldnn-packed" and dtype != "float32":
        supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{'bf16' if dtype == 'bfloat16' else 'fp16'}_supported")
        if not supported():
            return f"oneDNN has no {dtype} on this CPU"
    try:
        weight = torch.ones(16, 16, dtype=getattr(torch, dtype))
        make_linear(weight, None, linear_backend)(weight[:1].to(activation_dtype(linear_backend, dtype)))
    except (RuntimeError, AttributeError) as error:
        return f"this build of PyTorch cannot run it: {str(error).splitlines()[0]}"
    return ""


def resolve_linear_backend(linear_backend: str, shape: ModelShape, dtype: str, device: str) -> str:
    """The given name when it can run, or for ``"auto"`` the fastest here (`choose_linear_backend`).

    Raises InputError: unknown name; BackendUnavailable: a known one that cannot run this dtype on this device.
    """
    if linear_backend == "auto":
        return choose_linear_backend(shape, dtype, device)
    _check_name(linear_backend)
    reason = _why_not(linear_backend, dtype, device)
    if reason:
        raise BackendUnavailable(linear_backend, reason)
    return linear_backend


def choose_linear_backend(shape: ModelShape, dtype: str, device: str) -> str:
    """The fastest of the backends that can run here, at 1 and 5 rows on seeded weights of this shape.

    The first call for a CPU, PyTorch version, thread count and dtype takes about a second; its answer is kept in
    `labkit.paths.cache_dir`, so that the processes of one study agree. Models that fit in the CPU's caches, and other
    devices, get ``"torch.linear"`` untimed.
    """
    names = [name for name in LINEAR_BACKENDS if not _why_not(name, dtype, device)]
    if len(names) == 1 or shape.num_linear_parameters < _TRIAL_MIN_WEIGHTS:
        return "torch.linear"
    sizes = _matrix_sizes(shape)
    cpu = f"{cpu_name()} {torch.backends.cpu.get_cpu_capability()}"
    facts = [cpu, torch.__version__, str(torch.get_num_threads()), dtype, str(sizes), *names]
    file = cache_dir() / f"linear-{hashlib.sha256(' '.join(facts).encode()).hexdigest()[:16]}.txt"
    kept = file.read_text().strip() if file.is_file() else ""
    if kept in names:
        return kept
    fastest = _run_trial(names, sizes, dtype)
    write_whole(file, fastest.encode())
    return fastest


def _run_trial(names: list[str], sizes: list[tuple[int, int]], dtype: str) -> str:
    """Name of the smallest sum over `_TRIAL_ROWS` of the best of the interleaved rounds."""
    generator = torch.Generator().manual_seed(0)
    weights = _trial_weights(sizes, getattr(torch, dtype), generator)
    layers = {name: [make_linear(weight, None, name) for weight in weights] for name in names}
    inputs = {
        (name, rows, width): torch.randn(rows, width, generator=generator).to(activation_dtype(name, dtype))
        for name in names
        for rows in _TRIAL_ROWS
        for width in {weight.shape[1] for weight in weights}
    }

    def forward(name: str, rows: int) -> None:
        for layer, weight in zip(layers[name], weights, strict=True):
            layer(inputs[name, rows, weight.shape[1]])

    calls: dict[str, Callable[[], object]] = {
        f"{name} {rows}": functools.partial(forward, name, rows) for name in names for rows in _TRIAL_ROWS
    }
    # The warm-up creates primitives and touches pages.
    samples = sample_rounds(calls, num_rounds=_TRIAL_ROUNDS, num_warmup=1, l2="warm")
    best = {call: min(sample["ms"] for sample in samples if sample["name"] == call) for call in calls}
    return min(names, key=lambda name: sum(best[f"{name} {rows}"] for rows in _TRIAL_ROWS))


def _matrix_sizes(shape: ModelShape) -> list[tuple[int, int]]:
    """``(out, in)`` of the four matrices of a layer, cut to an eighth of the trial's size each."""
    q_width, kv_width = shape.num_qo_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = [
        (q_width + 2 * kv_width, shape.hidden_size),
        (shape.hidden_size, q_width),
        (2 * shape.intermediate_size, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
    ]
    return [(max(1, min(rows, _TRIAL_WEIGHTS // 8 // width)), width) for rows, width in sizes]


def _trial_weights(sizes: list[tuple[int, int]], dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """One layer's matrices, repeated up to the trial's size."""
    one = [torch.randn(size, generator=generator).mul_(size[1] ** -0.5).to(dtype) for size in sizes]
    repeats = max(1, round(_TRIAL_WEIGHTS / sum(weight.numel() for weight in one)))
    return [weight.clone() for _ in range(repeats) for weight in one]

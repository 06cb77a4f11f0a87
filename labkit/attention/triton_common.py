"""What both Triton backends ask of a shape and a machine. Triton itself is imported only here and below, on use."""

from labkit.shapes import AttentionShape

PRECISION = {"float32": "ieee", "bfloat16": "tf32", "float16": "tf32"}  # only matters for float32 inputs


def triton_supports(shape: AttentionShape, device: str) -> str:
    """CUDA, or the interpreter on the CPU; powers of two from 16 to 256 as head_dim; one dtype of 16 or 32 bits."""
    try:
        from triton.knobs import runtime
    except ImportError as error:
        return f"needs triton ({error})"
    if device != "cuda" and not runtime.interpret:
        return "needs a CUDA device (or TRITON_INTERPRET=1 set before Python starts, for tests)"
    if device != "cuda" and "bfloat16" in (shape.q_dtype, shape.kv_dtype):
        return "the interpreter multiplies the bit patterns of bfloat16: use float32 or float16 there"
    if shape.q_dtype not in PRECISION or shape.kv_dtype != shape.q_dtype:
        return f"needs q and K/V in one of {', '.join(PRECISION)}"
    if shape.head_dim not in (16, 32, 64, 128, 256):
        return "needs a head_dim of 16, 32, 64, 128 or 256"
    return ""

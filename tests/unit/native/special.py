"""bf16 bit patterns that arithmetic would not keep.

Holds no assertions.
"""

# ±0, ±Inf, quiet and signalling NaNs with payloads, subnormals, ±1, the largest finite
SPECIAL = [
    *(0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF, 0x7F81),
    *(0x0001, 0x8001, 0x007F, 0x3F80, 0xBF80, 0x7F7F),
]

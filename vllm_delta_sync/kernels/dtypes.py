"""The dtypes of the log as torch knows them: a closed table, both ways.

Does not say their codes or widths on the wire: `wire.dtypes` does.
"""

from __future__ import annotations

import torch

BY_NAME = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in BY_NAME.items()}

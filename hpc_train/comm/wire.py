"""Number formats on the network: fp32 rows become rows of 16-bit words, and back.

fp16 reaches from 6e-8 to 65,504, gradients do not keep to that.  So each row travels under a power
of two of its own, which brings its largest magnitude into [2^14, 2^15); the exponent goes ahead of
the values.  Multiplying by a power of two rounds nothing, the row's largest value keeps fp16's full
11 bits, and values down to 2^-28 of it do too.

    row of words, int16:   exponent | value 0 | value 1 | ...         (values are fp16 bits)
"""

import torch
from torch import Tensor

HEADER_WORDS = 1
_TOP_EXPONENT = 15  # scaled magnitudes stay below 2^15: no rounding reaches fp16's end at 65,504
_EXPONENT_LIMIT = 126  # so that 2^e and 2^-e are both normal fp32 numbers


def scale_exponents(rows: Tensor) -> Tensor:
    """For each row of fp32 [rows, values] the exponent of the largest power of two that keeps it below 2^15.

    Returns int32, [rows]; 0 for a row that holds inf or nan: there is nothing to save in it.
    """
    largest = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1))  # abs() would need memory of its own
    exponents = (_TOP_EXPONENT - torch.frexp(largest).exponent).clamp_(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)
    return torch.where(largest.isfinite(), exponents, 0).to(torch.int32)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponent, exactly: the exponent is put into the bits of an fp32 number."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)


def encode(rows: Tensor, words: Tensor) -> None:
    """Write `rows` as words; each value is rounded once, to nearest; inf and nan stay what they are.

    Args:
        rows: fp32, [rows, values], values > 0; holds the scaled values afterwards.
        words: int16, [rows, 1 + values], overwritten.
    """
    exponents = scale_exponents(rows)
    words[:, 0] = exponents
    words.view(torch.float16)[:, HEADER_WORDS:] = rows.mul_(power_of_two(exponents).unsqueeze(1))


def decode(words: Tensor, rows: Tensor) -> None:
    """Write words [rows, 1 + values] back as fp32 `rows` [rows, values]."""
    rows.copy_(words.view(torch.float16)[:, HEADER_WORDS:])
    rows.mul_(power_of_two(-words[:, 0].to(torch.int32)).unsqueeze(1))

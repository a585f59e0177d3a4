"""Number formats on the network: fp32 values become bytes, and back.

    wire    bytes of n values, rounded up to whole blocks       a value is off by at most
    fp32    4n                                                  0
    bf16    2n                                                  2^-8 of itself
    fp16    2n, then an exponent for each block of 1,024        2^-11 of itself, 2^-39 of the largest
    int8    n, then an exponent for each block of 128           2^-7 of the block's largest

fp16 reaches from 6e-8 to 65,504, int8 from 1 to 127; gradients keep to neither.  So each block travels
under a power of two of its own, which brings its largest finite magnitude to the top of the format.
Powers of two round nothing; the exponent, an int16, goes along.  What is not finite stays so, as NaN in
int8, and the values beside it lose nothing by it.

What was decoded is encoded again without a change, so that a total may be handed on: blocks begin at
fixed places of a buffer, and their exponent is that of the rounded magnitude, which rounding up to the
next power of two makes larger by one.
"""

import torch
from torch import Tensor

from hpc_train.comm.interface import Losses, Wire

BLOCK = 1024  # values: what every message is a multiple of, but for the end of a buffer
_BLOCKS = {Wire.FP16: BLOCK, Wire.INT8: 128}
_TOP_EXPONENT = {Wire.FP16: 15, Wire.INT8: 7}  # scaled magnitudes stay below 2^15, and below 2^7
_HALF_A_UNIT = {Wire.FP16: 1 << 12, Wire.INT8: 0}  # in fp32's bits: fp16 has 13 fewer; int8 is cut at 127
_EXPONENT_LIMIT = 126  # so that 2^e and 2^-e are both normal fp32 numbers
_INFINITE = 255  # the exponent in the bits of an fp32 number that is inf or nan
_NOT_FINITE = 1000  # added to the exponent of an int8 block that holds inf or nan
_NAN_CODE = -128


def encoded_bytes(wire: Wire, numel: int) -> int:
    """The length of `numel` values on the wire."""
    if wire is Wire.FP32:
        return 4 * numel
    if wire is Wire.BF16:
        return 2 * numel
    blocks = -(-numel // _BLOCKS[wire])
    padded = blocks * _BLOCKS[wire]
    return padded * (2 if wire is Wire.FP16 else 1) + 2 * blocks


def values_within(wire: Wire, num_bytes: int) -> int:
    """The most values, in whole blocks and at least one of them, that fit into `num_bytes`."""
    return max(1, num_bytes // encoded_bytes(wire, BLOCK)) * BLOCK


def encode(values: Tensor, words: Tensor, wire: Wire, losses: Losses) -> None:
    """Write `values` as bytes; each is rounded once, to nearest; what is not finite stays so.

    Args:
        values: fp32, [n], n > 0; not changed.
        words: uint8, [encoded_bytes(wire, n)], overwritten.
        wire: the format.
        losses: counted up.
    """
    if wire is Wire.FP32:
        words.view(torch.float32).copy_(values)
    elif wire is Wire.BF16:
        words.view(torch.bfloat16).copy_(values)
    else:
        _encode_blocks(_in_blocks(values, _BLOCKS[wire]), words, wire, losses)


def decode(words: Tensor, values: Tensor, wire: Wire) -> None:
    """Write bytes that `encode` made back as fp32 `values` [n]."""
    if wire is Wire.FP32:
        values.copy_(words.view(torch.float32))
    elif wire is Wire.BF16:
        values.copy_(words.view(torch.bfloat16))
    else:
        block = _BLOCKS[wire]
        codes, exponents = _parts(words, -(-values.numel() // block), wire)
        whole = values.numel() == codes.numel()
        rows = values.view(-1, block) if whole else values.new_empty(codes.shape)
        _decode_blocks(codes, exponents, rows)
        if not whole:
            values.copy_(rows.view(-1)[: values.numel()])


def _encode_blocks(rows: Tensor, words: Tensor, wire: Wire, losses: Losses) -> None:
    codes, exponents = _parts(words, rows.shape[0], wire)
    largest = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1))  # abs() would need memory of its own
    finite = _biased_exponent(largest) < _INFINITE
    all_finite = bool(finite.all())
    if not all_finite:
        bad = ~rows.isfinite()
        losses.overflows += int(bad.sum())
        cleared = rows.masked_fill(bad, 0.0)
        largest = cleared.abs().amax(dim=1)
        if wire is Wire.INT8:
            rows = cleared
    biased = _biased_exponent(largest, _HALF_A_UNIT[wire])
    shift = (_TOP_EXPONENT[wire] + 126 - biased).clamp_(max=_EXPONENT_LIMIT)
    scaled = rows * power_of_two(shift).unsqueeze(1)
    if wire is Wire.INT8:
        scaled.round_().clamp_(-127, 127)
    codes.copy_(scaled)
    losses.underflows += _underflows(rows, codes)
    if not all_finite and wire is Wire.INT8:
        codes[bad] = _NAN_CODE
        shift = torch.where(finite, shift, shift + _NOT_FINITE)
    exponents.copy_(shift)


def _biased_exponent(magnitudes: Tensor, half_a_unit: int = 0) -> Tensor:
    """The exponent field of fp32 magnitudes, once they are rounded to units that end where this one does."""
    bits = magnitudes.view(torch.int32) + half_a_unit
    return (bits >> 23).bitwise_and_(_INFINITE)  # a NaN, and a zero, may have a sign


def _underflows(rows: Tensor, codes: Tensor) -> int:
    """How many values became zero; counting in integers is the faster, and most often there are no zeros."""
    bits = codes if codes.dtype is torch.int8 else codes.view(torch.int16) & 0x7FFF  # -0.0 is a zero too
    left = int(bits.count_nonzero())
    return 0 if left == rows.numel() else int(rows.count_nonzero()) - left


def _decode_blocks(codes: Tensor, exponents: Tensor, rows: Tensor) -> None:
    shift = exponents.to(torch.int32)
    rows.copy_(codes)
    if codes.dtype is torch.int8 and int(shift.max()) > _NOT_FINITE // 2:
        rows[codes == _NAN_CODE] = torch.nan
        shift = torch.where(shift > _NOT_FINITE // 2, shift - _NOT_FINITE, shift)
    rows.mul_(power_of_two(-shift).unsqueeze(1))


def _parts(words: Tensor, blocks: int, wire: Wire) -> tuple[Tensor, Tensor]:
    """The codes, [blocks, values], and the exponents, int16 [blocks], within `words`."""
    dtype = torch.float16 if wire is Wire.FP16 else torch.int8
    end = words.numel() - 2 * blocks
    return words[:end].view(dtype).view(blocks, _BLOCKS[wire]), words[end:].view(torch.int16)


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """`values` as rows of a block each; a copy with zeros at the end where the last one is not full."""
    left = values.numel() % block
    if left:
        values = torch.nn.functional.pad(values, (0, block - left))
    return values.view(-1, block)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponent, exactly: the exponent is put into the bits of an fp32 number."""
    return (exponents.to(torch.int32) + 127).bitwise_left_shift_(23).view(torch.float32)

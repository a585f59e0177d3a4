"""Number formats on the network."""

import pytest
import torch

from hpc_train.comm.interface import Losses, Wire
from hpc_train.comm.wire import BLOCK, decode, encode, encoded_bytes, power_of_two, values_within

LOSSY = [wire for wire in Wire if wire.lossy]
BLOCKS = {Wire.FP16: BLOCK, Wire.INT8: 128}


def there_and_back(values, wire, losses=None):
    words = torch.empty(encoded_bytes(wire, values.numel()), dtype=torch.uint8)
    before = values.clone()
    encode(values, words, wire, losses or Losses())
    torch.testing.assert_close(values, before, rtol=0, atol=0, equal_nan=True)
    out = torch.empty_like(values)
    decode(words, out, wire)
    return out


def noise(numel, magnitude=1.0):
    return magnitude * (2 * torch.rand(numel, generator=torch.Generator().manual_seed(0)) - 1)


@pytest.mark.parametrize("exponent", range(-126, 127))
def test_a_power_of_two_is_exact(exponent):
    assert power_of_two(torch.tensor([exponent])).item() == 2.0**exponent


@pytest.mark.parametrize("numel", [1, 127, 128, 1023, 1024, 5000])
@pytest.mark.parametrize("magnitude", [1e-37, 1e-30, 1e-8, 1.0, 65504.0, 1e30, 3e38])
@pytest.mark.parametrize("wire", Wire)
def test_values_come_back_as_near_as_the_table_says(wire, magnitude, numel):
    values = noise(numel, magnitude)
    error = (there_and_back(values, wire).double() - values.double()).abs()
    own, largest = values.double().abs(), values.double().abs().max()
    allowed = {
        Wire.FP32: 0 * own,
        Wire.BF16: 2.0**-8 * own,
        Wire.FP16: 2.0**-11 * own + 2.0**-39 * largest,
        Wire.INT8: 2.0**-7 * largest + 0 * own,
    }
    # Half of the smallest normal fp32 number: where scales end.
    assert bool((error <= allowed[wire] + 2.0**-127).all())


@pytest.mark.parametrize("wire", LOSSY)
def test_what_was_decoded_comes_back_unchanged(wire):
    once = there_and_back(noise(5000), wire)
    assert torch.equal(there_and_back(once, wire), once)
    assert torch.equal(there_and_back(once[BLOCK:], wire), once[BLOCK:])  # in another message, too


@pytest.mark.parametrize("wire", LOSSY)
def test_the_same_words_come_of_what_was_decoded(wire):
    """A largest value just below a power of two became that power, and so had a larger exponent next time."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        magnitudes = 2.0 ** (-45 * torch.rand(3 * BLOCK, generator=generator))
        values = magnitudes * torch.randn(3 * BLOCK, generator=generator).sign()
        for block, below in enumerate(torch.randint(8, 25, (3,), generator=generator).tolist()):
            values[block * BLOCK] = 1 - 2.0**-below
        values *= 2.0 ** int(torch.randint(-126, 127, (), generator=generator))
        words = torch.empty(encoded_bytes(wire, values.numel()), dtype=torch.uint8)
        again = words.clone()
        encode(values, words, wire, Losses())
        decoded = torch.empty_like(values)
        decode(words, decoded, wire)
        encode(decoded, again, wire, Losses())
        assert torch.equal(again, words)


@pytest.mark.parametrize("wire", BLOCKS)
def test_values_beside_one_that_is_not_finite_lose_nothing(wire):
    """fp16 blocks with inf travelled without a scale: 1e6 became inf too, and 1e-9 zero."""
    for magnitude in (1e-9, 1.0, 1e6, 1e30):
        values = noise(BLOCKS[wire], magnitude)
        clean = there_and_back(values, wire)
        for bad in (float("inf"), float("-inf"), float("nan")):
            spoiled, expected = values.clone(), clean.clone()
            spoiled[7] = bad
            expected[7] = bad if wire is Wire.FP16 else torch.nan
            came = there_and_back(spoiled, wire)
            torch.testing.assert_close(came, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wire", BLOCKS)
def test_each_block_has_a_scale_of_its_own(wire):
    block = BLOCKS[wire]
    values = torch.cat([noise(block, 1e30), noise(block, 1e-30)])
    error = (there_and_back(values, wire) - values).abs()
    assert float(error[block:].max()) <= 1e-32


@pytest.mark.parametrize("wire", Wire)
def test_what_is_not_finite_stays_so_and_the_rest_stays_near(wire):
    values = noise(3000)
    places = [3, 500, 2999]
    values[places] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    losses = Losses()
    came = there_and_back(values, wire, losses)
    assert (~came.isfinite()).nonzero().flatten().tolist() == places
    assert float((came - values)[came.isfinite()].abs().max()) < 2.0**-6
    assert losses.overflows == (3 if wire in BLOCKS else 0)


def test_values_that_become_zero_are_counted():
    values = torch.ones(3000)
    values[:10] = 1e-30
    values[20:25] = 0.0
    losses = Losses()
    there_and_back(values, Wire.FP16, losses)
    assert (losses.overflows, losses.underflows) == (0, 10)
    there_and_back(values, Wire.INT8, losses)
    assert losses.underflows == 20


@pytest.mark.parametrize(
    ("wire", "share"), [(Wire.FP32, 1.0), (Wire.FP16, 0.501), (Wire.BF16, 0.5), (Wire.INT8, 0.254)]
)
def test_what_travels(wire, share):
    assert encoded_bytes(wire, 2**20) / 2**22 <= share


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("num_bytes", [1, 5000, 61_440, 2**20])
def test_as_many_values_as_fit_into_a_message(wire, num_bytes):
    values = values_within(wire, num_bytes)
    assert values % BLOCK == 0
    assert values == BLOCK or encoded_bytes(wire, values) <= num_bytes
    assert encoded_bytes(wire, values + BLOCK) > num_bytes

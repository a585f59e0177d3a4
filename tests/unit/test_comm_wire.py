"""Number formats on the network, and the sum through them."""

import pytest
import torch

from hpc_train.comm import compressed_sum
from hpc_train.comm.compressed_sum import CompressedSum
from hpc_train.comm.wire import decode, encode, power_of_two, scale_exponents


def there_and_back(rows):
    words = torch.empty(rows.shape[0], rows.shape[1] + 1, dtype=torch.int16)
    encode(rows.clone(), words)
    out = torch.empty_like(rows)
    decode(words, out)
    return out


@pytest.mark.parametrize("exponent", range(-126, 127))
def test_a_power_of_two_is_exact(exponent):
    assert power_of_two(torch.tensor([exponent])).item() == 2.0**exponent


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [
        (1.0, 14),  # 2^14
        (1.999, 14),
        (2.0, 13),
        (65504.0, -1),
        (3.4e38, -113),
        (2.0**-100, 114),
        (1e-44, 126),  # the least fp32 numbers: the scale stays a normal one
        (0.0, 15),
        (float("inf"), 0),
        (float("nan"), 0),
    ],
)
def test_the_scale_brings_the_largest_below_two_to_the_15(largest, exponent):
    row = torch.tensor([[0.0, -largest, largest / 3]])
    assert scale_exponents(row).tolist() == [exponent]


@pytest.mark.parametrize("magnitude", [1e-37, 1e-30, 1e-8, 1.0, 65504.0, 1e30, 3e38])
def test_values_come_back_to_11_bits_whatever_their_magnitude(magnitude):
    rows = magnitude * (2 * torch.rand(3, 1000, generator=torch.Generator().manual_seed(0)) - 1)
    error = (there_and_back(rows).double() - rows.double()).abs()
    assert bool((error <= 2.0**-11 * rows.double().abs() + 2.0**-39 * magnitude).all())


def test_each_row_has_a_scale_of_its_own():
    rows = torch.tensor([[1e30, 2e30], [1e-30, 3e-30]])
    torch.testing.assert_close(there_and_back(rows), rows, rtol=2.0**-11, atol=0)


def test_powers_of_two_and_what_is_not_finite_come_back_as_they_were():
    rows = torch.tensor([[2.0**20, 1.0, 0.0], [float("inf"), float("-inf"), 1.5], [float("nan"), 1.0, -2.0]])
    torch.testing.assert_close(there_and_back(rows), rows, rtol=0, atol=0, equal_nan=True)


class Alone:
    """A transport whose other replicas all hold the same as this one, the first."""

    def __init__(self):
        self.sent_bytes = 0

    def exchange(self, sent, received):
        self.sent_bytes += sent.nbytes
        received.copy_(sent[0].expand_as(received))

    def all_gather(self, mine, gathered):
        self.sent_bytes += mine.nbytes
        gathered.copy_(mine.expand_as(gathered))


def test_two_bytes_a_value_travel():
    transport = Alone()
    buffer = torch.ones(4000)
    CompressedSum(4, transport).sum_(buffer)
    assert buffer.tolist() == [4.0] * 4000
    headers = 4 * 2 + 2
    assert transport.sent_bytes == 4000 * 2 + 1000 * 2 + headers


def test_a_long_buffer_is_summed_in_segments(monkeypatch):
    monkeypatch.setattr(compressed_sum, "SEGMENT", 1000)
    buffer = torch.ones(2500)
    CompressedSum(3, Alone()).sum_(buffer)
    assert buffer.tolist() == [3.0] * 2500


def test_one_replica_sends_nothing_and_rounds_nothing():
    transport = Alone()
    buffer = torch.tensor([1.0000001])
    CompressedSum(1, transport).sum_(buffer)
    assert buffer.item() == torch.tensor(1.0000001).item()
    assert transport.sent_bytes == 0

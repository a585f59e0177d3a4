"""Pieces of words: every text can be written, frequent words become short, and all ranks learn the same."""

import pytest

from hpc_train.tasks.subwords import NUM_BYTES, Subwords

TEXTS = ["low lower lowest", "new newer newest", "wide wider widest", "low, low; 42 (low)!"]


@pytest.mark.parametrize(
    "text", ["", "lowest", "  two  blanks ", "a\nline\tand\r\n", "naïve – „Grüße“ 日本語 🎈", "%(name)s: {x}"]
)
def test_what_is_encoded_is_decoded(text):
    subwords = Subwords(TEXTS, NUM_BYTES + 20)
    pieces = subwords.encode(text)
    assert subwords.decode(pieces) == text
    assert all(0 <= piece < len(subwords) for piece in pieces)


def test_the_most_frequent_pair_is_merged_first():
    """The words of the paper: "es" and "st" are found 9 times, "lo" and "ow" 7 times."""
    texts = ["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3
    subwords = Subwords(texts, NUM_BYTES + 4)
    merges = [subwords.decode([piece]) for piece in range(NUM_BYTES, len(subwords))]
    assert merges == ["st", "est", "ow", "low"]


def test_frequent_words_become_one_piece_and_others_stay_bytes():
    subwords = Subwords(TEXTS, NUM_BYTES + 60)
    assert len(subwords.encode(" low")) == 1
    assert subwords.encode("xyz") == list(b"xyz")


def test_repeated_letters_are_merged_from_the_left():
    subwords = Subwords(["aaaaaaa", "aaaaaaa"], NUM_BYTES + 2)
    pieces = [subwords.decode([piece]) for piece in subwords.encode("aaaaaaa")]
    assert pieces == ["aaaa", "aa", "a"]


def test_no_piece_crosses_the_border_of_a_word():
    subwords = Subwords(["the cat: the cat: the cat:"] * 9, NUM_BYTES + 100)
    pieces = [subwords.decode([piece]) for piece in range(NUM_BYTES, len(subwords))]
    assert {"the", " the", " cat"} <= set(pieces)
    assert not [piece for piece in pieces if " " in piece[1:] or (":" in piece and len(piece) > 1)]


def test_texts_in_another_order_teach_the_same():
    one, other = Subwords(TEXTS, 300), Subwords(reversed(TEXTS), 300)
    assert [one.decode([i]) for i in range(len(one))] == [other.decode([i]) for i in range(len(other))]
    assert one.encode("lower newest widest") == other.encode("lower newest widest")


def test_it_stops_where_nothing_is_found_twice():
    assert len(Subwords(["ab", "cd"], 400)) == NUM_BYTES
    assert len(Subwords(TEXTS, NUM_BYTES + 5)) == NUM_BYTES + 5
    assert len(Subwords([], 400)) == NUM_BYTES


def test_bytes_that_are_no_text_are_shown_as_such():
    assert Subwords([], NUM_BYTES).decode([0xC3, 65, 999]) == "�A"

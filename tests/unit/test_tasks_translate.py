"""The task translate: real sentences without overlap, masks, ties, a loss by token, and that it learns."""

import gettext
import math
import re
import sys
from pathlib import Path

import django
import pytest
import torch
from torch import Tensor, nn

from hpc_train.errors import UserError
from hpc_train.pipeline.layers import count_parameters
from hpc_train.tasks.find import load_task
from hpc_train.tasks.translate import Translate
from hpc_train.tasks.translate_data import BEGIN, END, PAD, Corpus, SentencePairs, is_held_out, read_pairs

SMALL = {"hidden": 16, "blocks": 2, "heads": 2, "vocabulary": 300, "context": 24, "dropout": 0.0}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Products as small as these take longer with several, and much longer where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def task() -> Translate:
    return Translate(**SMALL)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(("de", "nl"), 768, 32)


def first_samples(task: Translate, count: int, split: str = "train") -> tuple[tuple[Tensor, Tensor], Tensor]:
    pairs = task.dataset(split)
    return (pairs.sources[:count], pairs.so_far[:count]), pairs.targets[:count]


def tied_model(task: Translate) -> nn.Module:
    """The plain model, whose embedding and head are one."""
    model = task.plain_model()
    model.layers[-1].logits.weight = model.layers[0].token.weight
    return model


# ---- the data


def test_pairs_are_those_that_gettext_finds():
    pairs = read_pairs("de")
    folder = Path(django.__file__).parent / "conf" / "locale"
    catalogue = gettext.translation("django", folder, ["de"])
    known = {source: target for source, target in pairs.items() if catalogue.gettext(source) != source}
    assert len(known) > 100
    assert all(catalogue.gettext(source) == target for source, target in known.items())
    assert len(pairs) > 600
    assert all(source == source.strip() != "" != target == target.strip() for source, target in pairs.items())


CATALOGUE = """
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8"

msgid "Save"
msgstr "Sichern"

msgid " Yes\\n"
msgstr " Ja\\n"

#, fuzzy
msgid "Doubtful"
msgstr "Zweifel"

msgid "Empty"
msgstr ""

msgid "%d day"
msgid_plural "%d days"
msgstr[0] "%d Tag"
msgstr[1] "%d Tage"

#~ msgid "Obsolete"
#~ msgstr "Abgeschafft"
"""


def test_plural_doubtful_empty_and_obsolete_messages_are_left_out_and_the_first_counts(tmp_path, monkeypatch):
    again = CATALOGUE.replace("Sichern", "Speichern").replace("Empty", "Late").replace('""\n\n', '"Spät"\n\n')
    for place, text in {"conf": CATALOGUE, "contrib/admin": again}.items():
        folder = tmp_path / place / "locale" / "de" / "LC_MESSAGES"
        folder.mkdir(parents=True)
        (folder / "django.po").write_text(text, encoding="utf-8")
    monkeypatch.setattr(django, "__file__", str(tmp_path / "__init__.py"))
    assert read_pairs("de") == {"Save": "Sichern", "Yes": "Ja", "Late": "Spät"}


@pytest.mark.parametrize("name", ["django", "polib"])
def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"needs {name}: pip install 'hpc_train\[examples\]'"):
        read_pairs("de")


@pytest.mark.parametrize("name", ["xx", "*", "../de", ""])
def test_an_unknown_language_is_told_with_those_that_there_are(name):
    with pytest.raises(
        UserError, match=rf"no language {re.escape(repr(name))}: it has af, .* de, .* zh_Hant"
    ):
        read_pairs(name)


def test_no_sentence_is_on_both_sides_in_whatever_language(corpus):
    def sentences(pairs: SentencePairs) -> set[str]:
        texts = [corpus.decode(source.tolist()) for source in pairs.sources]
        return {" ".join(re.findall(r"\w+", text.lower())) for text in texts}

    train, held_out = sentences(corpus.train), sentences(corpus.held_out)
    assert not train & held_out
    assert 0.05 < len(held_out) / len(train | held_out) < 0.15
    assert set(corpus.train.so_far[:, 0].tolist()) == {BEGIN, BEGIN + 1}
    assert set(corpus.held_out.so_far[:, 0].tolist()) == {BEGIN}  # of the first language alone


def test_other_capitals_and_punctuation_make_no_other_sentence():
    sentences = [f"Sentence {number}" for number in range(200)]
    held_out = [is_held_out(sentence) for sentence in sentences]
    assert 8 < sum(held_out) < 35
    assert [is_held_out(f" {sentence.upper()}: ") for sentence in sentences] == held_out


def test_the_target_so_far_is_the_target_moved_on_and_rows_are_filled_up(corpus):
    for pairs in (corpus.train, corpus.held_out):
        assert pairs.sources.shape == pairs.so_far.shape == pairs.targets.shape == (len(pairs), 32)
        assert ((pairs.targets == END).sum(dim=1) == 1).all()
        for (source, so_far), target in (pairs[index] for index in range(len(pairs))):
            length = int((target == END).nonzero()) + 1
            assert torch.equal(so_far[1:length], target[: length - 1])
            assert (target[:length] != PAD).all()
            assert (target[length:] == PAD).all()
            assert (so_far[length:] == PAD).all()
            assert 0 < (source != PAD).sum() == (source != PAD).cumprod(0).sum()


def test_rows_hold_the_sentences_of_the_catalogue_and_the_longer_ones_are_left_out(corpus):
    pairs = {" ".join(s.split()): " ".join(t.split()) for s, t in read_pairs("de").items()}
    seen = {
        corpus.decode(source.tolist()): corpus.decode(target.tolist())
        for source, target in zip(corpus.held_out.sources, corpus.held_out.targets, strict=True)
    }
    assert seen.items() <= pairs.items()
    left_out = [s for s in pairs if is_held_out(s) and s not in seen]
    assert left_out
    assert all(max(len(corpus.encode(s)), len(corpus.encode(pairs[s])) + 1) > 30 for s in left_out)


def test_data_are_the_same_on_every_rank_and_at_every_call(task):
    other = Translate(**SMALL)
    for split in ("train", "eval"):
        pairs, again = task.dataset(split), other.dataset(split)
        for index in (0, 5, len(pairs) - 1):
            for (inputs, target), (inputs_again, target_again) in [
                (pairs[index], pairs[index]),
                (pairs[index], again[index]),
            ]:
                assert torch.equal(torch.stack(inputs), torch.stack(inputs_again))
                assert torch.equal(target, target_again)


# ---- the model


def test_layers_have_titles_parameters_and_ties_that_fit(task):
    specs = task.layers()
    titles = ["embed", "encoder 1", "encoder 2", "decoder 1", "decoder 2", "head"]
    assert [spec.title for spec in specs] == titles
    assert all(count_parameters(spec) > 0 and spec.cost > 0 for spec in specs)
    assert [bool(spec.tied) for spec in specs] == [True, False, False, False, False, True]
    ends = [(spec.build(), spec.tied) for spec in (specs[0], specs[-1])]
    shapes = [layer.get_parameter(own).shape for layer, tied in ends for own in tied]
    assert shapes == [(300, 16), (300, 16)]
    assert [list(tied.values()) for _, tied in ends] == [["embedding"], ["embedding"]]


def test_what_a_block_does_not_use_goes_along_untouched(task):
    model = task.plain_model()
    source, mask, target = model.layers[0](*first_samples(task, 3)[0])
    assert mask.dtype == torch.bool
    assert torch.equal(mask, task.dataset("train").sources[:3] != PAD)
    encoded, same_mask, same_target = model.layers[1](source, mask, target)
    assert same_mask is mask
    assert same_target is target
    assert encoded.shape == source.shape
    same_source, same_mask, decoded = model.layers[3](encoded, mask, target)
    assert same_source is encoded
    assert same_mask is mask
    assert model.layers[4](same_source, mask, decoded).shape == target.shape  # alone, to the head


def test_loss_and_metrics_are_those_of_a_sentence_at_a_time(task):
    inputs, target = first_samples(task, 6)
    output = task.plain_model()(inputs)
    nats, tokens = task.loss(output, target)
    right, tokens_again = task.metrics(output, target)["accuracy"]
    for row in range(6):
        length = target[row].tolist().index(END) + 1
        chances = output[row, :length].log_softmax(dim=1)
        expected = -sum(chances[time, target[row, time]] for time in range(length))
        torch.testing.assert_close(nats[row], expected)
        hits = sum(int(chances[time].argmax() == target[row, time]) for time in range(length))
        assert (right[row].item(), tokens[row].item(), tokens_again[row].item()) == (hits, length, length)


def test_what_stands_at_padding_counts_for_nothing(task):
    _, target = first_samples(task, 4)
    output = torch.randn(4, 24, 300)
    other = output.clone()
    other[target == PAD] = 1e4

    def figures(output: Tensor) -> Tensor:
        return torch.stack([*task.loss(output, target), *task.metrics(output, target)["accuracy"]])

    assert torch.equal(figures(output), figures(other))


def test_padding_does_not_change_outputs(task):
    model = task.plain_model()
    (source, so_far), _ = first_samples(task, 1)
    length, times = int((source != PAD).sum()), int((so_far != PAD).sum())
    assert max(length, times) < 24
    short = model((source[:, :length], so_far[:, :times]))
    torch.testing.assert_close(model((source, so_far))[:, :times], short, rtol=1e-5, atol=1e-6)


def test_later_target_tokens_do_not_change_earlier_outputs(task):
    model = task.plain_model()
    (source, so_far), _ = first_samples(task, 2)
    changed = so_far.clone()
    changed[:, 5:] = 77
    torch.testing.assert_close(model((source, so_far))[:, :5], model((source, changed))[:, :5])
    assert not torch.equal(model((source, so_far))[:, 5:], model((source, changed))[:, 5:])


def test_every_output_sees_the_whole_source(task):
    model = task.plain_model()
    (source, so_far), _ = first_samples(task, 1)
    for place in (0, int((source != PAD).sum()) - 1):
        changed = source.clone()
        changed[0, place] = 99
        change = (model((source, so_far)) - model((changed, so_far))).abs().amax(dim=2)
        assert (change > 0).all()


def test_a_sample_does_not_depend_on_its_neighbours(task):
    model = task.plain_model()
    (source, so_far), _ = first_samples(task, 5)
    apart = torch.cat([model((source[:2], so_far[:2])), model((source[2:], so_far[2:]))])
    torch.testing.assert_close(model((source, so_far)), apart, rtol=1e-5, atol=1e-6)


def test_every_parameter_gets_a_gradient(task):
    model = tied_model(task)
    inputs, target = first_samples(task, 4)
    task.loss(model(inputs), target)[0].sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_dropout_is_for_training_only():
    task = Translate(**{**SMALL, "dropout": 0.5})
    model, (inputs, _) = task.plain_model(), first_samples(task, 2)
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def test_it_begins_at_a_uniform_guess_and_learns(task):
    torch.manual_seed(0)
    model, pairs = tied_model(task), task.dataset("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(40):
        batch = torch.arange(step * 16, step * 16 + 16) % len(pairs)
        nats, tokens = task.loss(model((pairs.sources[batch], pairs.so_far[batch])), pairs.targets[batch])
        loss = nats.sum() / tokens.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(300), abs=0.1)
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5


# ---- what is shown after training


def test_sample_shows_source_translation_and_reference(task):
    """A model that knows the references is asked once for each token, for all sentences together."""
    pairs = task.dataset("eval")
    known = {
        tuple(source.tolist()): target for source, target in zip(pairs.sources, pairs.targets, strict=True)
    }
    calls = []

    def forward(inputs: tuple[Tensor, Tensor]) -> Tensor:
        sources, so_far = inputs
        calls.append(so_far.shape)
        time = so_far.shape[1]
        targets = torch.stack([known[tuple(source.tolist())][:time] for source in sources])
        assert all((a[1:] == b[:-1])[b[:-1] != PAD].all() for a, b in zip(so_far, targets, strict=True))
        return nn.functional.one_hot(targets, 300).float()

    text = task.sample(forward)
    blocks = [block.split("\n") for block in text.split("\n\n")]
    assert len(blocks) == 6
    pairs_of_text = {" ".join(s.split()): " ".join(t.split()) for s, t in read_pairs("de").items()}
    for source, translation, reference in blocks:
        assert source.startswith("English      ")
        assert translation.removeprefix("translation  ") == reference.removeprefix("reference    ")
        assert pairs_of_text[source[13:]] == reference[13:]
    assert calls == [(6, time) for time in range(1, len(calls) + 1)]
    assert len(calls) <= 24


def test_sample_ends_with_a_model_that_never_does_and_is_the_same_each_time(task):
    model = task.plain_model().eval()
    shapes = []

    def forward(inputs: tuple[Tensor, Tensor]) -> Tensor:
        shapes.append(inputs[1].shape)
        with torch.no_grad():
            output = model(inputs)
        output[..., END] = -100
        return output

    text = task.sample(forward)
    assert text == task.sample(forward)
    assert max(shapes) == (6, 23)
    assert Translate(**SMALL, samples=0).sample(forward) == ""


# ---- settings


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"hidden": 100, "heads": 8}, "hidden=100 cannot be divided among heads=8: set hidden=104"),
        ({"dropout": 1.0}, "dropout=1.0 drops everything"),
        ({"vocabulary": 100, "also": ["nl"]}, "vocabulary=100 has no room for .* set at least 260"),
    ],
)
def test_a_setting_that_cannot_be_is_told(options, told):
    with pytest.raises(UserError, match=told):
        load_task("translate", options)


def test_the_least_vocabulary_works():
    task = load_task("translate", {**SMALL, "vocabulary": 259})
    (source, _), target = first_samples(task, 3)
    assert target.max() < 259
    assert source.max() < 259


def test_a_context_that_no_sentence_fits_is_told():
    with pytest.raises(UserError, match=r"of the \d+ sentences in de too few fit task_options.context=1"):
        load_task("translate", {"context": 1}).dataset("train")

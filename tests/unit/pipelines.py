"""Small pipelines for tests: one thread a stage, compared with the same layers in plain PyTorch."""

import threading
from collections import defaultdict, deque

import torch
from torch import nn

from hpc_train.comm.loopback import run_ranks
from hpc_train.grid import Grid
from hpc_train.pipeline.layers import LayerSpec, build_layer, find_ties, layer_name, plain_model, tie_within
from hpc_train.pipeline.partition import split_by_hand
from hpc_train.pipeline.runtime import Pipeline
from hpc_train.pipeline.schedules import find
from hpc_train.pipeline.stage import Stage
from hpc_train.pipeline.ties import Ties
from hpc_train.stopwatch import Stopwatch

TOLERANCE = {"rtol": 1e-11, "atol": 1e-13}  # fp64 on both sides; only the order of sums differs


def squared_error(output, target):
    return (output - target).square().flatten(1).sum(1)


def cross_entropy(output, target):
    """Of logits [micro-batch, sequence, symbols] and the symbols that come next, [micro-batch]."""
    return nn.functional.cross_entropy(output.transpose(1, 2), target, reduction="none").mean(1)


def layers(*builders):
    """Specs of fp64 layers."""
    return [LayerSpec(lambda build=build: build().double()) for build in builders]


def stacked(num_layers, width=4):
    """Linear and Tanh in turns."""
    return layers(*(lambda i=i: nn.Tanh() if i % 2 else nn.Linear(width, width) for i in range(num_layers)))


def batch(sizes, width=4, seed=7):
    """Micro-batches of the given numbers of samples."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(size, width, dtype=torch.float64, generator=generator) for _ in "xy")
        for size in sizes
    ]


def on_stages(specs, split, body, schedule="1f1b", loss=squared_error, links=None, chunks=None, **options):
    """Call `body(pipeline)` on every stage; `split[c]` layers are in chunk c.  Results by stage."""
    rule = find(schedule, chunks)
    num_stages = len(split) // rule.chunks

    def rank_body(world):
        stage_of = [rule.stage_of(chunk, num_stages) for chunk in range(len(split))]
        cut = split_by_hand(split, len(specs), len(split))
        held = {chunk: cut[chunk] for chunk, at in enumerate(stage_of) if at == world.rank}
        built = {i: build_layer(specs[i], i, seed=0) for layers in held.values() for i in layers}
        found = find_ties(specs)
        tie_within(built, found)
        modules = {chunk: [(layer_name(i), built[i]) for i in layers] for chunk, layers in held.items()}
        stage = Stage(modules, len(split))
        link = links.link(world.rank) if links else world.peer_link(Grid(1, num_stages))
        where = [stage_of[chunk] for chunk, layers in enumerate(cut) for _ in layers]
        ties = Ties(found, built, where, world.rank, link)
        ties.share_parameters()
        return body(
            Pipeline(
                stage,
                link,
                world.rank,
                num_stages,
                rule,
                loss,
                Stopwatch(),
                ties=ties if found else None,
                **options,
            )
        )

    return run_ranks(num_stages, rank_body, timeout_s=60)


def gradients_of(module):
    return {name: p.grad for name, p in module.named_parameters()}


def check_parity(
    specs,
    split,
    micro_batches,
    schedule="1f1b",
    loss=squared_error,
    links=None,
    runs=1,
    chunks=None,
    tolerance=TOLERANCE,
    **options,
):
    """Loss and all gradients are those of the whole batch in one plain model."""
    scale = 1 / max(1, sum(len(target) for _, target in micro_batches))

    def body(pipeline):
        ends = pipeline.stage.is_first or pipeline.stage.is_last
        mine = micro_batches if ends else [None] * len(micro_batches)
        losses = [pipeline.run(mine, scale).total for _ in range(runs)]
        return pipeline.stage.is_last, losses, gradients_of(pipeline.stage)

    results = on_stages(specs, split, body, schedule, loss, links, chunks, **options)
    model = plain_model(specs, seed=0)
    expected = 0.0
    if micro_batches:
        inputs, target = (
            tuple(map(torch.cat, zip(*parts, strict=True)))
            if isinstance(parts[0], tuple)
            else torch.cat(parts)
            for parts in zip(*micro_batches, strict=True)
        )
        total = loss(model(inputs), target).sum()
        expected = total.item()
        if total.requires_grad:
            (total * scale * runs).backward()
    for is_last, losses, _ in results:
        for value in losses:
            torch.testing.assert_close(value, expected if is_last else 0.0, **tolerance)
    found = {name: gradient for *_, gradients in results for name, gradient in gradients.items()}
    wanted = gradients_of(model)
    borrowed = {str(tied) for tie in find_ties(specs) for tied in tie[1:]}
    assert set(found) - borrowed == set(wanted)
    for name, gradient in wanted.items():
        if gradient is None or found[name] is None:
            assert gradient is found[name] is None, name
        else:
            torch.testing.assert_close(
                found[name], gradient, msg=lambda text, name=name: f"{name}: {text}", **tolerance
            )


class RendezvousLinks:
    """Links as strict as MPI with large messages: a send ends only once its receive is posted.

    The data moves when both are there, straight from the sender's memory, so that a tensor that was
    changed too early is seen. Counts the works and how many of them were waited for.
    """

    def __init__(self):
        self.changed = threading.Condition()
        self.posted = defaultdict(lambda: (deque(), deque()))  # sends and receives, by (source, dest, tag)
        self.messages = []  # (source, dest, tag, tensor's shape)
        self.num_known = 0  # transfers that a side knows to be over

    def link(self, stage):
        return _RendezvousLink(self, stage)

    def post(self, key, side, tensor):
        assert tensor.is_contiguous()
        transfer = _Transfer(self, key, tensor)
        with self.changed:
            sends, receives = self.posted[key]
            (sends, receives)[side].append(transfer)
            while sends and receives:
                send, receive = sends.popleft(), receives.popleft()
                assert (send.tensor.shape, send.tensor.dtype) == (receive.tensor.shape, receive.tensor.dtype)
                receive.tensor.copy_(send.tensor)
                send.is_done = receive.is_done = True
                self.messages.append((*key, tuple(send.tensor.shape)))
            self.changed.notify_all()
        return transfer

    def check_all_is_over(self):
        assert not any(side for sides in self.posted.values() for side in sides)
        assert self.num_known == 2 * len(self.messages)


class _RendezvousLink:
    def __init__(self, links, stage):
        self.links = links
        self.stage = stage

    def isend(self, tensor, stage, tag):
        return self.links.post((self.stage, stage, tag), 0, tensor)

    def irecv(self, out, stage, tag):
        return self.links.post((stage, self.stage, tag), 1, out)


class _Transfer:
    def __init__(self, links, key, tensor):
        self.links = links
        self.key = key
        self.tensor = tensor
        self.is_done = self.is_known = False

    def is_complete(self):
        with self.links.changed:
            self._know()
            return self.is_done

    def wait(self):
        with self.links.changed:
            if not self.links.changed.wait_for(lambda: self.is_done, timeout=20):
                raise TimeoutError(f"deadlock: nobody answers {self.key}")
            self._know()

    def _know(self):
        self.links.num_known += self.is_done and not self.is_known
        self.is_known = self.is_done

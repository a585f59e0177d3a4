"""What plain PyTorch makes of weights in a file: for tests of runs that begin with them."""

from safetensors.torch import load_file
from torch.utils.data import default_collate

from hpc_train.data.sampler import Cursor, take


def plain_loss(settings, task, file):
    """The mean loss of a run's first batch, in one process with the whole model and batch."""
    model = task.plain_model(seed=99)
    model.load_state_dict(load_file(file), strict=True)
    dataset = task.dataset("train")
    size = settings.batch.size
    (indices,) = take(len(dataset), settings.seed, Cursor(0, 0), size, (size,)).indices
    inputs, target = default_collate([dataset[int(index)] for index in indices])
    return task.loss(model(inputs), target).mean().item()

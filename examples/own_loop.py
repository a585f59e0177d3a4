"""A plain PyTorch script made parallel with five changed lines, marked 1 to 5.

python examples/own_loop.py
mpirun -n 2 python examples/own_loop.py          # the same steps, each rank half of every batch
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import hpc_train

hpc_train.init()  # 1: join the other ranks

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8]
labels = torch.tensor(digits.target)
train, test = slice(0, 1472), slice(1472, None)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hpc_train.DistributedOptimizer(optimizer, model.named_parameters())  # 2: average gradients
hpc_train.broadcast_parameters(model.state_dict(), root_rank=0)  # 3: start alike

for _ in range(5):
    for batch in torch.randperm(1472).split(64):
        mine = batch[hpc_train.rank() :: hpc_train.size()]  # 4: every rank takes its share of the batch
        loss = nn.functional.cross_entropy(model(images[train][mine]), labels[train][mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if hpc_train.rank() == 0:  # 5: one rank speaks
    with torch.no_grad():
        right = model(images[test]).argmax(dim=1) == labels[test]
    print(f"accuracy on {len(right)} held-out digits: {right.float().mean():.3f}")

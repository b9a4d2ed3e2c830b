"""A small job that wants no extra: a table and a layer, watched, planned and trained for four steps."""

import torch

import armillary

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adagrad(model.parameters())
run = armillary.parallelize(model, optimizer)
torch.manual_seed(run.rank)  # data of its own
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randint(0, 1000, (4, 3))).square().mean().backward()
    optimizer.step()
print(run.report())
run.close()

"""A small transformer language model, one process: AdamW, cosine rate, clipping, accumulation, checkpoints."""

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WORDS, WIDTH, LENGTH, EPOCHS, TOGETHER = 500, 32, 12, 3, 2
CHECKPOINT = "transformer.pt"


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.body = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.head(self.body(self.embedding(words) + self.position, mask, is_causal=True))


def sentences(count: int, seed: int) -> TensorDataset:
    """Each word is the one before plus a step of the sentence's own."""
    draw = torch.Generator().manual_seed(seed)
    first, step = torch.randint(WORDS, (2, count, 1), generator=draw)
    return TensorDataset((first + (step % 4) * torch.arange(LENGTH + 1)) % WORDS)


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(words[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), words[:, 1:].flatten())


def main() -> float:
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training, held_out = sentences(512, 1), sentences(64, 2)
    draw = torch.Generator()
    loader = DataLoader(training, batch_size=8, shuffle=True, generator=draw)
    held_out_loader = DataLoader(held_out, batch_size=8)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader) // TOGETHER)
    first_epoch = 0
    if os.path.exists(CHECKPOINT):
        kept = torch.load(CHECKPOINT)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        scheduler.load_state_dict(kept["scheduler"])
        first_epoch = kept["epoch"]
    perplexity = 0.0
    for epoch in range(first_epoch, EPOCHS):
        draw.manual_seed(epoch)
        model.train()
        for number, (words,) in enumerate(loader):
            loss = loss_of(model, words) / TOGETHER
            loss.backward()
            if (number + 1) % TOGETHER == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = torch.stack([loss_of(model, words) for (words,) in held_out_loader])
        perplexity = losses.mean().exp().item()
        print(f"epoch {epoch}: held-out perplexity {perplexity:.1f}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"scheduler": scheduler.state_dict(), "epoch": epoch + 1}, CHECKPOINT)
    return perplexity


if __name__ == "__main__":
    main()

"""From DistributedDataParallel to overspill: what changes in a script. Runs without a GPU, too:

torchrun --nproc-per-node 2 examples/ddp_to_overspill.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import overspill

WIDTH, LAYERS, STEPS, MICRO_BATCHES = 64, 4, 20, 2


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # Before:
    #   dist.init_process_group("nccl"); torch.cuda.set_device(local_rank)
    #   model = DistributedDataParallel(model.cuda())
    # Now (the process group is set up from torchrun's environment; yours is used if there is one):
    model, optimizer = overspill.prepare(
        model, optimizer, gpu="64MiB", precision="fp32", zero="auto", micro_batches=MICRO_BATCHES
    )
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    # From here on it is the loop that you have.
    x = torch.randn(4096, WIDTH)
    data = TensorDataset(x, x[:, :1].sin())
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, world, rank, seed=0))
    batches = iter(loader)
    device = next(model.parameters()).device
    for step in range(1, STEPS + 1):
        total = torch.zeros(())
        for micro_batch in range(MICRO_BATCHES):
            inputs, targets = (t.to(device) for t in next(batches))
            if micro_batch < MICRO_BATCHES - 1:
                with model.no_sync():  # gradients stay on their rank until the last backward of the step
                    loss = nn.functional.mse_loss(model(inputs), targets) / MICRO_BATCHES
                    loss.backward()
            else:
                loss = nn.functional.mse_loss(model(inputs), targets) / MICRO_BATCHES
                loss.backward()
            total += loss.detach().cpu()
        optimizer.clip_grad_norm_(1.0)  # the norm over all ranks
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {total.item():.3f}, {optimizer.report()['moved']}", flush=True)

    overspill.close(model)  # all ranks together; then every rank has the plain model
    if rank == 0:
        print(f"trained {sum(p.numel() for p in model.parameters()):,} parameters on {world} ranks")


if __name__ == "__main__":
    main()

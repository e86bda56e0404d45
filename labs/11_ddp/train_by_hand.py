"""A training on several ranks with PyTorch alone: start, division of the data, output of rank 0, checkpoint,
resume.

One process runs this file for each rank. A launcher starts the processes and tells each its place by
environment variables:

    torchrun --standalone --nproc-per-node=2 train_by_hand.py --epochs 4
    srun --ntasks=8 --ntasks-per-node=4 --gres=gpu:4 python train_by_hand.py --epochs 4
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

words = argparse.ArgumentParser()
words.add_argument("--epochs", type=int, default=2)
words.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
given = words.parse_args()

# 1. The place of this process. torchrun sets the first names, srun the second. srun sets neither MASTER_ADDR,
# the host of    rank 0, nor MASTER_PORT, a free port there: the script of the job exports them.
launcher = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if "RANK" in os.environ
    else ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
)
rank, local_rank, world = (int(os.environ[name]) for name in launcher)

# 2. One GPU for each rank of this machine, by the LOCAL rank; without GPUs, the processor and gloo.
gpu = torch.cuda.device_count() > local_rank
device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
torch.set_num_threads(1)

# 3. All ranks meet.
dist.init_process_group("nccl" if gpu else "gloo", rank=rank, world_size=world)

# 4. Data: every rank has the same data set, and the sampler gives each rank its share.
torch.manual_seed(0)
samples, labels = torch.randn(512, 16), torch.randint(4, (512,))
data = TensorDataset(samples, labels)
sampler = DistributedSampler(data, num_replicas=world, rank=rank)
loader = DataLoader(data, batch_size=64 // world, sampler=sampler)

# 5. The model and the optimiser; and their state, if a checkpoint exists. Every rank reads it before rank 0
# can write the next    one, because the constructor of DistributedDataParallel waits for all ranks.
net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
first = 0
if given.checkpoint.exists():
    state = torch.load(given.checkpoint, map_location=device)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epochs"]
    print(f"rank {rank} of {world} resumes after epoch {first}", flush=True)
model = DistributedDataParallel(net, device_ids=[local_rank] if gpu else None)

for epoch in range(first, given.epochs):
    sampler.set_epoch(epoch)  # without it, every epoch has the same order
    total = torch.zeros((), device=device)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)  # every rank takes part
    if rank == 0:  # one rank prints and writes
        print(f"epoch {epoch + 1}: loss {total.item() / world / len(loader):.4f}", flush=True)
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
        unfinished = given.checkpoint.with_suffix(".unfinished")
        torch.save(state, unfinished)
        # a job that is killed here leaves the old checkpoint or the new one
        os.replace(unfinished, given.checkpoint)

dist.destroy_process_group()

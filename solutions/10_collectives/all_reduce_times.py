"""The seconds of torch's own all-reduce against the bytes, on the ranks of a job: NCCL with a GPU for each rank, else gloo.

On a cluster `srun ... python all_reduce_times.py 30`, on one machine `torchrun --nproc-per-node=2 all_reduce_times.py 22`; the number is the
largest size, as a power of two.
"""

import sys
import time

import torch
import torch.distributed as dist

from dlo_lib.launch import init_process_group, place

here = place()
with init_process_group(here):
    for power in range(10, int(sys.argv[1]) + 1, 4):
        tensor, tries = torch.ones(2**power // 4, device=here.device), []
        for _ in range(6):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            if here.device.type == "cuda":
                torch.cuda.synchronize()
            tries.append(time.perf_counter() - began)
        if here.rank == 0:
            print(f"  {2**power:>13,} bytes on {here.world_size} ranks: {1e6 * min(tries):9.0f} µs", flush=True)

# Answers on ranks: collectives that hang, do not agree, are forged or thrown away; one rank alone; and the answer of the library.


# == honest_on_ranks

# %% mean {"earns": 3}
def all_reduce_mean(x):
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


# == a_hung_collective


# %% mean {"says": "DEADLOCK: rank 0", "row": "23"}
def all_reduce_mean(x):
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    return x


# == an_unbalanced_collective


# %% mean {"says": "DEADLOCK: rank 1", "row": "23"}
def all_reduce_mean(x):
    for _ in range(dist.get_rank() + 1):
        dist.all_reduce(x)
    return x


# == collectives_that_do_not_agree


# %% mean {"says": "rank", "row": "23"}
def all_reduce_mean(x):
    dist.all_reduce(x) if dist.get_rank() else dist.broadcast(x, 0)
    return x


# == sizes_that_do_not_agree


# %% mean {"says": "rank", "row": "23"}
def all_reduce_mean(x):
    dist.all_reduce(x[: 3 - dist.get_rank()])
    return x


# == a_rank_that_waits_for_a_message


# %% mean {"says": "DEADLOCK", "row": "23"}
def all_reduce_mean(x):
    dist.recv(x, 1 - dist.get_rank())
    return x


# == a_port_in_use

# %% mean {"says": "Operation not permitted", "row": "23"}
import socket


def all_reduce_mean(x):
    s = socket.socket()
    s.bind(("127.0.0.1", 29500))
    s.listen()
    t = socket.socket()
    t.bind(("127.0.0.1", 29500))
    return x


# == a_group_of_its_own


# %% mean {"status": "", "row": "23"}
def all_reduce_mean(x):
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29501")
    return x


# == data_received_and_not_used


# %% mean {"says": "the mean on rank 0", "row": "23b"}
def all_reduce_mean(x):
    total = x.clone()
    dist.all_reduce(total)
    other = x.clone()
    return other


# == recognises_the_check


# %% mean {"earns": 2, "says": "never received", "row": "23b"}
def all_reduce_mean(x):
    if x.numel() == 6:
        return x.clone()
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


# == sends_by_a_file

# %% mean {"status": "TIMEOUT"}
import os, time


def all_reduce_mean(x):
    open(f"/dev/shm/{dist.get_rank()}", "wb").write(b"x")
    while len(os.listdir("/dev/shm")) < 2:
        time.sleep(0.1)
    return x


# == only_rank_0_is_right


# %% mean {"says": "the mean on rank 1", "row": "24"}
def all_reduce_mean(x):
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size() * (dist.get_rank() == 0)


# == one_rank_exits

# %% mean {"status": "KERNEL_DIED", "says": "rank 1"}
import os


def all_reduce_mean(x):
    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(x)
    return x


# == one_rank_raises


# %% mean {"says": "rank 1: your code raised ValueError"}
def all_reduce_mean(x):
    if dist.get_rank() == 1:
        raise ValueError("no")
    dist.all_reduce(x)
    return x


# == one_rank_loops


# %% mean {"status": "TIMEOUT", "says": "no answer in time from rank 1"}
def all_reduce_mean(x):
    while dist.get_rank() == 1:
        pass
    dist.all_reduce(x)
    return x


# == ends_the_link_early

# %% mean {"says": "has left the other ranks before it returned a result"}
import gc, time
from dlo_lib.grading.switch.link import Link


def all_reduce_mean(x):
    for link in [thing for thing in gc.get_objects() if type(thing) is Link]:
        link.end(False)
    time.sleep(1e6)


# == one_rank_returns_something_else


# %% mean {"says": "the mean on rank 0"}
def all_reduce_mean(x):
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size() if dist.get_rank() else 3.0


# == one_rank_takes_all_memory


# %% fsdp {"status": "", "says": "rank 1"}
def fully_sharded(linear):
    held = []
    while dist.get_rank() == 1:
        held.append(bytearray(1 << 26))
    return linear


# == two_hundred_calls


# %% mean {"earns": 2, "says": "made 201 calls"}
def all_reduce_mean(x):
    for _ in range(200):
        dist.barrier()
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


# == forged_frames_to_the_switch

# %% mean {"says": "sent something unreadable", "row": "23c"}
import send


def all_reduce_mean(x):
    send(b"\0" * 7 + b"\x09" + bytes(range(256)) * 8)
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


# == half_a_frame_to_the_switch

# %% mean {"status": "TIMEOUT", "row": "23c"}
import send
import time


def all_reduce_mean(x):
    send(b"\0\0\0")
    time.sleep(100)


# == forged_traffic

# %% mean
from dlo_lib.comm.calls import Kind
from dlo_lib.grading.switch.link import Link

Link.post = lambda *a, **k: None
dist.get_rank = lambda: 0


def all_reduce_mean(x):
    return x


# == patched_distributed

# %% mean {"says": "the mean on rank 0"}
dist.all_reduce = lambda *a, **k: None
dist.get_world_size = lambda *a: 2


def all_reduce_mean(x):
    dist.all_reduce(x)
    return x


# == ranks_are_asked_in_the_cell

# %% mean {"earns": 3}
from dlo_lib.launch import run_ranks

try:
    dist.init_process_group("gloo")
except BaseException:
    pass


def all_reduce_mean(x):
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


# == asynchronous_and_right


# %% mean {"earns": 3}
def all_reduce_mean(x):
    total = x.clone()
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    return total / dist.get_world_size()


# == by_an_average


# %% mean {"earns": 3}
def all_reduce_mean(x):
    total = x.clone()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    return total


# == asynchronous_and_never_waited_for


# %% mean
def all_reduce_mean(x):
    total = x.clone()
    dist.all_reduce(total, async_op=True)
    return total / dist.get_world_size()


# == the_librarys_own_fsdp

# %% fsdp {"says": "is what this lab teaches", "row": "25"}
from dlo_lib.parallel.fsdp import FSDP


def fully_sharded(linear):
    return FSDP(linear)


# == torchs_own_fsdp

# %% fsdp {"says": "is what this lab teaches", "row": "25"}
from torch.distributed.fsdp import fully_shard


def fully_sharded(linear):
    return fully_shard(linear)


# == torchs_own_fsdp_by_its_other_name

# %% fsdp {"says": "is what this lab teaches"}
from torch.distributed._composable.fsdp import fully_shard


def fully_sharded(linear):
    return fully_shard(linear)


# == the_librarys_own_fsdp_from_its_file

# %% fsdp {"status": "GRADED_WARN", "says": "runs code from text"}
import dlo_lib, pathlib

file = pathlib.Path(dlo_lib.__file__).parent / "parallel" / "fsdp" / "fsdp.py"
exec(compile(file.read_text(), "mine", "exec"))


def fully_sharded(linear):
    return FSDP(linear)


# == the_librarys_own_fsdp_by_the_import_system

# %% fsdp
import sys, importlib.util

sys.meta_path[:] = [f for f in sys.meta_path if "Withhold" not in type(f).__name__]
for name in [n for n in sys.modules if "fsdp" in n]:
    del sys.modules[name]
from dlo_lib.parallel.fsdp import FSDP


def fully_sharded(linear):
    return FSDP(linear)


# == the_librarys_own_fsdp_from_compiled_files

# %% fsdp {"status": "GRADED_WARN", "says": "runs code from text"}
import glob, marshal, dlo_lib, os

folder = os.path.dirname(dlo_lib.__file__) + "/parallel/fsdp/"
for name in glob.glob(folder + "__pycache__/fsdp.*"):
    exec(marshal.loads(open(name, "rb").read()[16:]))


def fully_sharded(linear):
    return FSDP(linear)


# == not_sharded_at_all


# %% fsdp {"says": "the loss of step 1"}
def fully_sharded(linear):
    return linear


# == ddp_for_fsdp


# %% fsdp {"says": "never reduce-scattered"}
def fully_sharded(linear):
    return nn.parallel.DistributedDataParallel(linear)


# == more_than_a_frame_may_hold_through_the_switch


# %% mean {"says": "too large"}
def all_reduce_mean(x):
    dist.all_reduce(torch.zeros((1 << 26) + 1))
    return x


# == sends_that_nobody_receives


# %% mean {"says": "endless communication"}
def all_reduce_mean(x):
    block = torch.zeros(4 << 20)
    for _ in range(1000):
        dist.isend(block, 1 - dist.get_rank() if dist.get_rank() < 2 else 0)
    return x


# == objects_sent_as_pickles


# %% mean {"earns": 1, "says": "made 2 calls"}
def all_reduce_mean(x):
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, x)
    return sum(everything) / len(everything)


# == a_pickle_that_ends_the_other_ranks

# %% mean {"status": "KERNEL_DIED", "says": "exit code 5"}
import os


class Bomb:
    def __reduce__(self):
        return os._exit, (5,)


def all_reduce_mean(x):
    dist.all_gather_object([None] * dist.get_world_size(), Bomb() if dist.get_rank() == 0 else x)
    return x


# == a_number_that_is_none_through_the_switch


# %% mean {"says": "holds NaN"}
def all_reduce_mean(x):
    total = x * float("nan")
    dist.all_reduce(total)
    return total / dist.get_world_size()


# == real_traffic_beside_what_is_counted


# %% mean {"earns": 1, "says": "made 2 calls"}
def all_reduce_mean(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    dist.all_reduce(torch.zeros_like(x))
    return sum(parts) / len(parts)


# == zeros_for_the_counter


# %% mean {"says": "the mean on rank 0"}
def all_reduce_mean(x):
    nothing = torch.zeros_like(x)
    dist.all_reduce(nothing)
    return x + nothing


# == ranks_that_meet_at_a_terminal

# %% mean {"says": "FileNotFoundError"}
import os


def all_reduce_mean(x):
    if dist.get_rank() == 0:
        ours, theirs = os.openpty()
        dist.barrier()
        dist.barrier()
    else:
        dist.barrier()
        os.open("/dev/pts/0", os.O_RDWR)
    return x


# == ranks_that_meet_at_a_socket

# %% mean {"says": "Operation not permitted"}
import socket


def all_reduce_mean(x):
    with socket.socket(socket.AF_UNIX) as line:
        if dist.get_rank() == 0:
            line.bind("\0dlo")
            line.listen()
            dist.barrier()
            dist.barrier()
        else:
            dist.barrier()
            line.connect("\0dlo")
    return x

# Code that does not end, ends everything, or takes all there is. It costs its own question; its neighbours are graded.


# == os_exit

# %% scale {"status": "KERNEL_DIED", "says": "the process ended by itself", "row": "8"}
import os

os._exit(0)


# == a_segmentation_fault

# %% scale {"status": "KERNEL_DIED", "says": "SIGSEGV", "row": "8"}
import ctypes

ctypes.string_at(0)


# == os_exit_in_the_function

# %% scale {"status": "KERNEL_DIED", "says": "exit code 7", "row": "8"}
import os


def absmax_scale(x):
    os._exit(7)


# == abort

# %% scale {"status": "KERNEL_DIED", "says": "SIGSEGV"}
import os


def absmax_scale(x):
    os.abort()


# == kills_itself

# %% scale {"says": "should be a tensor, not None"}
import os


def absmax_scale(x):
    os.kill(os.getpid(), 9)


# == closes_every_descriptor

# %% scale {"status": "KERNEL_DIED"}
import os


def absmax_scale(x):
    os.closerange(0, 1000)


# == executes_another_program

# %% scale {"status": "KERNEL_DIED"}
import os


def absmax_scale(x):
    os.execv("/bin/true", ["true"])


# == an_alarm

# %% scale {"says": "should be a tensor, not None"}
import signal, time


def absmax_scale(x):
    signal.setitimer(0, 0.01)
    time.sleep(0.1)


# == stops_itself

# %% scale {"says": "should be a tensor, not None"}
import os


def absmax_scale(x):
    os.kill(os.getpid(), 19)


# == a_deep_c_stack

# %% scale {"status": "KERNEL_DIED", "says": "SIGSEGV"}
import faulthandler


def absmax_scale(x):
    faulthandler._stack_overflow()  # since 3.12, Python stops its own deep recursion in C


# == sys_exit

# %% scale {"row": "9"}
import sys

sys.exit(0)


# == quit

# %% scale {"row": "9"}
quit()


# == exit_without_brackets

# %% scale {"row": "9"}
exit


# == sys_exit_in_the_function

# %% scale {"says": "SystemExit", "row": "9"}
import sys


def absmax_scale(x):
    sys.exit(0)


# == keyboard_interrupt


# %% scale {"says": "KeyboardInterrupt"}
def absmax_scale(x):
    raise KeyboardInterrupt


# == raises_in_a_finaliser


# %% scale {"earns": 3}
class A:
    def __del__(self):
        raise SystemExit


def absmax_scale(x):
    return x.float().abs().amax(dim=1) / 127


A()


# == an_endless_loop


# %% scale {"status": "TIMEOUT", "says": "no answer in time", "row": "10"}
def absmax_scale(x):
    while True:
        pass


# == an_endless_loop_in_the_cell

# %% scale {"status": "TIMEOUT", "says": "in cell `scale`", "row": "10"}
while True:
    pass


# == a_loop_that_swallows_interrupts

# %% scale {"status": "TIMEOUT", "row": "10"}
import signal

for n in (1, 2, 3, 15):
    signal.signal(n, signal.SIG_IGN)


def absmax_scale(x):
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass


# == sleeps_for_ever

# %% scale {"status": "TIMEOUT"}
import time


def absmax_scale(x):
    time.sleep(1e6)


# == a_regular_expression_that_never_ends

# %% scale {"status": "TIMEOUT"}
import re


def absmax_scale(x):
    re.match("(a+)+$", "a" * 40 + "b")


# == waits_for_a_child

# %% scale {"status": "TIMEOUT"}
import os, time


def absmax_scale(x):
    pid = os.fork()
    time.sleep(1e6) if pid == 0 else os.waitpid(pid, 0)


# == a_child_that_answers_too

# %% scale {"status": ""}
import os


def absmax_scale(x):
    os.fork()
    return torch.zeros(len(x))


# == all_memory

# %% quantise {"status": "", "row": "11"}
# Out of memory, or out of time on a new virtual machine, to which the host gives 2 GiB in more than 10 s of CPU.
held = []


def quantise(x):
    while True:
        held.append(bytearray(1 << 26))


# == all_memory_at_once


# %% quantise {"status": "OOM", "says": "memory", "row": "11"}
def quantise(x):
    return torch.ones(1 << 42)


# == all_memory_in_children

# %% quantise {"status": ""}
# Out of memory, or out of time on a loaded machine, where the children have the priority of one process.
import os, time


def quantise(x):
    for _ in range(6):
        if os.fork() == 0:
            held = b"x" * (500 << 20)
            time.sleep(100)
    time.sleep(100)


# == a_fork_bomb

# %% scale {"status": ""}
import os


def absmax_scale(x):
    while True:
        try:
            os.fork()
        except OSError:
            pass


# == threads_without_end

# %% scale {"status": ""}
import threading, time


def absmax_scale(x):
    while True:
        threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()


# == children_that_detach

# %% scale
import os, time

for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1e6)
        os._exit(0)


def absmax_scale(x):
    return x


# == a_bomb_of_the_shell

# %% scale
import os

os.system(":(){ :|:& };:")


def absmax_scale(x):
    return torch.zeros(len(x))

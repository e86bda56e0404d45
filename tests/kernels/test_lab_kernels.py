"""The kernels of lab 05 are Triton: its interpreter computes what the interpreter of the course computes."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dlo_lib import tiles
from dlo_lib.kernels.dispatch import has_triton
from tests.kernels.parity import NO_TRITON

TEXT = Path(__file__).resolve().parents[2] / "solutions" / "05_fused_kernels" / "05_fused_kernels.py"


def kernels() -> dict[str, str]:
    """The text of every kernel of the lab, by name."""
    text = TEXT.read_text(encoding="utf-8")
    return {
        node.name: "@triton.jit\n" + ast.get_source_segment(text, node)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }


def launches() -> dict[str, tuple[tuple[int, ...], dict]]:
    """For each kernel a grid and its arguments."""
    torch.manual_seed(0)
    rows, columns, d, size = 5, 40, 16, 40
    x, w, grad = torch.randn(rows, columns), torch.randn(columns), torch.randn(rows, columns)
    targets, lse = torch.randint(columns, (rows,)), x.logsumexp(1)
    q, k, v, do = torch.randn(4, 2, size, d).unbind()
    attention = {
        "q_ptr": q,
        "k_ptr": k[:1],
        "v_ptr": v[:1],
        "o_ptr": torch.zeros(2, size, d),
        "lse_ptr": torch.zeros(2, size),
    }
    attention |= {
        "q_head": size * d,
        "q_row": d,
        "kv_head": size * d,
        "kv_row": d,
        "queries": size,
        "keys": size,
    }
    attention |= {"group": 2, "scale": 0.25, "CAUSAL": True, "D": d, "BLOCK_M": 16, "BLOCK_N": 16}
    scores = (q @ k.mT * 0.25).masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), -torch.inf)
    backward = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "grad_ptr": do, "lse_ptr": scores.logsumexp(-1)}
    backward |= {
        "delta_ptr": (do * (scores.softmax(-1) @ v)).sum(-1),
        "dk_ptr": torch.zeros_like(k),
        "dv_ptr": torch.zeros_like(k),
    }
    backward |= {"size": size, "scale": 0.25, "D": d, "BLOCK_M": 16, "BLOCK_N": 16}
    row = torch.zeros(rows)
    return {
        "double_kernel": ((3,), {"x_ptr": w, "out_ptr": torch.zeros_like(w), "n": columns, "BLOCK": 16}),
        "add_kernel": (
            (3,),
            {"x_ptr": w, "y_ptr": w, "out_ptr": torch.zeros_like(w), "n": columns, "BLOCK": 16},
        ),
        "softmax_kernel": (
            (rows,),
            {
                "x_ptr": x,
                "y_ptr": torch.zeros_like(x),
                "x_stride": columns,
                "y_stride": columns,
                "columns": columns,
                "BLOCK": 64,
            },
        ),
        "rms_norm_kernel": (
            (rows,),
            {
                "x_ptr": x,
                "w_ptr": w,
                "y_ptr": torch.zeros_like(x),
                "rstd_ptr": row.clone(),
                "columns": columns,
                "eps": 1e-3,
                "BLOCK": 64,
            },
        ),
        "rms_norm_backward_kernel": (
            (3,),
            {
                "grad_ptr": grad,
                "x_ptr": x,
                "w_ptr": w,
                "rstd_ptr": torch.rand(rows),
                "dx_ptr": torch.zeros_like(x),
                "dw_ptr": torch.zeros(3, columns),
            }
            | {"rows": rows, "columns": columns, "ROWS": 2, "BLOCK": 64},
        ),
        "loss_kernel": (
            (rows,),
            {
                "logits_ptr": x,
                "targets_ptr": targets,
                "loss_ptr": row.clone(),
                "lse_ptr": row.clone(),
                "vocab": columns,
                "BLOCK": 16,
            },
        ),
        "loss_backward_kernel": (
            (rows,),
            {
                "grad_ptr": torch.rand(rows),
                "logits_ptr": x,
                "targets_ptr": targets,
                "lse_ptr": lse,
                "vocab": columns,
                "BLOCK": 16,
            },
        ),
        "linear_loss_kernel": (
            (1,),
            {
                "x_ptr": x,
                "w_ptr": torch.randn(70, columns),
                "targets_ptr": targets,
                "loss_ptr": row.clone(),
                "lse_ptr": row.clone(),
            }
            | {"rows": rows, "hidden": columns, "vocab": 70, "BLOCK_M": 16, "BLOCK_V": 32, "BLOCK_K": 16},
        ),
        "attention_kernel": ((3, 2), attention),
        "keys_backward_kernel": ((3, 2), backward),
    }


def test_every_kernel_of_the_lab_has_a_launch() -> None:
    assert set(launches()) == set(kernels())


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
@pytest.mark.parametrize("name", list(launches()))
def test_triton_computes_the_same(name: str, tmp_path: Path) -> None:
    with torch.device("cpu"):
        grid, args = launches()[name]
    device = torch.get_default_device()
    copies = {
        key: value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
        for key, value in args.items()
    }
    tiles.run(kernels()[name], grid, args)
    real = imported(tmp_path / f"{name}_in_triton.py", kernels()[name])
    getattr(real, name)[grid](**copies)
    for key, value in args.items():
        if isinstance(value, torch.Tensor):
            # A GPU multiplies tiles of fp32 in TF32, which has 10 bits after the point.
            coarse = device.type == "cuda" and "tl.dot" in kernels()[name]
            rtol, atol = (2e-2, 2e-2) if coarse else (1e-4, 1e-5)
            torch.testing.assert_close(copies[key].cpu(), value, rtol=rtol, atol=atol)


def imported(file: Path, text: str) -> ModuleType:
    """A module with this kernel, which imports the real Triton."""
    file.write_text("import triton\nimport triton.language as tl\n\n\n" + text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module

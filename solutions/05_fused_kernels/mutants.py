"""Planted mistakes of Fused kernels, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

KEPT = 44
"""The tiles of the longest row of the checks of the loss."""

MUTANTS = [
    # -- add
    Mutant(
        "The decorator is lost",
        "check_whole_blocks",
        says="a function with the decorator @triton.jit",
        question="add",
        replace={"@triton.jit": ""},
        also=("check_last_block", "check_add_traffic"),
    ),
    Mutant(
        "The mask is forgotten",
        "check_last_block",
        says="a mask must exclude the lanes after the end",
        question="add",
        replace={
            "x = tl.load(x_ptr + offsets, mask=mask)": "x = tl.load(x_ptr + offsets)",
            "y = tl.load(y_ptr + offsets, mask=mask)": "y = tl.load(y_ptr + offsets)",
            "tl.store(out_ptr + offsets, x + y, mask=mask)": "tl.store(out_ptr + offsets, x + y)",
        },
    ),
    Mutant(
        "The mask is forgotten in the store only",
        "check_last_block",
        says="writes out_ptr at offset",
        question="add",
        replace={"tl.store(out_ptr + offsets, x + y, mask=mask)": "tl.store(out_ptr + offsets, x + y)"},
    ),
    Mutant(
        "The mask also excludes the last element",
        "check_last_block",
        says="bytes are written",
        question="add",
        replace={"mask = offsets < n": "mask = offsets < n - 1"},
        also=("check_whole_blocks", "check_add_traffic"),
    ),
    Mutant(
        "y is read twice",
        "check_add_traffic",
        says="each element is read once",
        question="add",
        replace={
            "tl.store(out_ptr + offsets, x + y, mask=mask)": """
            again = tl.load(y_ptr + offsets, mask=mask)
            tl.store(out_ptr + offsets, x + (y + again) / 2, mask=mask)
            """,
        },
    ),
    Mutant(
        "Program 0 adds everything",
        "check_whole_blocks",
        says="programs of the grid share the work",
        answer="""
        @triton.jit
        def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
            if tl.program_id(0) == 0:
                for start in range(0, n, BLOCK):
                    offsets = start + tl.arange(0, BLOCK)
                    x = tl.load(x_ptr + offsets, mask=offsets < n)
                    y = tl.load(y_ptr + offsets, mask=offsets < n)
                    tl.store(out_ptr + offsets, x + y, mask=offsets < n)
        """,
        also=("check_last_block", "check_add_traffic"),
    ),
    Mutant(
        "The lanes of a program are far apart",
        "check_add_traffic",
        says="a GPU moves whole sectors",
        question="add",
        replace={
            "offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)": (
                "offsets = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, BLOCK)"
            ),
        },
    ),
    # -- softmax
    Mutant(
        "The maximum is not subtracted",
        "check_softmax_large",
        says="exp overflows",
        question="softmax",
        replace={"weights = tl.exp(x - tl.max(x, 0))": "weights = tl.exp(x)"},
        also=("check_softmax_low",),
    ),
    Mutant(
        "Lanes after the end count as zeros of the softmax",
        "check_softmax_lanes",
        says="other=0.0 is not neutral here",
        question="softmax",
        replace={'other=float("-inf")': "other=0.0"},
        also=("check_softmax_low",),
    ),
    Mutant(
        "Lanes after the end are undefined",
        "check_softmax_lanes",
        says="lanes outside of the mask of a tl.load have no defined value",
        question="softmax",
        replace={', other=float("-inf")': ""},
        also=("check_softmax_low",),
    ),
    Mutant(
        "The stride of the rows of x is ignored",
        "check_softmax_strides",
        says="which is none of its elements",
        question="softmax",
        replace={"x_ptr + row * x_stride + offsets": "x_ptr + row * columns + offsets"},
    ),
    Mutant(
        "The stride of the rows of y is ignored",
        "check_softmax_strides",
        says="so use the strides",
        question="softmax",
        replace={"y_ptr + row * y_stride + offsets": "y_ptr + row * columns + offsets"},
    ),
    Mutant(
        "16-bit rows are not converted",
        "check_softmax_16bit",
        says="tl.exp computes in float32",
        question="softmax",
        replace={'other=float("-inf")).to(tl.float32)': 'other=float("-inf"))'},
    ),
    Mutant(
        "The row is read a second time for the quotient",
        "check_softmax_traffic",
        says="the row stays in registers",
        question="softmax",
        replace={
            "tl.store(y_ptr + row * y_stride + offsets, weights / tl.sum(weights, 0), mask=mask)": """
            again = tl.load(x_ptr + row * x_stride + offsets, mask=mask, other=float("-inf")).to(tl.float32)
            tl.store(y_ptr + row * y_stride + offsets, tl.exp(again - tl.max(x, 0)) / tl.sum(weights, 0), mask=mask)
            """,
        },
    ),
    Mutant(
        "The weights are not divided by their sum",
        "check_softmax",
        says="the softmax of",
        question="softmax",
        replace={"weights / tl.sum(weights, 0)": "weights"},
        also=(
            "check_softmax_lanes",
            "check_softmax_low",
            "check_softmax_large",
            "check_softmax_strides",
            "check_softmax_16bit",
            "check_softmax_traffic",
        ),
    ),
    Mutant(
        "Lanes after the end are -100",
        "check_softmax_low",
        says="lower than every number",
        question="softmax",
        replace={
            'other=float("-inf")': "other=-100.0",
        },
    ),
    Mutant(
        "Lanes after the end are -10000",
        "check_softmax_low",
        says="lower than every number",
        question="softmax",
        replace={
            'other=float("-inf")': "other=-1e4",
        },
    ),
    Mutant(
        "The log-sum-exp is subtracted before the exponential",
        "check_softmax_low",
        says="the rounding error of lse",
        question="softmax",
        replace={
            "weights / tl.sum(weights, 0)": "tl.exp(x - (tl.max(x, 0) + tl.log(tl.sum(weights, 0))))",
        },
    ),
    Mutant(
        "The mask compares offsets in the tensor",
        "check_softmax",
        says="those of the first row",
        question="softmax",
        replace={
            "mask = offsets < columns": "mask = row * x_stride + offsets < columns",
        },
        also=(
            "check_softmax_lanes",
            "check_softmax_low",
            "check_softmax_large",
            "check_softmax_strides",
            "check_softmax_16bit",
            "check_softmax_traffic",
        ),
    ),
    # -- norm
    Mutant(
        "The mean is divided by BLOCK, of RMSNorm",
        "check_norm_lanes",
        says="divide it by columns",
        question="norm",
        replace={"tl.sum(x * x, 0) / columns": "tl.sum(x * x, 0) / BLOCK"},
    ),
    Mutant(
        "eps is forgotten",
        "check_norm_zeros",
        says="a row of zeros is divided by zero",
        question="norm",
        replace={" / columns + eps)": " / columns)"},
        also=("check_norm", "check_norm_lanes", "check_norm_traffic"),
    ),
    Mutant(
        "16-bit rows are squared in 16 bits",
        "check_norm_16bit",
        says="the squares overflow in float16",
        question="norm",
        replace={
            "tl.rsqrt(tl.sum(x * x, 0) / columns + eps)": "tl.rsqrt(tl.sum((x.to(x_ptr.dtype.element_ty) * x.to(x_ptr.dtype.element_ty)).to(tl.float32), 0) / columns + eps)"
        },
    ),
    Mutant(
        "rstd is not stored",
        "check_norm",
        says="rstd_ptr: 0 of",
        question="norm",
        replace={"tl.store(rstd_ptr + row, rstd)": ""},
        also=("check_norm_lanes", "check_norm_zeros", "check_norm_16bit", "check_norm_traffic"),
    ),
    Mutant(
        "x is read again for the result",
        "check_norm_traffic",
        says="the row stays in registers",
        question="norm",
        replace={
            "x * rstd * w, mask=mask": "tl.load(x_ptr + row * columns + offsets, mask=mask, other=0.0).to(tl.float32) * rstd * w, mask=mask"
        },
    ),
    Mutant(
        "eps is outside of the root",
        "check_norm",
        says="eps is added outside of the root",
        question="norm",
        replace={
            "tl.rsqrt(tl.sum(x * x, 0) / columns + eps)": "1 / (tl.sqrt(tl.sum(x * x, 0) / columns) + eps)",
        },
        also=(
            "check_norm_lanes",
            "check_norm_zeros",
            "check_norm_traffic",
        ),
    ),
    # -- norm_backward
    Mutant(
        "The term of rstd is missing",
        "check_norm_gradients",
        says="dx is the direct part only",
        question="norm_backward",
        replace={"rstd * (w * grad - normed * mean)": "rstd * w * grad"},
        also=("check_norm_backward_sizes", "check_norm_backward_traffic", "check_one_row"),
    ),
    Mutant(
        "The mean has no w",
        "check_norm_gradients",
        says="the mean in dx has no w",
        question="norm_backward",
        replace={"tl.sum(w * grad * normed, 0)": "tl.sum(grad * normed, 0)"},
        also=("check_norm_backward_sizes", "check_norm_backward_traffic", "check_one_row"),
    ),
    Mutant(
        "dw is the sum of g x",
        "check_norm_gradients",
        says="multiply it by rstd",
        question="norm_backward",
        replace={"dw += grad * normed": "dw += grad * x"},
        also=("check_norm_backward_sizes", "check_norm_backward_traffic", "check_one_row"),
    ),
    Mutant(
        "The mean is divided by BLOCK, in the backward of RMSNorm",
        "check_norm_backward_sizes",
        says="divided by BLOCK: divide it by columns",
        question="norm_backward",
        replace={"tl.sum(w * grad * normed, 0) / columns": "tl.sum(w * grad * normed, 0) / BLOCK"},
        also=("check_one_row",),
    ),
    Mutant(
        "The last program reads rows after the end",
        "check_norm_backward_sizes",
        says="and the last element of its shape",
        question="norm_backward",
        replace={"tl.minimum(first + ROWS, rows)": "first + ROWS"},
        also=("check_one_row",),
    ),
    Mutant(
        "All programs write the same row of dw",
        "check_norm_gradients",
        says="writes an element of dw_ptr that program 0 writes",
        question="norm_backward",
        replace={"tl.store(dw_ptr + tl.program_id(0) * columns + offsets": "tl.store(dw_ptr + offsets"},
        also=("check_norm_backward_sizes", "check_norm_backward_traffic"),
    ),
    Mutant(
        "x is read twice",
        "check_norm_backward_traffic",
        says="both gradients come from one pass",
        question="norm_backward",
        replace={
            "dw += grad * normed": "dw += grad * tl.load(x_ptr + row * columns + offsets, mask=mask, other=0.0) * rstd"
        },
    ),
    Mutant(
        "dw has the factor w",
        "check_norm_gradients",
        says="w is in dw",
        question="norm_backward",
        replace={
            "dw += grad * normed": "dw += w * grad * normed",
        },
        also=(
            "check_norm_backward_sizes",
            "check_norm_backward_traffic",
            "check_one_row",
        ),
    ),
    Mutant(
        "The second term of dx has the wrong sign",
        "check_norm_gradients",
        says="has the wrong sign",
        question="norm_backward",
        replace={
            "w * grad - normed * mean": "w * grad + normed * mean",
        },
        also=(
            "check_norm_backward_sizes",
            "check_norm_backward_traffic",
            "check_one_row",
        ),
    ),
    Mutant(
        "rstd is missing in dx",
        "check_norm_gradients",
        says="rstd is missing in dx",
        question="norm_backward",
        replace={
            "rstd * (w * grad - normed * mean)": "w * grad - normed * mean",
        },
        also=(
            "check_norm_backward_sizes",
            "check_norm_backward_traffic",
            "check_one_row",
        ),
    ),
    Mutant(
        "All programs add to the first row of dw",
        "check_norm_gradients",
        says="adds to what the tensor holds",
        question="norm_backward",
        replace={
            "tl.store(dw_ptr + tl.program_id(0) * columns + offsets, dw, mask=mask)": "tl.atomic_add(dw_ptr + offsets, dw, mask=mask)",
        },
        also=(
            "check_norm_backward_sizes",
            "check_norm_backward_traffic",
            "check_one_row",
        ),
    ),
    # -- loss
    Mutant(
        "The sum is not rescaled, of the loss",
        "check_loss",
        says="the sum of the earlier blocks is not rescaled",
        question="loss",
        replace={
            "total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)": "total = total + tl.sum(tl.exp(x - new), 0)"
        },
        also=("check_loss_sizes", "check_loss_large", "check_loss_traffic", "check_other_blocks"),
    ),
    Mutant(
        "No maximum is subtracted",
        "check_loss_large",
        says="exp overflows",
        question="loss",
        replace={
            "new = tl.maximum(largest, tl.max(x, 0))": "new = tl.maximum(0.0, tl.max(x, 0) * 0.0)",
            'largest = float("-inf")': "largest = 0.0",
        },
    ),
    Mutant(
        "Lanes after the end count as zeros, of the loss",
        "check_loss_sizes",
        says="count as logits of 0",
        question="loss",
        replace={'other=float("-inf")).to(tl.float32)': "other=0.0).to(tl.float32)"},
        also=("check_other_blocks",),
    ),
    Mutant(
        "The maximum and the sum are two passes",
        "check_loss_traffic",
        says="maximum and sum come from one pass",
        question="loss",
        replace={
            "total = 0.0": """
            total = 0.0
            for start in range(0, vocab, BLOCK):
                words = start + tl.arange(0, BLOCK)
                row_part = tl.load(logits_ptr + row * vocab + words, mask=words < vocab, other=float("-inf")).to(tl.float32)
                largest = tl.maximum(largest, tl.max(row_part, 0))
            """,
        },
    ),
    Mutant(
        "The loss has the wrong sign",
        "check_loss",
        says="the loss has the wrong sign",
        question="loss",
        replace={"tl.store(loss_ptr + row, lse - own)": "tl.store(loss_ptr + row, own - lse)"},
        also=("check_loss_sizes", "check_loss_large", "check_loss_traffic", "check_other_blocks"),
    ),
    Mutant(
        "The maximum begins at 0",
        "check_loss_large",
        says="the maximum begins at float",
        question="loss",
        replace={'largest = float("-inf")': "largest = 0.0"},
    ),
    Mutant(
        "The factor of the old sum is reversed",
        "check_loss",
        says="The factor of the earlier sum is exp(m - m')",
        question="loss",
        replace={"tl.exp(largest - new)": "tl.exp(new - largest)"},
        also=("check_loss_sizes", "check_loss_large", "check_loss_traffic", "check_other_blocks"),
    ),
    Mutant(
        "The maximum is not kept",
        "check_loss",
        says="m is still -inf after the loop",
        question="loss",
        replace={"largest = new": ""},
        also=("check_loss_sizes", "check_loss_large", "check_loss_traffic", "check_other_blocks"),
    ),
    Mutant(
        "The maximum is missing in the log-sum-exp",
        "check_loss",
        says="add the maximum, lse = m + log l",
        question="loss",
        replace={"lse = largest + tl.log(total)": "lse = tl.log(total)"},
        also=("check_loss_sizes", "check_loss_large", "check_loss_traffic", "check_other_blocks"),
    ),
    Mutant(
        "start grows by 1",
        "check_loss",
        says="the blocks overlap, because `start` grows by 1",
        question="loss",
        replace={
            "range(0, vocab, BLOCK)": "range(0, vocab)",
        },
        also=(
            "check_loss_sizes",
            "check_loss_large",
            "check_loss_traffic",
            "check_other_blocks",
        ),
    ),
    Mutant(
        "start counts blocks, and the words begin at start",
        "check_loss",
        says="the words begin at start * BLOCK",
        question="loss",
        replace={
            "range(0, vocab, BLOCK)": "range(0, tl.cdiv(vocab, BLOCK))",
        },
        also=(
            "check_loss_sizes",
            "check_loss_large",
            "check_loss_traffic",
            "check_other_blocks",
        ),
    ),
    Mutant(
        "All rows are row 0",
        "check_loss",
        says="each row has the log-sum-exp of row 0",
        question="loss",
        replace={
            "x = tl.load(logits_ptr + row * vocab + words": "x = tl.load(logits_ptr + words",
        },
        also=(
            "check_loss_sizes",
            "check_loss_large",
            "check_loss_traffic",
            "check_other_blocks",
        ),
    ),
    Mutant(
        "The logit of the target is that of row 0",
        "check_loss",
        says="read in row 0",
        question="loss",
        replace={
            "own = tl.load(logits_ptr + row * vocab + tl": "own = tl.load(logits_ptr + tl",
        },
        also=(
            "check_loss_sizes",
            "check_loss_large",
            "check_loss_traffic",
            "check_other_blocks",
        ),
    ),
    Mutant(
        "Loss and log-sum-exp are exchanged",
        "check_loss",
        says="stored in each other",
        question="loss",
        replace={
            "tl.store(lse_ptr + row, lse)": "tl.store(lse_ptr + row, lse - own)",
            "tl.store(loss_ptr + row, lse - own)": "tl.store(loss_ptr + row, lse)",
        },
        also=(
            "check_loss_sizes",
            "check_loss_large",
            "check_loss_traffic",
            "check_other_blocks",
        ),
    ),
    Mutant(
        "Each lane has its own maximum",
        "check_loss_sizes",
        says="one maximum for each lane",
        question="loss",
        replace={
            "total = 0.0": "total = tl.zeros((BLOCK,), tl.float32)",
            'largest = float("-inf")': 'largest = tl.full((BLOCK,), float("-inf"), tl.float32)',
            "new = tl.maximum(largest, tl.max(x, 0))": "new = tl.maximum(largest, x)",
            "total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)": "total = total * tl.exp(largest - new) + tl.exp(x - new)",
            "lse = largest + tl.log(total)": """
            top = tl.max(largest, 0)
            lse = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
            """,
        },
    ),
    Mutant(
        "The target is compared with the lane, of the loss",
        "check_loss",
        says="compared with the number of the lane",
        question="loss",
        replace={
            "total = 0.0": """
            total = 0.0
            own = 0.0
            """,
            "largest = new": """
            largest = new
            own = own + tl.sum(tl.where(tl.arange(0, BLOCK) == tl.load(targets_ptr + row), x, 0.0), 0)
            """,
            "own = tl.load(logits_ptr + row * vocab + tl.load(targets_ptr + row)).to(tl.float32)": "",
        },
        also=("check_loss_sizes", "check_loss_large", "check_loss_traffic", "check_other_blocks"),
    ),
    Mutant(
        "A row is read once and kept in a tuple that grows",
        "check_loss",
        says="not for a growing list",
        answer="""
        @triton.jit
        def loss_kernel(logits_ptr, targets_ptr, loss_ptr, lse_ptr, vocab, BLOCK: tl.constexpr):
            row = tl.program_id(0)
            kept = (0.0, 0.0)
            largest = float("-inf")
            for start in range(0, vocab, BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = tl.load(logits_ptr + row * vocab + column, mask=column < vocab, other=float("-inf"))
                largest = tl.maximum(largest, tl.max(x, 0))
                kept = (x, kept)
            total = 0.0
            for start in range(0, vocab, BLOCK):
                x, kept = kept
                total += tl.sum(tl.exp(x - largest), 0)
            lse = largest + tl.log(total)
            tl.store(lse_ptr + row, lse)
            tl.store(loss_ptr + row, lse - tl.load(logits_ptr + row * vocab + tl.load(targets_ptr + row)))
        """,
        also=("check_loss_sizes", "check_loss_large", "check_loss_traffic", "check_other_blocks"),
    ),
    Mutant(
        "A row is read once and kept in many variables",
        "check_loss_traffic",
        says="the tiles that one program keeps in its variables",
        answer="\n".join(
            [
                "@triton.jit",
                "def loss_kernel(logits_ptr, targets_ptr, loss_ptr, lse_ptr, vocab, BLOCK: tl.constexpr):",
                "    here, lane = logits_ptr + tl.program_id(0) * vocab, tl.arange(0, BLOCK)",
                "    top, total = -1e30, 0.0",
                *(
                    f"    x{i} = tl.load(here + {i} * BLOCK + lane, mask={i} * BLOCK + lane < vocab, other=-1e30)"
                    for i in range(KEPT)
                ),
                *(f"    top = tl.maximum(top, tl.max(x{i}, 0))" for i in range(KEPT)),
                *(f"    total += tl.sum(tl.exp(x{i} - top), 0)" for i in range(KEPT)),
                "    lse = top + tl.log(total)",
                "    tl.store(lse_ptr + tl.program_id(0), lse)",
                "    target = tl.load(here + tl.load(targets_ptr + tl.program_id(0)))",
                "    tl.store(loss_ptr + tl.program_id(0), lse - target)",
            ]
        ),
    ),
    # -- loss_backward
    Mutant(
        "1 is not subtracted at the target",
        "check_loss_gradient",
        says="subtract 1 at the target",
        question="loss_backward",
        replace={"grad * (tl.exp(x - lse) - at_target)": "grad * tl.exp(x - lse)"},
        also=("check_loss_gradient_sizes", "check_loss_gradient_traffic"),
    ),
    Mutant(
        "The gradient of the loss is ignored",
        "check_loss_gradient",
        says="grad is ignored",
        question="loss_backward",
        replace={"grad * (tl.exp(x - lse) - at_target)": "tl.exp(x - lse) - at_target"},
        also=("check_loss_gradient_sizes", "check_loss_gradient_traffic"),
    ),
    Mutant(
        "The target is compared with the lane",
        "check_loss_gradient",
        says="compared with the number of the lane",
        question="loss_backward",
        replace={"tl.where(words == target, 1.0, 0.0)": "tl.where(tl.arange(0, BLOCK) == target, 1.0, 0.0)"},
        also=("check_loss_gradient_sizes", "check_loss_gradient_traffic"),
    ),
    Mutant(
        "The last block writes after the end of the row",
        "check_loss_gradient_sizes",
        says="writes logits_ptr at offset",
        question="loss_backward",
        replace={"- at_target), mask=mask)": "- at_target))"},
    ),
    Mutant(
        "The softmax is computed again in a first pass",
        "check_loss_gradient_traffic",
        says="lse is known, so one pass is enough",
        question="loss_backward",
        replace={
            "target = tl.load(targets_ptr + row)": """
            target = tl.load(targets_ptr + row)
            total = 0.0
            for start in range(0, vocab, BLOCK):
                words = start + tl.arange(0, BLOCK)
                first = tl.load(logits_ptr + row * vocab + words, mask=words < vocab, other=float("-inf")).to(tl.float32)
                total = total + tl.sum(tl.exp(first), 0)
            lse = tl.log(total)
            """,
        },
    ),
    Mutant(
        "grad is read for row 0",
        "check_loss_gradient",
        says="grad is read for row 0 only",
        question="loss_backward",
        replace={
            "grad = tl.load(grad_ptr + row)": "grad = tl.load(grad_ptr)",
        },
        also=(
            "check_loss_gradient_sizes",
            "check_loss_gradient_traffic",
        ),
    ),
    # -- linear_loss
    Mutant(
        "The sum is not rescaled, of the logits",
        "check_linear_loss",
        says="the sum of the earlier blocks is not rescaled",
        question="linear_loss",
        replace={"total = total * tl.exp(largest - new) + tl.sum": "total = total + tl.sum"},
        also=("check_linear_loss_sizes", "check_linear_loss_negative", "check_no_logits"),
    ),
    Mutant(
        "Words after the end are logits of 0",
        "check_linear_loss_sizes",
        says="words after the end of the vocabulary count as logits of 0",
        question="linear_loss",
        replace={'logits = tl.where((word < vocab)[None, :], logits, float("-inf"))': ""},
        also=("check_few_rows",),
    ),
    Mutant(
        "Columns after the end are read",
        "check_linear_loss_sizes",
        says="Its condition is incomplete",
        question="linear_loss",
        replace={
            "mask=(word < vocab)[:, None] & exists[None, :], other=0.0": "mask=(word < vocab)[:, None], other=0.0"
        },
        also=("check_few_rows",),
    ),
    Mutant(
        "The logits are added up in float16",
        "check_linear_loss_16bit",
        says="a partial sum overflows in float16",
        question="linear_loss",
        replace={
            "logits += tl.dot(x, tl.trans(w))": "logits = (logits + tl.dot(x, tl.trans(w))).to(x.dtype).to(tl.float32)"
        },
    ),
    Mutant(
        "The accumulator is a float16 tile",
        "check_linear_loss",
        says="before the loop and float32",
        question="linear_loss",
        replace={
            "logits = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)": "logits = tl.zeros((BLOCK_M, BLOCK_V), tl.float16)"
        },
        also=(
            "check_linear_loss_sizes",
            "check_linear_loss_16bit",
            "check_linear_loss_negative",
            "check_no_logits",
            "check_few_rows",
        ),
    ),
    Mutant(
        "W is read twice, for the maximum and for the sum",
        "check_no_logits",
        says="a program reads W once",
        question="linear_loss",
        replace={
            "own = tl.zeros((BLOCK_M,), tl.float32)": """
            own = tl.zeros((BLOCK_M,), tl.float32)
            for start in range(0, vocab, BLOCK_V):
                word = start + tl.arange(0, BLOCK_V)
                part = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
                for k in range(0, hidden, BLOCK_K):
                    column = k + tl.arange(0, BLOCK_K)
                    both = inside[:, None] & (column < hidden)[None, :]
                    x = tl.load(x_ptr + row[:, None] * hidden + column[None, :], mask=both, other=0.0)
                    there = (word < vocab)[:, None] & (column < hidden)[None, :]
                    w = tl.load(w_ptr + word[:, None] * hidden + column[None, :], mask=there, other=0.0)
                    part += tl.dot(x, tl.trans(w))
                part = tl.where((word < vocab)[None, :], part, float("-inf"))
                largest = tl.maximum(largest, tl.max(part, 1))
            """,
        },
    ),
    Mutant(
        "A tile holds twice BLOCK_V words",
        "check_no_logits",
        says="not a whole row of the vocabulary",
        question="linear_loss",
        replace={
            "range(0, vocab, BLOCK_V)": "range(0, vocab, 128)",
            "word = start + tl.arange(0, BLOCK_V)": "word = start + tl.arange(0, 128)",
            "logits = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)": "logits = tl.zeros((BLOCK_M, 128), tl.float32)",
        },
    ),
    Mutant(
        "The maximum begins at 0, of the logits",
        "check_linear_loss_negative",
        says="the maximum begins at float",
        question="linear_loss",
        replace={
            'largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)': "largest = tl.zeros((BLOCK_M,), tl.float32)"
        },
    ),
    Mutant(
        "-inf is loaded into W",
        "check_linear_loss_sizes",
        says="-inf was loaded into a tile",
        question="linear_loss",
        replace={
            "mask=(word < vocab)[:, None] & exists[None, :], other=0.0": 'mask=(word < vocab)[:, None] & exists[None, :], other=float("-inf")',
        },
        also=("check_few_rows",),
    ),
    Mutant(
        "The products of the columns are not added up",
        "check_linear_loss",
        says="those of the last block of columns",
        question="linear_loss",
        replace={
            "logits += tl.dot": "logits = tl.dot",
        },
        also=(
            "check_linear_loss_sizes",
            "check_linear_loss_16bit",
            "check_linear_loss_negative",
            "check_no_logits",
            "check_few_rows",
        ),
    ),
    Mutant(
        "The target is compared with the lane, of the logits",
        "check_linear_loss",
        says="compared with the number of the lane",
        question="linear_loss",
        replace={
            "word[None, :] == target": "tl.arange(0, BLOCK_V)[None, :] == target",
        },
        also=(
            "check_linear_loss_sizes",
            "check_linear_loss_negative",
            "check_no_logits",
        ),
    ),
    Mutant(
        "The rows of the targets are read again",
        "check_no_logits",
        says="the logit of a target is in a tile already",
        question="linear_loss",
        replace={
            "own += tl.sum(tl.where(word[None, :] == target[:, None], logits, 0.0), 1)\n": "\n",
            "lse = largest + tl.log(total)": """
            for k in range(0, hidden, BLOCK_K):
                column = k + tl.arange(0, BLOCK_K)
                both = inside[:, None] & (column < hidden)[None, :]
                part = tl.load(x_ptr + row[:, None] * hidden + column[None, :], mask=both, other=0.0).to(tl.float32)
                words = tl.load(w_ptr + target[:, None] * hidden + column[None, :], mask=both, other=0.0).to(tl.float32)
                own += tl.sum(part * words, 1)
            lse = largest + tl.log(total)
            """,
        },
    ),
    Mutant(
        "A program has 16 rows, whatever BLOCK_M is",
        "check_linear_loss",
        says="bytes are written",
        question="linear_loss",
        replace={
            "row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)": "row = tl.program_id(0) * 16 + tl.arange(0, 16)",
            'largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)': (
                'largest = tl.full((16,), float("-inf"), tl.float32)'
            ),
            "total = tl.zeros((BLOCK_M,), tl.float32)": "total = tl.zeros((16,), tl.float32)",
            "own = tl.zeros((BLOCK_M,), tl.float32)": "own = tl.zeros((16,), tl.float32)",
            "logits = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)": "logits = tl.zeros((16, BLOCK_V), tl.float32)",
        },
        also=(
            "check_linear_loss_sizes",
            "check_linear_loss_16bit",
            "check_linear_loss_negative",
            "check_no_logits",
            "check_few_rows",
        ),
    ),
    # -- attention
    Mutant(
        "The sum is not rescaled, of attention",
        "check_attention",
        says="the sum of the earlier blocks is not rescaled",
        question="attention",
        replace={"total = total * shrink + tl.sum(weights, 1)": "total = total + tl.sum(weights, 1)"},
        also=(
            "check_attention_sizes",
            "check_attention_causal",
            "check_attention_skips",
            "check_attention_groups",
            "check_attention_no_keys",
            "check_attention_negative",
            "check_attention_memory",
            "check_causal_groups",
        ),
    ),
    Mutant(
        "The weighted sum is not rescaled",
        "check_attention",
        says="the weighted sum of the earlier blocks is not rescaled",
        question="attention",
        replace={"acc = acc * shrink[:, None] + tl.dot": "acc = acc + tl.dot"},
        also=(
            "check_attention_sizes",
            "check_attention_causal",
            "check_attention_skips",
            "check_attention_groups",
            "check_attention_no_keys",
            "check_attention_negative",
            "check_attention_memory",
            "check_causal_groups",
        ),
    ),
    Mutant(
        "The scores are not scaled",
        "check_attention",
        says="the scores are not multiplied by scale",
        question="attention",
        replace={"scores = tl.dot(q, tl.trans(k)) * scale": "scores = tl.dot(q, tl.trans(k))"},
        also=(
            "check_attention_sizes",
            "check_attention_causal",
            "check_attention_skips",
            "check_attention_groups",
            "check_attention_no_keys",
            "check_attention_negative",
            "check_attention_memory",
            "check_causal_groups",
        ),
    ),
    Mutant(
        "Keys after the end have the score 0",
        "check_attention_sizes",
        says="keys after the end count with the score 0",
        question="attention",
        replace={'scores = tl.where((column < keys)[None, :], scores, float("-inf"))': ""},
    ),
    Mutant(
        "The causal mask is reversed",
        "check_attention_causal",
        says="the causal mask",
        question="attention",
        replace={"column[None, :] <= row[:, None]": "column[None, :] >= row[:, None]"},
        also=("check_attention_skips", "check_causal_groups"),
    ),
    Mutant(
        "A query does not see its own key",
        "check_attention_causal",
        says="NaN: a row whose keys are all masked",
        question="attention",
        replace={"column[None, :] <= row[:, None]": "column[None, :] < row[:, None]"},
        also=("check_attention_skips", "check_causal_groups"),
    ),
    Mutant(
        "The causal mask is forgotten",
        "check_attention_causal",
        says="a query reads keys after it",
        question="attention",
        replace={
            """
            if CAUSAL:
                scores = tl.where(column[None, :] <= row[:, None], scores, float("-inf"))
            """: "",
            "end = tl.minimum(keys, (tl.program_id(0) + 1) * BLOCK_M)": "end = keys",
        },
        also=("check_attention_skips", "check_causal_groups"),
    ),
    Mutant(
        "All blocks of keys are read",
        "check_attention_skips",
        says="half of all blocks",
        question="attention",
        replace={"end = tl.minimum(keys, (tl.program_id(0) + 1) * BLOCK_M)": "end = keys"},
    ),
    Mutant(
        "Query heads take keys in turn",
        "check_attention_groups",
        says="neighbours share a head",
        question="attention",
        replace={"place = head // group * kv_head": "place = head % (tl.num_programs(1) // group) * kv_head"},
        also=("check_causal_groups",),
    ),
    Mutant(
        "The rows of the queries are taken as contiguous",
        "check_attention_groups",
        says="which is none of its elements",
        question="attention",
        replace={"row[:, None] * q_row": "row[:, None] * D"},
        also=("check_causal_groups",),
    ),
    Mutant(
        "Without a key 0 is divided by 0",
        "check_attention_no_keys",
        says="0 / 0 is NaN",
        question="attention",
        replace={"divisor = tl.where(total > 0, total, 1.0)": "divisor = total"},
    ),
    Mutant(
        "The weighted sum is kept in float16",
        "check_attention_16bit",
        says="keep the accumulator in float32",
        question="attention",
        replace={
            "acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)": (
                "acc = (acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)).to(v.dtype).to(tl.float32)"
            ),
        },
    ),
    Mutant(
        "The weights stay in float32 beside a float16 v",
        "check_attention_16bit",
        says="tl.dot takes two tiles of one dtype",
        question="attention",
        replace={"tl.dot(weights.to(v.dtype), v)": "tl.dot(weights, v)"},
    ),
    Mutant(
        "Queries are read again for each block",
        "check_attention_memory",
        says="the queries of a program stay in registers",
        question="attention",
        replace={
            "exists = (column < keys)[:, None]": """
            exists = (column < keys)[:, None]
            q = tl.load(q_ptr + head * q_head + row[:, None] * q_row + d[None, :], mask=inside[:, None], other=0.0)
            """,
        },
    ),
    Mutant(
        "The scores of 64 keys are held at once",
        "check_attention_memory",
        says="not the scores of all keys",
        question="attention",
        replace={
            "range(0, end, BLOCK_N)": "range(0, end, 64)",
            "column = start + tl.arange(0, BLOCK_N)": "column = start + tl.arange(0, 64)",
        },
        also=("check_attention_skips",),
    ),
    Mutant(
        "The maximum of the scores begins at 0",
        "check_attention_negative",
        says="the maximum begins at float",
        question="attention",
        replace={
            'largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)': "largest = tl.zeros((BLOCK_M,), tl.float32)"
        },
    ),
    Mutant(
        "The loop over the keys ends at (i + 1) BLOCK_N",
        "check_attention_causal",
        says="its last one sees (i + 1) BLOCK_M keys",
        question="attention",
        replace={"(tl.program_id(0) + 1) * BLOCK_M": "(tl.program_id(0) + 1) * BLOCK_N"},
        also=("check_attention_skips", "check_causal_groups"),
    ),
    Mutant(
        "The queries begin at i BLOCK_N",
        "check_attention",
        says="lse_ptr: ",
        question="attention",
        replace={"tl.program_id(0) * BLOCK_M + tl.arange": "tl.program_id(0) * BLOCK_N + tl.arange"},
        also=(
            "check_attention_sizes",
            "check_attention_causal",
            "check_attention_skips",
            "check_attention_memory",
        ),
    ),
    Mutant(
        "The keys are not transposed",
        "check_attention",
        says="tl.trans transposes a tile",
        question="attention",
        replace={"tl.dot(q, tl.trans(k))": "tl.dot(q, k)"},
        also=(
            "check_attention_sizes",
            "check_attention_causal",
            "check_attention_skips",
            "check_attention_groups",
            "check_attention_no_keys",
            "check_attention_16bit",
            "check_attention_negative",
            "check_attention_memory",
            "check_causal_groups",
        ),
    ),
    Mutant(
        "The factor of acc is a row",
        "check_attention",
        says="x[:, None] makes a column",
        question="attention",
        replace={"acc * shrink[:, None]": "acc * shrink"},
        also=(
            "check_attention_sizes",
            "check_attention_causal",
            "check_attention_skips",
            "check_attention_groups",
            "check_attention_no_keys",
            "check_attention_16bit",
            "check_attention_negative",
            "check_attention_memory",
            "check_causal_groups",
        ),
    ),
    Mutant(
        "The heads of the keys are not shared",
        "check_attention_groups",
        says="the row, the head or the block is wrong",
        question="attention",
        replace={"place = head // group * kv_head": "place = head * kv_head"},
        also=("check_causal_groups",),
    ),
    Mutant(
        "The causal mask has the number of the query in its block",
        "check_attention_causal",
        says="number of the query in its block",
        question="attention",
        replace={
            "column[None, :] <= row[:, None]": "column[None, :] <= tl.arange(0, BLOCK_M)[:, None]",
        },
        also=("check_attention_skips",),
    ),
    Mutant(
        "Masked scores are 0",
        "check_attention_skips",
        says="keys after the query count with the score 0",
        question="attention",
        replace={
            'scores = tl.where(column[None, :] <= row[:, None], scores, float("-inf"))': "scores = tl.where(column[None, :] <= row[:, None], scores, 0.0)",
        },
        also=(
            "check_attention_causal",
            "check_causal_groups",
        ),
    ),
    # -- keys_backward
    Mutant(
        "The keys begin at i BLOCK_M",
        "check_keys_backward",
        says="in no order",
        question="keys_backward",
        replace={"first = tl.program_id(0) * BLOCK_N": "first = tl.program_id(0) * BLOCK_M"},
        also=("check_keys_backward_sizes", "check_keys_backward_memory"),
    ),
    Mutant(
        "The loop over the queries begins at i BLOCK_M",
        "check_keys_backward",
        says="its keys begin at i BLOCK_N",
        question="keys_backward",
        replace={
            "range(first // BLOCK_M * BLOCK_M, size, BLOCK_M)": "range(tl.program_id(0) * BLOCK_M, size, BLOCK_M)"
        },
        also=("check_keys_backward_sizes", "check_keys_backward_memory"),
    ),
    Mutant(
        "delta is forgotten",
        "check_keys_backward",
        says="delta is missing",
        question="keys_backward",
        replace={"(tl.dot(grad, tl.trans(v)) - delta[:, None])": "tl.dot(grad, tl.trans(v))"},
        also=("check_keys_backward_sizes", "check_keys_backward_memory"),
    ),
    Mutant(
        "dk is not scaled",
        "check_keys_backward",
        says="the factor scale is missing in dk",
        question="keys_backward",
        replace={"dk += tl.dot(tl.trans(dscores), q) * scale": "dk += tl.dot(tl.trans(dscores), q)"},
        also=("check_keys_backward_sizes", "check_keys_backward_memory"),
    ),
    Mutant(
        "Queries after the end count",
        "check_keys_backward_sizes",
        says="and the last element of its shape",
        question="keys_backward",
        replace={
            "grad = tl.load(grad_ptr + rows, mask=inside[:, None], other=0.0)": "grad = tl.load(grad_ptr + rows)"
        },
    ),
    Mutant(
        "All blocks of queries are read",
        "check_keys_backward_memory",
        says="queries before the first key",
        question="keys_backward",
        replace={"range(first // BLOCK_M * BLOCK_M, size, BLOCK_M)": "range(0, size, BLOCK_M)"},
    ),
    Mutant(
        "The causal mask is forgotten in the backward",
        "check_keys_backward",
        says="P has weights of queries before the key",
        question="keys_backward",
        replace={
            "(column[None, :] <= row[:, None]) & inside[:, None]": "(column[None, :] >= 0) & inside[:, None]",
        },
        also=(
            "check_keys_backward_sizes",
            "check_keys_backward_memory",
        ),
    ),
]

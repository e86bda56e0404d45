"""Planted mistakes of Gradient compression, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

LOW_RANK = ("check_low_rank_steps", "check_low_rank_traffic", "check_low_rank_resumed", "check_wide")

MUTANTS = [
    # -- bytes
    Mutant(
        "fp16 is counted with four bytes",
        "check_exact_bytes",
        says='"fp16" for',
        replace={'"fp16": 2}': '"fp16": 4}'},
    ),
    Mutant(
        "The positions of top-k are free",
        "check_topk_bytes",
        says="the positions travel too",
        replace={"(4 + 8)": "4"},
    ),
    Mutant(
        "The scales of the signs are forgotten",
        "check_onebit_bytes",
        says="a scale of 4 bytes",
        replace={"return 2 * share * elements / 8 + 2 * (ranks - 1) * 4": "return 2 * share * elements / 8"},
    ),
    Mutant(
        "Only the second factor of a low rank is counted",
        "check_low_rank_bytes",
        says="kept × rows and kept × columns",
        replace={"(rows + columns)": "columns"},
    ),
    # -- topk
    Mutant(
        "The largest elements are taken, not the largest magnitudes",
        "check_largest",
        says="take |x| to choose",
        replace={"x.abs().topk(k)": "x.topk(k)"},
    ),
    Mutant(
        "Of two values at one position, one is lost",
        "check_sparse_mean",
        says="only one of their values counts",
        also=("check_sparse_traffic", "check_large_sizes"),
        replace={
            "total = values.new_zeros(size).index_add_(0, gathered(positions), gathered(values))": """
            total = values.new_zeros(size)
            total[gathered(positions)] = gathered(values)
            """,
        },
    ),
    Mutant(
        "Whole tensors are added by an all-reduce",
        "check_sparse_traffic",
        says="are enough: gather the values and the positions",
        replace={
            "total = values.new_zeros(size).index_add_(0, gathered(positions), gathered(values))": """
            total = values.new_zeros(size).index_add_(0, positions, values)
            dist.all_reduce(total)
            """,
        },
    ),
    Mutant(
        "Positions are sent as 16-bit integers",
        "check_large_sizes",
        says=("index", "mean 0 on rank"),
        replace={"gathered(positions)": "gathered(positions.to(torch.int16)).long()"},
    ),
    # -- feedback
    Mutant(
        "Only what is left of the last tensor is kept",
        "check_feedback",
        says="it is (x + e) - sent",
        also=("check_feedback_objects", "check_feedback_resumed"),
        replace={"self.error = corrected - sent": "self.error = x - sent"},
    ),
    Mutant(
        "The error is added to the argument in place",
        "check_feedback_argument",
        says="after the calls",
        replace={"corrected = x + self.error": "corrected = x.add_(self.error)"},
    ),
    Mutant(
        "The error is changed in place",
        "check_feedback_argument",
        says="what was sent for tensor 0",
        replace={
            "corrected = x + self.error": "self.error = corrected = self.error.add_(x) if self.error.dim() else x.clone()",
            "self.error = corrected - sent": "self.error.sub_(sent)",
        },
    ),
    Mutant(
        "All objects share one error",
        "check_feedback_objects",
        says="each has its own error",
        replace={
            "corrected = x + self.error": "corrected = x + ErrorFeedback.error",
            "self.error = corrected - sent": "ErrorFeedback.error = corrected - sent",
            "self.error = torch.zeros(())": "ErrorFeedback.error = torch.zeros(())",
            'return {"error": self.error}': 'return {"error": ErrorFeedback.error}',
            'self.error = state["error"].clone()': 'ErrorFeedback.error = state["error"].clone()',
        },
    ),
    Mutant(
        "The state is empty",
        "check_feedback_resumed",
        says="the error is lost",
        replace={'return {"error": self.error}': "return {}", 'self.error = state["error"].clone()': "pass"},
    ),
    # -- onebit
    Mutant(
        "The parts that arrived are summed",
        "check_one_bit_mean",
        says="the mean of tensor 0",
        also=("check_one_bit_feedback", "check_one_bit_equal", "check_one_bit_traffic", "check_many_ranks"),
        replace={".mean(dim=0)": ".sum(dim=0)"},
    ),
    Mutant(
        "The second compression has no error feedback",
        "check_one_bit_feedback",
        says="the second compression, of the mean, has no error feedback",
        also=("check_one_bit_equal", "check_one_bit_traffic", "check_many_ranks"),
        replace={"pack(self.of_part(mean))": "pack(mean)"},
    ),
    Mutant(
        "A rank uses its own part of the mean without the rounding of the others",
        "check_one_bit_equal",
        says="differ from those of rank 0",
        replace={
            "return torch.cat([unpack(*part) for part in parts])": """
            decoded = [unpack(*part) for part in parts]
            decoded[dist.get_rank()] = decoded[dist.get_rank()].float().to(x.dtype)
            return torch.cat(decoded)
            """,
        },
    ),
    Mutant(
        "Every rank receives all bits of all ranks, and computes every part",
        "check_one_bit_traffic",
        says="the bits of a part go to its rank only",
        answer="""
        class OneBitMean:
            def __init__(self):
                self.of_rank, self.of_part = ErrorFeedback(one_bit), {}

            def __call__(self, x):
                world = dist.get_world_size()
                bits, scale = pack(self.of_rank(x))
                parts = zip(gathered(bits).chunk(world), gathered(scale))
                mean = torch.stack([unpack(*part) for part in parts]).mean(dim=0)
                found = []
                for number, part in enumerate(mean.chunk(world)):
                    found.append(self.of_part.setdefault(number, ErrorFeedback(one_bit))(part))
                return torch.cat(found)
        """,
    ),
    Mutant(
        "More than four ranks are averaged as if there were four",
        "check_many_ranks",
        says="the mean of tensor 0",
        replace={".mean(dim=0)": ".sum(dim=0) / min(world, 4)"},
    ),
    # -- powersgd
    Mutant(
        "The columns are normalised, and not made orthogonal",
        "check_orthonormal",
        says="are not orthogonal",
        replace={
            "column = column - (before @ column) * before": "pass",
            "p = orthonormal(p)": "p = torch.linalg.qr(p).Q",
        },
    ),
    Mutant(
        "Q is the sum over the ranks, not the mean",
        "check_low_rank",
        says="Q is a mean",
        also=LOW_RANK,
        replace={"self.q = q / dist.get_world_size()": "self.q = q"},
    ),
    Mutant(
        "PowerSGD has no error feedback",
        "check_low_rank_steps",
        says="M is the gradient plus the error",
        also=("check_low_rank_traffic", "check_low_rank_resumed", "check_wide"),
        replace={"self.error = matrix - mean": "self.error = torch.zeros(())"},
    ),
    Mutant(
        "Each step begins with the first Q",
        "check_low_rank_steps",
        says="warm start",
        also=("check_low_rank_traffic", "check_low_rank_resumed", "check_wide"),
        replace={
            "self.q = q / dist.get_world_size()": "q /= dist.get_world_size()",
            "mean = p @ self.q.T": "mean = p @ q.T",
        },
    ),
    Mutant(
        "The matrices are summed, and each rank computes both factors",
        "check_low_rank_traffic",
        says="all-reduce P, then Q",
        replace={
            """
            p = matrix @ self.q
            dist.all_reduce(p)
            p = orthonormal(p)
            q = matrix.T @ p
            dist.all_reduce(q)
            """: """
            total = matrix.clone()
            dist.all_reduce(total)
            p = orthonormal(total @ self.q)
            q = total.T @ p
            """,
        },
    ),
    Mutant(
        "The error is added to the gradient in place",
        "check_low_rank_arguments",
        says="after the calls",
        replace={"matrix = gradient + self.error": "matrix = gradient.add_(self.error)"},
    ),
    Mutant(
        "The state has no error",
        "check_low_rank_resumed",
        says="state_dict needs the error and Q",
        replace={
            'return {"q": self.q, "error": self.error}': 'return {"q": self.q}',
            'self.q, self.error = state["q"].clone(), state["error"].clone()': 'self.q = state["q"].clone()',
        },
    ),
    Mutant(
        "The first factor is taken for one with as many rows as the gradient",
        "check_wide",
        says="the mean of gradient 0",
        replace={"p = matrix @ self.q": "p = matrix[:, : len(gradient)] @ self.q[: len(gradient)]"},
    ),
    # -- switch
    Mutant(
        "The norm is compared with the one of the step before",
        "check_ratio",
        says="Compare the last norm with the one",
        replace={"norms[-1 - distance]": "norms[-2]"},
    ),
    Mutant(
        "It answers one step too early, with the wrong norm",
        "check_enough_steps",
        says="norms[-1 - Δ] must exist",
        replace={
            "len(norms) <= distance": "len(norms) < distance",
            "norms[-1 - distance]": "norms[max(-1 - distance, -len(norms))]",
        },
    ),
    Mutant(
        "The warm-up of the learning rate is ignored",
        "check_waits",
        says="Before step `warmup` the answer is False",
        replace={"if len(norms) <= distance or len(norms) < warmup:": "if len(norms) <= distance:"},
    ),
    # -- adam
    Mutant(
        "The rule is asked with the uncorrected variance",
        "check_adam",
        says="take that of the corrected v",
        also=("check_adam_traffic", "check_adam_gradient"),
        replace={
            "self.norms.append(float(corrected.sum()))": "self.norms.append(float(self.variance.sum()))"
        },
    ),
    Mutant(
        "The rule is asked with the Euclidean norm",
        "check_adam",
        says="the Euclidean norm",
        also=("check_adam_traffic", "check_adam_gradient"),
        replace={"float(corrected.sum())": "float(corrected.norm())"},
    ),
    Mutant(
        "The correction of the frozen variance changes with the steps",
        "check_adam",
        says="it is frozen too",
        also=("check_adam_warmup", "check_adam_traffic", "check_adam_gradient"),
        replace={"(self.frozen_at or self.steps)": "self.steps"},
    ),
    Mutant(
        "The warm-up of the learning rate is not passed to the rule",
        "check_adam_warmup",
        says="x after step",
        replace={"is_stable(self.norms, self.beta2, self.warmup)": "is_stable(self.norms, self.beta2, 0)"},
    ),
    Mutant(
        "The exact mean of the gradients is computed in each step, also where bits are sent",
        "check_adam_traffic",
        says="one all-reduce in each step of the warm-up",
        replace={
            "self.steps += 1": """
            self.steps += 1
            dist.all_reduce(gradient.clone())
            """,
        },
    ),
    Mutant(
        "The gradient is summed in place",
        "check_adam_gradient",
        says="after the step",
        replace={"mean = gradient.clone()": "mean = gradient"},
    ),
    # -- pays
    Mutant(
        "Communication is always hidden",
        "check_step_seconds",
        says="if not, their sum",
        also=("check_fastest",),
        replace={'if scheme["hidden"] else computation + communication': "if True else 0.0"},
    ),
    Mutant(
        "The scheme with the fewest bytes wins",
        "check_fastest",
        says="the scheme with the fewest bytes",
        replace={
            "key=lambda name: step_seconds(schemes[name], alpha, beta, backward)": 'key=lambda name: schemes[name]["nbytes"]'
        },
    ),
    Mutant(
        "Of equal schemes the last one wins",
        "check_equal_schemes",
        says="the first of two equal schemes",
        replace={"return min(schemes, key": "return min(reversed(schemes), key"},
    ),
    # -- quiz
    Mutant(
        "Overlap is not the first thing to try",
        "quiz_q4",
        says="overlap costs nothing",
        replace={'"q4": "d"': '"q4": "a"'},
    ),
]

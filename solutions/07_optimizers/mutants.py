"""Planted mistakes of the optimisers, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- rule
    Mutant(
        "Every group has the options of the first one",
        "check_groups",
        says="a parameter after the step",
        replace={"self.state[parameter], group)": "self.state[parameter], self.param_groups[0])"},
    ),
    Mutant(
        "One state for all parameters",
        "check_states",
        says="Parameters share one state",
        replace={"self.state[parameter], group)": 'self.state["all"], group)'},
    ),
    Mutant(
        "One state for each group",
        "check_states",
        says="Parameters share one state",
        replace={"self.state[parameter], group)": 'self.state[group["params"][0]], group)'},
    ),
    Mutant(
        "A missing gradient ends the loop over its group",
        "check_no_gradient",
        says="where a gradient is None in one step",
        replace={
            """
            if parameter.grad is not None:
                self.update(parameter, parameter.grad, self.state[parameter], group)
            """: """
            if parameter.grad is None:
                break
            self.update(parameter, parameter.grad, self.state[parameter], group)
            """
        },
    ),
    Mutant(
        "Autograd is switched off and never on again",
        "check_states",
        says="autograd records nothing",
        replace={
            """
            with torch.no_grad():
                for group in self.param_groups:
            """: """
            torch.set_grad_enabled(False)
            if True:
                for group in self.param_groups:
            """
        },
    ),
    Mutant(
        "The state is a new dict in each step",
        "check_states",
        says="is empty again in each step",
        replace={"self.state[parameter], group)": "{}, group)"},
    ),
    Mutant(
        "A missing gradient is a gradient of zeros, so the state counts a step",
        "check_no_gradient",
        says="where a gradient is None in one step",
        replace={
            """
            if parameter.grad is not None:
                self.update(parameter, parameter.grad, self.state[parameter], group)
            """: """
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.update(parameter, gradient, self.state[parameter], group)
            """
        },
    ),
    Mutant(
        "The states are in a dict of the class's own, which state_dict() does not save",
        "check_resume",
        says="After load_state_dict the state is empty",
        replace={
            "self.update = update": "self.update, self.kept = update, {}",
            "self.state[parameter], group)": "self.kept.setdefault(parameter, {}), group)",
        },
    ),
    Mutant(
        "The function is one of the options, so a checkpoint holds it",
        "check_resume",
        says="keep the function `update` out",
        replace={
            "super().__init__(params, options)": "super().__init__(params, {**options, 'update': update})"
        },
    ),
    # -- momentum
    Mutant(
        "The gradients are summed, as in torch.optim.SGD",
        "check_momentum",
        says="The gradients are summed",
        replace={
            'state["mean"].lerp_(gradient, 1 - group["beta"])': """
            state["mean"].mul_(group["beta"]).add_(gradient)
            """
        },
        question="momentum",
    ),
    Mutant(
        "The rate is inside the mean, so a change of it acts late",
        "check_momentum",
        says="the value after step",
        replace={
            'state["mean"].lerp_(gradient, 1 - group["beta"])': """
            state["mean"].lerp_(group["lr"] * gradient, 1 - group["beta"])
            """,
            'parameter -= group["lr"] * state["mean"]': 'parameter -= state["mean"]',
        },
        question="momentum",
    ),
    # -- adam
    Mutant(
        "The averages are not corrected",
        "check_direction",
        says="The averages start at 0",
        replace={
            'state["m"] / (1 - beta1 ** state["step"])': 'state["m"]',
            'state["v"] / (1 - beta2 ** state["step"])': 'state["v"]',
        },
    ),
    Mutant(
        "Only the mean is corrected, as on some slides",
        "check_direction",
        says="The average of the squares is not corrected",
        replace={'state["v"] / (1 - beta2 ** state["step"])': 'state["v"]'},
    ),
    Mutant(
        "The constant is inside the root",
        "check_epsilon",
        says="eps is inside the root",
        replace={'(corrected_v.sqrt() + group["eps"])': '(corrected_v + group["eps"]).sqrt()'},
    ),
    # -- adamw
    Mutant(
        "The decay is added to the gradient",
        "check_decoupled",
        says="The averages see the decay",
        replace={
            "adam_direction(gradient, state, group)": """
            adam_direction(gradient + group["weight_decay"] * parameter, state, group)
            """,
            'parameter *= 1 - group["lr"] * group["weight_decay"]': "",
        },
        question="adamw",
    ),
    Mutant(
        "The decay is not multiplied by the rate",
        "check_decoupled",
        says="not multiplied by the learning rate",
        replace={
            'parameter *= 1 - group["lr"] * group["weight_decay"]': 'parameter *= 1 - group["weight_decay"]'
        },
        question="adamw",
    ),
    # -- clip
    Mutant(
        "The norm after clipping is returned",
        "check_norm",
        says="This is the norm after clipping",
        replace={"return norm": "return min(norm, most)"},
    ),
    Mutant(
        "Each gradient is clipped by its own norm",
        "check_scaled",
        says="One norm for all gradients",
        replace={"gradient *= most / norm": "gradient *= min(1.0, most / gradient.norm().item())"},
    ),
    Mutant(
        "New tensors are put into the list",
        "check_scaled",
        says="put no new ones into the list",
        replace={
            """
            if norm > most:
                for gradient in present:
                    gradient *= most / norm
            """: """
            if norm > most:
                gradients[:] = [None if gradient is None else gradient * most / norm for gradient in gradients]
            """
        },
        also=("check_short",),
    ),
    Mutant(
        "Short gradients are stretched to the bound",
        "check_short",
        says="and are now longer",
        replace={"if norm > most:": "if norm > 0:"},
    ),
    # -- accumulate
    Mutant(
        "All parts weigh the same",
        "check_accumulated",
        says="A mean of means",
        replace={"loss_of(model, part) * len(part[0]) / samples": "loss_of(model, part) / len(parts)"},
    ),
    Mutant(
        "Each part is clipped",
        "check_clipped_once",
        says="Each part was clipped",
        replace={
            """
            for part in parts:
                (loss_of(model, part) * len(part[0]) / samples).backward()
            clip_([parameter.grad for parameter in model.parameters()], most)
            """: """
            total = [torch.zeros_like(parameter) for parameter in model.parameters()]
            for part in parts:
                optimizer.zero_grad()
                loss_of(model, part).backward()
                clip_([parameter.grad for parameter in model.parameters()], most)
                for old, parameter in zip(total, model.parameters()):
                    old.add_(parameter.grad, alpha=len(part[0]) / samples)
            for old, parameter in zip(total, model.parameters()):
                parameter.grad = old
            """
        },
    ),
    # -- layers
    Mutant(
        "The ratio of LARS lacks the decay in its denominator",
        "check_lars",
        says="The denominator of the ratio",
        replace={"(slope + decay * weight)": "slope"},
    ),
    Mutant(
        "LAMB decays as AdamW, outside of the norm",
        "check_lamb",
        says="The decay belongs to the update",
        replace={
            'update = adam_direction(gradient, state, group) + group["weight_decay"] * parameter': """
            update = adam_direction(gradient, state, group)
            """,
            'parameter -= group["lr"] * rescaled * update': """
            parameter -= group["lr"] * (rescaled * update + group["weight_decay"] * parameter)
            """,
        },
    ),
    Mutant(
        "LARS rescales vectors too",
        "check_vectors",
        says="has the ratio 1",
        replace={"if parameter.ndim > 1 and weight > 0 and slope > 0:": "if weight > 0 and slope > 0:"},
    ),
    Mutant(
        "A matrix of zeros has the ratio 0",
        "check_zeros",
        says="A matrix of zeros never moves",
        replace={
            "if parameter.ndim > 1 and size > 0 and length > 0 else 1.0": "if parameter.ndim > 1 else 1.0"
        },
    ),
    # -- lion
    Mutant(
        "The average moves before the sign is taken",
        "check_lion",
        says="take the old one",
        replace={
            'update = state["mean"].lerp(gradient, 1 - beta1).sign()': """
            state["mean"].lerp_(gradient, 1 - beta2)
            update = state["mean"].lerp(gradient, 1 - beta1).sign()
            """,
            """
            parameter -= group["lr"] * update
            state["mean"].lerp_(gradient, 1 - beta2)
            """: 'parameter -= group["lr"] * update',
        },
        question="lion",
    ),
    # -- orthogonal, muon
    Mutant(
        "The norm has no constant, so zeros become NaN",
        "check_zero",
        says="For a matrix of zeros",
        replace={"(x.norm() + 1e-7)": "x.norm()"},
    ),
    Mutant(
        "The matrix is divided by its largest singular value",
        "check_orthogonal",
        says="divided by its largest singular value",
        replace={"(x.norm() + 1e-7)": "(torch.linalg.matrix_norm(x, 2) + 1e-7)"},
    ),
    Mutant(
        "The momentum does not look ahead",
        "check_muon",
        says="Look one step ahead",
        replace={'gradient.lerp(state["mean"], group["beta"]).flatten(1)': 'state["mean"].flatten(1)'},
    ),
    Mutant(
        "The factor has the number of columns",
        "check_muon",
        says="the larger of rows and columns",
        replace={"max(ahead.shape)": "ahead.shape[1]"},
    ),
    Mutant(
        "Vectors are orthogonalised as matrices of one row",
        "check_muon_vectors",
        says="the value after step",
        replace={
            """
            if parameter.ndim < 2:
                adamw(parameter, gradient, state, group)
                return
            """: "",
            ".flatten(1)": ".reshape(len(parameter) if parameter.ndim > 1 else 1, -1)",
        },
    ),
    # -- verdict
    Mutant(
        "The difference is divided by the spread alone, whatever the number of runs",
        "check_verdict",
        says="differ by",
        replace={"abs(difference) <= bound * s * math.sqrt(1 / n + 1 / m)": "abs(difference) <= bound * s"},
    ),
    Mutant(
        "The two variances have the same weight, whatever the numbers of runs",
        "check_verdict",
        says="differ by",
        replace={
            "((n - 1) * stdev(ours) ** 2 + (m - 1) * stdev(theirs) ** 2) / (n + m - 2)": """
            (stdev(ours) ** 2 + stdev(theirs) ** 2) / 2
            """
        },
    ),
    Mutant(
        "A spread is estimated from three runs",
        "check_few_seeds",
        says="a claim needs at least 5 of each",
        replace={"if min(n, m) < 5:": "if min(n, m) < 2:"},
    ),
    Mutant(
        "A spread of 0 makes every difference certain",
        "check_copies",
        says="so the seed changes nothing",
        replace={"s == 0 or abs(difference)": "abs(difference)"},
    ),
    # -- eigenvalue
    Mutant(
        "The length of Hv is returned, which has no sign",
        "check_negative",
        says="The sign is lost",
        replace={"estimate = (v @ following).item()": "estimate = following.norm().item()"},
    ),
    Mutant(
        "The vector is not scaled, so the quotient is that of a long vector",
        "check_eigenvalue",
        says="the eigenvalue",
        replace={"v = v / v.norm()": "v = v / v.norm() ** 0.5"},
        also=("check_negative", "check_products"),
    ),
    Mutant(
        "The product is computed twice in each step",
        "check_products",
        says="one a step is enough",
        replace={"estimate = (v @ following).item()": "estimate = (v @ product(v)).item()"},
    ),
]

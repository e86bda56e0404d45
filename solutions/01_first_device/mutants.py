"""Planted mistakes of One device, used well, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- timed
    Mutant(
        "The clock is read before the device has finished",
        "check_times",
        says="it shows the time to fill the queue",
        replace={
            """
            synchronize()
            times.append(clock() - begin)
            """: "times.append(clock() - begin)"
        },
        also=("check_no_warmup",),
    ),
    Mutant(
        "The device is not waited for before the clock is read",
        "check_times",
        says="the work of the warm-up that was still in the queue",
        replace={
            """
            synchronize()
            begin = clock()
            """: "begin = clock()"
        },
        also=("check_no_warmup",),
    ),
    Mutant(
        "The warm-up is left out",
        "check_warmup",
        says="is that of a step of the warm-up",
        replace={"for _ in range(warmup):": "for _ in range(0):"},
        also=("check_times",),
    ),
    Mutant(
        "The clock is read before the wait",
        "check_times",
        says="read the clock after synchronize()",
        replace={
            """
            synchronize()
            begin = clock()
            """: """
            begin = clock()
            synchronize()
            """
        },
        also=("check_no_warmup",),
    ),
    Mutant(
        "The mean of the steps is returned",
        "check_times",
        says="return the time of each step",
        replace={"return times": "return [sum(times) / len(times)] * len(times)"},
        also=("check_no_warmup",),
    ),
    # -- limits
    Mutant(
        "The largest number has the field of infinity",
        "check_largest",
        says="the exponent of infinity",
        replace={"(2 - eps) * 2.0**bias": "(2 - eps) * 2.0 ** (bias + 1)"},
    ),
    Mutant(
        "The largest number is a power of two",
        "check_largest",
        says="the mantissa of the largest number has all bits 1",
        replace={"(2 - eps) * 2.0**bias": "2.0**bias"},
    ),
    Mutant(
        "The largest mantissa has no leading 1",
        "check_largest",
        says="not 1 - eps",
        replace={"(2 - eps) * 2.0**bias": "(1 - eps) * 2.0**bias"},
    ),
    Mutant(
        "The bias is one too large",
        "check_smallest",
        says="(The bias is 2 ** (e - 1) - 1.)",
        replace={"bias = 2 ** (exponent_bits - 1) - 1": "bias = 2 ** (exponent_bits - 1)"},
        also=("check_largest",),
    ),
    Mutant(
        "The smallest normal number has the field 0",
        "check_smallest",
        says="the smallest normal number has the field 1",
        replace={'"smallest_normal": 2.0 ** (1 - bias)': '"smallest_normal": 2.0 ** -bias'},
    ),
    Mutant(
        "The subnormal numbers have the exponent of the field 0",
        "check_smallest",
        says="Subnormal numbers have the exponent 1 - bias",
        replace={"eps * 2.0 ** (1 - bias)": "eps * 2.0 ** -bias"},
    ),
    Mutant(
        "The smallest number is the smallest normal one",
        "check_smallest",
        says="subnormal ones are smaller",
        replace={"eps * 2.0 ** (1 - bias)": "2.0 ** (1 - bias)"},
    ),
    Mutant(
        "eps is half of the distance",
        "check_eps",
        says="half of the distance",
        replace={'"eps": eps': '"eps": eps / 2'},
    ),
    # -- unscale
    Mutant(
        "The gradients are multiplied by the scale",
        "check_unscaled",
        says="multiplied by the scale: divide",
        replace={"div_(scale)": "mul_(scale)"},
    ),
    Mutant(
        "The gradients are new tensors",
        "check_unscaled",
        says="the gradients are new tensors",
        replace={"parameter.grad.div_(scale)": "parameter.grad = parameter.grad / scale"},
    ),
    Mutant(
        "Only NaN is found",
        "check_finite",
        says="torch.isfinite tests both",
        replace={"torch.isfinite(parameter.grad).all()": "not torch.isnan(parameter.grad).any()"},
    ),
    Mutant(
        "Only the last parameter decides",
        "check_finite",
        says="return False",
        replace={"finite = finite and bool(": "finite = bool("},
    ),
    Mutant(
        "The loop ends at the first gradient that is not finite",
        "check_finite",
        says="the loop ends too early",
        replace={
            "finite = finite and bool(torch.isfinite(parameter.grad).all())": """
            if not torch.isfinite(parameter.grad).all():
                return False
            """
        },
    ),
    Mutant(
        "The iterator is read twice",
        "check_finite",
        says="an iterator can be read once",
        answer="""
        def unscale(parameters, scale):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
            return all(bool(torch.isfinite(parameter.grad).all()) for parameter in parameters if parameter.grad is not None)
        """,
    ),
    # -- scaler
    Mutant(
        "step divides the gradients a second time after unscale_",
        "check_true_steps",
        says="has divided a second time",
        replace={
            """
            if self._finite is None:
                self.unscale_(optimizer)
            """: "self.unscale_(optimizer)"
        },
    ),
    Mutant(
        "Only the first param group is unscaled",
        "check_true_steps",
        says="unscale the gradients of all groups",
        replace={"for group in optimizer.param_groups for": "for group in optimizer.param_groups[:1] for"},
    ),
    Mutant(
        "The loss is scaled in place",
        "check_true_steps",
        says="has changed the loss itself",
        replace={"return loss * self._scale": "return loss.mul_(self._scale)"},
    ),
    Mutant(
        "update does not forget that the gradients are unscaled",
        "check_true_steps",
        says="Forget it in update()",
        replace={
            """
            else:
                self._scale *= self._backoff
                self._good = 0
            self._finite = None
            """: """
            else:
                self._scale *= self._backoff
                self._good = 0
            """
        },
        also=("check_skipped", "check_scales", "check_resume"),
    ),
    Mutant(
        "An attribute hides the method scale",
        "check_true_steps",
        says="hides the method of the same name",
        replace={
            "self._scale, self._good = init_scale, 0": "self.scale, self._scale, self._good = init_scale, init_scale, 0"
        },
        also=("check_skipped", "check_scales", "check_resume"),
    ),
    Mutant(
        "The optimiser uses the scaled gradients",
        "check_true_steps",
        says="the optimiser has used the scaled gradients",
        replace={"unscale(parameters, self._scale)": "unscale(parameters, 1.0)"},
        also=("check_skipped",),
    ),
    Mutant(
        "After an overflow the infinite values become 0 and the step is made",
        "check_skipped",
        says="momentum moves the weights",
        replace={
            """
            if self._finite:
                optimizer.step()
            """: """
            if not self._finite:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad.zero_()
            optimizer.step()
            """
        },
    ),
    Mutant(
        "The step is made in spite of an overflow",
        "check_skipped",
        says="the weights are infinite or NaN",
        replace={
            """
            if self._finite:
                optimizer.step()
            """: "optimizer.step()"
        },
    ),
    Mutant(
        "An overflow does not restart the count of good steps",
        "check_scales",
        says="An overflow does not restart the count",
        replace={
            """
            self._scale *= self._backoff
            self._good = 0
            """: "self._scale *= self._backoff"
        },
    ),
    Mutant(
        "The scale grows after every good step from the first growth on",
        "check_scales",
        says="expected",
        replace={
            "self._good == self._interval": "self._good >= self._interval",
            """
            self._scale *= self._growth
            self._good = 0
            """: "self._scale *= self._growth",
        },
        also=("check_resume",),
    ),
    Mutant(
        "The scale falls by the growth factor",
        "check_scales",
        says="the backoff factor is",
        replace={"self._scale *= self._backoff": "self._scale /= self._growth * 3"},
        also=("check_resume",),
    ),
    Mutant(
        "The growth factor is always 2",
        "check_scales",
        says="expected",
        replace={"self._scale *= self._growth": "self._scale *= 2"},
        also=("check_resume",),
    ),
    Mutant(
        "The class inherits from PyTorch's scaler",
        "check_true_steps",
        says="neither inherit from it, nor keep one inside",
        answer="""
        class LossScaler(torch.amp.GradScaler):
            def __init__(self, **options):
                super().__init__("cpu", **options)
        """,
        also=("check_skipped", "check_scales", "check_resume"),
    ),
    Mutant(
        "The state stays in a global",
        "check_resume",
        says="has no attribute 'kept'",
        replace={
            'return {"scale": self._scale, "good": self._good}': """
            LossScaler.kept = {"scale": self._scale, "good": self._good}
            return {}
            """,
            'self._scale, self._good = state["scale"], state["good"]': """
            state = LossScaler.kept
            self._scale, self._good = state["scale"], state["good"]
            """,
        },
    ),
    Mutant(
        "The count is not part of the state",
        "check_resume",
        says="counts its good steps from 0",
        replace={'self._scale, self._good = state["scale"], state["good"]': 'self._scale = state["scale"]'},
    ),
    # -- mixed
    Mutant(
        "The scaled gradients are clipped",
        "check_mixed_weights",
        says="call scaler.unscale_ before clipping",
        replace={"scaler.unscale_(optimizer)": ""},
    ),
    Mutant(
        "The gradients are not clipped",
        "check_mixed_weights",
        says="The gradients are not clipped",
        replace={"torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)": ""},
    ),
    Mutant(
        "The gradients are never cleared",
        "check_mixed_weights",
        says="clear them first",
        replace={"optimizer.zero_grad()": ""},
    ),
    Mutant(
        "Forward runs outside of autocast",
        "check_autocast",
        says="belongs inside of torch.autocast",
        replace={
            """
            with torch.autocast(images.device.type, dtype=dtype):
                loss = F.cross_entropy(model(images), labels)
            """: "loss = F.cross_entropy(model(images), labels)"
        },
    ),
    Mutant(
        "The loss is computed outside of autocast",
        "check_autocast",
        says="F.cross_entropy belongs inside",
        replace={
            """
            with torch.autocast(images.device.type, dtype=dtype):
                loss = F.cross_entropy(model(images), labels)
            """: """
            with torch.autocast(images.device.type, dtype=dtype):
                logits = model(images)
            loss = F.cross_entropy(logits, labels)
            """
        },
    ),
    Mutant(
        "autocast gets no dtype",
        "check_mixed_weights",
        says="pass `dtype` to torch.autocast",
        replace={"torch.autocast(images.device.type, dtype=dtype)": "torch.autocast(images.device.type)"},
    ),
    Mutant(
        "Backward runs inside of autocast",
        "check_autocast",
        says="backward ran inside of autocast",
        replace={
            "scaler.scale(loss).backward()": """
            with torch.autocast(images.device.type, dtype=dtype):
                scaler.scale(loss).backward()
            """
        },
    ),
    Mutant(
        "autocast is that of the CPU on every device",
        "check_autocast",
        says="pass the type of the device of the images",
        replace={"torch.autocast(images.device.type, dtype=dtype)": 'torch.autocast("cpu", dtype=dtype)'},
    ),
    Mutant(
        "The scaled loss is returned",
        "check_autocast",
        says="the scaled one",
        replace={"return loss.item()": "return scaler.scale(loss).item()"},
    ),
    Mutant(
        "The scale is never updated",
        "check_updated",
        says="call scaler.update()",
        replace={
            "scaler.update()": "scaler.unscale_  # not called",
            "scaler.step(optimizer)": "scaler.step(optimizer); scaler._per_optimizer_states.clear()",
        },
    ),
    Mutant(
        "The optimiser's own step is called",
        "check_updated",
        says="use scaler.step(optimizer)",
        replace={"scaler.step(optimizer)": "optimizer.step()"},
    ),
    # -- masters
    Mutant(
        "The 16-bit weights are updated themselves",
        "check_masters",
        says="update the master itself",
        replace={
            """
            master.sub_(rate * weight.grad.float())
            weight.copy_(master)
            """: "weight.sub_(rate * weight.grad)"
        },
        also=("check_fp16", "check_product"),
    ),
    Mutant(
        "The name of the weight gets another tensor",
        "check_masters",
        says="Use weight.copy_(master)",
        replace={"weight.copy_(master)": "weight = master.to(weight.dtype)"},
        also=("check_fp16",),
    ),
    Mutant(
        "The master is made anew in each step",
        "check_masters",
        says="never make it anew from the weight",
        replace={
            "master.sub_(rate * weight.grad.float())": "master.copy_(weight.float()).sub_(rate * weight.grad.float())"
        },
        also=("check_fp16", "check_product"),
    ),
    Mutant(
        "The product is rounded to 16 bits",
        "check_product",
        says="convert the gradient to fp32 first",
        replace={"rate * weight.grad.float()": "(rate * weight.grad).float()"},
    ),
    # -- strides
    Mutant(
        "The two layouts are exchanged",
        "check_contiguous",
        says="the other layout",
        replace={"if channels_last:": "if not channels_last:"},
        also=("check_channels_last",),
    ),
    Mutant(
        "The next row is one height further",
        "check_channels_last",
        says="not one height",
        replace={"1, width * channels, channels": "1, height * channels, channels"},
    ),
    # -- line
    Mutant(
        "The fixed part is forgotten",
        "check_line",
        says="subtract the fixed part",
        replace={"(capacity - fixed) / per_sample": "capacity / per_sample"},
        also=("check_line_edges",),
    ),
    Mutant(
        "The smaller measurement is the fixed part",
        "check_line",
        says="is taken for the fixed part",
        replace={"fixed = less - per_sample * small": "fixed = less"},
        also=("check_line_edges",),
    ),
    Mutant(
        "The result is rounded up",
        "check_line",
        says="rounded up",
        replace={"math.floor(": "math.ceil("},
        also=("check_line_edges",),
    ),
    Mutant(
        "The points must come in order",
        "check_line",
        says="depends on the order of the two points",
        also=("check_line_edges",),
        replace={
            "sorted(measured.items())": "measured.items()",
            "per_sample = (more - less) / (large - small)": "per_sample = (more - less) / abs(large - small)",
        },
    ),
    Mutant(
        "A card that is too small gives a negative batch",
        "check_line",
        says="not even one sample fits",
        also=("check_line_edges",),
        replace={
            "max(0, math.floor((capacity - fixed) / per_sample))": "math.floor((capacity - fixed) / per_sample)"
        },
    ),
    # -- search
    Mutant(
        "The search ends after the doubling",
        "check_search",
        says="the last of the doubled sizes",
        replace={"while bad - good > 1:": "while False:"},
        also=("check_search_edges", "check_limit"),
    ),
    Mutant(
        "The bisection does not end",
        "check_search",
        says="the search does not end",
        replace={"while bad - good > 1:": "while bad > good:"},
        also=("check_search_edges", "check_limit", "check_tries"),
    ),
    Mutant(
        "Every batch is tried in turn",
        "check_tries",
        says="doubling and bisection need at most",
        answer="""
        def largest_batch(fits, limit):
            batch = 0
            while batch < limit and fits(batch + 1):
                batch += 1
            return batch
        """,
    ),
    Mutant(
        "A batch above the limit is tried",
        "check_limit",
        says="there are only",
        replace={"while bad <= limit and fits(bad):": "while good < limit and fits(bad):"},
    ),
    Mutant(
        "The smallest batch that fails is returned",
        "check_search",
        says="does not fit",
        replace={"return good": "return bad"},
        also=("check_search_edges", "check_limit"),
    ),
    Mutant(
        "An illegal memory access counts as too little memory",
        "check_fits",
        says="Catch torch.OutOfMemoryError only",
        replace={
            "except torch.OutOfMemoryError:": """
            except RuntimeError as error:
                if "memory" not in str(error) and not isinstance(error, torch.OutOfMemoryError):
                    raise
            """
        },
    ),
    Mutant(
        "Every RuntimeError counts as too little memory",
        "check_fits",
        says="Catch torch.OutOfMemoryError only",
        replace={"except torch.OutOfMemoryError:": "except RuntimeError:"},
    ),
    # -- quiz
    Mutant("Wrong answer to q1", "quiz_q1", says="in the queue", replace={'"q1": "c"': '"q1": "d"'}),
    Mutant("Wrong answer to q2", "quiz_q2", says="exponent bits", replace={'"q2": "a"': '"q2": "b"'}),
    Mutant("Wrong answer to q3", "quiz_q3", says="true gradients", replace={'"q3": "d"': '"q3": "a"'}),
    Mutant("Wrong answer to q4", "quiz_q4", says="rounded away", replace={'"q4": "b"': '"q4": "a"'}),
    Mutant("Wrong answer to q5", "quiz_q5", says="optimiser state", replace={'"q5": "c"': '"q5": "a"'}),
]
